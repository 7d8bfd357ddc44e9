"""A small training by torchtitan itself, on a CPU: `build`, as in ``titan_stand_in``.

Outside of torchtitan this much is other than in a training on GPUs, and nothing of it concerns Trainmedic: the device;
attention without masks, for the masked kinds need a GPU or a compiler; a plain sum in place of gloo's missing scaled
one; and a function that the newest PyTorch alone has. Data and tokens are made on the spot.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.fsdp import FSDPModule

_TOKENS = 2000
_TEXTS = [{"text": " ".join(str((number * 7 + place) % _TOKENS) for place in range(17))} for number in range(5000)]


class _Cpu:
    """``torch.cpu`` with what torchtitan asks of ``torch.cuda``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 64

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(total_memory=1 << 34)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {}

    def empty_cache(self) -> None:
        pass

    def reset_peak_memory_stats(self) -> None:
        pass


def _turn_to_cpu() -> None:
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda kind: _Cpu()
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = c10d._set_pg_timeout  # type: ignore[attr-defined]


def _write_tokenizer() -> str:
    import tokenizers  # type: ignore[import-not-found]

    folder = Path(f"tokens-{os.environ['RANK']}")
    folder.mkdir(exist_ok=True)
    words = {"[UNK]": _TOKENS, **{str(number): number for number in range(_TOKENS)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    return str(folder)


def build(directory: str, steps: int) -> Any:
    """A trainer whose checkpoints lie in that directory: a small Llama, with parameters that the ranks share out."""
    _turn_to_cpu()
    from datasets import Dataset  # type: ignore[import-not-found]
    from torchtitan.components.checkpoint import CheckpointManager  # type: ignore[import-not-found]
    from torchtitan.components.loss import CrossEntropyLoss  # type: ignore[import-not-found]
    from torchtitan.components.metrics import MetricsProcessor  # type: ignore[import-not-found]
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # type: ignore[import-not-found]
    from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig  # type: ignore[import-not-found]
    from torchtitan.hf_datasets import DatasetConfig, text_datasets  # type: ignore[import-not-found]
    from torchtitan.models.common.attention import ScaledDotProductAttention  # type: ignore[import-not-found]
    from torchtitan.models.llama3 import model_registry  # type: ignore[import-not-found]
    from torchtitan.trainer import Trainer  # type: ignore[import-not-found]

    text_datasets.DATASETS["numbers"] = DatasetConfig(
        path="", loader=lambda path: Dataset.from_list(_TEXTS), sample_processor=lambda sample: sample["text"]
    )
    model = model_registry("debugmodel")
    del model.model.layers[1:]
    model.model.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    trainer = Trainer.Config(
        model_spec=model,
        loss=CrossEntropyLoss.Config(),
        hf_assets_path=_write_tokenizer(),
        dump_folder=directory,
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=4, total_steps=1000),
        training=TrainingConfig(
            local_batch_size=2,
            global_batch_size=4 * ranks,
            seq_len=16,
            steps=steps,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        dataloader=text_datasets.HuggingFaceTextDataLoader.Config(dataset="numbers"),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=True, interval=10, keep_latest_k=0, last_save_model_only=False),
        activation_checkpoint=None,
        debug=DebugConfig(seed=3),
    ).build()
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return trainer
