"""Start of a group's members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from msgspec import Struct

from trainmedic_core.target import Target
from trainmedic_server import errors
from trainmedic_server.domain import approval, group_events, selectors
from trainmedic_server.domain.event_codec import recorded
from trainmedic_server.domain.event_kinds import EventKind
from trainmedic_server.domain.group import SHOWN
from trainmedic_server.domain.playbook import APPROVAL, Rollout
from trainmedic_server.domain.run import OrderKind, Run
from trainmedic_server.domain.selectors import Selection
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine import admission_facts, capacity, group_plan, guards
from trainmedic_server.engine.admission import Admitter
from trainmedic_server.engine.admission_changes import AdmissionChanges
from trainmedic_server.engine.admission_facts import AdmissionFacts
from trainmedic_server.engine.capacity import Capacity
from trainmedic_server.engine.engine_services import EngineServices
from trainmedic_server.engine.matching import Candidate
from trainmedic_server.engine.plan_values import OutsideState
from trainmedic_server.engine.rollout import GroupProgress, StartMembers
from trainmedic_server.ports.playbooks import CompiledPlaybook
from trainmedic_server.ports.store import Transaction


class StartedMembers(Struct, frozen=True):
    changes: AdmissionChanges | None = None  # None if no member started
    held: str = ""  # why further members cannot start now
    refused: str = ""  # why the breaker refuses the whole list
    waits_for_own: bool = False  # True while started members take the capacity
    tries_again: datetime | None = None  # when `held` may have changed; None if unknown


def read_progress(tx: Transaction, run_id: str) -> GroupProgress:
    return GroupProgress(tx.group_list(run_id), tx.members(run_id))


async def start(
    services: EngineServices,
    parent: Run,
    playbook: CompiledPlaybook,
    outside: OutsideState,
    progress: GroupProgress,
    order: StartMembers,
) -> StartedMembers:
    """Start members in one transaction. None starts after a cancellation or the end of the alert."""
    topology, rules = services.topology(), group_plan.settings(playbook)
    has_limit = rules.max_unavailable is not None
    count = len(progress.members) if has_limit else order.count  # with a limit, not every one fits
    keys = group_plan.chosen(rules, progress, count, parent.id, topology)

    def work(tx: Transaction) -> StartedMembers:
        if _is_over(tx, parent.id):
            return StartedMembers()
        now, ago = services.clock.now(), services.timeline.by_clock()
        chosen, held, own, tries_again = keys, "", False, None
        if has_limit:
            # A copy: the event loop adds members while this thread reads.
            settling = {key: until for key, until in dict(progress.settling).items() if until > now}
            room = _capacity(tx, rules, parent, progress, topology, settling)
            if isinstance(room, str):
                return StartedMembers(held=room)
            chosen = capacity.fitting(room, keys, order.count, topology)
            if len(chosen) < min(order.count, len(keys)):
                held, tries_again = room.why_held(chosen, topology), min(settling.values(), default=None)
                own = bool(chosen or progress.open or settling)  # otherwise only others take the capacity
            if not chosen:
                return StartedMembers(held=held, waits_for_own=own, tries_again=tries_again)
        targets = [Target.of_key(key) for key in chosen]
        candidates = [Candidate.of(playbook, target, topology) for target in targets]
        facts = admission_facts.for_members(tx, candidates, services.limits, ago, topology, services.catalog)
        if facts.controls.breaker_open:
            return StartedMembers(held=facts.controls.breaker_reason or "the breaker is open")
        is_vouched = is_approved(parent)
        if not is_vouched and progress.last_batch is None:  # the first batch
            whole = [Target.of_key(key) for key in progress.members]
            refused = why_refused(whole, facts, topology, services)
            if refused is not None:
                return StartedMembers(refused=refused)
        admitting = Admitter(facts, services.limits, services.new_id, now, ago)
        for candidate, target in zip(candidates, targets, strict=True):
            gone = selectors.vanished(target, topology)
            reason = admitting.start_member(parent, outside.alerts[0], candidate, target, order.batch, is_vouched, gone)
            if reason is not None:
                held, own = reason, False
                break
        changes = admitting.changes()
        if not changes.runs:
            return StartedMembers(held=held, waits_for_own=own, tries_again=tries_again)
        changes.write(tx, now)
        tx.append(
            [recorded(event, now, parent.id) for event in _batch_events(parent, progress, order.batch, changes.runs)]
        )
        return StartedMembers(changes, held, waits_for_own=own, tries_again=tries_again)

    return await services.recorder.transact(work)


def _capacity(
    tx: Transaction,
    rules: Rollout,
    parent: Run,
    progress: GroupProgress,
    topology: Topology,
    settling: Mapping[str, datetime],
) -> Capacity | str:  # the reason if it is not known; called in the store's writing thread
    assert parent.target is not None
    working = [key for key, member in progress.begun.items() if member.is_open or key in settling]
    own = selectors.nodes_of(list(map(Target.of_key, working)), topology)
    members = list(map(Target.of_key, progress.members))
    made = capacity.of(rules, parent.target, members, topology, own, tx.nodes_at_work())
    assert made is not None
    return made


def to_retry(tx: Transaction, parent: Run) -> Selection:
    """Return the members that have not succeeded or not begun. Raises Conflict if there are none.

    Excludes those that owe an undo, which would revert the retry.
    """
    begun = {member.target: member for member in tx.members(parent.id)}
    kept, owing = [], []
    for key in tx.group_list(parent.id):
        member = begun.get(key)
        if member is None or (not member.is_fine and not member.is_unfinished):
            kept.append(Target.of_key(key))
        elif not member.is_fine:
            owing.append(f"{key} (run {member.run_id} is not over, or owes an undo)")
    if not kept:
        why = f"left out: {', '.join(owing[:SHOWN])}" if owing else "all have succeeded"
        raise errors.Conflict(f"run {parent.id} has no member to retry; {why}")
    return Selection(tuple(kept), tuple(owing))


def is_approved(parent: Run) -> bool:
    """Return whether a person approved the frozen list. A timeout that counts as approval is none."""
    return any(step.phase == APPROVAL and approval.approvers(step) for step in parent.steps)


def why_refused(
    members: Sequence[Target], facts: AdmissionFacts, topology: Topology, services: EngineServices
) -> str | None:
    nodes = selectors.nodes_of(members, topology)
    return guards.why_group_refused(nodes, facts.nodes_acted_on, facts.known_nodes, services.limits)


def _is_over(tx: Transaction, parent: str) -> bool:
    orders = tx.orders_of([parent]).get(parent, ())
    if any(order.kind in (OrderKind.CANCEL, OrderKind.UNDO) for order in orders):
        return True
    return OutsideState(tuple(tx.alerts_of([parent]).get(parent, ()))).is_over


def _batch_events(parent: Run, progress: GroupProgress, batch: int, runs: Sequence[Run]) -> list[EventKind]:
    last = progress.last_batch
    if last == batch:
        return []  # more members of a batch that has begun
    # With a check, `group_plan` recorded the end, and `parent.batch`.
    ended = [group_plan.batch_ended(progress, last)] if last is not None and parent.batch != last else []
    shown = [run.target_key for run in runs[:SHOWN]]
    return [*ended, group_events.BatchStarted(batch + 1, len(runs), shown)]
