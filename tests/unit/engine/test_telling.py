"""What the server tells people by itself: at least once, grouped, bounded, and true when it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from tests.unit.engine.world import Tell, World
from trainmedic_core.problems import FileProblem
from trainmedic_server import errors
from trainmedic_server.adapters import apprise_notifier
from trainmedic_server.domain import event_kinds as kinds
from trainmedic_server.domain.event_codec import recorded
from trainmedic_server.domain.message import DEFAULT_RULES, Severity, parse_rules
from trainmedic_server.domain.message_routes import routes_of
from trainmedic_server.domain.pause import PauseOrder, Scope
from trainmedic_server.domain.run import Event, OrderKind
from trainmedic_server.domain.topology import ClusterNode, SlurmTopology, names_of
from trainmedic_server.engine import message_delivery
from trainmedic_server.engine.message_delivery import MessageDelivery

MakeWorld = Callable[..., World]

CAPPING = """
playbook: capping
on: {alert: Hot}
target: node
steps:
  - {id: cap, action: test.cap, undo: on_resolve}
"""
ASKING = """
playbook: asking
on: {alert: Hot}
target: node
steps:
  - {id: ask, approve: "Cap {{ target.node }}?", timeout: 30m}
  - {id: cap, action: test.cap}
"""


class Channels:
    """`ports.Notifier` that keeps what is sent, and fails as it is told."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, str | None, Severity]] = []
        self.fails: dict[str, Exception] = {}
        self.hangs: set[str] = set()
        self.silent: set[str] = set()
        """Services that take a message and never answer."""

    async def notify(self, title: str, message: str, to: str | None, severity: Severity = Severity.INFO) -> None:
        if to in self.hangs:
            await asyncio.Event().wait()
        if to in self.fails:
            raise self.fails[to]
        if to in self.silent:
            await asyncio.sleep(apprise_notifier._SENDS_WITHIN)
            self.sent.append((title, message, to, severity))
            raise errors.PermanentFailure(f"no answer of {to}, which may have it")
        self.sent.append((title, message, to, severity))

    @property
    def titles(self) -> list[str]:
        return [title for title, *_ in self.sent]


class Telling:
    """A teller over a world's store, which can be killed and begun again."""

    def __init__(
        self,
        world: World,
        channels: Channels,
        rules: str = "",
        names: tuple[str, ...] = ("oncall",),
        routes: str = "",
    ) -> None:
        self.world = world
        self.channels = channels
        self.problems: list[FileProblem] = []
        self._rules = parse_rules(rules)
        self.routes = routes
        self.teller: MessageDelivery | None = None
        self._names = names
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> Telling:
        self.teller = MessageDelivery(
            self.world.store, self.world.store, self.channels, self.world.clock, self.world.metrics,
            self._rules, routes_of(self.routes, self._names), external_url="https://medic.example",
            problems=lambda: self.problems,
        )  # fmt: skip
        self._task = asyncio.create_task(self.teller.run())
        await asyncio.sleep(0.001)
        return self

    async def kill(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])


@pytest.fixture
async def begin(world: MakeWorld) -> Any:
    """Makes a world whose server tells people."""
    begun: list[Telling] = []

    async def make(
        *playbooks: str, rules: str = "", names: tuple[str, ...] = ("oncall",), routes: str = "", **limits: Any
    ) -> Telling:
        one = Telling(world(*playbooks, **limits), Channels(), rules, names, routes)
        await one.world.engine.start()
        begun.append(await one.begin())
        return one

    yield make
    for one in begun:
        await one.kill()


def metric(world: World, name: str, **labels: str) -> float:
    return world.metrics.registry.get_sample_value(name, labels) or 0.0


async def test_a_failure_is_told_with_what_was_tried_and_what_came_of_it(begin: Any) -> None:
    """So a playbook needs no ``on_failure`` for that. One that has told people by itself is not told of twice."""
    ladder = """
playbook: ladder
on: {alert: Hot}
target: node
steps:
  - {id: cap, action: test.cap, undo: on_resolve}
  - {id: cooled, wait_for: resolved, timeout: 1m, on_timeout: continue}
  - {id: skipped, when: steps.cap.status == "failed", action: test.other}
  - {id: harder, action: test.other}
"""
    t = await begin(ladder)
    t.world.actions["other"].outcomes.append(errors.PermanentFailure("no agent"))
    alert = t.world.alert(node="n1")
    await t.world.post(replace(alert, annotations={"summary": "n1 has 95 °C"}))
    await t.world.pass_time(120)
    ((title, text, *_),) = t.channels.sent
    assert title == "[warning] ladder on node:n1 failed"
    assert text.splitlines()[:-1] == [
        "Alert Hot. step harder: no agent",
        "n1 has 95 °C",
        "- cap: succeeded",
        "- cooled: timed_out, the alert had not resolved in time",
        "- harder: failed, no agent",
        "Still to revert, by test.uncap.",
    ]


async def test_a_group_is_told_once(begin: Any) -> None:
    """One message for the whole group, however many members fail, with the counts."""
    rack = CAPPING.replace("target: node", "target: {nodes: {rack: r1}}\nrollout: {serial: 100%}")
    t = await begin(rack, inventory={"attributes:n[1-8]": "rack=r1"}, breaker_min_nodes=50)
    t.world.actions["cap"].outcomes.extend([errors.PermanentFailure("no")] * 5)
    await t.world.post(t.world.alert())
    await t.world.pass_time(120)
    ((title, text, *_),) = t.channels.sent
    assert title.startswith("[")
    assert "nodes:rack=r1" in title
    assert "5 members failed, and max_errors is 0" in text


async def test_a_question_is_asked_with_what_would_be_done_and_where_to_answer(begin: Any) -> None:
    """Whom it reaches can decide: question, steps, deadline, run and link."""
    t = await begin(ASKING)
    await t.world.post(t.world.alert(node="n1"))
    await t.world.pass_time(15)
    run = await t.world.run()
    ((title, text, to, severity),) = t.channels.sent
    assert (title, to, severity) == ("[warning] node:n1: Cap n1?", "oncall", Severity.WARNING)
    assert "1. test.cap amount=1.0" in text
    assert f"It waits until {run.step(('steps', 0)).deadline:%d %b %H:%M}Z." in text
    assert f"trainmedic runs approve {run.id}" in text
    assert text.endswith(f"run {run.id[-8:]} · https://medic.example/runs/{run.id}")


async def test_who_has_decided_is_told_to_those_who_were_asked(begin: Any) -> None:
    """They need not look; the note is there as well."""
    t = await begin(ASKING)
    await t.world.post(t.world.alert(node="n1"))
    await t.world.pass_time(15)
    await t.world.engine.order((await t.world.run()).id, OrderKind.REJECT, "ann", "not now")
    await t.world.pass_time(15)
    assert t.channels.titles[1:] == ["[info] Re: asking on node:n1: rejected by ann: not now"]


async def test_a_question_goes_where_the_playbook_says_and_is_told_again(begin: Any) -> None:
    """As a reminder, and then to those whom it names for when nobody answers."""
    question = """{message: "Cap?", to: chat, by: [ann], count: 1, remind: 10m,
      escalate: {by: [bob], to: pager, timeout: 20m, on_timeout: reject}}, timeout: 30m, on_timeout: escalate"""
    t = await begin(ASKING.replace('"Cap {{ target.node }}?", timeout: 30m', question), names=("chat", "pager", "mail"))
    await t.world.post(t.world.alert(node="n1"))
    await t.world.pass_time(3600)
    asked = [(title, to) for title, _, to, _ in t.channels.sent if not title.startswith("[info]")]
    assert asked[0] == ("[warning] node:n1: Cap?", "chat")
    assert asked[1] == ("[warning] Reminder: node:n1: Cap?", "chat")
    assert ("[warning] No answer yet: node:n1: Cap?", "pager") in asked
    assert "Needs approval by ann." in t.channels.sent[0][1]
    ended = [title for title in t.channels.titles if title.startswith("[info] Re:")]
    assert ended[-1] == "[info] Re: asking on node:n1: no answer in time: rejected"


async def test_what_was_answered_at_once_is_not_asked(begin: Any) -> None:
    """A question that is over would only disturb."""
    t = await begin(ASKING)
    await t.world.post(t.world.alert(node="n1"))
    await t.world.pass_time(3)
    await t.world.engine.order((await t.world.run()).id, OrderKind.APPROVE, "ann")
    await t.world.pass_time(60)
    assert t.channels.sent == []


async def test_what_needs_no_telling_delays_no_other_message(begin: Any) -> None:
    """Only what was sent counts for the minute between two messages."""
    t = await begin(ASKING)
    await t.world.post(t.world.alert(node="n1"))
    await t.world.pass_time(3)
    await t.world.engine.order((await t.world.run()).id, OrderKind.APPROVE, "ann")
    await t.world.pass_time(15)
    await t.world.post(t.world.alert(node="n2"))
    await t.world.pass_time(15)
    assert t.channels.titles == ["[warning] node:n2: Cap n2?"]


async def test_eight_failed_runs_of_a_playbook_are_one_message(begin: Any) -> None:
    """One line for each, with the run's short id and link; and no second message within the minute."""
    t = await begin(CAPPING)
    t.world.actions["cap"].outcomes += [errors.PermanentFailure("no agent is connected")] * 9
    for number in range(8):
        await t.world.post(t.world.alert(node=f"n{number}"))
    await t.world.pass_time(15)
    ((title, text, _, _),) = t.channels.sent
    assert title == "[warning] capping: 8 runs failed"
    assert len(text.splitlines()) == 8
    assert all(f"node:n{number}" in text for number in range(8))
    assert text.count("https://medic.example/runs/") == 8
    await t.world.post(t.world.alert(node="n8"))
    await t.world.pass_time(40)
    assert len(t.channels.sent) == 1
    await t.world.pass_time(30)
    assert t.channels.titles[1:] == ["[warning] capping on node:n8 failed"]


async def test_a_clock_that_is_set_back_keeps_no_message(begin: Any) -> None:
    """That another one was sent at a time which has not come yet is no reason to wait for it."""
    t = await begin(CAPPING)
    for number in range(2):
        t.world.actions["cap"].outcomes.append(errors.PermanentFailure("no agent is connected"))
        await t.world.post(t.world.alert(node=f"n{number}"))
        await t.world.pass_time(15)
        t.world.clock.set_back(timedelta(hours=1 - number))
    assert len(t.channels.sent) == 2


async def test_a_failure_is_told_as_it_is_on_record(begin: Any) -> None:
    """The message says why; nothing is claimed of a step that was not carried out."""
    t = await begin(CAPPING)
    t.world.actions["cap"].outcomes.append(errors.OutcomeUnknown("no agent on node 'n1' is connected"))
    await t.world.post(t.world.alert(node="n1"))
    await t.world.pass_time(15)
    ((_, text, _, _),) = t.channels.sent
    assert "- cap: unknown, no agent on node 'n1' is connected" in text
    assert "Still to revert, by test.uncap." in text


@pytest.mark.parametrize("after", [15, 0.1])
async def test_people_who_were_told_of_a_failure_hear_how_it_ended(begin: Any, after: float) -> None:
    """That the alert has resolved, and that what was done is taken back; also where that is at once."""
    t = await begin(CAPPING)
    t.world.actions["cap"].outcomes.append(errors.OutcomeUnknown("no answer"))
    await t.world.post(t.world.alert(node="n1"))
    await t.world.pass_time(after)
    await t.world.post(t.world.alert(node="n1", status="resolved"))
    await t.world.pass_time(70)
    assert sorted(t.channels.titles[1:]) == ["[info] capping: 2 messages"]
    assert "Hot has resolved" in t.channels.sent[1][1]
    assert "its changes are reverted" in t.channels.sent[1][1]


async def test_an_undo_that_succeeds_within_two_minutes_is_no_news(begin: Any) -> None:
    """An agent that restarts is away for less."""
    t = await begin(CAPPING)
    t.world.actions["uncap"].outcomes += [errors.TemporaryFailure("no agent")] * 3
    await t.world.post(t.world.alert(node="n1"))
    await t.world.pass_time(1)
    await t.world.post(t.world.alert(node="n1", status="resolved"))
    await t.world.pass_time(600)
    assert t.channels.sent == []


async def test_an_undo_that_cannot_be_given_back_is_told_once(begin: Any) -> None:
    """As critical, after two minutes, and not again for each try."""
    t = await begin(CAPPING)
    t.world.actions["uncap"].outcomes += [errors.TemporaryFailure("refused"), errors.TemporaryFailure("no agent")] * 50
    await t.world.post(t.world.alert(node="n1"))
    await t.world.pass_time(1)
    await t.world.post(t.world.alert(node="n1", status="resolved"))
    await t.world.pass_time(3600)
    assert t.channels.titles == ["[critical] capping on node:n1: its changes cannot be reverted"]


async def test_a_change_that_ended_too_early_is_told_of_and_that_it_was_made_again(begin: Any) -> None:
    t = await begin(CAPPING)
    await t.world.post(t.world.alert(node="n1"))
    run = await t.world.run()
    for content in (
        kinds.LeaseLost("cap", "c-1", "n1", "node n1 is IDLE with the reason ''"),
        kinds.SetAgainDone("cap", "c-1", {}),
    ):
        event = recorded(content, t.world.clock.now(), run.id)
        await t.world.store.transact(lambda tx, event=event: tx.append([event]))
        await t.world.pass_time(60)
    assert t.channels.titles == [
        "[warning] capping on node:n1: its change on n1 has ended, and is still needed",
        "[info] Re: capping on node:n1: reapplied",
    ]
    assert "Step cap: node n1 is IDLE with the reason ''" in t.channels.sent[0][1]


async def test_pausing_and_the_breaker_are_told_with_who_did_it(begin: Any) -> None:
    """The server does less from then on, and somebody ought to know."""
    t = await begin(CAPPING)
    await t.world.engine.pause("ann")
    await t.world.pass_time(15)
    await t.world.engine.resume("bob")
    await t.world.pass_time(70)
    await t.world.store.transact(lambda tx: tx.save_controls(replace(tx.controls(), breaker_open=True)))
    await t.world.engine.close_breaker("ann")
    await t.world.pass_time(15)
    assert t.channels.titles == [
        "[info] Paused by ann (everything)",
        "[info] Resumed by bob (everything)",
        "[critical] The breaker was closed by ann",
    ]


async def test_a_pause_is_told_with_what_until_when_and_why(begin: Any) -> None:
    """And when it is over by itself."""
    t = await begin(CAPPING)
    order = PauseOrder(Scope(node="n1"), length=timedelta(minutes=30), note="new fans")
    _, pause = await t.world.engine.pause("ann", order)
    await t.world.pass_time(15)
    assert pause.ends_at is not None
    assert t.channels.titles == [f"[info] Paused by ann (node n1, until {pause.ends_at:%d %b %H:%M}Z): new fans"]
    await t.world.pass_time(1900)
    assert t.channels.titles[1:] == ["[info] A pause ended (node n1): new fans"]


async def test_a_playbook_restricted_to_observing_is_told_of_and_that_it_acts_again(begin: Any) -> None:
    t = await begin(CAPPING)
    _, pause = await t.world.engine.pause("ann", PauseOrder(Scope(playbook="capping"), observe=True))
    await t.world.pass_time(15)
    await t.world.engine.resume("bob", pause.id)
    await t.world.pass_time(70)
    assert t.channels.titles == [
        "[info] Restricted to observing by ann (playbook capping)",
        "[info] Acts as written again by bob (playbook capping)",
    ]


async def test_a_playbook_that_cannot_be_loaded_is_told_once_until_it_is_mended(begin: Any) -> None:
    """Not where it is mended at once; over a restart not again; and again where the same mistake comes back."""
    t = await begin(CAPPING)
    mistake = FileProblem("playbooks/new.yaml", 3, 1, "'target' is missing")
    t.problems = [mistake]
    await t.world.pass_time(20)
    t.problems = []
    await t.world.pass_time(60)
    assert t.channels.sent == []
    t.problems = [mistake]
    await t.world.pass_time(60)
    assert t.channels.titles == ["[warning] 1 playbook file cannot be loaded: playbooks/new.yaml"]
    assert "playbooks/new.yaml:3:1: 'target' is missing" in t.channels.sent[0][1]
    await t.kill()
    await t.begin()
    await t.world.pass_time(200)
    assert len(t.channels.sent) == 1
    t.problems = []
    await t.world.pass_time(10)
    t.problems = [mistake]
    await t.world.pass_time(60)
    assert len(t.channels.sent) == 2


async def test_repairs_are_told_where_that_is_wished(begin: Any) -> None:
    """By default nobody is told that all is well."""
    t = await begin(CAPPING, rules="repaired=on given_back=info")
    await t.world.post(t.world.alert(node="n1"))
    await t.world.pass_time(15)
    await t.world.post(t.world.alert(node="n1", status="resolved"))
    await t.world.pass_time(15)
    assert t.channels.titles == [
        "[info] capping on node:n1: applied test.cap",
        "[info] capping on node:n1: its changes are reverted",
    ]


async def test_a_kind_goes_to_the_channels_that_are_set_for_it(begin: Any) -> None:
    """With the severity that is set; one that is off goes nowhere."""
    t = await begin(ASKING, rules="approval=critical@pager pause=off", names=("chat", "pager"))
    await t.world.engine.pause("ann")
    await t.world.engine.resume("ann")
    await t.world.post(t.world.alert(node="n1"))
    await t.world.pass_time(15)
    assert [(to, severity) for _, _, to, severity in t.channels.sent] == [("pager", Severity.CRITICAL)]


async def test_a_kill_loses_no_message_and_repeats_none(begin: Any) -> None:
    """What was not sent is sent by the next server, what was sent is not; at whatever moment the first one died."""
    for seconds in (0.5, 5, 9.9, 10.5, 12, 30):
        t = await begin(CAPPING)
        t.world.actions["cap"].outcomes.append(errors.PermanentFailure("no agent"))
        await t.world.post(t.world.alert(node="n1"))
        await t.world.pass_time(seconds)
        await t.kill()
        await t.world.pass_time(5)
        await t.begin()
        await t.world.pass_time(90)
        assert t.channels.titles == ["[warning] capping on node:n1 failed"], seconds


async def test_a_kill_while_a_message_is_sent_has_it_sent_again(begin: Any) -> None:
    """At least once: nobody knows whether the service had it."""
    t = await begin(CAPPING)
    t.channels.hangs.add("oncall")
    t.world.actions["cap"].outcomes.append(errors.PermanentFailure("no agent"))
    await t.world.post(t.world.alert(node="n1"))
    await t.world.pass_time(15)
    await t.kill()
    t.channels.hangs.clear()
    await t.begin()
    await t.world.pass_time(15)
    assert t.channels.titles == ["[warning] capping on node:n1 failed"]


async def test_a_channel_that_is_down_holds_up_nothing_and_gets_it_later(begin: Any) -> None:
    """Neither the other channel nor a run; each failed try is counted."""
    t = await begin(CAPPING, names=("chat", "mail"))
    t.channels.fails["chat"] = errors.TemporaryFailure("could not be sent to chat")
    t.world.actions["cap"].outcomes.append(errors.PermanentFailure("no agent"))
    await t.world.post(t.world.alert(node="n1"))
    await t.world.pass_time(120)
    assert [to for _, _, to, _ in t.channels.sent] == ["mail"]
    assert metric(t.world, "trainmedic_message_errors_total", channel="chat") >= 3
    assert metric(t.world, "trainmedic_messages_waiting", channel="chat") == 1
    await t.world.post(t.world.alert(node="n2"))
    assert (await t.world.runs())[-1].action_taken == "test.cap"
    t.channels.fails.clear()
    await t.world.pass_time(400)
    assert [to for _, _, to, _ in t.channels.sent] == ["mail", "chat"]


async def test_a_service_that_does_not_answer_gets_a_message_once(begin: Any) -> None:
    """The notifier waits its whole time and says that the service may have it. Other channels do not wait for it."""
    t = await begin(CAPPING, names=("chat", "mail"))
    t.channels.silent.add("chat")
    t.world.actions["cap"].outcomes.append(errors.PermanentFailure("no agent"))
    await t.world.post(t.world.alert(node="n1"))
    await t.world.pass_time(15)
    assert [to for _, _, to, _ in t.channels.sent] == ["mail"]
    await t.world.pass_time(80)
    assert [to for _, _, to, _ in t.channels.sent] == ["mail", "chat"]
    t.channels.silent.clear()
    await t.world.pass_time(600)
    assert [to for _, _, to, _ in t.channels.sent] == ["mail", "chat"], "it is not sent again"
    assert metric(t.world, "trainmedic_messages_total", kind="run_failed", outcome="failed") == 1


async def test_what_waits_is_bounded_and_the_oldest_are_given_up(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, so that it is seen; the newest say most about now."""
    monkeypatch.setattr(message_delivery, "MOST_WAITING", 3)
    t = await begin(CAPPING)
    t.channels.fails["oncall"] = errors.TemporaryFailure("away")
    t.world.actions["cap"].outcomes += [errors.PermanentFailure("no agent")] * 8
    for number in range(8):
        await t.world.post(t.world.alert(node=f"n{number}"))
        await t.world.pass_time(3)
    t.channels.fails.clear()
    await t.world.pass_time(400)
    assert metric(t.world, "trainmedic_messages_total", kind="any", outcome="given_up") == 5
    assert [f"n{number}" in t.channels.sent[0][1] for number in range(8)] == [False] * 5 + [True] * 3


async def test_a_message_that_is_never_taken_keeps_no_other_from_being_sent(
    begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again beside the others, and given up after a day, or what stands for one here."""
    monkeypatch.setattr(message_delivery, "KEPT_WAITING", timedelta(minutes=10))
    t = await begin(CAPPING, ASKING.replace("Hot", "Odd"))
    notify = t.channels.notify

    async def choosy(title: str, message: str, to: str | None, severity: Severity = Severity.INFO) -> None:
        if "failed" in title:
            raise errors.TemporaryFailure("could not be sent to oncall")
        await notify(title, message, to, severity)

    t.channels.notify = choosy
    t.world.actions["cap"].outcomes.append(errors.PermanentFailure("no agent"))
    await t.world.post(t.world.alert(node="n1"))
    await t.world.post(t.world.alert("Odd", node="n2"))
    await t.world.pass_time(60)
    assert t.channels.titles == ["[warning] node:n2: Cap n2?"]
    await t.world.pass_time(timedelta(minutes=20).total_seconds())
    assert metric(t.world, "trainmedic_messages_total", kind="any", outcome="given_up") == 1


async def test_a_message_that_is_refused_for_hours_delays_no_other(begin: Any) -> None:
    """Its own tries have become rare by then; a question is asked at once."""
    t = await begin(CAPPING, ASKING.replace("Hot", "Odd"))
    notify = t.channels.notify

    async def choosy(title: str, message: str, to: str | None, severity: Severity = Severity.INFO) -> None:
        if "failed" in title:
            raise errors.TemporaryFailure("could not be sent to oncall")
        await notify(title, message, to, severity)

    t.channels.notify = choosy
    t.world.actions["cap"].outcomes.append(errors.PermanentFailure("no agent"))
    await t.world.post(t.world.alert(node="n1"))
    await t.world.pass_time(3600)
    for number in range(2, 5):
        await t.world.post(t.world.alert("Odd", node=f"n{number}"))
        await t.world.pass_time(15)
        assert len(t.channels.sent) == number - 1
        await t.world.pass_time(100)
    assert metric(t.world, "trainmedic_message_errors_total", channel="oncall") < 25


async def test_giving_up_old_messages_hurries_no_others(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the same kind and topic are tried every 5 minutes by then."""
    monkeypatch.setattr(message_delivery, "KEPT_WAITING", timedelta(minutes=10))
    t = await begin(CAPPING, breaker_min_nodes=100)
    t.channels.fails["oncall"] = errors.TemporaryFailure("away")
    t.world.actions["cap"].outcomes += [errors.PermanentFailure("no agent")] * 40
    for number in range(40):
        await t.world.post(t.world.alert(node=f"n{number}"))
        await t.world.pass_time(60)
    assert metric(t.world, "trainmedic_messages_total", kind="any", outcome="given_up") > 20
    assert metric(t.world, "trainmedic_message_errors_total", channel="oncall") < 16


async def test_a_question_that_nobody_was_asked_is_no_recovery(begin: Any) -> None:
    """It is dropped because its run was cancelled; the service still fails."""
    t = await begin(ASKING)
    t.channels.fails["oncall"] = errors.TemporaryFailure("away")
    with capture_logs() as logs:
        await t.world.post(t.world.alert(node="n1"))
        await t.world.pass_time(60)
        (run,) = await t.world.runs()
        await t.world.engine.order(run.id, OrderKind.CANCEL, "ann")
        await t.world.pass_time(600)
    assert [line["topic"] for line in logs if line["event"] == "background loop delayed; retrying"] == ["asking"]
    assert metric(t.world, "trainmedic_messages_total", kind="approval", outcome="needless") == 1
    assert "background loop recovered" not in {line["event"] for line in logs}


async def test_only_what_was_not_sent_is_given_up(begin: Any) -> None:
    """After a day without a server, one of two old messages is sent, and the other is refused."""
    t = await begin(CAPPING, CAPPING.replace("capping", "other").replace("Hot", "Odd"))
    t.world.actions["cap"].outcomes += [errors.PermanentFailure("no agent")] * 2
    t.channels.fails["oncall"] = errors.TemporaryFailure("away")
    await t.world.post(t.world.alert(node="n1"), t.world.alert("Odd", node="n2"))
    await t.world.pass_time(60)
    await t.kill()
    await t.world.pass_time(timedelta(hours=25).total_seconds())
    t.channels.fails.clear()
    notify = t.channels.notify

    async def choosy(title: str, message: str, to: str | None, severity: Severity = Severity.INFO) -> None:
        if "capping" in title:
            raise errors.TemporaryFailure("could not be sent to oncall")
        await notify(title, message, to, severity)

    t.channels.notify = choosy
    await t.begin()
    await t.world.pass_time(60)
    assert [title.partition(" (late")[0] for title in t.channels.titles] == ["[warning] other on node:n2 failed"]
    assert metric(t.world, "trainmedic_messages_total", kind="any", outcome="given_up") == 1
    assert await t.world.store.transact(lambda tx: tx.messages.waiting("oncall", 10)) == []


async def test_what_happened_before_anybody_was_to_be_told_is_not_told(world: MakeWorld) -> None:
    """Neither the history of a server that is told of channels for the first time, nor that of days without any."""
    w = world(CAPPING)
    await w.engine.start()
    await w.engine.pause("ann")
    channels = Channels()
    first = await Telling(w, channels).begin()
    await w.pass_time(30)
    await first.kill()
    await w.engine.resume("ann")
    await w.pass_time(timedelta(hours=25).total_seconds())
    second = await Telling(w, channels).begin()
    await w.engine.pause("bob")
    await w.pass_time(30)
    await second.kill()
    assert channels.titles == ["[info] Paused by bob (everything)"]
    assert metric(w, "trainmedic_messages_total", kind="any", outcome="given_up") == 1


async def test_what_happened_before_a_long_downtime_is_told_after_it_as_late(begin: Any) -> None:
    """Two hours later people still have to look at what failed. It is one message, which says when that was; what has
    passed meanwhile is left out, and a question that still waits is asked."""
    asking = ASKING.replace("Hot", "Odd").replace("timeout: 30m", "timeout: 5h")
    t = await begin(CAPPING, asking, max_age=timedelta(hours=5))
    t.world.actions["cap"].outcomes += [errors.PermanentFailure("no agent")] * 2
    for number in range(2):
        await t.world.post(t.world.alert(node=f"n{number}"))
    for number in range(2, 4):
        await t.world.post(t.world.alert("Odd", node=f"n{number}"))
    [answered] = [run for run in await t.world.runs() if run.target_key == "node:n2"]
    await t.kill()  # before it has looked at any of this
    await t.world.restart(after=7200)
    await t.world.engine.order(answered.id, OrderKind.REJECT, "ann")
    await t.begin()
    await t.world.pass_time(60)
    failed, asked = sorted(t.channels.sent)
    assert failed[0].startswith("[warning] capping: 2 runs failed (late: 2h ago, ")
    assert [line.count("(late: 2h ago, ") for line in failed[1].splitlines()] == [1, 1]
    assert asked[0].startswith("[warning] node:n3: Cap n3? (late: 2h ago, ")
    await t.kill()
    await t.begin()
    await t.world.pass_time(60)
    assert len(t.channels.sent) == 2


async def test_a_server_of_several_says_that_it_has_taken_over(world: MakeWorld) -> None:
    """One that is alone says nothing when it starts."""
    w = world(CAPPING)
    await w.engine.start()
    channels = Channels()
    one = await Telling(w, channels).begin()
    await w.engine.stop()
    w.engine = w._engine()
    await w.engine.start("10.1.2.3:8080")
    await w.pass_time(15)
    await one.kill()
    assert channels.titles == ["[warning] 10.1.2.3:8080 is the leader now"]


def test_rules_change_the_defaults_one_after_the_other() -> None:
    """`all` is every kind; a later pair counts more."""
    rules = parse_rules("all=off run_failed=critical@oncall,chat pause=on")
    on = {str(kind): rule for kind, rule in rules.items() if rule.is_on}
    assert set(on) == {"run_failed", "pause"}
    assert (on["run_failed"].severity, on["run_failed"].channels) == (Severity.CRITICAL, ("oncall", "chat"))
    assert parse_rules("") == DEFAULT_RULES


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("run_faild=on", "unknown message kind 'run_faild'; did you mean 'run_failed'"),
        ("pause=loud", "'loud' is unknown; use on, off, info, warning, critical"),
        ("pause", "'pause' is not kind=severity"),
    ],
)
def test_a_rule_with_a_mistake_says_which(text: str, why: str) -> None:
    """The nearest name is offered."""
    with pytest.raises(ValueError, match=why):
        parse_rules(text)


BOUNDED = CAPPING.replace("steps:", "guards: {max_concurrent: 2}\nsteps:") + "  - {wait_for: resolved, timeout: 1h}\n"
RATED = CAPPING.replace("steps:", "guards: {max_runs: {count: 1, per: 1h}}\nsteps:")
COOLED = CAPPING.replace("steps:", "guards: {cooldown: 1h}\nsteps:")


async def test_people_are_told_of_an_alert_that_a_guard_leaves_alone(begin: Any) -> None:
    """What was not done, why, and what they can do; once, however often the alert is reported, also by a new server."""
    t = await begin(BOUNDED)
    for number in range(2):
        await t.world.post(t.world.alert(node=f"n{number}"))
    third = t.world.alert(node="n2")
    await t.world.post(third)
    await t.world.pass_time(15)
    ((title, text, _, severity),) = t.channels.sent
    assert title == "[warning] capping on node:n2 did not start: 2 runs are open, at most 2"
    assert severity is Severity.WARNING
    assert text.startswith("Nothing is done about Hot: 2 runs are open, at most 2.\nIt starts if the guard allows it")
    assert "raise max_concurrent in the guards of the playbook" in text
    assert "trainmedic history --open --playbook capping" in text
    assert f"run {(await t.world.runs())[2].id[-8:]} · https://medic.example/runs/" in text
    await t.kill()
    await t.begin()
    for _ in range(3):
        await t.world.pass_time(250)
        await t.world.post(third)
    await t.world.pass_time(4 * 3600)
    await t.world.post(third)
    await t.world.pass_time(70)
    assert len([title for title in t.channels.titles if "did not start" in title]) == 1


async def test_people_are_told_of_a_repair_that_would_leave_too_few_nodes(begin: Any) -> None:
    """The guard `min_available`, with what they can do."""
    nodes = tuple(ClusterNode(name, ()) for name in ("n1", "n2"))
    slurm = SlurmTopology(nodes, names=names_of(nodes))
    t = await begin(CAPPING.replace("steps:", "guards: {min_available: 2}\nsteps:"), slurm=slurm)
    await t.world.post(t.world.alert(node="n1"))
    await t.world.pass_time(15)
    ((title, text, _, _),) = t.channels.sent
    assert title.startswith("[warning] capping on node:n1 did not start: min_available: without it, 1 of 2 nodes")
    assert "lower min_available in the guards of the playbook" in text


async def test_a_storm_of_refusals_is_one_message_with_their_number(begin: Any) -> None:
    """The first of them by name."""
    t = await begin(BOUNDED)
    await t.world.post(*(t.world.alert(node=f"n{number}") for number in range(302)))
    await t.world.pass_time(30)
    ((title, text, _, _),) = t.channels.sent
    assert title == "[warning] capping: 300 runs did not start"
    assert text.splitlines()[-1] == "and 280 more"


async def test_an_alert_that_flaps_is_told_once_and_again_after_hours(begin: Any) -> None:
    """Each of its beginnings is an alert of its own, which the guard refuses."""
    t = await begin(RATED)
    await t.world.post(t.world.alert(node="n0"))
    for _ in range(20):
        alert = t.world.alert(node="n1", fingerprint="flapping")
        await t.world.post(alert)
        await t.world.pass_time(100)
        await t.world.resolve(alert)
        await t.world.pass_time(20)
    refusals = [title for title in t.channels.titles if "did not start" in title]
    assert 1 <= len(refusals) <= 2
    assert "1 run in the last 1h, at most 1" in refusals[0]
    assert t.channels.titles.count("[info] Re: capping on node:n1: Hot has resolved") == len(refusals)


async def test_people_hear_when_it_has_started_after_all(begin: Any) -> None:
    """The guard allows it when the alert is reported again; what was not told yet is not told any more."""
    t = await begin(BOUNDED)
    open_ones = [t.world.alert(node=f"n{number}") for number in range(2)]
    await t.world.post(*open_ones)
    told, not_told = t.world.alert(node="n2"), t.world.alert(node="n3")
    await t.world.post(told)
    await t.world.pass_time(30)
    await t.world.post(not_told)
    for alert in open_ones:
        await t.world.resolve(alert)
    await t.world.post(told, not_told)
    await t.world.pass_time(70)
    refused, started = (await t.world.runs())[2], (await t.world.runs())[4]
    assert t.channels.titles == [
        "[warning] capping on node:n2 did not start: 2 runs are open, at most 2",
        f"[info] Re: capping on node:n2: started later, as run {started.id[-8:]}",
    ]
    assert "started_later" in await t.world.story(refused.id)


async def test_a_run_whose_target_was_busy_for_too_long_is_told_with_what_was_in_the_way(begin: Any) -> None:
    """It waited, and its alert grew old; one whose alert is over by then is no news."""
    other = CAPPING.replace("capping", "other").replace("Hot", "Odd")
    t = await begin(CAPPING + "  - {wait_for: resolved, timeout: 1h}\n", other)
    await t.world.post(t.world.alert(node="n1"))
    await t.world.post(t.world.alert("Odd", node="n1"))
    over = t.world.alert("Odd", node="n1", zone="b")
    await t.world.pass_time(1000)
    first = (await t.world.runs())[0]
    ((title, text, _, _),) = t.channels.sent
    assert title.startswith(f"[warning] other on node:n1 did not start: the target was busy with run {first.id}, and")
    assert "trainmedic runs start other --target node:n1" in text
    await t.world.post(over)
    await t.world.pass_time(10)
    await t.world.resolve(over)
    await t.world.pass_time(1000)
    assert len(t.channels.sent) == 1


@pytest.mark.parametrize(
    ("playbook", "limits", "began_ago", "told"),
    [(COOLED, {}, 0, False), (CAPPING, {"mode": "observe"}, 3600, False), (CAPPING, {}, 3600, True)],
    ids=["cooldown", "observe", "too old"],
)
async def test_people_are_not_told_of_what_is_as_it_should_be(
    begin: Any, playbook: str, limits: dict[str, Any], began_ago: float, told: bool
) -> None:
    """A cooldown is what the playbook asks for, and in mode observe nothing was to be done. But an alert that is too
    old fires, and nothing will ever be done about it."""
    t = await begin(playbook, **limits)
    await t.world.post(t.world.alert(node="n1", began_ago=began_ago))
    await t.world.pass_time(30)
    await t.world.post(t.world.alert(node="n1", began_ago=began_ago, fingerprint="again"))
    await t.world.pass_time(30)
    titles = [title for title in t.channels.titles if "did not start" in title]
    assert titles == (
        ["[warning] capping on node:n1 did not start: the alert began 1h ago, over the maximum age of 15m"]
        if told
        else []
    )


async def test_the_breaker_and_a_pause_are_told_once_and_not_for_each_alert(begin: Any) -> None:
    """What they keep from starting is what they are for."""
    t = await begin(CAPPING, breaker_min_nodes=1, breaker_share=0.1)
    await t.world.post(*(t.world.alert(node=f"n{number}") for number in range(5)))
    await t.world.pass_time(15)
    await t.world.engine.pause("ann")
    await t.world.post(t.world.alert(node="n8"))
    await t.world.pass_time(70)
    assert t.channels.titles == ["[critical] The breaker opened", "[info] Paused by ann (everything)"]


async def test_a_node_that_nobody_knows_is_told_once_by_name(begin: Any) -> None:
    """Whatever alerts and playbooks name it, also by a new server; another one is told beside it."""
    gpu = CAPPING.replace("capping", "cooling").replace("target: node", "target: gpu").replace("Hot", "Hotter")
    t = await begin(CAPPING, gpu)
    for instance in ("10.9.8.7:9100", "10.9.8.7:9400"):
        await t.world.post(t.world.alert("Hot", instance=instance), t.world.alert("Hotter", instance=instance, gpu="3"))
        await t.world.pass_time(100)
    ((title, text, _, severity),) = t.channels.sent
    assert severity is Severity.WARNING
    assert title.startswith("[warning] targets: 2 alerts") or "does nothing about Hot" in title
    assert "10.9.8.7" in text
    await t.kill()
    await t.begin()
    await t.world.post(t.world.alert("Hot", instance="10.9.8.7:9100", status_code="2"))
    await t.world.pass_time(100)
    assert len(t.channels.sent) == 1
    await t.world.post(t.world.alert("Hot", instance="10.9.8.6:9100"))
    await t.world.pass_time(100)
    ((title, text, _, _),) = t.channels.sent[1:]
    assert title.startswith("[warning] capping does nothing about Hot: ")
    assert 'Labels that name something: instance="10.9.8.6:9100".' in text
    assert "--inventory" in text


@pytest.mark.parametrize(
    ("first", "again", "other"),
    [
        ({"node": "box-7"}, {"Hostname": "box-7", "gpu": "1"}, {"node": "box-77"}),
        ({"instance": "box-7:9100"}, {"instance": "BOX-7:9400", "job": "dcgm"}, {"instance": "box-70:9100"}),
        ({"Hostname": "box-7", "node": "n1"}, {"Hostname": "box-7", "node": "n2"}, {"Hostname": "box-8", "node": "n1"}),
        ({"Hostname": "box-7", "node": "n1"}, {"node_name": "box-7"}, {"node": "box"}),
        ({"exported_instance": "box-7", "instance": "n1:9091"}, {"instance": "box-7:9100"}, {"node": "n12"}),
        ({"instance": "10.4.9.9:9100"}, {"instance": "10.4.9.9:9400", "zone": "b"}, {"instance": "10.4.9.90:9100"}),
        ({"node": "n1", "nodename": "n2"}, {"node": "n1", "nodename": "n2", "zone": "b"}, {"node": "n2", "host": "n3"}),
        ({"nodelist": "box-7", "instance": "n1:9341"}, {"nodelist": "box-7", "instance": "n2:9341"}, {"node": "box-9"}),
    ],
)
async def test_each_stranger_is_told_once_whatever_stands_beside_it(
    begin: Any, first: dict[str, str], again: dict[str, str], other: dict[str, str]
) -> None:
    """By the name that the reason calls unknown, and not by those of nodes that are known."""
    t = await begin(CAPPING, inventory={f"10.4.0.{number}": f"n{number}" for number in range(1, 4)})
    told = []
    for labels in (first, again, first | {"zone": "a"}, other):
        await t.world.post(t.world.alert("Hot", **labels))
        await t.world.pass_time(100)
        told.append(len(t.channels.sent))
    assert told == [1, 1, 1, 2], t.channels.sent


async def test_labels_that_contradict_each_other_are_told_too(begin: Any) -> None:
    """As a message that can be switched off by itself."""
    t = await begin(CAPPING)
    await t.world.post(t.world.alert(node="n1", nodename="n2"))
    await t.world.pass_time(30)
    assert len(t.channels.sent) == 1
    quiet = await begin(CAPPING, rules="target_unknown=off not_started=critical")
    await quiet.world.post(quiet.world.alert(node="n1", nodename="n2"), quiet.world.alert(node="n1", began_ago=3600))
    await quiet.world.pass_time(30)
    ((title, _, _, severity),) = quiet.channels.sent
    assert severity is Severity.CRITICAL
    assert title.startswith("[critical] capping on node:n1 did not start: the alert began 1h ago")


async def test_a_command_in_a_message_is_one_that_can_be_pasted(begin: Any) -> None:
    """Whoever controls a label does not control what the shell of its reader does."""
    t = await begin(CAPPING.replace("target: node", "target: job"))
    await t.world.post(t.world.alert(job_name="llm; reboot", began_ago=3600))
    await t.world.pass_time(30)
    await t.world.post(t.world.alert(job_name="llm", training_job="$(id)", began_ago=3600))
    await t.world.pass_time(60)
    (_, refused, _, _), (_, untargeted, _, _) = t.channels.sent
    assert "trainmedic runs start capping --target 'job:llm; reboot'." in refused
    assert 'Labels that name something: job_name="llm", training_job="$(id)".' in untargeted


TEAMS = "gpu=component:gpu train=component:training page=severity:critical page=kind:approval rest=default"
TEAM_NAMES = ("gpu", "page", "rest", "train")


def receivers(t: Telling) -> list[tuple[str | None, str]]:
    """To whom what was told, without the severity."""
    return sorted((to, title.partition("] ")[2]) for title, _, to, _ in t.channels.sent)


async def test_each_message_goes_to_the_channels_whose_routes_take_it(begin: Any) -> None:
    """By component, severity and kind; what is about the server itself and nobody takes is for the default one."""
    t = await begin(CAPPING, ASKING.replace("Hot", "Warm"), names=TEAM_NAMES, routes=TEAMS)
    t.world.actions["cap"].outcomes += [errors.PermanentFailure("no agent")] * 3
    for component, node in (("gpu", "n1"), ("training", "n2"), ("storage", "n3")):
        await t.world.post(t.world.alert(node=node, component=component))
    await t.world.post(t.world.alert("Warm", node="n4", component="gpu"))
    await t.world.engine.pause("ann")
    await t.world.pass_time(15)
    assert receivers(t) == [
        ("gpu", "capping on node:n1 failed"),
        ("gpu", "node:n4: Cap n4?"),
        ("page", "node:n4: Cap n4?"),
        ("rest", "Paused by ann (everything)"),
        ("rest", "capping on node:n3 failed"),
        ("train", "capping on node:n2 failed"),
    ]
    unrouted = {
        kind: metric(t.world, "trainmedic_messages_unrouted_total", kind=kind)
        for kind in ("pause", "run_failed", "approval")
    }
    assert unrouted == {"pause": 1, "run_failed": 1, "approval": 0}


async def test_a_follow_up_reaches_those_who_know_of_its_beginning(begin: Any) -> None:
    """Whatever its own severity: who was paged has to hear that it is over."""
    t = await begin(CAPPING, names=TEAM_NAMES, routes=TEAMS, rules="run_failed=critical")
    t.world.actions["cap"].outcomes.append(errors.PermanentFailure("no agent"))
    await t.world.post(t.world.alert(node="n1", component="gpu"))
    await t.world.pass_time(15)
    await t.world.post(t.world.alert(node="n1", component="gpu", status="resolved"))
    await t.world.pass_time(70)
    assert receivers(t) == [
        ("gpu", "Re: capping on node:n1: Hot has resolved"),
        ("gpu", "capping on node:n1 failed"),
        ("page", "Re: capping on node:n1: Hot has resolved"),
        ("page", "capping on node:n1 failed"),
    ]


async def test_what_is_set_for_a_kind_or_a_question_goes_before_the_routes(begin: Any) -> None:
    """``--messages`` names channels of a kind, and a playbook the channel of its question."""
    asks = ASKING.replace('"Cap {{ target.node }}?", timeout: 30m', '{message: "Cap?", to: train}, timeout: 30m')
    t = await begin(CAPPING, asks.replace("Hot", "Warm"), names=TEAM_NAMES, routes=TEAMS, rules="run_failed=on@page")
    t.world.actions["cap"].outcomes.append(errors.PermanentFailure("no agent"))
    await t.world.post(t.world.alert(node="n1", component="gpu"))
    await t.world.post(t.world.alert("Warm", node="n4", component="gpu"))
    await t.world.pass_time(15)
    assert receivers(t) == [("page", "capping on node:n1 failed"), ("train", "node:n4: Cap?")]


CHANGES = pytest.mark.parametrize(
    ("before", "after"), [("", TEAMS), (TEAMS, "gpu=kind:pause rest=default"), (TEAMS, "")]
)


@CHANGES
async def test_other_routes_tell_nothing_again(begin: Any, before: str, after: str) -> None:
    """A refusal that was told is told to no other channel when the alert begins anew."""
    t = await begin(CAPPING.replace("steps:", "guards: {max_concurrent: 1}\nsteps:"), names=TEAM_NAMES, routes=before)
    t.world.actions["cap"].outcomes.append(timedelta(minutes=10))
    await t.world.post(t.world.alert(node="n1", component="gpu"))
    await t.world.post(t.world.alert(node="n2", component="gpu"))
    await t.world.pass_time(15)
    expected = ["gpu"] if before else list(TEAM_NAMES)
    assert [to for to, _ in receivers(t)] == expected
    await t.kill()
    t.routes = after
    await t.begin()
    await t.world.post(t.world.alert(node="n2", component="gpu", status="resolved"))
    await t.world.pass_time(1)
    before_again = len(await t.world.runs())
    await t.world.post(t.world.alert(node="n2", component="gpu"))
    assert len(await t.world.runs()) == before_again + 1, "it is refused anew"
    await t.world.pass_time(14)
    refusals = [to for to, title in receivers(t) if "did not start" in title and not title.startswith("Re: ")]
    assert refusals == expected


@CHANGES
async def test_events_that_are_taken_again_by_other_routes_make_no_other_messages(
    begin: Any, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    """The server was killed after the messages were kept and before that was on record; they go where they were to."""
    taken: list[Event] = []
    take = MessageDelivery.take

    async def recording(teller: MessageDelivery, events: Sequence[Event]) -> None:
        taken.extend(events)
        await take(teller, events)

    monkeypatch.setattr(MessageDelivery, "take", recording)
    t = await begin(CAPPING, names=TEAM_NAMES, routes=before)
    t.world.actions["cap"].outcomes.append(errors.PermanentFailure("no agent"))
    await t.world.post(t.world.alert(node="n1", component="gpu"))
    await t.world.pass_time(5)
    assert t.channels.sent == []
    await t.kill()
    t.routes = after
    await t.begin()
    assert t.teller is not None
    await take(t.teller, taken)
    await t.world.pass_time(15)
    assert [to for to, _ in receivers(t)] == (["gpu"] if before else list(TEAM_NAMES))


LIMITED = """
playbook: capping
on: {alert: Hot}
target: node
guards:
  max_runs: {count: 1, per: 1h}
  on_limited: [{action: notify, on_error: continue}]
steps:
  - {id: cap, action: test.cap}
"""


class Notify(Tell):
    """Stands in for the action ``notify``: by it, people are told by the playbook."""

    name = "notify"


@pytest.mark.parametrize("outcome", [{"to": "oncall"}, errors.PermanentFailure("no channel")])
async def test_a_refusal_that_on_limited_has_told_of_is_not_told_of_twice(begin: Any, outcome: Any) -> None:
    """If its message did not reach people, the server's own does."""
    t = await begin(LIMITED, more=[Notify])
    t.world.actions._instances["notify"].outcomes.append(outcome)
    await t.world.post(t.world.alert(node="n1"))
    await t.world.post(t.world.alert(node="n2"))
    await t.world.pass_time(60)
    own = "[warning] capping on node:n2 did not start: 1 run in the last 1h, at most 1; step limited-1: no channel"
    assert t.channels.titles == ([] if isinstance(outcome, dict) else [own])
