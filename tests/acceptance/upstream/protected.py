"""Runs a script of others, unmodified, as a protected job in which something goes wrong once: a program.

``protected.py FAULT PORT SCRIPT ARGUMENT…``: the script, or the module, runs as if it had been started itself, within
the lines that docs/how-to/protect-a-training.md names for programs that run the Trainer themselves. After the step
FAULT all weights get noise, once, which is what makes the loss jump; and each step takes a little longer, so that there
is time to notice.
"""

from __future__ import annotations

import runpy
import sys
import time
from typing import Any

import torch
import transformers

import trainmedic
from trainmedic import huggingface

PACE = 0.05  # seconds
NOISE = 0.7


def spoil_once(fault: int) -> None:
    """Have the Trainer's weights spoiled in the step after `fault`; the Trainer itself knows nothing of it."""
    original = transformers.Trainer.training_step
    left = [fault]

    def training_step(trainer: Any, *arguments: Any, **options: Any) -> Any:
        time.sleep(PACE)
        if left and trainer.state.global_step == left[0]:
            left.clear()
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.add_(torch.randn_like(parameter) * NOISE)
        return original(trainer, *arguments, **options)

    transformers.Trainer.training_step = training_step


if __name__ == "__main__":
    fault, port, script = sys.argv[1:4]
    sys.argv = sys.argv[3:]
    spoil_once(int(fault))
    with huggingface.protect(medic=trainmedic.connect(job="upstream", metrics_port=int(port))):
        if script.endswith(".py"):
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
