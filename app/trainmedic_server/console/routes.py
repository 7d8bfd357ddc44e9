from __future__ import annotations

import re

from trainmedic_server.console import (
    alert_pages,
    api_page,
    log_page,
    place_pages,
    playbook_pages,
    run_pages,
    server_pages,
)
from trainmedic_server.console.app import Handler, Route


def _route(pattern: str, handler: Handler, *, always: bool = False, gives_way: bool = False) -> Route:
    return Route(re.compile(pattern), handler, always, gives_way=gives_way)


ROUTES = (
    _route(r"/", server_pages.now),
    _route(r"/runs", run_pages.runs),
    _route(r"/runs/(?P<run>[0-9A-Za-z_-]{1,64})", run_pages.run),
    _route(r"/approvals", alert_pages.approvals),
    _route(r"/alerts", alert_pages.alerts),
    _route(r"/explain", alert_pages.explain, always=True),
    _route(r"/why", alert_pages.why, always=True),
    _route(r"/playbooks", playbook_pages.playbooks),
    _route(r"/playbooks/(?P<playbook>[^/]{1,200})", playbook_pages.playbook),
    _route(r"/jobs", place_pages.jobs),
    _route(r"/logs", log_page.opened, always=True),
    _route(r"/jobs/(?P<job>.{1,253})/logs", log_page.log),
    # Names of jobs and nodes may have slashes, which arrive unencoded however a link wrote them.
    _route(r"/jobs/(?P<job>.{1,253})", place_pages.job, gives_way=True),
    _route(r"/nodes", place_pages.nodes),
    _route(r"/nodes/(?P<node>.{1,253})", place_pages.node),
    _route(r"/audit", server_pages.audit),
    _route(r"/settings", server_pages.settings),
    _route(r"/report", server_pages.report),
    _route(r"/r/(?P<run>[0-9A-Za-z_-]{1,64})", run_pages.short_link, always=True),
)
OPEN_ROUTES = (Route(re.compile(r"/docs"), api_page.reference, always=True, role=None),)
