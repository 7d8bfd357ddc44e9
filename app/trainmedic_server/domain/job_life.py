"""State of jobs: present, ended or gone.

A job is **gone** if its launcher gave it up, or if job and launcher are silent without a reported end.
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
"""Silence of a gone job. A presence expires after 15 s."""
KEPT = timedelta(days=1)  # Time after which ended and gone jobs are forgotten
OLDEST_NOTICE = timedelta(hours=12)
"""Half of `KEPT`, so that the job of a replayed notice is still remembered."""

_MOST_LAUNCHERS = 64  # launchers of a job whose numbers are stored
_SILENT = "nothing has been heard of it, and it did not say that it ended"


class LifeState(StrEnum):
    PRESENT = "present"
    ENDED = "ended"
    GONE = "gone"


class JobLife(Struct, frozen=True):
    name: str
    state: LifeState
    since: datetime
    instance: str = ""  # last process that reported; empty if unknown
    reason: str = ""
    """Reason of the last failure or of being gone, or a person's note."""
    failures: int = 0
    restarts: int = 0
    numbers: Mapping[str, int] = field(default_factory=dict)
    """Last notice number by launcher instance, to detect repeats."""


class LifeChange(Struct, frozen=True):
    life: JobLife
    event: LifeEvent | None = None


def after_report(life: JobLife | None, name: str, instance: str, now: datetime) -> LifeChange | None:
    """Return the change that a presence makes, or None. `life` None: unknown job; `instance` empty: a launcher's."""
    if life is None:
        return LifeChange(JobLife(name, LifeState.PRESENT, now, instance))
    if life.state is LifeState.PRESENT:
        is_new_process = instance not in ("", life.instance)
        return LifeChange(replace(life, instance=instance)) if is_new_process else None
    if life.state is LifeState.ENDED:
        # Data written shortly before the end may be read after it.
        is_back = instance != life.instance if instance else now - life.since > GONE_AFTER
        return LifeChange(replace(life, state=LifeState.PRESENT, since=now, instance=instance)) if is_back else None
    returned = replace(life, state=LifeState.PRESENT, since=now, instance=instance or life.instance, reason="")
    return LifeChange(returned, JobReturned(life.name))


def after_silence(life: JobLife, now: datetime) -> LifeChange | None:
    if life.state is not LifeState.PRESENT:
        return None
    reason = life.reason or _SILENT
    return LifeChange(replace(life, state=LifeState.GONE, since=now, reason=reason), JobGone(life.name, reason))


def after_notice(life: JobLife | None, notice: Notice, is_of_launcher: bool, now: datetime) -> LifeChange | None:
    """Return None if its time is too far from now, or it is repeated or of an earlier process."""
    known = life if life is not None else JobLife(notice.job, LifeState.PRESENT, now)
    if abs(now - notice.at) > OLDEST_NOTICE:
        return None
    if is_of_launcher:
        numbers = _counted(known.numbers, notice)
        if numbers is None:
            return None
        known = replace(known, numbers=numbers)
    elif known.instance != notice.instance or known.state is LifeState.ENDED:
        return None
    return LifeChange(_changed(known, notice, now), _event_of(notice))


def _counted(numbers: Mapping[str, int], notice: Notice) -> dict[str, int] | None:
    """Return the last numbers with the notice's; None for a repeat, or an old launcher's among too many."""
    # Instances sort by start time.
    is_full = len(numbers) >= _MOST_LAUNCHERS
    if notice.number <= numbers.get(notice.instance, 0) or (is_full and notice.instance < min(numbers)):
        return None
    counted = {**numbers, notice.instance: notice.number}
    return {instance: counted[instance] for instance in sorted(counted)[-_MOST_LAUNCHERS:]}


def _event_of(notice: Notice) -> LifeEvent:
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
            return replace(life, state=LifeState.PRESENT, since=now, restarts=life.restarts + 1, reason="")
        case _:
            return replace(life, state=LifeState.GONE, since=now, reason=notice.reason)


def ended_on_purpose(life: JobLife, note: str, now: datetime) -> LifeChange | None:
    """Return the change if a person states an intended end; None if the job is not gone."""
    if life.state is not LifeState.GONE:
        return None
    ended = replace(life, state=LifeState.ENDED, since=now, instance="", reason=note)
    return LifeChange(ended, JobEnded(life.name, note))


def is_forgotten(life: JobLife, kept_since: datetime) -> bool:
    return life.state is not LifeState.PRESENT and life.since < kept_since


def overcrowding(lives: Collection[JobLife], most: int) -> list[JobLife]:
    """Return the jobs beyond `most`: ended ones first, then the longest unchanged."""
    if len(lives) <= most:
        return []
    first_to_drop = sorted(lives, key=lambda life: (life.state is not LifeState.ENDED, life.since))
    return first_to_drop[: len(lives) - most]
