"""Which GPUs a job of one process says that it works on."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import trainmedic
from trainmedic.job import devices


def torch_with(*held: int, initialized: bool = True) -> Any:
    """A PyTorch that holds so many bytes on each device."""
    cuda = SimpleNamespace(
        is_initialized=lambda: initialized,
        device_count=lambda: len(held),
        memory_reserved=lambda index: held[index],
        get_device_properties=lambda index: SimpleNamespace(uuid=f"0000000{index}-5a3c"),
    )
    return SimpleNamespace(cuda=cuda)


def test_the_gpus_are_those_that_hold_memory_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have NVML's names; there are none before the job has started to use CUDA."""
    monkeypatch.setitem(sys.modules, "torch", torch_with(0, 5, 7))
    assert devices.in_use() == ["GPU-00000001-5a3c", "GPU-00000002-5a3c"]
    monkeypatch.setitem(sys.modules, "torch", torch_with(5, initialized=False))
    assert devices.in_use() == []


def test_a_pytorch_that_cannot_name_its_gpus_is_tolerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be partly imported, or its GPU may have gone."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    assert devices.in_use() == []
    broken = torch_with(1)
    del broken.cuda.get_device_properties
    monkeypatch.setitem(sys.modules, "torch", broken)
    assert devices.in_use() == []


def test_a_job_of_one_process_states_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It states its node and each of its GPUs; one of several ranks does not know this for the job."""
    monkeypatch.setenv("TRAINMEDIC_NODE", "n1")
    monkeypatch.setitem(sys.modules, "torch", torch_with(5, 5))
    with trainmedic.connect(job="j", redis_url="redis://127.0.0.1:1/0", rank=0, world_size=1) as medic:
        assert medic._describe()["placement"] == [
            {"rank": 0, "node": "n1", "gpu": "GPU-00000000-5a3c"},
            {"rank": 0, "node": "n1", "gpu": "GPU-00000001-5a3c"},
        ]
        monkeypatch.setitem(sys.modules, "torch", torch_with(0))
        assert medic._describe()["placement"] == [{"rank": 0, "node": "n1", "gpu": None}]
    with trainmedic.connect(job="j", redis_url="redis://127.0.0.1:1/0", rank=0, world_size=2) as medic:
        assert "placement" not in medic._describe()
