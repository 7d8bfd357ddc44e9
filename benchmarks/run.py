"""Run the benchmarks one after the other, keep their output with the machine and its load, and compare.

``benchmarks/run`` runs those of up to three minutes; names select, ``--long`` runs all. Results are kept as JSON;
``--compare FILE`` prints each figure's ratio to an earlier run. A figure is a number in a printed line, identified by
the text around it. ``--executor`` and ``--ansible-rulebook`` name peers that are not on PATH.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.peers import add_programs, program_words
from tests.support.programs import CACHE, PYTHON_PATH, ROOT

BENCHMARKS: Mapping[str, Sequence[str]] = {
    "webhook_throughput": ("webhook_throughput",),
    "webhook_throughput_matched": ("webhook_throughput", "--matched"),
    "function_calls": ("function_calls",),
    "alert_storm": ("alert_storm",),
    "runs_end_to_end": ("runs_end_to_end", "--beside"),
    "done_and_undone": ("done_and_undone",),
    "several_servers": ("several_servers",),
    "receipt_to_handler": ("receipt_to_handler",),
    "time_to_ready": ("time_to_ready",),
    "frozen_values": ("frozen_values",),
    "playbooks_many": ("playbooks_many",),
    "groups": ("groups",),
    "group_agents": ("group_agents",),
    "history_page": ("history_page",),
    "finding_to_alert": ("finding_to_alert",),
    "log_rules": ("log_rules",),
    "verdicts": ("verdicts", "tests/unit/diagnosis/public_cases"),
    "diagnose_folder": ("diagnose_folder",),
    "command_to_limit": ("command_to_limit",),
    "agents_thousand": ("agents_thousand",),
    "fleet": ("fleet",),
    "agent_logs": ("agent_logs",),
    "hostile_jobs": ("hostile_jobs", "--minutes", "2", "--share", "0.2"),
    "log_opening": ("log_opening",),
    "log_search": ("log_search",),
    "agent_with_pydantic": ("agent_with_pydantic",),
    "sdk_idle_step": ("sdk_idle_step",),
    "sdk_step_meter": ("sdk_step_meter",),
    "sdk_step_overhead": ("sdk_step_overhead",),
    "sdk_bad_redis": ("sdk_bad_redis",),
    "console_pages": ("console_pages",),
    "peers": ("peers",),
}
LONG: Mapping[str, Sequence[str]] = {
    "replay": ("replay",),
    "history_store": ("history_store",),
    "agreement_by_collective": ("agreement_by_collective",),
    "agent_idle": ("agent_idle",),
    "memory_checkpoints": ("memory_checkpoints",),
    "disk_clean": ("disk_clean",),
    "slurm_levers": ("slurm_levers",),
    "unattended": ("unattended",),
}
"""Benchmarks that take up to three quarters of an hour, or need root."""
ON_A_GPU: Mapping[str, Sequence[str]] = {"real_gpu": ("real_gpu",)}
"""Benchmarks that need a real card."""
BESIDE_PROGRAMS = {"peers": ("--executor", "--ansible-rulebook"), "webhook_throughput_matched": ("--executor",)}
"""Benchmarks of other programs, and the options with their paths."""
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")
_LIBRARIES = ("fastapi", "uvicorn", "uvloop", "pydantic", "msgspec", "redis", "sqlalchemy", "psycopg", "torch")
_PROGRAMS = (("redis-server", "--version"), ("prometheus-alertmanager", "--version"))
_BUSY = 0.25
"""Share of the cores: a higher load before a benchmark shows other work."""


@dataclass(frozen=True)
class Result:
    name: str
    command: str
    status: int
    """Exit status of its process; its figures count only if 0."""
    seconds: float
    load_before: float
    """Processes that ran or waited, over the minute before."""
    lines: tuple[str, ...]

    @property
    def is_disturbed(self) -> bool:
        return self.load_before > _BUSY * (os.cpu_count() or 1)


class EarlierResult(msgspec.Struct):
    """Compared parts of a kept result."""

    name: str
    lines: list[str]


class EarlierRun(msgspec.Struct):
    """Content for ``--compare``."""

    results: list[EarlierResult]


def run(name: str, words: Sequence[str]) -> Result:
    """Run one, and show its lines at once."""
    argv = [sys.executable, "-m", f"benchmarks.{words[0]}", *words[1:]]
    load, began, lines = os.getloadavg()[0], time.monotonic(), []
    print(f"== {name}  (load {load:.2f})", flush=True)
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    with subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            print(line, end="", flush=True)
    told = tuple(line for line in lines if line.strip())
    command = f"python -m benchmarks.{' '.join(words)}"
    return Result(name, command, process.returncode, time.monotonic() - began, load, told)


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    model = re.search(r"model name\s*: (.+)", _text(Path("/proc/cpuinfo")))
    memory = re.search(r"MemTotal:\s*(\d+) kB", _text(Path("/proc/meminfo")))
    commit = _printed("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    return {
        "processor": model[1] if model else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory[1]) / 2**20, 1) if memory else None,
        "kernel": platform.release(),
        "python": sys.version.partition(" (")[0],
        "sqlite": sqlite3.sqlite_version,
        "commit": commit,
        "libraries": {name: found for name in _LIBRARIES if (found := _version(name))},
        "programs": {name: printed for name, option in _PROGRAMS if (printed := _printed(name, option))},
    }


def figures(lines: Sequence[str]) -> dict[str, list[float]]:
    """Return the numbers in each line, by the line with ``#`` in their places."""
    return {_NUMBER.sub("#", line): [float(n.replace(",", "")) for n in _NUMBER.findall(line)] for line in lines}


def compared(result: Mapping[str, Any], earlier: EarlierResult) -> list[str]:
    """Return each line's ratios to an earlier run that differ by more than 2 %."""
    before = figures(earlier.lines)
    told = []
    for line, numbers in figures(result["lines"]).items():
        pairs = list(zip(numbers, before.get(line, []), strict=False))
        changed = [f"{now:g}/{then:g} = {now / then:.2f}" for now, then in pairs if then and abs(now / then - 1) > 0.02]
        if changed:
            told.append(f"{line.partition(':')[0]}: {', '.join(changed)}")
    return told


def table(document: Mapping[str, Any], earlier: EarlierRun | None) -> str:
    """Return the results as Markdown."""
    about = document["machine"]
    lines = [
        f"{document['at']}, commit {about['commit']}, {about['processor']}, {about['cores']} cores,"
        f" {about['memory_gib']} GiB, Linux {about['kernel']}, Python {about['python']}",
        "",
        "| benchmark | load before | figures | over the earlier run |",
        "|---|---|---|---|",
    ]
    then = {each.name: each for each in earlier.results} if earlier else {}
    for result in document["results"]:
        shown = [f"failed with status {result['status']}"] if result["status"] else list(result["lines"])
        against = compared(result, then[result["name"]]) if result["name"] in then else []
        load = f"{result['load_before']:.2f}{' (disturbed)' if result['disturbed'] else ''}"
        cells = (result["name"], load, "<br>".join(shown), "<br>".join(against))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _printed(*argv: str) -> str | None:
    if shutil.which(argv[0]) is None:
        return None
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).partition("\n")[0].strip() or None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _options() -> argparse.Namespace:
    known = {**BENCHMARKS, **LONG, **ON_A_GPU}
    parser = argparse.ArgumentParser(prog="benchmarks/run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(known)}")
    parser.add_argument("--long", action="store_true", help="also those that take longer than three minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the results there")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="with the results of an earlier run")
    add_programs(parser)
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are: {', '.join(known)}")
    on_a_gpu = ON_A_GPU if shutil.which("nvidia-smi") else {}
    usual = {**BENCHMARKS, **(LONG if options.long else {}), **on_a_gpu}
    options.chosen = {name: known[name] for name in options.names} or usual
    for name, programs in BESIDE_PROGRAMS.items():
        if name in options.chosen:
            options.chosen[name] = (*options.chosen[name], *program_words(options, programs))
    try:
        options.compare = options.compare and msgspec.json.decode(options.compare.read_bytes(), type=EarlierRun)
    except (OSError, msgspec.MsgspecError) as error:
        parser.error(f"--compare: these are no results of an earlier run: {error}")
    now = datetime.now(UTC)
    options.at = f"{now:%Y-%m-%d %H:%M} UTC"
    options.json = options.json or CACHE / "benchmarks" / f"{now:%Y%m%dT%H%M%SZ}.json"
    try:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.open("a").close()
    except OSError as error:
        parser.error(f"--json: the results cannot be kept there: {error}")
    return options


def main() -> None:
    options = _options()
    document: dict[str, Any] = {"at": options.at, "machine": machine(), "results": []}
    for name, words in options.chosen.items():
        result = run(name, words)
        document["results"].append({**asdict(result), "disturbed": result.is_disturbed})
        # After each, so that what was measured outlives one that is interrupted.
        options.json.write_text(json.dumps(document, indent=1))
    print(f"\n{table(document, options.compare)}\n\nkept in {options.json}")
    if failed := [each["name"] for each in document["results"] if each["status"]]:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
