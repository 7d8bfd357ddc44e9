"""Links to pages of the server, for messages."""

from __future__ import annotations

from urllib.parse import quote

SHORT_ID = 8  # last characters of a run's ID: IDs of one moment share the first ones


def short_id(run_id: str) -> str:
    return run_id[-SHORT_ID:]


def run_link(base: str, run_id: str) -> str:
    return link(base, "runs", run_id)


def link(base: str, *path: str) -> str:
    """Empty without an external URL."""
    return "/".join((base, *(quote(part, safe="") for part in path))) if base else ""
