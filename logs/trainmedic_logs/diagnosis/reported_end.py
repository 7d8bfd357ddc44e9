"""Reports of an end by a job or its launcher."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct

from trainmedic_logs.diagnosis import exits
from trainmedic_logs.diagnosis.exits import Exit
from trainmedic_logs.diagnosis.verdict import Evidence
from trainmedic_logs.domain.known_verdict import KnownVerdict

HANG = "hang"
_LONGEST_REASON = 500
# Time after an end for reading its last lines.
_LATE = timedelta(minutes=2)


class ReportedEnd(Struct, frozen=True):
    job: str
    at: datetime
    """Received by the server, UTC."""
    is_failure: bool
    attempt: int | None = None
    """None if no launcher counts attempts."""
    node: str = ""
    status: int | None = None
    """Exit code, or negative signal number."""
    rank: int | None = None
    pid: int | None = None
    error: str = ""  # kind such as ``ValueError``, or `HANG`
    reason: str = ""  # for people
    restarts: bool = False
    """The launcher starts another attempt."""

    @property
    def is_hang(self) -> bool:
        return self.error == HANG

    @property
    def evidence(self) -> Evidence:
        who = "its launcher" if self.attempt is not None else "the job"
        why = f"{who} reported it"
        if self.is_hang:
            why = f"{who} ended it, because no step was completed for longer than the job's own limit"
        return Evidence(why, self.reason, "exit", self.node, self.rank, self.at)

    @property
    def exit(self) -> Exit | None:
        """End of the first process. None if unknown, normal or for a hang."""
        if self.status is None or self.is_hang or not self.is_failure:
            return None
        return exits.reported(self.status, self.rank, self.reason, self.node, self.pid)


def of_members(job: str, at: datetime, data: Mapping[str, Any], *, is_failure: bool) -> ReportedEnd:
    """Read a reported end; invalid members count as unknown."""
    return ReportedEnd(
        job,
        at,
        is_failure=is_failure,
        attempt=_number(data.get("attempt")),
        node=str(data.get("node") or ""),
        status=_number(data.get("status")),
        rank=_number(data.get("rank")),
        pid=_number(data.get("pid")),
        error=str(data.get("error") or ""),
        reason=str(data.get("reason") or "")[:_LONGEST_REASON],
        restarts=data.get("restarts") is True,
    )


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def verdict_of(
    report: ReportedEnd,
    before: ReportedEnd | None,
    verdicts: Sequence[KnownVerdict],
    taken_in: timedelta,
    stepped_at: datetime | None,
) -> KnownVerdict | None:
    """Return the existing verdict on a reported failure.

    A hang is diagnosed before the launcher ends it, so a verdict on the attempt counts until a step completes.
    `before`: previous report. `taken_in`: duration of one failure's signs.
    """
    for verdict in verdicts:
        is_other = None not in (verdict.attempt, report.attempt) and verdict.attempt != report.attempt
        if is_other or verdict.began_at > report.at or (before is not None and _is_of(before, verdict, report.at)):
            continue
        has_stepped = stepped_at is not None and stepped_at > verdict.began_at
        is_same = verdict.attempt is not None and verdict.attempt == report.attempt and not has_stepped
        if is_same or report.at - verdict.began_at <= taken_in:
            return verdict
    return None


def _is_of(before: ReportedEnd, verdict: KnownVerdict, until: datetime) -> bool:
    is_numbered = None not in (verdict.attempt, before.attempt)
    is_own = not is_numbered and verdict.began_at == before.at < until
    return verdict.began_at < before.at or is_own


def is_answered(at: datetime, attempt: int | None, reports: Iterable[ReportedEnd]) -> bool:
    """Return whether a sign received `at` belongs to a reported end."""
    for report in reports:
        if attempt is not None and report.attempt is not None:
            if attempt == report.attempt:
                return True
        elif at <= report.at + _LATE:
            return True
    return False


def facts_of(report: ReportedEnd) -> dict[str, Any]:
    return {"reported": report.evidence, "is_reported_hang": report.is_hang, "is_known_to_fail": True}
