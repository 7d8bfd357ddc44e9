"""Links to the pages of a server, for messages to people. Pure.

The server answers them with a page for a browser, and with JSON for a program. Where no external URL is set there is
no link: a text is better without one than with one that leads nowhere.
"""

from __future__ import annotations

from urllib.parse import quote

SHORT_ID = 8
"""Characters of a run's short id. They are the last ones: ids of one moment begin alike."""


def short_id(run_id: str) -> str:
    """The end of a run's id, by which people name it, and by which the command line and the API find it."""
    return run_id[-SHORT_ID:]


def run_link(base: str, run_id: str) -> str:
    """The address of a run's page; empty where `base`, the server's external URL, is."""
    return link(base, "runs", run_id)


def link(base: str, *path: str) -> str:
    """The address of a page; empty where `base`, the server's external URL, is. Each part of `path` is escaped."""
    return "/".join((base, *(quote(part, safe="") for part in path))) if base else ""
