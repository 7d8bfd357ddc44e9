"""Alerts of findings as the server sends them. Only the server names targets, never a log line."""

from __future__ import annotations

from trainmedic.wire.envelope import write_time
from trainmedic_core.target_labels import NAMES_TARGET
from trainmedic_logs.domain.finding import CLAIMED_JOB, Finding
from trainmedic_logs.domain.finding_codec import write_ranks
from trainmedic_logs.domain.known_finding import FindingAlert, KnownFinding
from trainmedic_logs.lines.rule import LogRule
from trainmedic_logs.rules.alert_decisions import rule_labels
from trainmedic_server.domain.alert import Alert, AlertStatus

_LONGEST_RANKS = 1000  # characters
_TARGET_LABELS = NAMES_TARGET | {CLAIMED_JOB}


def labels_of_rule(finding: Finding, rule: LogRule | None) -> dict[str, str]:
    """Return the labels that the rule adds, without those that name a target: only trusted places do."""
    labels = rule_labels(finding, rule)
    return {name: value for name, value in labels.items() if name.lower() not in _TARGET_LABELS}


def alert_of(known: KnownFinding, alert: FindingAlert) -> Alert:
    annotations = {
        "summary": alert.summary,
        "description": alert.description,
        "finding": known.id,
        "line": known.line,
        "count": str(known.count),
        "first": write_time(known.first_at),
        "last": write_time(known.last_at),
        "ranks": _shown_ranks(known),
        "role": known.role.value,
        "cause": known.cause.value,
        "nodes": ", ".join(sorted(known.nodes)[:20]),
    }
    return Alert(
        fingerprint=alert.fingerprint,
        status=AlertStatus.FIRING if known.ended_at is None else AlertStatus.RESOLVED,
        labels=alert.labels,
        annotations={name: value for name, value in annotations.items() if value},
        starts_at=alert.starts_at,
        ends_at=known.ended_at,
    )


def _shown_ranks(known: KnownFinding) -> str:
    ranks = write_ranks(known.ranks)
    return ranks if len(ranks) <= _LONGEST_RANKS else f"{ranks[:_LONGEST_RANKS]}…"
