"""Finding of a single matched line.

A line's shape is its text without numbers, addresses, paths and IDs, to compare ranks and attempts.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from trainmedic_core import gpu_names
from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.domain.finding import Finding, Origin, Role
from trainmedic_logs.domain.finding_codec import RANK_LIMIT
from trainmedic_logs.domain.log_sources import KERNEL_SOURCES
from trainmedic_logs.lines import records, rendering
from trainmedic_logs.lines.line import Line
from trainmedic_logs.lines.masks import masked
from trainmedic_logs.lines.matcher import LineMatch
from trainmedic_logs.lines.rule import LogRule

GpuLookup = Callable[[str], str | None]
"""Returns a GPU's UUID by its logged PCI address, or None."""

GROUP_RANK = "group_rank"
"""Field of a finding that quotes another rank, whose number in the job is unknown."""
LONGEST_LINE = 500
"""Characters of a finding's line."""
_SHOWN_BEFORE = 200  # characters of a long line before the match
_LONGEST_VALUE = 256  # characters of a field
_MOST_FIELDS = 32
_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
_UUID = re.compile(r"(?i)(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")

# Replaced in this order.
_VARYING = (
    (re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "<id>"),
    (re.compile(r"0x[0-9a-fA-F]+"), "<n>"),
    (re.compile(r"(?:/[\w.@%+=:-]+){2,}/?"), "<path>"),
    (re.compile(r"\b[0-9a-fA-F]{12,64}\b"), "<id>"),
    (re.compile(r"[-+]?\d[\d.,:eE+-]*"), "<n>"),
    (re.compile(r"\s+"), " "),
)
_LONGEST_FOR_SHAPE = 1024


class FindingIdentity(Struct, frozen=True):
    target: Target
    labels: Mapping[str, str]

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.target.key, *sorted(self.labels.items()))


def identity_of(line: Line, match: LineMatch, gpu_of: GpuLookup) -> FindingIdentity:
    rule = match.rule
    assert rule is not None
    labels = rendering.labels_of(rule, match.fields) if rule.alert else _stop_reason(match)
    return FindingIdentity(_target(rule, match.fields, line.origin, gpu_of), labels)


def _stop_reason(match: LineMatch) -> Mapping[str, str]:
    # A label, so that ends for different reasons are different findings.
    why = str(match.fields.get("why", "")).strip() if match.role is Role.TEARDOWN else ""
    return {"why": why} if why else {}


def finding_of(line: Line, match: LineMatch, identity: FindingIdentity) -> Finding:
    rule, role, cause = match.rule, match.role, match.cause
    assert rule is not None
    assert role is not None
    assert cause is not None
    # A record's words were matched, if it has any.
    text = (records.words_of(line.record) if line.record else "") or line.text
    shown = _matched_part(text, _start_of_exception(text, match))
    return Finding(
        id=_finding_id(line, rule),
        rule=rule.name,
        role=role,
        cause=cause,
        target=identity.target,
        origin=line.origin,
        first_at=line.at,
        last_at=line.at,
        line=masked(shown)[:LONGEST_LINE],
        labels=identity.labels,
        fields=fields_of(match.fields if line.group_rank is None else {**match.fields, GROUP_RANK: line.group_rank}),
        ranks=ranks_of(line),
        time_source=line.time_source,
        shape=shape_hash(shown),
    )


def ranks_of(line: Line) -> frozenset[int]:
    rank = line.origin.rank
    if rank is None and line.record is not None:
        rank = line.record.get("rank")
    return frozenset({rank}) if type(rank) is int and 0 <= rank < RANK_LIMIT else frozenset()


def stream_key(origin: Origin) -> str:
    return "\0".join((origin.source, origin.node, origin.pod or "", origin.stream, origin.generation))


def _finding_id(line: Line, rule: LogRule) -> str:
    written = f"{stream_key(line.origin)}\0{line.place}\0{rule.name}"
    return hashlib.sha256(written.encode(errors="replace")).hexdigest()[:32]


def _start_of_exception(text: str, match: LineMatch) -> int:
    """Return the offset of the exception that the rule captured, else of the match."""
    exception = match.fields.get("exception")
    if not isinstance(exception, str) or not exception:
        return match.start
    before = "\n" if f"\n{exception}" in text else "| "  # exception groups have a margin
    at = text.rfind(before + exception)
    return match.start if at < match.start else at + len(before)


def _matched_part(text: str, start: int) -> str:
    """Return the line at `start`, cut before it if it is long."""
    begin = text.rfind("\n", 0, start) + 1
    end = text.find("\n", start)
    line = text[begin : len(text) if end < 0 else end]
    at = start - begin
    if len(line) <= LONGEST_LINE or at < LONGEST_LINE // 2:
        return line.strip().removeprefix("| ")
    # Mask before cutting: a secret whose name is cut away would not be recognised.
    at = len(masked(line[:at]))
    return "…" + masked(line)[max(at - _SHOWN_BEFORE, 0) :].strip()


def _target(rule: LogRule, fields: Mapping[str, Any], origin: Origin, gpu_of: GpuLookup) -> Target:
    if origin.source not in KERNEL_SOURCES or (rule.target is TargetKind.JOB and origin.job):
        if origin.job or not origin.node:
            return Target(TargetKind.JOB, job=origin.job or "")  # "" for a file of unknown job and node
        return Target(TargetKind.NODE, node=origin.node)
    gpu = _gpu(rule, fields, gpu_of) if rule.target is TargetKind.GPU else None
    return Target(TargetKind.GPU, node=origin.node, gpu=gpu) if gpu else Target(TargetKind.NODE, node=origin.node)


def _gpu(rule: LogRule, fields: Mapping[str, Any], gpu_of: GpuLookup) -> str | None:
    """Return the UUID, else the PCI address."""
    named = (rendering.text_of(rule.gpu, {"fields": fields}) or "").strip()
    if _UUID.match(named):
        return named
    address = gpu_names.normal_pci(named)
    return (gpu_of(named) or address) if address else None


def fields_of(fields: Mapping[str, Any]) -> dict[str, str]:
    kept = ((name, value) for name, value in fields.items() if _FIELD_NAME.match(name) and value is not None)
    return {name: masked(_written(value))[:_LONGEST_VALUE] for name, value in list(kept)[:_MOST_FIELDS]}


def _written(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}" if abs(value) < 1e15 and value != int(value) else f"{value:.0f}"
    return str(value)


def shape_of(text: str) -> str:
    text = text[:_LONGEST_FOR_SHAPE]
    for pattern, instead in _VARYING:
        text = pattern.sub(instead, text)
    return text.strip()


def shape_hash(text: str) -> str:
    return hashlib.sha256(shape_of(text).encode(errors="replace")).hexdigest()[:16]
