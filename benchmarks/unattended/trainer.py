"""One training run, as a process for each rank: ``torchrun … -m benchmarks.unattended.trainer --steps 24000 …``.

With ``--medic`` it is protected by `trainmedic.torch`, like a user's script. Without torchrun it is one process with
the batches of all ranks. Each event is a line of JSON with the time: each process's start and progress, each fault,
each step gone back to or resumed from, the end; rank 0 also writes each step with its times.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import trainmedic.distributed
from benchmarks.unattended import corpus, faults
from benchmarks.unattended.journal import Journal
from benchmarks.unattended.model import BATCH, CharModel, Rows, validation_loss
from trainmedic.recovery import checkpoints
from trainmedic.torch import Memory, Run, attach
from trainmedic.torch.checkpoints.digests import digests

_PEAK_RATE = 3e-3
_LAST_RATE = 3e-4
_SPARE = 3
"""Batches per step, because skipped and repeated batches are not used again."""
_AGREE_EVERY = 2
"""Steps between two agreements of the ranks, by default a second apart."""
MEMORY = Memory(every=2, keep=12, share=0.1, asynchronous=True, replica_every=0.3)


class Training:
    """Parts of a run, and one step of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(options.seed)
        self.text = corpus.load(options.text)
        self.journal = Journal(options.directory)
        self.plain = CharModel(self.text.vocabulary)
        self.ranks, self.rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self.model: nn.Module = DistributedDataParallel(self.plain) if self.ranks > 1 else self.plain
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_PEAK_RATE)
        # Works on from the present rate, as most schedulers do: a rate that was changed stays changed.
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, options.steps, eta_min=_LAST_RATE)
        rows = Rows(self.text.training, options.steps * BATCH * _SPARE, options.seed)
        # All ranks together have the rows of one batch that a single process has.
        sampler: DistributedSampler[Any] = DistributedSampler(rows, self.ranks, self.rank, shuffle=False)
        self.loader: DataLoader[Any] = DataLoader(rows, batch_size=BATCH // self.ranks, sampler=sampler)
        self.run: Run | None = None
        self.executed = 0
        self.step = 0
        self._agree = True
        self._took = 0.0
        self._pace = options.pace
        self._options = options
        self._faults = faults.Faults([faults.Fault(*one) for one in json.loads(options.faults)], self._ground())

    def _ground(self) -> faults.Ground:
        happened = self._options.directory / "happened"
        happened.mkdir(parents=True, exist_ok=True)
        node = int(os.environ.get("TRAINMEDIC_NODE", "node-0").removeprefix("node-"))
        rank = self.rank if self.ranks > 1 else None
        return faults.Ground(rank, self._tell_fault, happened, self._options.memory, node, self._spoil_checkpoint)

    def train(self, batch: tuple[torch.Tensor, torch.Tensor], step: int) -> tuple[float, float]:
        """Train one step, no faster than the pace. Return this rank's loss, and the gradient norm before clipping."""
        began = time.time()
        numbers, rows = batch
        number = int(numbers[0]) // BATCH
        self.step = step
        if self._faults.is_due(step):
            self._agree = self.ranks_agree()
            self._faults.begin(step, number, self.model, self.optimizer)
        self._faults.slow_down(self._took)
        paced = time.time()
        result = self._train(rows, number)
        time.sleep(max(0.0, self._pace - (time.time() - paced)))
        self._took = time.time() - paced
        if self.rank == 0:
            self.journal.step(step, began, time.time())
        return result

    def _train(self, rows: torch.Tensor, number: int) -> tuple[float, float]:
        labels = self._faults.spoil(number, rows[:, 1:], self.text.vocabulary)
        logits = self.model(rows[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss = self._faults.spoil_loss(number, loss)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._faults.spoil_gradients(self.model)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.executed += 1
        return loss.item(), norm.item()

    def go_back(self, step: int, left: int) -> None:
        """Record that the training has gone back."""
        self._faults.go_back()
        if self.rank == 0:
            self.journal.tell("back", step=step, left=left)

    def validate(self) -> float:
        return validation_loss(self.plain, self.text)

    def ranks_agree(self) -> bool:
        """Return whether the parameters are identical on all ranks. Every rank calls it."""
        if self.ranks == 1:
            return True
        text = " ".join(digests({"model": self.plain}, {}).values())
        mine = int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)
        lowest, highest = torch.tensor([mine]), torch.tensor([mine])
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        return bool(lowest == highest)

    def _tell_fault(self, fault: faults.Fault, details: dict[str, Any]) -> None:
        facts = {"number": fault.number, "kind": fault.kind, "step": self.step, "rank": self.rank}
        self.journal.tell("fault", **facts, agree=self._agree, **details)

    def _spoil_checkpoint(self, in_memory: bool) -> dict[str, Any]:
        if self.run is None:
            return {}
        memory = self.run.training.memory
        if in_memory and memory is not None and memory.pool is not None:
            memory.background.settle(5.0)
            slot = memory.pool.complete()[-1]
            assert slot.mark is not None
            slot.memory[slot.mark.size // 2] ^= 0xFF
            return {"checkpoint": slot.mark.set_id, "of": slot.mark.step}
        found = [path for path in sorted(self._options.checkpoints.glob("step-*")) if checkpoints.completion(path)]
        with (found[-1] / "training.pt").open("r+b") as file:
            file.seek(file.seek(0, os.SEEK_END) // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0xFF]))
        return {"checkpoint": found[-1].name, "of": int(found[-1].name.removeprefix("step-"))}


def unprotected(training: Training, options: argparse.Namespace) -> None:
    os.nice(5)  # it is in nobody's way: what it tells does not depend on how long it takes
    is_number = True
    for step, batch in enumerate(training.loader, 1):
        loss, _ = training.train(batch, step)
        if loss != loss and is_number and training.rank == 0:
            is_number = False
            training.journal.tell("nan", step=step)
        if step == options.steps:
            return


def protected(training: Training, options: argparse.Namespace) -> None:
    floors = {"hang_floor": 60 / options.faster, "startup_floor": 600 / options.faster}
    medic = trainmedic.connect("unattended", metrics_port=options.metrics_port, **floors)
    trainmedic.distributed.share(medic, every=_AGREE_EVERY)
    with (
        medic,
        attach(
            medic,
            model=training.model,
            optimizer=training.optimizer,
            scheduler=training.scheduler,
            loader=training.loader,
            checkpoints=options.checkpoints,
            checkpoint_every=options.checkpoint_every,
            keep=20,
            memory=MEMORY,
        ) as run,
    ):
        training.run = run
        if training.rank == 0:
            training.journal.tell("attached")
        resumed = run.resume()
        if resumed is not None and training.rank == 0:
            loaded = run.training.current_checkpoint
            facts = {"checkpoint": loaded.name if loaded is not None else None, "step": resumed}
            training.journal.tell("resumed", **facts, attempt=os.environ.get("TRAINMEDIC_ATTEMPT"))
        for batch in run.batches(steps=options.steps):
            with run.step() as step:
                loss, norm = training.train(batch, step.number)
                step.report(loss=loss, grad_norm=norm)
            if run.global_step < step.number:
                training.go_back(run.global_step, step.number)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--directory", type=Path, required=True, help="where events and steps are written down")
    parser.add_argument("--text", type=Path, required=True, help="the directory of the text that is learnt")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.0, metavar="SECONDS", help="least time of a step")
    parser.add_argument("--faults", default="[]", help="JSON: [[number, kind, step], …]")
    parser.add_argument("--medic", action="store_true", help="let Trainmedic look after it")
    parser.add_argument("--faster", type=float, default=1.0, help="what the job's own durations are divided by")
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--checkpoint-every", type=int, default=50)
    parser.add_argument("--memory", type=Path, nargs="*", default=(), help="the nodes' directories of shared memory")
    parser.add_argument("--metrics-port", type=int)
    return parser.parse_args()


def _process_began() -> float:
    """Return this process's start in seconds since 1970, to a hundredth."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def main() -> None:
    options = parse()
    journal = Journal(options.directory)
    journal.tell("process", rank=int(os.environ.get("RANK", "0")), began=_process_began())
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    if os.environ.get("RANK", "0") == "0":
        journal.tell("joined", sdk=str(Path(trainmedic.__file__).parents[1]))
    training = Training(options)
    if training.rank == 0:
        training.journal.tell("started", digest=training.text.digest, characters=len(training.text.training))
    (protected if options.medic else unprotected)(training, options)
    agree = training.ranks_agree()
    if training.rank == 0:
        facts = {"step": training.step, "executed": training.executed, "agree": agree}
        training.journal.tell("finished", validation=training.validate(), **facts)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
