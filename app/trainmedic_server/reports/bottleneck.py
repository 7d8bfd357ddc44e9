"""Bottleneck of a job's steps: data, other ranks, memory or computing.

Uses the parts of step time that the SDK measures. If they are unknown, the trainer's own figures in the log can show
waiting for data. Otherwise, if throughput is low, NCCL timeouts hint at communication and their absence at data, with
severity ``low``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainmedic_logs.diagnosis.slow import EXPLAINED_SHARE, NOTABLE_SHARE, SLOW_RANK_FACTOR, WAITS_FOR_DATA
from trainmedic_logs.domain.finding import CauseClass, Role
from trainmedic_logs.domain.known_finding import KnownFinding

_HIGH_SEVERITY = 0.5  # Share of a step spent waiting.
_MEMORY_FULL = 0.92  # Share in use.
_SLOW_THROUGHPUT = 0.7  # Share of the baseline.

_ADVICE = {
    "data": (
        "Give the loader more workers, or prefetch more; look at the storage and at what is done to each sample.",
        "Look at the processors of the job's nodes: where they are busy, fewer workers are faster.",
    ),
    "straggler": ("Look at that rank's node: a GPU that throttles, a slow link, what else runs there.",),
    "communication": (
        "Measure the links between the nodes while they do not train: trainmedic-probe.",
        "Overlap communication with computing, use larger buckets, or accumulate gradients over more micro-batches.",
    ),
    "memory": (
        "Make the micro-batch smaller and accumulate to the same batch, or recompute activations.",
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True where memory is fragmented.",
    ),
    "compute": ("Steps are spent on computing. Faster ones need a faster kernel, a lower precision, or more GPUs.",),
}


@dataclass(frozen=True, slots=True)
class StepShares:
    """Shares of the median rank's step time, each 0 to 1. None: not measured."""

    data: float | None
    compute: float | None
    wait: float | None


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank with the longest own time per step, and its ratio to the median."""

    rank: str
    node: str
    ratio: float


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Peak memory use, 0 to 1, and how often CUDA's cache was emptied to allocate memory."""

    cuda: float | None = None
    host: float | None = None
    retries: float = 0.0


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """``kind`` is ``data``, ``communication``, ``straggler``, ``memory``, ``compute`` or ``mixed``."""

    kind: str
    severity: str
    reasons: tuple[str, ...]
    advice: tuple[str, ...]


def step_shares(data: float | None, compute: float | None, wait: float | None, step: float | None) -> StepShares | None:
    """Return each part's share of a step's time, 0 to 1: of their sum, or of ``step`` if one is unknown.

    None if too little is known.
    """
    if data is not None and compute is not None and wait is not None:
        whole: float | None = data + compute + wait
    else:
        whole = step
    if not whole or (data is None and wait is None):
        return None
    parts = (None if part is None else min(part / whole, 1.0) for part in (data, compute, wait))
    return StepShares(*(None if part is None else round(part, 4) for part in parts))


@dataclass(frozen=True, slots=True)
class LogHints:
    """NCCL timeouts in the job's log, and waiting for data by the trainer's figures."""

    timeouts: int = 0
    waits_for_data: bool = False


def log_hints(findings: Sequence[KnownFinding]) -> LogHints:
    timeouts = [each for each in findings if each.role is Role.CASCADE and each.cause is CauseClass.HANG]
    return LogHints(len(timeouts), any(each.rule == WAITS_FOR_DATA for each in findings))


def bottleneck(
    shares: StepShares | None,
    straggler: Straggler | None,
    memory: MemoryUse,
    throughput_share: float | None,
    hints: LogHints = LogHints(),
) -> Bottleneck | None:
    """Return None if none is known. Short memory has priority over the shares.

    ``throughput_share`` is relative to the baseline. ``hints`` count only without shares.
    """
    short = _memory_shortage(memory, throughput_share)
    if short is not None:
        return short
    if shares is None:
        return _from_log(throughput_share, hints)
    data, wait = shares.data or 0.0, shares.wait or 0.0
    lost = data + wait
    if max(data, wait) <= NOTABLE_SHARE:
        return _compute_bound(shares, throughput_share)
    severity = "high" if max(data, wait) > _HIGH_SEVERITY else "medium"
    waits = _waits(shares)
    if data / lost >= EXPLAINED_SHARE:
        return _with_advice("data", severity, waits)
    if wait / lost >= EXPLAINED_SHARE:
        if straggler is not None and straggler.ratio > SLOW_RANK_FACTOR:
            slow = f"rank {straggler.rank} on {straggler.node} needs {straggler.ratio:.2g} times as long as the median"
            return _with_advice("straggler", severity, waits, slow)
        alike = "no rank stands out" if straggler is not None else "whether a rank stands out was not measured"
        return _with_advice("communication", severity, waits, alike)
    return Bottleneck("mixed", severity, (waits, "neither explains four fifths of it"), ())


def _waits(shares: StepShares) -> str:
    if shares.data is None:
        return f"{shares.wait:.0%} of a step is waiting for other ranks; waiting for batches is not measured"
    batches = f"{shares.data:.0%} of a step is waiting for batches"
    if shares.wait is None:
        return f"{batches}; waiting for other ranks is not measured"
    return f"{batches}, {shares.wait:.0%} waiting for other ranks"


def _from_log(throughput_share: float | None, hints: LogHints) -> Bottleneck | None:
    if hints.waits_for_data:
        return _with_advice(
            "data", "medium", "by the trainer's own figures, more than half of a step is spent waiting for the batch"
        )
    if throughput_share is None or throughput_share >= _SLOW_THROUGHPUT:
        return None
    slow = f"a hint, not measured: the throughput is at {throughput_share:.0%} of what it was"
    if hints.timeouts:
        return _with_advice("communication", "low", slow, "NCCL reported timeouts in that time")
    return _with_advice(
        "data", "low", slow, "no NCCL timeout is known, and slow data loading is the most frequent reason"
    )


def _memory_shortage(memory: MemoryUse, throughput_share: float | None) -> Bottleneck | None:
    reasons = []
    if memory.retries > 0:
        reasons.append(f"CUDA memory was allocated only after emptying the cache, {memory.retries:.0f} times")
    is_slow = throughput_share is not None and throughput_share < _SLOW_THROUGHPUT
    for name, use in (("CUDA", memory.cuda), ("host", memory.host)):
        if is_slow and use is not None and use > _MEMORY_FULL:
            reasons.append(f"{use:.0%} of the {name} memory is in use, at {throughput_share:.0%} of the throughput")
    return _with_advice("memory", "high" if is_slow else "medium", *reasons) if reasons else None


def _compute_bound(shares: StepShares, throughput_share: float | None) -> Bottleneck | None:
    if shares.wait is None or shares.data is None:
        # Unknown waiting time, as with pipeline parallelism.
        return None
    reasons = [f"{1 - shares.data - shares.wait:.0%} of a step is computing"]
    if throughput_share is not None and throughput_share < _SLOW_THROUGHPUT:
        reasons.append(f"the throughput is at {throughput_share:.0%} of what it was: see whether GPUs are slowed down")
        return _with_advice("compute", "medium", *reasons)
    return _with_advice("compute", "low", *reasons)


def _with_advice(kind: str, severity: str, *reasons: str) -> Bottleneck:
    advice: Sequence[str] = _ADVICE[kind]
    return Bottleneck(kind, severity, reasons, tuple(advice))
