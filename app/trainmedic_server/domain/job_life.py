"""What is known of whether a job lives: that it is there, has ended as it should, or is gone.

Pure functions from what was seen to the new record and the event that tells of it. A job is **gone** when nobody has
heard of it for a while, neither of the job nor of its launcher, and nobody has said that it ended; or when its launcher
has given it up. Who calls it: ``engine.job_watch``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from enum import StrEnum

from msgspec import Struct, field
from msgspec.structs import replace

from trainmedic.wire import notice as notices
from trainmedic.wire.notice import Notice
from trainmedic_server.domain.event_kinds import JobEnded, JobFailed, JobGone, JobRestarted, JobReturned, LifeEvent

GONE_AFTER = timedelta(minutes=1)
"""How long nothing is heard of a job until it counts as gone. A presence lives for 15 s."""
KEPT = timedelta(days=1)
"""For how long a job that is gone counts as such, and one that has ended is remembered, unless it comes back."""
OLDEST_NOTICE = timedelta(hours=12)
"""Half of `KEPT`: whoever puts an old notice back finds that its job is still remembered."""

_MOST_LAUNCHERS = 64
_SILENT = "nothing has been heard of it, and it did not say that it ended"


class LifeState(StrEnum):
    """Whether a job lives."""

    PRESENT = "present"
    ENDED = "ended"
    GONE = "gone"


class JobLife(Struct, frozen=True):
    """One job, as it was last heard of."""

    name: str
    state: LifeState
    since: datetime
    """Since when it is in this state (aware UTC)."""
    instance: str = ""
    """Which of its processes was heard of last; empty where only its launcher was."""
    reason: str = ""
    """Why it is gone, or what its last process or attempt ended by; for a person."""
    failures: int = 0
    """How many of its processes or attempts have said that they failed, since it is remembered."""
    restarts: int = 0
    """How many more attempts its launcher has begun."""
    numbers: Mapping[str, int] = field(default_factory=dict)
    """By instance, the number of the last notice of each launcher, by which one that comes again is known."""


class LifeChange(Struct, frozen=True):
    """A new record of a job, and what the history says of it; None where that is nothing."""

    life: JobLife
    event: LifeEvent | None = None


def heard(life: JobLife | None, name: str, instance: str, now: datetime) -> LifeChange | None:
    """The job, or its launcher where `instance` is empty, was heard of; None where that changes nothing."""
    if life is None:
        return LifeChange(JobLife(name, LifeState.PRESENT, now, instance))
    if life.state is LifeState.PRESENT:
        is_other = instance not in ("", life.instance)
        return LifeChange(replace(life, instance=instance)) if is_other else None
    if life.state is LifeState.ENDED:
        # What was written shortly before the end may be read after it.
        is_back = instance != life.instance if instance else now - life.since > GONE_AFTER
        return LifeChange(replace(life, state=LifeState.PRESENT, since=now, instance=instance)) if is_back else None
    returned = replace(life, state=LifeState.PRESENT, since=now, instance=instance or life.instance, reason="")
    return LifeChange(returned, JobReturned(life.name))


def missed(life: JobLife, now: datetime) -> LifeChange | None:
    """Nothing was heard of the job for `GONE_AFTER`."""
    if life.state is not LifeState.PRESENT:
        return None
    reason = life.reason or _SILENT
    return LifeChange(replace(life, state=LifeState.GONE, since=now, reason=reason), JobGone(life.name, reason))


def noticed(life: JobLife | None, notice: Notice, has_launcher: bool, now: datetime) -> LifeChange | None:
    """What a notice changes; None where it was heard before, or is about a process that is not the job's last.

    `has_launcher` is whether the notice is of a launcher, which speaks of attempts.
    """
    known = life if life is not None else JobLife(notice.job, LifeState.PRESENT, now)
    if abs(now - notice.at) > OLDEST_NOTICE:
        return None
    if has_launcher:
        numbers = _counted(known.numbers, notice)
        if numbers is None:
            return None
        known = replace(known, numbers=numbers)
    elif known.instance != notice.instance or known.state is LifeState.ENDED:
        return None
    return LifeChange(_changed(known, notice, now), _event_of(notice))


def _counted(numbers: Mapping[str, int], notice: Notice) -> dict[str, int] | None:
    """The numbers with that of a new notice; None where it is not new. Instances sort by when they began."""
    is_full = len(numbers) >= _MOST_LAUNCHERS
    if notice.number <= numbers.get(notice.instance, 0) or (is_full and notice.instance < min(numbers)):
        return None
    counted = {**numbers, notice.instance: notice.number}
    return {instance: counted[instance] for instance in sorted(counted)[-_MOST_LAUNCHERS:]}


def _event_of(notice: Notice) -> LifeEvent:
    """Return the event that repeats what a notice says."""
    return _NOTICED[notice.kind](
        notice.job,
        notice.reason,
        attempt=notice.attempt,
        node=notice.node or None,
        status=notice.status,
        rank=notice.rank,
        restarts=notice.restarts or None,
        pid=notice.pid,
        error=notice.error or None,
    )


_NOTICED: Mapping[str, type[LifeEvent]] = {
    notices.ENDED: JobEnded,
    notices.FAILED: JobFailed,
    notices.RESTARTED: JobRestarted,
    notices.GONE: JobGone,
}


def _changed(life: JobLife, notice: Notice, now: datetime) -> JobLife:
    match notice.kind:
        case notices.ENDED:
            return replace(life, state=LifeState.ENDED, since=now, reason="")
        case notices.FAILED:
            return replace(life, failures=life.failures + 1, reason=notice.reason)
        case notices.RESTARTED:
            return replace(life, state=LifeState.PRESENT, since=now, restarts=life.restarts + 1)
        case _:
            return replace(life, state=LifeState.GONE, since=now, reason=notice.reason)


def ended_on_purpose(life: JobLife, note: str, now: datetime) -> LifeChange | None:
    """What it changes that a person says that the job was meant to end; None where the job is not gone.

    Whoever is heard of after that is the job again, the same process too.
    """
    if life.state is not LifeState.GONE:
        return None
    ended = replace(life, state=LifeState.ENDED, since=now, instance="", reason=note)
    return LifeChange(ended, JobEnded(life.name, note))


def is_forgotten(life: JobLife, kept_since: datetime) -> bool:
    """Whether the job need not be remembered any more, where `kept_since` is `KEPT` ago."""
    return life.state is not LifeState.PRESENT and life.since < kept_since


def overcrowding(lives: Collection[JobLife], most: int) -> list[JobLife]:
    """Those that are left out where there are more than `most`: the ended first, then those of the oldest change."""
    if len(lives) <= most:
        return []
    by_worth = sorted(lives, key=lambda life: (life.state is not LifeState.ENDED, life.since))
    return by_worth[: len(lives) - most]
