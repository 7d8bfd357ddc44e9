"""``trainmedic agent health``: checks of the node without a running agent."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from trainmedic_agent.health import sysfs
from trainmedic_agent.health.checker import Examination, HealthChecker
from trainmedic_agent.health.checks import HealthReport, Level
from trainmedic_agent.health.executor import MOST_BURN_SECONDS
from trainmedic_agent.health.record import recorded_values
from trainmedic_agent.health.sysfs import NodeRoots
from trainmedic_agent.ports.gpus import Gpus
from trainmedic_agent.wiring.node_gpus import node_gpus

OWN_PROBE = (sys.executable, "-m", "trainmedic.probe")


class CheckedNode(Struct, frozen=True):
    gpus: tuple[str, ...]
    report: HealthReport


def node_checker(gpus: Gpus) -> HealthChecker:
    return HealthChecker(gpus, NodeRoots(sysfs.SYS, sysfs.PROC))


def check(expected: int, level: Level, probe: Sequence[str] | None, state_dir: Path | None) -> CheckedNode:
    """Check this node, and compare with the record of its agent in `state_dir`. Raises JournalUnavailable.

    `expected` is the least number of GPUs that must answer.
    """
    histories = recorded_values(state_dir) if state_dir is not None else {}
    with contextlib.closing(node_gpus()) as gpus:
        examination = Examination(level, expected, probe or OWN_PROBE, MOST_BURN_SECONDS)
        report, _ = node_checker(gpus).examine(examination, histories)
        listed = gpus.inventory().gpus
    return CheckedNode(tuple(f"GPU {gpu.index} {gpu.uuid} {gpu.name}" for gpu in listed), report)
