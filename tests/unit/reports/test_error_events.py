"""Counting what a job's logs said of memory and network: each event once, and whether it ended the job."""

from __future__ import annotations

from datetime import timedelta

import pytest
from msgspec.structs import replace

from tests.support.clocks import START
from tests.support.findings import of_kernel, of_training
from trainmedic_logs.domain.finding import CauseClass, Finding, Role
from trainmedic_logs.domain.known_finding import EpisodeKey, KnownFinding, merge_update, new_finding
from trainmedic_server.ports.verdicts import VerdictRecord
from trainmedic_server.reports.error_events import NETWORK, OUT_OF_MEMORY, error_count
from trainmedic_server.reports.failures import FailureRecord


def known(finding: Finding, number: int = 0) -> KnownFinding:
    """What the server knows of it."""
    key = EpisodeKey(finding.origin.node, f"{finding.id}-{number}")
    return merge_update(new_finding(f"finding-{number}-{finding.rule}", finding, START), None, key, finding, START)[0]


def oom(minutes: float, rank: int = 0, count: int = 1, lasting: float = 0.0, rule: str = "cuda-oom") -> KnownFinding:
    at = START + timedelta(minutes=minutes)
    told = of_training(rule, f"node-{rank // 8}", "llm-1", rank, at, count=count, cause=CauseClass.GPU_MEMORY)
    return known(replace(told, last_at=at + timedelta(minutes=lasting), role=Role.ROOT), rank)


def failure(minutes: float, cause: str | None) -> FailureRecord:
    at = START + timedelta(minutes=minutes)
    verdict = None if cause is None else VerdictRecord("llm-1", at, cause, "high", ranks=(3,))
    return FailureRecord(at, "job_failed", "its process ended", None, verdict)


def test_what_several_rules_and_ranks_say_at_once_is_one_event() -> None:
    """Four ranks and two rules within a minute; repeated lines are lines. Half an hour later it is another event."""
    said = [oom(0, 0, 40), oom(0.2, 1), oom(0.4, 9, rule="allocator"), oom(30, 0)]
    found = error_count(OUT_OF_MEMORY, said, [], are_failures_known=True)
    first, second = found.events
    assert (found.count, found.fatal) == (2, 0)
    assert (first.ranks, first.rank_count, first.nodes, first.lines) == ((0, 1, 9), 3, ("node-0", "node-1"), 42)
    assert first.rules == ("allocator", "cuda-oom")
    assert (second.at, second.ended_job) == (START + timedelta(minutes=30), False)


@pytest.mark.parametrize(
    ("failures", "tells", "ended"),
    [
        ([], True, False),
        ([], False, None),
        ([failure(1, "gpu_memory")], True, True),
        ([failure(1, "code")], True, False),
        ([failure(1, "unknown")], True, None),
        ([failure(1, None)], True, None),
        ([failure(45, "gpu_memory")], True, False),
    ],
)
def test_an_event_ended_the_job_if_the_verdict_says_so(
    failures: list[FailureRecord], tells: bool, ended: bool | None
) -> None:
    """Without a verdict that is not known; nor where the job would not tell that it failed."""
    first = error_count(OUT_OF_MEMORY, [oom(0)], failures, tells).events[0]
    assert first.ended_job is ended


def test_a_failure_by_want_of_memory_counts_where_no_line_was_read() -> None:
    """By its verdict, once: not beside the finding that it rests on."""
    alone = error_count(OUT_OF_MEMORY, [], [failure(5, "host_memory")], are_failures_known=True)
    assert (alone.count, alone.fatal, alone.events[0].ranks, alone.events[0].rules) == (1, 1, (3,), ())
    both = error_count(OUT_OF_MEMORY, [oom(4.5)], [failure(5, "gpu_memory")], are_failures_known=True)
    assert (both.count, both.fatal) == (1, 1)


def test_only_what_can_be_the_beginning_of_its_kind_counts() -> None:
    """A consequence is no event of its own, nor what is not confirmed yet, nor what is of another kind."""
    link = known(of_kernel("link-down", "node-1", START, cause=CauseClass.NETWORK, role=Role.ROOT))
    reset = replace(link, id="2", role=Role.CASCADE)
    suspect = replace(link, id="3", is_suspected=True)
    found = error_count(NETWORK, [link, reset, suspect, oom(0)], [], are_failures_known=True)
    assert (found.count, found.events[0].rules, found.events[0].lines) == (1, ("link-down",), link.count)
