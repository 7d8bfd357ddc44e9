"""Cost of measuring the parts of a step of `DistributedDataParallel`: blocks of steps with the meter and without take
turns in one run, and the median step of each kind counts. One rank, so that no rank is waited for.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainmedic.torch.meters.step_meter import StepMeter

RANKS = 2  # as the meter is told: alone it measures nothing
BLOCK = 50


def block(model: nn.Module, inputs: torch.Tensor, batch: Any, meter: StepMeter | None) -> list[float]:
    """Return the seconds of each step."""
    seconds = []
    for number in range(BLOCK):
        began = time.perf_counter()
        model(inputs).sum().backward()
        if meter is not None:
            drawn = time.perf_counter()
            meter.add_batch(batch, time.perf_counter() - drawn)
            meter.step_ends()
            if number % 5 == 0:  # steps of 10 ms are reported so often
                meter.take(5)
        seconds.append(time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=40, help="blocks of each kind (40)")
    blocks = parser.parse_args().blocks
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))))
    inputs = torch.randn(32, 64)
    ids = torch.ones(8, 512, dtype=torch.long)
    batches = {"without tokens": {"x": inputs}, "8 x 512 tokens and a mask": {"input_ids": ids, "attention_mask": ids}}
    for name, batch in batches.items():
        without, metered = [], []
        for _ in range(blocks):
            without += block(model, inputs, batch, None)
            meter = StepMeter([model], RANKS)
            metered += block(model, inputs, batch, meter)[2:]  # the first learns which gradient comes last
            meter.close()
        added = (statistics.median(metered) - statistics.median(without)) * 1e6
        print(f"{name}: {added:.1f} us a step (medians of {len(metered)} and {len(without)})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
