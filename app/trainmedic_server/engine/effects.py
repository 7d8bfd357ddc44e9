"""Measurement of an alert's metric after a run has acted.

Prometheus is queried later for the whole period, so the server may be down meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from msgspec.structs import replace

from trainmedic_core import errors as core_errors
from trainmedic_server import errors, telemetry
from trainmedic_server.domain import effect as effects
from trainmedic_server.domain import promql
from trainmedic_server.domain.effect import Effect
from trainmedic_server.domain.event_codec import names
from trainmedic_server.domain.event_kinds import StepResumed, StepStarted
from trainmedic_server.domain.run import Event, Run
from trainmedic_server.engine import loops
from trainmedic_server.ports.metric_history import AlertRule, MetricsAndRules, MetricSeries
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.playbooks import Catalog, CompiledPlaybook
from trainmedic_server.ports.store import RunStore, Transaction

ACTED = names(StepStarted, StepResumed)
SETTLES = timedelta(seconds=30)  # Delay until Prometheus has the samples of the whole period
GIVE_UP_AFTER = timedelta(days=1)  # from the act
_RETRY_AFTER = timedelta(minutes=1)  # during an outage of Prometheus
_LOOK_EVERY = timedelta(seconds=5)
_AT_ONCE = 20  # effects of one round
_MOST_BRANCHES = 4  # comparisons in the rules of an alert

log = telemetry.logger(__name__)


class EffectRecorder:
    """Listener that stores the effects to measure."""

    name = "effects"
    kinds = ACTED
    at_once = 500

    def __init__(self, store: RunStore, catalog: Catalog) -> None:
        self._store = store
        self._catalog = catalog

    async def take(self, events: Sequence[Event]) -> None:
        run_ids = {event.run_id for event in events if event.run_id is not None}
        runs, known = await self._store.transact(lambda tx: (tx.runs(run_ids), tx.effects.of_runs(run_ids)))
        measured = filter(_is_measured, runs)
        new = [
            await self._to_measure(run, run.acted_at)
            for run in measured
            # Times differ if the first act was cancelled, and another one followed.
            if run.acted_at is not None and (run.id not in known or known[run.id].acted_at != run.acted_at)
        ]
        if new:
            await self._store.transact(lambda tx: tx.effects.save(new))

    async def _to_measure(self, run: Run, acted_at: datetime) -> Effect:
        effect = Effect(run.id, run.playbook, acted_at, acted_at + effects.AFTER + SETTLES)
        playbook = await self._playbook_of(run)
        measured = playbook.definition.effect if playbook else None
        if playbook is None or measured is None:
            return effect
        try:
            query = playbook.effect_query(run)
        except core_errors.ExpressionError as error:
            return replace(effect, origin="playbook").not_measured(str(error))
        return replace(effect, origin="playbook", query=query, better=measured.better)

    async def _playbook_of(self, run: Run) -> CompiledPlaybook | None:
        loaded = self._catalog.get(run.playbook)
        if loaded is not None and loaded.version == run.version:
            return loaded
        text = await self._store.transact(lambda tx: tx.playbook_text(run.playbook, run.version))
        try:
            return self._catalog.compile(text, run.playbook) if text is not None else None
        except errors.PlaybookError:
            return None


def _is_measured(run: Run) -> bool:
    # A group's members, up to thousands, would query Prometheus each; the group itself does not act.
    return run.parent is None and not run.is_group


class EffectMeasuring:
    def __init__(self, store: RunStore, prometheus: MetricsAndRules, clock: Clock, metrics: telemetry.Metrics) -> None:
        self._store = store
        self._prometheus = prometheus
        self._clock = clock
        self._metrics = metrics

    async def run(self) -> None:
        await loops.repeat(self.measure, _LOOK_EVERY, "effects", self._metrics)

    async def measure(self) -> int:
        """Measure some due effects. Return their number. Raises StoreUnavailable."""
        due = await self._store.transact(self._due)
        outage: str | None = None
        done: list[Effect] = []
        for effect, run in due:
            try:
                # Prometheus is not asked again in this round.
                done.append(self._postponed(effect, outage) if outage else await self._measured(effect, run))
            except errors.MetricsRefused as error:
                done.append(effect.not_measured(str(error)))
            except errors.MetricsUnavailable as error:
                outage = str(error)
                done.append(self._postponed(effect, outage))
            except Exception as error:  # a bug with one effect must not block the others
                self._metrics.loop_errors.labels("effects").inc()
                log.exception("cannot measure effect", run_id=effect.run_id)
                done.append(effect.not_measured(f"measuring it failed: {type(error).__name__}"))
        if done:
            await self._store.transact(lambda tx: tx.effects.save(done))
        for effect in done:
            if effect.due_at is None:
                self._metrics.effects.labels(effect.playbook, effect.verdict.value).inc()
        return len(due)

    def _due(self, tx: Transaction) -> list[tuple[Effect, Run]]:
        due = tx.effects.due(self._clock.now(), _AT_ONCE)
        runs = {run.id: run for run in tx.runs([effect.run_id for effect in due])}
        return [(effect, runs[effect.run_id]) for effect in due if effect.run_id in runs]

    def _postponed(self, effect: Effect, reason: str) -> Effect:
        now = self._clock.now()
        if now - effect.acted_at > GIVE_UP_AFTER:
            return effect.not_measured(reason)
        return replace(effect, due_at=now + _RETRY_AFTER, reason=reason)

    async def _measured(self, effect: Effect, run: Run) -> Effect:
        """Raises MetricsRefused, MetricsUnavailable."""
        if run.acted_at is None:
            return effect.not_measured("the act was cancelled before start")
        if effect.query is not None:
            series = await self._read(effect.query, effect.acted_at)
            return _measured_by(effect, series, None) or effect.not_measured("the playbook's query has no series")
        # Without a query in the playbook, the alert's rule shows its metric and limit.
        rule_name = run.sent_labels.get("alertname", "")
        rules = [rule for rule in await self._prometheus.rules_of(rule_name) if _may_have_raised(rule, run)]
        branches = [(rule, each) for rule in rules for each in promql.comparisons(rule.expression)][:_MOST_BRANCHES]
        if not branches:
            why = "compares nothing that could be measured" if rules else "is not known to Prometheus"
            return effect.not_measured(f"the rule of {rule_name} {why}; name a query in the playbook's effect")
        best: Effect | None = None
        for rule, comparison in branches:
            labels = {name: value for name, value in run.sent_labels.items() if name not in rule.labels}
            labels.pop("alertname", None)
            query = promql.narrowed(comparison.query, labels)
            if len(query) > promql.LONGEST_QUERY:
                continue
            series = await self._read(query, effect.acted_at)
            found = _measured_by(replace(effect, query=comparison.query), series, comparison)
            if found is not None and found.verdict is not effects.EffectVerdict.NOT_MEASURED:
                return found
            best = best or found
        return best or effect.not_measured("no series of the alert's rule agrees with the alert's labels")

    async def _read(self, query: str, acted_at: datetime) -> Sequence[MetricSeries]:
        begin, end = acted_at - effects.BEFORE, acted_at + effects.AFTER
        return await self._prometheus.read(query, begin, end, effects.EVERY)


def _may_have_raised(rule: AlertRule, run: Run) -> bool:
    """Return whether the alert has the rule's fixed labels."""
    fixed = {name: value for name, value in rule.labels.items() if "{{" not in value}
    return all(run.sent_labels.get(name) == value for name, value in fixed.items())


def _measured_by(effect: Effect, series: Sequence[MetricSeries], comparison: promql.Comparison | None) -> Effect | None:
    if len(series) > 1:
        return effect.not_measured(f"the query gives {len(series)} series where one is needed")
    return effects.measured(effect, series[0].points, comparison) if series else None
