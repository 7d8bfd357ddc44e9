"""Decisions on alerts: new, repeated or resolved, and whether a playbook starts or joins a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from datetime import datetime

from msgspec.structs import replace

from trainmedic_core.target import Target, TargetKind
from trainmedic_server import errors
from trainmedic_server.domain import available_nodes, beginnings, group, group_events, places, selectors, target_modes
from trainmedic_server.domain import event_kinds as kinds
from trainmedic_server.domain.admission import Admission, PlaybookDecision
from trainmedic_server.domain.alert import EVENT, Alert, AlertRecord, AlertStatus, Identity, RejectedAlert
from trainmedic_server.domain.event_codec import DECIDED, recorded
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.memory import RunMemory
from trainmedic_server.domain.playbook import ON_LIMITED, PHASES, Guards, Mode
from trainmedic_server.domain.reaction import Reaction, merged
from trainmedic_server.domain.run import PASSING, Controls, Decision, Event, Run, Status, StepState
from trainmedic_server.domain.selectors import Selection, Selector
from trainmedic_server.domain.time_gaps import Ago
from trainmedic_server.engine import guards, pausing, plan, preview, scope, step_sequence
from trainmedic_server.engine.admission_changes import AdmissionChanges, ByHand, StartedRun, events_of_rejected
from trainmedic_server.engine.admission_facts import AdmissionFacts
from trainmedic_server.engine.matching import Candidate, Key, MatchedAlert, PreparedDelivery
from trainmedic_server.engine.plan_values import RunPlan
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.ports.playbooks import CompiledPlaybook, Scope
from trainmedic_server.ports.store import GuardFacts, LinkedRun

FirstPlan = Callable[[StartedRun, datetime], RunPlan | None]
"""Returns None to leave the plan to the driver."""
_WITH_STEPS = (Decision.STARTED, Decision.OBSERVE_ONLY)
_ADMITTED = (*_WITH_STEPS, Decision.JOINED)
_TARGET_NOT_FOUND = frozenset({Decision.TARGET_UNKNOWN, Decision.TARGET_AMBIGUOUS})


class Admitter:
    """Decides on alerts one after another. Each decision updates the facts for the next."""

    # No I/O: the same transaction reads `facts` before and writes `changes()` afterwards, in the run store's thread
    # (in simulations, the event loop's). `engine/explanation` decides outside a transaction, and drops the changes.

    def __init__(
        self, facts: AdmissionFacts, limits: EngineLimits, new_id: Callable[[], str], now: datetime, ago: Ago
    ) -> None:
        self._facts = facts
        self._limits = limits
        self._new_id = new_id
        self._now = now
        self._ago = ago
        # Runs of this transaction, by playbook and by playbook and target: the facts do not count them.
        self._started: defaultdict[str | Key, int] = defaultdict(int)
        self._opened: defaultdict[str, int] = defaultdict(int)
        # Of the run that is being added: the operator who starts it, and the ID of the run that it repeats.
        self._by_hand: ByHand | None = None
        self._repeats: str | None = None
        self._records: dict[Identity, AlertRecord] = {}
        self._runs: dict[str, Run] = {}
        self._modes: dict[tuple[str, str, tuple[Target | Unresolved, ...]], tuple[Mode, str]] = {}  # cache
        self._steps: dict[tuple[str, str, bool, Sequence[str]], tuple[StepState, ...]] = {}  # cache of initial steps
        self._links: list[tuple[str, Identity]] = []  # run ID and alert
        self._events: list[Event] = []
        self._nodes: set[str] = set()  # targets of started and observed runs: known nodes from now on
        self._controls: Controls | None = None  # None if unchanged
        self._to_drive: dict[str, StartedRun] = {}  # open runs by ID
        self._touched: set[str] = set()  # IDs of runs whose alerts changed
        self._frozen: dict[str, Sequence[str]] = {}  # target keys of a new group's members, by run ID
        self._selections: dict[str, Selection | Unresolved] = {}  # a group's members, by its target key

    def changes(self, first_plan: FirstPlan | None = None) -> AdmissionChanges:
        """Return all changes. A run that a later alert changed gets no first plan."""
        runs, to_drive, events = dict(self._runs), dict(self._to_drive), list(self._events)
        for run_id, started in self._to_drive.items():
            first = first_plan(started, self._now) if first_plan is not None and run_id not in self._touched else None
            if first is not None:
                runs[run_id] = first.run
                to_drive[run_id] = replace(started, run=first.run, then=first.then)
                events += first.events
        return AdmissionChanges(
            records=self._records,
            runs=list(runs.values()),
            links=self._links,
            events=events,
            nodes=self._nodes,
            controls=self._controls,
            started=list(to_drive.values()),
            touched=self._touched,
            frozen=self._frozen,
        )

    def take_touched(self) -> set[str]:
        """Return and clear the IDs of earlier runs whose alerts changed."""
        touched, self._touched = self._touched, set()
        return touched

    def start(self, record: AlertRecord, candidate: Candidate, order: ByHand) -> Run:
        """Start a run manually. Return it, or the record of its refusal.

        Raises Conflict if a run of the playbook is open on the target.
        """
        outcome = self._apply_guards(replace(record.alert, starts_at=self._now), candidate)  # its age does not count
        if outcome.decision is Decision.JOINED:
            open_run = self._facts.open_runs[candidate.key]
            raise errors.Conflict(f"run {open_run} of {candidate.key[0]} on {candidate.key[1]} is open")
        self._by_hand = order
        run = self._add_run(record, candidate, outcome)
        known = self._facts.records.get(record.identity)
        if known is None:
            reaction = Reaction(run.playbook, run.decision, outcome.why, run.id)
            self._save_record(replace(record, reactions=(reaction,)))
        elif known.alert != record.alert:  # the alert map has accepted it since it was received
            self._save_record(replace(known, alert=record.alert))
        self._by_hand = None
        return run

    def admit(self, prepared: PreparedDelivery) -> Admission:
        admitted: list[PlaybookDecision] = []
        duplicates = unmatched = 0
        self._events += prepared.failures
        for alert, matched in zip(prepared.delivery.alerts, prepared.matched, strict=True):
            unmatched += not matched.candidates
            if alert.status is AlertStatus.RESOLVED:
                duplicates += self._record_resolved(alert, matched)
                continue
            is_known, decisions = self._decide_firing(alert, matched)
            duplicates += is_known
            admitted += decisions
        delivery = prepared.delivery
        if delivery.rejected:
            for rejected in delivery.rejected:
                self._record_rejected(rejected)
            self._events += events_of_rejected(delivery, self._now)
        return Admission(
            delivery.id,
            len(delivery.alerts) + len(delivery.rejected),
            tuple(admitted),
            duplicates,
            unmatched,
            delivery.truncated,
            delivery.rejected,
            delivery.ignored,
        )

    def _record_resolved(self, alert: Alert, matched: MatchedAlert) -> bool:
        """Return whether the end was already known. Older alerts of the fingerprint resolve with it."""
        earlier = self._facts.records.get(alert.identity)
        if earlier is not None and earlier.is_resolved:
            self._save_record(replace(earlier, last_heard_at=self._now, count=earlier.count + 1))
            return True
        record = earlier or AlertRecord(alert, self._now, self._now, 0, reactions=matched.resolved_first())
        alert = _as_mapped_before(alert, record.alert)
        self._resolve(replace(record, alert=alert, count=record.count + 1), "alertmanager")
        self._supersede(alert.identity)
        return False

    def _supersede(self, identity: Identity) -> None:
        for older in list(self._facts.firing.get(identity.fingerprint, {}).values()):
            if older.alert.starts_at < identity.starts_at:
                self._resolve(older, "superseded")

    def _record_rejected(self, rejected: RejectedAlert) -> None:
        """Apply what a malformed report's identity shows: a known alert ended or still fires."""
        if rejected.identity is None:
            return
        earlier = self._facts.records.get(rejected.identity)
        if earlier is not None and not earlier.is_resolved:
            heard = replace(earlier, last_heard_at=self._now, count=earlier.count + 1)
            if rejected.is_end:
                self._resolve(heard, "alertmanager")
            elif rejected.status is AlertStatus.FIRING:
                self._save_record(heard)
        if rejected.is_end:
            self._supersede(rejected.identity)

    def _resolve(self, record: AlertRecord, because: str) -> None:  # for `AlertRecord.resolved_because`
        ended = replace(record, last_heard_at=self._now, resolved_at=self._now, resolved_because=because)
        self._save_record(ended)
        for run in self._facts.linked.get(record.identity, ()):
            self._add_event(run.run_id, kinds.AlertResolved(record.alert.name, because))
            if run.status not in (Status.NOT_STARTED, Status.OBSERVED):
                self._touched.add(run.run_id)  # also a closed run: an undo may be due

    def _known_stand_in(self, alert: Alert) -> AlertRecord | None:
        if not alert.is_stand_in:
            return None
        # A repeated event starts later, so its identity is not that of the record.
        newest = self._facts.newest.get(alert.fingerprint)
        is_repeated = newest is not None and beginnings.is_repeated(newest.alert, alert)
        return newest if is_repeated else self._facts.records.get(alert.identity)

    def _decide_firing(self, alert: Alert, matched: MatchedAlert) -> tuple[bool, list[PlaybookDecision]]:
        begun = self._known_stand_in(alert)
        if begun is not None:
            self._save_record(replace(begun, last_heard_at=self._now, count=begun.count + 1))
            linked = self._facts.linked.get(begun.identity, ())
            decisions = [
                PlaybookDecision(run.run_id, run.playbook, run.target_key, Decision.DUPLICATE) for run in linked
            ]
            return True, decisions
        earlier = self._facts.records.get(alert.identity)
        if earlier is not None and earlier.is_resolved and earlier.resolved_because != "assumed":  # its end is certain
            ended = replace(earlier, last_heard_at=self._now, count=earlier.count + 1)
            decisions = [self._decide_overtaken(ended, candidate) for candidate in matched.candidates]
            self._save_record(_with_reactions(ended, decisions, matched))
            return True, decisions
        linked = list(self._facts.linked.get(alert.identity, ()))
        if earlier is not None and any(run.status not in (Status.NOT_STARTED, Status.OBSERVED) for run in linked):
            mapped, alert = alert, _as_mapped_before(alert, earlier.alert)
            if alert is not mapped:
                matched = MatchedAlert()  # mapped by an earlier map: no playbook of the new name starts too
        record = AlertRecord(alert, self._now, self._now)
        if earlier is not None:
            # An assumed end is refuted by this report.
            heard = replace(earlier, alert=alert, last_heard_at=self._now, count=earlier.count + 1)
            record = replace(heard, resolved_at=None, resolved_because=None)
        for run in linked:
            self._add_event(run.run_id, kinds.AlertRepeated(alert.name, record.count))
        decisions = [self._decide(record, candidate, linked) for candidate in matched.candidates]
        self._save_record(_with_reactions(record, decisions, matched))
        return earlier is not None, decisions

    def _decide_overtaken(self, record: AlertRecord, candidate: Candidate) -> PlaybookDecision:
        """Decide on an alert whose end arrived before its start: no run starts, and one record suffices."""
        name, target_key = candidate.key
        before = [run for run in self._facts.linked.get(record.identity, ()) if run.playbook == name]
        if before:
            return PlaybookDecision(before[-1].run_id, name, before[-1].target_key, Decision.DUPLICATE)
        late = guards.GuardDecision(Decision.STALE, "the alert had resolved before it was reported as firing")
        return PlaybookDecision(self._add_run(record, candidate, late).id, name, target_key, Decision.STALE, late.why)

    def _decide(self, record: AlertRecord, candidate: Candidate, linked: list[LinkedRun]) -> PlaybookDecision:
        """`linked` are the alert's runs, of all playbooks, oldest first."""
        name, target_key = candidate.key
        before = [run for run in linked if run.playbook == name]
        is_found = isinstance(candidate.target, Target)
        passing = PASSING | _TARGET_NOT_FOUND if is_found else PASSING  # a target unknown at first may be known now
        open_run = self._facts.open_runs.get(candidate.key)
        if before and any(run.run_id == open_run and run.decision == Decision.RATE_LIMITED for run in before):
            return PlaybookDecision(open_run or "", name, target_key, Decision.RATE_LIMITED)  # on_limited still runs
        acted = [run for run in before if run.decision not in passing]  # also final refusals, such as stale
        self._repeats, alert = None, record.alert
        if acted:
            last = PlaybookDecision(acted[-1].run_id, name, acted[-1].target_key, Decision.DUPLICATE)
            if not self._is_due_again(candidate, acted):
                return last
            # The first run was early enough, so the alert's age does not count.
            before, alert = before[before.index(acted[-1]) + 1 :], replace(alert, starts_at=self._now)
            decision = self._apply_guards(alert, candidate).decision
            if decision not in _ADMITTED and not self._reports_limit(candidate, decision):
                return last  # a refused repetition leaves no record
            self._repeats = last.run_id
        refused = beginnings.refusal_of(record.alert)  # such as a missed time of a schedule
        outcome = guards.GuardDecision(*refused) if refused is not None else self._apply_guards(alert, candidate)
        if before and outcome.decision in PASSING:  # one record of refusals suffices
            if outcome.decision != before[-1].decision:
                self._add_event(before[-1].run_id, DECIDED[outcome.decision](record.alert.name, why=outcome.why))
            return PlaybookDecision(before[-1].run_id, name, before[-1].target_key, outcome.decision, outcome.why)
        if outcome.decision is Decision.JOINED:
            run_id = self._facts.open_runs[candidate.key]
            self._link(run_id, record, LinkedRun(run_id, name, target_key, Status.RUNNING, Decision.JOINED))
            self._add_event(run_id, kinds.Joined(record.alert.name, record.alert.fingerprint))
            self._touched.add(run_id)
            return PlaybookDecision(run_id, name, target_key, Decision.JOINED)
        run = self._add_run(record, candidate, outcome)
        if before and outcome.decision is Decision.STARTED:
            self._add_event(before[-1].run_id, kinds.StartedLater(run.id))
        return PlaybookDecision(run.id, name, target_key, outcome.decision, outcome.why)

    def _reports_limit(self, candidate: Candidate, decision: Decision) -> bool:
        """Return whether the refused run carries out ``on_limited``, once in a period of ``max_runs``."""
        playbook, rules = candidate.playbook.definition, candidate.playbook.definition.guards
        if decision is not Decision.RATE_LIMITED or not rules.on_limited or self._by_hand is not None:
            return False
        if self.mode_of(candidate.playbook, candidate.target) is Mode.OBSERVE:
            return False
        informed = self._facts.limited.get(playbook.name, set())
        return candidate.key[1] not in informed if guards.counts_per_target(rules) else not informed

    def try_again(self, record: AlertRecord, candidate: Candidate) -> PlaybookDecision:
        return self._decide(record, candidate, list(self._facts.linked.get(record.identity, ())))

    def _is_due_again(self, candidate: Candidate, acted: Sequence[LinkedRun]) -> bool:
        due = guards.again_at(candidate.playbook.definition.guards.again, acted)
        return due is not None and due <= self._now

    def _apply_guards(self, alert: Alert, candidate: Candidate) -> guards.GuardDecision:
        """Return whether a run may start or must join one. May open the breaker."""
        target = candidate.target
        if isinstance(target, Unresolved):
            return guards.GuardDecision(Decision(target.reason), target.why)
        if candidate.key in self._facts.open_runs:
            return guards.GuardDecision(Decision.JOINED)
        definition, controls = candidate.playbook.definition, self._facts.controls
        mode, why = self._mode_and_reason(candidate.playbook, target, candidate.also)
        facts = self._guard_facts(candidate)
        selection: Selection | None = None
        if target.kind is TargetKind.GROUP:
            selected = self.selection(target)
            if isinstance(selected, Unresolved):
                return guards.GuardDecision(Decision(selected.reason), selected.why)
            selection = selected
            facts = replace(facts, last_ended_at=None)  # the cooldown is each member's
        targets = (target, *candidate.also)
        pause = pausing.holding(controls, definition.name, targets, alert.every_label, self._now, self._facts.topology)
        outcome = guards.decide(
            definition.guards, mode, facts, controls, self._limits, alert.starts_at, self._now, self._ago, pause,
            definition.windows,
        )  # fmt: skip
        nodes = places.counted_nodes(target) if outcome.decision in _WITH_STEPS else frozenset[str]()
        minimum = definition.guards.min_available
        if minimum is not None and (short := self._shortage(nodes, minimum)) is not None:
            return guards.GuardDecision(Decision.CAPACITY_LIMITED, short)
        if outcome.decision is Decision.OBSERVE_ONLY:
            return guards.GuardDecision(Decision.OBSERVE_ONLY, why)
        if outcome.decision is Decision.STARTED and selection is not None and mode is Mode.ENFORCE:
            # In mode approve, a person approves the list instead.
            of_all = selectors.nodes_of(selection.members, self._facts.topology)
            acted_on, known_nodes = self._facts.nodes_acted_on, self._facts.known_nodes
            reason = guards.why_group_refused(of_all, acted_on, known_nodes, self._limits)
            if reason is not None:
                return guards.GuardDecision(Decision.BREAKER_OPEN, reason)
        if outcome.decision is Decision.STARTED and nodes:
            acted_on, known_nodes = self._facts.nodes_acted_on, self._facts.known_nodes
            reason = guards.why_breaker_opens(nodes, acted_on, known_nodes, self._limits)
            if reason is not None:
                self._open_breaker(reason)
                return guards.GuardDecision(Decision.BREAKER_OPEN, reason)
        return outcome

    def _shortage(self, nodes: Set[str], minimum: float) -> str | None:
        topology, taken = self._facts.topology, self._facts.nodes_taken
        shortages = (available_nodes.shortage(node, minimum, topology, taken) for node in nodes)
        return next((why for why in shortages if why is not None), None)

    def selection(self, target: Target) -> Selection | Unresolved:
        if target.key not in self._selections:
            try:
                selected = selectors.resolve(Selector.of(target), self._facts.topology)
            except ValueError as error:
                selected = Unresolved(Decision.TARGET_UNKNOWN, str(error))
            self._selections[target.key] = selected
        return self._selections[target.key]

    def select(self, target: Target, members: Selection) -> None:
        """Set a group's members, instead of those that its selector finds now."""
        self._selections[target.key] = members

    def start_member(
        self,
        parent: Run,
        record: AlertRecord,
        candidate: Candidate,
        target: Target,
        batch: int,
        vouched: bool,
        gone: str | None,
    ) -> str | None:
        """Record a member's run, started or refused. Return None, or why the member must wait instead.

        `vouched`: a person approved the list, so the breaker does not count it. `gone`: why the member vanished, if so.
        """
        if isinstance(candidate.target, Unresolved):  # Redis does not answer, so its jobs are unknown
            return candidate.target.why
        outcome = self._guard_member(candidate, gone)
        nodes = places.counted_nodes(target) if outcome.decision in _WITH_STEPS else frozenset[str]()
        minimum = candidate.playbook.definition.guards.min_available
        if minimum is not None and (short := self._shortage(nodes, minimum)) is not None:
            return short
        if outcome.decision is Decision.STARTED and not vouched:
            acted_on, known_nodes = self._facts.nodes_acted_on, self._facts.known_nodes
            reason = guards.why_breaker_opens(nodes, acted_on, known_nodes, self._limits)
            if reason is not None:
                return reason
        run = self._new_run(record, candidate, outcome, parent)
        run = replace(run, parent=parent.id, batch=batch)
        if run.mode is not Mode.OBSERVE:
            run = replace(run, mode=Mode.APPROVE if vouched else Mode.ENFORCE)  # for `Run.is_vouched_for`
        self._runs[run.id] = run
        self._add_event(run.id, DECIDED[run.decision](record.alert.name, run.playbook, target.key, outcome.why or None))
        if run.status is not Status.NOT_STARTED:
            self._count_start(candidate, run)
        if run.is_open:
            self._to_drive[run.id] = StartedRun(run, candidate.playbook, record)
        return None

    def _guard_member(self, candidate: Candidate, gone: str | None) -> guards.GuardDecision:
        if gone is not None:
            return guards.GuardDecision(Decision.TARGET_UNKNOWN, gone)
        if candidate.key in self._facts.open_runs:
            holder = self._facts.open_runs[candidate.key]
            return guards.GuardDecision(Decision.TARGET_BUSY, f"run {holder} of the playbook is open on it")
        mode, why = self._mode_and_reason(candidate.playbook, candidate.target, candidate.also)
        cooldown = Guards(cooldown=candidate.playbook.definition.guards.cooldown)  # the parent passed the others
        facts = self._guard_facts(candidate)
        outcome = guards.decide(
            cooldown, mode, facts, self._facts.controls, self._limits, self._now, self._now, self._ago
        )
        return guards.GuardDecision(outcome.decision, why) if outcome.decision is Decision.OBSERVE_ONLY else outcome

    def mode_of(self, playbook: CompiledPlaybook, target: Target | Unresolved, also: tuple[Target, ...] = ()) -> Mode:
        return self._mode_and_reason(playbook, target, also)[0]

    def _mode_and_reason(  # the reason is "" unless targets or operators restrict the playbook to observing
        self, playbook: CompiledPlaybook, target: Target | Unresolved, also: tuple[Target, ...]
    ) -> tuple[Mode, str]:
        is_by_target = self._limits.target_modes.entries and isinstance(target, Target)
        by_target = (target, *also) if is_by_target else ()
        key = playbook.definition.playbook, playbook.version, by_target
        if key not in self._modes:
            mode, why = self._configured_mode(target, also)
            mode, why = (mode, why) if mode is Mode.OBSERVE else (Mode.stricter(playbook.definition.mode, mode), "")
            order = pausing.observing(self._facts.controls, playbook.definition.name, self._now)
            self._modes[key] = (mode, why) if order is None else (Mode.OBSERVE, order.why(self._now))
        return self._modes[key]

    def _configured_mode(self, target: Target | Unresolved, also: tuple[Target, ...]) -> tuple[Mode, str]:
        # The server's mode for the target. `_mode_and_reason` adds the playbook's and the operators'.
        topology = self._facts.topology
        if isinstance(target, Unresolved):
            return self._limits.mode, ""
        if target.kind is not TargetKind.GROUP or not self._limits.target_modes.entries:
            return self._limits.mode_for(target, topology, also)
        selection = self.selection(target)
        if isinstance(selection, Unresolved):
            return self._limits.mode, ""
        modes = [self._limits.mode_for(member, topology) for member in selection.members]
        mode = target_modes.of_members({mode for mode, _ in modes})
        return mode, next((why for each, why in modes if each is mode), "") if mode is Mode.OBSERVE else ""

    def _guard_facts(self, candidate: Candidate) -> GuardFacts:
        key = candidate.key
        facts = self._facts.guards.get(key, GuardFacts())
        if not self._started[key[0]]:
            return facts
        per_target = guards.counts_per_target(candidate.playbook.definition.guards)
        started, opened = self._started[key if per_target else key[0]], self._opened[key[0]]
        return replace(facts, started=facts.started + started, open_runs=facts.open_runs + opened)

    def _open_breaker(self, reason: str) -> None:
        self._facts.controls = replace(
            self._facts.controls, breaker_open=True, breaker_opened_at=self._now, breaker_reason=reason
        )
        self._controls = self._facts.controls
        self._events.append(recorded(kinds.BreakerOpened(reason), self._now))

    def _add_run(self, record: AlertRecord, candidate: Candidate, outcome: guards.GuardDecision) -> Run:
        run = self._new_run(record, candidate, outcome)
        self._runs[run.id] = run
        self._link(run.id, record, LinkedRun(run.id, *candidate.key, run.status, run.decision))
        frozen = self._freeze_members(run) if run.is_group else None
        content = DECIDED[run.decision](run.alert_name, run.playbook, candidate.key[1], outcome.why or None)
        if self._by_hand is None:
            content = content if run.repeats is None else replace(content, repeats=run.repeats)
            self._add_event(run.id, content)
        else:
            content = replace(content, by_hand=True, repeats=run.repeats, note=self._by_hand.note)
            self._add_event(run.id, content, self._by_hand.actor)
        if frozen is not None:
            self._add_event(run.id, frozen)
        if run.is_limited and run.is_open:
            self._facts.open_runs[candidate.key] = run.id
            self._facts.limited.setdefault(run.playbook, set()).add(run.target_key)
        elif run.status is not Status.NOT_STARTED:
            self._count_start(candidate, run)
        if run.is_open:
            self._to_drive[run.id] = StartedRun(run, candidate.playbook, record)
        return run

    def _freeze_members(self, run: Run) -> group_events.GroupFrozen | None:
        if run.status is Status.NOT_STARTED or run.is_limited:
            return None
        assert run.target is not None
        selection = self.selection(run.target)
        assert isinstance(selection, Selection)
        keys = [member.key for member in selection.members]
        self._frozen[run.id] = keys
        shown, left_out = keys[: group.SHOWN], selection.left_out[: group.SHOWN]
        return group_events.GroupFrozen(run.target_key, len(keys), group.digest(keys), shown, left_out)

    def _observed_summary(self, run: Run, playbook: CompiledPlaybook) -> str:
        if not run.is_group or run.target is None:
            return preview.summary(run.steps)
        selection = self.selection(run.target)
        count = len(selection.members) if isinstance(selection, Selection) else 0
        return f"{preview.group_summary(playbook)} to {group.size(count)}"

    def _new_run(
        self, record: AlertRecord, candidate: Candidate, outcome: guards.GuardDecision, parent: Run | None = None
    ) -> Run:
        playbook, decision = candidate.playbook, outcome.decision
        mode, _ = self._mode_and_reason(playbook, candidate.target, candidate.also)
        starts = decision in _WITH_STEPS
        reports_limit = parent is None and self._reports_limit(candidate, decision)
        asks = mode is Mode.APPROVE and parent is None
        phases: Sequence[str] = PHASES
        if playbook.definition.group is not None:
            phases = step_sequence.PARENT_PHASES if parent is None else step_sequence.MEMBER_PHASES
        if reports_limit:
            phases, asks = (ON_LIMITED,), False
        run = Run(
            id=self._new_id(),
            playbook=playbook.definition.name,
            version=playbook.version,
            target=candidate.target if isinstance(candidate.target, Target) else None,
            mode=mode,
            status=Status.RUNNING if decision is Decision.STARTED or reports_limit else Status.NOT_STARTED,
            decision=decision,
            alert=record.alert.identity,
            alert_name=record.alert.name,
            alert_labels=dict(record.alert.labels),
            original_labels=None if record.alert.original is None else dict(record.alert.original),
            created_at=self._now,
            steps=self._initial_steps(playbook, asks, phases) if starts or reports_limit else (),
            ended_at=None if decision is Decision.STARTED or reports_limit else self._now,
            message=outcome.why,
            also=candidate.also if starts else (),
            memory=None if playbook.remembers is None else self._facts.memories.get(candidate.key, RunMemory()),
        )
        if self._by_hand is not None:
            order = self._by_hand
            run = replace(run, started_by=order.actor, repeats=order.repeats)
            run = replace(run, request_key=order.key, request_digest=order.digest)
        elif parent is None and self._repeats is not None:
            run = replace(run, repeats=self._repeats)
        if decision is Decision.OBSERVE_ONLY:
            run = plan.observe(run, playbook, self._scope_of(run, playbook, record.alert))
            would = self._observed_summary(run, playbook)
            run = replace(run, message=f"{would}; {outcome.why}" if outcome.why else would)
        return run

    def _initial_steps(self, playbook: CompiledPlaybook, asks: bool, phases: Sequence[str]) -> tuple[StepState, ...]:
        key = playbook.definition.playbook, playbook.version, asks, phases
        if key not in self._steps:
            self._steps[key] = step_sequence.initial_steps(playbook, ask_first=asks, phases=phases)
        return self._steps[key]

    def _scope_of(self, run: Run, playbook: CompiledPlaybook, alert: Alert) -> Scope:
        url, verdicts, now = self._limits.external_url, self._facts.topology.verdicts, self._now
        return scope.LazyScope(
            lambda: scope.build(run, playbook, [alert], hindsight=False, external_url=url, verdicts=verdicts, now=now)
        )

    def _count_start(self, candidate: Candidate, run: Run) -> None:
        name, _ = candidate.key
        self._started[name] += 1
        self._started[candidate.key] += 1
        if run.is_open:
            self._opened[name] += 1
            self._facts.open_runs[candidate.key] = run.id
        else:  # only observed, so it has ended
            facts = self._facts.guards.get(candidate.key, GuardFacts())
            self._facts.guards[candidate.key] = replace(facts, last_ended_at=self._now)
        nodes = places.counted_nodes(run.target) if run.target is not None else frozenset[str]()
        self._nodes |= nodes
        self._facts.known_nodes |= nodes
        if run.is_open:
            self._facts.nodes_acted_on |= nodes
            if candidate.playbook.definition.guards.min_available is not None:
                self._facts.nodes_taken |= nodes

    def _save_record(self, record: AlertRecord) -> None:
        identity = record.alert.identity
        self._facts.records[identity] = record
        self._records[identity] = record
        if record.alert.fingerprint.startswith(EVENT):
            self._facts.newest[identity.fingerprint] = record
        firing = self._facts.firing.setdefault(identity.fingerprint, {})
        if record.is_resolved:
            firing.pop(identity, None)
        else:
            firing[identity] = record

    def _link(self, run_id: str, record: AlertRecord, linked: LinkedRun) -> None:
        identity = record.alert.identity
        self._links.append((run_id, identity))
        self._facts.linked.setdefault(identity, []).append(linked)

    def _add_event(self, run_id: str, content: kinds.EventKind, actor: str = "trainmedic") -> None:
        self._events.append(recorded(content, self._now, run_id, actor))


def _as_mapped_before(alert: Alert, earlier: Alert) -> Alert:
    """Retain the earlier mapped labels, so that a changed map does not make another alert."""
    if alert.labels == earlier.labels or (alert.original is None and earlier.original is None):
        return alert
    return replace(alert, labels=earlier.labels, original=earlier.original)


def _with_reactions(record: AlertRecord, decisions: Sequence[PlaybookDecision], matched: MatchedAlert) -> AlertRecord:
    if not (decisions or matched.misses):
        return record
    made = [Reaction(made.playbook, made.decision, made.why, made.run_id) for made in decisions]
    reactions = merged(record.reactions, (*made, *matched.misses))
    return record if reactions == record.reactions else replace(record, reactions=reactions)
