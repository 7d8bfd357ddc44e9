"""Which page is at which path."""

from __future__ import annotations

import re

from trainmedic_server.server.console import api_page, now_page, run_pages
from trainmedic_server.server.console.app import Handler, Route


def _route(pattern: str, handler: Handler, *, always: bool = False) -> Route:
    return Route(re.compile(pattern), handler, always)


ROUTES = (
    _route(r"/", now_page.now),
    _route(r"/runs", run_pages.runs),
    _route(r"/runs/(?P<run>[0-9A-Za-z_-]{1,64})", run_pages.run),
    _route(r"/r/(?P<run>[0-9A-Za-z_-]{1,64})", run_pages.short, always=True),
)
OPEN_ROUTES = (Route(re.compile(r"/docs"), api_page.reference, always=True, role=None),)
