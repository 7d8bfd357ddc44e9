"""A script of the shape of transformers' examples/pytorch/language-modeling/run_clm.py, which it stands for.

As there: arguments in data classes, a text file that is cut into blocks, a model from a configuration, the Trainer with
its ``default_data_collator``, ``trainer.train(resume_from_checkpoint=…)``, and the metrics that are saved at the end.
Not as there: no ``datasets``, and a character is a token. It knows nothing of Trainmedic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ModelArguments:
    model_type: str = "gpt2"
    config_overrides: str = "n_layer=1,n_head=2,n_embd=32,n_positions=32,vocab_size=128,bos_token_id=0,eos_token_id=0"


@dataclass
class DataTrainingArguments:
    train_file: str = field(metadata={"help": "a text file"})
    block_size: int = 32
    validation_split_percentage: int = 5


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    tokens = list(Path(data_args.train_file).read_bytes())
    blocks = [
        tokens[start : start + data_args.block_size]
        for start in range(0, len(tokens) - data_args.block_size, data_args.block_size)
    ]
    rows = [{"input_ids": block, "labels": list(block)} for block in blocks]
    held_out = len(rows) * data_args.validation_split_percentage // 100

    config = CONFIG_MAPPING[model_args.model_type]()
    config.update_from_string(model_args.config_overrides)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=rows[held_out:],
        eval_dataset=rows[:held_out],
        data_collator=default_data_collator,
    )
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)


if __name__ == "__main__":
    main()
