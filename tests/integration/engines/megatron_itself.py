"""Megatron-LM itself, on CPUs: its module ``training``, and `pretrain`, which runs its ``pretrain_gpt.py`` unmodified.

It is looked for on ``PYTHONPATH``. Outside of it this much is other than on GPUs, and nothing of it concerns
Trainmedic: devices, streams and random generators are those of the processor, nothing is compiled, and gloo stands for
NCCL. The model is a GPT of two layers, the data are its own mock data.
"""

from __future__ import annotations

import runpy
import sys
import typing
from collections.abc import Callable
from multiprocessing import spawn
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

if not hasattr(typing, "override"):
    typing.override = lambda method: method  # type: ignore[attr-defined]
torch.compile = lambda function=None, **_: function or (lambda other: other)  # type: ignore[assignment]

from megatron.core.datasets import gpt_dataset  # type: ignore[import-not-found]  # noqa: E402
from megatron.core.tensor_parallel import random as random_state  # type: ignore[import-not-found]  # noqa: E402
from megatron.training import training  # type: ignore[import-not-found]  # noqa: E402

_KINDS = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}
_MOST = 1000
_prepare = spawn.get_preparation_data
_build_data = training.build_train_valid_test_data_iterators
_FUSED = ("masked-softmax", "bias-gelu", "bias-dropout", "gradient-accumulation")


class _OnCpu(TorchFunctionMode):
    """What is to be made on a GPU is made in main memory."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and (isinstance(device, int) or "cuda" in str(device)):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class _Stream:
    """A stream or event of a device that has none."""

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any) -> float:
        return 0.0


def _build_data_aside(*arguments: Any, **options: Any) -> Any:
    """On a GPU dropout draws from a generator of its own, which loaders that begin leave alone."""
    before = torch.get_rng_state()
    built = _build_data(*arguments, **options)
    torch.set_rng_state(before)
    return built


training.build_train_valid_test_data_iterators = _build_data_aside


def _prepare_without_script(name: str) -> dict[str, Any]:
    """Processes that write ``torch_dist`` checkpoints need no script, whose imports fail on Python 3.11."""
    return {key: value for key, value in _prepare(name).items() if not key.startswith("init_main")}


spawn.get_preparation_data = _prepare_without_script


def _turn_to_cpu() -> None:
    cuda: Any = torch.cuda
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "set_stream"):
        setattr(cuda, name, lambda *arguments, **options: None)
    for name in ("max_memory_allocated", "memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *arguments, **options: 0)
    cuda.is_available, cuda.device_count = lambda: True, lambda: 8
    cuda.current_device = lambda: torch.device("cpu")
    cuda.get_device_capability = lambda *device: (9, 0)
    properties = SimpleNamespace(total_memory=1 << 34, major=9, minor=0, multi_processor_count=1, name="CPU")
    cuda.get_device_properties = lambda *device: properties
    cuda.memory_stats = lambda *device: {}
    cuda.Stream = cuda.Event = cuda.current_stream = cuda.default_stream = cuda.stream = _Stream
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *device: torch.get_rng_state()
    cuda.set_rng_state = lambda *arguments, **options: None
    cuda.manual_seed = cuda.random.manual_seed = lambda seed: torch.manual_seed(seed)
    random_state._get_cuda_rng_state = lambda *arguments, **options: torch.get_rng_state()
    random_state._set_cuda_rng_state = lambda state, *arguments, **options: torch.set_rng_state(state)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]
    kind_of = torch.Tensor.type
    torch.Tensor.type = (  # type: ignore[method-assign]
        lambda self, *a, **k: kind_of(self, *a, **k) if a or k else _KINDS.get(self.dtype, kind_of(self))
    )
    begin = dist.init_process_group
    dist.init_process_group = lambda *_, device_id=None, backend=None, **options: begin("gloo", **options)
    _OnCpu().__enter__()


def pretrain(note: Callable[[int], Any], *, train_iters: int, kind: str, **options: Any) -> None:
    """Begin or go on with a training; `note` is called with the number of each sample that is read."""
    _turn_to_cpu()
    read = gpt_dataset.GPTDataset.__getitem__

    def noted(self: Any, number: int | None) -> Any:
        if number is not None:
            note(int(number))
        return read(self, number)

    gpt_dataset.GPTDataset.__getitem__ = noted
    named = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "seq_length": 16,
        "lr": 0.01,
        "max_position_embeddings": 16,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "vocab_size": 63,
        "tokenizer_type": "NullTokenizer",
        "transformer_impl": "local",
        "distributed_backend": "gloo",
        "ckpt_format": "torch",
        "eval_iters": 1,
        "eval_interval": 100_000,
        "log_interval": 1,
        "num_workers": 0,
        "train_iters": _MOST,  # its schedule is to be the same however many it comes to
        "exit_interval": train_iters,
        "lr_decay_iters": _MOST,
        "pipeline_model_parallel_size": 2 if kind == "pipeline" else 1,
        "tensor_model_parallel_size": 2 if kind == "tensor" else 1,
        "split": "100,0,0",
        **options,
    }
    told = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in named.items()]
    without = [*(f"--no-{name}-fusion" for name in _FUSED), "--no-persist-layer-norm", "--no-rope-fusion"]
    script = Path(training.__file__).parents[2] / "pretrain_gpt.py"
    sys.argv[:] = [str(script), *told, *without, "--mock-data", "--use-cpu-initialization"]
    runpy.run_path(str(script), run_name="__main__")
