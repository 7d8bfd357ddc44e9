"""The tables of connected jobs and agents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
import pytest
from click.testing import CliRunner

from trainmedic_server.cli import connected
from trainmedic_server.cli.client import Client

AT = "2026-01-31T12:00:00Z"


class Connected:
    """A server with these jobs and agents."""

    def __init__(self, items: list[Mapping[str, Any]]) -> None:
        self._items = items

    def get(self, path: str, params: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        return {"at": AT, "lost": []} if path == "now" else {"items": self._items}


def table(items: list[Mapping[str, Any]], path: str, header: tuple[str, ...], cells: Any) -> list[dict[str, str]]:
    client: Client = Connected(items)  # type: ignore[assignment]

    @click.command()
    def show() -> None:
        connected.show(client, "table", path, "job", header, cells)

    head, *lines = CliRunner().invoke(show).output.splitlines()
    return [dict(zip(head.split(), line.split(), strict=True)) for line in lines]


@pytest.mark.parametrize(
    ("members", "ranks", "gpus"),
    [
        ({"details": {"ranks": [0]}}, "1", "-"),
        ({"details": {"ranks": [0, 1]}, "gpus": [{"node": "n1", "uuid": "GPU-a"}]}, "2", "1"),
        ({"details": {}}, "-", "-"),
        ({"details": {"ranks": "many"}}, "-", "-"),
    ],
)
def test_a_job_is_shown_with_its_ranks_and_its_gpus(members: Mapping[str, Any], ranks: str, gpus: str) -> None:
    """A rank is no GPU."""
    job = {"name": "llm-1", "last_seen": AT, **members}
    (line,) = table([job], "jobs", connected.JOB_HEADER, connected._job)
    assert (line["RANKS"], line["GPUS"]) == (ranks, gpus)
