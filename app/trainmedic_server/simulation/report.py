"""Shows the simulation's results as text for a terminal: uncoloured, unwrapped lines, so that they can be searched."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from trainmedic_server.domain.plain_text import json_text, visible
from trainmedic_server.simulation.explain import Explanation, StepPlan
from trainmedic_server.simulation.suite import FileResult


def explanations(of_alerts: Sequence[Explanation]) -> Iterator[str]:
    """Each alert with the playbooks that react to it, then those that do not and why."""
    # One alert's explanations follow each other. Two alerts may be equal, so they are told apart by identity.
    for number, (_, group) in enumerate(itertools.groupby(of_alerts, lambda explanation: id(explanation.alert))):
        of_alert = list(group)
        if number:
            yield ""
        alert = of_alert[0].alert
        yield _plain(f"alert {alert.name or '(without a name)'}, {alert.status}: {_pairs(alert.labels)}")
        for explanation in sorted(of_alert, key=lambda explanation: not explanation.matched):
            yield from map(_plain, _explanation(explanation))


def _explanation(explanation: Explanation) -> Iterator[str]:
    if not explanation.matched:
        yield f"  {explanation.playbook}: does not react: {explanation.why}"
        return
    yield f"  {explanation.playbook}: reacts ({explanation.source})"
    yield f"    target:   {explanation.target or 'none'}"
    yield f"    mode:     {explanation.mode}"
    yield f"    decision: {explanation.decision}{f' ({explanation.why})' if explanation.why else ''}"
    for guard in explanation.guards:
        yield f"    guard:    {guard}"
    for number, step in enumerate(explanation.steps, start=1):
        yield from _step(number, step)


def _step(number: int, step: StepPlan) -> Iterator[str]:
    phase = {"on_success": "if the run succeeds, ", "on_failure": "if the run fails, "}.get(step.phase, "")
    yield f"    {number:>2}. {phase}{step.id}: {step.what} — {step.verdict}{f' ({step.why})' if step.why else ''}"
    if step.params is not None:
        yield f"        with: {json_text(step.params, sort_keys=True)}"
    if step.undo is not None:
        yield f"        undo: {step.undo}"


def results(files: Iterable[FileResult], *, verbose: bool = False) -> Iterator[str]:
    """A line for each file with its failures below it, and the sum at the end; each passed test where `verbose`."""
    tests = failed = broken = 0
    seconds = 0.0
    for file in files:
        broken += bool(file.problems)
        bad = [result for result in file.results if result.failures]
        tests += len(file.results)
        failed += len(bad)
        seconds += sum(result.seconds for result in file.results)
        yield f"{'FAIL' if not file.passed else 'ok  '} {file.path} ({len(file.results)} tests)"
        for problem in file.problems:
            yield f"  {problem}"
        for result in file.results:
            if verbose and not result.failures:
                yield f"  ok   {result.name}"
            for failure in result.failures:
                yield "  " + visible(str(failure), keep="\n")
    rate = f", {tests / seconds:.0f} a second" if seconds else ""
    unread = f", {broken} files with mistakes" if broken else ""
    yield f"{tests} tests, {failed} failed{unread}{rate}"


def _pairs(labels: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in sorted(labels.items()) if name != "alertname")


def _plain(line: str) -> str:
    """The text as one line, whatever a label holds."""
    return visible(line)
