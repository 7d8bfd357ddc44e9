"""Comparison of a test's expectations with findings and verdicts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum

from msgspec import Struct

from trainmedic_core.problems import DocumentPath
from trainmedic_logs.diagnosis.verdict import Verdict
from trainmedic_logs.domain.finding_codec import write_ranks
from trainmedic_logs.domain.known_finding import FindingAlert, KnownFinding
from trainmedic_logs.simulation.log_test_format import FindingExpected, LogAlertExpected, LogCheck, VerdictExpected

_LONGEST = 300  # characters of a shown value


class Difference(Struct, frozen=True):
    """Unmet expectation; ``path`` is within the check."""

    path: DocumentPath
    expected: str
    got: str


def finding_differences(check: LogCheck, findings: Sequence[KnownFinding]) -> Iterator[Difference]:
    if check.findings is not None:
        made = [f"{known.rule} {known.target.key}: {known.role}, {known.count} lines" for known in findings]
        yield from count(("findings",), len(check.findings), made)
        for index, (expected, known) in enumerate(zip(check.findings, findings, strict=False)):
            yield from _finding_differences(("findings", index), expected, known)
    if check.log_alerts is not None:
        alerts = [(known, known.alert) for known in findings if known.alert is not None]
        silent = [f"{known.rule} raises none: {known.no_alert_because}" for known in findings if known.alert is None]
        raised = [f"{alert.labels['alertname']} {dict(alert.labels)}" for _, alert in alerts]
        yield from count(("alerts",), len(check.log_alerts), raised, silent)
        for index, (expected_alert, (known, alert)) in enumerate(zip(check.log_alerts, alerts, strict=False)):
            yield from _alert_differences(("alerts", index), expected_alert, known, alert)


def verdict_differences(expected: VerdictExpected, verdict: Verdict) -> Iterator[Difference]:
    path: DocumentPath = ("verdict",)
    reason = f" ({verdict.summary})"
    yield from equal((*path, "cause"), expected.cause, verdict.cause, reason)
    yield from equal((*path, "confidence"), expected.confidence, verdict.confidence, reason)
    yield from equal((*path, "advice"), expected.advice, verdict.advice, reason)
    for name in ("node", "gpu"):
        wanted, named = getattr(expected, name), getattr(verdict, name)
        if name in expected.model_fields_set and wanted != named:
            yield Difference((*path, name), wanted or "none", (named or "none") + reason)
    if expected.ranks is not None:
        yield from equal((*path, "ranks"), write_ranks(expected.ranks), write_ranks(verdict.ranks), reason)


def _finding_differences(path: DocumentPath, expected: FindingExpected, known: KnownFinding) -> Iterator[Difference]:
    yield from equal((*path, "rule"), expected.rule, known.rule)
    yield from equal((*path, "target"), expected.target, known.target.key)
    yield from equal((*path, "role"), expected.role, known.role)
    yield from equal((*path, "cause"), expected.cause, known.cause)
    yield from equal((*path, "count"), expected.count, known.count)
    yield from equal((*path, "over"), expected.over, not known.is_open)
    yield from contains((*path, "fields"), expected.fields, dict(known.fields))
    if expected.ranks is not None:
        yield from equal((*path, "ranks"), write_ranks(expected.ranks), write_ranks(known.ranks))


def _alert_differences(
    path: DocumentPath, expected: LogAlertExpected, known: KnownFinding, alert: FindingAlert
) -> Iterator[Difference]:
    yield from equal((*path, "name"), expected.name, alert.labels["alertname"])
    yield from contains((*path, "labels"), expected.labels, dict(alert.labels))
    yield from says((*path, "summary"), expected.summary, alert.summary)
    yield from equal((*path, "over"), expected.over, not known.is_open)


def equal(path: DocumentPath, expected: object, got: object, reason: str = "") -> Iterator[Difference]:
    if expected is not None and expected != got:
        yield Difference(path, shown(expected), shown(got) + reason)


def says(path: DocumentPath, expected: str | None, got: str | None) -> Iterator[Difference]:
    if expected is not None and expected not in (got or ""):
        yield Difference(path, f"a text with {shown(expected)}", shown(got) if got else "none")


def count(path: DocumentPath, expected: int, got: Sequence[str], unmatched: Sequence[str] = ()) -> Iterator[Difference]:
    if expected != len(got):
        lines = [*got, *(unmatched if expected > len(got) else ())]
        listed = "".join(f"\n      {line}" for line in lines)
        yield Difference(path, f"{expected}", f"{len(got)}{':' if lines else ''}{listed}")


def contains(path: DocumentPath, expected: object, got: object) -> Iterator[Difference]:
    """Compare only expected members of mappings, at any depth."""
    if expected is not None:
        yield from _at_least(path, expected, got)


def _at_least(path: DocumentPath, expected: object, got: object) -> Iterator[Difference]:
    if not isinstance(expected, Mapping) or not isinstance(got, Mapping):
        if expected != got:
            yield Difference(path, shown(expected), shown(got))
        return
    for key, value in expected.items():
        if key in got:
            yield from _at_least((*path, key), value, got[key])
        else:
            others = ", ".join(map(str, got)) or "none"
            yield Difference((*path, key), shown(value), f"nothing; available: {others}")


def shown(value: object) -> str:
    if isinstance(value, Enum):
        value = value.value
    text = value if isinstance(value, str) and value and value.isprintable() else repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
