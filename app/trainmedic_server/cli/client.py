"""HTTP client of commands. Every failure becomes an exception of `exits`."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
import httpx
from msgspec import Struct

from trainmedic.errors import described
from trainmedic_core.cli import exits, groups
from trainmedic_core.http_url import check_http_url, without_user
from trainmedic_core.plain_text import visible
from trainmedic_core.problems import did_you_mean
from trainmedic_core.setting_sources import unreadable_file
from trainmedic_server import __version__

R = TypeVar("R")

_TIMEOUT = httpx.Timeout(30.0, connect=5.0)  # seconds
_HINTS = {401: "Pass a token with --token or TRAINMEDIC_TOKEN.", 403: "The token's role does not allow it."}


class ServerSentEvent(Struct, frozen=True):
    id: str
    event: str
    data: str


class _Answer(dict[str, Any]):
    def __init__(self, members: Mapping[str, Any], place: str) -> None:
        super().__init__(members)
        self._place = place

    def __missing__(self, name: str) -> Any:
        raise exits.Unreachable(f"{self._place} answered without {name!r}; check that it is a Trainmedic server")


class Client:
    def __init__(self, url: str, token: str | None) -> None:
        self.url = without_user(url.rstrip("/"))
        """Without user and password, for display."""
        headers = {"User-Agent": f"trainmedic/{__version__}"}
        if token := (token or "").strip():  # httpx refuses a space at the end
            if not (token.isascii() and token.isprintable()):  # httpx's error would contain the token, or blame the URL
                raise exits.InvalidInput(
                    "the token is not one line of printable ASCII; check --token, TRAINMEDIC_TOKEN or "
                    "TRAINMEDIC_TOKEN_FILE"
                )
            headers["Authorization"] = f"Bearer {token}"
        try:
            check_http_url(url)
            self._http = httpx.Client(base_url=url.rstrip("/") + "/", headers=headers, timeout=_TIMEOUT)
        except (httpx.InvalidURL, ValueError) as error:
            raise exits.InvalidInput(f"{self.url!r} is not a URL such as http://127.0.0.1:8080: {error}") from None

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, params: Mapping[str, Any] | None = None, accept: tuple[int, ...] = ()) -> Any:
        """Return the object of the answer, also with a status in `accept`."""
        return self._ask("GET", path, params=params, accept=accept)

    def post(self, path: str, body: Any = None, params: Mapping[str, Any] | None = None) -> Any:
        return self._ask("POST", path, params=params, json=body if body is not None else {})

    def events(
        self, last_id: str | None, path: str = "events", params: Mapping[str, Any] | None = None
    ) -> Iterator[ServerSentEvent]:
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last_id} if last_id else {})
        yield from _parse(self._streamed(path, params, headers))

    def lines(self, path: str, params: Mapping[str, Any]) -> Generator[str, None, None]:
        """Yield the lines of a long answer. Close the generator if you do not use all."""
        return self._streamed(path, params, {})

    def _streamed(
        self, path: str, params: Mapping[str, Any] | None, headers: Mapping[str, str]
    ) -> Generator[str, None, None]:
        # Event streams have comments in quiet times, so a silent minute means a lost connection. A log search
        # without --follow has none, and can take longer: `cli/log_lines` then advises to narrow it.
        timeout = httpx.Timeout(60.0, connect=5.0)
        with (
            self._errors_translated(),
            self._http.stream("GET", path, params=params, headers=headers, timeout=timeout) as response,
        ):
            if response.is_error:
                response.read()
                raise _failure(response)
            yield from response.iter_lines()

    def _ask(self, method: str, path: str, accept: tuple[int, ...] = (), **arguments: Any) -> Any:
        with self._errors_translated():
            response = self._http.request(method, path, **arguments)
            if response.status_code not in accept and not response.is_success:
                raise _failure(response)
            place = without_user(str(response.url))
            try:
                answer = response.json()
            except ValueError as error:
                raise exits.Unreachable(
                    f"{place} did not answer with JSON; check that it is a Trainmedic server"
                ) from error
            if not isinstance(answer, dict):
                raise exits.Unreachable(f"{place} did not answer with an object; check that it is a Trainmedic server")
            return _Answer(answer, place)

    @contextmanager
    def _errors_translated(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise exits.Unreachable(
                f"Nothing answers at {self.url} ({described(error)}).\n"
                "Start a server with 'trainmedic serve', or set --server or TRAINMEDIC_URL."
            ) from error
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise exits.InvalidInput(f"{self.url!r} is not a URL such as http://127.0.0.1:8080: {error}") from error
        except httpx.TimeoutException as error:
            raise exits.NoAnswerYet(f"{self.url} did not answer in time.") from error
        except httpx.TransportError as error:
            raise exits.Unreachable(f"The connection to {self.url} broke: {described(error)}") from error
        except httpx.DecodingError as error:
            raise exits.Unreachable(f"The answer of {self.url} cannot be decompressed: {described(error)}") from error


def server_options(command: Callable[..., R]) -> Callable[..., R]:
    @click.option(
        "--server",
        metavar="URL",
        envvar="TRAINMEDIC_URL",
        default="http://127.0.0.1:8080",
        show_default=True,
        show_envvar=True,
        help="The server's URL.",
    )
    @click.option(
        "--token",
        metavar="TOKEN",
        envvar="TRAINMEDIC_TOKEN",
        show_envvar=True,
        help="Token. Other users can see a command line: prefer the variable, or TRAINMEDIC_TOKEN_FILE.",
    )
    @functools.wraps(command)
    def wrapped(server: str, token: str | None, **arguments: Any) -> R:
        ctx = click.get_current_context()
        server = groups.typed_before(ctx, "server") or server
        token = groups.typed_before(ctx, "token") or token or token_from_file()
        client = Client(server, token)
        ctx.call_on_close(client.close)
        return command(client, **arguments)

    return wrapped


def token_from_file() -> str | None:
    file = os.environ.get("TRAINMEDIC_TOKEN_FILE")
    if not file:
        return None
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise exits.InvalidInput(unreadable_file("TRAINMEDIC_TOKEN_FILE", file, error)) from error


def _failure(response: httpx.Response) -> click.ClickException:
    text = _detail(response)
    if hint := _HINTS.get(response.status_code):
        return exits.NotAllowed(f"{text}\n{hint}")
    if response.status_code == 404:
        return exits.UnknownName(text)
    return exits.Unreachable(text) if response.is_server_error else exits.Failure(text)


def _detail(response: httpx.Response) -> str:
    fallback = (
        f"{without_user(str(response.request.url))} answered {response.status_code} {response.reason_phrase}".rstrip()
    )
    try:
        problem = json.loads(response.text)
    except ValueError:
        return fallback
    if not isinstance(problem, dict) or not isinstance(problem.get("detail") or problem.get("title"), str):
        return fallback
    lines = [str(problem.get("detail") or problem["title"])]
    errors = problem.get("errors")
    if isinstance(errors, list) and len(errors) > 1:
        each = [f"{entry.get('field')}: {entry.get('message')}" for entry in errors if isinstance(entry, dict)]
        if lines == ["; ".join(each)]:
            return "; ".join(each)
        lines += [f"  {line}" for line in each]
    return "\n".join(lines)


def _parse(lines: Iterator[str]) -> Iterator[ServerSentEvent]:
    """Yield the messages of an event stream (WHATWG HTML, section 9.2.6), and comments as messages without data."""
    last_id, event, data = "", "message", list[str]()
    for line in lines:
        if not line:
            yield ServerSentEvent(last_id, event, "\n".join(data))
            event, data = "message", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            last_id = value
        elif name == "event":
            event = value
        elif name == "data":
            data.append(value)


def every(client: Client, path: str, params: Mapping[str, Any] = {}) -> Iterator[Mapping[str, Any]]:
    page = client.get(path, params)
    yield from page["items"]
    while page.get("next"):
        page = client.get(path, {**params, "cursor": page["next"]})
        yield from page["items"]


def unknown_playbook_note(client: Client, name: str) -> str:
    """Return "" if it is loaded."""
    loaded = [str(item["name"]) for item in client.get("playbooks")["items"]]
    return "" if name in loaded else visible(f"playbook {name!r} is not loaded{did_you_mean(name, loaded)}")


def unknown_job_note(client: Client, job: str) -> str:
    """Return "" if it is known."""
    connected = [str(item["name"]) for item in every(client, "jobs", {"cluster": True})]
    if job in connected or any(client.get(path, {"job": job, "limit": 1})["items"] for path in ("history", "findings")):
        return ""
    return visible(
        f"job {job!r} is unknown: it is not connected and has no runs or findings{did_you_mean(job, connected)}"
    )
