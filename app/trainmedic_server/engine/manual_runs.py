"""Runs started by people, with the same guards, locks and breaker as alerts.

Without a firing alert, a run gets a stand-in alert, whose end is assumed after ``assume_resolved_after``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from trainmedic_core.problems import did_you_mean
from trainmedic_core.target import Target, TargetKind
from trainmedic_server import errors
from trainmedic_server.domain import approval, beginnings, inputs, target_resolution
from trainmedic_server.domain.alert import BY_HAND, Alert, AlertRecord, AlertStatus
from trainmedic_server.domain.approval import StepAhead
from trainmedic_server.domain.event_codec import recorded
from trainmedic_server.domain.event_kinds import Retried
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.playbook import APPROVAL, GroupTarget, TargetParts
from trainmedic_server.domain.run import Run, Status, StepState
from trainmedic_server.domain.selectors import Selection
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine import claims, group_members, preview, scope, step_sequence
from trainmedic_server.engine.admission_changes import AdmissionChanges, ByHand
from trainmedic_server.engine.engine_services import EngineServices
from trainmedic_server.engine.intake import admitter_of_one
from trainmedic_server.engine.matching import Candidate, also_of
from trainmedic_server.ports.playbooks import CompiledPlaybook
from trainmedic_server.ports.store import Transaction

ALERT_NAME = "StartedByHand"  # of stand-in alerts
_MOST_FIRING = 10_000  # firing alerts that are searched


class StartOrder(Struct, frozen=True):
    playbook: str
    target: Target | None  # None if the playbook or its inputs determine it
    labels: Mapping[str, str] = field(default_factory=dict)  # of the firing alert, or of its stand-in
    dry_run: bool = False
    inputs: Mapping[str, inputs.Value | None] = field(default_factory=dict)


class Started(Struct, frozen=True):
    run: Run  # hypothetical in a dry run
    steps: tuple[StepAhead, ...]
    waits_for: str | None = None  # the run whose lock it waits for
    is_repeated: bool = False  # True for the result of an earlier request


class ManualStarter:
    def __init__(self, services: EngineServices) -> None:
        self._services = services

    async def start(self, order: StartOrder, by: ByHand) -> Started:
        """Start a run, or return the result of a dry run.

        Raises NotFound, Conflict, NotEntitled, PayloadError for inputs or a missing target, StoreUnavailable.
        """
        playbook = self._playbook(order.playbook)
        _check_entitled(playbook, by)
        given = _inputs(playbook, order)
        topology = self._services.topology()
        asked, target = order.target, _target(playbook, order, self._stand_in(order, given), topology)
        wanted = target if isinstance(target, Target) else order.target  # with the node's known name
        if order.target is not None:
            order = replace(order, target=wanted)
        stand_in = self._stand_in(order, given)
        # An earlier request may have been stored under the name as asked, because its target was refused then.
        digests = [_digest(each, order, given) for each in (wanted, asked)] if by.key is not None else [None]
        by = replace(by, digest=digests[0])

        def work(tx: Transaction) -> tuple[Started, AdmissionChanges | None]:
            earlier = _result_of_request(tx, by, order.playbook, wanted, digests)
            if earlier is not None:
                return earlier, None
            record = self._firing_alert(tx, playbook, replace(order, target=wanted), topology) or stand_in
            return self._decide(tx, playbook, target, record, by, topology, write=not order.dry_run)

        return await self._carry_out(work, playbook, wanted)

    async def retry(self, run_id: str, by: ByHand) -> Started:
        """Start another run for the alert of an unsuccessful one, with the current playbook.

        A group's retry has the members that have not succeeded. Raises NotFound, NotEntitled, StoreUnavailable, and
        Conflict if there is nothing to retry, or an open run or alert prevents it.
        """
        topology = self._services.topology()
        known = await self._services.store.transact(lambda tx: tx.run(run_id))
        if known is None:
            raise errors.NotFound(f"there is no run {run_id}")
        playbook = self._playbook(known.playbook)
        _check_entitled(playbook, by)

        def work(tx: Transaction) -> tuple[Started, AdmissionChanges | None]:
            earlier, run = _result_of_request(tx, by, known.playbook, known.target), tx.run(run_id)
            if earlier is not None:
                return earlier, None
            if run is None:
                raise errors.NotFound(f"there is no run {run_id}")
            repeated, record = _repeatable(run, tx.alerts_of([run.id]).get(run.id, []))
            target = target_resolution.unknown_node(repeated, topology) or repeated
            members = group_members.to_retry(tx, run) if run.is_group else None
            started, changes = self._decide(tx, playbook, target, record, by, topology, write=True, chosen=members)
            tx.append([recorded(Retried(started.run.id), self._services.clock.now(), run.id, by.actor)])
            return started, changes

        return await self._carry_out(work, playbook, known.target)

    async def _carry_out(
        self,
        work: Callable[[Transaction], tuple[Started, AdmissionChanges | None]],
        playbook: CompiledPlaybook,
        target: Target | None,
    ) -> Started:
        services, also = self._services, also_of(playbook, target, self._services.topology())
        holder = None
        if target is not None and not isinstance(also, Unresolved):
            holder = services.locks.holder(claims.of_playbook(playbook, target, services.actions, also))
        started, changes = await self._services.store.transact(work)
        if changes is not None:
            self._services.metrics.decisions.labels(started.run.playbook, str(started.run.decision)).inc()
            self._services.on_admitted(changes)
        # An earlier request's run may have the target itself, or have ended.
        may_wait = not started.is_repeated or started.run.waiting_on == "target"
        return replace(started, waits_for=holder if may_wait else None)

    def _decide(
        self,
        tx: Transaction,
        playbook: CompiledPlaybook,
        target: Target | Unresolved,
        record: AlertRecord,
        by: ByHand,
        topology: Topology,
        *,
        write: bool,
        chosen: Selection | None = None,
    ) -> tuple[Started, AdmissionChanges | None]:
        """`chosen`: a group's members, instead of those of its selector."""
        now, candidate = self._services.clock.now(), Candidate.of(playbook, target, topology)
        admitting = admitter_of_one(tx, self._services, record.alert, candidate, topology)
        if chosen is not None and isinstance(target, Target):
            admitting.select(target, chosen)
        run = admitting.start(record, candidate, by)
        members = admitting.selection(run.target) if run.target is not None and run.is_group else None
        steps = self._steps(run, playbook, record, topology, members)
        if not write:
            return Started(run, steps), None
        tx.keep_playbook(run.playbook, run.version, playbook.text, now)
        changes = admitting.changes()
        changes.write(tx, now)
        return Started(run, steps), changes

    def _steps(
        self,
        run: Run,
        playbook: CompiledPlaybook,
        record: AlertRecord,
        topology: Topology,
        members: Selection | Unresolved | None,
    ) -> tuple[StepAhead, ...]:
        if members is not None:
            keys = [each.key for each in members.members] if isinstance(members, Selection) else []
            given = run, playbook, [record.alert], self._services.actions, topology
            return preview.steps_of_group(keys, *given) if keys else ()
        url, verdicts = self._services.limits.external_url, topology.verdicts
        names = scope.build(run, playbook, [record.alert], hindsight=False, external_url=url, verdicts=verdicts)
        whole = replace(run, steps=step_sequence.initial_steps(playbook, ask_first=False))
        asking = StepState(APPROVAL, 0, APPROVAL, "approve")  # as if asked first: all steps are ahead
        return preview.steps_after(asking, whole, playbook, names, self._services.actions, topology)

    def _playbook(self, name: str) -> CompiledPlaybook:
        playbook = self._services.catalog.get(name)
        if playbook is None:
            loaded = (each.definition.name for each in self._services.catalog.all())
            raise errors.NotFound(f"no playbook {name} is loaded{did_you_mean(name, loaded)}")
        return playbook

    def _firing_alert(
        self, tx: Transaction, playbook: CompiledPlaybook, order: StartOrder, topology: Topology
    ) -> AlertRecord | None:
        names, fitting = playbook.definition.on.alertnames, []
        alert_map = self._services.alert_map()
        for record in tx.firing(_MOST_FIRING):
            mapped = alert_map.apply(record.alert)
            # An alert with a reaction keeps its labels of that time.
            alert = record.alert if record.has_reaction else mapped.alert
            has_labels = all(alert.every_label.get(name) == value for name, value in order.labels.items())
            if alert.name not in names or not has_labels or mapped.refused:
                continue
            match = playbook.match(alert)  # the person is responsible for missing proof
            if (match.matched or match.unproven) and playbook.target_of(alert, topology) == order.target:
                fitting.append(replace(record, alert=alert))
        return max(fitting, key=lambda record: record.alert.starts_at, default=None)

    def _stand_in(self, order: StartOrder, given: inputs.ReadInputs) -> AlertRecord:
        now = self._services.clock.now()
        labels = {"alertname": ALERT_NAME, **beginnings.labels_of(order.target), **order.labels}
        alert = Alert(
            f"{BY_HAND}{self._services.new_id()[-12:]}", AlertStatus.FIRING, labels, given.as_annotations, now
        )
        return AlertRecord(alert, now, now)


def _check_entitled(playbook: CompiledPlaybook, by: ByHand) -> None:
    manual = playbook.definition.on.manual
    if manual is not None and not approval.is_named(manual.by, by.actor, by.groups):
        raise errors.NotEntitled(f"{playbook.definition.name} is started by {' or '.join(manual.by)}")


def _inputs(playbook: CompiledPlaybook, order: StartOrder) -> inputs.ReadInputs:
    manual = playbook.definition.on.manual
    if manual is None and order.inputs:
        raise errors.PayloadError.at([("inputs", f"{order.playbook} takes no inputs; only 'on: manual' has some")])
    given = inputs.read(manual.inputs if manual is not None else {}, order.inputs)
    if given.problems:
        raise errors.PayloadError.at([(f"inputs.{name}", message) for name, message in given.problems])
    return given


def _target(
    playbook: CompiledPlaybook, order: StartOrder, stand_in: AlertRecord, topology: Topology
) -> Target | Unresolved:
    definition = playbook.definition
    group = definition.group
    kind = TargetKind.GROUP if group is not None else definition.target_kind
    if order.target is not None:
        if group is not None and not order.target.key.startswith(f"{group.plural}:"):
            raise errors.Conflict(f"{order.playbook} works on a group, such as {group.plural}:rack=r1")
        if kind is not order.target.kind:
            raise errors.Conflict(f"{order.playbook} works on a {kind}, not on {order.target.key}")
        return target_resolution.confirmed(order.target, topology)
    is_derived = definition.on.alert is None and isinstance(definition.target, (TargetParts, GroupTarget))
    if not is_derived and kind is not TargetKind.CLUSTER:
        raise errors.PayloadError.at([("target", f"is missing; {order.playbook} works on a {kind}")])
    return playbook.target_of(stand_in.alert, topology)


def _result_of_request(
    tx: Transaction, by: ByHand, playbook: str, target: Target | None, digests: Collection[str | None] = (None,)
) -> Started | None:
    """Return the result of an earlier request with this key. Raises Conflict if it differed."""
    run_id = tx.run_of_request(by.key) if by.key is not None else None
    run = tx.run(run_id) if run_id is not None else None
    if run is None:
        return None
    if run.request_digest is None:  # a retry, or a run of an earlier release
        is_other = run.target is not None and run.target != target  # the record of a refusal has no target
    else:
        is_other = run.request_digest not in digests
    if is_other or (run.playbook, run.started_by, run.repeats) != (playbook, by.actor, by.repeats):
        done = "is recorded as" if run.status is Status.NOT_STARTED else "has started"
        raise errors.Conflict(f"the key {by.key!r} was used for another request, which {done} run {run.id}")
    return Started(run, (), is_repeated=True)


def _digest(target: Target | None, order: StartOrder, given: inputs.ReadInputs) -> str:
    request = [target.key if target is not None else None, dict(order.labels), dict(given.values)]
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def _repeatable(run: Run, alerts: list[AlertRecord]) -> tuple[Target, AlertRecord]:
    if run.is_open:
        raise errors.Conflict(f"run {run.id} is open; it is {run.status}")
    if run.status is Status.SUCCEEDED and not run.is_group:
        raise errors.Conflict(f"run {run.id} has succeeded; start the playbook again with 'runs start'")
    if run.target is None:
        raise errors.Conflict(f"run {run.id} has no target: {run.message}")
    firing = [record for record in alerts if not record.is_resolved]
    if not firing:
        raise errors.Conflict(f"the alert of run {run.id} has resolved; start the playbook again with 'runs start'")
    own = [record for record in firing if record.identity == run.alert]
    return run.target, (own or firing)[0]
