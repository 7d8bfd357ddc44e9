"""The parent run of a group, between its approval and its last steps. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta

from msgspec.structs import replace

from trainmedic_server.domain import group_events
from trainmedic_server.domain.group import counted
from trainmedic_server.domain.run import Decision, Run, Status
from trainmedic_server.engine import after_resolve, rollout, windows
from trainmedic_server.engine.plan_values import RunDraft, Wait
from trainmedic_server.engine.rollout import GroupProgress, RolloutOver, StartMembers, WaitForMembers

TRY_AGAIN = timedelta(minutes=1)
"""Time until a held group is tried again, without news."""
MEMBERS = "members"
"""`Run.waiting_on` of a parent whose members may have begun."""


def has_begun(run: Run, group: GroupProgress | None) -> bool:
    """Return whether a member may have a run."""
    return run.waiting_on == MEMBERS or (group is not None and bool(group.begun))


def proceed(draft: RunDraft) -> StartMembers | Wait | RolloutOver:
    """Return what the rollout needs now, or that it is over."""
    group = _of(draft)
    if group.has_acted and draft.run.acted_at is None:
        draft.run = replace(draft.run, acted_at=draft.now)
    settings = draft.playbook.definition.rollout or rollout.DEFAULTS
    then = rollout.next_of(settings, group, may_start=not after_resolve.is_resolved(draft))
    if isinstance(then, RolloutOver):
        if group.last_batch is not None and draft.run.waiting_on in (MEMBERS, "resume"):
            draft.add_event(batch_ended(group, group.last_batch))
            draft.set_status(Status.RUNNING)
        return then
    if isinstance(then, WaitForMembers):
        _wait(draft)
        return Wait()
    if draft.outside.paused:
        return draft.suspend_until_resumed()
    outside = windows.why_outside(draft.playbook.definition.windows, draft.now)
    if outside is not None:
        return _held(draft, outside, windows.opens_at(draft.playbook.definition.windows, draft.now))
    held = draft.outside.breaker or group.held
    if held:
        return _held(draft, held, draft.now + TRY_AGAIN)
    _wait(draft)
    return then


def wait_for_last(draft: RunDraft) -> Wait | None:
    """Return the wait for the open members of a run that ends; None if there are none."""
    if draft.group is None or not draft.group.open:
        return None
    _wait(draft)
    return Wait()


def outcome(draft: RunDraft) -> tuple[Status, str, Decision | None]:
    """Return status, message and changed decision of a group that ended without too many errors."""
    group = _of(draft)
    counts, begun = group.counts, list(group.begun.values())
    told = str(counts)
    if counts.not_begun:
        told += "; the alert resolved before they could begin"
    if begun and all(member.is_skipped for member in begun):
        first = begun[0]
        return Status.NOT_STARTED, f"{told}; {first.target}: {first.why}", first.decision
    return Status.SUCCEEDED, told, None


def batch_ended(group: GroupProgress, batch: int) -> group_events.BatchEnded:
    members = group.of_batch(batch)
    counts = counted(len(members), members)
    numbers = {name: getattr(counts, name) for name in ("succeeded", "failed", "skipped", "cancelled", "observed")}
    return group_events.BatchEnded(batch + 1, **numbers, exceptions=rollout.exceptions(members))


def _of(draft: RunDraft) -> GroupProgress:
    assert draft.group is not None
    return draft.group


def _wait(draft: RunDraft) -> None:
    draft.set_status(Status.WAITING, MEMBERS)
    if draft.run.message:
        draft.run = replace(draft.run, message="")


def _held(draft: RunDraft, why: str, until: datetime) -> Wait:
    draft.set_status(Status.WAITING, MEMBERS)
    message = f"no further member starts: {why}"
    if draft.run.message != message:
        draft.run = replace(draft.run, message=message)
        draft.add_event(group_events.RolloutHeld(why))
    return Wait(until)
