"""A log rule as it runs: which lines it takes, and what they mean. `RuleSet` is all of them, and travels to agents.

Values only, of plain types. Not here: reading rules from YAML and finding their mistakes (``catalog.log_rules``), and
trying them on lines (``matcher``).
"""

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
    """One pattern of a rule, and what its lines are where that differs from the rest of the rule's."""

    pattern: str
    role: Role | None = None
    cause: CauseClass | None = None


class RequiredCount(Struct, frozen=True):
    """How many lines it takes: so many within `per`, or in a row. Counted within one stream."""

    at_least: int
    per: timedelta | None = None
    in_a_row: bool = False
    """Of records: each that could have been taken and was not begins the count anew."""


UNTIL_BOOT, UNTIL_ATTEMPT, UNTIL_ENDS = "boot", "attempt", "ends"
_SILENCE = timedelta(minutes=15)


class Confirmation(Struct, frozen=True):
    """What must be seen as well before anybody is told: one of these rules or alerts, within `within`."""

    within: timedelta
    by: tuple[str, ...]


class RuleAlert(Struct, frozen=True):
    """The alert of a rule's findings. Its texts may be templates over ``fields``, ``target`` and ``finding``."""

    name: str
    severity: str = "warning"
    """``critical``, ``warning`` or ``info``, or a template that makes one of them."""
    component: str = "training"
    labels: Mapping[str, str] = field(default_factory=dict)
    summary: str = ""
    description: str = ""
    confirm: Confirmation | None = None


class LogRule(Struct, frozen=True):
    """Takes the lines of its sources that hold one of its literals and one of its patterns, or its kind of record."""

    name: str
    sources: tuple[str, ...]
    role: Role
    cause: CauseClass
    target: TargetKind = TargetKind.JOB
    """Of lines of the kernel; of those of other sources it is the job."""
    summary: str = ""
    contains: tuple[str, ...] = ()
    match: tuple[LinePattern, ...] = ()
    unless: tuple[str, ...] = ()
    when: str = ""
    """An expression over ``fields`` and ``source``; empty where every line that matches counts. Of a rule with
    `record` it is asked of records alone."""
    record: str = ""
    """The event of the records that it takes, such as ``step``; empty for a rule over text alone."""
    is_general: bool = False
    """It takes a line only where no other rule does."""
    gpu: str = ""
    """A template that makes the PCI address or UUID of the target."""
    ends: tuple[str, ...] = ()
    lasting: timedelta = timedelta(0)
    """How long it must last, that is, how long no line ends it."""
    count: RequiredCount | None = None
    silence: timedelta = _SILENCE
    """After so long without a line the finding is over, where `until` says nothing else."""
    until: str = ""
    """``boot``, ``attempt``, ``ends``, or empty for `silence`."""
    alert: RuleAlert | None = None


class RuleSet(Struct, frozen=True, dict=True):
    """The rules that apply together, in the order of their names."""

    rules: tuple[LogRule, ...] = ()
    left_out: tuple[str, ...] = ()
    """Names of rules that a newer server sent and this program does not understand."""

    def __post_init__(self) -> None:
        force_setattr(self, "rules", tuple(sorted(self.rules, key=lambda rule: rule.name)))

    @cached_property
    def by_name(self) -> Mapping[str, LogRule]:
        return {rule.name: rule for rule in self.rules}

    @cached_property
    def version(self) -> str:
        """Names exactly these rules."""
        return hashlib.sha256(self.encode()).hexdigest()[:16]

    def encode(self) -> bytes:
        """Return the set as it travels to agents: versioned JSON."""
        rules = [_plain(rule) for rule in self.rules]
        return json.dumps({"version": _FORM, "rules": rules}, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> RuleSet:
        """Return the set that was encoded so. A rule with a member that is not known here is left out: what it means
        is not known either. Raises ValueError for what no server makes."""
        try:
            document = json.loads(data)
            if document["version"] != _FORM:
                raise ValueError(f"log rules of the form {document['version']!r} are not read here")
            rules, left_out = [], []
            for plain in document["rules"]:
                if _is_known(plain):
                    rules.append(convert(plain, LogRule, strict=False))  # a time is a number of seconds
                else:
                    left_out.append(str(plain["name"]))
        except (KeyError, TypeError, AttributeError, RecursionError, ValidationError) as error:
            raise ValueError(f"not a set of log rules: {type(error).__name__} {error}") from None
        return cls(tuple(rules), tuple(left_out))


_FORM = 1
_PARTS: Mapping[str, type[Struct]] = {"alert": RuleAlert, "count": RequiredCount, "match": LinePattern}


def _plain(value: Any) -> Any:
    """Return a part of a rule as JSON has it; times are seconds, and what has its default is left out."""
    if isinstance(value, Struct):
        pairs = ((name, getattr(value, name), default) for name, default in _members(type(value)))
        return {name: _plain(each) for name, each, default in pairs if each != default}
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


@cache
def _members(kind: type[Struct]) -> Sequence[tuple[str, Any]]:
    """The name and default of each; to ask for them takes reading all annotations."""
    return [(member.name, member.default) for member in fields(kind)]


def _is_known(plain: Mapping[str, Any]) -> bool:
    if not _names(LogRule).issuperset(plain):
        return False
    return all(
        _names(kind).issuperset(part)
        for name, kind in _PARTS.items()
        if name in plain
        for part in (plain[name] if name == "match" else [plain[name]])
    )


def _names(kind: type[Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_fields__)
