"""Explanation of playbooks' reactions to alerts, by a dry run of admission."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_core import duration, words
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain import selectors, target_resolution, upcoming
from trainmedic_server.domain.admission import PlaybookDecision
from trainmedic_server.domain.alert import Alert, AlertStatus, Delivery
from trainmedic_server.domain.playbook import PHASES, Guards, Mode, Playbook
from trainmedic_server.domain.run import Decision
from trainmedic_server.domain.selectors import Selection, Selector
from trainmedic_server.domain.shares import Percentage
from trainmedic_server.domain.time_gaps import Ago
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine import admission_facts, capacity, claims, forecast, matching, rollout, step_sequence
from trainmedic_server.engine import windows as allowed_times
from trainmedic_server.engine.admission import Admitter
from trainmedic_server.engine.admission_facts import AdmissionFacts
from trainmedic_server.engine.capacity import Capacity
from trainmedic_server.engine.engine_services import EngineServices
from trainmedic_server.engine.forecast import StepPlan
from trainmedic_server.engine.matching import Candidate, MatchedAlert, PreparedDelivery
from trainmedic_server.ports.actions import Actions
from trainmedic_server.ports.alert_map import NO_ALERT_MAP, AlertMap, MappedAlert
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.ports.playbooks import CompiledPlaybook
from trainmedic_server.ports.store import GuardFacts

_IMAGINED = "imagined-"  # prefix of run IDs that exist only in the explanation
_SHOWN = 5  # entries of a list
_ACTING = (Decision.STARTED, Decision.JOINED)  # decisions by which a run handles the alert


class Explanation(Struct, frozen=True):
    """One playbook's reaction to one alert. ``decision`` is None without a reaction and for a resolved alert."""

    playbook: str
    source: str
    version: str  # hash of the playbook's text
    names_alert: bool
    matched: bool
    why: str = ""
    mode: Mode | None = None
    target: str | None = None
    target_from: tuple[str, ...] = ()  # how the labels name the node
    decision: Decision | None = None
    run_id: str | None = None
    waits_for: str | None = None  # ID of the run whose lock it would wait for
    guards: tuple[str, ...] = ()  # sentences
    steps: tuple[StepPlan, ...] = ()


class ExplainedAlert(Struct, frozen=True):
    alert: Alert
    playbooks: tuple[Explanation, ...]
    told: tuple[str, ...] = ()  # runs that would be notified of the end
    refused: str = ""  # why the alert map refuses the alert; empty if it does not

    @property
    def acting(self) -> tuple[str, ...]:
        return tuple(each.playbook for each in self.playbooks if each.decision in _ACTING)


class ExplainContext(Struct, frozen=True):
    """`holders`: the runs that new runs would wait for. `is_live`: guards have facts of a run store."""

    facts: AdmissionFacts
    actions: Actions
    limits: EngineLimits
    now: datetime
    ago: Ago
    holders: Mapping[matching.Key, str | None] = {}
    is_live: bool = False

    @property
    def topology(self) -> Topology:
        return self.facts.topology


async def of_server(
    services: EngineServices, alerts: Sequence[Alert], at: datetime | None
) -> tuple[ExplainedAlert, ...]:
    """Explain each playbook's reaction if the alerts were delivered now. Raises StoreUnavailable.

    `at` is the time of the decision. Guards count their periods from now.
    """
    topology = services.topology()
    mapped = [services.alert_map().apply(alert) for alert in alerts]
    names = {each.alert.name for each in mapped}
    by_name = {each.definition.name: each for name in names for each in services.catalog.for_alert(name)}
    playbooks = [by_name[name] for name in sorted(by_name)]
    # Use threads: a thousand alerts take 1 s, during which webhooks need answers.
    delivery = await asyncio.to_thread(_prepared, services.catalog.for_alert, mapped, topology)
    ago = services.timeline.by_clock()
    facts = await services.store.transact(
        lambda tx: admission_facts.read(tx, [delivery], services.limits, ago, topology, services.catalog)
    )
    holders = {
        candidate.key: services.locks.holder(
            claims.of_playbook(candidate.playbook, candidate.target, services.actions, candidate.also)
        )
        for candidate in delivery.candidates
        if isinstance(candidate.target, Target)
    }
    now = at or services.clock.now()
    context = ExplainContext(facts, services.actions, services.limits, now, ago, holders, is_live=True)
    return await asyncio.to_thread(_explain, playbooks, delivery, context)


def _prepared(
    playbooks_for: Callable[[str], Sequence[CompiledPlaybook]], mapped: Sequence[MappedAlert], topology: Topology
) -> PreparedDelivery:
    # All reasons of playbooks that do not match, while the intake stores a few.
    matched = []
    for each in mapped:
        made = matching.match(playbooks_for(each.alert.name), each.alert, topology)
        matched.append(matching.refuse(made, each.refused) if each.refused else made)
    alerts = tuple(each.alert for each in mapped)
    return PreparedDelivery(Delivery("", datetime.min, "", "", "", alerts), tuple(matched))


def _explain(
    playbooks: Sequence[CompiledPlaybook], delivery: PreparedDelivery, context: ExplainContext
) -> tuple[ExplainedAlert, ...]:
    """Explain each alert as if those before it were admitted."""
    by_name = {playbook.definition.name: playbook for playbook in playbooks}
    guard_facts = dict(context.facts.guards)  # the admission changes the original
    numbers = itertools.count(1)
    admitter = Admitter(context.facts, context.limits, lambda: f"{_IMAGINED}{next(numbers)}", context.now, context.ago)
    explained = []
    for alert, matched in zip(delivery.delivery.alerts, delivery.matched, strict=True):
        admission = admitter.admit(PreparedDelivery(replace(delivery.delivery, alerts=(alert,)), (matched,)))
        decisions = {decision.playbook: decision for decision in admission.runs}
        touched = admitter.take_touched()
        told = tuple(sorted(touched)) if alert.status is AlertStatus.RESOLVED else ()
        explanations = [
            *(_reacting(each, alert, decisions, guard_facts, admitter, context) for each in matched.candidates),
            *_not_reacting(matched, alert, by_name),
        ]
        explained.append(
            ExplainedAlert(alert, tuple(sorted(explanations, key=lambda each: each.playbook)), told, matched.refused)
        )
    return tuple(explained)


def alone(
    playbooks_for: Callable[[str], Sequence[CompiledPlaybook]],
    alerts: Sequence[Alert],
    actions: Actions,
    limits: EngineLimits,
    now: datetime,
    topology: Topology = Topology(),
    alert_map: AlertMap = NO_ALERT_MAP,
) -> tuple[ExplainedAlert, ...]:
    """Explain the alerts as if there were no earlier runs, pauses or open breaker."""
    mapped = [alert_map.apply(alert) for alert in alerts]
    delivery = _prepared(playbooks_for, mapped, topology)
    facts = AdmissionFacts(known_nodes=matching.nodes_named([delivery]) | topology.nodes, topology=topology)
    playbooks = [playbook for each in mapped for playbook in playbooks_for(each.alert.name)]
    return _explain(playbooks, delivery, ExplainContext(facts, actions, limits, now, lambda span: now - span))


def explain_for_a_test(
    playbooks_for: Callable[[str], Sequence[CompiledPlaybook]],
    alerts: Sequence[Alert],
    actions: Actions,
    limits: EngineLimits,
) -> tuple[ExplainedAlert, ...]:
    # Each alert alone, at its start and in mode enforce, as a playbook test would explain it.
    enforcing = replace(limits, mode=Mode.ENFORCE)
    return tuple(
        explained
        for alert in alerts
        for explained in alone(playbooks_for, [alert], actions, enforcing, alert.starts_at)
    )


def _not_reacting(
    matched: MatchedAlert, alert: Alert, by_name: Mapping[str, CompiledPlaybook]
) -> Iterator[Explanation]:
    for miss in matched.misses:
        if not miss.playbook:  # the alert map's refusal, which is no playbook's
            continue
        playbook = by_name[miss.playbook]
        names_alert = alert.name in playbook.definition.begins_with
        yield Explanation(miss.playbook, playbook.source, playbook.version, names_alert, False, miss.reason)


def _reacting(
    candidate: Candidate,
    alert: Alert,
    decisions: Mapping[str, PlaybookDecision],
    guard_facts: Mapping[tuple[str, str], GuardFacts],
    admitter: Admitter,
    context: ExplainContext,
) -> Explanation:
    playbook, target = candidate.playbook, candidate.target
    definition = playbook.definition
    mode = admitter.mode_of(playbook, target, candidate.also)
    explanation = Explanation(definition.name, playbook.source, playbook.version, True, True, mode=mode)
    if "node" in definition.target_kind.parts:
        explanation = replace(explanation, target_from=target_resolution.node_reasons(alert.labels, context.topology))
    decision = decisions.get(definition.name)
    if decision is None:
        explanation = replace(explanation, why="the alert has resolved, so no run starts")
    else:
        is_imagined = decision.run_id.startswith(_IMAGINED)
        run_id = None if is_imagined else decision.run_id
        why = decision.why or _reason_of(decision.decision, run_id)
        explanation = replace(explanation, why=why, decision=decision.decision, run_id=run_id)
    if not isinstance(target, Target):
        return explanation
    facts = guard_facts.get(candidate.key, GuardFacts()) if context.is_live else None
    members = _members(target, context.topology)
    parts: list[tuple[Target, Sequence[str]]] = [(target, PHASES)]
    first = candidate
    if members:  # a group's steps are those of its first member
        first = Candidate.of(playbook, members[0], context.topology)
        parts = [(members[0], step_sequence.MEMBER_PHASES), (target, step_sequence.PARENT_PHASES)]
    steps: list[StepPlan] = []
    for of, phases in parts:
        steps += forecast.step_plans(
            playbook,
            context.actions,
            alert,
            of,
            mode,
            context.now,
            context.topology.verdicts,
            also=first.also,
            phases=phases,
            memory=context.facts.memories.get((definition.name, of.key)),
        )
    return replace(
        explanation,
        target=target.key,
        waits_for=context.holders.get(candidate.key) if explanation.decision is Decision.STARTED else None,
        guards=(
            *_next_times(definition, context.now),
            *_rollout(definition, target, members, context.topology),
            *_observed(playbook, members, admitter),
            *_guards(definition.guards, facts, context.ago),
            *allowed_times.sentences(definition.windows),
        ),
        steps=tuple(steps),
    )


def _members(target: Target, topology: Topology) -> Sequence[Target]:
    if target.kind is not TargetKind.GROUP:
        return ()
    selection = selectors.resolve(Selector.of(target), topology)
    return selection.members if isinstance(selection, Selection) else ()


def _observed(playbook: CompiledPlaybook, members: Sequence[Target], admitter: Admitter) -> tuple[str, ...]:
    observed = [member.key for member in members if admitter.mode_of(playbook, member) is Mode.OBSERVE]
    if not observed or len(observed) == len(members):
        return ()
    return (f"only observed: {words.few(observed, _SHOWN)}",)


def _next_times(definition: Playbook, now: datetime) -> tuple[str, ...]:
    times = definition.on.next_times(now, _SHOWN)
    return (f"schedule: next at {', '.join(map(upcoming.clock, times))}",) if times else ()


def _rollout(definition: Playbook, target: Target, members: Sequence[Target], topology: Topology) -> tuple[str, ...]:
    if not members:
        return ()
    settings, total = definition.rollout or rollout.DEFAULTS, len(members)
    shown = words.few([member.key for member in members], _SHOWN)
    sizes = [settings.batch(index, total) for index in range(_SHOWN)]
    begin = list(itertools.takewhile(lambda index: sum(sizes[:index]) < total, range(_SHOWN)))
    batches = ", ".join(str(min(sizes[index], total - sum(sizes[:index]))) for index in begin)
    return (
        f"members: {total}: {shown}; the steps are those of the first",
        f"rollout: batches of {batches}{', …' if sum(sizes) < total else ''}; "
        f"at most {settings.errors_allowed(total)} may fail",
        *_unavailable(capacity.of(settings, target, members, topology, {})),
    )


def _unavailable(known: Capacity | str | None) -> Iterator[str]:
    if isinstance(known, str):
        yield f"max_unavailable: {known}"
    elif known is not None:
        yield f"max_unavailable: {known}{f' ({known.reasons})' if known.out else ''}"


def _reason_of(decision: Decision, run_id: str | None) -> str:
    if decision is Decision.JOINED:
        return (
            f"run {run_id} is open on this target" if run_id else "a run for an alert before it is open on this target"
        )
    if decision is Decision.DUPLICATE:
        return f"run {run_id} was decided for this same alert" if run_id else "an earlier alert is the same"
    return ""


def _guards(spec: Guards, facts: GuardFacts | None, ago: Ago) -> tuple[str, ...]:
    sentences = []
    if spec.cooldown is not None:
        sentence = f"cooldown: not within {duration.write(spec.cooldown)} after its last run on this target ended"
        if facts is not None:
            sentence += f"; {_left(facts.last_ended_at - ago(spec.cooldown))}" if facts.last_ended_at else ""
        sentences.append(sentence)
    if spec.max_runs is not None:
        used = f"; {facts.started} so far" if facts is not None else ""
        sentences.append(
            f"max_runs: at most {spec.max_runs.count} runs{' on this target' if spec.max_runs.per_target else ''} "
            f"started in {duration.write(spec.max_runs.per)}{used}"
        )
    if spec.max_concurrent is not None:
        used = f"; {facts.open_runs} are open" if facts is not None else ""
        queue = f"; others wait up to {duration.write(spec.queue)}" if spec.queue is not None else ""
        sentences.append(f"max_concurrent: at most {spec.max_concurrent} runs open at once{queue}{used}")
    if spec.again is not None:
        after = duration.write(spec.again.after)
        sentences.append(f"again: up to {spec.again.times} further runs while the alert fires, {after} after the last")
    if spec.on_limited:
        actions = ", ".join(step.action for step in spec.on_limited)
        sentences.append(f"on_limited: {actions}, for the first run that max_runs refuses within its time")
    if spec.min_available is not None:
        percent = "%" if isinstance(spec.min_available, Percentage) else ""
        sentences.append(f"min_available: at least {spec.min_available:g}{percent} of the nodes must stay available")
    return tuple(sentences)


def _left(cooldown: timedelta) -> str:
    return f"{duration.write_rounded(cooldown)} left" if cooldown > timedelta(0) else "over"
