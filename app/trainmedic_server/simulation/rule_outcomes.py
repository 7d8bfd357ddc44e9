"""Outcome of each alert in a rule file: the playbook that it starts, or why none does, with conditions on unknown
labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from pydantic import BaseModel, ConfigDict, Field, model_validator

from trainmedic_core import model_errors, yaml_files, yaml_text
from trainmedic_core.expressions.regexes import ValueTooLong
from trainmedic_core.problems import FileProblem
from trainmedic_core.yaml_text import YamlDocument
from trainmedic_server.catalog.alert_map import CompiledAlertMap, Rename
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook, by_alertname
from trainmedic_server.catalog.matchers import Matcher
from trainmedic_server.domain import proof
from trainmedic_server.domain.alert import SHIPPED_RULE_LABEL, Alert, AlertStatus
from trainmedic_server.domain.alert_suggestions import Suggestion, snippet, suggest
from trainmedic_server.domain.proof import AlertProof

_AT = datetime(2026, 1, 1, tzinfo=UTC)
_ALWAYS_KNOWN = frozenset({"alertname", SHIPPED_RULE_LABEL})  # labels known from the rule alone


class NamedAlert(Struct, frozen=True):
    name: str
    line: int
    labels: Mapping[str, str]  # excludes ``alertname``
    is_complete: bool = False  # False for a rule, whose expression adds unknown labels
    expression: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)
    source: str = ""  # origin in a list of alerts
    expected: str | None = None  # playbook that should start; None without expectation or with `reason`
    reason: str = ""  # why none should start


class RuleOutcome(Struct, frozen=True):
    alert: NamedAlert
    renamed_to: str | None = None
    playbooks: tuple[str, ...] = ()  # that it starts, if `conditions` hold
    conditions: tuple[str, ...] = ()  # on labels that the rule does not state
    reason: str = ""  # why it starts none
    suggestion: Suggestion | None = None

    @property
    def is_as_expected(self) -> bool:
        """True also without an expectation."""
        if self.alert.expected is not None:
            return self.playbooks == (self.alert.expected,)
        return not self.alert.reason or not self.playbooks

    def as_data(self) -> dict[str, Any]:
        suggestion = self.suggestion
        return {
            "alert": self.alert.name,
            "line": self.alert.line,
            "source": self.alert.source,
            "renamed_to": self.renamed_to,
            "playbooks": list(self.playbooks),
            "conditions": list(self.conditions),
            "reason": self.reason,
            "suggested": suggestion.name if suggestion else None,
            "rename": snippet(self.alert.name, suggestion) if suggestion else None,
            "as_expected": self.is_as_expected,
        }


class _FileModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class _Source(_FileModel):  # of a public rule set
    repository: str
    path: str


class _AlertForm(_FileModel):
    alert: str
    origin: str = Field(alias="from")
    labels: dict[str, str] = {}
    playbook: str | None = None
    reason: str | None = None

    @model_validator(mode="after")
    def _one_outcome(self) -> _AlertForm:
        if (self.playbook is None) == (self.reason is None):
            raise ValueError("must have either a playbook that starts, or a reason why none does")
        return self


class _AlertList(_FileModel):
    """Alerts with expected outcomes."""

    sources: dict[str, _Source] = {}
    alerts: tuple[_AlertForm, ...]


def read(path: Path) -> tuple[list[NamedAlert], list[FileProblem]]:
    """Return alerts and problems. Never raises."""
    text = yaml_files.read_text(path)
    if isinstance(text, FileProblem):
        return [], [text]
    documents, problems = yaml_text.read(text, str(path))
    alerts: list[NamedAlert] = []
    for document in documents:
        if isinstance(document.value, dict) and "alerts" in document.value:
            listed = model_errors.validate(_AlertList, document)
            if isinstance(listed, list):
                problems.extend(listed)
            else:
                alerts.extend(_alerts_in_list(listed, document))
        else:
            alerts.extend(_alerts_of_rules(document))
    if not alerts and not problems:
        message = "has no alert; pass a file of Prometheus rules (groups, rules, alert)"
        problems.append(FileProblem(str(path), None, None, message))
    return alerts, problems


def _alerts_in_list(content: _AlertList, document: YamlDocument) -> Iterator[NamedAlert]:
    for place, each in enumerate(content.alerts):
        yield NamedAlert(
            each.alert,
            document.marks["alerts", place].line,
            each.labels,
            is_complete=True,
            source=each.origin,
            expected=each.playbook,
            reason=each.reason or "",
        )


def _alerts_of_rules(document: YamlDocument) -> Iterator[NamedAlert]:
    value = document.value
    if not isinstance(value, dict):
        return
    prefix = ("spec",) if isinstance(value.get("spec"), dict) else ()
    content = value["spec"] if prefix else value
    for at, group in enumerate(_list(content.get("groups"))):
        for place, rule in enumerate(_list(group.get("rules") if isinstance(group, dict) else None)):
            if not isinstance(rule, dict) or not isinstance(rule.get("alert"), str):
                continue
            written = _texts(rule.get("labels"))
            fixed = {label: text for label, text in written.items() if "{{" not in text}
            line = document.position((*prefix, "groups", at, "rules", place)).line
            expression = str(rule.get("expr", ""))
            yield NamedAlert(
                rule["alert"], line, fixed, expression=expression, annotations=_texts(rule.get("annotations"))
            )


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _texts(value: Any) -> dict[str, str]:
    return {name: str(text) for name, text in value.items()} if isinstance(value, dict) else {}


def outcomes(
    alerts: Sequence[NamedAlert], alert_map: CompiledAlertMap, playbooks: Sequence[YamlPlaybook]
) -> list[RuleOutcome]:
    reacting = by_alertname(playbooks)
    return [_outcome(alert, alert_map, reacting) for alert in alerts]


def _outcome(alert: NamedAlert, alert_map: CompiledAlertMap, reacting: Mapping[str, list[YamlPlaybook]]) -> RuleOutcome:
    sent = {"alertname": alert.name, **alert.labels}
    rename, conditions = _rename(alert, sent, alert_map)
    labels = rename.renamed(sent) if rename is not None else sent
    name = labels["alertname"]
    known = None if alert.is_complete else _ALWAYS_KNOWN | labels.keys()
    started: list[str] = []
    refusals: list[str] = []
    for playbook in reacting.get(name, ()):
        refusal, needed = _reaction(playbook, labels, known)
        if refusal:
            refusals.append(f"{playbook.definition.name}: {refusal}")
        else:
            started.append(playbook.definition.name)
            conditions += needed
    renamed_to = name if name != alert.name else None
    if started:
        return RuleOutcome(alert, renamed_to, tuple(started), tuple(dict.fromkeys(conditions)))
    suggestion = None if name in reacting else _suggested(alert, sent, reacting)
    reason = "; ".join(refusals) or alert.reason or "no playbook reacts to it"
    return RuleOutcome(alert, renamed_to, reason=reason, suggestion=suggestion)


def _suggested(
    alert: NamedAlert, sent: Mapping[str, str], reacting: Mapping[str, list[YamlPlaybook]]
) -> Suggestion | None:
    texts, is_complete = alert.annotations.values(), alert.is_complete
    suggestion = suggest(sent, alert.expression, texts, reacting, is_complete=is_complete)
    if suggestion is None:
        return None
    labels = {**sent, "alertname": suggestion.name}
    labels.pop(SHIPPED_RULE_LABEL, None)  # a renamed alert is not of a shipped rule
    known = None if is_complete else _ALWAYS_KNOWN | labels.keys()
    starts = any(not _reaction(playbook, labels, known)[0] for playbook in reacting[suggestion.name])
    return suggestion if starts else None


def _rename(alert: NamedAlert, sent: Mapping[str, str], alert_map: CompiledAlertMap) -> tuple[Rename | None, list[str]]:
    known = None if alert.is_complete else _ALWAYS_KNOWN | sent.keys()
    for rename in alert_map.renames.get(alert.name, ()):
        refusal, needed = _judged(rename.matchers, sent, known)
        if not refusal:
            return rename, needed
    return None, []


def _reaction(playbook: YamlPlaybook, labels: Mapping[str, str], known: frozenset[str] | None) -> tuple[str, list[str]]:
    # As `_judged`, for all conditions of the playbook.
    if known is None:
        match = playbook.match(Alert("", AlertStatus.FIRING, labels, {}, _AT))
        return ("" if match.matched else match.why), []
    refusal, needed = _judged(playbook.matchers, labels, known)
    if refusal:
        return refusal, needed
    if playbook.condition is not None:
        needed.append(f"on.when: {playbook.condition.text}")
    proofs = playbook.definition.on.proofs
    missing = proof.lacking(proofs, Alert("", AlertStatus.FIRING, labels, {}, _AT))
    if missing and AlertProof.HARDWARE_XID in proofs:  # An unknown label may hold a code.
        return "", [*needed, "a label holds an XID that means hardware"]
    return missing, needed


def _judged(
    matchers: Sequence[Matcher], labels: Mapping[str, str], known: frozenset[str] | None
) -> tuple[str, list[str]]:
    """Return a refusal, empty for none, and conditions on unknown labels. `known` None: all labels are known."""
    needed: list[str] = []
    for matcher in matchers:
        try:
            holds = matcher.matches(labels)
        except ValueTooLong as error:
            return str(error), []
        if known is not None and matcher.label not in known:
            needed.append(str(matcher))
        elif not holds:
            return matcher.refusal(labels), []
    return "", needed
