"""Compares what a test expects of findings and of their alerts with what was found. Pure.

Who calls it: ``suite``, at each check of a test.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainmedic_core.problems import DocumentPath
from trainmedic_logs.diagnosis.verdict import Verdict
from trainmedic_logs.domain.finding_codec import write_ranks
from trainmedic_logs.domain.known_finding import FindingAlert, KnownFinding
from trainmedic_logs.simulation.log_test_format import FindingExpected, LogAlertExpected, VerdictExpected
from trainmedic_server.simulation.expectations import Difference, contains, count, equal, says
from trainmedic_server.simulation.suite_format import Check


def differences(check: Check, findings: Sequence[KnownFinding]) -> Iterator[Difference]:
    """Every difference between the findings, in the order in which they began, and what `check` expects."""
    if check.findings is not None:
        made = [f"{known.rule} {known.target.key}: {known.role}, {known.count} lines" for known in findings]
        yield from count(("findings",), len(check.findings), made)
        for index, (expected, known) in enumerate(zip(check.findings, findings, strict=False)):
            yield from _finding(("findings", index), expected, known)
    if check.log_alerts is not None:
        alerts = [(known, known.alert) for known in findings if known.alert is not None]
        silent = [f"{known.rule} raises none: {known.no_alert_because}" for known in findings if known.alert is None]
        told = [f"{alert.labels['alertname']} {dict(alert.labels)}" for _, alert in alerts]
        yield from count(("alerts",), len(check.log_alerts), told, silent)
        for index, (expected_alert, (known, alert)) in enumerate(zip(check.log_alerts, alerts, strict=False)):
            yield from _alert(("alerts", index), expected_alert, known, alert)


def verdict_differences(expected: VerdictExpected, verdict: Verdict) -> Iterator[Difference]:
    """Every difference between a verdict and what is expected of it."""
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


def _finding(path: DocumentPath, expected: FindingExpected, known: KnownFinding) -> Iterator[Difference]:
    yield from equal((*path, "rule"), expected.rule, known.rule)
    yield from equal((*path, "target"), expected.target, known.target.key)
    yield from equal((*path, "role"), expected.role, known.role)
    yield from equal((*path, "cause"), expected.cause, known.cause)
    yield from equal((*path, "count"), expected.count, known.count)
    yield from equal((*path, "over"), expected.over, not known.is_open)
    yield from contains((*path, "fields"), expected.fields, dict(known.fields))
    if expected.ranks is not None:
        yield from equal((*path, "ranks"), write_ranks(expected.ranks), write_ranks(known.ranks))


def _alert(
    path: DocumentPath, expected: LogAlertExpected, known: KnownFinding, alert: FindingAlert
) -> Iterator[Difference]:
    yield from equal((*path, "name"), expected.name, alert.labels["alertname"])
    yield from contains((*path, "labels"), expected.labels, dict(alert.labels))
    yield from says((*path, "summary"), expected.summary, alert.summary)
    yield from equal((*path, "over"), expected.over, not known.is_open)
