"""Load test of the node's GPUs or CPUs by ``trainmedic-probe``, in processes without capabilities."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from trainmedic_agent.errors import GpuError
from trainmedic_agent.health import probe_child
from trainmedic_agent.health.checks import CheckResults, HealthValue, ValueKind, checked, unread
from trainmedic_agent.ports.gpus import Gpus

OPTIONS = ("--output", "json", "--memory", "80")  # percent of each GPU's free memory
_CHILD = (sys.executable, "-P", "-m", probe_child.__name__)
_LOAD_TEST = "burn"
CHECKS = frozenset({_LOAD_TEST, "all_reduce", "all_reduce_speed", "memory", "memory_speed"})
"""Names of checks that only a load test makes."""
_POLL_SECONDS = 0.2  # between looks whether to stop
_LONGEST_OUTPUT = 1 << 20  # bytes
_LONGEST_COMPLAINT = 300  # characters
_TRAINING_RUNS = 4  # exit status of the probe if a training uses a GPU
_PASSED_VARIABLES = re.compile(
    r"PATH|HOME|LANG|LC_\w+|TMPDIR|PYTHONPATH|LD_LIBRARY_PATH|TRAINMEDIC_NODE|(?:CUDA|NCCL|GLOO|OMP|NVIDIA|NVML)_\w+"
)
"""Variables for the probe. It needs no key and no address of Redis."""


class _Rate(Struct):
    bytes: Annotated[int, Meta(gt=0)]
    bytes_per_s: Annotated[float, Meta(gt=0)]
    is_right: bool


class _RankGroup(Struct):
    ranks: int
    all_reduce: list[_Rate]


class _MemoryTest(Struct):
    rank: int
    bytes: int
    bytes_per_s: Annotated[float, Meta(ge=0)]
    is_right: bool


class _Document(Struct):
    backend: str
    all: _RankGroup
    pairs: list[_RankGroup] = []
    memory: list[_MemoryTest] = []


def burn_checks(gpus: Gpus, probe: Sequence[str], seconds: float, is_over: Callable[[], bool]) -> CheckResults:
    """Run the probe for `seconds` at most, or until `is_over`. GPUs in use are left alone."""
    results = CheckResults()
    why_busy = _why_busy(gpus)
    if why_busy:
        results.checks.append(unread(_LOAD_TEST, "", f"not run: {why_busy}"))
        return results
    try:
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            status = _run([*_CHILD, *probe, *OPTIONS], seconds, is_over, output, errors)
            printed, complaint = _beginning_of(output), _beginning_of(errors)
    except OSError as error:
        results.checks.append(unread(_LOAD_TEST, "", error))
        return results
    if status is None:
        results.checks.append(unread(_LOAD_TEST, "", "stopped" if is_over() else f"no result in {seconds:.0f} s"))
        return results
    try:
        document = msgspec.json.decode(printed, type=_Document)
    except msgspec.MsgspecError:
        reason = (
            complaint.decode(errors="replace").strip()[-_LONGEST_COMPLAINT:] or f"the probe ended with status {status}"
        )
        results.checks.append(unread(_LOAD_TEST, "", reason if status != _TRAINING_RUNS else f"not run: {reason}"))
        return results
    return _results_of(document)


def _results_of(document: _Document) -> CheckResults:
    results = CheckResults()
    ranks = f"{document.all.ranks} ranks of {document.backend}"
    if document.all.ranks > 1 and document.all.all_reduce:
        largest = max(document.all.all_reduce, key=lambda each: each.bytes)
        observed = f"{largest.bytes / 1e6:g} MB at {largest.bytes_per_s / 1e9:.3g} GB/s by {ranks}"
        right = all(each.is_right for group in (document.all, *document.pairs) for each in group.all_reduce)
        observed = observed if right else f"wrong sums by {ranks}"
        results.checks.append(checked("all_reduce", "", right, observed, "correct sums"))
        results.values.append(
            HealthValue("all_reduce_speed", ranks, ValueKind.SPEED, largest.bytes_per_s / 1e9, "GB/s")
        )
    for test in document.memory:
        part = f"{document.backend} rank {test.rank}"
        if not test.bytes:
            results.checks.append(unread("memory", part, "no memory was free to test"))
            continue
        observed = f"{test.bytes / 1e9:.3g} GB read back {'correctly' if test.is_right else 'wrong'}"
        results.checks.append(checked("memory", part, test.is_right, observed, "what was written"))
        results.values.append(HealthValue("memory_speed", part, ValueKind.SPEED, test.bytes_per_s / 1e9, "GB/s"))
    if not results.checks:
        results.checks.append(unread(_LOAD_TEST, "", "the probe measured nothing"))
    return results


def _why_busy(gpus: Gpus) -> str | None:
    for info in gpus.inventory().gpus:
        with contextlib.suppress(GpuError):  # some drivers do not list processes; the probe looks at the memory
            if processes := gpus.processes(info.uuid):
                return f"process {processes[0]} uses GPU {info.index}"
    return None


def _run(
    command: Sequence[str], seconds: float, is_over: Callable[[], bool], output: IO[bytes], errors: IO[bytes]
) -> int | None:
    """Return the exit status, or None if it was ended. No process outlives the call."""
    until = time.monotonic() + seconds
    process = subprocess.Popen(  # noqa: S603 - our own program
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=_environment(), start_new_session=True
    )
    try:
        while time.monotonic() < until and not is_over():
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_SECONDS)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if _PASSED_VARIABLES.fullmatch(name)}


def _beginning_of(file: Any) -> bytes:
    file.seek(0)
    content: bytes = file.read(_LONGEST_OUTPUT)
    return content
