"""What an alert's labels do to those who look at the history: nothing, in every format and by every command."""

from __future__ import annotations

import asyncio
import json
import threading
import unicodedata
from collections.abc import Iterator
from concurrent.futures import Future

import httpx
import pytest
from click.testing import CliRunner

from tests.support.api_world import Address, World, alert, payload
from tests.support.clocks import START
from trainmedic_core.command import main
from trainmedic_server.ports.outside import Presence

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066\u200b\u2028\x7f\r\n=cmd|' /C calc'!A0"
MARK = "cmd|"


@pytest.fixture(scope="module")
def address() -> Iterator[Address]:
    """A server in a thread of its own, whose history, agents and jobs hold hostile text."""
    started: Future[Address] = Future()
    stop: Future[None] = Future()

    async def run() -> None:
        world = World()
        world.bus.present = [Presence(HOSTILE, START, {"version": HOSTILE, HOSTILE: [HOSTILE]})]
        async with world.served() as address:
            started.set_result(address)
            await asyncio.wrap_future(stop)

    thread = threading.Thread(daemon=True, target=asyncio.run, args=(run(),))
    thread.start()
    address = started.result(30)
    labels = {"alertname": HOSTILE, "node": HOSTILE, HOSTILE: HOSTILE}
    sent = httpx.post(f"{address.url}/webhook", json=payload(alert(labels=labels)))
    assert sent.status_code == 200
    assert_plain(sent.text)
    yield address
    stop.set_result(None)
    thread.join(30)


def assert_plain(shown: str, breaks: str = "\n", mark: str = MARK) -> None:
    """Nothing in it steers a terminal or hides."""
    assert mark in shown
    hidden = {c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp", "Cs")}
    assert hidden <= set(breaks)


@pytest.mark.parametrize("path", ["/history", "/agents", "/jobs", "/events?after=0", "/history/RUN"])
@pytest.mark.parametrize("accept", ["application/json", "application/x-ndjson", "text/csv"])
def test_server_output_contains_no_control_characters(address: Address, path: str, accept: str) -> None:
    """An operator may read it with curl."""
    if path.endswith("RUN"):
        path = f"/history/{httpx.get(f'{address.url}/history').json()['items'][0]['run_id']}"
    received = ""
    with httpx.stream("GET", f"{address.url}{path}", headers={"accept": accept}) as answer:
        assert answer.status_code == 200
        for text in answer.iter_text():
            received += text
            if MARK in received:
                break
    assert_plain(received, "\r\n" if accept == "text/csv" else "\n")


@pytest.mark.parametrize(
    "command",
    [
        *(["history", "--output", output] for output in ("table", "csv", "json")),
        *(["history", "show", "RUN", "--output", output] for output in ("text", "json")),
        ["status", "--output", "json"],
        *([listed] for listed in ("now", "agents", "jobs")),
        ["runs", "cancel", "RUN"],
        ["history", "show", "RUN", "--output", "text"],
    ],
)
def test_command_output_contains_no_control_characters(address: Address, command: list[str]) -> None:
    """Text shows the characters' numbers, and JSON keeps the same data."""
    items = httpx.get(f"{address.url}/history").json()["items"]
    run_id = items[0]["run_id"]
    result = CliRunner().invoke(
        main, [run_id if word == "RUN" else word for word in command], env={"TRAINMEDIC_URL": address.url}
    )
    assert result.exit_code == 0, result.output
    is_cut = command[0] in ("now", "agents", "jobs") or "table" in command
    assert_plain(result.output, mark="owned" if is_cut else MARK)
    if "json" in command:
        document = json.loads(result.stdout)
        assert HOSTILE in _texts(document)


def test_an_error_quoting_the_server_has_no_control_characters() -> None:
    """Any program may answer at the address."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps({"detail": HOSTILE, "errors": [{"field": HOSTILE, "message": HOSTILE}] * 2}).encode()
        writer.write(b"HTTP/1.1 422 X\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    async def run() -> str:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        result = await asyncio.to_thread(CliRunner().invoke, main, ["history", "--server", url])
        server.close()
        return result.output

    assert_plain(asyncio.run(run()))


def _texts(value: object) -> set[str]:
    match value:
        case str():
            return {value}
        case dict():
            return set().union(*(_texts(part) for pair in value.items() for part in pair))
        case list():
            return set().union(*map(_texts, value))
        case _:
            return set()
