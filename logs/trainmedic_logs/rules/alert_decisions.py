"""Alerts of findings: whether a finding raises one, and its content. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from msgspec.structs import replace

from trainmedic_core.fingerprint import fingerprint
from trainmedic_core.target import TargetKind
from trainmedic_logs.domain.finding import Finding, Role
from trainmedic_logs.domain.known_finding import FindingAlert, KnownFinding
from trainmedic_logs.lines import rendering
from trainmedic_logs.lines.masks import masked
from trainmedic_logs.lines.rule import LogRule

OLDEST = timedelta(hours=1)
"""Older lines raise no alert: the state may have changed."""
SOURCE = "source"  # label of these alerts, with the value `LOG`
LOG = "log"
SUSPECTED = "suspected: waits for "  # followed by the confirming rules
# The boot time is computed from two clocks.
_BOOT_ERROR = timedelta(seconds=5)


def rule_labels(finding: Finding, rule: LogRule | None) -> dict[str, str]:
    # An agent may send others, such as by an older rule.
    named = rule.alert.labels.keys() if rule is not None and rule.alert is not None else frozenset()
    return {name: value for name, value in finding.labels.items() if name in named and value}


def silence_reason(known: KnownFinding, rule: LogRule | None, booted_at: datetime | None, now: datetime) -> str:
    """Return why it raises no alert, or ""."""
    if rule is None:
        return "no rule of its name is loaded"
    if rule.alert is None:
        return "its rule raises none"
    if known.role not in (Role.ROOT, rule.role):  # a pattern's own role
        return f"its role is {known.role}, which raises no alert"
    if is_before_boot(known, booted_at):
        return "its lines are from before the node was booted"
    if now - known.last_at > OLDEST:
        return "its lines are more than an hour old"
    return ""


def is_before_boot(known: KnownFinding, booted_at: datetime | None) -> bool:
    if booted_at is None:
        return False
    return known.last_at + timedelta(seconds=known.clock_error) + _BOOT_ERROR < booted_at


def with_alert(known: KnownFinding, rule: LogRule, now: datetime) -> KnownFinding:
    shown = known.as_finding
    labels = _labels(known, rule, rendering.severity_of(rule, shown))
    summary = _with_claim(rendering.summary_of(rule, shown), known)
    description = _description(rule, shown)
    if description:
        description = _with_claim(description, known)
    alert = FindingAlert(labels, fingerprint(labels), now, summary, description)
    return replace(known, alert=alert, no_alert_because="", is_suspected=False, tell_at=now)


def _labels(known: KnownFinding, rule: LogRule, severity: str) -> Mapping[str, str]:
    assert rule.alert is not None
    target = known.target
    labels = dict(known.labels)
    labels |= {"alertname": rule.alert.name, "severity": severity, "component": rule.alert.component}
    labels |= {SOURCE: LOG, "rule": known.rule}
    if target.kind is TargetKind.JOB:
        return labels | {"job_name": target.job or ""}
    if known.is_printed:
        # Users can print anything. These labels identify no node for playbooks, and people are notified.
        return labels | {"seen_on": target.node or "", "needs": "people"}
    labels["node"] = target.node or ""
    return labels | {"UUID": target.gpu or ""} if target.kind is TargetKind.GPU else labels


def _description(rule: LogRule, shown: Finding) -> str:
    text = rule.alert.description if rule.alert is not None else ""
    return masked(rendering.text_of(text, rendering.scope_of(shown)) or "")[:4000]


def _with_claim(text: str, known: KnownFinding) -> str:
    if not known.claimed_job:
        return text
    return f"{text} ({claim(known.claimed_job)}; nothing proves that this job runs on {known.origin.node})"


def claim(job: str) -> str:
    return f"from a log file that names job {job}"
