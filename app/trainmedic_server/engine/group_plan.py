"""The parent run of a group, between its approval and its last steps."""

from __future__ import annotations

from datetime import datetime, timedelta

from msgspec.structs import replace

from trainmedic_core.target import Target
from trainmedic_server.domain import group_events, places
from trainmedic_server.domain.group import counted
from trainmedic_server.domain.playbook import CHECK, Rollout
from trainmedic_server.domain.run import Decision, Run, Status, StepState
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine import after_resolve, rollout, step_sequence, windows
from trainmedic_server.engine.plan_values import RunDraft, Wait
from trainmedic_server.engine.rollout import GroupProgress, RolloutOver, StartMembers, WaitForMembers
from trainmedic_server.ports.playbooks import CompiledPlaybook

TRY_AGAIN = timedelta(minutes=1)  # after members could not start
MEMBERS = "members"  # `Run.waiting_on` of a parent whose members may have begun


def has_begun(run: Run, group: GroupProgress | None) -> bool:
    return run.waiting_on == MEMBERS or (group is not None and bool(group.begun))


def settings(playbook: CompiledPlaybook) -> Rollout:
    return playbook.definition.rollout or rollout.DEFAULTS


def chosen(rules: Rollout, progress: GroupProgress, count: int, run_id: str, topology: Topology) -> list[str]:
    def is_busy(key: str) -> bool:
        return bool(places.jobs_of(Target.of_key(key), topology))

    return rollout.chosen(rules, progress.left(), count, run_id, is_busy)


def proceed(draft: RunDraft) -> StartMembers | Wait | RolloutOver | StepState:
    """Return the rollout's next act, a step of the check after its last batch, or that it is over."""
    group = _progress(draft)
    if group.has_acted and draft.run.acted_at is None:
        draft.run = replace(draft.run, acted_at=draft.now)  # through a member
    then = rollout.next_of(settings(draft.playbook), group, may_start=not after_resolve.is_resolved(draft))
    check = _step_of_check(draft, group, then)
    if check is not None:
        return check
    if isinstance(then, RolloutOver):
        # Also during a pause ("resume"): the last steps change nothing.
        if group.last_batch is not None and draft.run.waiting_on in (MEMBERS, "resume"):
            if draft.run.batch != group.last_batch:
                draft.add_event(batch_ended(group, group.last_batch))
            draft.set_status(Status.RUNNING)
        return then
    if isinstance(then, WaitForMembers):
        _wait_for_members(draft)
        return Wait()
    if draft.outside.paused:
        return draft.suspend_until_resumed()
    outside = windows.why_outside(draft.playbook.definition.windows, draft.now)
    if outside is not None:
        return _held(draft, outside, windows.opens_at(draft.playbook.definition.windows, draft.now))
    held = draft.outside.breaker or group.held
    if held:
        return _held(draft, held, group.tries_again or draft.now + TRY_AGAIN)
    _wait_for_members(draft)
    return then


def _step_of_check(
    draft: RunDraft, group: GroupProgress, then: StartMembers | WaitForMembers | RolloutOver
) -> StepState | None:
    last, states = group.last_batch, [state for state in draft.run.steps if state.phase == CHECK]
    if last is None or not states or not group.filled(last):
        return None
    # Only a batch that is over is checked, and none after too many errors.
    if isinstance(then, WaitForMembers) or (then.error if isinstance(then, RolloutOver) else then.batch == last):
        return None
    if draft.run.batch != last:
        draft.add_event(batch_ended(group, last))
        draft.run = replace(draft.run, batch=last, message="")
        draft.set_status(Status.RUNNING)
        for state in states:
            asked = state.params if state.kind == "approve" else {}  # keep how often it was asked
            draft.put(StepState(state.phase, state.index, state.id, state.kind, state.action, params=asked))
    return step_sequence.next_of_check(draft.run)


def why_ended(draft: RunDraft, broken: StepState, why: str) -> str:  # with the members' counts, if a check failed
    if broken.phase != CHECK or draft.run.batch is None:
        return why
    return f"{why}; {_progress(draft).counts}"


def wait_for_last(draft: RunDraft) -> Wait | None:
    """Return a wait while members of an ending parent are open."""
    if draft.group is None or not draft.group.open:
        return None
    _wait_for_members(draft)
    return Wait()


def outcome(draft: RunDraft) -> tuple[Status, str, Decision | None]:
    """Return status, message, and the decision if no member started."""
    group = _progress(draft)
    counts, begun = group.counts, list(group.begun.values())
    message = str(counts)
    if counts.not_begun:
        message += "; the alert resolved before they could begin"
    if begun and all(member.is_skipped for member in begun):
        first = begun[0]
        return Status.NOT_STARTED, f"{message}; {first.target}: {first.why}", first.decision
    return Status.SUCCEEDED, message, None


def batch_ended(group: GroupProgress, batch: int) -> group_events.BatchEnded:
    members = group.of_batch(batch)
    counts = counted(len(members), members)
    numbers = {name: getattr(counts, name) for name in ("succeeded", "failed", "skipped", "cancelled", "observed")}
    return group_events.BatchEnded(batch + 1, **numbers, exceptions=rollout.exceptions(members))


def _progress(draft: RunDraft) -> GroupProgress:
    assert draft.group is not None
    return draft.group


def _wait_for_members(draft: RunDraft) -> None:
    draft.set_status(Status.WAITING, MEMBERS)
    if draft.run.message:
        draft.run = replace(draft.run, message="")


def _held(draft: RunDraft, why: str, until: datetime) -> Wait:
    draft.set_status(Status.WAITING, MEMBERS)
    is_own = _progress(draft).waits_for_own and why == _progress(draft).held
    message = f"{'its members are at work' if is_own else 'no further member starts'}: {why}"
    if draft.run.message != message:
        draft.run = replace(draft.run, message=message)
        if not is_own:
            draft.add_event(group_events.RolloutHeld(why))
    return Wait(until)
