"""Calls whose success all ranks agree on."""

from __future__ import annotations

from typing import Any, Callable, Mapping, TypeVar

from trainmedic.errors import NotAgreed, TrainmedicError, described, text_of
from trainmedic.job.group import Group, ranks_named

Result = TypeVar("Result")

_MOST_REASONS = 3  # shown


class FailedOnSomeRanks(TrainmedicError):
    """A call failed on at least one rank."""


def on_all_ranks(group: Group, act: Callable[[], Result]) -> Result:
    """Return ``act``'s result once it succeeded on all ranks.

    Raises FailedOnSomeRanks (a single rank: the error), or NotAgreed if one did not report.
    """
    result: Any = None
    fault: Exception | None = None
    try:
        result = act()
    except Exception as error:  # any error: the other ranks wait for this report
        if group.world_size == 1:
            raise
        fault = error
    failed = failures(group.poll(None if fault is None else first_line(fault)), group)
    if failed:
        raise FailedOnSomeRanks(failed) from fault
    return result  # type: ignore[no-any-return]


def failures(reports: Mapping[int, Any], group: Group) -> str:
    """Return the failed ranks with their reasons, or "". Raises NotAgreed, with these, if a rank is missing."""
    by_reason: dict[str, list[int]] = {}
    for rank in sorted(reports):
        if reports[rank]:
            by_reason.setdefault(str(reports[rank]), []).append(rank)
    named = [
        reason if group.world_size == 1 else f"{ranks_named(ranks)}: {reason}" for reason, ranks in by_reason.items()
    ]
    more = [f"{len(named) - _MOST_REASONS} more reasons"] if len(named) > _MOST_REASONS else []
    failed = "; ".join([*named[:_MOST_REASONS], *more])
    missing = [rank for rank in range(group.world_size) if rank not in reports]
    if missing:
        raise NotAgreed(f"{ranks_named(missing)} did not report" + (f"; {failed}" if failed else ""))
    return failed


def first_line(error: BaseException) -> str:
    """Return an error's first line, with its type unless it is our own."""
    text = text_of(error) if isinstance(error, TrainmedicError) else ""
    return (text or described(error)).splitlines()[0][:300]
