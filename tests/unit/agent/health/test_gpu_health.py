"""Checks of GPUs and their links, with the real pynvml and the stand-in for the driver."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.driver import driver as standin
from tests.driver.driver import Card, Driver, cards
from trainmedic_agent.adapters.nvml_gpus import NvmlGpus
from trainmedic_agent.health.checks import HealthVerdict
from trainmedic_agent.health.gpu_checks import gpu_checks

FIRST, SECOND = (card.uuid for card in cards(2))


def bad(gpus: NvmlGpus, expected: int = 2) -> list[tuple[str, str, str]]:
    checks = gpu_checks(gpus, expected).checks
    return [(each.name, each.part, each.verdict) for each in checks if each.verdict is not HealthVerdict.OK]


def test_healthy_gpus_pass_every_check(gpus: NvmlGpus) -> None:
    """Each check has its observation, and the values for the record."""
    found = gpu_checks(gpus, 2)
    assert {each.verdict for each in found.checks} == {HealthVerdict.OK}
    assert {each.text for each in found.checks if each.part in ("", FIRST)} == {
        "gpus: 2 GPUs respond; expected: 2 or more, and no problem",
        "gpu_ecc: 0 uncorrectable memory errors since the reset; expected: 0",
        "gpu_memory_rows: none pending; expected: no pending or failed row replacement",
        "gpu_recovery: the driver requests: none; expected: none",
        "pcie_width: x16; expected: x16",
        "pcie_speed: generation 5; expected: generation 5",
        "nvlink: 18 of 18 up; expected: 18, as at other GPUs",
    }
    assert {value.key: value.amount for value in found.values if value.part == SECOND} == {
        f"pcie_replays {SECOND}": 0,
        f"nvlink_errors {SECOND}": 0,
        f"nvlinks_up {SECOND}": 18,
    }


@pytest.mark.parametrize(
    ("happens", "expected"),
    [
        (lambda driver: driver.lose(1), ("gpus", "", "failed")),
        (lambda driver: driver.ecc(1, 0, 2), ("gpu_ecc", SECOND, "failed")),
        (lambda driver: driver.remap(1, pending=True), ("gpu_memory_rows", SECOND, "failed")),
        (lambda driver: driver.remap(1, failed=True), ("gpu_memory_rows", SECOND, "failed")),
        (lambda driver: driver.ask_for(1, 1), ("gpu_recovery", SECOND, "failed")),
        (lambda driver: driver.pcie(1, width=8), ("pcie_width", SECOND, "degraded")),
        (lambda driver: driver.pcie(1, generation=3), ("pcie_speed", SECOND, "degraded")),
        (lambda driver: driver.nvlink(1, up=17), ("nvlink", SECOND, "failed")),
        (
            lambda driver: driver.fail("nvmlDeviceGetTotalEccErrors", standin.UNKNOWN, gpu=1),
            ("gpu_ecc", SECOND, "unknown"),
        ),
        (
            lambda driver: driver.fail("nvmlDeviceGetNvLinkState", standin.UNKNOWN, gpu=1),
            ("gpu_nvlinks", SECOND, "unknown"),
        ),
    ],
)
def test_each_fault_is_found_at_its_gpu(
    driver: Driver, gpus: NvmlGpus, happens: Callable[[Driver], None], expected: tuple[str, str, str]
) -> None:
    happens(driver)
    assert bad(gpus) == [expected]


def test_a_slow_link_of_an_idle_gpu_is_no_fault(driver: Driver, gpus: NvmlGpus) -> None:
    """An idle link saves power. Nothing is claimed about its speed then."""
    driver.pcie(0, generation=1, performance_state=8)
    assert bad(gpus) == []
    assert ("pcie_speed", FIRST) not in {(each.name, each.part) for each in gpu_checks(gpus, 2).checks}


def test_links_that_are_all_down_are_left_to_the_record(driver: Driver, gpus: NvmlGpus) -> None:
    """A node may connect only some of its GPUs."""
    driver.nvlink(1, up=0)
    assert bad(gpus) == []
    assert f"nvlinks_up {SECOND}" in [value.key for value in gpu_checks(gpus, 2).values if not value.amount]


def test_a_card_or_driver_without_links_has_no_such_checks(make_driver: Callable[..., Driver]) -> None:
    """It has no such values either."""
    driver = make_driver((Card(uuid="GPU-a", nvlinks=0),))
    for function in ("nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetCurrPcieLinkGeneration"):
        driver.fail(function, standin.NOT_SUPPORTED)
    driver.fail("nvmlDeviceGetPcieReplayCounter", standin.NOT_SUPPORTED)
    gpus = NvmlGpus()
    found = gpu_checks(gpus, 1)
    gpus.close()
    assert [each.name for each in found.checks] == ["gpus", "gpu_ecc", "gpu_memory_rows", "gpu_recovery"]
    assert found.values == []


@pytest.mark.parametrize(("expected", "verdicts"), [(0, []), (1, ["failed"])])
def test_without_a_driver_only_expected_gpus_are_missing(
    make_driver: Callable[..., Driver], expected: int, verdicts: list[str]
) -> None:
    """A node without GPUs has nothing to check."""
    make_driver(2).unload()
    gpus = NvmlGpus()
    assert [each.verdict for each in gpu_checks(gpus, expected).checks] == verdicts
    gpus.close()
