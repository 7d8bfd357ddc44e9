"""Files whose owner has set a time of writing that only some file systems store, such as tmpfs, btrfs and NFS."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from datetime import UTC
from pathlib import Path

import msgspec
import pytest

from tests.support.search_in_process import searcher_of
from tests.unit.agent.log_reading.reading import NODE
from tests.unit.agent.log_reading.test_dumps import Node, write_dump
from trainmedic.wire.log_layout import AttemptLogs
from trainmedic_agent.log_opening.guarded_files import GuardedFiles
from trainmedic_agent.log_opening.node_files import FileFacts
from trainmedic_agent.log_opening.opener import FileOpener
from trainmedic_agent.log_opening.opener_client import OpenerClient
from trainmedic_agent.log_reading.discovery import Discovery
from trainmedic_agent.log_reading.log_policy import LogsPolicy
from trainmedic_logs.domain import file_times
from trainmedic_logs.domain.log_search import LogQuery

FAR = 2**61
"""Seconds since 1970. In nanoseconds they have more than 64 bits."""


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory in memory if there is one. Other file systems store an earlier time, and prove less."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as made:
        yield Path(made).resolve()


@pytest.mark.parametrize("seconds", [FAR, -FAR])
def test_a_modification_time_is_bounded(seconds: int) -> None:
    """It fits into an opener message and a `datetime`."""
    facts = os.stat_result((0o100644, 1, 1, 1, 0, 0, 0, 0, 0, 0), {"st_mtime_ns": seconds * 10**9})
    msgspec.msgpack.encode(FileFacts.of(facts))
    assert file_times.written_at(facts).tzinfo is UTC


@pytest.mark.parametrize("seconds", [FAR, -FAR])
def test_a_job_with_an_extreme_time_hides_no_other_job(root: Path, seconds: int) -> None:
    for job in ("hostile", "normal"):
        log = AttemptLogs.of(root, job, 1).launcher(NODE)
        log.parent.mkdir(parents=True)
        log.write_text("a line\n")
    for path in (log.parent.parent.parent / "hostile", AttemptLogs.of(root, "hostile", 1).launcher(NODE)):
        os.utime(path, (0, seconds))
    own, far = socket.socketpair()
    opener = threading.Thread(target=FileOpener(GuardedFiles([str(root)])).serve, args=(far,))
    opener.start()
    client = OpenerClient(own)
    scan = Discovery(LogsPolicy(roots=(str(root),)), NODE, files=client).scan((), lambda: False)
    client.close()
    opener.join(60)
    assert {file.origin.job for file in scan.files if file.origin is not None} == {"hostile", "normal"}


def test_a_dump_with_an_extreme_time_hides_no_dump_of_another_job(root: Path, tmp_path: Path) -> None:
    for job in ("hostile", "normal"):
        attempt = AttemptLogs.of(root / "logs", job, 1)
        attempt.path.mkdir(parents=True)
        attempt.launcher(NODE).touch()
        path = write_dump(attempt, 0)
        if job == "hostile":
            os.utime(path, (0, FAR))
    node = Node(tmp_path)
    node.discovery = Discovery(LogsPolicy(roots=(str(root / "logs"),)), NODE)
    node.look()
    assert "normal" in {finding.origin.job for finding, _ in node.told.values()}


@pytest.mark.parametrize("seconds", [FAR, -FAR])
def test_a_file_with_an_extreme_time_is_searched(root: Path, seconds: int) -> None:
    """Its lines have the times that they state, and the search does not fail."""
    log = AttemptLogs.of(root, "hostile", 1).launcher(NODE)
    log.parent.mkdir(parents=True)
    log.write_text("2026-01-01 00:00:00,000 a line\n")
    os.utime(log, (0, seconds))
    since = file_times.written_at(os.stat_result((0,) * 10, {"st_mtime_ns": 0}))
    page = searcher_of(LogsPolicy(roots=(str(root),)), NODE, zone=UTC).page(LogQuery("hostile", since), {})
    assert page.is_end
