"""Rendering of a rule's templates. Failing ones are omitted from the finding."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from trainmedic_core import errors
from trainmedic_core.expressions import evaluation
from trainmedic_core.expressions.evaluation import Expression, TextTemplate
from trainmedic_core.expressions.template_syntax import Malformed
from trainmedic_core.target import PARTS
from trainmedic_logs.domain.finding import CLAIMED_JOB, Finding
from trainmedic_logs.lines.masks import masked
from trainmedic_logs.lines.matcher import FUNCTIONS
from trainmedic_logs.lines.rule import LogRule

LONGEST_LABEL = 256
MOST_LABELS = 10
SEVERITIES = ("critical", "warning", "info")
_LONGEST_SUMMARY = 1000


def text_of(template: str, scope: Mapping[str, Any]) -> str | None:
    """Return the rendered text, None on errors."""
    if not evaluation.is_template(template):
        return template
    try:
        return evaluation.as_text(_compiled(template).evaluate({**scope, **FUNCTIONS}))
    except (errors.ExpressionError, Malformed):
        return None


@lru_cache(maxsize=1024)
def _compiled(template: str) -> Expression | TextTemplate:
    return evaluation.compile_text(template, "a template of a log rule")


def labels_of(rule: LogRule, fields: Mapping[str, Any]) -> dict[str, str]:
    """Return labels, masked and limited, without empty and failing ones."""
    made: dict[str, str] = {}
    for name, template in list(rule.alert.labels.items())[:MOST_LABELS] if rule.alert else ():
        text = text_of(template, {"fields": fields})
        if text and text.strip():
            made[name] = masked(text.strip())[:LONGEST_LABEL]
    return made


MEMBERS = {  # members of the names in `scope_of`, for checks of templates
    "target": ("kind", "key", *PARTS),
    "finding": ("count", "line", "rule", "ranks", "source"),
}


def scope_of(finding: Finding) -> dict[str, Any]:
    """Return the names that an alert's templates may use."""
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
    """Return the severity, ``warning`` for an unknown one or a failing template."""
    made = text_of(rule.alert.severity, scope_of(finding)) if rule.alert else None
    return made if made in SEVERITIES else "warning"


def summary_of(rule: LogRule, finding: Finding) -> str:
    made = text_of(rule.alert.summary, scope_of(finding)) if rule.alert else None
    return masked(made or rule.summary or rule.name)[:_LONGEST_SUMMARY]
