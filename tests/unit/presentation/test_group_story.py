"""The story of a group's parent run tells what its members did, and claims no more."""

from __future__ import annotations

from typing import Any

import pytest

from trainmedic_server.presentation import run_story

BASE: dict[str, Any] = {
    "alert_name": "PDUOverload",
    "target": "gpus:rack=r1",
    "alerts": [{"resolved_at": None}],
    "steps": [],
    "message": "",
}


@pytest.mark.parametrize(
    ("changes", "happened", "changed"),
    [
        (
            {"status": "awaiting_approval", "message": "Cap?", "group": {"total": 4, "not_begun": 4}},
            "has not begun to work on a group of 4 members: 4 not begun; it asks: Cap?",
            "Nothing so far.",
        ),
        (
            {"status": "succeeded", "acted_at": "x", "message": "m", "group": {"total": 4, "succeeded": 4, "owing": 4}},
            "worked on a group of 4 members: 4 succeeded; the run succeeded, and the alert still fires.",
            "What its members changed is on their pages. 4 of them owe an undo.",
        ),
        (
            {"status": "waiting", "acted_at": "x", "group": {"total": 4, "succeeded": 2, "open": 2, "owing": 1}},
            "Trainmedic worked on a group of 4 members: 2 succeeded, 2 open; the alert still fires.",
            "1 of those that ended owes an undo; 2 still at work may owe one.",
        ),
        (
            {"status": "waiting", "acted_at": "x", "group": {"total": 1, "open": 1}},
            "a group of 1 member: 1 open;",
            "None of those that ended owes an undo; 1 still at work may owe one.",
        ),
        (
            {"status": "failed", "acted_at": "x", "message": "2 members failed", "group": {"total": 4, "failed": 2}},
            "the run failed: 2 members failed; the alert still fires.",
            "None of them owes an undo.",
        ),
        (
            {"status": "observed", "message": "would have applied a to 4 members", "group": {"total": 4}},
            "Trainmedic changed nothing; it would have applied a to 4 members.",
            "Nothing so far.",
        ),
    ],
)
def test_a_group_is_told_by_its_counts(changes: dict[str, Any], happened: str, changed: str) -> None:
    """Not as a run without steps, which would have changed nothing."""
    story = run_story.story({**BASE, **changes})
    assert happened in story.happened
    assert " ".join(story.changed).endswith(changed)
