"""A file system, or an opener, that does not answer: whoever looks at the node sees it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.programs import eventually
from tests.unit.agent.log_reading.reading import NODE, RULES, policy_of
from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.database import AgentDatabase
from trainmedic_agent.log_opening.node_files import Listing, NamedBy
from trainmedic_agent.log_opening.own_files import OwnFiles
from trainmedic_agent.log_reading import log_reader
from trainmedic_agent.log_reading.arrivals import ArrivalIndex
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


def test_an_unopenable_kernel_log_is_a_problem_until_it_opens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Opening is retried every second, and logged once."""
    kmsg, unused = tmp_path / "kmsg", cast(Any, None)
    database = AgentDatabase(tmp_path / "state")
    reader = LogReader(
        ReadingContext(NODE, database, counters := AgentCounters()),
        policy_of(kernel="kmsg"),
        NodeBoot(NODE, "boot-1", datetime.now(UTC)),
        lambda _: None,
        read_dumps=unused,
        port=Port(),
        files=OwnFiles(),
        arrivals=ArrivalIndex(database),
        kmsg=str(kmsg),
        records=(),
    )
    reader.runner.use(RULES)
    for _ in range(3):
        assert reader._read_kernel() == 1.0
    problem = "the kernel's log cannot be read by kmsg: No such file or directory"
    assert reader.problem == problem
    logged = [record for record in caplog.records if record.getMessage() == "cannot read the kernel's log"]
    assert [record.__dict__["reason"] for record in logged] == [problem]
    assert counters.loop_errors.all() == {"log-kernel": 3}
    kmsg.touch()
    reader._read_kernel()
    assert reader.problem == ""
    database.close()


def test_a_scan_that_does_not_end_is_a_problem_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process still answers heartbeats, so nothing else reports it."""
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
        arrivals=ArrivalIndex(database),
    )
    reader.start()
    eventually(lambda: "does not respond" in reader.problem, 60, "the problem", every=0.02)
    monkeypatch.setattr(log_reader, "HUNG_SECONDS", 30.0)
    files.answers.set()
    eventually(lambda: not reader.problem, 60, "the end of the problem", every=0.02)
    reader.stop(5.0)
    database.close()
