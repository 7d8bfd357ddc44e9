"""A file system, or an opener, that does not answer: whoever looks at the node sees it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import eventually
from tests.unit.agent.log_reading.reading import NODE, policy_of
from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.database import AgentDatabase
from trainmedic_agent.log_opening.node_files import Listing, NamedBy
from trainmedic_agent.log_opening.own_files import OwnFiles
from trainmedic_agent.log_reading import log_reader
from trainmedic_agent.log_reading.log_reader import LogReader
from trainmedic_agent.log_reading.log_store import NodeBoot
from trainmedic_agent.log_reading.reading_context import ReadingContext


class HangingFiles(OwnFiles):
    def __init__(self) -> None:
        self.answers = threading.Event()

    def listing(self, path: str, most: int, named_by: NamedBy | None = None) -> Listing:
        self.answers.wait()
        return super().listing(path, most, named_by)


class Port:
    def send_findings(self, updates: Sequence[tuple[int, bytes]]) -> None: ...


def test_a_scan_that_does_not_end_is_a_problem_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process answers heartbeats all the time, so nothing else tells of it."""
    monkeypatch.setattr(log_reader, "HUNG_SECONDS", 0.2)
    files, port = HangingFiles(), Port()
    database = AgentDatabase(tmp_path / "state")
    boot = NodeBoot(NODE, "boot-1", datetime.now(UTC))
    unused: Any = None
    reader = LogReader(
        ReadingContext(NODE, database, AgentCounters()),
        policy_of(roots=[str(tmp_path)]),
        boot,
        lambda _: None,
        read_dumps=unused,
        port=port,
        files=files,
    )
    reader.start()
    eventually(lambda: "does not respond" in reader.problem, 60, "the problem", every=0.02)
    monkeypatch.setattr(log_reader, "HUNG_SECONDS", 30.0)
    files.answers.set()
    eventually(lambda: not reader.problem, 60, "the end of the problem", every=0.02)
    reader.stop(5.0)
    database.close()
