"""The form of each kind of event, as the store and the API have it, is a promise to whoever reads a history.

``event_forms.jsonl`` has events as releases before the typed kinds wrote them, a line ``[kind, data]`` each. That of
``target_busy``, which no test brought about, follows the other decisions.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from trainmedic_server.adapters.sql_store.columns import encode_json
from trainmedic_server.domain.event_codec import EVENT_KINDS, content_of, recorded
from trainmedic_server.domain.event_kinds import ApprovalRequested, Closed, JobFailed, LeaseLost, UndoDone
from trainmedic_server.domain.run import Event, Status

AT = datetime(2026, 1, 1, tzinfo=UTC)
FORMS: list[tuple[str, dict[str, Any]]] = [
    json.loads(line) for line in Path(__file__).with_name("event_forms.jsonl").read_text(encoding="utf-8").splitlines()
]
SOURCE = Path(__file__).parents[2] / "app" / "trainmedic_server"


def test_each_recorded_kind_has_a_form() -> None:
    """A kind that is added must get one too."""
    assert {kind for kind, _ in FORMS} == set(EVENT_KINDS)


@pytest.mark.parametrize(("kind", "data"), FORMS, ids=[f"{kind}-{number}" for number, (kind, _) in enumerate(FORMS)])
def test_an_event_is_written_as_it_was_read(kind: str, data: dict[str, Any]) -> None:
    """It has the same members in the same order, to the byte."""
    event = Event(kind, AT, "run", "ann", data)
    content = content_of(event)
    assert content is not None
    assert recorded(content, AT, "run", "ann") == event
    assert encode_json(recorded(content, AT).data) == encode_json(data)


def test_members_missing_from_an_earlier_release_read_as_none() -> None:
    """Approvals, for example, had no terms once."""
    event = Event("approval_requested", AT, "run", data={"step": "ask", "message": "Cap?", "deadline": None})
    assert content_of(event) == ApprovalRequested("ask", "Cap?", None, None, None, None, None, None, None)


def test_members_of_a_later_release_are_ignored_but_shown() -> None:
    """This happens during rolling upgrades: `Event.data` has what the row has."""
    data = {"later": [1], "step": "cap", "command_id": "c", "place": "n1", "why": None}
    event = Event("lease_lost", AT, "run", data=data)
    assert content_of(event) == LeaseLost("cap", "c", "n1", None)
    assert event.data == data


@pytest.mark.parametrize("data", [{"reason": None}, {"status": "SIGKILL", "restarts": "yes"}, {"attempt": None}])
def test_an_unreadable_member_hides_no_other(data: dict[str, Any]) -> None:
    """It counts as missing: a job's failure counts, whatever a row says about its rank."""
    event = Event("job_failed", AT, data={"job": "llm-1", "rank": 3, **data})
    assert content_of(event) == JobFailed("llm-1", rank=3)


def test_a_decision_of_a_later_release_does_not_hide_the_end_of_a_run() -> None:
    """The decision reads as none."""
    event = Event("closed", AT, "run", data={"status": "not_started", "message": "m", "decision": "quarantined"})
    assert content_of(event) == Closed(Status.NOT_STARTED, "m")


@pytest.mark.parametrize(
    ("kind", "data"),
    [("card_replaced", {}), ("undo_done", {"step": 1, "action": "a", "output": {}}), ("undo_done", {}), ("paused", {})],
)
def test_an_unknown_event_has_no_content(kind: str, data: dict[str, Any]) -> None:
    """Kinds of a later release and rows that no release wrote are shown, but nothing acts on them."""
    assert content_of(Event(kind, AT, data=data)) is None


def test_outputs_are_written_unchanged() -> None:
    """They belong to an action, so nothing in them is converted."""
    output = {"at": "2026-01-01T00:00:00Z", "gpus": [1, 2], "n": 1, "share": 1.0, "nothing": None}
    assert recorded(UndoDone("s", "uncap", output), AT).data["output"] == output


def test_only_the_codec_and_the_store_create_events() -> None:
    """This way no event has a kind or a member that is missing from the reference."""
    makers = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"(?<![\w.])Event\(", re.sub(r'"""(?s:.*?)"""', "", path.read_text(encoding="utf-8")))
    }
    assert makers == {"domain/run.py", "domain/event_codec.py", "adapters/sql_store/mapping.py"}
