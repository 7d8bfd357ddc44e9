"""Flight recorder dumps on a node: which are read, when, and what is said of them."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.unit.agent.log_reading.reading import NODE, policy_of
from tests.unit.agent.log_reading.test_discovery import say, scan, touch
from trainmedic.wire.log_layout import AttemptLogs
from trainmedic_agent.log_reading.budgets import BudgetOwner, HourlyBudget
from trainmedic_agent.log_reading.discovery import Discovery
from trainmedic_agent.log_reading.dumps import MOST_BYTES, DumpReading
from trainmedic_logs.diagnosis.flight_recorder import digest
from trainmedic_logs.domain.finding import Excerpt, Finding
from trainmedic_logs.files import dump_reader

PUBLISHED = Path(__file__).parents[2] / "diagnosis" / "nvidia_dumps" / "lock_gil_1st"


class Node:
    """The reading of dumps below `root`, by its rounds; `told` is the last word on each finding."""

    def __init__(self, root: Path, node: str = NODE) -> None:
        self.discovery = Discovery(policy_of(roots=[str(root)]), node)
        self.now = datetime.now(UTC)
        self.told: dict[str, tuple[Finding, Excerpt]] = {}
        self.times = self.writes = 0
        self.can_take = True
        self.reading = DumpReading(self, dump_reader.read_raw, lambda: self.now)

    def report(self, finding: Finding, excerpt: Excerpt, owner: BudgetOwner) -> None:
        self.times += 1
        self.told[finding.id] = (finding, excerpt)

    def store_due(self) -> None:
        self.writes += 1

    def look(self, rounds: int = 3) -> None:
        for _ in range(rounds):
            self.reading.take_scan(scan(self.discovery))
            while self.reading.read() == 0.0:
                pass


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptLogs:
    made = AttemptLogs.of(tmp_path / "logs", "llm-1", 2)
    touch(made.launcher(NODE))
    return made


def write_dump(attempt: AttemptLogs, rank: int) -> Path:
    path = touch(attempt.dump(rank))
    path.write_bytes((PUBLISHED / f"_dump_{rank}").read_bytes())
    return path


def test_the_dumps_of_an_attempt_form_one_growing_finding(tmp_path: Path, attempt: AttemptLogs) -> None:
    """The finding names the job, the attempt and the ranks, and is the same after a restart."""
    for rank in range(6):
        write_dump(attempt, rank)
    node = Node(tmp_path / "logs")
    node.look(1)
    assert not node.told  # they may still be written
    node.look()
    ((finding, excerpt),) = node.told.values()
    assert (finding.origin.job, finding.origin.attempt, finding.origin.node) == ("llm-1", 2, NODE)
    assert (finding.ranks, finding.count) == (frozenset(range(6)), 6)
    write_dump(attempt, 9)
    node.look()
    ((finding, excerpt),) = node.told.values()
    dumps, refused = digest.read(excerpt.lines, 2)
    assert ([each.rank for each in dumps], refused) == ([*range(6), 9], {})
    before = node.times
    node.look()
    assert node.times == before
    again = Node(tmp_path / "logs")
    again.look()
    assert again.told == node.told


def test_unreadable_dumps_are_reported_and_block_nothing(tmp_path: Path, attempt: AttemptLogs) -> None:
    """Pickled classes, oversized dumps and garbage are reported; links, pipes and old dumps are skipped."""
    write_dump(attempt, 0)
    touch(attempt.dump(1)).write_bytes(b"cos\nsystem\n(S'touch /tmp/no'\ntR.")
    with touch(attempt.dump(2)).open("wb") as large:
        large.truncate(MOST_BYTES + 1)
    touch(attempt.dump(3), "{}")
    attempt.dump(4).symlink_to(attempt.dump(0))
    os.mkfifo(attempt.dump(5))
    old = write_dump(attempt, 6)
    os.utime(old, (0, 0))
    node = Node(tmp_path / "logs")
    node.look()
    ((_, excerpt),) = node.told.values()
    dumps, refused = digest.read(excerpt.lines, 2)
    assert [each.rank for each in dumps] == [0]
    assert "os.system" in refused[1]
    assert "bytes" in refused[2]
    assert refused.keys() == {1, 2, 3}


def test_dumps_on_a_shared_file_system_are_assigned_to_nodes(tmp_path: Path, attempt: AttemptLogs) -> None:
    """A rank's sources file decides; if several nodes have launchers, other dumps belong to no node."""
    touch(attempt.launcher("n2"))
    for rank in (8, 9):
        write_dump(attempt, rank)
    say(attempt)
    assert json.loads(attempt.sources(NODE, 0).read_text())["rank"] == 8
    for name, ranks in ((NODE, [frozenset({8})]), ("n2", [])):
        node = Node(tmp_path / "logs", name)
        node.look()
        assert [finding.ranks for finding, _ in node.told.values()] == ranks


def test_dumps_are_not_read_while_findings_cannot_be_accepted(tmp_path: Path, attempt: AttemptLogs) -> None:
    """Before rules arrive, nothing is read; a dump older than an hour no longer counts afterwards."""
    write_dump(attempt, 0)
    node = Node(tmp_path / "logs")
    node.can_take = False
    node.look()
    node.can_take, node.now = True, node.now + timedelta(hours=2)
    node.look()
    assert not node.told


def test_dumps_without_budget_are_refused_at_once(tmp_path: Path, attempt: AttemptLogs) -> None:
    """Their number causes no disk writes, which would delay others."""
    for rank in range(20):
        touch(attempt.dump(rank), "no dump")
    node = Node(tmp_path / "logs")
    node.reading._seconds = HourlyBudget(0.0)
    node.look()
    ((_, excerpt),) = node.told.values()
    assert len(excerpt.lines) == 20
    assert (node.times, node.writes) == (1, 1)
