"""Who may call what."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest
from starlette.requests import Request

from tests.support.api_world import World
from trainmedic_server.auth import auth as authentication
from trainmedic_server.auth.auth import Authenticator, check_exposure
from trainmedic_server.auth.tokens import Token, TokenRole
from trainmedic_server.errors import ConfigurationError
from trainmedic_server.http.problems import HttpProblem


def token(name: str, secret: str, *roles: TokenRole) -> Token:
    return Token(name, hashlib.sha256(secret.encode()).digest(), frozenset(roles))


KNOWN = Authenticator(
    [
        token("am", "hook", TokenRole.WEBHOOK),
        token("ann", "look", TokenRole.VIEWER),
        token("op", "püsh", TokenRole.OPERATOR),
    ]
)


def request(authorization: str | None = None, **headers: str) -> Request:
    if authorization is not None:
        headers["authorization"] = authorization
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw})


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("header", "role", "name"),
    [
        ("Bearer hook", TokenRole.WEBHOOK, "am"),
        ("bearer  hook", TokenRole.WEBHOOK, "am"),
        (basic("anyone", "hook"), TokenRole.WEBHOOK, "am"),
        (basic("", "look"), TokenRole.VIEWER, "ann"),
        (basic("op", "püsh"), TokenRole.OPERATOR, "op"),
        ("Bearer püsh", TokenRole.OPERATOR, "op"),
        ("Bearer püsh", TokenRole.VIEWER, "op"),
    ],
)
def test_a_token_is_taken_as_bearer_and_as_the_password_of_basic(header: str, role: TokenRole, name: str) -> None:
    """Any user name will do, and the actor is the token's name; an operator may also view."""
    assert KNOWN.require(request(header), role).name == name


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Bearer nope", "Digest hook", "Basic %%%", "Basic aG9vaw==", basic("hook", "")],
)
def test_without_a_known_token_the_answer_is_401_with_a_challenge(header: str | None) -> None:
    """Bearer and Basic are both offered."""
    with pytest.raises(HttpProblem) as caught:
        KNOWN.require(request(header), TokenRole.VIEWER)
    assert caught.value.status == 401
    assert "Bearer" in caught.value.headers["WWW-Authenticate"]
    assert "Basic" in caught.value.headers["WWW-Authenticate"]


@pytest.mark.parametrize(
    ("header", "role"),
    [("Bearer hook", TokenRole.VIEWER), ("Bearer look", TokenRole.OPERATOR), ("Bearer püsh", TokenRole.WEBHOOK)],
)
def test_a_missing_role_is_403_and_named(header: str, role: TokenRole) -> None:
    """The message says which role the token lacks."""
    with pytest.raises(HttpProblem, match=role) as caught:
        KNOWN.require(request(header), role)
    assert caught.value.status == 403


def test_without_tokens_everybody_is_anonymous() -> None:
    """And may do everything: wiring allows that on loopback only."""
    assert Authenticator().require(request(), TokenRole.OPERATOR).name == "anonymous"


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:8080.evil.example"])
def test_a_page_of_another_site_may_not_act(origin: str) -> None:
    """A browser on the operator's machine reaches loopback; the page it shows must not."""
    with pytest.raises(HttpProblem) as caught:
        Authenticator().require(request(origin=origin, host="localhost:8080"), TokenRole.OPERATOR)
    assert caught.value.status == 403
    Authenticator().require(request(origin="http://localhost:8080", host="localhost:8080"), TokenRole.OPERATOR)


def test_every_token_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time taken does not tell which token matched, or whether one did."""
    compared = []

    def counted(first: bytes, second: bytes) -> bool:
        compared.append(second)
        return first == second

    monkeypatch.setattr(authentication.hmac, "compare_digest", counted)
    KNOWN.require(request("Bearer hook"), TokenRole.WEBHOOK)
    assert len(compared) == 3


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "localhost", "::1", "[::1]"])
def test_loopback_needs_no_tokens(host: str) -> None:
    """The default is safe without any."""
    check_exposure(host, has_tokens=False, allow_anonymous=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "10.0.0.1", "node-1", "127.0.0.1.example.org"])
def test_the_network_needs_tokens_or_an_explicit_word(host: str) -> None:
    """The message says what the three ways out are."""
    with pytest.raises(ConfigurationError, match="TRAINMEDIC_ALLOW_ANONYMOUS"):
        check_exposure(host, has_tokens=False, allow_anonymous=False)
    check_exposure(host, has_tokens=True, allow_anonymous=False)
    check_exposure(host, has_tokens=False, allow_anonymous=True)


def test_a_changed_tokens_file_is_read_again(tmp_path: Path) -> None:
    """Also by symlink swap, as Kubernetes updates a mounted Secret; a broken file changes nothing."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    def entry(secret: str) -> str:
        return f"- {{name: one, sha256: '{hashlib.sha256(secret.encode()).hexdigest()}', roles: [viewer]}}\n"

    link = tmp_path / "tokens.yaml"
    link.symlink_to(write("old", entry("old")))
    now = 0.0
    authenticator = Authenticator(authentication.tokens.read(link), link, monotonic=lambda: now)

    def swap(target: Path) -> None:
        (tmp_path / "new-link").symlink_to(target)
        (tmp_path / "new-link").replace(link)

    swap(write("new", entry("new") + "# longer\n"))
    authenticator.require(request("Bearer old"), TokenRole.VIEWER)
    now = 6.0
    authenticator.require(request("Bearer new"), TokenRole.VIEWER)
    with pytest.raises(HttpProblem):
        authenticator.require(request("Bearer old"), TokenRole.VIEWER)
    swap(write("broken", "- nonsense"))
    assert not authenticator.has_rejected_file()
    now = 12.0
    assert authenticator.has_rejected_file()
    authenticator.require(request("Bearer new"), TokenRole.VIEWER)
    swap(write("fixed", entry("fixed")))
    now = 18.0
    assert not authenticator.has_rejected_file()


async def test_a_rejected_file_is_shown_because_removed_tokens_stay_valid(tmp_path: Path) -> None:
    """In `/ready` and on the console's page of settings, so that nobody takes a leaked token for revoked."""
    path = tmp_path / "tokens.yaml"
    digest = hashlib.sha256(b"leaked").hexdigest()
    path.write_text(f"- {{name: ann, sha256: '{digest}', roles: [operator]}}\n")
    now = 0.0
    world = World(auth=Authenticator(authentication.tokens.read(path), path, monotonic=lambda: now))
    async with world.client() as client:
        assert (await client.get("/ready")).json()["tokens"]["ok"]
        path.write_text("- {name: ann, sha256: new, roles: [operator]}\n")
        now = 6.0
        tokens = (await client.get("/ready")).json()["tokens"]
        headers = {"Authorization": "Bearer leaked", "Accept": "text/html"}
        page = (await client.get("/settings", headers=headers)).text
    assert tokens == {"ok": False, "detail": tokens["detail"], "caution": False}
    assert "the earlier tokens stay valid" in tokens["detail"]
    assert tokens["detail"].split("; ")[0] in page


def asking(job: str | None) -> Request:
    params = {} if job is None else {"job": job}
    return Request({"type": "http", "headers": [(b"authorization", b"Bearer tenant")], "path_params": params})


@pytest.mark.parametrize(
    ("job", "may"), [("team-a-llm", True), ("team-b", False), ("team-a", False), ("TEAM-A-x", False), (None, False)]
)
def test_a_token_for_some_jobs_may_ask_for_what_is_theirs(job: str | None, may: bool) -> None:
    """And for nothing that is of no job, such as the whole history."""
    digest = hashlib.sha256(b"tenant").digest()
    tenant = Authenticator([Token("tenant", digest, frozenset({TokenRole.VIEWER}), ("team-a-*",))])
    if may:
        assert tenant.require(asking(job), TokenRole.VIEWER).jobs == ("team-a-*",)
        return
    with pytest.raises(HttpProblem, match="limited to certain jobs") as refused:
        tenant.require(asking(job), TokenRole.VIEWER)
    assert refused.value.status == 403
