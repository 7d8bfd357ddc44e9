"""From lines to facts: what is kept of them is bounded, however long a log is."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tests.unit.diagnosis.test_scenes import shipped_rules
from trainmedic_logs.diagnosis import collecting
from trainmedic_logs.diagnosis.collecting import Collector
from trainmedic_logs.diagnosis.judge import diagnose
from trainmedic_logs.domain.finding import CauseClass, Origin

_WRITTEN = datetime(2026, 5, 4, 12, tzinfo=UTC)


def _caught(number: int) -> list[str]:
    raised = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', f"ValueError: sample {number}"]
    return raised + ["{'loss': 2.1, 'epoch': 0.1}"] * 3


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that a test comes to in a moment."""
    monkeypatch.setattr(collecting, "_MOST_NEW", 100)
    monkeypatch.setattr(collecting, "_MOST_FINDINGS", 400)


def test_exceptions_that_training_caught_do_not_accumulate() -> None:
    """The steps prove one exception after another to be harmless, and the last one ends the training."""
    caught = [line.encode() for number in range(500) for line in _caught(number)]
    last = [line.encode() for line in [*_caught(0)[:2], "KeyError: 'labels'"]]
    collector = Collector(shipped_rules())
    collector.read_stream(Origin("training", rank=3, stream="a"), [*caught, *last], _WRITTEN)
    facts = collector.facts()
    assert len(facts.findings) < 110
    assert len(facts.outlived) < 110
    verdict = diagnose(facts)
    assert (verdict.cause, verdict.ranks) == (CauseClass.CODE, (3,))
    assert "KeyError" in verdict.evidence[0].line


def test_endless_kills_by_the_kernel_do_not_accumulate() -> None:
    """Each kill is of another process; the newest are kept."""
    began = datetime(2026, 5, 3, tzinfo=UTC)
    lines = [
        f"kern  :err   : {(began + timedelta(seconds=number)).isoformat()} Out of memory: Killed process {number} (a)"
        for number in range(1_000)
    ]
    collector = Collector(shipped_rules())
    collector.read_stream(Origin("kernel", node="node-1", stream="k"), [line.encode() for line in lines], _WRITTEN)
    findings = collector.facts().findings
    assert 190 < len(findings) <= 5110
    assert findings[-1].fields["pid"] == "999"


@pytest.mark.parametrize("rise", ["1", "true", '{"loss_before": 1}', '1, "loss_before": "low", "loss_now": null'])
def test_a_job_may_print_a_member_with_the_name_of_ours(rise: str) -> None:
    """Of any type, it is not taken for our finding of a rising loss, and it stops no diagnosis."""
    lines = [f'{{"event": "step", "step": {number}, "loss": 2.0, "loss_rise": {rise}}}' for number in range(5)]
    collector = Collector(shipped_rules())
    collector.read_stream(Origin("training", stream="a"), [line.encode() for line in lines], _WRITTEN)
    assert collector.facts().loss_rise is None


def test_step_counts_in_the_billions_are_supported() -> None:
    """Reinforcement learning counts the steps of its environments."""
    lines = [
        f'{{"time": "2026-05-04T11:00:0{number}Z", "event": "step", "step": {10**9 + number}}}' for number in range(5)
    ]
    collector = Collector(shipped_rules())
    collector.read_stream(Origin("training", rank=0, stream="a"), [line.encode() for line in lines], _WRITTEN)
    assert collector.facts().ranks[0].last_step == 10**9 + 4


def test_no_line_invents_millions_of_ranks() -> None:
    """A job has fewer than a million; each silent one would be looked for."""
    collector = Collector(shipped_rules())
    line = b'{"event": "step", "step": 1, "rank": 9999999}'
    collector.read_stream(Origin("training", stream="a"), [line], _WRITTEN)
    assert not collector.facts().silent_ranks


@pytest.mark.parametrize("how", ["crashed with exit code", "terminated with code", "terminated with exit code"])
def test_the_exit_of_a_rank_is_read_from_its_line(how: str) -> None:
    collector = Collector(shipped_rules())
    collector.read_stream(Origin("launcher", stream="a"), [f"Rank 3 {how} 1".encode()], _WRITTEN)
    assert [(ended.rank, ended.code) for ended in collector.facts().exits] == [(3, 1)]
