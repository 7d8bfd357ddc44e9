"""A server below a path of its external URL: what is stripped from requests, and what is added to links."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import pytest

from tests.support.api_world import World, alert, payload
from tests.unit.server.test_standby import asked
from trainmedic_server.auth.auth import Authenticator
from trainmedic_server.auth.browser_sessions import Sessions
from trainmedic_server.auth.tokens import Token, TokenRole
from trainmedic_server.console.build import ROUTES
from trainmedic_server.http.base_path import OWN_NAMES, BasePath

URL = "https://ops.example.org/tools/medic"
BASE = "/tools/medic"
HTML = {"accept": "text/html"}


def stripped(external_url: str, path: str, raw_path: bytes | None = None) -> tuple[str, bytes]:
    scope: dict[str, Any] = {"path": path, "raw_path": path.encode() if raw_path is None else raw_path}
    BasePath(external_url).strip(scope)
    return scope["path"], scope["raw_path"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"{BASE}/runs/7", "/runs/7"),
        (f"{BASE}/", "/"),
        (BASE, "/"),
        ("/runs/7", "/runs/7"),
        (f"{BASE}s/runs", f"{BASE}s/runs"),
        ("/tools", "/tools"),
        (f"/jobs{BASE}/x", f"/jobs{BASE}/x"),
    ],
)
def test_the_base_is_stripped_where_a_proxy_has_left_it(path: str, expected: str) -> None:
    """Whole segments of it, at the beginning alone."""
    assert stripped(URL, path) == (expected, expected.encode())
    assert stripped(f"{URL}/", path)[0] == expected
    assert stripped("", path)[0] == stripped("https://ops.example.org", path)[0] == path


def test_what_is_escaped_in_the_path_stays_so() -> None:
    """A job's name may hold a slash; the base may hold a space."""
    assert stripped(URL, f"{BASE}/jobs/a/b", b"/tools/medic/jobs/a%2Fb") == ("/jobs/a/b", b"/jobs/a%2Fb")
    assert stripped("https://h/a%20b", "/a b/runs", b"/a%20b/runs") == ("/runs", b"/runs")
    assert stripped("https://h/a%20b", "/a b/runs", b"/a+b/runs") == ("/runs", b"/runs")


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/jobs/llm-1", "/jobs/llm-1"), ("/jobs/jobs/llm-1", "/jobs/llm-1"), ("/jobs/", "/"),
     ("/jobs/runs.json", "/runs.json"), ("/jobs/webhook", "/webhook"), ("/nodes/n1", "/nodes/n1")],
)  # fmt: skip
def test_a_base_that_is_called_like_a_page_hides_none(path: str, expected: str) -> None:
    """It is stripped only before a path of this server."""
    assert stripped("https://ops.example.org/jobs", path)[0] == expected


def test_the_names_of_our_own_paths_are_all_known() -> None:
    """Of the API and of the console."""
    served = {route.path for route in World().app.router.routes}  # type: ignore[attr-defined]
    served |= {route.pattern.pattern for route in ROUTES}
    first = {re.split(r"[/.{(]", path.lstrip("/"))[0] for path in served}
    assert first - {""} | {"static", "console", "login", "logout"} == OWN_NAMES


async def test_every_link_of_every_page_leads_below_the_base() -> None:
    """Also in pages that say what is wrong, and in what open pages are told."""
    world = World(external_url=URL)
    async with world.client() as client:
        answer = await client.post(f"{BASE}/webhook", json=payload(alert()))
        run = answer.json()["runs"][0]["run_id"]
        for path in (
            "/",
            "/runs",
            f"/runs/{run}",
            "/alerts",
            "/explain",
            "/settings",
            "/docs",
            "/audit",
            "/jobs/a/logs",
            "/nowhere",
        ):
            bare = await client.get(path, headers=HTML)
            below = await client.get(BASE + path, headers=HTML)
            assert bare.status_code == below.status_code
            links = re.findall(r'(?:href|action|src|hx-get|hx-post)="(/[^"]*)"', below.text)
            assert links, path
            assert [link for link in links if not link.startswith(f"{BASE}/")] == [], path
        assert (await client.get("/openapi.json")).json()["servers"] == [{"url": BASE}]


async def test_without_a_base_nothing_is_added() -> None:
    """A link is the path that it was."""
    async with World(external_url="https://medic.example.org").client() as client:
        page = (await client.get("/runs", headers=HTML)).text
        assert 'href="/alerts' in page
        assert 'data-base=""' in page
        assert "servers" not in (await client.get("/openapi.json")).json()


@pytest.mark.parametrize(
    ("origin", "cookie"), [("http://test", "trainmedic_session"), ("https://test", "__Secure-trainmedic_session")]
)
async def test_signing_in_and_out_stays_below_the_base(origin: str, cookie: str) -> None:
    """Redirects lead there, and the cookie is sent there alone. Where a form names a page below it, it is found."""
    tokens = [Token("op", hashlib.sha256(b"op").digest(), frozenset({TokenRole.OPERATOR}))]
    world = World(auth=Authenticator(tokens), external_url=URL)
    assert isinstance(world.auth.sessions, Sessions)
    async with world.client() as client:
        host = {"host": "test", "origin": origin}
        asked_for = await client.get(f"{BASE}/runs?status=failed", headers=HTML)
        assert asked_for.headers["location"] == f"{BASE}/login?next=%2Fruns%3Fstatus%3Dfailed"
        for onward in ("/runs?status=failed", f"{BASE}/runs?status=failed"):
            answer = await client.post(f"{BASE}/login", data={"token": "op", "next": onward}, headers=host)
            assert answer.headers["location"] == f"{BASE}/runs?status=failed"
            assert answer.headers["set-cookie"].startswith(f"{cookie}=")
            assert f"; Path={BASE};" in answer.headers["set-cookie"]
        secret = answer.headers["set-cookie"].partition(";")[0]
        assert (await client.get(f"{BASE}/runs", headers={**HTML, "cookie": secret})).status_code == 200
        answer = await client.post("/logout", headers={**host, "cookie": secret})
        assert answer.headers["location"] == f"{BASE}/login"
        assert f"{cookie}=" in str(answer.headers.get_list("set-cookie"))
        assert (await client.get(f"{BASE}/runs", headers={**HTML, "cookie": secret})).status_code == 303


async def test_a_standby_answers_probes_below_the_base() -> None:
    """As the leader does."""
    _, stands_by = await asked(f"{BASE}/health", URL)
    assert stands_by.status_code == 200
    _, stands_by = await asked(f"{BASE}/ready", URL)
    assert stands_by.json()["mode"] == "approve"
