"""In-memory checkpoints and nvidia-resiliency-ext's local checkpoints, on CPUs with gloo, in one run.

Two ranks stand for two nodes with an AdamW training's state. Both ways save it, with a copy on the other node, and load
it: in the living processes, in new ones, and in new ones after the loss of rank 1's node memory. Each figure is the
slowest rank's, the median of several rounds in which the two ways take turns.

nvidia-resiliency-ext must be importable (``pip install nvidia-resiliency-ext``). Its manager and replication are the
originals. `cpu_state_dict` replaces its state dict, which takes CUDA tensors only. The asynchronous save, and the
transfer of a lost rank's copy from the other node, are not measured, because they call CUDA (version 0.4.1).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.programs import free_port
from trainmedic.recovery import memory_slots
from trainmedic.recovery.health import CheckpointHealth
from trainmedic.recovery.memory_cadence import MemoryCadence
from trainmedic.torch import Memory
from trainmedic.torch.memory.memory_checkpoints import MemoryCheckpoints
from trainmedic.torch.memory.memory_contents import WholeContents
from trainmedic.torch.memory.memory_start import MemoryStart
from trainmedic.torch.state_parts import StateParts

RANKS, STEP = 2, 5
WAYS = ("trainmedic", "nvidia-resiliency-ext")
CASES = ("save", "rollback", "restart", "restart after a node's loss")
PATIENCE = 120.0


class GlooGroup:
    """A gloo group of all ranks, in place of the job's store."""

    rank = property(lambda self: dist.get_rank())
    world_size = RANKS

    def choose(self, make: Callable[[], Any], patience: float = PATIENCE) -> Any:
        chosen = [make() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(chosen, 0)
        return chosen[0]

    def poll(self, value: Any = None, patience: float = PATIENCE) -> Mapping[int, Any]:
        values: list[Any] = [None] * RANKS
        dist.all_gather_object(values, value)
        return dict(enumerate(values))


class Training:
    """A model and AdamW with its moments. `digest` identifies the state."""

    def __init__(self, parameters: int, seed: int) -> None:
        torch.manual_seed(seed)
        width = max(1, round((parameters / 8) ** 0.5))
        self.model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(8)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step()

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            moments = self.optimizer.state[parameter]
            for tensor in (parameter.detach(), moments["exp_avg"], moments["exp_avg_sq"], moments["step"]):
                digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()


class Ours:
    """The SDK's in-memory checkpoints."""

    def __init__(self, training: Training, directory: Path) -> None:
        self.parts = StateParts(model=training.model, optimizer=training.optimizer)
        cadence = MemoryCadence(1, replica_every=1.0)
        cadence.replica_steps = 1
        self.memory = MemoryCheckpoints("job", dist.get_rank(), RANKS, lambda _: GlooGroup(), WholeContents(), cadence)
        options = Memory(every=1, replica_every=1.0)
        self.start = MemoryStart(self.memory, options, "job", directory)
        self.start.begin(GlooGroup(), lambda: 0)

    def save(self, step: int) -> None:
        while self.memory.copy(step, self.parts, {}, CheckpointHealth()) is None:
            time.sleep(0.01)

    def settle(self, step: int) -> None:
        """Wait until the copy is complete here and on the other node."""
        assert self.memory.background.settle(PATIENCE)
        other = 1 - dist.get_rank()
        until = time.monotonic() + PATIENCE
        while step not in self.memory.replicas.steps_of(other):  # type: ignore[union-attr]
            assert time.monotonic() < until, "no copy came from the other rank"
            time.sleep(0.05)

    def load(self) -> None:
        newest = max(self.memory.checkpoints(), key=lambda checkpoint: checkpoint.step)
        self.memory.load(newest, self.parts)


class Theirs:
    """Local checkpoints of nvidia-resiliency-ext, on the same kind of memory."""

    def __init__(self, training: Training, directory: Path) -> None:
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
        from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

        self._training = training
        strategy = CliqueReplicationStrategy.from_replication_params(replication_jump=1, replication_factor=2)
        self._manager = LocalCheckpointManager(directory, repl_strategy=strategy)

    def save(self, step: int) -> None:
        state = {"model": self._training.model.state_dict(), "optimizer": self._training.optimizer.state_dict()}
        self._manager.save(cpu_state_dict(state), step, is_async=False)

    def settle(self, step: int) -> None:
        """Nothing goes on after `save`."""

    def load(self) -> None:
        assert self._manager.find_latest() >= 0
        held, _ = self._manager.load()
        self._training.model.load_state_dict(held.state_dict["model"])
        self._training.optimizer.load_state_dict(held.state_dict["optimizer"])


def cpu_state_dict(state: Any, is_hollow: bool = False) -> Any:
    """Return their basic state dict, for CPU tensors too."""
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict

    class CpuStateDict(BasicTensorAwareStateDict):  # type: ignore[misc, no-any-unimported]
        def __init__(self) -> None:
            self.state_dict = structure_of(state)
            self._is_hollow = is_hollow

        def restore_tensor_device(self, non_blocking: bool = True) -> None:
            pass

        def __reduce__(self) -> Any:
            return cpu_state_dict, (self.state_dict, self._is_hollow)

    return CpuStateDict()


def structure_of(state: Any) -> Any:
    """Copy dicts and lists, because theirs takes tensors out of them."""
    if isinstance(state, dict):
        return {key: structure_of(value) for key, value in state.items()}
    return [structure_of(value) for value in state] if isinstance(state, list) else state


def timed(act: Callable[[], None]) -> float:
    """Return the slowest rank's seconds."""
    dist.barrier()
    began = time.perf_counter()
    act()
    values: list[Any] = [None] * RANKS
    dist.all_gather_object(values, time.perf_counter() - began)
    return max(values)


def train(rank: int, port: int, way: str, parameters: int, directory: Path) -> None:
    """Save several times, load once, and die."""
    join(rank, port, directory)
    training = Training(parameters, rank)
    checkpoints = (Ours if way == WAYS[0] else Theirs)(training, directory / way)
    saves = []
    for step in range(1, STEP + 1):
        training.step()
        saves.append(timed(lambda at=step: checkpoints.save(at)))  # type: ignore[misc]
    saved = training.digest()
    checkpoints.settle(STEP)
    training.step()
    back = timed(checkpoints.load)
    leave(rank, way, directory, saved, {"save": statistics.median(saves[1:]), "rollback": back}, training)


def restart(rank: int, port: int, way: str, parameters: int, directory: Path) -> None:
    """Load in a new process, whose training has another state."""
    join(rank, port, directory)
    training = Training(parameters, 100 + rank)
    seconds = timed(lambda: (Ours if way == WAYS[0] else Theirs)(training, directory / way).load())
    leave(rank, way, directory, None, {"restart": seconds}, training)


def leave(
    rank: int, way: str, directory: Path, saved: str | None, seconds: dict[str, float], training: Training
) -> None:
    file = directory / f"{way}-{rank}.json"
    saved = saved or json.loads(file.read_text())["saved"]
    file.write_text(json.dumps({"saved": saved, "is_exact": training.digest() == saved, **seconds}))
    dist.barrier()
    os._exit(0)


def join(rank: int, port: int, directory: Path) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ |= {"TRAINMEDIC_NODE": f"node-{rank}", memory_slots.ENVIRONMENT: str(directory / "shared")}
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)


def in_processes(target: Callable[..., None], way: str, parameters: int, directory: Path) -> dict[str, Any]:
    context, port = multiprocessing.get_context("spawn"), free_port()
    processes = [context.Process(target=target, args=(rank, port, way, parameters, directory)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE * 2)
        assert process.exitcode == 0, f"{way} failed"
    results = [json.loads((directory / f"{way}-{rank}.json").read_text()) for rank in range(RANKS)]
    assert all(result["is_exact"] for result in results), f"{way} did not restore the state to the bit"
    figures: dict[str, Any] = results[0]
    return figures


def after_a_loss(parameters: int) -> float:
    """Return the seconds of our restart after rank 1's node lost its memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        directory = Path(name)
        (directory / "shared").mkdir()
        in_processes(train, WAYS[0], parameters, directory)
        for node in list((directory / "shared").rglob("*node-1*")):
            shutil.rmtree(node, ignore_errors=True)
        return float(in_processes(restart, WAYS[0], parameters, directory)["restart"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parameters", type=int, default=8_000_000, help="on each rank")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
    for number in range(options.rounds):
        for way in WAYS[:: 1 if number % 2 else -1]:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
                directory = Path(name)
                (directory / "shared").mkdir()
                figures = in_processes(train, way, options.parameters, directory)
                figures |= in_processes(restart, way, options.parameters, directory)
            if way == WAYS[0]:
                figures["restart after a node's loss"] = after_a_loss(options.parameters)
            for case in CASES:
                found[way].setdefault(case, []).append(figures.get(case, math.nan))
    print(f"{options.parameters * 12 / 1e6:.0f} MB of state on each of {RANKS} ranks; exact to the bit everywhere")
    for case in found[WAYS[0]]:
        ours, theirs = (statistics.median(found[way][case]) for way in WAYS)
        other = f"{theirs:.3f} s, {theirs / ours:.1f} times" if theirs == theirs else "needs CUDA"
        print(f"{case}: {WAYS[0]} {ours:.3f} s, {WAYS[1]} {other}")


if __name__ == "__main__":
    main()
