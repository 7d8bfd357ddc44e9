"""Who gets in to the console: sessions that a token begins, and what a proxy vouches for; without a socket."""

from __future__ import annotations

import hashlib
import ipaddress
from datetime import timedelta
from typing import Any

import httpx
import pytest
from starlette.requests import HTTPConnection

from tests.support.api_world import World, payload
from tests.support.clocks import ManualClock
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.auth.auth import Authenticator
from trainmedic_server.auth.browser_sessions import COOKIE, LASTS, Sessions
from trainmedic_server.auth.identity import TrustedProxies
from trainmedic_server.auth.tokens import Token, TokenRole

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
FORM = {"origin": "http://trainmedic", **HTML}


def token(name: str, secret: str, role: TokenRole, jobs: tuple[str, ...] | None = None) -> Token:
    return Token(name, hashlib.sha256(secret.encode()).digest(), frozenset({role}), jobs)


TOKENS = [
    token("am", "hook", TokenRole.WEBHOOK),
    token("vera", "look", TokenRole.VIEWER),
    token("ann", "op", TokenRole.OPERATOR),
    token("train", "of-a-job", TokenRole.VIEWER, ("llm-*",)),
]


def world(**changes: Any) -> tuple[World, ManualClock]:
    clock = ManualClock()
    auth = Authenticator(TOKENS, **changes)
    auth.sessions = Sessions(InMemoryStore(), clock)
    return World(auth=auth), clock


async def sign_in(client: httpx.AsyncClient, secret: str, **more: str) -> httpx.Response:
    return await client.post("/login", data={"token": secret, **more}, headers=FORM)


async def test_a_token_begins_a_session_of_twelve_hours() -> None:
    """Its cookie opens pages and the API; the secret in it is nowhere kept, and over with the time."""
    here, clock = world()
    async with here.client() as client:
        assert (await client.get("/runs?status=failed", headers=HTML)).headers["location"] == (
            "/login?next=%2Fruns%3Fstatus%3Dfailed"
        )
        answer = await sign_in(client, "op", next="/runs?status=failed")
        cookie = answer.headers["set-cookie"].lower()
        assert (answer.status_code, answer.headers["location"]) == (303, "/runs?status=failed")
        assert all(part in cookie for part in ("httponly", "samesite=strict", "max-age=43200", "path=/"))
        assert "secure" not in cookie
        assert (await client.get("/runs", headers=HTML)).status_code == 200
        assert (await client.get("/history")).status_code == 200
        (session,) = (await client.get("/sessions")).json()["items"]
        assert (session["name"], session["address"]) == ("ann", "192.0.2.7")
        assert client.cookies[COOKIE] not in str(here.auth.sessions.__dict__)
        clock.sleep(LASTS.total_seconds())
        assert (await client.get("/history")).status_code == 401


async def test_a_browser_that_speaks_tls_keeps_the_cookie_to_it() -> None:
    """It says so itself, in the origin of its page. The name is one that only this host can set, and counts before
    another that some other host may have put beside it."""
    here, _ = world()
    async with here.client() as client:
        headers = {**HTML, "origin": "https://trainmedic"}
        answer = await client.post("/login", data={"token": "op"}, headers=headers)
        name, _, secret = answer.headers["set-cookie"].partition(";")[0].partition("=")
        assert (name, "secure" in answer.headers["set-cookie"].lower()) == (f"__Host-{COOKIE}", True)
        assert "domain" not in answer.headers["set-cookie"].lower()
        client.cookies.clear()
        planted = await sign_in(client, "look")
        other = planted.headers["set-cookie"].partition(";")[0]
        client.cookies.clear()
        both = {"cookie": f"{other}; {name}={secret}", "origin": "https://trainmedic"}
        sessions = (await client.get("/sessions", headers=both)).json()["items"]
        assert {session["name"] for session in sessions} == {"ann", "vera"}, "an operator sees all"
        ended = await client.post("/logout", data={"": ""}, headers={**headers, **both})
        assert any(cookie.startswith(f"{name}=") for cookie in ended.headers.get_list("set-cookie"))
        assert (await client.get("/history", headers={"cookie": f"{name}={secret}"})).status_code == 401


@pytest.mark.parametrize("onward", ["https://evil.example/", "//evil.example", "/\\evil.example", "javascript:x", ""])
async def test_no_sign_in_leads_to_another_site(onward: str) -> None:
    """Whatever the link says that somebody was sent."""
    here, _ = world()
    async with here.client() as client:
        assert (await sign_in(client, "op", next=onward)).headers["location"] == "/"


@pytest.mark.parametrize("secret", ["hook", "of-a-job", "wrong", ""])
async def test_a_token_that_may_not_look_begins_no_session(secret: str) -> None:
    """Those for deliveries and for single jobs, and what is none."""
    here, _ = world()
    async with here.client() as client:
        answer = await sign_in(client, secret)
    assert (answer.status_code, "set-cookie" in answer.headers) == (403, False)
    assert 'role="alert"' in answer.text


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://trainmedic:81", None])
async def test_a_session_acts_for_pages_of_this_server_alone(origin: str | None) -> None:
    """A browser that acts names the page; one of another site has no session's rights, nor has one that is silent."""
    here, _ = world()
    async with here.client() as client:
        run = (await client.post("/webhook", json=payload(), headers={"authorization": "Bearer hook"})).json()["runs"][
            0
        ]
        await sign_in(client, "op")
        other = {"origin": origin} if origin else {}
        for path in (f"/runs/{run['run_id']}/cancel", "/console/pause", "/pause"):
            assert (await client.post(path, headers=other)).status_code == 403
        ended = await client.delete("/sessions/01a20537-6cfd-7602-aa3d-8beb42025fc5", headers=other)
        assert ended.status_code == 403
        assert not here.engine.controls.paused


async def test_a_form_leads_back_to_its_place_and_says_once_what_was_done() -> None:
    """The browser carries it there; no link can have a page say that something was done."""
    here, _ = world()
    async with here.client() as client:
        await sign_in(client, "op")
        order = {"node": "node-7", "for": "2h", "note": "new fans", "next": "/settings#pauses"}
        answer = await client.post("/console/pause", data=order, headers=FORM)
        assert answer.headers["location"] == "/settings#pauses"
        for path, said in (("/settings", 1), ("/settings", 0), ("/settings?done=Paused.", 0)):
            assert (await client.get(path, headers=HTML)).text.count('role="status">Paused.') == said
        (pause,) = (await client.get("/pauses")).json()["items"]
        assert (pause["node"], pause["note"], pause["by"]) == ("node-7", "new fans", "ann")


@pytest.mark.parametrize(
    ("referer", "back"),
    [("http://trainmedic/runs?status=failed", "/runs?status=failed"), ("http://evil.example/x", "/"), ("", "/")],
)
async def test_a_form_that_was_refused_leads_back_to_its_page(referer: str, back: str) -> None:
    """And not to the form's own address, where there is nothing to see."""
    here, _ = world()
    async with here.client() as client:
        await sign_in(client, "op")
        answer = await client.post(
            "/console/runs/none/approve", data={"note": ""}, headers={**FORM, "referer": referer}
        )
    assert answer.status_code == 404
    assert f'<a href="{back}" class="button">Back</a>' in answer.text


async def test_a_viewer_looks_and_does_not_act() -> None:
    """By the console's forms as little as by the API."""
    here, _ = world()
    async with here.client() as client:
        await sign_in(client, "look")
        answer = await client.post("/console/pause", data={"note": "x"}, headers=FORM)
        assert (answer.status_code, here.engine.controls.paused) == (403, False)


async def test_sessions_end_by_people_and_with_their_token() -> None:
    """A viewer ends and sees its own; an operator any; a token that is gone takes its sessions along."""
    here, _ = world()
    async with here.client() as vera, here.client() as ann:
        await sign_in(vera, "look")
        await sign_in(ann, "op")
        all_of_them = (await ann.get("/sessions")).json()["items"]
        assert [each["name"] for each in all_of_them] == ["vera", "ann"]
        assert [each["name"] for each in (await vera.get("/sessions")).json()["items"]] == ["vera"]
        of_vera, of_ann = (each["id"] for each in all_of_them)
        same = {"origin": "http://trainmedic"}
        assert (await vera.delete(f"/sessions/{of_ann}", headers=same)).status_code == 404
        assert (await ann.delete(f"/sessions/{of_vera}", headers=same)).status_code == 204
        assert (await vera.get("/history")).status_code == 401
        here.auth._tokens = tuple(TOKENS[:2])
        assert (await ann.get("/history")).status_code == 401


async def test_signing_out_ends_the_session() -> None:
    """And not only in this browser."""
    here, _ = world()
    async with here.client() as client:
        await sign_in(client, "op")
        secret = client.cookies[COOKIE]
        assert (await client.post("/logout", headers=FORM)).headers["location"] == "/login"
        assert (await client.get("/history", headers={"cookie": f"{COOKIE}={secret}"})).status_code == 401


async def test_sessions_outlive_a_restart() -> None:
    """They are in the run store."""
    store, clock = InMemoryStore(), ManualClock()
    secret = await Sessions(store, clock).begin(TOKENS[2], "192.0.2.7", "a browser")
    later = Sessions(store, clock)
    await later.load()
    session = later.of(f"other=1; {COOKIE}={secret}")
    assert session is not None
    assert session.name == "ann"
    assert secret not in repr(session)


@pytest.mark.parametrize("beside", ['prefs={"a": 1, "b": 2}', "two words", "long=" + 5000 * "x", f"{COOKIE}=old"])
async def test_other_cookies_of_the_site_keep_nobody_out(beside: str) -> None:
    """Whatever form their makers chose, and however long they are."""
    here, _ = world()
    async with here.client() as client:
        await sign_in(client, "op")
        secret = client.cookies[COOKIE]
    async with here.client() as client:
        for cookies in (f"{beside}; {COOKIE}={secret}", f"{COOKIE}={secret}; {beside}"):
            assert (await client.get("/history", headers={"cookie": cookies})).status_code == 200


@pytest.mark.parametrize("path", ["/events", "/console/live?topics=head"])
async def test_a_stream_ends_with_the_session_that_opened_it(path: str) -> None:
    """What is open when a person, the time or the tokens file ends a session is told nothing more."""
    here, _ = world()
    async with here.served() as address, httpx.AsyncClient(base_url=address.url, timeout=60) as client:
        same = {"origin": address.url}
        await client.post("/login", data={"token": "op"}, headers=same)
        async with client.stream("GET", path) as stream:
            lines = stream.aiter_lines()
            assert (await anext(lines)).startswith("retry:")
            await client.post("/logout", headers=same)
            await client.post("/webhook", json=payload(), headers={"authorization": "Bearer hook"})
            assert [line for line in [line async for line in lines] if "data:" in line] == []
        assert (await client.get(path, headers=HTML)).status_code == 401


async def test_a_part_of_a_page_sends_its_browser_to_sign_in() -> None:
    """Where the session has ended meanwhile: the sign-in would else be put in the place of the part, or nothing."""
    here, _ = world()
    async with here.client() as client:
        answer = await client.get("/runs?status=failed", headers={**HTML, "hx-request": "true"})
    assert (answer.status_code, answer.headers["hx-redirect"]) == (401, "/login?next=%2Fruns%3Fstatus%3Dfailed")


async def test_who_acts_after_the_session_has_ended_is_led_to_sign_in_and_back() -> None:
    """By a sentence for people, and not by one about Bearer and Basic."""
    here, clock = world()
    async with here.client() as client:
        await sign_in(client, "op")
        clock.sleep(LASTS.total_seconds())
        headers = {**FORM, "referer": "http://trainmedic/settings?x=1"}
        answer = await client.post("/console/pause", data={"node": "node-7"}, headers=headers)
    assert (answer.status_code, here.engine.controls.paused) == (401, False)
    assert "Nothing was done" in answer.text
    assert 'href="/login?next=%2Fsettings%3Fx%3D1"' in answer.text
    assert "Bearer" not in answer.text


async def test_a_token_has_twenty_sessions_at_the_most() -> None:
    """The oldest gives way."""
    sessions = Sessions(InMemoryStore(), ManualClock())
    secrets = [await sessions.begin(TOKENS[2], "", "") for _ in range(21)]
    assert sessions.of(f"{COOKIE}={secrets[0]}") is None
    assert len(sessions.all()) == 20


PROXIES = TrustedProxies([ipaddress.ip_network("192.0.2.0/24")], ["oncall"])


@pytest.mark.parametrize(
    ("headers", "sees", "acts"),
    [
        ({}, 401, 401),
        ({"x-forwarded-user": "ann@example.org"}, 200, 403),
        ({"x-forwarded-user": "ann", "x-forwarded-groups": "dev, oncall"}, 200, 200),
        ({"x-forwarded-user": "trainmedic", "x-forwarded-groups": "oncall"}, 401, 401),
        ({"x-forwarded-user": "a b", "x-forwarded-groups": "oncall"}, 401, 401),
    ],
)
async def test_a_trusted_proxy_says_who_somebody_is(headers: dict[str, str], sees: int, acts: int) -> None:
    """And by their groups, who may act; nobody passes for the server itself."""
    here, _ = world(proxies=PROXIES)
    async with here.client() as client:
        assert (await client.get("/history", headers=headers)).status_code == sees
        assert (await client.post("/pause", headers={**headers, "origin": "http://trainmedic"})).status_code == acts
    if acts == 200:
        assert here.engine.controls.paused_by == "ann"


async def test_a_proxys_user_acts_by_a_page_of_this_server() -> None:
    """The proxy knows browsers by a cookie, which comes along whatever page sends the request."""
    here, _ = world(proxies=PROXIES)
    ann = {"x-forwarded-user": "ann", "x-forwarded-groups": "oncall"}
    async with here.client() as client:
        assert (await client.post("/pause", headers={**ann, "cookie": "_oauth2_proxy=x"})).status_code == 403
        assert (await client.post("/pause", headers=ann)).status_code == 200


@pytest.mark.parametrize(("address", "is_one"), [("::ffff:192.0.2.7", True), ("::ffff:198.51.100.7", False)])
def test_a_proxy_is_known_on_a_socket_of_both_families(address: str, is_one: bool) -> None:
    """There an address of IPv4 is written as one of IPv6."""
    assert PROXIES.speak_for(HTTPConnection({"type": "http", "headers": [], "client": (address, 1)})) is is_one


async def test_groups_go_along_with_a_session_and_with_a_proxys_user() -> None:
    """Some questions may be answered by a group alone."""
    here, _ = world(proxies=PROXIES)
    here.auth._tokens = (
        Token("bo", hashlib.sha256(b"b").digest(), frozenset({TokenRole.OPERATOR}), None, frozenset({"sre"})),
    )
    seen: list[frozenset[str]] = []
    require = here.auth.require

    def noted(*asked: Any, **options: Any) -> Any:
        principal = require(*asked, **options)
        seen.append(principal.groups)
        return principal

    here.auth.require = noted  # type: ignore[method-assign]
    async with here.client() as client:
        await client.get("/history", headers={"x-forwarded-user": "ann", "x-forwarded-groups": "dev, oncall"})
        await sign_in(client, "b")
        await client.get("/history")
    assert seen == [frozenset({"dev", "oncall"}), frozenset({"sre"})]


async def test_anybody_else_says_it_in_vain() -> None:
    """The headers count on connections from the proxy's addresses alone."""
    elsewhere = TrustedProxies([ipaddress.ip_network("198.51.100.7")], ["oncall"])
    here, _ = world(proxies=elsewhere)
    async with here.client() as client:
        answer = await client.get("/history", headers={"x-forwarded-user": "ann", "x-forwarded-groups": "oncall"})
    assert answer.status_code == 401


@pytest.mark.parametrize(
    ("user", "groups", "may_act", "own_groups"),
    [
        ("bob", "oncall", True, {"oncall"}),
        ("hardware", "oncall", False, {"oncall"}),
        ("oncall", "", False, set()),
        ("hardware", "oncall,hardware", True, {"oncall", "hardware"}),
        ("bob", "oncall,ann", True, {"oncall"}),
        ("ann", "oncall,ann", True, {"oncall", "ann"}),
    ],
)
def test_what_a_proxy_names_does_not_pass_for_what_is_configured_here(
    user: str, groups: str, may_act: bool, own_groups: set[str]
) -> None:
    """Playbooks name approvers, perhaps without saying whether that is a login or a group."""
    team = Token("robot", b"x" * 32, frozenset({TokenRole.OPERATOR}), None, frozenset({"hardware"}))
    proxies = TrustedProxies([ipaddress.ip_network("10.0.3.7")], ["oncall", "hardware"])
    auth = Authenticator([*TOKENS, team], proxies=proxies)
    headers = [(b"x-forwarded-user", user.encode()), (b"x-forwarded-groups", groups.encode())]
    request = HTTPConnection(
        {"type": "http", "headers": headers, "client": ("10.0.3.7", 1), "path_params": {}, "method": "GET"}
    )
    principal = auth.require(request, TokenRole.VIEWER)
    assert principal.may(TokenRole.OPERATOR) is may_act
    assert principal.groups == own_groups


@pytest.mark.parametrize(
    ("seconds", "status"), [(-240, 200), (-3600, 303), (-400 * 86400, 303), (43199, 200), (43201, 303)]
)
async def test_a_session_ends_by_a_clock_that_was_set_wrong_too(seconds: float, status: int) -> None:
    """A server with another clock may take over, and a clock may be set back while none runs: no session lasts longer
    by that, and a few minutes end none."""
    here, clock = world()
    async with here.client() as client:
        await sign_in(client, "op")
        clock.time += timedelta(seconds=seconds)
        assert (await client.get("/runs", headers=HTML)).status_code == status
        assert bool(here.auth.sessions and here.auth.sessions.all()) is (status == 200)


@pytest.mark.parametrize("labels", ["team", "rack=r3, team", "=r3", "team="])
async def test_a_pause_with_half_a_label_is_refused(labels: str) -> None:
    """It would cover no run."""
    here, _ = world()
    async with here.client() as client:
        await sign_in(client, "op")
        answer = await client.post("/console/pause", data={"labels": labels, "note": "x"}, headers=FORM)
        assert answer.status_code == 422
        assert "is not NAME=VALUE" in answer.text
        assert (await client.get("/pauses")).json()["items"] == []


@pytest.mark.parametrize("label", ["job_name", "job_name="])
@pytest.mark.parametrize(("form", "status"), [("try", 200), ("start", 422)])
async def test_a_start_with_half_a_label_is_refused(form: str, status: int, label: str) -> None:
    """It would fit no firing alert, so that the run's changes would outlast it."""
    here, _ = world()
    async with here.client() as client:
        await sign_in(client, "op")
        fields = {"target": "node:n1", "labels": label, "key": "k"}
        answer = await client.post(f"/console/playbooks/cool/{form}", data=fields, headers=FORM)
        assert answer.status_code == status
        assert "is not NAME=VALUE" in answer.text
        assert here.history.records == {}
