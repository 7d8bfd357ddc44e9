"""Compiled log rules, and their wire format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache, cached_property
from typing import Any

from msgspec import Struct, ValidationError, convert, field
from msgspec.structs import fields, force_setattr

from trainmedic_core.target import TargetKind
from trainmedic_logs.domain.finding import CauseClass, Role


class LinePattern(Struct, frozen=True):
    """Pattern, and its role and cause instead of the rule's."""

    pattern: str
    role: Role | None = None
    cause: CauseClass | None = None


class RequiredCount(Struct, frozen=True):
    """Lines required within `per`, or in a row, per stream."""

    at_least: int
    per: timedelta | None = None
    in_a_row: bool = False
    """Refused records reset the count."""


UNTIL_BOOT, UNTIL_ATTEMPT, UNTIL_ENDS = "boot", "attempt", "ends"
_SILENCE = timedelta(minutes=15)


class Confirmation(Struct, frozen=True):
    """One of these rules or alerts must also occur, within `within`, before the alert is sent."""

    within: timedelta
    by: tuple[str, ...]


class RuleAlert(Struct, frozen=True):
    """Texts may be templates over ``fields``, ``labels``, ``target`` and ``finding``; labels over ``fields``."""

    name: str
    severity: str = "warning"
    component: str = "training"
    labels: Mapping[str, str] = field(default_factory=dict)
    summary: str = ""
    description: str = ""
    confirm: Confirmation | None = None


class LogRule(Struct, frozen=True):
    name: str
    sources: tuple[str, ...]
    role: Role
    cause: CauseClass
    target: TargetKind = TargetKind.JOB
    """For lines of the kernel or fabric manager; others concern their job."""
    summary: str = ""
    contains: tuple[str, ...] = ()  # literals of which a line must contain one
    match: tuple[LinePattern, ...] = ()
    unless: tuple[str, ...] = ()
    when: str = ""
    """Over ``fields`` and ``source``; with `record` for records only."""
    record: str = ""
    """Event such as ``step``."""
    is_general: bool = False
    """Takes lines that no other rule takes."""
    gpu: str = ""
    """Template of PCI address or UUID."""
    ends: tuple[str, ...] = ()
    """Patterns of lines that end the finding."""
    lasting: timedelta = timedelta(0)
    """Minimum time before it is reported."""
    count: RequiredCount | None = None
    silence: timedelta = _SILENCE
    """A finding is over after this time without a line, unless `until` is set."""
    until: str = ""
    """``boot``, ``attempt``, ``ends``, or "" for `silence`."""
    alert: RuleAlert | None = None


class RuleSet(Struct, frozen=True, dict=True):
    rules: tuple[LogRule, ...] = ()
    left_out: tuple[str, ...] = ()
    """A newer server's rules that this version does not understand."""

    def __post_init__(self) -> None:
        force_setattr(self, "rules", tuple(sorted(self.rules, key=lambda rule: rule.name)))

    @cached_property
    def by_name(self) -> Mapping[str, LogRule]:
        return {rule.name: rule for rule in self.rules}

    @cached_property
    def version(self) -> str:
        return hashlib.sha256(self.encode()).hexdigest()[:16]

    def encode(self) -> bytes:
        """Return versioned JSON for agents."""
        rules = [_plain(rule) for rule in self.rules]
        return json.dumps({"version": _WIRE_VERSION, "rules": rules}, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> RuleSet:
        """Decode a set, without rules with unknown members. Raises ValueError."""
        try:
            document = json.loads(data)
            if document["version"] != _WIRE_VERSION:
                raise ValueError(f"log rules of the form {document['version']!r} are not read here")
            rules, left_out = [], []
            for plain in document["rules"]:
                if _is_known(plain):
                    rules.append(convert(plain, LogRule, strict=False))  # times are seconds
                else:
                    left_out.append(str(plain["name"]))
        except (KeyError, TypeError, AttributeError, RecursionError, ValidationError) as error:
            raise ValueError(f"not a set of log rules: {type(error).__name__} {error}") from None
        return cls(tuple(rules), tuple(left_out))


_WIRE_VERSION = 1
_NESTED: Mapping[str, type[Struct]] = {"alert": RuleAlert, "count": RequiredCount, "match": LinePattern}


def _plain(value: Any) -> Any:
    if isinstance(value, Struct):
        pairs = ((name, getattr(value, name), default) for name, default in _members(type(value)))
        return {name: _plain(each) for name, each, default in pairs if each != default}
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


@cache  # reading annotations is slow
def _members(kind: type[Struct]) -> Sequence[tuple[str, Any]]:
    """Return names and defaults."""
    return [(member.name, member.default) for member in fields(kind)]


def _is_known(plain: Mapping[str, Any]) -> bool:
    if not _member_names(LogRule).issuperset(plain):
        return False
    for name, kind in _NESTED.items():
        if name in plain:
            parts = plain[name] if name == "match" else [plain[name]]
            if not all(_member_names(kind).issuperset(part) for part in parts):
                return False
    return _member_names(Confirmation).issuperset(plain.get("alert", {}).get("confirm", ()))


def _member_names(kind: type[Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_fields__)
