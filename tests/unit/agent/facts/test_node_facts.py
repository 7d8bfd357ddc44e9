"""``node.facts``, with the real pynvml and the stand-in for the driver."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.driver import driver as standin
from tests.driver.driver import Driver, cards
from trainmedic.wire.envelope import Command
from trainmedic_agent.adapters.nvml_gpus import NvmlGpus
from trainmedic_agent.executors import AcceptedCommand
from trainmedic_agent.facts.executor import NodeFactsExecutor
from trainmedic_agent.facts.gpu import presence
from trainmedic_agent.gpu_record import GpuRecord
from trainmedic_server.actions.agent_outputs import NODE_FACTS
from trainmedic_server.domain.value_types import ANY, BOOLEAN, NUMBER, TEXT, Each, Shape, ValueType

FIRST, SECOND = (card.uuid for card in cards(2))


Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(gpus: NvmlGpus, gpu_record: GpuRecord) -> Ask:
    return partial(_ask, gpus, gpu_record)


def _ask(gpus: NvmlGpus, record: GpuRecord, gpu: str | None = None, proc: Path = Path("/proc")) -> dict[str, Any]:
    target = {"kind": "node", "node": "n1", **({"gpu": gpu} if gpu else {})}
    now = datetime.now(UTC)
    command = Command("c", "node.facts", target, {}, "r", "p", "a test", now, now + timedelta(seconds=15))
    told = NodeFactsExecutor("n1", gpus, record, proc=proc, sleep=lambda _: None).perform(AcceptedCommand(command))
    assert json.loads(json.dumps(told)) == told
    return dict(told)


def test_facts_describe_the_machine_and_its_gpus(driver: Driver, gpus: NvmlGpus, ask: Ask) -> None:
    """The facts are plain values under stable names."""
    driver.load(0, 1.0)
    driver.fill(0, 72 << 30)
    told = ask()
    assert {"node", "cpu", "memory", "disks", "uptime_seconds", "gpus", "driver"} <= told.keys()
    assert "problems" not in told
    assert "gpu_problems" not in told
    one = told["gpus"][0]
    assert one["memory"] == {"total_bytes": 80 << 30, "used_bytes": 72 << 30, "percent": 90.0}
    assert one["power"] == {
        "draw_watts": 700,
        "limit_watts": 700,
        "enforced_watts": 700,
        "default_watts": 700,
        "min_watts": 200,
        "max_watts": 700,
    }
    assert one["clocks"] == {"sm_mhz": 1980, "memory_mhz": 2619}
    assert (one["throttle_reasons"], one["mig"]) == ([], False)
    assert {"unread", "xid"}.isdisjoint(one)


def test_facts_for_a_gpu_list_that_gpu_separately(driver: Driver, gpus: NvmlGpus, ask: Ask) -> None:
    """The GPU is found by whatever name the alert uses."""
    assert ask("1")["gpu"]["uuid"] == SECOND
    assert "there is no GPU '7'" in ask("7")["problems"][0]


def test_an_unreadable_source_does_not_affect_other_facts(
    driver: Driver, gpus: NvmlGpus, ask: Ask, tmp_path: Path
) -> None:
    """A missing ``/proc``, a lost GPU and a failing reading are each named."""
    gpus.inventory()
    driver.lose(0)
    driver.fail("nvmlDeviceGetUtilizationRates", standin.UNKNOWN, gpu=1)
    told = ask(proc=tmp_path)
    assert len(told["problems"]) >= 3
    assert [one["uuid"] for one in told["gpus"]] == [SECOND]
    assert told["gpus"][0]["unread"] == {"utilization": "Unknown Error"}
    assert "utilization_percent" not in told["gpus"][0]
    assert any(FIRST in problem for problem in told["gpu_problems"])


def test_a_presence_is_sent_even_if_a_gpu_does_not_answer(driver: Driver, gpus: NvmlGpus) -> None:
    """The reason takes the place of its values."""
    driver.fail("nvmlDeviceGetPowerManagementLimit", standin.NOT_SUPPORTED, gpu=0)
    whole = presence(gpus)
    told = whole["gpus"]
    assert "does not support this" in told[0]["problem"]
    assert told[1]["power_limit_watts"] == 700
    assert [each["uuid"] for each in whole["gpu_readings"]] == [SECOND]


def test_a_presence_lists_the_pods_on_each_gpu(driver: Driver, gpus: NvmlGpus) -> None:
    """They are found by the compute processes; if they are unknown, the GPU's other values stay."""
    driver.occupy(0, 4711, 4712)
    seen: list[tuple[int, ...]] = []

    def pods_of(pids: Iterable[int]) -> list[str]:
        seen.append(tuple(pids))
        return ["uid-1"] if seen[-1] else []

    told = presence(gpus, pods_of)["gpus"]
    assert seen == [(4711, 4712), ()]
    assert [one.get("pods") for one in told] == [["uid-1"], None]
    driver.fail("nvmlDeviceGetComputeRunningProcesses_v3", standin.NOT_SUPPORTED)
    assert [one.get("power_limit_watts") for one in presence(gpus, pods_of)["gpus"]] == [700, 700]


def test_the_server_knows_the_type_of_each_fact(driver: Driver, ask: Ask) -> None:
    """Playbooks are checked against these types, down to each single value."""
    driver.load(0, 1.0)
    assert list(_untyped(ask(gpu=FIRST), NODE_FACTS)) == []
    assert list(_untyped({"cpu": {"percent": "80", "new": 1}}, NODE_FACTS)) == ["cpu.percent", "cpu.new"]


def _untyped(value: Any, shape: Shape, path: str = "") -> Iterator[str]:
    """Yield the paths of values that are missing in `shape` or have another type there."""
    kinds: dict[Shape, Any] = {TEXT: str, NUMBER: (int, float), BOOLEAN: bool}
    if isinstance(shape, Each):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _untyped(each, shape.value, f"{path}[]")
    elif isinstance(shape, ValueType):
        if shape is not ANY and not isinstance(value, kinds[shape]):
            yield path.removeprefix(".")
    else:
        for key, each in value.items():
            if key in shape:
                yield from _untyped(each, shape[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}".removeprefix(".")
