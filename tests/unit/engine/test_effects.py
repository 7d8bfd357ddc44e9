"""What becomes of the alert's metric is recorded at the act and measured later, over restarts and outages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

import pytest

from tests.unit.catalog.test_alert_map import map_of
from tests.unit.engine.books import CAP
from tests.unit.engine.held_commits import hold_next
from tests.unit.engine.world import World
from trainmedic_server import errors
from trainmedic_server.api.views import effect_view
from trainmedic_server.domain.effect import Effect, EffectVerdict
from trainmedic_server.domain.run import Event
from trainmedic_server.engine.effects import EffectMeasuring, EffectRecorder
from trainmedic_server.engine.event_dispatch import EventDispatcher
from trainmedic_server.ports.metric_history import AlertRule, MetricSeries

MakeWorld = Callable[..., World]

NAMED = CAP.replace(
    "steps:",
    """effect:
  query: 'temp{node="{{ labels.node }}", gpu=~"{{ target.gpu }}", x="{{ vars.x }}"}'
  better: lower
vars: {x: 1}
steps:""",
)
TELLING = "{playbook: telling, on: {alert: Hot}, target: node, steps: [{action: test.tell}]}"
HOT = AlertRule("temp > 85 or (temp > 80 and ALERTS)", {"severity": "critical", "summary": "{{ $value }}"})


class Prometheus:
    """Answers each question with the values before, at and after the act; remembers what it was asked."""

    def __init__(self, *values: float, rules: Sequence[AlertRule] = (HOT,), series: int = 1) -> None:
        self.values = values
        self.rules = rules
        self.series = series
        self.error: Exception | None = None
        self.asked: list[str] = []

    async def read(self, query: str, begin: datetime, end: datetime, every: timedelta) -> Sequence[MetricSeries]:
        self.asked.append(query)
        if self.error is not None:
            raise self.error
        act = begin.timestamp() + 600
        points = [
            (act + seconds, self.values[0 if seconds < -120 else 1 if seconds <= 0 else 2])
            for seconds in range(-600, 601, round(every.total_seconds()))
        ]
        return [MetricSeries({"gpu": str(number)}, points) for number in range(self.series)]

    async def rules_of(self, alertname: str) -> Sequence[AlertRule]:
        if self.error is not None:
            raise self.error
        return [rule for rule in self.rules if alertname == "Hot"]


async def begin(w: World) -> None:
    """Have the recorder listen from here on, as a server does at its first start."""
    await EventDispatcher(w.store, w.store, EffectRecorder(w.store, w.catalog), w.metrics).tell()


async def recorded(w: World) -> None:
    """Let a new server hear what the last one's recorder has not."""
    teller = EventDispatcher(w.store, w.store, EffectRecorder(w.store, w.catalog), w.metrics)
    while await teller.tell():
        pass


async def acted(world: MakeWorld, playbook: str, **labels: str) -> World:
    """A world in which an alert began a run, which the recorder knows."""
    w = world(playbook)
    await begin(w)
    await w.post(w.alert(**labels))
    await recorded(w)
    return w


async def effect(w: World) -> Effect | None:
    record = await w.store.record((await w.runs())[-1].id)
    assert record is not None
    return record.effect


async def measured(w: World, prometheus: Prometheus) -> Effect:
    await EffectMeasuring(w.store, prometheus, w.clock, w.metrics).measure()
    known = await effect(w)
    assert known is not None
    return known


async def test_what_the_alerts_rule_compares_is_measured_ten_minutes_after_the_act(world: MakeWorld) -> None:
    """Not a second before the last value can be there; narrowed to the alert, but for what the rule itself adds."""
    w = await acted(world, CAP, node="n1", gpu="0", severity="critical", summary="88", cluster="c")
    prometheus = Prometheus(70, 88, 72)
    await w.pass_time(629)
    assert (await measured(w, prometheus)).verdict is EffectVerdict.PENDING
    assert prometheus.asked == []
    await w.pass_time(2)
    known = await measured(w, prometheus)
    assert (known.verdict, known.before, known.at, known.after) == (EffectVerdict.HELPED, 70, 88, 72)
    assert (known.query, known.origin, known.operator, known.limit) == ("temp", "rule", ">", 85.0)
    assert '"node", "n1"' in prometheus.asked[0]
    assert '"cluster", "c"' in prometheus.asked[0]
    assert "severity" not in prometheus.asked[0]
    assert "summary" not in prometheus.asked[0]
    assert "alertname" not in prometheus.asked[0]
    assert await EffectMeasuring(w.store, prometheus, w.clock, w.metrics).measure() == 0


async def test_one_that_cannot_be_measured_by_a_bug_holds_up_none_after_it(world: MakeWorld) -> None:
    """It is not tried for ever."""
    w = await acted(world, CAP, node="n1", gpu="0")
    await w.pass_time(700)
    broken = Prometheus()
    broken.error = ValueError("what nobody thought of")
    known = await measured(w, broken)
    assert (known.verdict, known.reason) == (EffectVerdict.NOT_MEASURED, "measuring it failed: ValueError")
    assert await EffectMeasuring(w.store, broken, w.clock, w.metrics).measure() == 0


async def test_what_is_due_is_measured_after_kills_and_once(world: MakeWorld) -> None:
    """Killed between the act and the recording, between both, and handed the same events again."""
    w = world(CAP)
    await begin(w)
    await w.post(w.alert(node="n1", gpu="0"))
    await w.restart(after=1)
    await recorded(w)
    first = await effect(w)
    await w.restart(after=700)
    await w.store.transact(lambda tx: tx.event_positions.save_position("effects", 0))
    await recorded(w)
    assert await effect(w) == first
    known = await measured(w, Prometheus(70, 88, 99, rules=[AlertRule("temp > 85", {})]))
    assert known.verdict is EffectVerdict.WORSE
    await w.store.transact(lambda tx: tx.event_positions.save_position("effects", 0))
    await recorded(w)
    assert await effect(w) == known


@pytest.mark.parametrize("is_made_later", [True, False])
async def test_an_act_that_was_called_off_has_no_effect(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch, is_made_later: bool
) -> None:
    """It was on record, and heard of; what is measured is the one that was made in the end, if any."""
    w = world(CAP)
    await begin(w)
    (commit,) = hold_next(w, monkeypatch)
    posting = asyncio.create_task(w.post(w.alert(node="n1", gpu="0", severity="critical", summary="88")))
    await commit.is_durable.wait()
    await recorded(w)
    await w.engine.pause("alice")
    commit.is_known.set()
    await posting
    await w.pass_time(600)
    if is_made_later:
        await w.engine.resume("alice")
        await w.pass_time(0)
        await recorded(w)
    prometheus = Prometheus(70, 88, 72)
    await w.pass_time(60)
    known = await measured(w, prometheus)
    assert known.verdict is (EffectVerdict.PENDING if is_made_later else EffectVerdict.NOT_MEASURED)
    assert prometheus.asked == []
    await w.pass_time(600)
    known, run = await measured(w, prometheus), await w.run()
    assert (known.verdict is EffectVerdict.HELPED, known.acted_at == run.acted_at) == (is_made_later, is_made_later)
    assert (effect_view(run, known, measures_effects=True) is not None) is is_made_later


async def test_a_run_that_changes_nothing_has_no_effect(world: MakeWorld) -> None:
    """Nor has one from before anybody listened."""
    w = world(TELLING, CAP)
    await w.post(w.alert(node="n0", gpu="0"))
    await begin(w)
    await w.post(w.alert(node="n1", gpu="0"))
    await recorded(w)
    effects = {run.playbook + str(run.alert_labels["node"]): await w.store.record(run.id) for run in await w.runs()}
    assert {name for name, record in effects.items() if record and record.effect} == {"capn1"}


async def test_a_playbook_names_its_own_query_and_labels_stay_within_their_quotes(world: MakeWorld) -> None:
    """The rule is not asked; without a number to compare with, a tenth counts."""
    w = await acted(world, NAMED, node='n"} or up{a="', gpu="0")
    await w.pass_time(700)
    prometheus = Prometheus(70, 88, 86, rules=[])
    known = await measured(w, prometheus)
    assert prometheus.asked == [r'temp{node="n\u0022} or up{a=\u0022", gpu=~"0", x="1"}']
    assert (known.verdict, known.origin, known.better, known.limit) == (
        EffectVerdict.NO_CHANGE,
        "playbook",
        "lower",
        None,
    )


@pytest.mark.parametrize(
    ("prometheus", "reason"),
    [
        (Prometheus(1, 2, 3, rules=[]), "is not known to Prometheus"),
        (Prometheus(1, 2, 3, rules=[AlertRule("absent(up)", {})]), "compares nothing"),
        (Prometheus(1, 2, 3, rules=[AlertRule("temp > 85", {"severity": "page"})]), "is not known to Prometheus"),
        (Prometheus(1, 2, 3, series=2), "2 series"),
        (Prometheus(1, 2, 3, series=0), "no series"),
    ],
)
async def test_what_cannot_be_measured_says_why_and_claims_nothing(
    world: MakeWorld, prometheus: Prometheus, reason: str
) -> None:
    """Whatever the reason."""
    w = await acted(world, CAP, node="n1", gpu="0", severity="critical", summary="88")
    await w.pass_time(700)
    known = await measured(w, prometheus)
    assert (known.verdict, known.after) == (EffectVerdict.NOT_MEASURED, None)
    assert reason in (known.reason or "")


async def test_a_prometheus_that_is_away_is_asked_again_for_a_day(world: MakeWorld) -> None:
    """Each minute; then it is said. A question that it refuses is not asked again."""
    w = await acted(world, CAP, node="n1", gpu="0", severity="critical", summary="88")
    await w.pass_time(700)
    prometheus = Prometheus(70, 88, 72)
    prometheus.error = errors.MetricsUnavailable("Prometheus does not answer")
    known = await measured(w, prometheus)
    assert (known.verdict, known.due_at) == (EffectVerdict.PENDING, w.clock.now() + timedelta(minutes=1))
    await w.pass_time(61)
    prometheus.error = None
    assert (await measured(w, prometheus)).verdict is EffectVerdict.HELPED


async def test_after_a_day_without_prometheus_the_effect_is_not_measured(world: MakeWorld) -> None:
    """With the reason that was met last."""
    w = await acted(world, CAP, node="n1", gpu="0")
    prometheus = Prometheus(70, 88, 72)
    prometheus.error = errors.MetricsUnavailable("Prometheus does not answer")
    await w.pass_time(86_401)
    known = await measured(w, prometheus)
    assert (known.verdict, known.reason) == (EffectVerdict.NOT_MEASURED, "Prometheus does not answer")


class Listener:
    """Takes events, or fails so many times."""

    name = "test"
    kinds = frozenset[str]()
    at_once = 2

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.taken: list[int] = []

    async def take(self, events: Sequence[Event]) -> None:
        if self.failures:
            self.failures -= 1
            raise errors.TemporaryFailure("busy")
        self.taken += [event.seq or 0 for event in events]


async def test_each_event_is_handed_on_in_order_over_failures_and_restarts(world: MakeWorld) -> None:
    """From the first one after it began to listen; none twice but those that were in hand at a kill."""
    w = world(CAP)
    await w.post(w.alert(node="n1", gpu="0"))
    listener = Listener(failures=1)
    assert await EventDispatcher(w.store, w.store, listener, w.metrics).tell() == 0
    before = await w.store.last_seq()
    await w.post(w.alert(node="n2", gpu="0"))
    teller = EventDispatcher(w.store, w.store, listener, w.metrics)
    with pytest.raises(errors.TemporaryFailure):
        await teller.tell()
    assert await teller.tell() == 2
    another = EventDispatcher(w.store, w.store, listener, w.metrics)
    while await another.tell():
        pass
    assert listener.taken == list(range(before + 1, await w.store.last_seq() + 1))
    assert len(listener.taken) > 2


async def test_a_position_from_another_store_is_not_waited_for(world: MakeWorld) -> None:
    """A store that was replaced counts anew; its newest event is where it goes on."""
    w = world(CAP)
    await w.store.transact(lambda tx: tx.event_positions.save_position("test", 10**9))
    listener = Listener()
    teller = EventDispatcher(w.store, w.store, listener, w.metrics)
    assert await teller.tell() == 0
    await w.post(w.alert(node="n1", gpu="0"))
    assert await teller.tell() == 2


async def test_the_rule_of_a_mapped_alert_is_that_of_its_original(world: MakeWorld) -> None:
    """Prometheus knows the name and labels that it sent, and none that an alert map made of them."""
    w = world(CAP.replace("alert: Hot", "alert: Mapped"))
    w.alert_map = map_of(
        "rename: [{alert: Hot, as: Mapped, labels: {gpu: '{{ labels.card }}', site: a}, drop: [rack]}]"
    )
    await begin(w)
    await w.post(w.alert(node="n1", card="0", rack="r7", severity="critical", summary="88"))
    await recorded(w)
    prometheus = Prometheus(70, 88, 72)
    await w.pass_time(631)
    assert (await measured(w, prometheus)).verdict is EffectVerdict.HELPED
    assert '"rack", "r7"' in prometheus.asked[0]
    assert '"a"' not in prometheus.asked[0]
