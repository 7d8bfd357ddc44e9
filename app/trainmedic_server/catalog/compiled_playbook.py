"""Compiled playbook, evaluated without further reading or parsing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from msgspec import Struct, field
from pydantic import BaseModel, ConfigDict, ValidationError

from trainmedic_core import errors, model_errors
from trainmedic_core.expressions.evaluation import Expression, TextTemplate, ValueTemplate, as_text
from trainmedic_core.expressions.regexes import ValueTooLong
from trainmedic_core.problems import DocumentPath, path_text
from trainmedic_core.target import Target, TargetKind
from trainmedic_server import telemetry
from trainmedic_server.catalog.matchers import Matcher
from trainmedic_server.catalog.quoted_query import QuotedQuery
from trainmedic_server.catalog.scope_check import OUTPUT
from trainmedic_server.domain import beginnings, inputs, job_lookup, proof, selectors, target_resolution
from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.playbook import GroupTarget, Playbook
from trainmedic_server.domain.run import Run
from trainmedic_server.domain.topology import Topology
from trainmedic_server.ports.playbooks import Match, Scope

log = telemetry.logger(__name__)


class UncheckedParams(BaseModel):
    """Parameters of an action that this server lacks."""

    model_config = ConfigDict(extra="allow", frozen=True)


class CompiledStep(Struct, frozen=True):
    name: str
    when: Expression | None = None
    params: ValueTemplate | None = None  # ``with``; None for a step without an action
    model: type[BaseModel] = UncheckedParams  # the action's parameters
    fixed: BaseModel | None = None  # None if the parameters contain templates
    message: Expression | TextTemplate | str = ""  # an approval's question, or the duration or time of a wait
    undo: CompiledStep | None = None  # own undo of a step; None without one
    uses_output: bool = False  # for an undo: True if its parameters use the step's ``output``
    queries: Mapping[str, QuotedQuery] = field(default_factory=dict)  # parameters with PromQL and templates, by name
    until: Expression | None = None  # condition of a wait over its action's output


class CompiledUse(Struct, frozen=True):
    """A fragment in a playbook: its steps see only its inputs and one another."""

    id: str
    fragment: str
    ids: tuple[str, ...]  # of its steps, without `id` and dot
    declared: Mapping[str, inputs.Input]
    values: ValueTemplate | None  # given inputs

    def scope_inside(self, scope: Scope) -> Scope:
        """Return the names that its steps see. Raises ExpressionError."""
        steps = {name: scope["steps"][full] for name in self.ids if (full := f"{self.id}.{name}") in scope["steps"]}
        return {**{name: value for name, value in scope.items() if name != "vars"}, "steps": steps} | {
            "inputs": self._read(scope)
        }

    def _read(self, scope: Scope) -> Mapping[str, Any]:
        rendered = self.values.render(scope) if self.values is not None else {}
        # A rendered number may be meant as text, such as a node's name.
        texts = {
            name: str(value) if type(value) in (int, float) and self.declared[name].type != "number" else value
            for name, value in rendered.items()
        }
        read = inputs.read(self.declared, texts, "fragment")
        for name, message in read.problems:
            raise errors.ExpressionError(f"use of fragment {self.fragment!r}: {name}: {message}")
        return read.values


class YamlPlaybook(Struct, frozen=True):
    definition: Playbook
    version: str  # hash of the text
    text: str  # with its fragments and files
    source: str  # file
    line: int
    matchers: tuple[Matcher, ...] = ()
    condition: Expression | None = None  # ``on.when``
    parts: Mapping[str, Expression | TextTemplate | str] = field(default_factory=dict)  # of a target in templates
    selectors: Mapping[str, tuple[Expression | TextTemplate | str, ...]] = field(default_factory=dict)  # of a group
    steps: Mapping[tuple[str, int], CompiledStep] = field(default_factory=dict)  # by phase and index
    effect: QuotedQuery | None = None
    remembers: Mapping[str, timedelta] | None = None  # windows of ``runs.count``; None if no step uses ``runs``
    uses: Mapping[tuple[str, int], CompiledUse] = field(default_factory=dict)  # by phase and index of a step

    def effect_query(self, run: Run) -> str | None:
        return self.effect.of_effect(run, self.definition.vars) if self.effect else None

    def match(self, alert: Alert) -> Match:
        """Check alertname, matchers, ``when`` and ``proof``, in this order."""
        refusal = self._refusal_of_name(alert)
        if refusal:
            return Match(False, refusal)
        for matcher in self.matchers:
            try:
                if not matcher.matches(alert.labels):
                    return Match(False, matcher.refusal(alert.labels))
            except ValueTooLong as error:
                return Match(False, str(error), failed=True)
        if self.condition is not None:
            try:
                if not self.condition.holds(self._scope_of(alert)):
                    return Match(False, f"on.when does not hold: {self.condition.text}")
            except errors.ExpressionError as error:
                return Match(False, str(error), failed=True)
        missing = proof.lacking(self.definition.on.proofs, alert)
        return Match(False, missing, unproven=True) if missing else Match(True)

    def _refusal_of_name(self, alert: Alert) -> str:
        """Return why the alert's name does not begin the playbook, "" if it does."""
        trigger, names = self.definition.on, self.definition.begins_with
        if trigger.manual is not None:
            return "people start it, no alert does"
        if trigger.alert is None and not alert.is_stand_in:
            return f"{trigger.starter}, no alert does"
        if alert.name not in names:
            return f"alertname is {alert.name!r}, not {' or '.join(map(repr, names))}"
        if trigger.run is not None:
            status = beginnings.ended_run_of(alert).get("status")
            if status not in trigger.run.status:
                return f"the run ended as {status}, not as {' or '.join(trigger.run.status)}"
        return ""

    def target_of(self, alert: Alert, topology: Topology) -> Target | Unresolved:
        """Return Unresolved, never a guess, unless the alert names one known target."""
        target = self._target_of(alert, topology)
        if isinstance(target, Unresolved) or isinstance(target := target_resolution.bounded(target), Unresolved):
            return target
        return target_resolution.unknown_node(target, topology, alert.labels) or target

    def _target_of(self, alert: Alert, topology: Topology) -> Target | Unresolved:
        if isinstance(self.definition.target, TargetKind):
            return target_resolution.resolve(self.definition.target, alert.labels, topology)
        if isinstance(self.definition.target, GroupTarget):
            return self._group_of(self.definition.target, alert, topology)
        parts: dict[str, str] = {}
        for name, template in self.parts.items():
            value = self._target_part(name, template, alert)
            if isinstance(value, Unresolved):
                return value
            parts[name] = value
        if "node" in parts:
            node = target_resolution.named_node(parts["node"], topology)
            if isinstance(node, Unresolved):
                return node
            parts["node"] = node
            if "gpu" in parts:
                return target_resolution.placed_gpu(node, parts["gpu"], topology)
        if "job" in parts:
            job = job_lookup.resolve_job(parts["job"], alert.labels, topology)
            if isinstance(job, Unresolved):
                return job
            parts["job"] = job
        return Target(self.definition.target.kind, **parts)

    def _group_of(self, written: GroupTarget, alert: Alert, topology: Topology) -> Target | Unresolved:
        terms: dict[str, list[str]] = {}
        for name, templates in self.selectors.items():
            for template in templates:
                value = self._target_part(f"{written.plural}.{name}", template, alert)
                if isinstance(value, Unresolved):
                    return value
                terms.setdefault(name, []).append(value)
        selector = selectors.of_written(written.plural, terms or selectors.ALL)
        selection = selectors.resolve(selector, topology)
        return selection if isinstance(selection, Unresolved) else selector.target

    def when(self, phase: str, index: int, scope: Scope) -> bool:
        condition = self.steps[phase, index].when
        return condition is None or condition.holds(self._scope_inside(phase, index, scope))

    def _scope_inside(self, phase: str, index: int, scope: Scope) -> Scope:
        use = self.uses.get((phase, index))
        return scope if use is None else use.scope_inside(scope)

    def params(self, phase: str, index: int, scope: Scope) -> BaseModel:
        return self._rendered(self.steps[phase, index], self._scope_inside(phase, index, scope))

    def undo_params(self, phase: str, index: int, scope: Scope, output: Mapping[str, Any] | None) -> BaseModel | None:
        undo = self.steps[phase, index].undo
        assert undo is not None
        if undo.uses_output and output is None:
            return None
        scope = self._scope_inside(phase, index, scope)
        return self._rendered(undo, {**scope, OUTPUT: output} if undo.uses_output else scope)

    def _rendered(self, step: CompiledStep, scope: Scope) -> BaseModel:
        if step.fixed is not None:
            return step.fixed
        assert step.params is not None
        rendered = {**step.params.render(scope), **{name: each.rendered(scope) for name, each in step.queries.items()}}
        try:
            params = _validated(step.model, rendered)
            faults = model_errors.booleans_as_numbers(rendered, params)
        except ValidationError as error:
            faults = model_errors.faults(error, step.model, rendered)
        except Exception as error:  # A faulty check, also of another package's action, fails only this step.
            log.exception("cannot check parameters", playbook=self.definition.playbook, step=step.name)
            reason = f"the parameters of {step.name} cannot be checked: {type(error).__name__}"
            raise errors.ExpressionError(reason) from error
        if not faults:
            return params
        wrong = "; ".join(
            f"{path_text(fault.path)}: {fault.message}" if fault.path else fault.message for fault in faults
        )
        raise errors.ExpressionError(f"the parameters of {step.name} are not valid: {wrong}")

    def until(self, phase: str, index: int, scope: Scope, output: Mapping[str, Any]) -> bool | None:
        condition = self.steps[phase, index].until
        return (
            None if condition is None else condition.holds({**self._scope_inside(phase, index, scope), OUTPUT: output})
        )

    def message(self, phase: str, index: int, scope: Scope) -> str:
        return _text(self.steps[phase, index].message, self._scope_inside(phase, index, scope))

    def _target_part(self, name: str, template: Expression | TextTemplate | str, alert: Alert) -> str | Unresolved:
        try:
            value = _text(template, self._scope_of(alert)).strip()
        except errors.ExpressionError as error:
            return Unresolved("target_unknown", str(error))
        return value or Unresolved("target_unknown", f"target.{name} is empty for this alert")

    def _scope_of(self, alert: Alert) -> dict[str, Any]:
        data = alert.as_data()
        return {
            "alert": data,
            "labels": data["labels"],
            "annotations": data["annotations"],
            "vars": self.definition.vars,
            "inputs": inputs.of_annotations(alert.annotations) if self.definition.on.manual else {},
            "ended_run": beginnings.ended_run_of(alert),
        }


def by_alertname(playbooks: Iterable[YamlPlaybook]) -> dict[str, list[YamlPlaybook]]:
    """Return the playbooks that begin with an alert, by each of its names."""
    named: dict[str, list[YamlPlaybook]] = {}
    for playbook in playbooks:
        for name in dict.fromkeys(playbook.definition.on.alertnames):
            named.setdefault(name, []).append(playbook)
    return named


def _validated(model: type[BaseModel], rendered: Any) -> BaseModel:
    """Write out rendered numbers where text is required. Raises ValidationError."""
    try:
        return model.model_validate(rendered)
    except ValidationError as error:
        for fault in model_errors.faults(error, model, rendered):
            if fault.type != "string_type" or not _write_out(rendered, fault.path):
                raise
        return model.model_validate(rendered)


def _write_out(rendered: Any, path: DocumentPath) -> bool:
    """Return False for values other than numbers and booleans."""
    for part in path[:-1]:
        rendered = rendered[part]
    value = rendered[path[-1]] if path else None
    if not isinstance(value, (int, float)):
        return False
    rendered[path[-1]] = as_text(value)
    return True


def _text(template: Expression | TextTemplate | str, scope: Mapping[str, Any]) -> str:
    if isinstance(template, str):
        return template
    value = template.evaluate(scope)
    if isinstance(value, list):  # such as an input of nodes
        return ",".join(map(as_text, value))
    return as_text(value)
