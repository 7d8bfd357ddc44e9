"""JSON codec of findings between node and server, for untrusted lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert, to_builtins
from msgspec.structs import asdict, replace

from trainmedic.wire import envelope
from trainmedic.wire.envelope import EnvelopeError
from trainmedic.wire.reading import read_object, without_nul
from trainmedic_core.target import LONGEST_NAME, Target, TargetKind
from trainmedic_logs.domain.finding import (
    LABEL_NAME,
    LARGEST_EXCERPT,
    LARGEST_NUMBER,
    LONGEST_LINE,
    LONGEST_STREAM,
    LONGEST_VALUE,
    MOST_AROUND,
    MOST_FIELDS,
    MOST_LABELS,
    Excerpt,
    Finding,
    Id,
)
from trainmedic_logs.domain.finding import RANK_LIMIT as RANK_LIMIT

VERSION = 1
MOST_RANKS = 65_536
# Members that are always sent, despite their default.
_NEEDED = frozenset({"labels", "fields", "count", "time", "clock_error"})
_LABEL_NAME = re.compile(LABEL_NAME)
_RANKS = re.compile(r"(?:\d{1,7}(?:-\d{1,7})?(?:,\d{1,7}(?:-\d{1,7})?)*)?\Z", re.ASCII)


class FindingUpdate(Struct, frozen=True):
    """Complete state, replacing earlier updates."""

    node: Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
    """Signing node."""
    instance: Id  # of the sending process
    number: Annotated[int, Meta(ge=1, le=LARGEST_NUMBER)]
    """Number within the process, from 1; gaps are losses."""
    finding: Finding
    excerpt: Excerpt | None = None
    boot: Annotated[str, Meta(max_length=128)] = ""
    """Kernel boot ID; empty if unknown."""
    booted_at: datetime | None = None
    """UTC; None if unknown."""


def encode(update: FindingUpdate) -> bytes:
    """Return the bytes to sign, with long texts cut."""
    fields: dict[str, Any] = {
        "v": VERSION,
        "node": update.node,
        "instance": update.instance,
        "number": update.number,
        "boot": update.boot,
        "finding": _written(update.finding),
    }
    if update.booted_at is not None:
        fields["booted_at"] = update.booted_at
    if update.excerpt is not None:
        fields["excerpt"] = to_builtins(_cut_excerpt(update.excerpt))
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"), default=envelope.write_time)
    return text.encode("utf-8", "replace")


def decode(raw: bytes) -> FindingUpdate:
    """Raises EnvelopeError that names the member."""
    try:
        fields = without_nul(read_object(raw))
    except ValueError as error:
        raise EnvelopeError("finding: not a JSON object") from error
    if fields.get("v") != VERSION:
        raise EnvelopeError(f"finding: v is {str(fields.get('v'))[:20]!r}; this version reads {VERSION}")
    finding, booted_at = fields.get("finding"), fields.get("booted_at")
    if not isinstance(finding, dict) or not finding.keys() >= _NEEDED:
        raise EnvelopeError(f"finding: it is not an object, or one of {', '.join(sorted(_NEEDED))} is missing")
    fields["booted_at"] = None if booted_at is None else _time(fields, "booted_at")
    fields["finding"] = finding | {
        "first_at": _time(finding, "first_at"),
        "last_at": _time(finding, "last_at"),
        "ranks": read_ranks(_text(finding, "ranks", 8 * MOST_RANKS)),
        "over": finding.get("over") is True,
    }
    try:
        return _checked(convert(fields, FindingUpdate))
    except ValidationError as error:
        raise EnvelopeError(f"finding: {error}") from error


def write_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as ``0-7,12``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def read_ranks(text: str, most: int = MOST_RANKS) -> frozenset[int]:
    """Parse the output of `write_ranks`. Raises EnvelopeError."""
    if not _RANKS.match(text):
        raise EnvelopeError("finding: ranks are not ranks")
    ranks: set[int] = set()
    for span in text.split(",") if text else ():
        first, _, last = span.partition("-")
        begin, end = int(first), int(last or first)
        if not begin <= end < RANK_LIMIT or end - begin >= most - len(ranks):
            raise EnvelopeError(f"finding: ranks are not in order, or more than {most}")
        ranks.update(range(begin, end + 1))
    return frozenset(ranks)


# --- writing ---------------------------------------------------------------------------------------


def _written(finding: Finding) -> dict[str, Any]:
    cut = replace(
        finding,
        line=finding.line[:LONGEST_LINE],
        labels=_cut(finding.labels, MOST_LABELS),
        fields=_cut(finding.fields, MOST_FIELDS),
        ranks=frozenset(),
    )
    origin = asdict(finding.origin)
    del origin["generation"]
    origin |= {"node": finding.origin.node or None, "stream": finding.origin.stream[:LONGEST_STREAM] or None}
    fields: dict[str, Any] = to_builtins(cut, builtin_types=(datetime,))
    return fields | {
        "target": _given(to_builtins(finding.target)),
        "origin": _given(origin),
        "ranks": write_ranks(sorted(finding.ranks)[:MOST_RANKS]),
    }


def _cut_excerpt(excerpt: Excerpt) -> Excerpt:
    begin = max(excerpt.at - MOST_AROUND, 0)
    around = excerpt.lines[begin : excerpt.at + MOST_AROUND + 1]
    lines = tuple(line.replace("\0", "\N{REPLACEMENT CHARACTER}") for line in around)
    number = excerpt.number + begin if excerpt.number else 0
    return Excerpt(lines, excerpt.at - begin, number).within()


def _given(members: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in members.items() if value is not None}


def _cut(texts: Mapping[str, str], most: int) -> dict[str, str]:
    names = sorted(filter(_LABEL_NAME.match, texts))
    return {name: texts[name][:LONGEST_VALUE] for name in names[:most]}


# --- reading ---------------------------------------------------------------------------------------


def _checked(update: FindingUpdate) -> FindingUpdate:
    finding, target, origin = update.finding, update.finding.target, update.finding.origin
    if finding.last_at < finding.first_at:
        raise EnvelopeError("finding: last_at is before first_at")
    if origin.node not in ("", update.node):
        raise EnvelopeError("finding: it comes from another node than it was read on")
    if target.kind is TargetKind.GROUP:
        raise EnvelopeError(f"finding: its target cannot be a {target.kind}")
    parts = {name: getattr(target, name) for name in target.kind.parts}
    for name in (update.node, origin.job, origin.pod, *parts.values()):
        if name is not None and len(name.encode()) > LONGEST_NAME:
            raise EnvelopeError(f"finding: a name is longer than {LONGEST_NAME} bytes")
    if not all(parts.values()):
        raise EnvelopeError(f"finding: the target, a {target.kind}, has no {' or no '.join(parts)}")
    if update.excerpt is not None:
        if update.excerpt.at >= len(update.excerpt.lines):
            raise EnvelopeError("finding: the excerpt has no line at its place")
        # A single line can fill it without its line feed (`Excerpt.within`).
        if sum(len(line.encode()) + 1 for line in update.excerpt.lines) > LARGEST_EXCERPT + 1:
            raise EnvelopeError("finding: the excerpt is too large")
    where = replace(origin, node=update.node, job=origin.job or None, pod=origin.pod or None, generation="")
    return replace(update, finding=replace(finding, target=Target(target.kind, **parts), origin=where))


def _time(fields: Mapping[str, Any], name: str) -> datetime:
    return envelope.read_time(_text(fields, name, 64))


def _text(fields: Mapping[str, Any], name: str, longest: int) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str) or len(value) > longest:
        raise EnvelopeError(f"finding: {name} is no text of at most {longest} characters")
    return value
