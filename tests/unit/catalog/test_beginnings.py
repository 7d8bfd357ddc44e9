"""Checks of playbooks that begin without an alert."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.unit.catalog.actions import TestActions, library, problems_of
from trainmedic_server.catalog.library import Library
from trainmedic_server.simulation import check

SCHEDULED = """playbook: p
on: {schedule: 0 3 * * 2, timezone: Europe/Berlin}
target: {job: "{{ vars.job }}"}
vars: {job: llm-1}
steps:
  - {id: a, action: test.tell, with: {message: "at {{ now }}"}}
"""


def test_a_scheduled_playbook_loads() -> None:
    """Its target needs no labels."""
    assert problems_of(SCHEDULED) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('{job: "{{ vars.job }}"}', "node", "write target: {node: NAME}, or a group such as {nodes: {name: NAME}}"),
        ("vars.job", "labels.job", "there is no name 'labels' here"),
        ("steps:\n", "steps:\n  - {wait_for: resolved, timeout: 5m}\n", "needs an alert, and a schedule starts"),
        ("now }}'}", "now }}'}, undo: on_resolve", "undo: on_resolve needs an alert, and a schedule starts"),
        ("0 3 * * 2", "0 3 * * 8", "is not a schedule"),
        ("0 3 * * 2", "0 0 30 2 *", "bad day-of-month"),
    ],
)
def test_a_mistake_in_a_schedule_is_reported(old: str, new: str, message: str) -> None:
    """The message states the correction."""
    text = SCHEDULED.replace('"at {{ now }}"', "'at {{ now }}'")
    assert old in text
    found = problems_of(text.replace(old, new, 1))
    assert any(message in each for each in found), found


ENDED = """playbook: p
on: {run: {playbook: [a, b], status: failed}, when: ended_run.node == labels.node}
target: node
steps:
  - {id: a, action: test.tell, with: {message: "{{ ended_run.message }}"}}
"""


def test_a_playbook_triggered_by_ended_runs_loads() -> None:
    """Conditions see the ended run, and the labels of its alert."""
    assert problems_of(ENDED) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ended_run.message", "ended_run.mesage", "an ended run has no 'mesage'; did you mean 'message'?"),
        ("status: failed", "status: timed_out", "status"),
        (", status: failed", "", "'status' is missing"),
        ("on: {run", "on: {alert: A, run", "names one beginning: alert or run, not both"),
        ("when: ended", "proof: shipped_rule, when: ended", "proof is given by alerts; run has none"),
        ('message }}"}', 'message }}"}, undo: on_resolve', "needs an alert, and the end of a run starts"),
    ],
)
def test_a_mistake_about_ended_runs_is_reported(old: str, new: str, message: str) -> None:
    """The message states the correction."""
    assert old in ENDED
    found = problems_of(ENDED.replace(old, new, 1))
    assert any(message in each for each in found), found


def chained(name: str, after: str) -> str:
    return f"playbook: {name}\non: {{run: {{playbook: {after}, status: failed}}}}\n{ENDED[ENDED.index('target') :]}"


def library_of(folder: Path, files: Mapping[str, str]) -> Library:
    for name, text in files.items():
        (folder / name).write_text(text)
    return library(folder)


def test_playbooks_that_start_each_other_are_rejected(tmp_path: Path) -> None:
    """All in the ring are rejected; one that only follows it is fine. A loaded version stays."""
    files = {"a.yaml": chained("a", "b"), "b.yaml": chained("b", "x"), "c.yaml": chained("c", "a")}
    loaded = library_of(tmp_path, files)
    assert loaded.problems == ()
    (tmp_path / "b.yaml").write_text(chained("b", "a"))
    loaded.reload()
    assert sorted(each.message for each in loaded.problems) == [
        "on.run: its runs would start each other without end: a → b → a; remove one 'on: run'",
        "on.run: its runs would start each other without end: b → a → b; remove one 'on: run'",
    ]
    assert [each.definition.begins_with for each in loaded.all()] == [("run:b",), ("run:x",), ("run:a",)]
    fresh = library_of(tmp_path, {})
    assert [each.definition.name for each in fresh.all()] == ["c"]


def test_a_loaded_version_that_closes_another_ring_is_dropped_alone(tmp_path: Path) -> None:
    """The other playbook of that ring has no fault. It was dropped too, without a problem, until a file changed."""
    loaded = library_of(tmp_path, {"a.yaml": chained("a", "b"), "b.yaml": chained("b", "x")})
    files = {"a.yaml": chained("a", "c"), "b.yaml": chained("b", "a"), "c.yaml": chained("c", "a")}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    loaded.reload()
    assert [each.definition.name for each in loaded.all()] == ["b"]
    assert [Path(each.file).name for each in loaded.problems] == ["a.yaml", "c.yaml"]


def test_a_playbook_that_starts_itself_is_rejected(tmp_path: Path) -> None:
    """The shortest ring."""
    assert "a → a" in library_of(tmp_path, {"a.yaml": chained("a", "a")}).problems[0].message


def test_an_unknown_playbook_name_is_a_warning(tmp_path: Path) -> None:
    """It may be loaded elsewhere."""
    (tmp_path / "a.yaml").write_text(chained("after", "cappp"))
    (tmp_path / "b.yaml").write_text(chained("cap", "cap2").replace("cap2", "after2"))
    told = [each.message for each in check.check([tmp_path], TestActions()).warnings]
    assert "warning: on.run: there is no playbook 'cappp' here; did you mean 'cap'?" in told


def test_mistakes_about_events_are_reported() -> None:
    """An event has labels, and no alert that proves or resolves anything."""
    text = ENDED.replace(
        "{run: {playbook: [a, b], status: failed}, when: ended_run.node == labels.node}", "{event: x}"
    ).replace("ended_run.message", "labels.message")
    assert problems_of(text) == []
    undo = text.replace('message }}"}', 'message }}"}, undo: on_resolve')
    assert any("needs an alert, and an event starts this playbook" in each for each in problems_of(undo))
    assert any(
        "event has none" in each for each in problems_of(text.replace("{event: x}", "{event: x, proof: shipped_rule}"))
    )
    assert any("event" in each for each in problems_of(text.replace("{event: x}", "{event: a/b}")))
