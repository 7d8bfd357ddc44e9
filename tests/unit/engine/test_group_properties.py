"""What a group promises, for any settings and any course: the planner, the room for members, whole engines."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.engine.books import catalog_of
from tests.unit.engine.test_groups import CAP, LARGE, RACK, members
from tests.unit.engine.world import ScriptedActions, World
from trainmedic_core.target import Target
from trainmedic_server import errors
from trainmedic_server.domain import approval, inventory
from trainmedic_server.domain.alert import Alert, AlertRecord, AlertStatus
from trainmedic_server.domain.approval import Terms
from trainmedic_server.domain.group import Member
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.playbook import CHECK
from trainmedic_server.domain.run import Decision, OperatorOrder, OrderKind, Run, Status, StepState, StepStatus
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine import capacity, group_members, plan, step_sequence, windows
from trainmedic_server.engine.capacity import Capacity
from trainmedic_server.engine.group_plan import settings as rules_of
from trainmedic_server.engine.looking import Look, Observed, Sight
from trainmedic_server.engine.plan_values import (
    AttemptOutcome,
    Idle,
    OutsideState,
    PerformAttempt,
    PlanningContext,
    RunDraft,
    RunPlan,
)
from trainmedic_server.engine.rollout import GroupProgress, StartMembers
from trainmedic_server.ports.actions import Actions
from trainmedic_server.ports.store import Transaction
from trainmedic_server.simulation.virtual_time import BEGINNING

ACTIONS = ScriptedActions()
CHECKS = (
    "{approve: go on?, timeout: 2h}",
    "{wait: 10m}",
    "{action: test.tell}",
    "{wait_for: {action: test.look, every: 1m}, timeout: 1h}",
)
ENDS = (Status.SUCCEEDED, Status.SUCCEEDED, Status.SUCCEEDED, Status.FAILED, Status.CANCELLED, Status.NOT_STARTED)
WINDOW = "\nonly_during: {schedule: '0 * * * *', duration: 40m}\n"


class Course:
    """A parent run that is planned from what is stored, while members, alert and people do as chance has it."""

    def __init__(self, chance: random.Random, serial: str, check: Sequence[str], total: int, *, limited: bool) -> None:
        text = f"{CAP}\nrollout: {{serial: {serial}, max_errors: 20%, check: [{', '.join(check)}]}}"
        (playbook,) = catalog_of([text + (WINDOW if limited else "")], ACTIONS).all()
        self.chance, self.playbook = chance, playbook
        self.targets = [f"node:n{number}" for number in range(total)]
        self.begun: dict[str, Member] = {}
        self.now = BEGINNING
        self.answer = "applied"
        """Outcome of the check's actions."""
        alert = Alert("f", AlertStatus.FIRING, {"alertname": "PDU", "rack": "r1"}, {}, self.now)
        self.outside = OutsideState((AlertRecord(alert, self.now, self.now),))
        states = step_sequence.initial_steps(playbook, ask_first=False, phases=step_sequence.PARENT_PHASES)
        target = Target.of_key("nodes:rack=r1")
        names = ("rack", playbook.version, target, Mode.ENFORCE, Status.RUNNING, Decision.STARTED)
        self.run = Run("parent", *names, alert.identity, alert.name, alert.labels, self.now, states)
        self.context = PlanningContext(playbook, _actions(), lambda: "id", timedelta(minutes=15))

    def planned(self, ended: PerformAttempt | None, sight: Sight | None) -> RunPlan:
        """The next plan, made from what the next server would read too: both are the same."""
        first, second = (self._plan(ended, sight) for _ in range(2))
        assert first == second
        self.run = first.run
        return first

    def _plan(self, ended: PerformAttempt | None, sight: Sight | None) -> RunPlan:
        group = GroupProgress(self.targets, list(self.begun.values()))
        draft = RunDraft(self.run, self.outside, self.context, self.now, group, sight=sight)
        if ended is None:
            return plan.advance(draft)
        return plan.conclude_and_advance(draft, ended, AttemptOutcome(self.answer))

    @property
    def open(self) -> list[Member]:
        return [member for member in self.begun.values() if member.is_open]

    def start(self, order: StartMembers) -> None:
        rules, total = rules_of(self.playbook), len(self.targets)
        before = GroupProgress(self.targets, list(self.begun.values()))
        last = before.last_batch
        assert not self.outside.resolved
        assert self.outside.last(OrderKind.CANCEL) is None
        assert windows.why_outside(self.playbook.definition.windows, self.now) is None
        assert before.errors <= rules.errors_allowed(total)
        assert before.filled(order.batch) + order.count <= rules.batch(order.batch, total)
        if last is not None and order.batch != last:
            assert order.batch == last + 1
            assert not self.open
            check = [step for step in self.run.steps if step.phase == CHECK]
            assert not check or self.run.batch == last
            assert all(step.status in (StepStatus.SUCCEEDED, StepStatus.SKIPPED) for step in check)
        for target in before.left()[: order.count]:
            assert target not in self.begun
            self.begun[target] = Member(target, target, order.batch, Status.RUNNING, Decision.STARTED, True, True)

    def something_happens(self) -> None:
        """Time passes, or a member closes, a person answers or cancels, the alert resolves."""
        self.now += timedelta(minutes=self.chance.choice((0, 1, 7, 31)))
        choice = self.chance.random()
        if choice < 0.02:
            self._order(OrderKind.CANCEL, None)
        elif choice < 0.04:
            (record,) = self.outside.alerts
            self.outside = replace(self.outside, alerts=(replace(record, resolved_at=self.now),))
        elif self.run.status is Status.AWAITING_APPROVAL and choice < 0.5:
            asked = approval.waiting_step(self.run)
            assert asked is not None
            self._order(OrderKind.APPROVE if choice > 0.1 else OrderKind.REJECT, asked)
        elif self.open:
            one, status = self.chance.choice(self.open), self.chance.choice(ENDS)
            self.begun[one.target] = replace(one, status=status, is_unfinished=False)

    def _order(self, kind: OrderKind, asked: StepState | None) -> None:
        step, number = (None, None) if asked is None else (asked.id, Terms.of(asked).asked)
        made = OperatorOrder(f"o{len(self.outside.orders)}", "parent", kind, "ann", self.now, "", step, number)
        self.outside = replace(self.outside, orders=(*self.outside.orders, made))

    def look(self, look: Look) -> Sight:
        holds = self.chance.random() < 0.6
        return Sight(look.key, holds, self.now if holds else None, Observed(holds, self.now, self.now))


def _actions() -> Actions:
    return ACTIONS


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from(("1", "3", "50%", "[1, 10%]")),
    st.lists(st.sampled_from(CHECKS), max_size=3),
    st.integers(1, 12),
    st.booleans(),
)
def test_any_course_keeps_the_promises(seed: int, serial: str, check: list[str], total: int, limited: bool) -> None:
    """A batch in flight at most; no start after errors, a failed check, a cancellation, the end of the alert, or
    outside a window; the same plan from the same store; the parent closes last, with its members' counts."""
    chance = random.Random(seed)
    course = Course(chance, serial, check, total, limited=limited)
    ended, sight = None, None
    for _ in range(500):
        made = course.planned(ended, sight)
        ended, sight = None, None
        match made.then:
            case Idle():
                break
            case StartMembers() as order:
                course.start(order)
            case PerformAttempt() as act:
                ended, course.answer = act, chance.choice(("applied", "applied", "applied", "rejected"))
            case Look() as look:
                sight = course.look(look)
                course.something_happens()
            case _:
                course.something_happens()
    run = course.run
    assert not run.is_open
    assert not course.open
    counts = GroupProgress(course.targets, list(course.begun.values())).counts
    parts = (counts.succeeded, counts.failed, counts.skipped, counts.cancelled, counts.not_begun)
    assert sum(parts) == total
    broken = step_sequence.failed_step(run, course.playbook)
    if broken is not None:
        assert run.status in (Status.FAILED, Status.REJECTED, Status.CANCELLED)
    if run.status is Status.SUCCEEDED:
        assert run.message.startswith(str(counts))


NODES = st.integers(1, 9)


@given(
    st.lists(st.tuples(NODES, st.integers(0, 2)), max_size=20, unique=True),
    st.sets(NODES, max_size=4),
    st.sets(NODES, max_size=3),
    st.integers(0, 6),
    st.integers(1, 20),
)
def test_no_start_makes_too_many_nodes_unavailable(
    gpus: list[tuple[int, int]], out: set[int], others: set[int], allowed: int, count: int
) -> None:
    """Members that take a node away stay within the limit, wherever it is already exceeded; order is kept, and nothing
    starts where another run works."""
    topology = Topology(inventory.parse({"attributes:n[1-9]": "rack=r1", "gpus:n[1-9]": "3"}))
    keys = [f"gpu:n{node}/{gpu}" for node, gpu in gpus]
    foreign = frozenset(f"n{node}" for node in others)
    before = {f"n{node}" for node in out} | foreign
    room = Capacity(9, allowed, dict.fromkeys(sorted(before), "x"), foreign)
    fit = capacity.fitting(room, keys, count, topology)
    after = room.after(fit, topology).out.keys()
    assert len(fit) <= count
    assert [key for key in keys if key in fit] == fit
    assert after == before or len(after) <= allowed
    assert not {Target.of_key(key).node for key in fit} & foreign
    assert capacity.fitting(room, keys, count, topology) == fit


class StoredGroup:
    """The part of a transaction that a retry reads."""

    def __init__(self, begun: Sequence[Member], listed: Sequence[str]) -> None:
        self._begun, self._listed = begun, listed

    def members(self, run_id: str) -> Sequence[Member]:
        return self._begun

    def group_list(self, run_id: str) -> Sequence[str]:
        return self._listed


@given(st.lists(st.tuples(st.sampled_from((*ENDS, Status.OBSERVED, Status.RUNNING)), st.booleans()), max_size=9))
def test_a_retry_touches_no_member_that_succeeded(ends: list[tuple[Status, bool]]) -> None:
    """Nor one that is open or owes an undo; all others, and those that never began."""
    listed = [f"node:n{number}" for number in range(len(ends) + 2)]
    begun = [
        Member(target, target, 0, status, Decision.STARTED, owes or status.is_open)
        for target, (status, owes) in zip(listed, ends, strict=False)
    ]
    tx: Transaction = StoredGroup(begun, listed)  # type: ignore[assignment]
    parent = Course(random.Random(1), "1", (), 1, limited=False).run
    taken = {target.key for target in group_members.to_retry(tx, parent).members}
    left_out = {member.target for member in begun if member.is_fine or member.is_unfinished}
    assert taken == set(listed) - left_out


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from((OrderKind.APPROVE, OrderKind.REJECT))), max_size=8))
def test_an_answer_counts_for_the_batch_that_was_asked_about(given_: list[tuple[int, OrderKind]]) -> None:
    """A late answer to the question of an earlier batch starts none."""
    orders = [
        OperatorOrder(f"o{number}", "parent", kind, "ann", BEGINNING, "", "sure", asked)
        for number, (asked, kind) in enumerate(given_)
    ]
    for asked in range(1, 5):
        step = StepState(CHECK, 0, "sure", "approve", params=Terms(asked=asked).as_data())
        assert [order.asked for order in approval.answers(step, orders)] == [asked] * [n for n, _ in given_].count(
            asked
        )


def _outcomes(chance: random.Random) -> list[object]:
    kinds = ({"done": True}, {"done": True}, errors.PermanentFailure("no"), timedelta(seconds=3))
    return [chance.choice(kinds) for _ in range(8)]


async def test_a_member_does_as_the_same_run_alone(world: Callable[..., World]) -> None:
    """Its steps and undos, and what the breaker sees of its node."""
    single = CAP.replace('target: {nodes: {rack: "{{ labels.rack }}"}}', "target: node").replace("rack", "one")
    for seed in range(4):
        outcomes = _outcomes(random.Random(seed))
        grouped = world(f"{CAP}\nrollout: {{serial: 1, max_errors: 8}}", inventory=RACK, **LARGE)
        alone = world(single, inventory=RACK, **LARGE)
        seen = []
        for at in (grouped, alone):
            await at.engine.start()
            at.actions["cap"].outcomes.extend(outcomes)
            alerts = [at.alert("PDU", rack="r1")]
            if at is alone:
                alerts = [at.alert("PDU", node=f"n{number}") for number in range(1, 9)]
            for alert in alerts:
                await at.post(alert)
                await at.pass_time(5)
            await at.pass_time(60)
            for alert in alerts:
                await at.resolve(alert)
            await at.pass_time(60)
            runs = await members(at) if at is grouped else await at.runs()
            seen.append(
                (
                    {run.target_key: (run.status, *_deeds(run)) for run in runs},
                    Counter((call.target.key, name) for name in ("cap", "uncap") for call in at.actions[name].calls),
                    await at.store.transact(
                        lambda tx, since=at.clock.now() - timedelta(hours=1): tx.nodes_acted_on(since)
                    ),
                )
            )
            assert not any(run.owes_undo for run in runs)
        assert seen[0] == seen[1], seed


def _deeds(run: Run) -> list[tuple[str, str | None]]:
    return [(str(step.status), str(step.undo.status) if step.undo else None) for step in run.steps]
