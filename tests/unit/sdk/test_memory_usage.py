"""How much memory a job has in use, from what Linux and PyTorch say."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainmedic.job import process_usage

PAGE = os.sysconf("SC_PAGE_SIZE")
MEMINFO = "MemTotal:       1000 kB\nMemFree:         50 kB\nMemAvailable:    400 kB\n"


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_machines_memory_counts_without_its_cache(tmp_path: Path) -> None:
    """What is available is not in use."""
    proc = tree(tmp_path, {"meminfo": MEMINFO, "self/cgroup": "0::/user.slice\n"})
    assert process_usage.host_memory(proc, tmp_path / "none") == (600 * 1024, 1000 * 1024)


def test_a_containers_limit_counts_where_there_is_one(tmp_path: Path) -> None:
    """The kernel ends a job at its control group's limit, however much the machine has left."""
    proc = tree(tmp_path / "proc", {"meminfo": MEMINFO, "self/cgroup": "0::/kubepods/pod1\n"})
    files = {"memory.max": "500000\n", "memory.current": "450000\n", "memory.stat": "anon 1\ninactive_file 50000\n"}
    inside = tree(tmp_path / "inside", files)  # in a container its own group is the root
    outside = tree(tmp_path / "outside", {f"kubepods/pod1/{name}": text for name, text in files.items()})
    assert process_usage.host_memory(proc, inside) == process_usage.host_memory(proc, outside) == (400_000, 500_000)


def test_the_limit_of_a_group_around_it_counts_too(tmp_path: Path) -> None:
    """Slurm limits a job and its steps; a task's own group has no limit. Kubernetes limits pods likewise."""
    proc = tree(tmp_path / "proc", {"meminfo": MEMINFO, "self/cgroup": "0::/job_1/step_0/task_0\n"})
    limits = {
        "job_1": ("500000", "450000"),
        "job_1/step_0": ("900000", "450000"),
        "job_1/step_0/task_0": ("max", "1000"),
    }
    files = {f"{group}/memory.max": f"{limit}\n" for group, (limit, _) in limits.items()}
    files |= {f"{group}/memory.current": f"{used}\n" for group, (_, used) in limits.items()}
    assert process_usage.host_memory(proc, tree(tmp_path / "cgroup", files)) == (450_000, 500_000)


@pytest.mark.parametrize("limit", ["max\n", f"{10**15}\n"])
def test_a_group_without_a_real_limit_has_that_of_the_machine(tmp_path: Path, limit: str) -> None:
    """``max``, or more than there is."""
    proc = tree(tmp_path / "proc", {"meminfo": MEMINFO, "self/cgroup": "0::/\n"})
    group = tree(tmp_path / "group", {"memory.max": limit, "memory.current": "450000\n"})
    assert process_usage.host_memory(proc, group) == (600 * 1024, 1000 * 1024)


def test_loader_workers_count_with_their_process(tmp_path: Path) -> None:
    """A worker that has just ended counts as nothing."""
    proc = tree(
        tmp_path, {"self/statm": "900 100 5\n", "self/task/1/children": "7 8 \n", "self/task/2/children": "9\n"}
    )
    tree(tmp_path, {"7/statm": "90 10 5\n", "8/statm": "90 20 5\n"})
    assert process_usage.resident_bytes(proc) == 130 * PAGE


def test_where_there_is_no_proc_nothing_is_known(tmp_path: Path) -> None:
    """Another system than Linux."""
    assert process_usage.resident_bytes(tmp_path) is None
    assert process_usage.host_memory(tmp_path, tmp_path) is None


def test_this_process_has_memory() -> None:
    """On the real files."""
    resident, host = process_usage.resident_bytes(), process_usage.host_memory()
    assert resident is not None
    assert host is not None
    assert 1_000_000 < resident < host[1]
    assert 0 < host[0] < host[1]


def cuda(devices: list[Mapping[str, int]], *, initialized: bool = True) -> Any:
    def total(_: int) -> Any:
        return SimpleNamespace(total_memory=1000)

    return SimpleNamespace(
        is_initialized=lambda: initialized,
        device_count=lambda: len(devices),
        memory_stats=lambda index: devices[index],
        get_device_properties=total,
    )


def test_cuda_memory_is_that_of_the_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scraping thread's own current device says nothing; the allocator's figures do."""
    mine = {"allocated_bytes.all.current": 600, "reserved_bytes.all.current": 800, "num_alloc_retries": 2}
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda([{}, mine])))
    assert process_usage.cuda_memory() == process_usage.Cuda(600, 800, 1000, 2)


@pytest.mark.parametrize(
    "torch", [SimpleNamespace(), SimpleNamespace(cuda=cuda([{}], initialized=False)), SimpleNamespace(cuda=cuda([{}]))]
)
def test_cuda_is_left_alone_where_the_job_does_not_use_it(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    """Neither loaded, nor initialised, nor filled by a look at it."""
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert process_usage.cuda_memory() is None


def test_a_driver_that_fails_is_no_failure_of_the_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other figures are still shown."""

    def lost() -> int:
        raise RuntimeError("CUDA error: unspecified launch failure")

    broken = cuda([{}])
    broken.device_count = lost
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=broken))
    assert process_usage.cuda_memory() is None


# --- growth -----------------------------------------------------------------------------------------------


def growth(sizes: list[float], steps: int = 10) -> float | None:
    growth = process_usage.Growth(samples=40, apart=4.0)
    for number, size in enumerate(sizes):
        growth.add_sample(steps * number, size, 5.0 * number)
    return growth.per_step()


def test_a_leak_is_found_through_noise() -> None:
    """A hundred bytes a step under noise of a thousand."""
    noise = random.Random(0)
    assert growth([1e6 + 1000.0 * n + noise.uniform(-1000, 1000) for n in range(40)]) == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize("at", range(2, 40, 4))
def test_a_jump_is_no_leak_wherever_it_stands(at: int) -> None:
    """A longer batch, or an evaluation that allocates once."""
    assert growth([1e6 if n < at else 9e6 for n in range(40)]) == 0


def test_a_sawtooth_is_no_leak() -> None:
    """A garbage collector that comes now and then."""
    assert growth([1e6 + 1e4 * (n % 7) for n in range(40)]) == pytest.approx(0, abs=40)


def test_memory_that_shrinks_does_not_grow() -> None:
    """It is 0, not less."""
    assert growth([1e6 - 1000.0 * n for n in range(40)]) == 0


def test_growth_is_not_known_before_there_are_samples() -> None:
    """Also where the loop stands still: growth is per step."""
    assert growth([1e6] * 19) is None
    assert growth([1e6 * n for n in range(60)], steps=0) is None


def test_two_scrapers_do_not_shorten_the_window() -> None:
    """Samples that come within a few seconds of the last are left out."""
    growth = process_usage.Growth(samples=40, apart=4.0)
    for number in range(30):
        growth.add_sample(number, 1e6 * number, 0.5 * number)
    assert growth.per_step() is None
