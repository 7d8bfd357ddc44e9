"""Calling a function on every rank, so that every rank knows whether it succeeded everywhere.

Every rank makes the same calls in the same order, for each of them waits for all ranks: a rank that leaves one out
would leave the others waiting. Who calls it: ``joint_checkpoints``, ``restore`` and ``handlers``. With a single rank it
costs nothing.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, TypeVar

from trainmedic.errors import NotAgreed, TrainmedicError
from trainmedic.job.group import Group, ranks_named

Result = TypeVar("Result")


class FailedOnSomeRanks(TrainmedicError):
    """Something failed on at least one rank."""


def on_all_ranks(group: Group, act: Callable[[], Result]) -> Result:
    """Call `act`, and return what it returns here once it went well on all ranks.

    Raises FailedOnSomeRanks on all where it did not on one, and NotAgreed where that cannot be found out.
    """
    result: Any = None
    fault: Exception | None = None
    try:
        result = act()
    except Exception as error:  # whatever `act` raises, because the other ranks wait for this rank's report
        if group.world_size == 1:
            raise
        fault = error
    failed = failures(group.poll(None if fault is None else first_line(fault)), group)
    if failed:
        raise FailedOnSomeRanks(failed) from fault
    return result  # type: ignore[no-any-return]


def failures(reports: Mapping[int, Any], group: Group) -> str:
    """Which ranks failed, and why the first one did; empty if none failed.

    ``reports`` holds by rank what failed there, or None. Raises NotAgreed where a rank has not reported.
    """
    missing = [rank for rank in range(group.world_size) if rank not in reports]
    if missing:
        raise NotAgreed(f"{ranks_named(missing)} did not say how it went")
    failed = [rank for rank in sorted(reports) if reports[rank]]
    if not failed:
        return ""
    reason = str(reports[failed[0]])
    return reason if group.world_size == 1 else f"{ranks_named(failed)}: {reason}"


def first_line(error: BaseException) -> str:
    """The beginning of an error's text, with its type unless it is one of our own, whose texts are meant for people."""
    text = (str(error).strip().splitlines() or [""])[0][:300]
    return text if isinstance(error, TrainmedicError) and text else f"{type(error).__name__}: {text}"
