"""A training by torchtitan or its stand-in, as a program for tests under torchrun: ``titan_training.py DIRECTORY``.

It begins or goes on with the training in the directory, until it is told to stop; or, where ``STEPS`` is set, up to
there. With ``ALONE`` Trainmedic has no part in it. For each step a rank writes a line of JSON to
``<directory>-<rank>.jsonl``, with the first token of its first batch; and to ``<directory>-<rank>.pt`` what it has come
to. With ``ITSELF`` it is torchtitan, which is looked for on ``PYTHONPATH``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainmedic
import trainmedic.torchtitan
from trainmedic.torch.checkpoints.digests import local_part


def note_course(trainer: Any, medic: Any, course: Any, seconds: float, counted: list[int]) -> None:
    """Let each step write its line, count itself, and take that long at least."""
    step = trainer.train_step

    def noting(batches: Iterator[Any]) -> None:
        firsts: list[int] = []

        def noted() -> Iterator[Any]:
            for batch in batches:
                firsts.append(int(batch[0]["input"][0, 0]))
                yield batch

        [optimizer] = trainer.optimizers
        rate = optimizer.param_groups[0]["lr"]
        step(noted())
        loss = medic.progress.loss
        line = {"step": trainer.step, "first": firsts[0], "rate": rate, "reported": None if loss is None else str(loss)}
        course.write(json.dumps(line) + "\n")
        counted[0] += 1
        time.sleep(seconds)

    trainer.train_step = noting


def main(directory: str) -> None:
    torch.set_num_threads(1)
    steps = int(os.environ.get("STEPS", "1000"))
    if "ITSELF" in os.environ:
        from tests.integration.engines.titan_itself import build
    else:
        from tests.integration.engines.titan_stand_in import build  # type: ignore[assignment]

        dist.init_process_group("gloo", timeout=timedelta(seconds=180))
    trainer = build(directory, steps)
    rank = dist.get_rank()
    with (
        trainmedic.connect(job="llm-1") as medic,
        Path(f"rank-{rank}.jsonl").open("a", buffering=1) as log,
        Path(f"{directory}-{rank}.jsonl").open("a", buffering=1) as course,
    ):
        log.write(json.dumps({"pid": os.getpid()}) + "\n")
        counted = [0]
        if "ALONE" not in os.environ:
            trainmedic.torchtitan.protect(medic, trainer=type(trainer), rollbacks=None, also={"counted": counted})
        note_course(trainer, medic, course, 0.02 if steps == 1000 else 0.0, counted)
        trainer.train()
    held = [local_part(parameter) for part in trainer.model_parts for parameter in part.parameters()]
    states = [each for optimizer in trainer.optimizers for each in optimizer.state.values()]
    moments = [local_part(state[name]) for state in states for name in ("exp_avg", "exp_avg_sq")]
    torch.save([*held, *moments, torch.tensor(counted)], f"{directory}-{rank}.pt")
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
