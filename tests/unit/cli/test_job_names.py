"""What is said where a command names a job of which nothing is known."""

from __future__ import annotations

from typing import Any

import pytest

from trainmedic_core.cli import exits
from trainmedic_server.cli import client as clients
from trainmedic_server.cli import history as history_commands
from trainmedic_server.cli.client import Client


class Known:
    """A server that knows these."""

    def __init__(self, **known: list[dict[str, Any]]) -> None:
        self._known = known

    def get(self, path: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"items": self._known.get(path, [])}


@pytest.mark.parametrize(
    ("known", "job", "said"),
    [
        ({"jobs": [{"name": "llm-1"}]}, "llm-1", ""),
        ({"jobs": [], "history": [{}]}, "llm-1", ""),
        ({"jobs": [], "findings": [{}]}, "llm-1", ""),
        (
            {"jobs": [{"name": "llama-70b"}]},
            "lama-70b",
            "job 'lama-70b' is unknown: it is not connected and has no runs or findings; did you mean 'llama-70b'?",
        ),
        ({}, "x\x1b[2J", "job 'x\\x1b[2J' is unknown: it is not connected and has no runs or findings"),
    ],
)
def test_an_unknown_job_name_raises_a_doubt(known: Any, job: str, said: str) -> None:
    """A job is known if it is connected, in the history or in findings; else the nearest connected one is suggested."""
    client: Client = Known(**known)  # type: ignore[assignment]
    assert clients.unknown_job_note(client, job) == said


def test_jobs_of_all_pages_are_known() -> None:
    class Paged:
        def get(self, path: str, params: dict[str, Any]) -> dict[str, Any]:
            if path != "jobs":
                return {"items": []}
            return {"items": [{"name": "z"}]} if "cursor" in params else {"items": [{"name": "a"}], "next": "a"}

    client: Client = Paged()  # type: ignore[assignment]
    assert clients.unknown_job_note(client, "z") == ""
    assert clients.unknown_job_note(client, "y")


def test_an_unloaded_playbook_is_reported_with_the_nearest_name() -> None:
    """A filter by a misspelt name finds nothing, which alone would look like a quiet server."""
    client: Client = Known(playbooks=[{"name": "training-loss-spike"}])  # type: ignore[assignment]
    assert clients.unknown_playbook_note(client, "training-loss-spike") == ""
    doubt = clients.unknown_playbook_note(client, "trainig-loss-spike")
    assert doubt == "playbook 'trainig-loss-spike' is not loaded; did you mean 'training-loss-spike'?"


def test_a_hint_that_the_server_cannot_give_does_not_end_the_history() -> None:
    """Jobs are read from Redis, which may be unavailable; the history is still available."""

    class WithoutRedis(Known):
        def get(self, path: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
            if path == "jobs":
                raise exits.Unreachable("Redis does not answer. Try again.")
            return super().get(path, params)

    client: Client = WithoutRedis(playbooks=[{"name": "hot"}])  # type: ignore[assignment]
    notes = history_commands._unknown_names(client, {"job": ["llm-1"], "playbook": ["hto"]})
    assert list(notes) == ["playbook 'hto' is not loaded; did you mean 'hot'?"]
