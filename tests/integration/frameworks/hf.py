"""A tiny GPT-2 with its Trainer, made from nothing, and a script of what happens at which step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

TEXT = "the quick brown fox jumps over the lazy dog. " * 60
LENGTH = 8


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Stretches of the text, by number; ``seen`` keeps which were read."""

    def __init__(self, count: int = 240) -> None:
        letters = sorted(set(TEXT))
        self.text = torch.tensor([letters.index(letter) for letter in TEXT])
        self.count = count
        self.seen: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        self.seen.append(number)
        row = self.text[number * 11 : number * 11 + LENGTH]
        return {"input_ids": row, "labels": row}


def make_trainer(
    directory: Path, *callbacks: Any, cls: type[Trainer] = Trainer, dropout: float = 0.1, **options: Any
) -> Trainer:
    """A Trainer for an epoch of 60 steps, with a checkpoint every 10 and a log line every step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = GPT2Config(
        n_layer=1,
        n_head=2,
        n_embd=16,
        n_positions=LENGTH,
        vocab_size=32,
        bos_token_id=0,
        eos_token_id=0,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
    )
    arguments: dict[str, Any] = {
        "output_dir": str(directory / "out"),
        "max_steps": 60,
        "per_device_train_batch_size": 4,
        "save_steps": 10,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "seed": 3,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **options,
    }
    datasets = {"train_dataset": arguments.pop("train_dataset", None) or Windows()}
    datasets["eval_dataset"] = arguments.pop("eval_dataset", None)
    return cls(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(**arguments),
        **datasets,
        callbacks=list(callbacks),
    )


class Script(TrainerCallback):
    """Does something when a step ends, ``each`` or once for each entry; keeps the rate and loss of each step."""

    def __init__(self, each: Callable[[Any], None] | None = None, **acts: Callable[[Any], None]) -> None:
        self.each = each
        self.acts = {int(name.removeprefix("at_")): act for name, act in acts.items()}
        self.steps: list[int] = []
        self.rates: list[float] = []
        self.losses: dict[int, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.steps.append(state.global_step)
        self.rates.append(objects["optimizer"].param_groups[0]["lr"])
        act = self.acts.pop(state.global_step, self.each)
        if act is not None:
            act(control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **objects: Any) -> None:
        if logs and "loss" in logs:
            self.losses[state.global_step] = logs["loss"]
