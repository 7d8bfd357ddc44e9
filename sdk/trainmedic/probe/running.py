"""One rank's part in a probe. Rank 0 makes the result document."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Mapping, Sequence

import torch
import torch.distributed as dist

from trainmedic.probe import judging, occupancy
from trainmedic.probe.judging import BaselineFile, PairBaseline
from trainmedic.probe.measuring import Measurement, ProbeSizes, measure
from trainmedic.probe.memory import check_memory

MEASURED = {
    "barrier": "seconds of one torch.distributed barrier, until the slowest rank has left it",
    "memory": "bytes of each rank that were written in four patterns and read back; bytes_per_s both ways together",
    "all_reduce": "seconds of one all-reduce of float32 numbers, the median of five, on the slowest rank; bytes_per_s "
    "is bytes by seconds, bus_bytes_per_s that times 2 (n - 1) / n",
}

Pair = tuple[str, str]  # nodes, sorted; equal names for one node


@dataclass(frozen=True)
class ProbeOptions:
    sizes: ProbeSizes = field(default_factory=ProbeSizes)
    backend: str = "auto"
    timeout: float = 120.0
    """Seconds."""
    baselines: Path | None = None
    least_bytes_per_s: float | None = None
    even_if_training: bool = False
    memory_percent: float | None = None
    """Share of each GPU's free memory to test. None: no test."""
    server: str | None = None
    token: str | None = None


class NodesTrain(Exception):
    """The nodes train, or the server cannot confirm that they do not."""


def probe(options: ProbeOptions) -> dict[str, Any] | None:
    """Measure with the other ranks of torchrun's environment. Rank 0 returns the document.

    Raises NodesTrain on every rank, ConfigurationError on rank 0, and torch.distributed's errors.
    """
    device = _device(options.backend)
    patience = timedelta(seconds=options.timeout)
    dist.init_process_group("gloo", timeout=patience)
    try:
        node = os.environ.get("TRAINMEDIC_NODE") or socket.gethostname()
        nodes = _gathered(node)
        if not options.even_if_training:
            _refuse_if_training(device, set(nodes), options)
        ranks_by_node: dict[str, list[int]] = {}
        for rank, name in enumerate(nodes):
            ranks_by_node.setdefault(name, []).append(rank)
        memory = _tested_memory(node, device, options.memory_percent)
        # One rank alone reduces nothing.
        sizes = options.sizes if dist.get_world_size() > 1 else replace(options.sizes, megabytes=())
        whole, pairs = _measure_all(ranks_by_node, device, patience, sizes)
        return _document(ranks_by_node, device, whole, pairs, memory, options) if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def _device(backend: str) -> torch.device:
    if backend == "gloo" or (backend == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % max(torch.cuda.device_count(), 1))
    torch.cuda.set_device(device)
    return device


def _refuse_if_training(device: torch.device, nodes: set[str], options: ProbeOptions) -> None:
    """Raise NodesTrain on all ranks if the nodes train."""
    busy = occupancy.gpu_in_use(device)
    mine = [] if busy is None else [f"rank {dist.get_rank()}: {busy}"]
    if dist.get_rank() == 0 and options.server is not None:
        mine += occupancy.jobs_on(nodes, options.server, options.token)
    reasons = [reason for of_rank in _gathered(mine) for reason in of_rank]
    if reasons:
        raise NodesTrain("; ".join(reasons))


def _gathered(own: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, own)
    return values


def _tested_memory(node: str, device: torch.device, percent: float | None) -> list[dict[str, Any]]:
    if percent is None:
        return []
    return _gathered({"rank": dist.get_rank(), "node": node, **asdict(check_memory(device, percent))})


def _measure_all(
    ranks_by_node: Mapping[str, list[int]], device: torch.device, patience: timedelta, sizes: ProbeSizes
) -> tuple[Measurement, dict[Pair, Measurement]]:
    everybody = list(range(dist.get_world_size()))
    whole = _measure_if_member(*_groups(everybody, device, patience), device, sizes)
    assert whole is not None
    mine: dict[Pair, Measurement] = {}
    for turn in rounds(ranks_by_node):
        # All ranks create all groups first, in the same order.
        groups = [_groups(ranks_of(pair, ranks_by_node), device, patience) for pair in turn]
        results = [_measure_if_member(*group, device, sizes) for group in groups]
        mine.update({pair: result for pair, result in zip(turn, results, strict=True) if result is not None})
        dist.barrier()
    return whole, {pair: result for of_rank in _gathered(mine) for pair, result in of_rank.items()}


def rounds(ranks_by_node: Mapping[str, Sequence[int]]) -> list[list[Pair]]:
    """Return pairs to measure concurrently, by round.

    First each node with several ranks alone, then each two nodes once.
    """
    nodes = sorted(ranks_by_node)
    within = [(node, node) for node in nodes if len(ranks_by_node[node]) > 1]
    turns: list[list[Pair]] = [within] if within else []
    # Circle method: one stays, the others move on by one place each round.
    circle: list[str | None] = [*nodes, None] if len(nodes) % 2 else list(nodes)
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        opposite = zip(circle[:half], reversed(circle[half:]), strict=True)
        turns.append([(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [sorted(turn) for turn in turns if turn]


def ranks_of(pair: Pair, ranks_by_node: Mapping[str, Sequence[int]]) -> list[int]:
    return sorted({rank for node in pair for rank in ranks_by_node[node]})


def _groups(ranks: list[int], device: torch.device, patience: timedelta) -> tuple[Any, Any, bool]:
    backend = "nccl" if device.type == "cuda" else "gloo"
    group = dist.new_group(ranks, timeout=patience, backend=backend)
    control = dist.new_group(ranks, timeout=patience, backend="gloo")  # for a common start and result
    return group, control, dist.get_rank() in ranks


def _measure_if_member(
    group: Any, control: Any, is_member: bool, device: torch.device, sizes: ProbeSizes
) -> Measurement | None:
    if not is_member:
        return None
    try:
        return measure(group, control, device, sizes)
    finally:
        dist.destroy_process_group(group)
        dist.destroy_process_group(control)


def _document(
    ranks_by_node: Mapping[str, list[int]],
    device: torch.device,
    whole: Measurement,
    pairs: Mapping[Pair, Measurement],
    memory: list[dict[str, Any]],
    options: ProbeOptions,
) -> dict[str, Any]:
    """Raises ConfigurationError."""
    backend, name = ("nccl", torch.cuda.get_device_name(device)) if device.type == "cuda" else ("gloo", "cpu")
    keys = {
        pair: " ".join((backend, name.replace(" ", "-"), *(f"{node}/{len(ranks_by_node[node])}" for node in pair)))
        for pair in pairs
    }
    file = BaselineFile(options.baselines) if options.baselines is not None else None
    usual = file.baselines() if file is not None else {}
    judgements = {
        pair: judging.judged(measured, usual.get(keys[pair]), options.least_bytes_per_s)
        for pair, measured in pairs.items()
    }
    if file is not None:
        good = (judging.OK, judging.NEW)
        file.add({keys[pair]: measured for pair, measured in pairs.items() if judgements[pair].word in good})
    is_right = whole.is_right and all(test["is_right"] for test in memory)
    words = [judging.OK if is_right else judging.WRONG, *(each.word for each in judgements.values())]
    return {
        "version": 1,
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "backend": backend,
        "device": name,
        "torch": torch.__version__,
        "nodes": {node: len(ranks) for node, ranks in ranks_by_node.items()},
        "measured": MEASURED,
        "judgement": judging.worst(words),
        "memory": memory,
        "all": _written(whole),
        "pairs": [
            {
                "nodes": list(pair),
                **_written(pairs[pair]),
                "judgement": judgements[pair].word,
                "reasons": list(judgements[pair].reasons),
                "baseline": _baseline(usual.get(keys[pair])),
            }
            for pair in sorted(pairs)
        ],
    }


def _written(measured: Measurement) -> dict[str, Any]:
    return {
        "ranks": measured.ranks,
        "barrier": asdict(measured.barrier),
        "all_reduce": [asdict(each) for each in measured.all_reduce],
    }


def _baseline(usual: PairBaseline | None) -> dict[str, Any] | None:
    if usual is None:
        return None
    rates = {str(size): rate for size, rate in sorted(usual.bytes_per_s.items())}
    return {"measurements": usual.measurements, "barrier_seconds": usual.barrier_seconds, "bytes_per_s": rates}
