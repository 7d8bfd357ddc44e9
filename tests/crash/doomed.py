"""A server that dies at a write boundary, and the choice of boundaries.

Each boundary costs seconds, so that a run of the tests takes one by chance out of each of some equal
parts; ``BOUNDARIES=all`` in the environment takes every one.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.live import Answer, Server

ALL = "all"
WANTED = os.environ.get("BOUNDARIES", "")
"""``all``, or how many boundaries are tried."""


class DoomedServer(Server):
    """A server that dies at a boundary, if it comes to that, and is started again when it is asked the next time."""

    def __init__(
        self,
        directory: Path,
        redis_url: str,
        fatal: int,
        playbook: str,
        *options: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.log = directory / "boundaries.log"
        self.deaths = 0
        self._fatal = f"{fatal:d}"
        program = (Path(__file__).with_name("doomed_server.py"), self._fatal, self.log)
        super().__init__(directory, playbook, "--redis", redis_url, *options, program=program, environment=environment)

    def start(self, wait: bool = False, **environment: str) -> None:
        super().start(wait, **environment)  # it may die before it answers

    def ask(self, path: str, body: Mapping[str, Any] | None = None, timeout: float = 10) -> Answer:
        assert self.program is not None
        if self.program.process.poll() is not None:
            assert self.program.process.returncode == -9, self.program.tail()
            self.deaths += 1
            self.argv[self.argv.index(self._fatal)] = "0"
            self.start()
        return super().ask(path, body, timeout)


def chosen(known: int, parts: int) -> Iterator[int]:
    """The numbers of the boundaries to die at: all there are, or one out of each of so many equal parts of `known`."""
    if WANTED == ALL:
        yield from itertools.count(1)
        return
    for part in range(parts):
        yield random.randint(part * known // parts + 1, max((part + 1) * known // parts, 1))


def least(known: int, parts: int) -> int:
    """How many boundaries must have been survived: two, or a tenth, may lie behind the end of a run with fewer of them,
    because commits of a busy moment share one."""
    wanted = known if WANTED == ALL else parts
    return min(wanted - 2, wanted * 9 // 10)
