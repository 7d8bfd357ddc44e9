"""What the simulation found, as text for a terminal. No colour, no width: lines that can be searched."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from trainmedic_server.simulation.explain import Explanation, StepPlan
from trainmedic_server.simulation.suite import FileResult

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


def explanations(found: Sequence[Explanation]) -> Iterator[str]:
    """Each alert with the playbooks that react to it, then those that do not and why."""
    before = None
    for alert in dict.fromkeys(id(each.alert) for each in found):
        about = [each for each in found if id(each.alert) == alert]
        if before is not None:
            yield ""
        before = alert
        first = about[0].alert
        yield _plain(f"alert {first.name or '(without a name)'}, {first.status}: {_pairs(first.labels)}")
        for each in sorted(about, key=lambda each: not each.matched):
            yield from map(_plain, _explanation(each))


def _explanation(each: Explanation) -> Iterator[str]:
    if not each.matched:
        yield f"  {each.playbook}: does not react: {each.why}"
        return
    yield f"  {each.playbook}: reacts ({each.source})"
    yield f"    target:   {each.target or 'none'}"
    yield f"    mode:     {each.mode}"
    yield f"    decision: {each.decision}{f' ({each.why})' if each.why else ''}"
    for guard in each.guards:
        yield f"    guard:    {guard}"
    for number, step in enumerate(each.steps, start=1):
        yield from _step(number, step)


def _step(number: int, step: StepPlan) -> Iterator[str]:
    phase = "if the run fails, " if step.phase == "on_failure" else ""
    yield f"    {number:>2}. {phase}{step.id}: {step.what} — {step.verdict}{f' ({step.why})' if step.why else ''}"
    if step.params is not None:
        yield f"        with: {json.dumps(step.params, ensure_ascii=False, sort_keys=True)}"
    if step.undo is not None:
        yield f"        undo: {step.undo}"


def results(files: Iterable[FileResult], *, verbose: bool = False) -> Iterator[str]:
    """One line for each file, its failures below; each test where `verbose`; the sum at the end."""
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
                yield f"  {failure}"
    rate = f", {tests / seconds:.0f} a second" if seconds else ""
    unread = f", {broken} files with mistakes" if broken else ""
    yield f"{tests} tests, {failed} failed{unread}{rate}"


def _pairs(labels: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in sorted(labels.items()) if name != "alertname")


def _plain(line: str) -> str:
    """One line whatever a label holds."""
    return line.translate(_CONTROL)
