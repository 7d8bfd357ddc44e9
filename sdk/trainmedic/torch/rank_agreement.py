"""Doing something on every rank, and knowing on every rank how it went.

Who calls it: what loads, saves and changes things in a job of several ranks. With a single one it costs nothing.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, TypeVar

from trainmedic.errors import NotAgreed, TrainmedicError
from trainmedic.job.group import Group, ranks_named

Result = TypeVar("Result")


class FailedOnSomeRanks(TrainmedicError):
    """It went well on some ranks and not on others, or on none."""


def on_all_ranks(group: Group, act: Callable[[], Result]) -> Result:
    """What `act` returns here, once it went well on all ranks.

    Raises Apart on all where it did not on one, and NotAgreed where that cannot be found out.
    """
    result: Any = None
    fault: Exception | None = None
    try:
        result = act()
    except Exception as error:  # whatever it is, the other ranks have to hear of it
        if group.world_size == 1:
            raise
        fault = error
    wrong = failures(group.poll(None if fault is None else first_line(fault)), group)
    if wrong:
        raise FailedOnSomeRanks(wrong) from fault
    done: Result = result
    return done


def failures(said: Mapping[int, Any], group: Group) -> str:
    """What went wrong on which ranks, by what each has said of it; empty where nothing did.

    Raises NotAgreed where a rank has said nothing.
    """
    missing = [rank for rank in range(group.world_size) if rank not in said]
    if missing:
        raise NotAgreed(f"{ranks_named(missing)} did not say how it went")
    wrong = [rank for rank in sorted(said) if said[rank]]
    if not wrong:
        return ""
    if group.world_size == 1:
        return str(said[wrong[0]])
    return f"{ranks_named(wrong)}: {said[wrong[0]]}"


def first_line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0][:300]
    return text if isinstance(error, TrainmedicError) and text else f"{type(error).__name__}: {text}"
