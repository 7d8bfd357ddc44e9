"""Findings over lines: beginning, repeating, counting, lasting, ending, and what survives a restart."""

# ruff: noqa: E501 (lines stand here as programs print them)

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.logs.reading import NOW, line, lines
from tests.unit.logs.test_matching import rule
from trainmedic_core.target import TargetKind
from trainmedic_logs.domain.finding import CauseClass, Finding, Role
from trainmedic_logs.lines import tracker
from trainmedic_logs.lines.line import Line
from trainmedic_logs.lines.rule import LinePattern, LogRule, RequiredCount, RuleAlert, RuleSet
from trainmedic_logs.lines.tracker import FindingTracker

SECOND = timedelta(seconds=1)
UUID = "GPU-509665ad-b600-ac93-3616-d754b23d636d"


def at(seconds: float, text: str, source: str = "training", place: int | None = None, **members: object) -> Line:
    """A line that is read so many seconds after `NOW`."""
    spot = int(seconds * 1000) if place is None else place
    return line(text, source, **members)._replace(at=NOW + seconds * SECOND, place=spot)


def kernel_rule(name: str, pattern: str, contains: str, **members: Any) -> LogRule:
    given: dict[str, Any] = {"target": TargetKind.NODE, "cause": CauseClass.STORAGE, **members}
    return LogRule(name, ("kernel",), Role.ROOT, contains=(contains,), match=(LinePattern(pattern),), **given)


NFS = kernel_rule(
    "nfs-away",
    r"nfs: server (?P<server>\S+) not",
    "nfs: server",
    ends=(r"nfs: server (?P<server>\S+) OK",),
    until="ends",
)
XID = kernel_rule(
    "xid", r"Xid \(PCI:(?P<pci>[0-9a-f:.]+)\): (?P<xid>\d+)", "Xid", target=TargetKind.GPU, gpu="{{ fields.pci }}",
    cause=CauseClass.GPU, until="boot", alert=RuleAlert("X", labels={"xid": "{{ fields.xid }}", "none": "{{ fields.no }}"}),
)  # fmt: skip


def feed(followed: FindingTracker, *given: Line) -> list[Finding]:
    return [finding for each in given for finding in followed.feed(each)]


def stored(tracker: FindingTracker) -> dict[int, Any]:
    """What is stored of all that a tracker follows."""
    return {number: json.loads(text) for number, text in tracker.changes().written.items()}


def test_a_finding_begins_and_is_counted() -> None:
    """The first line makes it at once; repeats are told together, at most once a second."""
    followed = FindingTracker(RuleSet((rule(),)))
    (first,) = feed(followed, at(0, "[rank0]: CUDA out of memory", job="llm-1", attempt=2))
    assert (first.rule, first.target.key, first.ranks, first.count) == ("oom", "job:llm-1", {0}, 1)
    repeats = [
        at(number / 100, f"[rank{number}]: CUDA out of memory", job="llm-1", attempt=2) for number in range(1, 8)
    ]
    assert feed(followed, *repeats) == []
    (told,) = followed.tick(NOW + SECOND)
    assert (told.id, told.count, told.ranks, told.last_at) == (first.id, 8, frozenset(range(8)), repeats[-1].at)
    feed(followed, at(1.1, "CUDA out of memory", job="llm-1", attempt=2))
    assert followed.tick(NOW + 1.5 * SECOND) == []
    assert [each.count for each in followed.tick(NOW + 2 * SECOND)] == [9]
    assert followed.lines_taken == {"oom": 9}


def test_the_same_line_makes_the_same_id() -> None:
    """Read again after a restart; of another stream, or of another file of that name, it is another."""
    one, again = (feed(FindingTracker(RuleSet((rule(),))), at(0, "CUDA out of memory"))[0].id for _ in "12")
    others = [
        feed(FindingTracker(RuleSet((rule(),))), each)[0].id
        for each in (
            at(1, "CUDA out of memory"),
            at(0, "CUDA out of memory", stream="/b"),
            at(0, "CUDA out of memory", generation="7"),
        )
    ]
    assert one == again
    assert len({one, *others}) == 4


def test_after_silence_a_new_finding_begins() -> None:
    """A finding is the same for as long as its alert would be."""
    brief = rule(silence=timedelta(minutes=1))
    followed = FindingTracker(RuleSet((brief,)))
    began = feed(followed, at(0, "CUDA out of memory"), at(59, "CUDA out of memory"), at(130, "CUDA out of memory"))
    assert [each.first_at for each in began] == [NOW, NOW + 130 * SECOND]
    followed.tick(NOW + 131 * SECOND)
    followed.tick(NOW + 300 * SECOND)
    assert stored(followed) == {}


def test_each_attempt_of_a_job_has_its_finding() -> None:
    """Where the rule's findings last until the attempt."""
    followed = FindingTracker(RuleSet((rule(until="attempt"),)))
    began = feed(
        followed, *(at(number, "CUDA out of memory", job="j", attempt=number // 2) for number in (0, 1, 2, 3, 100_000))
    )
    assert [each.origin.attempt for each in began] == [0, 1, 50_000]


def test_an_end_ends_what_it_names() -> None:
    """The groups that end and beginning share must agree."""
    followed = FindingTracker(RuleSet((NFS,)))
    feed(followed, at(0, "nfs: server a not responding", "kernel"), at(1, "nfs: server b not responding", "kernel"))
    followed_again = feed(followed, at(2, "nfs: server b OK", "kernel"))
    assert [(each.fields["server"], each.is_over) for each in followed_again] == []
    # Both are about one node and have no labels, so they are one finding: that of server a.
    (over,) = feed(followed, at(3, "nfs: server a OK", "kernel"))
    assert (over.fields["server"], over.is_over, over.last_at) == ("a", True, NOW + 3 * SECOND)


@pytest.mark.parametrize("server", ["long-" * 60, "nfs://me:geheim@host"])
def test_an_end_compares_groups_as_findings_hold_them(server: str) -> None:
    """Those are cut and have no secrets."""
    followed = FindingTracker(RuleSet((NFS,)))
    feed(followed, at(0, f"nfs: server {server} not responding", "kernel"))
    assert [each.is_over for each in feed(followed, at(1, f"nfs: server {server} OK", "kernel"))] == [True]


def test_labels_keep_findings_apart() -> None:
    """Rule, target and the rule's own labels are the identity."""
    labelled = replace(NFS, alert=RuleAlert("A", labels={"server": "{{ fields.server }}"}))
    followed = FindingTracker(RuleSet((labelled,)))
    began = feed(followed, *(at(0, f"nfs: server {name} not responding", "kernel") for name in "aba"))
    assert [each.labels for each in began] == [{"server": "a"}, {"server": "b"}]
    (over,) = feed(followed, at(3, "nfs: server b OK", "kernel"))
    assert over.labels == {"server": "b"}


def test_what_must_last_is_told_when_it_has() -> None:
    """And never where it ended before."""
    lasting = replace(NFS, lasting=timedelta(minutes=1))
    followed = FindingTracker(RuleSet((lasting,)))
    assert feed(followed, at(0, "nfs: server a not responding", "kernel")) == []
    assert followed.tick(NOW + 59 * SECOND) == []
    assert [each.fields for each in followed.tick(NOW + 60 * SECOND)] == [{"server": "a"}]
    assert [each.is_over for each in feed(followed, at(70, "nfs: server a OK", "kernel"))] == [True]
    feed(followed, at(80, "nfs: server a not responding", "kernel"))
    assert feed(followed, at(90, "nfs: server a OK", "kernel")) == []
    assert followed.tick(NOW + 900 * SECOND) == []


def test_a_count_within_a_time_begins_with_its_first_line() -> None:
    """Lines that are too far apart do not count together."""
    counted = rule(count=RequiredCount(3, timedelta(minutes=1)))
    followed = FindingTracker(RuleSet((counted,)))
    assert feed(followed, *(at(seconds, "CUDA out of memory") for seconds in (0, 50, 100))) == []
    (began,) = feed(followed, at(101, "CUDA out of memory"))
    assert (began.count, began.first_at, began.last_at) == (3, NOW + 50 * SECOND, NOW + 101 * SECOND)
    assert feed(followed, at(102, "CUDA out of memory")) == []
    assert [each.count for each in followed.changed()] == [4]


def test_a_count_in_a_row_begins_anew_with_each_good_record() -> None:
    """One that has no such number changes nothing."""
    high = rule(contains=(), match=(), record="step", when="fields.loss > 1e3", count=RequiredCount(3, in_a_row=True))
    followed = FindingTracker(RuleSet((high,)))
    bad, good = "{'loss': 2000.0}", "{'loss': 2.0}"
    assert feed(followed, *(at(number, text) for number, text in enumerate([bad, bad, good, bad, bad]))) == []
    feed(followed, at(6, "{'grad_norm': 1.0}"))
    (began,) = feed(followed, at(7, bad))
    assert (began.count, began.fields["loss"], began.id) == (3, "2000", began.id)


def test_the_kernel_names_a_gpu_by_its_address() -> None:
    """The UUID is looked up on the node; where nobody knows it, the address stands."""
    text = "NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus."
    known = FindingTracker(RuleSet((XID,)), {"0000:9b:00": UUID}.get)
    (finding,) = feed(known, at(0, text, "kernel"))
    assert (finding.target.key, finding.labels) == (f"gpu:gpu-07/{UUID}", {"xid": "79"})
    (finding,) = feed(FindingTracker(RuleSet((XID,))), at(0, text, "kernel"))
    assert finding.target.key == "gpu:gpu-07/0000:9b:00.0"


@pytest.mark.parametrize("source", ["training", "launcher", "slurm", "own"])
def test_what_a_training_prints_names_no_node_and_no_gpu(source: str) -> None:
    """Whatever the rule says, its target is the job of the stream, or the node that it was read on."""
    trusting = replace(XID, sources=(source,), gpu="{{ fields.pci }}")
    (finding,) = feed(
        FindingTracker(RuleSet((trusting,)), lambda _: UUID), at(0, "Xid (PCI:0:9b:0): 79", source, job="j")
    )
    assert finding.target.key == "job:j"
    (finding,) = feed(FindingTracker(RuleSet((trusting,)), lambda _: UUID), at(0, "Xid (PCI:0:9b:0): 79", source))
    assert finding.target.key == "node:gpu-07"


def test_what_is_followed_survives_a_restart() -> None:
    """Open findings, counts that are not reached, and when a finding was told last."""
    counted = rule("counted", count=RequiredCount(3, timedelta(minutes=1)))
    rules = RuleSet((counted, NFS, XID))
    before = FindingTracker(rules)
    feed(before, at(0, "CUDA out of memory"), at(1, "CUDA out of memory"))
    (nfs,) = feed(before, at(2, "nfs: server a not responding", "kernel", generation="9"))
    after = FindingTracker(rules)
    after.restore(stored(before))
    assert stored(after) == stored(before)
    (began,) = feed(after, at(3, "CUDA out of memory"))
    assert (began.count, began.first_at) == (3, NOW)
    (over,) = feed(after, at(4, "nfs: server a OK", "kernel", generation="9"))
    assert (over.id, over.is_over) == (nfs.id, True)


def test_each_process_that_the_kernel_kills_for_want_of_memory_is_told() -> None:
    """A diagnosis asks whether one was the job's; a line that comes again, and after a restart, is one more of it."""
    rules = RuleSet((kernel_rule("oom", r"Killed process (?P<pid>\d+)", "Killed", cause=CauseClass.HOST_MEMORY),))
    before, after = FindingTracker(rules), FindingTracker(rules)
    found = feed(before, *(at(n, f"Killed process {pid} (x)", "kernel") for n, pid in enumerate((7, 8, 7))))
    assert [finding.fields["pid"] for finding in found] == ["7", "8"]
    after.restore(stored(before))
    assert feed(after, at(3, "Killed process 8 (x)", "kernel"), at(4, "Killed process 9 (x)", "kernel"))[0].fields == {
        "pid": "9"
    }


@pytest.mark.parametrize("entry", [1, {}, {"finding": "x", "waiting": []}])
def test_a_damaged_state_is_left_out(entry: Any) -> None:
    """The agent begins anew rather than not at all, and the row goes."""
    followed = FindingTracker(RuleSet((rule(),)))
    followed.restore({4: entry})
    assert (dict(followed.changes().written), set(followed.changes().gone)) == ({}, {4})


def test_only_what_has_changed_is_stored_again() -> None:
    """What a job has had followed costs nothing at the next finding of another."""
    tracker = FindingTracker(
        RuleSet((kernel_rule("oom", r"Killed process (?P<pid>\d+)", "Killed", cause=CauseClass.HOST_MEMORY),))
    )
    feed(tracker, *(at(n, f"Killed process {n} (x)", "kernel") for n in range(50)))
    first = tracker.changes()
    assert len(first.written) == len(tracker.changes().written) == 50
    tracker.stored(first)
    assert not tracker.changes().written
    feed(tracker, at(51, "Killed process 7 (x)", "kernel"))
    assert len(tracker.changes().written) == 1


def test_other_rules_take_over_what_they_still_have() -> None:
    """A reload forgets only findings of rules that are gone."""
    followed = FindingTracker(RuleSet((rule(), NFS)))
    feed(followed, at(0, "CUDA out of memory"), at(0, "nfs: server a not responding", "kernel"))
    followed.use(RuleSet((NFS,)))
    assert feed(followed, at(1, "CUDA out of memory")) == []
    assert len(feed(followed, at(2, "nfs: server a OK", "kernel"))) == 1


def test_lines_that_wait_begin_a_finding_once_the_rule_counts_no_longer() -> None:
    """One finding, that further lines repeat."""
    followed = FindingTracker(RuleSet((rule(count=RequiredCount(3, timedelta(minutes=1))),)))
    assert feed(followed, at(0, "CUDA out of memory")) == []
    followed.use(RuleSet((rule(),)))
    assert [each.count for each in feed(followed, *(at(number, "CUDA out of memory") for number in range(1, 5)))] == [2]
    assert [each.count for each in followed.changed()] == [5]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that makes up servers without end keeps only so many findings."""
    monkeypatch.setattr(tracker, "MOST_OPEN", 10)
    labelled = replace(NFS, alert=RuleAlert("A", labels={"server": "{{ fields.server }}"}))
    followed = FindingTracker(RuleSet((labelled,)))
    feed(followed, *(at(number, f"nfs: server s{number} not", "kernel") for number in range(50)))
    assert len(stored(followed)) == 10


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_users_flood_makes_the_tracker_forget_nothing_of_others(
    monkeypatch: pytest.MonkeyPatch, is_restarted: bool
) -> None:
    """The kernel's first line of two that count together is kept, and so is the first line of another user."""
    monkeypatch.setattr(tracker, "MOST_OPEN", 10)
    counted = RequiredCount(2, timedelta(minutes=1))
    xid, oom = replace(XID, count=counted), rule(count=counted)
    step = rule("step", r"CUDA step (?P<n>\d+)", alert=RuleAlert("S", labels={"n": "{{ fields.n }}"}))
    followed = FindingTracker(RuleSet((xid, step, oom)))
    mallory, bob = 1001, 1002
    first = at(0, "NVRM: Xid (PCI:0000:3b:00): 79", "kernel"), at(0, "CUDA out of memory", job="bobs")
    assert not followed.feed(first[0])
    assert not followed.feed(first[1], bob)
    for number in range(100):
        assert followed.feed(at(1 + number / 100, f"CUDA step {number}", job="loud"), mallory)
        if is_restarted and number == 50:
            state, followed = stored(followed), FindingTracker(followed.rule_set)
            followed.restore(state)
    assert [each.count for each in followed.feed(at(3, "NVRM: Xid (PCI:0000:3b:00): 79", "kernel"))] == [2]
    assert [each.count for each in followed.feed(at(3, "CUDA out of memory", job="bobs"), bob)] == [2]


def test_the_line_shown_is_the_telling_one_and_has_no_secret() -> None:
    """Of a traceback the exception; of a long line the part with the pattern; with secrets masked."""
    (block,) = lines('Traceback (most recent call last):\n  File "a.py", line 1, in f\nE: CUDA out of memory')
    (finding,) = feed(FindingTracker(RuleSet((rule(),))), block)
    assert finding.line == "E: CUDA out of memory"
    secret = f"HF_TOKEN=hf_{'a' * 30} " + "x" * 3000 + " https://me:geheim@host/ CUDA out of memory"
    (finding,) = feed(FindingTracker(RuleSet((rule(),))), at(0, secret))
    assert finding.line.startswith("…")
    assert "CUDA out of memory" in finding.line
    assert "geheim" not in finding.line
    assert len(finding.line) <= 500
    cut = "x" * 400 + " password=" + "geheim" * 10 + " " + "y" * 160 + " CUDA out of memory"
    (finding,) = feed(FindingTracker(RuleSet((rule(),))), at(0, cut))
    assert finding.line.endswith("CUDA out of memory")
    assert "geheim" not in finding.line


def test_a_training_that_makes_up_ranks_costs_neither_memory_nor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one finding only so many are kept; a rank that is none is not."""
    monkeypatch.setattr(tracker, "MOST_RANKS", 10)
    followed = FindingTracker(RuleSet((rule(),)))
    feed(followed, *(at(number / 1000, f"[rank{number}]: CUDA out of memory") for number in range(100)))
    (finding,) = followed.changed()
    assert (finding.count, len(finding.ranks)) == (100, 10)
    odd = [1 << 70, -3, "7", True]
    records = [json.dumps({"event": "exception", "rank": rank, "message": "CUDA out of memory"}) for rank in odd]
    feed(followed, *(at(1000 + number, text, stream="/b") for number, text in enumerate(records)))
    assert [each.ranks for each in followed.changed() if each.origin.stream == "/b"] == [frozenset()]
