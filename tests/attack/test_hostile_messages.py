"""Messages of an assistant and of Slack that are not what they should be, and URLs of channels that are none.

Nothing crashes, nothing is done for a person who is not named, and no error repeats a secret.
"""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

import httpx
import pydantic
import pytest

from tests.attack.effort import random_source, trials
from tests.attack.odd_documents import mutated
from tests.contract.run_store_values import heard, run, step
from trainmedic.wire.envelope import new_id
from trainmedic_server.adapters.apprise_notifier import AppriseNotifier
from trainmedic_server.adapters.slack import question_blocks
from trainmedic_server.adapters.slack.button_clicks import SlackButtonClicks
from trainmedic_server.adapters.slack.people import SlackFile
from trainmedic_server.adapters.slack.questions import SlackQuestions
from trainmedic_server.adapters.slack.web_api import SlackApi
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.cli import mcp
from trainmedic_server.cli.client import Client
from trainmedic_server.cli.mcp_tools import TOOLS, Reader
from trainmedic_server.domain.approval import AskedQuestion, Terms
from trainmedic_server.domain.run import OperatorOrder, OrderKind, Run, Status, StepStatus
from trainmedic_server.engine import orders
from trainmedic_server.errors import ConfigurationError, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.store import Transaction
from trainmedic_server.settings import server as settings

MESSAGES = trials(1500, 100_000)
ARGUMENTS: dict[str, Any] = {
    "string": "x",
    "integer": 1,
    "boolean": True,
    "labels": {"a": "b"},
}

# --- an assistant -----------------------------------------------------------------------------------------


def requests() -> list[dict[str, Any]]:
    """One good request of each kind."""
    calls: list[dict[str, Any]] = [
        {"name": tool.name, "arguments": {name: ARGUMENTS[each.type] for name, each in tool.parameters.items()}}
        for tool in TOOLS.values()
    ]
    made = [{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call} for call in calls]
    made += [{"jsonrpc": "2.0", "id": 1, "method": name, "params": {}} for name in ("ping", "tools/list")]
    meta = {"_meta": {mcp.REVISION_KEY: mcp.PER_REQUEST_REVISION}}
    made.append({"jsonrpc": "2.0", "id": "a", "method": "server/discover", "params": meta})
    return [*made, {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-06-18"}}]


ANSWERS = (b"{}", b'{"items":[],"next":null}', b"[]", b"null", b'"x"', b"\xff", b"", b'{"items":[{"a":"\\ud800"}]}')
PING = b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}'


def test_an_assistants_messages_never_end_the_connection() -> None:
    """Each answer conforms to the protocol, and the next message is answered."""
    source, real = random_source(), requests()
    client = Client("http://trainmedic", None)
    client._http = httpx.Client(
        base_url="http://trainmedic/",
        transport=httpx.MockTransport(lambda _: httpx.Response(200, content=source.choice(ANSWERS))),
    )
    for _ in range(MESSAGES):
        message = mutated(source, source.choice(real)).replace(b"\n", b" ")
        assert replies_to(client, message + b"\n" + PING + b"\n")[-1]["result"] == {}, message
    client.close()


@pytest.mark.parametrize(
    "message",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":' + b'{"arguments":' * 5000 + b"1" + b"}" * 5001,
        b'{"jsonrpc":"2.0","id":' + b"9" * 4000 + b',"method":"ping"}',
        b'{"jsonrpc":"2.0","id":"\\ud800","method":"ping"}',
        b'{"jsonrpc":"2.0","id":1,"method":"\\ud800"}',
        b"x" * (mcp.LONGEST_LINE * 2),
    ],
    ids=["arrays", "objects", "arguments", "number", "surrogate", "method", "long"],
)
def test_a_deep_or_huge_message_and_the_next_one_are_answered(message: bytes) -> None:
    """No depth and no length ends the program."""
    client = Client("http://trainmedic", None)
    replies = replies_to(client, message + b"\n" + PING + b"\n")
    assert replies[-1] == {"jsonrpc": "2.0", "id": 1, "result": {}}
    assert len(replies) == 2
    client.close()


def replies_to(client: Client, messages: bytes) -> list[dict[str, Any]]:
    out = io.BytesIO()
    mcp.serve(Reader(client), io.BytesIO(messages), out)
    replies = [json.loads(line) for line in out.getvalue().splitlines()]
    assert all(reply["jsonrpc"] == "2.0" and ("result" in reply) != ("error" in reply) for reply in replies)
    return replies


# --- Slack ------------------------------------------------------------------------------------------------


class Called:
    """Slack's API, which takes everything."""

    async def call(self, method: str, document: Mapping[str, Any]) -> Mapping[str, Any]:
        json.dumps(document)
        return {"ok": True, "ts": "1.0", "channel": "C0123456789"}


class Orders:
    """Accepts orders as the engine does."""

    def __init__(self, store: InMemoryStore) -> None:
        self._store = store
        self.accepted: list[OperatorOrder] = []

    async def order(
        self,
        run_id: str,
        kind: OrderKind,
        actor: str,
        note: str = "",
        groups: frozenset[str] = frozenset(),
        question: AskedQuestion | None = None,
    ) -> Run:
        order = OperatorOrder(new_id(), run_id, kind, actor, datetime.now(UTC), note)
        await self._store.transact(lambda tx: orders.accept(tx, order, groups, question))
        self.accepted.append(order)
        return run()


PEOPLE = {"U0123ABCDEF": {"name": "ann", "groups": ["hardware"]}}
SETTINGS = SlackFile.model_validate({"channel": "C0123456789", "people": PEOPLE})


async def test_slack_payloads_decide_only_for_named_people() -> None:
    """Nothing is raised, whatever a payload contains."""
    source, store = random_source(), InMemoryStore()
    asking = step(kind="approve", id="sure", status=StepStatus.WAITING, params=Terms(by=("nobody",)).as_data())
    waiting = run(status=Status.AWAITING_APPROVAL, steps=(asking,))

    def work(tx: Transaction) -> None:
        tx.save_alerts([heard()])
        tx.add_runs([waiting])
        tx.link([(waiting.id, heard().identity)])

    await store.transact(work)
    taken = Orders(store)
    outcomes: list[str] = []
    api = cast("SlackApi", Called())
    questions = SlackQuestions(api, store, store, lambda: SETTINGS, "https://medic.example", lambda: None)
    presses = SlackButtonClicks(api, taken, questions, lambda: SETTINGS, outcomes.append)
    real = payloads(waiting.id)
    half = json.loads(json.dumps(real[2]).replace('"no"', '"no \\ud800 \\u0000"'))
    await presses.handle(half)
    assert [order.note for order in taken.accepted] == [r"no \ud800 (in Slack, U0123ABCDEF)"]
    for _ in range(MESSAGES):
        try:
            payload = json.loads(mutated(source, source.choice(real)))
        except (ValueError, RecursionError):
            continue
        if isinstance(payload, dict):
            await presses.handle(payload)
    assert outcomes
    assert {order.kind for order in taken.accepted} <= {OrderKind.REJECT}, "the playbook names who may approve"
    assert {order.actor for order in taken.accepted} <= {"ann"}


def payloads(run_id: str) -> list[dict[str, Any]]:
    """A press of each button, and a form, of somebody who may and somebody who may not."""
    value = question_blocks.button_value(run_id, AskedQuestion("sure", 1))
    metadata = question_blocks.form_metadata(value, ("C0123456789", "1.0"))
    reason = {question_blocks.REASON: {question_blocks.REASON: {"value": "no"}}}
    view = {"callback_id": question_blocks.REJECT, "private_metadata": metadata, "state": {"values": reason}}
    made: list[dict[str, Any]] = []
    for user in ("U0123ABCDEF", "U0999ZZZZZZ"):
        press: dict[str, Any] = {"type": "block_actions", "user": {"id": user}, "trigger_id": "1"}
        press["container"] = {"channel_id": "C0123456789", "message_ts": "1.0"}
        made += [
            {**press, "actions": [{"action_id": button, "value": value}]}
            for button in (question_blocks.APPROVE, question_blocks.REJECT)
        ]
        made.append({"type": "view_submission", "user": {"id": user}, "view": view})
    return made


# --- URLs of channels -------------------------------------------------------------------------------------

SECRET = "S3cretT0kenOf4Channel"
URLS = (
    "slack://{}/B/C", "slack://{}", "json://user:{}@127.0.0.1:99999", "nosuch://{}", "://{}", "mailto://{}", "{}",
    "tgram://{}/", "https://user:{}@[::1", "jsons://{}@%00", "discord://{}/\u202e", "syslog://{}/\x7f", "pover://{}@",
    "slack://a={}", "gotify://127.0.0.1:1/{}", "xml://127.0.0.1:1/{}", "ntfy://{}:{}@127.0.0.1:1/t", "x y://{}",
)  # fmt: skip


@pytest.mark.parametrize("url", URLS)
async def test_no_error_about_a_channel_repeats_its_url(
    url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the settings reject it or the service is unreachable: more people read logs than may know the URL."""

    def unreachable(*address: object, **options: object) -> None:
        raise OSError(f"no way to {address}")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    monkeypatch.setattr(socket.socket, "connect", unreachable)
    told = ""
    environment = {"TRAINMEDIC_NOTIFY_URLS": f"oncall={url.replace('{}', SECRET)}"}
    try:
        channels = settings.load({}, environment).notify_urls
        told = repr(channels)
        urls = {name: tuple(map(revealed, each)) for name, each in channels.items()}
        await AppriseNotifier(urls).notify("title", "text", None)
    except (ConfigurationError, pydantic.ValidationError, PermanentFailure, TemporaryFailure) as error:
        told += f"{error} {error!r}"
    out, err = capfd.readouterr()
    assert SECRET not in told + out + err + caplog.text


def revealed(url: Any) -> str:
    return str(url.get_secret_value()) if isinstance(url, pydantic.SecretStr) else str(url)
