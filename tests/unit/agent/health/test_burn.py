"""Results of a load test, from the document of a program in the place of ``trainmedic-probe``."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator

import pytest

from tests.driver.driver import Driver
from trainmedic_agent.adapters.nvml_gpus import NvmlGpus
from trainmedic_agent.health import burn
from trainmedic_agent.health.burn import burn_checks
from trainmedic_agent.health.checks import HealthVerdict


@pytest.fixture
def gpus(driver: Driver) -> Iterator[NvmlGpus]:
    opened = NvmlGpus()
    yield opened
    opened.close()


def test_untested_memory_is_unknown(gpus: NvmlGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no memory was free, nothing was read back, and there is no speed."""
    test = {"rank": 0, "bytes": 0, "bytes_per_s": 0.0, "is_right": True}
    document = json.dumps({"backend": "nccl", "all": {"ranks": 1, "all_reduce": []}, "memory": [test]})
    monkeypatch.setattr(burn, "_CHILD", ("echo", document))
    monkeypatch.setattr(burn, "OPTIONS", ())
    results = burn_checks(gpus, (), 60, bool)
    assert [(check.name, check.verdict) for check in results.checks] == [("memory", HealthVerdict.UNKNOWN)]
    assert results.values == []


def test_a_node_without_space_for_the_output_is_not_tested(gpus: NvmlGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks before it are still reported."""
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    results = burn_checks(gpus, ("true",), 60, bool)
    assert [(check.name, check.verdict) for check in results.checks] == [("burn", HealthVerdict.UNKNOWN)]
