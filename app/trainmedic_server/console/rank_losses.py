"""Losses of a job's ranks in its presence (`trainmedic.job.loss_spread`), parsed as untrusted input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

_MOST_POINTS = 64
_MOST_RANKS = 32
Rank = Annotated[int, Meta(ge=0, lt=1_000_000_000)]


class OddRanks(Struct, frozen=True):
    """Ranks with a non-finite loss."""

    count: int
    ranks: Annotated[str, Meta(max_length=1000)]


class RankLossEntry(Struct, frozen=True):
    rank: Rank
    loss: float
    node: Annotated[str, Meta(max_length=253)] = ""


class RankLosses(Struct, frozen=True):
    ranks: int
    steps: tuple[int, int] | None = None  # lowest and highest step to which the losses belong
    nan: OddRanks | None = None
    infinite: OddRanks | None = field(default=None, name="inf")
    minus_infinite: OddRanks | None = field(default=None, name="-inf")
    lowest: RankLossEntry | None = None
    median: float | None = None
    highest: RankLossEntry | None = None
    curve: Annotated[tuple[float, ...], Meta(max_length=_MOST_POINTS)] = ()
    """Losses over the ranks, in ascending order."""
    # Ranks with an outlying loss, and the number of all such ranks.
    apart: Annotated[tuple[RankLossEntry, ...], Meta(max_length=_MOST_RANKS)] = ()
    apart_count: int = 0

    @property
    def not_finite(self) -> tuple[tuple[str, OddRanks], ...]:
        kinds = (("NaN", self.nan), ("infinite", self.infinite), ("minus infinite", self.minus_infinite))
        return tuple((kind, odd) for kind, odd in kinds if odd is not None)

    @property
    def has_spread(self) -> bool:
        return None not in (self.lowest, self.median, self.highest)


def losses_of(job: Mapping[str, Any] | None) -> RankLosses | None:
    details = (job or {}).get("details")
    said = details.get("losses") if isinstance(details, Mapping) else None
    try:
        return msgspec.convert(said, RankLosses) if said is not None else None
    except msgspec.ValidationError:
        return None
