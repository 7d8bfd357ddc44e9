"""The form in which findings travel: what is written is read again, and nothing else is."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from trainmedic.wire.envelope import EnvelopeError
from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.domain import finding_codec
from trainmedic_logs.domain.finding import CauseClass, Excerpt, Finding, Origin, Role, TimeSource
from trainmedic_logs.domain.finding_codec import FindingUpdate

AT = datetime(2026, 3, 1, 12, tzinfo=UTC)
XID = Finding(
    id="node-2/kmsg/boot-1/4711/gpu-xid",
    rule="gpu-xid",
    role=Role.ROOT,
    cause=CauseClass.GPU,
    target=Target(TargetKind.GPU, node="node-2", gpu="GPU-509665ad"),
    origin=Origin("kernel", "node-2", stream="/dev/kmsg"),
    first_at=AT,
    last_at=AT + timedelta(seconds=3),
    line="NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus.",
    labels={"xid": "79"},
    fields={"pci": "0000:9b:00", "xid": "79"},
    count=2,
    time_source=TimeSource.LINE,
    clock_error=0.002,
    shape="5f3a",
)
UPDATE = FindingUpdate("node-2", "agent-1", 7, XID, Excerpt(("before", XID.line, "after"), 1, 40), "b-1", AT)

_WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)
_NAMES = st.text("abcxyz_019", min_size=1, max_size=12).map(lambda text: f"n{text}")
_IDS = st.text("abc/:.-019", min_size=1, max_size=40)
_TIMES = st.datetimes(datetime(1990, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))
_RANKS = st.integers(0, finding_codec.RANK_LIMIT - 1)
_TARGETS = st.one_of(
    st.builds(Target, st.just(TargetKind.GPU), node=_NAMES, gpu=_NAMES),
    st.builds(Target, st.just(TargetKind.NODE), node=_NAMES),
    st.builds(Target, st.just(TargetKind.JOB), job=_NAMES),
)


@st.composite
def _updates(draw: st.DrawFn) -> FindingUpdate:
    node, first_at = draw(_NAMES), draw(_TIMES)
    origin = st.builds(
        Origin,
        source=_NAMES,
        node=st.just(node),
        job=st.none() | _NAMES,
        attempt=st.none() | st.integers(1, 99),
        rank=st.none() | _RANKS,
        pod=st.none() | _NAMES,
        stream=_WORDS,
    )
    finding = st.builds(
        Finding,
        id=_IDS,
        rule=_NAMES,
        role=st.sampled_from(Role),
        cause=st.sampled_from(CauseClass),
        target=_TARGETS,
        origin=origin,
        first_at=st.just(first_at),
        last_at=st.timedeltas(timedelta(0), timedelta(days=9)).map(lambda later: first_at + later),
        line=_WORDS,
        labels=st.dictionaries(_NAMES, _WORDS, max_size=finding_codec.MOST_LABELS),
        fields=st.dictionaries(_NAMES, _WORDS, max_size=4),
        ranks=st.frozensets(_RANKS, max_size=20),
        count=st.integers(1, 10**12),
        time_source=st.sampled_from(TimeSource),
        clock_error=st.floats(0, 1e6),
        is_over=st.booleans(),
        shape=_WORDS,
    )
    lines = draw(st.lists(_WORDS, max_size=9))
    excerpt = Excerpt(tuple(lines), draw(st.integers(0, len(lines) - 1)), draw(st.integers(0, 9))) if lines else None
    booted_at = draw(st.none() | _TIMES)
    return FindingUpdate(node, draw(_IDS), draw(st.integers(1, 10**9)), draw(finding), excerpt, draw(_WORDS), booted_at)


@given(_updates())
@settings(max_examples=150, deadline=None)
def test_what_is_written_is_read_again(update: FindingUpdate) -> None:
    """Whatever a node finds, the server has the same value."""
    assert finding_codec.decode(finding_codec.encode(update)) == update


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_WHOLE = json.loads(finding_codec.encode(UPDATE))
_PATHS: list[tuple[str, ...]] = [(name,) for name in _WHOLE]
_PATHS += [(outer, name) for outer in ("finding", "excerpt") for name in _WHOLE[outer]]
_PATHS += [("finding", outer, name) for outer in ("target", "origin", "labels") for name in _WHOLE["finding"][outer]]


@given(st.sampled_from(_PATHS), _JSON)
@settings(max_examples=300, deadline=None)
def test_a_member_of_any_other_form_is_refused_or_read(path: tuple[str, ...], value: Any) -> None:
    """No value of a member brings another error than the one that is refused and counted."""
    changed: Any = json.loads(json.dumps(_WHOLE))
    inner = changed
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    _is_refused_or_read(json.dumps(changed).encode())


@given(st.binary(max_size=200) | st.integers(0, 700).map(lambda end: finding_codec.encode(UPDATE)[:end]))
@settings(max_examples=200, deadline=None)
def test_bytes_that_are_no_finding_are_refused(raw: bytes) -> None:
    """The reader goes on with the next one."""
    with pytest.raises(EnvelopeError):
        finding_codec.decode(raw)


def _is_refused_or_read(raw: bytes) -> None:
    try:
        update = finding_codec.decode(raw)
    except EnvelopeError:
        return
    assert finding_codec.decode(finding_codec.encode(update)) == update


def test_what_is_too_long_is_cut_where_it_is_written() -> None:
    """A node with a long line, or many ranks, has its finding taken."""
    long = replace(
        XID,
        line="x" * 9000,
        labels={f"label{number}": "y" * 999 for number in range(99)},
        fields={"no name": "left out", "kept": "\0" * 999},
        ranks=frozenset(range(70_000)),
    )
    lines = tuple(f"{number} \0é" * 900 for number in range(900))
    read = finding_codec.decode(finding_codec.encode(replace(UPDATE, finding=long, excerpt=Excerpt(lines, 450, 1))))
    assert (len(read.finding.line), len(read.finding.labels), len(read.finding.ranks)) == (500, 10, 65_536)
    assert {len(text) for text in read.finding.labels.values()} == {256}
    assert read.finding.fields == {"kept": "\N{REPLACEMENT CHARACTER}" * 256}
    assert read.excerpt is not None
    assert read.excerpt.lines[read.excerpt.at].startswith("450 ")
    assert read.excerpt.number == 451 - read.excerpt.at
    assert sum(len(line.encode()) + 1 for line in read.excerpt.lines) <= 256 * 1024


def test_a_node_speaks_for_itself_alone() -> None:
    """An update whose line was read on another node than signed it is refused."""
    other = replace(UPDATE, node="node-1")
    with pytest.raises(EnvelopeError, match="another node"):
        finding_codec.decode(finding_codec.encode(other))


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 3, 7], "0-3,7"), ([9, 0, 10], "0,9-10")], ids=str
)
def test_ranks_are_written_as_spans(ranks: list[int], text: str) -> None:
    """Those of a large job are a short text."""
    assert finding_codec.write_ranks(ranks) == text
    assert finding_codec.read_ranks(text) == frozenset(ranks)


@pytest.mark.parametrize("text", ["1-", "3-1", "0-999999", "0-65535,70000", "1000000", "a", "1,,2", "-1", "٣"])
def test_ranks_of_another_form_are_refused(text: str) -> None:
    """Neither nonsense nor a span that would fill the memory is read."""
    with pytest.raises(EnvelopeError):
        finding_codec.read_ranks(text)


def test_of_an_excerpt_the_lines_farthest_from_the_finding_are_left_out() -> None:
    """What remains is around the finding's line, which is cut itself only where it alone is too large."""
    excerpt = Excerpt(("a" * 9, "b" * 9, "c" * 9, "d" * 9, "e" * 9), 1, 7)
    assert excerpt.within(30) == Excerpt(("a" * 9, "b" * 9, "c" * 9), 1, 7)
    assert Excerpt(excerpt.lines, 4, 7).within(20) == Excerpt(("d" * 9, "e" * 9), 1, 10)
    assert excerpt.within(4) == Excerpt(("bbbb",), 0, 8)


def test_a_name_is_bounded_in_bytes() -> None:
    """One that no index takes would keep the server from everything that comes with it."""
    update = finding_codec.encode(replace(UPDATE, node="é" * 300, finding=replace(XID, origin=Origin("kernel"))))
    with pytest.raises(EnvelopeError, match="bytes"):
        finding_codec.decode(update)


def test_the_form_on_the_wire_stays() -> None:
    """Agents and servers of other releases read and write these bytes."""
    finding = (
        b'{"id":"node-2/kmsg/boot-1/4711/gpu-xid","rule":"gpu-xid","role":"root","cause":"gpu",'
        b'"target":{"kind":"gpu","node":"node-2","gpu":"GPU-509665ad"},'
        b'"origin":{"source":"kernel","node":"node-2","stream":"/dev/kmsg"},'
        b'"first_at":"2026-03-01T12:00:00.000000Z","last_at":"2026-03-01T12:00:03.000000Z",'
        b'"line":"NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus.","labels":{"xid":"79"},'
        b'"fields":{"pci":"0000:9b:00","xid":"79"},"ranks":"","count":2,"time":"line","clock_error":0.002,"over":false,'
        b'"shape":"5f3a"}'
    )
    around = (
        b'{"lines":["before","NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus.","after"],"at":1,"number":40}'
    )
    head = b'{"v":1,"node":"node-2","instance":"agent-1","number":7,"boot":"b-1","finding":'
    tail = b',"booted_at":"2026-03-01T12:00:00.000000Z","excerpt":'
    written = head + finding + tail + around + b"}"
    assert finding_codec.encode(UPDATE) == written
    assert finding_codec.decode(written) == UPDATE


@pytest.mark.parametrize("name", ["id", "line", "labels", "fields", "count", "time", "clock_error", "first_at"])
def test_a_finding_without_a_member_that_is_always_sent_is_refused(name: str) -> None:
    """No default takes its place, such as a clock without an error."""
    changed: Any = json.loads(json.dumps(_WHOLE))
    del changed["finding"][name]
    with pytest.raises(EnvelopeError):
        finding_codec.decode(json.dumps(changed).encode())


def test_what_only_the_agent_knows_does_not_travel() -> None:
    """The generation of a stream makes ids; one that is sent is not taken."""
    known = replace(UPDATE, finding=replace(XID, origin=replace(XID.origin, generation="7/8/9")))
    assert finding_codec.encode(known) == finding_codec.encode(UPDATE)
    changed: Any = json.loads(json.dumps(_WHOLE))
    changed["finding"]["origin"]["generation"] = "7/8/9"
    assert finding_codec.decode(json.dumps(changed).encode()) == UPDATE
