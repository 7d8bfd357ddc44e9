"""For which site a request was made."""

from __future__ import annotations

import functools
import hashlib

import pytest

from tests.support.api_world import World, payload
from trainmedic_server.auth.auth import Authenticator
from trainmedic_server.auth.tokens import Token, TokenRole

TOKENS = (Token("op", hashlib.sha256(b"push").digest(), frozenset({TokenRole.OPERATOR})),)
CALLS = [
    ("POST", "/webhook"),
    ("POST", "/pause"),
    ("POST", "/runs/a/approve"),
    ("GET", "/history"),
    ("GET", "/events"),
    ("GET", "/agents"),
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/no-such-path"),
]


@functools.cache
def shared(*allowed_hosts: str, has_tokens: bool = False) -> World:
    """For tests whose requests change nothing; to build one takes longer than to ask it."""
    return World(auth=Authenticator(TOKENS if has_tokens else ()), allowed_hosts=allowed_hosts)


@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_without_tokens_a_rebound_name_is_refused(method: str, path: str) -> None:
    """A page whose own name points to the loopback: Host and Origin agree, and nothing is done or shown."""
    world = shared()
    headers = {"host": "evil.example:8080", "origin": "http://evil.example:8080"}
    async with world.client() as client:
        answer = await client.request(method, path, headers=headers, json=payload())
    assert answer.status_code == 421
    assert answer.headers["content-type"] == "application/problem+json"
    assert "--allowed-hosts evil.example" in answer.json()["detail"]
    assert not world.engine.deliveries
    assert not world.engine.controls.paused


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:8080", "127.0.0.1", "[::1]:8080", "[::ffff:127.0.0.1]", "10.1.2.3:8080", "localhost:8080"),
        *("LOCALHOST", "trainmedic", "node_1:8080", "trainmedic.monitoring.svc:8080", "a.localhost"),
        *("trainmedic.monitoring.svc.cluster.local", "medic.example.org", "MEDIC.example.org.", "x.y.corp.example"),
    ],
)
async def test_addresses_local_names_and_allowed_ones_are_answered(host: str) -> None:
    """Probes and Prometheus ask by address, other pods by the Service's name, people by what is allowed."""
    async with shared("Medic.example.org", "*.corp.example").client() as client:
        assert (await client.get("/history", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host", ["127.0.0.1.nip.io", "corp.example", "svc.example", "localhost.example", "notmedic.example.org"]
)
async def test_a_name_that_only_looks_like_one_is_refused(host: str) -> None:
    """Anybody can own these."""
    async with shared("medic.example.org", "*.corp.example").client() as client:
        assert (await client.get("/history", headers={"host": host})).status_code == 421


async def test_with_tokens_any_name_will_do() -> None:
    """A rebound page has no token: names of an ingress need not be written down twice."""
    async with World(auth=Authenticator(TOKENS)).client() as client:
        headers = {"host": "medic.example.org", "authorization": "Bearer push"}
        assert (await client.get("/history", headers=headers)).status_code == 200
        assert (
            await client.post("/pause", headers={**headers, "origin": "https://medic.example.org"})
        ).status_code == 200
        assert (await client.post("/pause", headers={**headers, "origin": "https://evil.example"})).status_code == 403


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    "origin",
    ["http://[", "http://a]b[", "", "evil", "http:// a", "http://a/b", "http://u@a", "http://a http://b", "\xff"],
)
@pytest.mark.parametrize(("method", "path"), [("POST", "/pause"), ("POST", "/webhook"), ("GET", "/history")])
async def test_a_malformed_origin_is_400(origin: str, method: str, path: str, has_tokens: bool) -> None:
    """The client's mistake, not the server's."""
    async with shared(has_tokens=has_tokens).client() as client:
        answer = await client.request(method, path, headers=[("origin", origin.encode("latin-1"))])
    assert (answer.status_code, answer.json().get("field")) == (400, "origin")


@pytest.mark.parametrize("origin", ["null", "file://", "https://trainmedic:8443", "moz-extension://4f0a"])
async def test_a_page_of_another_origin_may_read_what_its_browser_lets_it_and_not_act(origin: str) -> None:
    """No answer has a header that would let the page see it."""
    async with shared().client() as client:
        assert (await client.post("/pause", headers={"origin": origin})).status_code == 403
        answer = await client.get("/history", headers={"origin": origin})
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("host", ["a b", "a/b", "a@b", "[::1", "a:port", "a:1:2", "\xe9"])
async def test_a_malformed_host_is_400(host: str) -> None:
    """Whether tokens are set or not."""
    async with shared(has_tokens=True).client() as client:
        answer = await client.get("/health", headers=[("host", host.encode("latin-1"))])
    assert (answer.status_code, answer.json()["field"]) == (400, "host")


async def test_one_host_is_needed() -> None:
    """RFC 9112, section 3.2: two of them could be read as either."""
    async with World().client() as client:
        answer = await client.get("/health", headers=[("host", "localhost"), ("host", "evil.example")])
        assert answer.status_code == 400
    async with World().served() as address:
        assert (await address.raw(b"GET /health HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 400")
        assert (await address.raw(b"GET /health HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200")
