"""Readings of a real card, compared with ``nvidia-smi -q -x``: ``python -m benchmarks.real_gpu``.

It only reads. nvidia-smi runs before and after. A constant value must be the same; a changing one must lie between
both, with a tolerance of about a second's change. Prints a line for each value and exits with 1 if one disagrees, with
2 without a card.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from trainmedic_agent.adapters.nvml_gpus import NvmlGpus
from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.exporter import AgentCollector
from trainmedic_agent.facts import gpu as facts
from trainmedic_agent.gpu_record import GpuRecord
from trainmedic_agent.journal import Journal
from trainmedic_core.gpu_names import normal_pci

MIB = 1 << 20


@dataclass(frozen=True)
class Value:
    """One value: its paths in nvidia-smi's releases, its unit, and its tolerance."""

    paths: tuple[str, ...]
    scale: float = 1.0
    slack: float = 0.0


@dataclass(frozen=True)
class Compared:
    name: str
    ours: Any
    theirs: tuple[Any, Any]
    agrees: bool


POWER = ("gpu_power_readings", "power_readings")

NUMBERS: Mapping[str, Value] = {
    "memory.total_bytes": Value(("fb_memory_usage/total",), MIB, MIB),
    "memory.used_bytes": Value(("fb_memory_usage/used",), MIB, 64 * MIB),
    "utilization_percent": Value(("utilization/gpu_util",), 1, 100),
    "temperature_celsius": Value(("temperature/gpu_temp",), 1, 3),
    "memory_temperature_celsius": Value(("temperature/memory_temp",), 1, 3),
    "slowdown_celsius": Value(("temperature/gpu_temp_slow_threshold",)),
    "power.draw_watts": Value(
        tuple(f"{one}/{draw}" for one in POWER for draw in ("average_power_draw", "power_draw")), 1, 60
    ),
    "power.enforced_watts": Value(
        tuple(f"{one}/{limit}" for one in POWER for limit in ("current_power_limit", "enforced_power_limit")), 1, 0.01
    ),
    "power.default_watts": Value(tuple(f"{one}/default_power_limit" for one in POWER), 1, 0.01),
    "power.min_watts": Value(tuple(f"{one}/min_power_limit" for one in POWER), 1, 0.01),
    "power.max_watts": Value(tuple(f"{one}/max_power_limit" for one in POWER), 1, 0.01),
    "clocks.sm_mhz": Value(("clocks/sm_clock",), 1, 2000),
    "clocks.memory_mhz": Value(("clocks/mem_clock",), 1, 3000),
    "remapped_rows.corrected": Value(("remapped_rows/remapped_row_corr",)),
    "remapped_rows.uncorrected": Value(("remapped_rows/remapped_row_unc",)),
}

SERIES = {
    "gpu_memory_total_bytes": "memory.total_bytes",
    "gpu_memory_used_bytes": "memory.used_bytes",
    "gpu_temperature_celsius": "temperature_celsius",
    "gpu_power_limit_watts": "power.enforced_watts",
    "gpu_power_default_limit_watts": "power.default_watts",
}


def compare(told: Mapping[str, Any], before: ElementTree.Element, after: ElementTree.Element) -> Iterator[Compared]:
    """Compare a GPU's facts with its elements of nvidia-smi."""
    yield _same("uuid", told["uuid"], before.findtext("uuid"))
    yield _same("name", told["name"], before.findtext("product_name"))
    yield _same("pci_address", told["pci_address"], normal_pci(before.get("id", "")))
    for name, value in NUMBERS.items():
        ours, low, high = _at(told, name), _number(before, value), _number(after, value)
        if low is None or high is None:
            yield Compared(name, ours, (low, high), ours is None)
            continue
        low, high = sorted((low, high))
        agrees = ours is not None and low - value.slack <= ours <= high + value.slack
        yield Compared(name, ours, (low, high), agrees)
    if "mig" in told:
        yield _same("mig", told["mig"], before.findtext("mig_mode/current_mig") == "Enabled")
    yield from _reasons(told, before, after)


def _reasons(told: Mapping[str, Any], before: ElementTree.Element, after: ElementTree.Element) -> Iterator[Compared]:
    """Compare each reason that both print, unless it changed between the two."""
    ours = set(told.get("throttle_reasons", ()))
    for group in ("clocks_event_reasons", "clocks_throttle_reasons"):
        for element in before.iterfind(f"{group}/*"):
            name = element.tag.removeprefix("clocks_event_reason_").removeprefix("clocks_throttle_reason_")
            states = {element.text, after.findtext(f"{group}/{element.tag}")}
            if states <= {"Active", "Not Active"}:
                agrees = len(states) == 2 or (name in ours) == (states == {"Active"})
                yield Compared(f"throttle_reasons.{name}", name in ours, (element.text, element.text), agrees)


def _same(name: str, ours: Any, theirs: Any) -> Compared:
    return Compared(name, ours, (theirs, theirs), ours == theirs)


def _at(told: Mapping[str, Any], path: str) -> Any:
    value: Any = told
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _number(element: ElementTree.Element, value: Value) -> float | None:
    """Return the first path's number, or None; nvidia-smi writes ``N/A``."""
    for path in value.paths:
        text = (element.findtext(path) or "").split(" ")[0]
        try:
            return float(text) * value.scale
        except ValueError:
            continue
    return None


def _smi() -> ElementTree.Element:
    printed = subprocess.run(["nvidia-smi", "-q", "-x"], capture_output=True, check=True, timeout=60).stdout
    return ElementTree.fromstring(printed)


def _by_uuid(root: ElementTree.Element) -> dict[str, ElementTree.Element]:
    return {one.findtext("uuid") or "": one for one in root.iterfind("gpu")}


def _exported(gpus: NvmlGpus) -> dict[tuple[str, str], float]:
    registry = CollectorRegistry()
    with tempfile.TemporaryDirectory() as directory, contextlib.closing(Journal(Path(directory))) as journal:
        registry.register(AgentCollector(gpus, dict, AgentCounters(), {"node": "here"}, GpuRecord(journal)))
        families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    return {(one.name, one.labels.get("uuid", "")): one.value for family in families for one in family.samples}


def main(show: Callable[[str], None] = print) -> int:
    if shutil.which("nvidia-smi") is None:
        show("there is no nvidia-smi on this machine")
        return 2
    gpus = NvmlGpus()
    before = _by_uuid(_smi())
    told, exported = facts.all_facts(gpus), _exported(gpus)
    after = _by_uuid(_smi())
    gpus.close()
    for problem in told.get("gpu_problems", ()):
        show(problem)
    results = [_same("GPUs", sorted(one["uuid"] for one in told.get("gpus", ())), sorted(before))]
    for one in told.get("gpus", ()):
        results += compare(one, before[one["uuid"]], after[one["uuid"]])
        for series, name in SERIES.items():
            ours, slack = exported.get((series, one["uuid"])), NUMBERS[name].slack
            fact = _at(one, name)
            agrees = ours == fact or (ours is not None and abs(ours - fact) <= slack)
            results.append(Compared(series, ours, (fact, fact), agrees))
    for result in results:
        show(f"{'ok   ' if result.agrees else 'WRONG'}  {result.name}: {result.ours}  nvidia-smi: {result.theirs}")
    return 0 if all(result.agrees for result in results) and len(results) > 1 else 1


if __name__ == "__main__":
    sys.exit(main())
