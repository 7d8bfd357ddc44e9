"""Finds the names of steps, actions and playbooks in a test file that do not exist. Pure.

Who calls it: ``suite``, before it runs a file's tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from trainmedic_core.problems import DocumentPath, FileProblem, did_you_mean
from trainmedic_server.domain.playbook import APPROVAL
from trainmedic_server.engine import step_sequence
from trainmedic_server.ports.actions import Actions
from trainmedic_server.ports.playbooks import CompiledPlaybook
from trainmedic_server.simulation.suite_format import RunExpected, Suite


def problems(suite: Suite, playbooks: Sequence[CompiledPlaybook], actions: Actions) -> Iterator[FileProblem]:
    """A problem for each step, action and playbook that a test names and that does not exist.

    A reply or an expectation for it would never be used, so that the test would pass without testing it.
    """
    if not playbooks:
        return
    playbook_names = {playbook.definition.name for playbook in playbooks}
    states = [state for playbook in playbooks for state in step_sequence.initial_steps(playbook, ask_first=False)]
    step_ids = {state.id for state in states}
    undos = {f"{step_id}.undo" for step_id in step_ids}
    reply_keys = {*step_ids, *undos, *(state.action for state in states if state.action), *actions.names()}
    for index, test in enumerate(suite.spec.tests):
        path: DocumentPath = ("tests", index)
        for key in test.replies:
            if key not in reply_keys:
                yield _no_such(suite, (*path, "replies", key), "step or action", key, reply_keys)
        for number, check in enumerate(test.expect):
            for run_number, run in enumerate(check.runs or ()):
                run_path = (*path, "expect", number, "runs", run_number)
                yield from _in_run(suite, run_path, run, step_ids, playbook_names)


def _in_run(
    suite: Suite, path: DocumentPath, run: RunExpected, step_ids: set[str], playbook_names: set[str]
) -> Iterator[FileProblem]:
    for step_id in run.steps:
        if step_id not in {*step_ids, APPROVAL}:
            yield _no_such(suite, (*path, "steps", step_id), "step", step_id, step_ids)
    if run.playbook is not None and run.playbook not in playbook_names:
        yield _no_such(suite, (*path, "playbook"), "playbook", run.playbook, playbook_names)


def _no_such(suite: Suite, path: DocumentPath, kind: str, name: str, existing: Iterable[str]) -> FileProblem:
    message = f"there is no {kind} {name!r} in the playbooks under test{did_you_mean(name, existing)}"
    return suite.problem(path, message, at_key=kind != "playbook")
