"""Runs of a playbook's tests in a limited process without settings and secrets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import sys
import time
from pathlib import Path

from trainmedic_core import yaml_files
from trainmedic_core.problems import FileProblem
from trainmedic_server.errors import Conflict, NotFound
from trainmedic_server.ports.playbook_tests import PlayedTest, PlayedTests

_SECONDS = 60.0
_MOST_STARVED = 600.0  # seconds without a core that are not counted
_MOST_RUNNING = 1
_MOST_WAITING = 4
_MEMORY_BYTES = 1 << 30
_PRINTED_BYTES = 4 << 20
_KEPT_NAMES = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "TMPDIR")
_NICE = 10
_OOM_SCORE = "1000"  # If memory runs out, the kernel ends this process first.


class PlaybookTestProcess:
    """`seconds` limits one file of tests."""

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._turns = asyncio.Semaphore(_MOST_RUNNING)
        self._requested = 0

    async def run_tests_of(self, source: str) -> PlayedTests:
        playbook = Path(source)
        tests = playbook.with_name(f"{playbook.stem}{yaml_files.TEST_SUFFIX}{playbook.suffix}")
        if not yaml_files.exists(tests):
            raise NotFound(f"The playbook has no tests: {tests} does not exist.")
        if self._requested >= _MOST_RUNNING + _MOST_WAITING:
            raise Conflict("Too many tests of playbooks are running; try again in a minute.")
        self._requested += 1
        try:
            async with self._turns:
                return await self._run(str(tests))
        finally:
            self._requested -= 1

    async def _run(self, tests: str) -> PlayedTests:
        # -P: do not import from the working directory.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "trainmedic_server", "playbook", "test", "--json", tests),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT_NAMES if name in os.environ},
            start_new_session=True,
        )
        try:
            _limit_resources(process.pid, self._seconds)
            printed = await self._read_in_time(process)
        except TimeoutError:
            return PlayedTests(tests, unfinished=f"The tests took over {self._seconds:g} s and were stopped.")
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        return _outcome(tests, printed)

    async def _read_in_time(self, process: asyncio.subprocess.Process) -> bytes:
        """Raises TimeoutError after the limit, which excludes time without a core: the process has low priority."""
        reading = asyncio.create_task(_read(process.stdout))
        began = time.monotonic()
        try:
            while True:
                starved = min(_seconds_without_core(process.pid), _MOST_STARVED)
                left = self._seconds + starved - (time.monotonic() - began)
                if left <= 0:
                    raise TimeoutError
                done, _ = await asyncio.wait({reading}, timeout=left)
                if done:
                    return reading.result()
        finally:
            reading.cancel()


def _seconds_without_core(pid: int) -> float:
    """Return the seconds in which a process could run but had no core, 0 if unknown."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _limit_resources(pid: int, seconds: float) -> None:
    with contextlib.suppress(OSError):  # It has ended, or the system forbids it. Its time is limited here.
        os.setpriority(os.PRIO_PROCESS, pid, _NICE)
        if sys.platform == "linux":
            resource.prlimit(pid, resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
            resource.prlimit(pid, resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 1))
            Path(f"/proc/{pid}/oom_score_adj").write_text(_OOM_SCORE)


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    assert stream is not None
    printed = bytearray()
    while piece := await stream.read(1 << 16):
        printed += piece
        if len(printed) > _PRINTED_BYTES:
            return b""  # No outcome.
    return bytes(printed)


def _outcome(tests: str, printed: bytes) -> PlayedTests:
    try:
        (file,) = json.loads(printed)["files"]
    except (ValueError, KeyError, TypeError):
        return PlayedTests(tests, unfinished="The tests ended without an outcome: they need too much memory or time.")
    played = tuple(
        PlayedTest(
            each["name"], each["line"], each["seconds"], tuple(FileProblem(**failure) for failure in each["failures"])
        )
        for each in file["tests"]
    )
    return PlayedTests(tests, played, tuple(FileProblem(**problem) for problem in file["problems"]))
