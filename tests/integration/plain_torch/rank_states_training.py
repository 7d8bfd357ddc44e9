"""Trainings whose optimizer has another state on each rank, as a program: ``rank_states_training.py KIND...``.

Of each kind every rank writes ``<kind>-<rank>.pt``: the states of a training that went back to the disk and to memory,
of one that was resumed, and of a calm one. Of each way in which the proof is broken it writes how the training ended,
into ``breaks-<rank>.json``. Not here: what is expected.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.data import DataLoader

import trainmedic
import trainmedic.torch
from tests.integration.plain_torch.own_optimizers import make, state_of
from tests.support.command_sender import Commander
from tests.support.programs import eventually
from trainmedic.job.group import SingleRankGroup
from trainmedic.torch.checkpoints import joint_checkpoints, replicated_contents, sharding
from trainmedic.torch.checkpoints.joint_checkpoints import JointCheckpointDirectory
from trainmedic.torch.checkpoints.state_digests import compare_with
from trainmedic.torch.optimizer_attributes import OptimizerAttributes
from trainmedic.torch.state_parts import StateParts

LAST, RESUMED = 16, 20


class Training:
    """One training in a directory of its own, unless that of another is named."""

    def __init__(self, commander: Commander, kind: str, directory: str, seed: int = 3, memory: bool = True) -> None:
        torch.manual_seed(seed)
        self.commander = commander
        rank = dist.get_rank()
        self.medic = trainmedic.connect(job=commander.name, redis_url=commander.url)
        trainmedic.distributed.share(self.medic, every=1)
        self.model, self.optimizer = make(kind, nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1)))
        data = torch.randn(40, 4, generator=torch.Generator().manual_seed(100 + rank))
        self.run = trainmedic.torch.attach(
            self.medic,
            model=self.model,
            optimizer=self.optimizer,
            loader=DataLoader(data, 2),
            checkpoints=directory,
            checkpoint_every=4,
            memory=trainmedic.torch.Memory(3, share=1e6) if memory else None,
            keep=None,
            rollbacks=None,
            seed=5,
        )
        self.states: dict[int, list[torch.Tensor]] = {}
        self.sent: list[str] = []

    def train(self, until: int, back: tuple[int, ...] = ()) -> None:
        """To that step; from step 9 on go back to the steps in `back`, one after the other."""
        for batch in self.run.batches(steps=until):
            with self.run.step() as step:
                self.optimizer.zero_grad()
                loss = (self.model(batch).squeeze(1) - batch.sum(dim=1)).square().mean()
                loss.backward()
                self.optimizer.step()
                step.report(loss=loss)
                self.states[step.number] = [loss.detach().clone(), *state_of(self.optimizer, self.model)]
                if step.number >= 9 and len(self.sent) == self.run.training.rollbacks < len(back):
                    self.send(back[len(self.sent)])

    def send(self, step: int) -> None:
        """Let rank 0 order it; the ranks train on when it waits to be carried out."""
        if dist.get_rank() == 0:
            sent = self.commander.send_and_wait(self.medic, "job.rollback", step=step)
            self.sent.append(sent)
        else:
            self.sent.append("")
        dist.barrier()

    def answers(self) -> list[dict[int, dict[str, Any]]]:
        """On rank 0 what each rank has answered to each order, once all have."""
        ranks = dist.get_world_size()
        answered: list[dict[int, dict[str, Any]]] = []
        for sent in filter(None, self.sent):
            eventually(lambda sent=sent: len(self._final(sent)) == ranks, 60, f"final replies to {sent}", 0.005)
            answered.append({one.rank or 0: {"status": one.status, **one.output} for one in self._final(sent)})
        return answered

    def _final(self, sent: str) -> list[Any]:
        return [one for one in self.commander.replies(sent) if one.is_final]

    def close(self) -> None:
        self.run.close()
        self.medic.close()


def live(commander: Commander, kind: str) -> None:
    rank = dist.get_rank()
    ordered = Training(commander, kind, f"{kind}-saved")
    ordered.train(LAST, back=(4, 6))
    ordered.close()
    resumed = Training(commander, kind, f"{kind}-saved", seed=8, memory=False)
    back = resumed.run.resume()
    resumed.train(RESUMED)
    resumed.close()
    calm = Training(commander, kind, f"{kind}-calm", memory=False)
    calm.train(RESUMED)
    calm.close()
    held = {"ordered": ordered.states, "resumed": resumed.states, "calm": calm.states}
    torch.save({**held, "answers": ordered.answers(), "back": back}, f"{kind}-{rank}.pt")


def alone(directory: Path, sharded: Path) -> None:
    """Load the newest checkpoint of the training with ZeRO on rank 0 alone: what it holds, and how that compares; and
    that of the training with FSDP, as far as it goes."""
    group = dist.new_group([0])
    if dist.get_rank():
        return
    model: Any = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1)), process_group=group
    )
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, process_group=group, lr=0.01)
    parts = StateParts(model=model, optimizer=optimizer)
    contents = replicated_contents.ReplicatedContents(0)
    alone: Any = SimpleNamespace(rank=0, world_size=1, group=lambda name: SingleRankGroup())
    storage = JointCheckpointDirectory(directory, None, alone, contents)
    run = storage.load(max(storage.checkpoints(), key=lambda checkpoint: checkpoint.step), parts)
    problem = compare_with(run["digests"], parts).problem
    plain = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1))
    parts = StateParts(model=plain, optimizer=AdamW(plain.parameters()))
    spread = sharding.ShardedContents(parts)
    storage = JointCheckpointDirectory(sharded, None, alone, spread)
    try:
        storage.load(max(storage.checkpoints(), key=lambda checkpoint: checkpoint.step), parts)
        refused = ""
    except trainmedic.TrainmedicError as error:
        refused = str(error)
    held = {"states": state_of(optimizer, model), "problem": problem, "step": run["step"], "refused": refused}
    torch.save(held, "zero-alone.pt")


# --- breaks of the proof ------------------------------------------------------------------------------------------


def on_rank_1(broken: Callable[..., Any], whole: Callable[..., Any]) -> Callable[..., Any]:
    return broken if dist.get_rank() == 1 else whole


def zeroed(restore: Callable[..., None]) -> Callable[..., None]:
    def broken(parts: StateParts, states: Any) -> None:
        restore(parts, states)
        for state in parts.by_name["optimizer"].state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()

    return broken


def scaled(restore: Callable[..., None]) -> Callable[..., None]:
    def broken(parts: StateParts, states: Any) -> None:
        restore(parts, states)
        with torch.no_grad():
            for parameter in parts.by_name["model"].parameters():
                parameter.mul_(1.0001)

    return broken


def dropped(restore: Callable[..., None]) -> Callable[..., None]:
    def broken(parts: StateParts, states: Any) -> None:
        restore(parts, states)
        parts.by_name["optimizer"].state.clear()

    return broken


def nothing(*_: Any) -> None:
    """Do nothing."""


RESTORE, MERGE = StateParts.restore, replicated_contents.merge
BREAKS: dict[str, tuple[str, Any, str, Callable[[], Callable[..., Any]]]] = {
    "rank 1 gets the momentum of rank 0": ("owned", replicated_contents, "merge", lambda: nothing),
    "slices of rank 0": ("sliced", replicated_contents, "merge", lambda: nothing),
    "momentum is zeroed": ("owned", StateParts, "restore", lambda: on_rank_1(zeroed(RESTORE), RESTORE)),
    "momentum is dropped": ("owned", StateParts, "restore", lambda: on_rank_1(dropped(RESTORE), RESTORE)),
    "one rank is not restored": ("owned", StateParts, "restore", lambda: on_rank_1(nothing, RESTORE)),
    "no rank is restored": ("sliced", StateParts, "restore", lambda: nothing),
    "parameters are scaled": ("owned", StateParts, "restore", lambda: on_rank_1(scaled(RESTORE), RESTORE)),
    "digests are those of rank 0": ("owned", joint_checkpoints, "with_digests_of_restored", lambda: _digests_of_rank_0),
    "attributes are not restored": ("share", OptimizerAttributes, "restore", lambda: nothing),
    "FSDP gets the plain tensors of rank 0": ("sharded", sharding, "put_leaves", lambda: nothing),
    "FSDP's attributes are not restored": ("sharded", OptimizerAttributes, "restore", lambda: nothing),
    "ZeRO gets the other share": ("zero", replicated_contents, "merge", lambda: nothing),
}


def _digests_of_rank_0(name: str, file: Any, first: Any) -> Any:
    return {**file["run"], "digests": first["digests"]}


@contextmanager
def broken(which: str) -> Iterator[str]:
    kind, where, what, make_broken = BREAKS[which]
    with mock.patch.object(where, what, make_broken()):
        yield kind


def end_of(commander: Commander, which: str) -> dict[str, Any]:
    """How a training ends that goes back while the proof, or what it proves, is broken."""
    with broken(which) as kind:
        training = Training(commander, kind, "".join(filter(str.isalnum, which)), memory=False)
        try:
            training.train(24, back=(8,))
            ended = "nothing was raised"
        except trainmedic.TrainmedicError as error:
            ended = f"{type(error).__name__}: {error}"
        training.close()
    answers = [f"{answer['status']} {answer.get('step')}" for each in training.answers() for answer in each.values()]
    return {"ended": ended, "answers": answers}


def main(kinds: list[str]) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    os.environ.pop("TRAINMEDIC_SIGNING_KEY", None)  # the commander does not sign
    commanders = (Commander(os.environ["TRAINMEDIC_REDIS_URL"], f"states-{number}") for number in range(100))
    for kind in kinds:
        live(next(commanders), kind)
    alone(Path("zero-saved"), Path("sharded-saved"))
    ends = {which: end_of(next(commanders), which) for which in BREAKS}
    Path(f"breaks-{rank}.json").write_text(json.dumps(ends))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
