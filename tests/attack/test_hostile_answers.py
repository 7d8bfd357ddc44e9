"""Servers that Trainmedic asks, and whose answers are wrong in form, deep, compressed, endless or meant to redirect.

Whatever comes, the call ends in time, and by an error of Trainmedic's own: a loop or a request then goes on.
"""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest

from tests.attack.effort import trials
from tests.support.programs import eventually
from trainmedic_logs.domain.log_search import LogQuery
from trainmedic_server import errors
from trainmedic_server.adapters import apprise_notifier
from trainmedic_server.adapters.alertmanager_api import AlertmanagerApi
from trainmedic_server.adapters.apprise_notifier import AppriseNotifier
from trainmedic_server.adapters.httpx_caller import HttpxCaller
from trainmedic_server.adapters.json_endpoint import JsonEndpoint
from trainmedic_server.adapters.log_stores import store_http
from trainmedic_server.adapters.log_stores.loki import Loki
from trainmedic_server.adapters.log_stores.opensearch import OpenSearch
from trainmedic_server.adapters.log_stores.paging import StoredLogs
from trainmedic_server.adapters.log_stores.store_http import StoreHttp
from trainmedic_server.adapters.log_stores.victorialogs import VictoriaLogs
from trainmedic_server.adapters.prometheus_api import PrometheusApi
from trainmedic_server.adapters.slack.web_api import SlackApi
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.domain.alert import Identity

NOW = datetime.now(UTC)
SOON = timedelta(seconds=30)
LONG = b"9" * 4200
PROMETHEUS = b'{"status":"success","data":{"result":[{"metric":{},"values":[[%s,"1"]]}]}}'
RULES = b'{"status":"success","data":{"groups":[{"rules":[{"type":"alerting","name":"x","labels":%s}]}]}}'
LOKI = b'{"data":{"resultType":"streams","result":[{"stream":{},"values":[[%s,"x"]]}]}}'
OPENSEARCH = b'{"hits":{"hits":[{"_source":{"message":"x"},"fields":{"@timestamp":["%s"]}}]}}'
FIRST, LAST = b"0001-01-01T00:00:00+14:00", b"9999-12-31T23:59:59-14:00"
BODIES = [
    *(b"", b"null", b"1", b'"x"', b"[]", b"{}", b"[null]", b'["x"]', b"\xff", b"1e999", b"NaN", LONG),
    *(b"[" * 60_000, b'{"a":' * 12_000, b'{"status":"success","data":' + b"[" * 40_000),
    *(PROMETHEUS % at for at in (b"9" * 400, b"1e400", b"[]", b'"x"')),
    *(RULES % labels for labels in (b"[1]", b"null", b'"x"')),
    *(LOKI % at for at in (b'"%s"' % LONG, b'"%s"' % LONG[:4000], b"1e400", b"NaN", b"-9e25", b"null")),
    *(OPENSEARCH % at for at in (FIRST, LAST, b"2020-02-30T00:00:00Z", b"x")),
    *(b'{"_time":"%s","_msg":null}' % at for at in (FIRST, LAST, "١١١١-01-01T00:00:00Z".encode())),
    *(b'[{"startsAt":"%s","fingerprint":%s}]' % (at, b'"x"') for at in (FIRST, LAST, b"x")),
    b'[{"startsAt":"2020-01-01T00:00:00Z","fingerprint":[]}]',
    *(b'{"uptime":"%s"}' % at for at in (FIRST, LAST)),
    *(b'{"ok":true,"url":%s}' % url for url in (b'"wss://[::1"', b"[]", b'"http://x"')),
    *(b'{"ok":false,"error":%s}' % error for error in (b"[]", b"{}", b"null")),
]
CHARSETS = ["klingon", "rot13", "base64", "zip", "idna", "punycode", "utf-7", "undefined", "unicode_escape", '"\\"']


@dataclass
class Foreign:
    """A server on the loopback that answers every request alike. It models no protocol beyond HTTP/1.1."""

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    drips: bool = False
    """Whether the answer never ends: a byte in each tenth of a second."""
    seen: list[bytes] = field(default_factory=list)
    """The heads of the requests."""
    left: int = 0
    """Answers that a client did not wait for."""
    socket: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0), backlog=100))

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.socket.getsockname()[1]}"

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            request = b""
            while b"\r\n\r\n" not in request:
                request += connection.recv(65536)
            head, _, content = request.partition(b"\r\n\r\n")
            self.seen.append(head)
            lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-len")]
            left = int(lengths[0]) - len(content) if lengths else 0
            while left > 0:
                left -= len(connection.recv(65536)) or left
            length = 1 << 40 if self.drips else len(self.body)
            lines = [f"HTTP/1.1 {self.status} X", f"Content-Length: {length}", "Connection: close"]
            lines += [f"{name}: {value}" for name, value in self.headers.items()]
            connection.sendall("\r\n".join([*lines, "", ""]).encode() + self.body)
            try:
                while self.drips:
                    connection.sendall(b" ")
                    time.sleep(0.1)
            except OSError:
                self.left += 1


@pytest.fixture
def foreign() -> Iterator[Foreign]:
    server = Foreign()
    threading.Thread(target=server.serve, daemon=True).start()
    yield server
    server.drips = False
    server.socket.shutdown(socket.SHUT_RDWR)
    server.socket.close()


Calls = Mapping[str, Callable[[], Awaitable[object]]]


@pytest.fixture
async def calls(foreign: Foreign) -> AsyncIterator[Calls]:
    """One call for each way to read an answer, by what it asks."""
    url = f"http://{foreign.place}"
    prometheus, alertmanager = PrometheusApi(url), AlertmanagerApi(url, SystemClock())
    door, slack, http = JsonEndpoint(url, None, "it"), SlackApi(url, "bot", "app"), StoreHttp(url, {})
    identity = Identity("x", NOW)

    async def lines(store: Loki | OpenSearch | VictoriaLogs) -> None:
        async for _ in StoredLogs(store, SystemClock()).search(LogQuery("j", NOW - SOON), (), 10):
            pass

    yield {
        "series": lambda: prometheus.read("up", NOW - SOON, NOW, SOON / 2),
        "rules": lambda: prometheus.rules_of("x"),
        "firing": lambda: alertmanager.is_firing(identity),
        "silence": lambda: alertmanager.silence({"a": "b"}, NOW, "c"),
        "find": lambda: alertmanager.find_silence("c"),
        "expire": lambda: alertmanager.expire_silence("c"),
        "door": lambda: door.send("POST", "", {}),
        "slack": lambda: slack.call("x", {}),
        "socket": slack.open_socket,
        "loki": lambda: lines(Loki(http)),
        "opensearch": lambda: lines(OpenSearch(http)),
        "victorialogs": lambda: lines(VictoriaLogs(http)),
    }
    for each in (prometheus, alertmanager, door, slack, http):
        await each.close()


async def made(call: Callable[[], Awaitable[object]], about: object) -> None:
    """Make a call. What goes wrong is an error of Trainmedic's own."""
    try:
        await call()
    except errors.TrainmedicError:
        pass
    except Exception as error:
        pytest.fail(f"{ascii(about)[:200]}: {type(error).__name__}: {error}")


async def test_no_answer_raises_an_undeclared_error(foreign: Foreign, calls: Calls) -> None:
    """Each kind of nonsense is sent to each call, as an answer and as a refusal."""
    for foreign.status, bodies in ((200, BODIES), (400, BODIES[:: trials(8, 1)]), (503, BODIES[:: trials(8, 1)])):
        for foreign.body in bodies:
            for name, call in calls.items():
                await made(call, (name, foreign.status, foreign.body))


@pytest.mark.parametrize("body", [b"[]", b"null", b"1"])
async def test_a_slack_answer_without_an_object_leaves_the_outcome_unknown(
    foreign: Foreign, calls: Calls, body: bytes
) -> None:
    foreign.status, foreign.body = 200, body
    with pytest.raises(errors.OutcomeUnknown):
        await calls["slack"]()


async def test_no_charset_raises_an_undeclared_error(foreign: Foreign, calls: Calls) -> None:
    """Some Python codecs are not text codecs, and some cannot replace undecodable bytes."""
    foreign.body = b"[]\xff\\u"
    for charset in CHARSETS:
        foreign.headers = {"Content-Type": f"application/json; charset={charset}"}
        for name, call in calls.items():
            await made(call, (name, charset))


async def test_no_cookie_is_stored(foreign: Foreign, calls: Calls) -> None:
    """An answer affects no later call, and a server that keeps setting new cookies fills no memory."""
    foreign.headers = {"Set-Cookie": "session=theirs; Path=/"}
    caller = HttpxCaller()
    for _ in range(2):
        await caller.call("GET", f"http://{foreign.place}/", {}, None, SOON)
        for name, call in calls.items():
            await made(call, name)
    await caller.close()
    assert len(foreign.seen) >= 2 * len(calls)
    assert not [head for head in foreign.seen if b"\r\ncookie:" in head.lower()]


async def test_a_log_store_cannot_inflate_an_answer(foreign: Foreign, calls: Calls) -> None:
    """The server requests no compression and reads no compressed answer: compressed twice, 2 KB become
    as many GB as the server has."""
    foreign.body = gzip.compress(gzip.compress(b"{}" * 1_000_000))
    foreign.headers = {"Content-Encoding": "gzip, gzip"}
    for name in ("loki", "opensearch", "victorialogs"):
        with pytest.raises(errors.LogsUnavailable, match="compresses its answer"):
            await calls[name]()
    assert all(b"accept-encoding: identity" in head.lower() for head in foreign.seen)


async def test_a_log_stores_endless_answer_is_abandoned(
    foreign: Foreign, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time, but the last one never does."""
    monkeypatch.setattr(store_http, "_ANSWERS_WITHIN", 1.0)
    foreign.drips = True
    with pytest.raises(errors.LogsUnavailable, match="does not answer within 1 s"):
        await asyncio.wait_for(calls["loki"](), 60)
    await asyncio.to_thread(eventually, lambda: foreign.left == 1, 60, "the connection is closed")


async def test_an_endless_receiver_of_messages_delays_no_others(
    foreign: Foreign, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message to it fails in time as possibly delivered. It holds few threads, none for which a stopping server
    would wait, and none of those that everything else uses."""
    monkeypatch.setattr(apprise_notifier, "_SENDS_WITHIN", 1.0)
    foreign.drips = True
    notifier = AppriseNotifier({"slow": [f"json://{foreign.place}/"]})
    for _ in range(apprise_notifier._MOST_SENDING):
        with pytest.raises(errors.PermanentFailure, match="no answer of slow within 1 s, which may have received it"):
            await asyncio.wait_for(notifier.notify("t", "m", "slow"), 60)
    for _ in range(2):
        with pytest.raises(errors.TemporaryFailure, match="could not be sent to slow"):
            await asyncio.wait_for(notifier.notify("t", "m", "slow"), 60)
    assert len(foreign.seen) == apprise_notifier._MOST_SENDING
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "message to slow")
    foreign.drips = False
    # The threads have ended, so there is a turn again.
    await asyncio.to_thread(eventually, lambda: not _messengers(), 60, "the answers end")
    monkeypatch.setattr(apprise_notifier, "_SENDS_WITHIN", 60.0)
    await notifier.notify("t", "m", "slow")


def _messengers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "message to slow"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_of_messages_are_not_followed(foreign: Foreign, status: int) -> None:
    """It points where no setting sends anything, and as a GET without the message: its answer says nothing about the
    message."""
    foreign.status, foreign.headers = status, {"Location": f"http://{foreign.place}/latest/meta-data"}
    with pytest.raises(errors.TemporaryFailure, match="could not be sent to oncall"):
        await AppriseNotifier({"oncall": [f"json://{foreign.place}/hook"]}).notify("t", "m", "oncall")
    assert [head.split()[1].rstrip(b"/") for head in foreign.seen] == [b"/hook"]
