"""The form in which a finding travels from where a line was read to the server: JSON with bounds.

Who has written what is read here is known, and it may have been read in a log that anybody writes into: whatever has
another form than `encode` gives it is refused, and no text is longer than it may be.

Who calls it: the agent writes, the server reads. Not here: signatures, and the stream (``trainmedic.wire.findings``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from trainmedic.wire import envelope
from trainmedic.wire.envelope import EnvelopeError
from trainmedic.wire.reading import read_object, without_nul
from trainmedic_server.domain.finding import (
    LARGEST_EXCERPT,
    MOST_AROUND,
    CauseClass,
    Excerpt,
    Finding,
    Origin,
    Role,
    TimeSource,
)
from trainmedic_server.domain.target import LONGEST_NAME, Target, TargetKind

VERSION = 1
LONGEST_LINE = 500
"""Characters of a finding's line."""
LONGEST_VALUE = 256
"""Characters of a label's or a field's value."""
MOST_LABELS = 10
MOST_FIELDS = 32
MOST_RANKS = 65_536
LARGEST_RANK = 1_000_000
_MOST_NUMBER = 1_000_000_000_000_000
_LONGEST_STREAM = 4096
_LONGEST_CLOCK_ERROR = 1e9
_ID = re.compile(r"[!-~]{1,128}\Z")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
_RULE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
_RANKS = re.compile(r"(?:\d{1,7}(?:-\d{1,7})?(?:,\d{1,7}(?:-\d{1,7})?)*)?\Z", re.ASCII)

Kind = TypeVar("Kind", bound=StrEnum)


class FindingUpdate(Struct, frozen=True):
    """What a node says of a finding: all that is known of it by then, so the last word replaces those before it."""

    node: str
    """Who says so, and by whose key it is signed; the origin's node is the same, or empty."""
    instance: str
    """Which process says so: an id that it has made when it began."""
    number: int
    """Which update of that process it is, counted from 1. A number that is left out was lost."""
    finding: Finding
    excerpt: Excerpt | None = None
    """The lines around it; None where they were sent before, or are not known."""
    boot: str = ""
    """The id that the node's kernel has given its boot; empty where it gives none."""
    booted_at: datetime | None = None
    """When the node was booted, aware and in UTC; None where that is not known."""


def encode(update: FindingUpdate) -> bytes:
    """The exact bytes that are sent and signed. Texts that are too long are cut, and of an excerpt lines left out."""
    fields: dict[str, Any] = {
        "v": VERSION,
        "node": update.node,
        "instance": update.instance,
        "number": update.number,
        "boot": update.boot,
        "finding": _written(update.finding),
    }
    if update.booted_at is not None:
        fields["booted_at"] = envelope.write_time(update.booted_at)
    if update.excerpt is not None:
        fields["excerpt"] = _written_excerpt(update.excerpt)
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def decode(raw: bytes) -> FindingUpdate:
    """The update that `raw` holds. Raises EnvelopeError, which names the member."""
    try:
        fields = without_nul(read_object(raw))
    except ValueError as error:
        raise EnvelopeError("finding: not a JSON object") from error
    if fields.get("v") != VERSION:
        raise EnvelopeError(f"finding: v is {str(fields.get('v'))[:20]!r}; this version reads {VERSION}")
    node = _name(fields, "node", is_needed=True)
    finding = _finding(_object(fields, "finding"))
    if finding.origin.node not in ("", node):
        raise EnvelopeError("finding: it comes from another node than it was read on")
    return FindingUpdate(
        node=node,
        instance=_matching(fields, "instance", _ID),
        number=_whole(fields, "number", 1),
        finding=replace(finding, origin=replace(finding.origin, node=node)),
        excerpt=_excerpt(_object(fields, "excerpt")) if fields.get("excerpt") is not None else None,
        boot=_text(fields, "boot", 128),
        booted_at=_time(fields, "booted_at") if fields.get("booted_at") is not None else None,
    )


def write_ranks(ranks: Iterable[int]) -> str:
    """Ranks as text, in order, with neighbours as a span: ``0-7,12``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def read_ranks(text: str) -> frozenset[int]:
    """The ranks that `write_ranks` has written. Raises EnvelopeError where they are not ranks, or too many."""
    if not _RANKS.match(text):
        raise EnvelopeError("finding: ranks are not ranks")
    ranks: set[int] = set()
    for span in text.split(",") if text else ():
        first, _, last = span.partition("-")
        begin, end = int(first), int(last or first)
        if not begin <= end < LARGEST_RANK or end - begin >= MOST_RANKS - len(ranks):
            raise EnvelopeError(f"finding: ranks are not in order, or more than {MOST_RANKS}")
        ranks.update(range(begin, end + 1))
    return frozenset(ranks)


# --- writing ---------------------------------------------------------------------------------------


def _written(finding: Finding) -> dict[str, Any]:
    origin = finding.origin
    fields: dict[str, Any] = {
        "id": finding.id,
        "rule": finding.rule,
        "role": finding.role.value,
        "cause": finding.cause.value,
        "target": _given(
            kind=finding.target.kind.value, node=finding.target.node, gpu=finding.target.gpu, job=finding.target.job
        ),
        "origin": _given(
            source=origin.source,
            node=origin.node or None,
            job=origin.job,
            attempt=origin.attempt,
            rank=origin.rank,
            local_rank=origin.local_rank,
            node_rank=origin.node_rank,
            pod=origin.pod,
            stream=origin.stream[:_LONGEST_STREAM] or None,
        ),
        "first_at": envelope.write_time(finding.first_at),
        "last_at": envelope.write_time(finding.last_at),
        "line": finding.line[:LONGEST_LINE],
        "labels": _cut(finding.labels, MOST_LABELS),
        "fields": _cut(finding.fields, MOST_FIELDS),
        "ranks": write_ranks(sorted(finding.ranks)[:MOST_RANKS]),
        "count": finding.count,
        "time": finding.time_source.value,
        "clock_error": finding.clock_error,
        "over": finding.is_over,
        "shape": finding.shape,
    }
    return fields


def _written_excerpt(excerpt: Excerpt) -> dict[str, Any]:
    begin = max(excerpt.at - MOST_AROUND, 0)
    around = excerpt.lines[begin : excerpt.at + MOST_AROUND + 1]
    lines = tuple(line.replace("\0", "\N{REPLACEMENT CHARACTER}") for line in around)
    number = excerpt.number + begin if excerpt.number else 0
    kept = Excerpt(lines, excerpt.at - begin, number).within()
    return {"lines": list(kept.lines), "at": kept.at, "number": kept.number}


def _given(**members: object) -> dict[str, object]:
    return {name: value for name, value in members.items() if value is not None}


def _cut(texts: Mapping[str, str], most: int) -> dict[str, str]:
    names = sorted(filter(_NAME.match, texts))
    return {name: texts[name][:LONGEST_VALUE] for name in names[:most]}


# --- reading ---------------------------------------------------------------------------------------


def _finding(fields: Mapping[str, Any]) -> Finding:
    first_at, last_at = _time(fields, "first_at"), _time(fields, "last_at")
    if last_at < first_at:
        raise EnvelopeError("finding: last_at is before first_at")
    clock_error = fields.get("clock_error")
    if isinstance(clock_error, bool) or not isinstance(clock_error, int | float):
        raise EnvelopeError("finding: clock_error is not a number")
    if not (math.isfinite(clock_error) and 0 <= clock_error <= _LONGEST_CLOCK_ERROR):
        raise EnvelopeError("finding: clock_error is out of bounds")
    return Finding(
        id=_matching(fields, "id", _ID),
        rule=_matching(fields, "rule", _RULE),
        role=_one_of(fields, "role", Role),
        cause=_one_of(fields, "cause", CauseClass),
        target=_target(_object(fields, "target")),
        origin=_origin(_object(fields, "origin")),
        first_at=first_at,
        last_at=last_at,
        line=_text(fields, "line", LONGEST_LINE),
        labels=_texts(fields, "labels", MOST_LABELS),
        fields=_texts(fields, "fields", MOST_FIELDS),
        ranks=read_ranks(_text(fields, "ranks", 8 * MOST_RANKS)),
        count=_whole(fields, "count", 1),
        time_source=_one_of(fields, "time", TimeSource),
        clock_error=float(clock_error),
        is_over=fields.get("over") is True,
        shape=_text(fields, "shape", 128),
    )


_PARTS: Mapping[TargetKind, tuple[str, ...]] = {
    TargetKind.GPU: ("node", "gpu"),
    TargetKind.NODE: ("node",),
    TargetKind.JOB: ("job",),
    TargetKind.CLUSTER: (),
}


def _target(fields: Mapping[str, Any]) -> Target:
    kind = _one_of(fields, "kind", TargetKind)
    parts = {name: _name(fields, name, is_needed=True) for name in _PARTS[kind]}
    return Target(kind, **parts)


def _origin(fields: Mapping[str, Any]) -> Origin:
    job, pod = (_name(fields, name) or None for name in ("job", "pod"))
    attempt, rank, local_rank, node_rank = (
        _whole(fields, name, 0, LARGEST_RANK) if fields.get(name) is not None else None
        for name in ("attempt", "rank", "local_rank", "node_rank")
    )
    return Origin(
        source=_text(fields, "source", 64, is_needed=True),
        node=_name(fields, "node"),
        job=job,
        attempt=attempt,
        rank=rank,
        local_rank=local_rank,
        node_rank=node_rank,
        pod=pod,
        stream=_text(fields, "stream", _LONGEST_STREAM),
    )


def _excerpt(fields: Mapping[str, Any]) -> Excerpt:
    lines = fields.get("lines")
    if not isinstance(lines, list) or not 0 < len(lines) <= 2 * MOST_AROUND + 1:
        raise EnvelopeError("finding: the excerpt has no lines, or too many")
    if not all(isinstance(line, str) for line in lines):
        raise EnvelopeError("finding: a line of the excerpt is no text")
    if sum(len(line.encode()) + 1 for line in lines) > LARGEST_EXCERPT + 1:
        raise EnvelopeError("finding: the excerpt is too large")
    return Excerpt(tuple(lines), _whole(fields, "at", 0, len(lines) - 1), _whole(fields, "number", 0))


def _object(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name)
    if not isinstance(value, dict):
        raise EnvelopeError(f"finding: {name} is not an object")
    return value


def _text(fields: Mapping[str, Any], name: str, longest: int, is_needed: bool = False) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str) or len(value) > longest or (is_needed and not value):
        raise EnvelopeError(f"finding: {name} is no text of {1 if is_needed else 0} to {longest} characters")
    return value


def _name(fields: Mapping[str, Any], name: str, is_needed: bool = False) -> str:
    """A name of a node, GPU, job or pod: no index of a database takes a longer one."""
    text = _text(fields, name, LONGEST_NAME, is_needed)
    if len(text.encode()) > LONGEST_NAME:
        raise EnvelopeError(f"finding: {name} is longer than {LONGEST_NAME} bytes")
    return text


def _matching(fields: Mapping[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not pattern.match(value):
        raise EnvelopeError(f"finding: {name} is not a name")
    return value


def _one_of(fields: Mapping[str, Any], name: str, kind: type[Kind]) -> Kind:
    try:
        return kind(str(fields.get(name)))
    except ValueError as error:
        raise EnvelopeError(f"finding: {name} is none that this version knows") from error


def _whole(fields: Mapping[str, Any], name: str, least: int, most: int = _MOST_NUMBER) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise EnvelopeError(f"finding: {name} is not a whole number from {least} to {most}")
    return value


def _time(fields: Mapping[str, Any], name: str) -> datetime:
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > 64:
        raise EnvelopeError(f"finding: {name} is not a time")
    return envelope.read_time(value)


def _texts(fields: Mapping[str, Any], name: str, most: int) -> dict[str, str]:
    value = _object(fields, name)
    if len(value) > most:
        raise EnvelopeError(f"finding: {name} has more than {most} members")
    for key, text in value.items():
        if not _NAME.match(key) or not isinstance(text, str) or len(text) > LONGEST_VALUE:
            raise EnvelopeError(f"finding: {name} has a member that is no name with a text")
    return dict(value)
