"""A training by Megatron-LM or its stand-in, as a program for tests: ``megatron_training.py KIND DIRECTORY``.

``KIND`` is ``data``, ``pipeline`` or, of Megatron-LM alone, ``tensor``: what the ranks are for each other. It begins
or goes on with the training in the directory, until it is told to stop; or, where ``ITERATIONS`` is set, up to there.
With ``ALONE`` Trainmedic has no part in it. For each step a rank writes a line of JSON to
``<directory>-<rank>.jsonl``, with the number of its first sample; and to ``<directory>-<rank>.pt`` what it has come
to. With ``ITSELF`` it is Megatron-LM, which is looked for on ``PYTHONPATH``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainmedic
import trainmedic.megatron

ITSELF = "ITSELF" in os.environ
if ITSELF:
    from tests.integration.engines import megatron_itself as trainer

    megatron = trainer.training
else:
    from tests.integration.engines import megatron_stand_in as trainer  # type: ignore[no-redef]

    megatron = trainer


def main(kind: str, directory: str) -> None:
    torch.set_num_threads(1)
    if not ITSELF:
        dist.init_process_group("gloo", timeout=timedelta(seconds=180))
    rank, iterations = int(os.environ["RANK"]), int(os.environ.get("ITERATIONS", "1000"))
    firsts: list[int] = []
    models: list[Any] = []
    counted = [0]  # steps, as a script might count them

    with (
        trainmedic.connect(job="llm-1") as medic,
        Path(f"rank-{rank}.jsonl").open("a", buffering=1) as log,
        Path(f"{directory}-{rank}.jsonl").open("a", buffering=1) as course,
    ):
        log.write(json.dumps({"pid": os.getpid()}) + "\n")
        if "ALONE" not in os.environ:
            trainmedic.megatron.protect(medic, module=megatron, rollbacks=None, also={"counted": counted})
        step = megatron.train_step

        def noting(*arguments: Any, **options: Any) -> Any:
            firsts.clear()
            models[:] = arguments[2] if isinstance(arguments[2], list) else [arguments[2]]
            result = step(*arguments, **options)
            rate = arguments[3].param_groups[0]["lr"]
            loss = float(medic.progress.loss) if medic.progress.loss is not None else None
            course.write(json.dumps({"sample": firsts[0] if firsts else None, "rate": rate, "reported": loss}) + "\n")
            counted[0] += 1
            time.sleep(0.002 if iterations == 1000 else 0)
            return result

        megatron.train_step = noting
        with contextlib.suppress(SystemExit):  # by which Megatron-LM ends when it is told to stop
            trainer.pretrain(
                firsts.append,
                train_iters=iterations,
                kind=kind,
                save=directory,
                load=directory,
                save_interval=10,
                **json.loads(os.environ.get("OPTIONS", "{}")),
            )
        held = [parameter.detach() for parameter in models[0].parameters()]
        torch.save([*held, torch.tensor(counted)], f"{directory}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
