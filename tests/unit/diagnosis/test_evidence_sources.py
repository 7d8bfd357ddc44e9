"""Attributions of single evidence sources: they name no GPU, node or rank that the facts leave open."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.diagnosis import evidence_sources, judge
from trainmedic_logs.diagnosis.exits import Exit
from trainmedic_logs.diagnosis.facts import Facts, RankFacts
from trainmedic_logs.diagnosis.verdict import Confidence
from trainmedic_logs.diagnosis.window import select_relevant
from trainmedic_logs.domain.finding import CauseClass, Finding, Origin, Role

AT = datetime(2026, 1, 31, 12, tzinfo=UTC)
RANKS: Mapping[int, RankFacts] = {rank: RankFacts(f"node-{rank // 2}", last_line_at=AT) for rank in range(4)}


def finding(rule: str, role: Role, cause: CauseClass, origin: Origin, **members: Any) -> Finding:
    target = members.pop("target", Target(TargetKind.JOB, job="llm-1"))
    return Finding(rule, rule, role, cause, target, origin, AT, AT, "a line", **members)


@pytest.mark.parametrize(
    ("of_rank", "of_finding", "are_one"),
    [
        ("GPU-5f3a", "GPU-5f3a", True),
        ("GPU-5F3A", "GPU-5f3a", True),
        ("GPU-5f3a", "GPU-77aa", False),
        ("00000000:18:00.0", "0000:18:00", True),
        ("18:00.0", "0000:18:00.0", True),
        ("0000:19:00.0", "0000:18:00.0", False),
        ("GPU-5f3a", "0000:18:00.0", True),
        ("MIG-0a1b", "0000:18:00.0", True),
        ("MIG-0a1b", "GPU-5f3a", True),
        ("MIG-GPU-5f3a/7/0", "GPU-5f3a", True),
        ("MIG-GPU-5f3a/7/0", "GPU-77aa", False),
    ],
)
def test_a_gpu_is_excluded_only_by_a_name_of_the_same_kind(of_rank: str, of_finding: str, are_one: bool) -> None:
    """The UUID of a MIG instance excludes no card, and a PCI address excludes no UUID."""
    xid = finding(
        "nvidia-xid",
        Role.ROOT,
        CauseClass.GPU,
        Origin("kernel", "node-0"),
        target=Target(TargetKind.GPU, node="node-0", gpu=of_finding),
    )
    facts = Facts("llm-1", findings=[xid], ranks={0: RankFacts("node-0", of_rank, last_line_at=AT)})
    found = list(evidence_sources.kernel(facts, select_relevant(facts)))
    assert [each.ranks for each in found] == ([frozenset({0})] if are_one else [])


def test_exits_on_several_nodes_have_no_first_one() -> None:
    """They were reported by launchers that state no rank."""
    ends = [Exit("accelerate", signal=signal.SIGSEGV, node=f"node-{number}", at=AT) for number in range(2)]
    verdict = judge.diagnose(Facts("llm-1", exits=ends, ranks=RANKS, is_known_to_fail=True))
    assert "node-0" not in verdict.summary
    assert not any("it ended first" in each.why for each in verdict.evidence)
    alone = judge.diagnose(Facts("llm-1", exits=ends[:1], ranks=RANKS, is_known_to_fail=True))
    assert "failed on node-0: it ended first" in alone.summary


def test_a_rank_without_a_line_is_reported_as_such() -> None:
    """As far as is known, it did not wait."""
    timeout = finding(
        "nccl-timeout",
        Role.CASCADE,
        CauseClass.HANG,
        Origin("training", "node-0", "llm-1", rank=0),
        ranks=frozenset({0, 1, 2}),
    )
    unread = {**RANKS, 3: RankFacts("node-1")}
    facts = Facts("llm-1", findings=[timeout], ranks=unread, is_reported_hang=True, is_known_to_fail=True)
    verdict = judge.diagnose(facts)
    assert (verdict.ranks, verdict.confidence) == ((3,), Confidence.MEDIUM)
    (why,) = (each.why for each in verdict.evidence if "did not" in each.why)
    assert why == "3 of 4 ranks waited for or lost another rank, and rank 3 did not, but no line of rank 3 was read"


@pytest.mark.parametrize(("steps", "reached"), [((10,), "step 10"), ((10, 12), "steps 10 to 12")])
def test_each_rank_left_behind_has_its_own_last_step(steps: tuple[int, ...], reached: str) -> None:
    """The sentence names the range of their last steps."""
    ranks = {rank: RankFacts("node-0", last_step=20, last_line_at=AT) for rank in range(12)}
    ranks |= {rank: RankFacts("node-1", last_step=step, last_line_at=AT) for rank, step in enumerate(steps, 20)}
    verdict = judge.diagnose(Facts("llm-1", ranks=ranks, is_reported_hang=True, is_known_to_fail=True))
    (why,) = (each.why for each in verdict.evidence if "had reached" in each.why)
    assert why.endswith(f"had reached {reached}")


def test_an_impossible_rank_number_creates_no_silent_ranks() -> None:
    """A presence, record or dump can state any number."""
    facts = Facts(ranks={1: RankFacts(), 5_000_000: RankFacts()})
    assert facts.silent_ranks == (0, 1)
