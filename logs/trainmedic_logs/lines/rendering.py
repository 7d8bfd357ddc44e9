"""The texts that a rule makes of what it has found: labels, the GPU, and the alert's severity and summary.

Templates, as in playbooks. One that cannot be evaluated makes nothing: a finding is never lost for a label.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from trainmedic_core import errors
from trainmedic_core.expressions import evaluation
from trainmedic_core.expressions.evaluation import Expression, TextTemplate
from trainmedic_core.expressions.template_syntax import Malformed
from trainmedic_logs.domain.finding import CLAIMED_JOB, Finding
from trainmedic_logs.lines.masks import masked
from trainmedic_logs.lines.matcher import FUNCTIONS
from trainmedic_logs.lines.rule import LogRule

LONGEST_LABEL = 256
MOST_LABELS = 10
SEVERITIES = ("critical", "warning", "info")
_LONGEST_SUMMARY = 1000


def text_of(template: str, scope: Mapping[str, Any]) -> str | None:
    """Return what the template makes; None where it cannot be evaluated."""
    if not evaluation.is_template(template):
        return template
    try:
        return str(_compiled(template).evaluate({**scope, **FUNCTIONS}))
    except (errors.ExpressionError, Malformed):
        return None


@lru_cache(maxsize=1024)
def _compiled(template: str) -> Expression | TextTemplate:
    return evaluation.compile_text(template, "a template of a log rule")


def labels_of(rule: LogRule, fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels that the rule adds: text, at most ten of 256 characters, masked. One that is empty, or that
    cannot be made of these fields, is left out."""
    made: dict[str, str] = {}
    for name, template in list(rule.alert.labels.items())[:MOST_LABELS] if rule.alert else ():
        text = text_of(template, {"fields": fields})
        if text and text.strip():
            made[name] = masked(text.strip())[:LONGEST_LABEL]
    return made


MEMBERS = {
    "target": ("kind", "key", "node", "gpu", "job"),
    "finding": ("count", "line", "rule", "ranks", "source"),
}
"""What the alert's texts may speak of beside fields and labels, whose names are a rule's own."""


def scope_of(finding: Finding) -> dict[str, Any]:
    """Return what the alert's texts may speak of."""
    target = finding.target
    return {
        "fields": dict(finding.fields),
        "labels": dict(finding.labels),
        "target": {"kind": str(target.kind), "key": target.key, "node": target.node or finding.origin.node,
                   "gpu": target.gpu or "",
                   "job": target.job or finding.origin.job or finding.labels.get(CLAIMED_JOB, "")},
        "finding": {"count": finding.count, "line": finding.line, "rule": finding.rule,
                    "ranks": sorted(finding.ranks), "source": finding.origin.source},
    }  # fmt: skip


def severity_of(rule: LogRule, finding: Finding) -> str:
    """Return the severity of the finding's alert; ``warning`` where the rule's template makes none."""
    made = text_of(rule.alert.severity, scope_of(finding)) if rule.alert else None
    return made if made in SEVERITIES else "warning"


def summary_of(rule: LogRule, finding: Finding) -> str:
    """Return the alert's summary, else that of the rule."""
    made = text_of(rule.alert.summary, scope_of(finding)) if rule.alert else None
    return masked(made or rule.summary or rule.name)[:_LONGEST_SUMMARY]
