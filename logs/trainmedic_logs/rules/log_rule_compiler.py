from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from trainmedic_core import duration, model_errors
from trainmedic_core.allowance import Allowance, TooLarge
from trainmedic_core.expressions import evaluation, names, template_syntax
from trainmedic_core.expressions.regexes import SearchPattern
from trainmedic_core.expressions.template_syntax import Malformed, SyntaxTree
from trainmedic_core.problems import DocumentPath, FileProblem, did_you_mean
from trainmedic_core.target import TargetKind
from trainmedic_core.target_labels import NAMES_TARGET
from trainmedic_core.yaml_text import YamlDocument
from trainmedic_logs.domain.finding import Role
from trainmedic_logs.domain.log_sources import KERNEL_SOURCES, fault_of_source, misspelt
from trainmedic_logs.lines.matcher import FUNCTIONS
from trainmedic_logs.lines.records import EVENTS
from trainmedic_logs.lines.rendering import MEMBERS, SEVERITIES
from trainmedic_logs.lines.rule import (
    UNTIL_ATTEMPT,
    UNTIL_BOOT,
    UNTIL_ENDS,
    Confirmation,
    LinePattern,
    LogRule,
    RequiredCount,
    RuleAlert,
)
from trainmedic_logs.rules.log_rule_form import AlertForm, LogRuleForm, PatternForm

# Silence of findings without an alert, or that a boot, an attempt or a line ends.
_LONG_SILENCE = timedelta(hours=1)
_SHORTEST_LITERAL = 3
_ROLES_WITH_ALERT = (Role.ROOT, Role.CONFIRMATION)
_LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z")
_TAKEN_LABELS = NAMES_TARGET | {"alertname", "severity", "component", "source", "rule"}  # lower case
_ALERT_TEXTS = ("fields", "labels", "target", "finding")  # names that an alert's texts may use


def compile_document(document: YamlDocument, allowance: Allowance | None = None) -> LogRule | list[FileProblem]:
    compilation = _Compilation(document, allowance or Allowance())
    try:
        return compilation.run()
    except TooLarge as error:
        return [*sorted(set(compilation.problems)), document.problem((), str(error))]


@dataclass
class _Compilation:
    document: YamlDocument
    allowance: Allowance
    problems: list[FileProblem] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)
    has_sure_groups: bool = False  # no records, and all patterns could be read: a missing group is an error

    def run(self) -> LogRule | list[FileProblem]:
        raw = self.document.value
        form = model_errors.validate(LogRuleForm, self.document)
        if isinstance(form, list):
            self.problems.extend(form or [self.document.problem((), "is not a log rule")])
        if isinstance(raw, dict):
            self._read_patterns(raw)
            self._check_texts(raw)
        if isinstance(form, LogRuleForm):
            self._check_consistency(form)
            if not self.problems:
                return _rule(form)
        return sorted(set(self.problems))

    # --- patterns -------------------------------------------------------------------------------

    def _read_patterns(self, raw: Mapping[str, Any]) -> None:
        self.has_sure_groups = not raw.get("record")
        for name in ("match", "unless", "ends"):
            for path, text in _listed(raw.get(name), (name,)):
                if isinstance(text, dict):
                    path, text = (*path, "pattern"), text.get("pattern")
                if isinstance(text, str) and text:
                    self._read_pattern(text, path, name)

    def _read_pattern(self, text: str, path: DocumentPath, name: str) -> None:
        try:
            groups = SearchPattern(text).groups
        except ValueError as error:
            self._problem(path, f"{name}: {error}")
            self.has_sure_groups = False
            return
        if name == "match":
            self.groups.update(groups)

    # --- expressions and templates --------------------------------------------------------------

    def _check_texts(self, raw: Mapping[str, Any]) -> None:
        when = raw.get("when")
        if isinstance(when, str) and when:
            self._check_expression(when, ("when",), ("fields", "source"), template_syntax.parse_expression)
        self._check_template(raw.get("gpu"), ("gpu",), ("fields",))
        alert = raw.get("alert")
        if not isinstance(alert, dict):
            return
        for name in ("summary", "description", "severity"):
            self._check_template(alert.get(name), ("alert", name), _ALERT_TEXTS)
        labels = alert.get("labels")
        for name, text in labels.items() if isinstance(labels, dict) else ():
            self._check_template(text, ("alert", "labels", name), ("fields",))

    def _check_template(self, text: Any, path: DocumentPath, in_scope: tuple[str, ...]) -> None:
        if isinstance(text, str) and evaluation.is_template(text):
            self._check_expression(text, path, in_scope, template_syntax.parse_template)

    def _check_expression(
        self, text: str, path: DocumentPath, in_scope: tuple[str, ...], parse: Callable[[str], SyntaxTree]
    ) -> None:
        try:
            tree = parse(text)
            self.allowance.spend_on_template(len(tree.every))
            wrong = [*names.unknown(tree, (*in_scope, *FUNCTIONS)), *names.texts_compared_with_numbers(tree)]
            wrong += [*self._unknown_fields(tree), *_unknown_members(tree)]
            evaluation.compile_parsed(tree, ".".join(map(str, path)))
        except Malformed as error:
            self._problem(path, f"{path[-1]}: {error}")
            return
        for each in wrong:
            self._problem(path, f"{path[-1]}: {each}")

    def _unknown_fields(self, tree: SyntaxTree) -> list[str]:
        if not self.has_sure_groups:
            return []
        used = {parts[1] for parts in names.chains(tree) if parts[0] == "fields" and len(parts) > 1}
        there = f"; there are {', '.join(sorted(self.groups))}" if self.groups else ""
        return [
            f"no pattern has a group {name!r}{did_you_mean(name, self.groups) or there}"
            for name in sorted(used - self.groups - {"get", "items", "keys", "values"})
        ]

    # --- contradictions --------------------------------------------------------------------------

    def _check_consistency(self, form: LogRuleForm) -> None:
        self._check_sources(form)
        self._check_lines(form)
        self._check_target(form)
        if form.count is not None:
            self._check_count(form)
        if form.lasting and not form.ends:
            self._problem(("for",), "for: requires `ends`, the lines that end it")
        if form.alert is not None:
            self._check_alert(form, form.alert)

    def _check_sources(self, form: LogRuleForm) -> None:
        for path, name in _listed(self.document.value.get("source"), ("source",)):
            if fault := fault_of_source(str(name)):
                self._problem(path, f"source: {fault}")
        if form.record and (meant := misspelt(form.record, EVENTS)):
            self._problem(("record",), f"record: there is no event {form.record!r}; did you mean {meant!r}?")

    def _check_lines(self, form: LogRuleForm) -> None:
        if form.record is not None and not (form.contains or form.match):
            for name in ("unless", "ends"):
                if getattr(form, name):
                    self._problem((name,), f"{name}: not allowed in a rule over records; use `when` over their members")
            return
        if not form.contains:
            message = (
                "contains: a rule needs a literal, a text that each of its lines contains, so that other lines cost"
            )
            self._problem(("contains",), f"{message} nothing")
        for path, literal in _listed(self.document.value.get("contains"), ("contains",)):
            if len(literal) < _SHORTEST_LITERAL:
                self._problem(
                    path, f"contains: {literal!r} is in nearly every line; use at least {_SHORTEST_LITERAL} characters"
                )
        if not form.match:
            self._problem(("match",), "match: a rule needs a pattern, or `record`")

    def _check_target(self, form: LogRuleForm) -> None:
        if form.target not in (TargetKind.JOB, TargetKind.NODE, TargetKind.GPU):
            self._problem(("target",), "target: must be job, node or gpu")
        trusted = [name for name in form.source if name in KERNEL_SOURCES]
        if form.target is TargetKind.NODE and not trusted:
            self._problem(("target",), "target: only lines of the kernel or the fabric manager are about a node")
        if form.target is TargetKind.GPU and len(trusted) < len(form.source):
            self._problem(("target",), "target: only lines of the kernel or the fabric manager are about a gpu")
        if (form.target is TargetKind.GPU) != (form.gpu is not None):
            self._problem(
                ("gpu",) if form.gpu else ("target",), "gpu: required if the target is a gpu, and not allowed otherwise"
            )

    def _check_count(self, form: LogRuleForm) -> None:
        assert form.count is not None
        if form.count.in_a_row == (form.count.per is not None):
            self._problem(("count",), "count: requires either `per` or `in_a_row: true`")
        if form.count.in_a_row and form.record is None:
            self._problem(("count", "in_a_row"), "count: only records can be counted in a row")
        if form.count.per is not None and not form.count.per:
            self._problem(("count", "per"), "count.per: must be longer than 0s")

    def _check_alert(self, form: LogRuleForm, alert: AlertForm) -> None:
        roles = {form.role, *(each.role for each in form.match if isinstance(each, PatternForm))}
        if not roles & set(_ROLES_WITH_ALERT):
            self._problem(
                ("alert",), f"alert: a rule of role {form.role} raises no alert; it is evidence for a diagnosis"
            )
        if not evaluation.is_template(alert.severity) and alert.severity not in SEVERITIES:
            hint = did_you_mean(alert.severity, SEVERITIES) or f"; there are {', '.join(SEVERITIES)}"
            self._problem(("alert", "severity"), f"alert.severity: there is no {alert.severity!r}{hint}")
        for name in alert.labels:
            path = ("alert", "labels", name)
            if not _LABEL.match(name):
                self._problem(path, f"alert.labels: {name!r} is not a valid label name", at_key=True)
            elif name.lower() in _TAKEN_LABELS:
                self._problem(path, f"alert.labels: {name!r} is set by Trainmedic itself", at_key=True)
        if alert.until == UNTIL_ENDS and not form.ends:
            self._problem(("alert", "until"), "alert.until: `ends` requires the key `ends`")
        words = (UNTIL_BOOT, UNTIL_ATTEMPT, UNTIL_ENDS)
        if alert.until not in words:
            try:
                if not duration.check_back(duration.parse(alert.until)):
                    self._problem(("alert", "until"), "alert.until: must be longer than 0s")
            except ValueError as error:
                hint = did_you_mean(alert.until, words) or f"; or {', '.join(words)}"
                self._problem(("alert", "until"), f"alert.until: {error}{hint}")

    def _problem(self, path: DocumentPath, message: str, *, at_key: bool = False) -> None:
        self.problems.append(self.document.problem(path, message, at_key=at_key))


def _unknown_members(tree: SyntaxTree) -> list[str]:
    used = {parts[:2] for parts in names.chains(tree) if parts[0] in MEMBERS and parts[1] != "get"}
    return [
        f"{owner} has no {name!r}{did_you_mean(name, MEMBERS[owner]) or '; there are ' + ', '.join(MEMBERS[owner])}"
        for owner, name in sorted(used)
        if name not in MEMBERS[owner]
    ]


def _listed(value: Any, path: DocumentPath) -> list[tuple[DocumentPath, Any]]:
    if isinstance(value, list):
        return [((*path, index), each) for index, each in enumerate(value)]
    return [] if value is None else [(path, value)]


def _rule(form: LogRuleForm) -> LogRule:
    until, silence = _end_of_finding(form)
    count = form.count
    return LogRule(
        name=form.log_rule,
        sources=tuple(dict.fromkeys(form.source)),
        role=form.role,
        cause=form.cause,
        target=form.target,
        summary=form.summary,
        contains=form.contains,
        match=tuple(
            LinePattern(each) if isinstance(each, str) else LinePattern(each.pattern, each.role, each.cause)
            for each in form.match
        ),
        unless=form.unless,
        when=form.when or "",
        record=form.record or "",
        is_general=form.general,
        gpu=form.gpu or "",
        ends=form.ends,
        lasting=form.lasting,
        count=RequiredCount(count.at_least, count.per, count.in_a_row) if count else None,
        silence=silence,
        until=until,
        alert=_alert_of(form.alert) if form.alert else None,
    )


def _end_of_finding(form: LogRuleForm) -> tuple[str, timedelta]:
    if form.alert is None:
        if form.ends:
            return UNTIL_ENDS, _LONG_SILENCE
        return UNTIL_ATTEMPT if form.target is TargetKind.JOB else "", _LONG_SILENCE
    if form.alert.until in (UNTIL_BOOT, UNTIL_ATTEMPT, UNTIL_ENDS):
        return form.alert.until, _LONG_SILENCE
    return "", duration.parse(form.alert.until)


def _alert_of(alert: AlertForm) -> RuleAlert:
    confirm = Confirmation(alert.confirm.within, alert.confirm.by) if alert.confirm else None
    return RuleAlert(
        alert.name, alert.severity, alert.component, alert.labels, alert.summary, alert.description, confirm
    )
