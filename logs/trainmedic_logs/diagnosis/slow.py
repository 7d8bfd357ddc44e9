"""Diagnosis of slow jobs: the part of a step and the rank that lose the time.

A step waits for its batch (data), computes, and waits for other ranks (wait). Lost time is data, wait, and computing
beyond other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_logs.diagnosis.verdict import Advice, Confidence, Evidence, Verdict
from trainmedic_logs.domain.finding import CauseClass
from trainmedic_logs.domain.known_verdict import SLOW

NOTABLE_SHARE = 0.3
"""Share of a step from which data or wait is a loss."""
SLOW_RANK_FACTOR = 1.3
"""A rank is slow above this multiple of the ranks' median own time."""
EXPLAINED_SHARE = 0.8
"""Minimum share of the lost time that a cause must explain."""
_PARTS = "parts of the steps"
_MOST_SHOWN = 5
WAITS_FOR_DATA = "waits-for-data"  # rule
WHY_WAITS = "the trainer states how long a step takes and how long it waits for data"
WHY_TIMEOUT = "a timeout of a collective while the job was slow"
FULL_MEMORY = 0.95
"""Share from which the allocator keeps freeing and reallocating."""


class RankStep(Struct, frozen=True):
    """Median step parts of a rank, in seconds."""

    data: float
    compute: float
    wait: float
    memory_ratio: float | None = None
    """GPU memory in use, 0 to 1."""
    node: str = ""

    @property
    def own(self) -> float:
        """Time of the rank itself, without waiting for others."""
        return self.data + self.compute

    @property
    def step(self) -> float:
        return self.own + self.wait


class ThroughputDrop(Struct, frozen=True):
    share: float | None = None
    """Part of the usual throughput, 0 to 1; None if unknown."""


def by_own_figures(evidence: Sequence[Evidence]) -> Verdict:
    """Return the verdict if the trainer prints that steps wait for data."""
    summary = "By the trainer's own figures, more than half of each step is spent waiting for the batch."
    verdict = _verdict(CauseClass.DATA, summary, {}, evidence=evidence[0], missing=(_PARTS,))
    return replace(verdict, evidence=tuple(evidence[:_MOST_SHOWN]), shares=None)


def by_throughput(drop: ThroughputDrop, timeouts: Sequence[Evidence] = ()) -> Verdict:
    """Return a low-confidence hint on a throughput drop without step parts.

    NCCL timeouts suggest the network; otherwise slow data loading is most frequent.
    """
    fell = (
        "The throughput has dropped" if drop.share is None else f"The throughput is {drop.share:.0%} of the usual one"
    )
    why = "the throughput has dropped, and the steps do not report what they wait for"
    if timeouts:
        cause = CauseClass.NETWORK
        summary = f"{fell}, and NCCL reports timeouts. This is a hint at the network, which itself was not observed."
    else:
        cause = CauseClass.DATA
        summary = f"{fell}, and no NCCL timeout is known. This is a hint at slow data loading, without proof."
    hint = _verdict(cause, summary, {}, evidence=Evidence(why, source="training"), missing=(_PARTS,), is_sure=False)
    return replace(hint, evidence=(*hint.evidence, *timeouts[:_MOST_SHOWN]), shares=None)


def diagnose(parts: Mapping[int, RankStep], baseline_s: float | None = None) -> Verdict:
    """Return the verdict by each rank's parts.

    `unknown` without ranks, times or a single cause, or if steps take at most 5 % more than `baseline_s`, the healthy
    step time in seconds.
    """
    step = median(each.step for each in parts.values()) if parts else 0.0
    if not step > 0:  # also true for NaN
        return _verdict(CauseClass.UNKNOWN, "How the steps divide is not known.", {}, missing=(_PARTS,))
    shares = {
        "data": median(each.data for each in parts.values()) / step,
        "compute": median(each.compute for each in parts.values()) / step,
        "wait": median(each.wait for each in parts.values()) / step,
    }
    if baseline_s is not None and step <= baseline_s * 1.05:
        return _verdict(CauseClass.UNKNOWN, "The steps are as fast as they were when the job was well.", shares)
    for check in (_slow_rank, _slow_data, _slow_communication, _full_memory):  # the most specific first
        if verdict := check(parts, shares):
            return verdict
    listed = ", ".join(f"{share:.0%} {name}" for name, share in shares.items())
    if max(shares["data"], shares["wait"]) >= NOTABLE_SHARE:
        return _verdict(CauseClass.UNKNOWN, f"No single cause explains the loss: a step is {listed}.", shares)
    return _verdict(CauseClass.UNKNOWN, f"The steps are computing, as they should: {listed}.", shares)


def _slow_rank(parts: Mapping[int, RankStep], shares: Mapping[str, float]) -> Verdict | None:
    if len(parts) < 2 or shares["wait"] < NOTABLE_SHARE:
        return None
    usual = median(each.own for each in parts.values())
    slow = {rank: each for rank, each in parts.items() if each.own > SLOW_RANK_FACTOR * usual}
    if not slow or len(slow) > max(1, len(parts) // 4):  # too many are no exception
        return None
    others = [each.wait for rank, each in parts.items() if rank not in slow]
    waits = median(others) if others else 0.0
    if not waits:
        return None
    worst = max(slow, key=lambda rank: parts[rank].own)
    if (parts[worst].own - usual) / waits < EXPLAINED_SHARE:
        return None
    is_data = parts[worst].data - median(each.data for each in parts.values()) > 0.5 * (parts[worst].own - usual)
    cause = CauseClass.DATA if is_data else CauseClass.NODE
    doing = "waits for its batches" if is_data else "computes"
    summary = f"Rank {worst} {doing} so long that the others wait {waits:.2g} s of each step for it."
    why = f"it needs {parts[worst].own:.3g} s of its own for a step, the median rank {usual:.3g} s"
    evidence = Evidence(why, source="training", node=parts[worst].node, rank=worst)
    return _verdict(cause, summary, shares, ranks=tuple(sorted(slow)), evidence=evidence)


def _slow_data(parts: Mapping[int, RankStep], shares: Mapping[str, float]) -> Verdict | None:
    if shares["data"] < NOTABLE_SHARE or shares["data"] / (shares["data"] + shares["wait"]) < EXPLAINED_SHARE:
        return None
    summary = f"All ranks wait for their batches, {shares['data']:.0%} of each step: loading the data is too slow."
    return _verdict(CauseClass.DATA, summary, shares, evidence=_median_evidence("data", parts))


def _slow_communication(parts: Mapping[int, RankStep], shares: Mapping[str, float]) -> Verdict | None:
    if len(parts) < 2 or shares["wait"] < NOTABLE_SHARE:
        return None
    usual, slowest = median(each.own for each in parts.values()), max(each.own for each in parts.values())
    waits = median(each.wait for each in parts.values())
    unexplained = waits - (slowest - usual)
    if unexplained / (waits + median(each.data for each in parts.values())) < EXPLAINED_SHARE:
        return None
    summary = f"All ranks wait alike, {shares['wait']:.0%} of each step, and none is slower: communication is too slow."
    return _verdict(CauseClass.NETWORK, summary, shares, evidence=_median_evidence("wait", parts))


def _full_memory(parts: Mapping[int, RankStep], shares: Mapping[str, float]) -> Verdict | None:
    full = {rank: r for rank, each in parts.items() if (r := each.memory_ratio) is not None and r >= FULL_MEMORY}
    if not full or max(shares["data"], shares["wait"]) >= NOTABLE_SHARE:
        return None
    summary = f"The memory of {len(full)} cards is full to {max(full.values()):.0%}: it is freed and asked for again."
    why = f"more than {FULL_MEMORY:.0%} of the card's memory is in use"
    evidence = Evidence(why, source="training", rank=min(full))
    return _verdict(CauseClass.GPU_MEMORY, summary, shares, ranks=tuple(sorted(full)), evidence=evidence, is_sure=False)


def _median_evidence(part: str, parts: Mapping[int, RankStep]) -> Evidence:
    seconds = median(getattr(each, part) for each in parts.values())
    return Evidence(f"{part} takes {seconds:.3g} s of a step, the median of {len(parts)} ranks", source="training")


def _verdict(
    cause: CauseClass,
    summary: str,
    shares: Mapping[str, float],
    ranks: tuple[int, ...] = (),
    evidence: Evidence | None = None,
    missing: tuple[str, ...] = (),
    is_sure: bool = True,
) -> Verdict:
    """Leave `Verdict.node` None: step times are the job's own statement."""
    named = evidence is not None
    return Verdict(
        cause=cause,
        confidence=Confidence.MEDIUM if named and is_sure else Confidence.LOW,
        summary=summary,
        advice=Advice.ASK if named else Advice.NONE,
        ranks=ranks,
        evidence=(evidence,) if evidence else (),
        missing=missing,
        fingerprint=f"{SLOW}{cause}",
        shares={name: round(share, 4) for name, share in shares.items()},
    )
