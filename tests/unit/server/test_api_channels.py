"""``/channels``: where messages go, and the test of one; without a socket."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.support.api_world import World
from tests.support.clocks import StoppedClock
from tests.unit.server.test_console_access import TOKENS
from trainmedic_server import errors
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.api.channels import ChannelsApi
from trainmedic_server.auth.auth import Authenticator
from trainmedic_server.domain.message import DEFAULT_RULES, Severity
from trainmedic_server.domain.message_routes import routes_of
from trainmedic_server.ports.store import ActFilter
from trainmedic_server.settings.server import load
from trainmedic_server.wiring.notifications import channels_of


@dataclass
class ScriptedNotifier:
    """Keeps what it is to send; the channel ``broken`` cannot be reached."""

    sent: list[tuple[str, str, str | None]] = field(default_factory=list)

    async def notify(self, title: str, message: str, to: str | None, severity: Severity = Severity.INFO) -> None:
        if to == "broken":
            raise errors.TemporaryFailure("could not be sent to broken")
        self.sent.append((title, message, to))


async def test_a_test_message_is_sent_by_an_operator_and_recorded() -> None:
    """Also one that did not arrive; and nothing is sent by asking what there is."""
    store, notifier = InMemoryStore(), ScriptedNotifier()
    services = {"ops": ["slack"], "broken": ["mailto"]}
    told = ChannelsApi(store, StoppedClock(), services, DEFAULT_RULES, notifier)
    async with World(auth=Authenticator(TOKENS), channels=told).client() as client:
        viewer, operator = ({"authorization": f"Bearer {secret}"} for secret in ("look", "op"))
        items = (await client.get("/channels", headers=viewer)).json()["items"]
        assert [(each["name"], each["services"]) for each in items] == [("broken", ["mailto"]), ("ops", ["slack"])]
        assert "approval" in items[0]["messages"]
        assert "repaired" not in items[0]["messages"]
        assert (await client.post("/channels/ops/test", headers=viewer)).status_code == 403
        assert notifier.sent == []
        sent = await client.post("/channels/ops/test", headers=operator, json={"note": "is it there?"})
        assert sent.json() == {"channel": "ops", "sent": True, "detail": ""}
        ((_, message, to),) = notifier.sent
        assert (to, "Sent by ann" in message, message.endswith("is it there?")) == ("ops", True, True)
        failed = await client.post("/channels/broken/test", headers=operator)
        assert failed.json() == {"channel": "broken", "sent": False, "detail": "could not be sent to broken"}
        assert (await client.post("/channels/none/test", headers=operator)).status_code == 404
    acts = await store.acts_of_people(ActFilter(), None, 10)
    assert [(act.kind, act.actor, act.data["channel"], act.data["sent"]) for act in acts] == [
        ("channel_tested", "ann", "broken", False),
        ("channel_tested", "ann", "ops", True),
    ]


def test_nothing_of_a_channels_address_is_shown_but_its_kind() -> None:
    """The rest holds secrets: tokens, names, hosts."""
    urls = "ops=slack://tokenA/tokenB/tokenC ops=mailto://me:secret@example.org odd=json://user:pass@10.0.0.1/x"
    settings = load({}, {"TRAINMEDIC_NOTIFY_URLS": urls})
    told = channels_of(settings, InMemoryStore(), None, StoppedClock())
    assert dict(told.services) == {"ops": ["slack", "mailto"], "odd": ["json"]}


async def test_routes_are_shown_and_a_missing_default_is_told() -> None:
    """A kind that no route of a channel takes is not among what is told there; the lack of a default is no fault."""
    names = ("gpu", "ops")
    services = {name: ["slack"] for name in names}
    for text, caveat in (("gpu=kind:pause ops=kind:approval", True), ("gpu=kind:pause ops=default", False)):
        told = ChannelsApi(InMemoryStore(), StoppedClock(), services, DEFAULT_RULES, None, routes_of(text, names))
        async with World(channels=told).client() as client:
            gpu, ops = (await client.get("/channels")).json()["items"]
            notifications = (await client.get("/ready")).json()["notifications"]
        assert (gpu["routes"], ops["routes"]) == (["kind:pause"], ["kind:approval" if caveat else "default"])
        assert ("breaker" in gpu["messages"], "breaker" in ops["messages"]) == (caveat, True)
        assert notifications["ok"]
        assert ("no default channel is set" in notifications["detail"]) is caveat
