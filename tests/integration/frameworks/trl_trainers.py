"""TRL's trainers whose batches are made by the model, rolled back after it was spoiled: a program.

It is called with the URL of Redis and a file. For each of `KINDS` it trains twice: as ``plain``, and as ``repaired``,
whose weights are spoiled for some steps until a rollback; in ``epoch`` it skips over the end of an epoch of 16 steps.
The file gets a JSON object: by kind, what each step of both has trained on and its loss, in the order of the steps, and
the prompts of some; and of ``repaired`` the answer and what `Engine` saw.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

from tests.support.command_sender import Commander, Sent
from trainmedic import huggingface

STEPS, SAVED, SPOILED, LEFT = 24, 10, 12, 18
"""The completions of steps 9 to 16 are sampled before step 9, and those of steps 17 to 24 before step 17."""
KINDS = ("grpo", "rloo", "engine", "reference", "kto", "online-dpo", "packed", "lora", "base", "epoch")
SKIPPED = 3  # batches, in ``epoch``; up to step 16 all have the same prompts
END = "[END]"
WORDS = [END, *(f"word{number}" for number in range(20))]


class Watch(TrainerCallback):
    """Spoil the weights once, and order a rollback some steps later."""

    def __init__(self, roll_back: Any = None, spoils_trained: bool = True) -> None:
        self.roll_back = roll_back
        self.spoils_trained = spoils_trained

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **objects: Any) -> None:
        if self.roll_back is None:
            return
        if state.global_step == SPOILED:
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad == self.spoils_trained:
                        parameter.add_(torch.randn_like(parameter))
        if state.global_step == LEFT:
            self.roll_back, act = None, self.roll_back
            act(control)


def recording(kind: type[Any]) -> type[Any]:
    """The trainer, with ``used``, the tokens and the loss of each step, and their ``prompts``."""

    class Recording(kind):  # type: ignore[misc]
        used: list[Any]
        prompts: list[Any]

        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
            loss = super().compute_loss(model, inputs, *arguments, **options)
            tokens = inputs["completion_ids"].tolist()
            type(self).used.append([self.state.global_step + 1, tokens, float(loss.detach())])
            type(self).prompts.append([self.state.global_step + 1, inputs["prompt_ids"].tolist()])
            return loss

    Recording.used, Recording.prompts = [], []
    return Recording


def recording_steps(kind: type[Any]) -> type[Any]:
    """The same of a trainer whose batches have another form: the loss of each step."""

    class Recording(kind):  # type: ignore[misc]
        used: list[Any]

        def training_step(self, *arguments: Any, **options: Any) -> Any:
            loss = super().training_step(*arguments, **options)
            type(self).used.append([self.state.global_step + 1, float(loss.detach())])
            return loss

    Recording.used = []
    return Recording


class Engine:
    """Stands in for TRL's adapter of vLLM: it samples from a copy of the weights that it gets now and then."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.model = GPT2LMHeadModel(trainer.model.config)
        self.sampled: list[list[Any]] = []

    def sync_weights(self) -> None:
        self.model.load_state_dict(self.trainer.model.state_dict())

    def generate(self, prompts: Any, num_generations: int, **_: Any) -> Any:
        own, trained = (model.state_dict() for model in (self.model, self.trainer.model))
        is_equal = all(torch.equal(own[name], trained[name]) for name in own)
        self.sampled.append([self.trainer.state.global_step, is_equal])
        completions = [[1 + len(prompt), 2, 3] for prompt in prompts]
        return prompts, completions, [[[-1.0]] * 3 for _ in completions], None


def other(kind: str, model: Any, directory: Path, fast: Any, watch: Watch) -> Any:
    """KTO trains on given completions; online DPO on two that the model samples at each step; ``packed`` on texts that
    fill each row of a batch together; ``lora`` on an adapter of the frozen model, which ``base`` spoils."""
    prompts = [f"word{n % 20} word{3 * n % 20}" for n in range(96)]
    options: dict[str, Any] = {
        "output_dir": str(directory / "out"),
        "max_steps": STEPS,
        "save_steps": SAVED // 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    shared = {"model": model, "processing_class": fast, "callbacks": [watch]}
    if kind == "kto":
        answers = {"completion": [f" word{5 * n % 20}" for n in range(96)], "label": [n % 3 == 0 for n in range(96)]}
        data = Dataset.from_dict({"prompt": prompts, **answers})
        return recording_steps(KTOTrainer)(args=KTOConfig(**options), train_dataset=data, **shared)
    if kind in ("packed", "lora", "base"):
        texts = [" ".join(f"word{(n + 3 * m) % 20}" for m in range(4 + n % 9)) for n in range(400)]
        config = SFTConfig(**options, packing=kind == "packed", max_length=32)
        if kind != "packed":
            shared["peft_config"] = LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
        return recording_steps(SFTTrainer)(args=config, train_dataset=Dataset.from_dict({"text": texts}), **shared)
    return recording_steps(OnlineDPOTrainer)(
        args=OnlineDPOConfig(**options, max_new_tokens=6, max_length=32),
        reward_funcs=lambda completions, **_: [float(each.count("word1")) for each in completions],
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        **shared,
    )


def make(kind: str, directory: Path, watch: Watch) -> Any:
    words = WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=END)
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": len(WORDS)}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(directory / "model")
    model = GPT2LMHeadModel.from_pretrained(directory / "model")  # where TRL finds the reference model
    if kind in ("kto", "online-dpo", "packed", "lora", "base"):
        return other(kind, model, directory, fast, watch)
    prompts = 8 if kind == "epoch" else 64
    follows = {"sync_ref_model": True, "ref_model_sync_steps": 3} if kind == "reference" else {}
    trainer, config = (RLOOTrainer, RLOOConfig) if kind == "rloo" else (GRPOTrainer, GRPOConfig)
    made = recording(trainer)(
        model=model,
        reward_funcs=lambda completions, **_: [float(each.count("word1")) for each in completions],
        args=config(
            output_dir=str(directory / "out"),
            max_steps=STEPS,
            save_steps=SAVED // 2,
            logging_steps=1,
            learning_rate=1e-2,
            per_device_train_batch_size=4,
            num_generations=4,
            beta=0.5 if kind == "reference" else 0.0,
            **follows,
            num_iterations=2,
            steps_per_generation=4,
            max_completion_length=6,
            bf16=False,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"word{n % 20} word{3 * n % 20}" for n in range(prompts)]}),
        processing_class=fast,
        callbacks=[watch],
    )
    if kind == "engine":
        made.use_vllm, made.vllm_mode, made._last_loaded_step = True, "server", -1
        made.vllm_importance_sampling_correction = False
        made.vllm_generation = Engine(made)
    return made


def train(commander: Commander, kind: str) -> dict[str, Any]:
    plain = make(kind, Path(kind, "plain").absolute(), Watch())
    plain.train()
    with commander.connect() as medic:
        sent = Sent(commander, medic)
        skip = {"skip_batches": SKIPPED} if kind == "epoch" else {}
        watch = Watch(sent("job.rollback", 600.0, step=SAVED, **skip), kind != "base")
        repaired = make(kind, Path(kind, "repaired").absolute(), watch)
        huggingface.train(repaired, medic=medic, limits=huggingface.Limits(delay=0.0))
        reply = commander.final(sent.ids[0], 120.0)
    engine = getattr(repaired, "vllm_generation", None)
    return {
        "plain": type(plain).used,
        "repaired": type(repaired).used,
        "answer": [reply.status, reply.output],
        "saved": sorted(file.name for file in Path(kind, "repaired", "out", f"checkpoint-{SAVED}").iterdir()),
        "sampled": engine.sampled if engine is not None else [],
        "prompts": [getattr(type(each), "prompts", []) for each in (plain, repaired)],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    url, file = sys.argv[1:]
    Path(file).write_text(json.dumps({kind: train(Commander(url, kind), kind) for kind in KINDS}))
