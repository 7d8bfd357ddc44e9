"""Lines of ``trainmedic status``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
import pytest
from click.testing import CliRunner

from trainmedic_core.cli import exits
from trainmedic_server.cli import status

OK = {"ok": True, "detail": "answers"}
AWAY = {"ok": False, "detail": "does not answer since 2026-01-31T12:00:00Z; the server's log has the reason"}


def lines_with(slurm: dict[str, Any] | None, **others: dict[str, Any]) -> list[str]:
    unknown = "the server does not answer"
    ready = {"ready": True, "store": OK, "redis": OK, "playbooks": OK, "slurm": slurm, **others}
    report = dict.fromkeys(("now", "open_runs", "undos", "playbooks", "agents", "jobs", "unproven"), unknown)
    return list(status._lines({**report, "server": "http://trainmedic", "version": "1", "ready": ready}))


@pytest.mark.parametrize(
    ("slurm", "line"), [(OK, "  slurm        ok: answers"), (AWAY, f"  slurm        NOT OK: {AWAY['detail']}")]
)
def test_slurm_has_a_line_with_the_time_since_which_it_is_unavailable(slurm: dict[str, Any], line: str) -> None:
    """The server is ready all the same."""
    assert line in lines_with(slurm)
    assert "ready      yes" in lines_with(slurm)


def test_a_server_without_slurm_shows_no_slurm_line() -> None:
    assert not any("slurm" in line for line in lines_with(None))


class Large:
    """A server whose lists have two pages."""

    url = "http://trainmedic"

    def get(self, path: str, params: Mapping[str, Any] | None = None, accept: tuple[int, ...] = ()) -> Any:
        match path:
            case "ready":
                return {"ready": True}
            case "health":
                return {"version": "1"}
            case "agents" | "jobs":
                last = {"items": [{"name": "n1001"}]}
                return last if params else {"items": [{"name": f"n{number}"} for number in range(1000)], "next": "n999"}
        raise exits.NotAllowed("a token for this is missing")


def test_all_connected_agents_and_jobs_are_counted() -> None:
    """Those beyond the first page count too."""

    @click.command()
    def show() -> None:
        status.status.callback.__wrapped__(Large(), "text")  # type: ignore[union-attr]

    lines = CliRunner().invoke(show).output.splitlines()
    assert "agents     1001 connected: 'trainmedic agents'" in lines
    assert "jobs       1001 connected: 'trainmedic jobs'" in lines


def test_a_rejected_tokens_file_has_a_line() -> None:
    """Removed tokens stay valid then."""
    assert "  tokens       NOT OK: is invalid" in lines_with(None, tokens={"ok": False, "detail": "is invalid"})
