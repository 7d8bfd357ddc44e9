"""The record of a node's health: what lasts, and what the metrics show of it."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.node_tree import PORT, NodeTree
from trainmedic_agent.errors import JournalUnavailable
from trainmedic_agent.health import health_metrics, record
from trainmedic_agent.health.baseline import CounterMark, ValueHistory
from trainmedic_agent.health.checker import Examination, HealthChecker, RecordedHealth
from trainmedic_agent.health.checks import HealthCheck, HealthReport, HealthVerdict, Level
from trainmedic_agent.health.record import HealthRecord, recorded_values
from trainmedic_agent.health.sysfs import NodeRoots
from trainmedic_agent.journal import Journal
from trainmedic_agent.ports.gpus import Inventory

AT = datetime(2026, 11, 1, tzinfo=UTC)
LATER = AT + timedelta(hours=1)
HISTORY = ValueHistory((1.0, 2.5), AT, (CounterMark(AT, 7), CounterMark(AT, 9)))


def report(level: Level = Level.QUICK, *verdicts: HealthVerdict, at: datetime = AT) -> HealthReport:
    return HealthReport(level, at, tuple(HealthCheck("link", "eth0", verdict, "a", "b") for verdict in verdicts))


def test_values_and_results_survive_agent_restarts(tmp_path: Path) -> None:
    """All of a value's history and the last result of each level are kept."""
    journal = Journal(tmp_path)
    health = HealthRecord(journal)
    health.add(report(Level.QUICK, HealthVerdict.FAILED), {"link_rate eth0": HISTORY})
    health.add(report(Level.BURN, HealthVerdict.OK), {})
    assert recorded_values(tmp_path) == {"link_rate eth0": HISTORY}
    journal.close()
    journal = Journal(tmp_path)
    again = HealthRecord(journal)
    assert again.histories == {"link_rate eth0": HISTORY}
    assert again.results == {
        Level.QUICK: report(Level.QUICK, HealthVerdict.FAILED),
        Level.BURN: report(Level.BURN, HealthVerdict.OK),
    }
    journal.close()


def test_the_record_is_read_in_a_directory_of_any_name(tmp_path: Path) -> None:
    """The name may contain characters with a meaning in a URI."""
    directory = tmp_path / "50% of #1?"
    directory.mkdir()
    with contextlib.closing(Journal(directory)) as journal:
        HealthRecord(journal).add(report(), {"link_rate eth0": HISTORY})
        assert recorded_values(directory) == {"link_rate eth0": HISTORY}


def test_one_part_can_be_forgotten_alone(journal: Journal, tmp_path: Path) -> None:
    health = HealthRecord(journal)
    health.add(report(), {"link_rate eth0": HISTORY, "link_downs eth0": HISTORY, "link_rate eth01": HISTORY})
    assert health.forget("eth0")
    assert not health.forget("eth0")
    assert list(health.histories) == list(recorded_values(tmp_path)) == ["link_rate eth01"]


def test_the_number_of_values_is_bounded(journal: Journal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Values of the parts that have been gone the longest are deleted."""
    monkeypatch.setattr(record, "MOST_VALUES", 2)
    health = HealthRecord(journal)
    later, latest = (ValueHistory((1.0,), AT + timedelta(days=days)) for days in (1, 2))
    health.add(report(), {"a 1": HISTORY, "a 2": latest})
    health.add(report(), {"a 3": later})
    assert health.histories == recorded_values(tmp_path) == {"a 2": latest, "a 3": later}


def test_there_is_no_record_without_an_agent(tmp_path: Path) -> None:
    """An older agent has none either; a damaged file is an error."""
    assert recorded_values(tmp_path) == {}
    Journal(tmp_path).close()
    assert recorded_values(tmp_path) == {}
    (tmp_path / "agent.db").write_bytes(b"not a database" * 100)
    with pytest.raises(JournalUnavailable, match="cannot be read"):
        recorded_values(tmp_path)


def shown(health: HealthRecord, now: datetime) -> dict[tuple[str, ...], float]:
    return {
        tuple(sample.labels.values()): sample.value
        for family in health_metrics.families(health, now)
        for sample in family.samples
    }


def test_the_metric_has_the_worst_verdict_of_each_check(journal: Journal) -> None:
    """There is one series for each check of a part."""
    health = HealthRecord(journal)
    health.add(report(Level.QUICK, HealthVerdict.OK, HealthVerdict.UNKNOWN, HealthVerdict.DEGRADED), {})
    assert shown(health, AT + timedelta(minutes=1)) == {
        ("quick", "link", "eth0", "unknown"): 1,
        ("quick",): AT.timestamp(),
    }


def test_an_old_quick_result_is_unknown(journal: Journal) -> None:
    """Its checks may hang. A load test's result stays, because nothing repeats it."""
    health = HealthRecord(journal)
    health.add(report(Level.QUICK, HealthVerdict.OK), {})
    health.add(report(Level.BURN, HealthVerdict.OK), {})
    assert shown(health, AT + timedelta(minutes=16)) == {
        ("burn", "link", "eth0", "ok"): 1,
        ("quick", "health", "", "unknown"): 1,
        ("burn",): AT.timestamp(),
        ("quick",): AT.timestamp(),
    }


def test_a_commands_requirement_is_not_a_state_of_the_node(journal: Journal, tmp_path: Path) -> None:
    """Alerts show the node's state."""
    record, tree = HealthRecord(journal), NodeTree(tmp_path / "tree")
    gpus = Mock()
    gpus.inventory.return_value = Inventory()
    health = RecordedHealth(HealthChecker(gpus, NodeRoots(tree.sys, tree.proc)), record)
    report = health.examine(Examination(min_gbps=1000))
    assert [str(check) for check in report.checks if check.name == "min_gbps"] == report.faults
    assert report.verdict is HealthVerdict.FAILED
    assert record.results[Level.QUICK].verdict is HealthVerdict.OK
    assert record.histories[f"port_rate {PORT}"].samples == (400,)


def test_a_load_test_ended_by_a_stop_replaces_no_result(journal: Journal) -> None:
    """The command resumes at the agent's next start; until then the node's last result stays."""
    record, checker = HealthRecord(journal), Mock()
    passed, stopped = (
        HealthReport(Level.BURN, at, (HealthCheck("gpus", "", HealthVerdict.OK, "8", "8"), burn_check))
        for at, burn_check in (
            (AT, HealthCheck("burn", "", HealthVerdict.OK, "a", "b")),
            (LATER, HealthCheck("burn", "", HealthVerdict.UNKNOWN, "stopped", "b")),
        )
    )
    health = RecordedHealth(checker, record)
    checker.examine.return_value = passed, {}
    health.examine(Examination(Level.BURN))
    checker.examine.return_value = stopped, {}
    assert health.examine(Examination(Level.BURN, is_over=lambda: True)) == stopped
    assert record.results[Level.BURN].verdict is HealthVerdict.OK
    assert record.results[Level.QUICK].at == LATER
