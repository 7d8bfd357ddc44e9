"""What Slack's own API promises of what we use, held by the stand-in; and by Slack, where a test app of it is named.

It is named by TRAINMEDIC_TEST_SLACK_BOT_TOKEN, TRAINMEDIC_TEST_SLACK_APP_TOKEN and TRAINMEDIC_TEST_SLACK_CHANNEL, a
channel that the app is in.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest
from msgspec.structs import replace

from tests.contract.run_store_values import run
from tests.support import slack as stand_in
from trainmedic_server.adapters.slack import question_blocks
from trainmedic_server.adapters.slack.socket_mode import SocketMode
from trainmedic_server.adapters.slack.web_api import SlackApi
from trainmedic_server.domain.approval import StepAhead, Terms
from trainmedic_server.domain.run import StepState, StepStatus
from trainmedic_server.errors import ChatRefused, TemporaryFailure

_NAMES = ("BOT_TOKEN", "APP_TOKEN", "CHANNEL")
REAL = {name: os.environ.get(f"TRAINMEDIC_TEST_SLACK_{name}", "") for name in _NAMES}


@dataclass(frozen=True)
class App:
    api: SlackApi
    channel: str
    url: str


@pytest.fixture(params=["stand-in", *(["slack"] if all(REAL.values()) else [])])
async def app(request: pytest.FixtureRequest) -> AsyncIterator[App]:
    if request.param == "slack":
        url = "https://slack.com/api"
        made = App(SlackApi(url, REAL["BOT_TOKEN"], REAL["APP_TOKEN"]), REAL["CHANNEL"], url)
        yield made
        await made.api.close()
        return
    with stand_in.slack() as slack:
        made = App(SlackApi(slack.url, stand_in.BOT, stand_in.APP), stand_in.CHANNEL, slack.url)
        yield made
        await made.api.close()


def waiting(question: str) -> tuple[dict[str, object], str]:
    """The message of a question with everything in it that can be long, and its run's id."""
    ahead = tuple(StepAhead(f"s{n}", "job.rollback", {"x": "y" * 500}, (), ("node-1",), 8) for n in range(50))
    terms = Terms(ahead, by=tuple("n" * 128 for _ in range(100)), count=2)
    now = datetime.now(UTC)
    step = StepState("steps", 0, "sure", "approve", status=StepStatus.WAITING, params=terms.as_data(), message=question)
    asking = run(steps=(replace(step, started_at=now, deadline=now),), alert_name="a" * 10_000)
    return question_blocks.message(asking, asking.steps[0], (), "https://medic.example"), asking.id


@pytest.mark.parametrize(
    "question",
    [
        "Go back?",
        "😀" * 10_000,
        "<!channel> & <https://evil.example|x>\n" * 500,
        "\x1b\u202e",
        "half \ud800 of a pair" * 500,
    ],
)
async def test_a_message_within_the_limits_is_accepted_found_and_edited(app: App, question: str) -> None:
    """Any of its parts may be long."""
    document, run_id = waiting(question)
    posted = await app.api.call("chat.postMessage", {**document, "channel": app.channel})
    history = await app.api.call(
        "conversations.history", {"channel": app.channel, "limit": 5, "include_all_metadata": True}
    )
    payloads = {each["ts"]: each.get("metadata", {}).get("event_payload") for each in history["messages"]}
    assert payloads[posted["ts"]] == {"run_id": run_id, "step": "sure"}
    await app.api.call("chat.update", {**document, "channel": posted["channel"], "ts": posted["ts"]})


@pytest.mark.parametrize(
    ("method", "document", "code"),
    [
        ("chat.postMessage", {"channel": "C0NOBODY", "text": "x"}, "channel_not_found"),
        ("chat.update", {"ts": "1.000001", "text": "x"}, "message_not_found"),
        ("chat.postMessage", {"blocks": [{"type": "section", "text": {"type": "plain_text", "text": "x" * 3_001}}]},
         "invalid_blocks"),
        ("chat.postMessage", {"blocks": [{"type": "divider"}] * 51}, "invalid_blocks"),
        ("views.open", {"trigger_id": "1.1.a", "view": {}}, None),
    ],
)  # fmt: skip
async def test_an_invalid_call_is_refused_with_its_error_code(
    app: App, method: str, document: dict[str, object], code: str | None
) -> None:
    """The error concerns only that call."""
    with pytest.raises(ChatRefused) as caught:
        await app.api.call(method, {"channel": app.channel, **document})
    assert code in (None, caught.value.code)


async def test_a_wrong_token_stops_all_calls(app: App) -> None:
    """Users fix the token, which does not appear in the error."""
    api = SlackApi(app.url, "xoxb-wrong", "xapp-wrong")
    for call in (api.call("chat.postMessage", {"channel": app.channel, "text": "x"}), api.open_socket()):
        with pytest.raises(TemporaryFailure, match="invalid_auth") as caught:
            await call
        assert "wrong" not in str(caught.value)
    await api.close()


async def test_the_socket_opens_with_the_app_token(app: App) -> None:
    """It reports the connection."""
    connected = asyncio.Event()

    async def handle(_: object) -> None: ...

    socket = SocketMode(app.api.open_socket, handle, lambda stands: connected.set() if stands else None)
    running = asyncio.create_task(socket.run())
    await asyncio.wait_for(connected.wait(), 60)
    running.cancel()
    await asyncio.wait([running])


async def test_rate_limited_calls_are_repeated() -> None:
    """They are repeated after the time that Slack requests."""
    with stand_in.slack() as slack:
        api = SlackApi(slack.url, stand_in.BOT, stand_in.APP)
        slack.away = "limited"
        assert (await api.call("chat.postMessage", {"channel": stand_in.CHANNEL, "text": "x"}))["ok"] is True
        await api.close()
