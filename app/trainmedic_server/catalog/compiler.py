"""Compiler of playbooks. The parts are checked one by one, so that one error does not hide others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from jinja2 import nodes
from msgspec.structs import replace
from pydantic import BaseModel, ValidationError

from trainmedic_core import model_errors
from trainmedic_core.allowance import Allowance, TooLarge
from trainmedic_core.expressions import evaluation, template_syntax
from trainmedic_core.expressions.evaluation import Expression, TextTemplate, ValueTemplate
from trainmedic_core.expressions.template_syntax import Malformed, SyntaxTree
from trainmedic_core.problems import DocumentPath, FileProblem, cut, did_you_mean, entry_of, path_text
from trainmedic_core.target import MEMBER_KINDS, TargetKind
from trainmedic_core.yaml_text import YamlDocument
from trainmedic_server.catalog import (
    attachments,
    cures,
    definition_check,
    matchers,
    memory_check,
    quoted_query,
    scope_check,
    written_actions,
    written_steps,
)
from trainmedic_server.catalog.compiled_playbook import CompiledStep, CompiledUse, YamlPlaybook
from trainmedic_server.catalog.fragments import Use
from trainmedic_server.catalog.scope_check import GROUP_NAMES, STEP_NAMES, VisibleNames
from trainmedic_server.domain import playbook_target, value_types
from trainmedic_server.domain.inputs import InputType
from trainmedic_server.domain.playbook import (
    APPROVAL,
    CHECK,
    EVERY_PHASE,
    MOST_MATCHERS,
    MOST_STEPS,
    ON_LIMITED,
    PHASES,
    PROMETHEUS_QUERY,
    ActionStep,
    Mode,
    Playbook,
    TargetParts,
    UndoTrigger,
    place_of,
)
from trainmedic_server.domain.playbook_target import JOBS, ON_NODE
from trainmedic_server.domain.value_types import NUMBER, TEXT, TEXT_LIST, Shape
from trainmedic_server.ports.actions import Action, Actions, MultiNodeAction, TemplateChecked

# Phases whose steps see only steps of their own phase.
_ISOLATED_PHASES = ("steps", CHECK, ON_LIMITED)
# Keys of texts for people. After a blank, a ``#3`` in one begins a YAML comment, which is hardly ever meant.
_PROSE = ("approve", "message", "summary", "title", "comment", "reason", "body", "text")


def compile_document(
    document: YamlDocument,
    actions: Actions,
    allowance: Allowance | None = None,
    uses: Sequence[Use] = (),
) -> YamlPlaybook | list[FileProblem]:
    """Return the playbook or its errors. The document has the steps of `uses` already (`fragments.expand`)."""
    # `allowance` bounds the templates and manifests of all documents of a file together; by default of this one.
    compilation = _Compilation(document, actions, allowance or Allowance(), uses)
    try:
        return compilation.run()
    except TooLarge as error:
        return [*sorted(set(compilation.problems)), document.problem(compilation.place, str(error))]


@dataclass
class _Compilation:
    document: YamlDocument
    actions: Actions
    allowance: Allowance
    uses: Sequence[Use] = ()
    problems: list[FileProblem] = field(default_factory=list)
    place: DocumentPath = ()  # of the last template or manifest, for TooLarge
    manifests: dict[str, Mapping[str, Any] | list[FileProblem]] = field(default_factory=dict)  # by name in ``template``

    def run(self) -> YamlPlaybook | list[FileProblem]:
        definition = model_errors.validate(Playbook, self.document, PHASES, cures.of_fault)
        if isinstance(definition, list):
            self.problems.extend(definition)
        raw = self.document.value
        if not isinstance(raw, dict):
            return self.problems
        self._vars = raw["vars"] if isinstance(raw.get("vars"), dict) else {}
        self._kind = scope_check.kind_of(raw.get("target"))
        self._is_group = playbook_target.is_group(raw.get("target"))
        self._has_jobs = _mapping(raw.get("target")).get(JOBS) == ON_NODE
        self._on_jobs: set[DocumentPath] = set()  # places of steps that work on the jobs of ``jobs: on_node``
        self._asks_first = False  # True if an action makes approve the default mode
        trigger = raw.get("on") if isinstance(raw.get("on"), dict) else {}
        assert isinstance(trigger, dict)
        self._own_names = scope_check.names_of_beginning(trigger)
        declared = _mapping(trigger.get("manual")).get("inputs")
        self._inputs = {
            str(name): _shape_of_input(_mapping(spec).get("type")) for name, spec in _mapping(declared).items()
        }
        before_run = self._visible(scope_check.names_before_run(trigger))
        label_matchers = self._matchers(trigger.get("matchers"))
        condition = self._expression(trigger.get("when"), ("on", "when"), before_run)
        parts = self._parts(raw.get("target"), before_run)
        selectors = self._selectors(raw.get("target"), before_run)
        self._used: dict[tuple[str, int], CompiledUse] = {}
        self._windows: dict[str, timedelta] | None = None  # of ``runs.count``; None if no step uses ``runs``
        steps = dict(self._steps(raw)) | self._approval(raw.get("approval"))
        if self._has_jobs and self._kind is not None and not self._on_jobs:
            self._report(("target", JOBS), "target.jobs: no step works on the jobs; leave it out")
        effect = self._effect(raw.get("effect"))
        for place, text in _texts(self._vars, ("vars",)):
            if evaluation.is_template(text):
                self._report(place, "variables are constants; a template in one is not rendered")
        self._check_cut_texts()
        if isinstance(definition, Playbook):
            if self._asks_first and "mode" not in raw:
                definition = definition.model_copy(update={"mode": Mode.APPROVE})
            for path, message in definition_check.problems(definition):
                self._report(path, message)
        if self.problems or not isinstance(definition, Playbook):
            return sorted(set(self.problems))
        text = self.document.text
        return YamlPlaybook(
            definition=self._with_targets(definition),
            version=hashlib.sha256(text.encode()).hexdigest(),
            text=text,
            source=self.document.source,
            line=self.document.marks[()].line,
            matchers=label_matchers,
            condition=condition,
            parts=parts,
            selectors=selectors,
            steps=steps,
            effect=effect,
            remembers=self._windows,
            uses=self._used,
        )

    def _visible(
        self,
        names: tuple[str, ...],
        kind: TargetKind | None = None,
        before: Collection[str] = (),
        outputs: Mapping[str, Mapping[str, Shape]] = MappingProxyType({}),
        later: Collection[str] = (),
    ) -> VisibleNames:
        has_jobs = self._has_jobs and kind is not TargetKind.GROUP
        scope = (*names, *self._own_names)
        return VisibleNames(scope, self._vars, kind, before, outputs, later, self._inputs, has_jobs=has_jobs)

    # --- trigger, target, effect

    def _matchers(self, written: Any) -> tuple[matchers.Matcher, ...]:
        parsed: list[matchers.Matcher] = []
        for index, text in enumerate(written[:MOST_MATCHERS] if isinstance(written, list) else ()):
            if isinstance(text, str):
                try:
                    written_here = matchers.parse(text)
                except ValueError as error:
                    self._report(("on", "matchers", index), f"on.matchers[{index}]: {error}")
                    continue
                for each in written_here:
                    if (wrong := matchers.pattern_error(each)) is not None:
                        cure = "; write the condition in on.when" if "{{" in each.value else ""
                        self._report(("on", "matchers", index), f"on.matchers[{index}]: {wrong}{cure}")
                parsed.extend(written_here)
        if len(parsed) > MOST_MATCHERS:
            self._report(("on", "matchers"), f"on.matchers: a playbook has at most {MOST_MATCHERS} matchers")
        # Cheap matchers first: regular expressions cost more and exclude less.
        return tuple(sorted(parsed, key=lambda matcher: matcher.pattern is not None))

    def _parts(self, written: Any, names: VisibleNames) -> dict[str, Expression | TextTemplate | str]:
        if not isinstance(written, dict):
            return {}
        parts: dict[str, Expression | TextTemplate | str] = {}
        for name, text in written.items():
            if name not in TargetParts.model_fields or name == JOBS or not isinstance(text, str):
                continue
            made = parts[name] = self._text(text, ("target", name), names)
            if isinstance(made, Expression) and scope_check.is_list(text, names):
                group = f'{{{"jobs" if name == "job" else "nodes"}: {{name: "{text}"}}}}'
                self._report(("target", name), f"target.{name}: {made.text} is a list; write a group: target: {group}")
        return parts

    def _selectors(self, written: Any, names: VisibleNames) -> dict[str, tuple[Expression | TextTemplate | str, ...]]:
        if not self._is_group:
            return {}
        # The group's key: ``jobs: on_node`` only adds targets.
        plural = next((name for name in MEMBER_KINDS if written.get(name, ON_NODE) != ON_NODE), JOBS)
        conditions = _mapping(written.get(plural))
        return {
            name: tuple(
                self._text(text, ("target", plural, name, *place), names)
                for place, text in _texts(values, ())
            )
            for name, values in conditions.items()
        }  # fmt: skip

    def _kind_in(self, phase: str) -> TargetKind | None:
        """Return the steps' target kind. In a group, only ``steps`` work on members, others on the parent run."""
        return TargetKind.GROUP if self._is_group and phase != "steps" else self._kind

    def _effect(self, written: Any) -> quoted_query.QuotedQuery | None:
        if not isinstance(written, dict) or not isinstance(written.get("query"), str):
            return None
        names = VisibleNames(quoted_query.NAMES, self._vars, self._kind)
        return self._query(written["query"], ("effect", "query"), names)

    def _query(self, text: str, path: DocumentPath, names: VisibleNames) -> quoted_query.QuotedQuery | None:
        query = quoted_query.compiled(text, lambda template: self._text(template, path, names))
        if isinstance(query, str):
            self._report(path, f"query: {query}")
            return None
        return query

    def _check_cut_texts(self) -> None:
        # `remarks` are comments directly after unquoted texts: the author may have meant them as the end of the text.
        for path, comment in self.document.remarks.items():
            if path and path[-1] in _PROSE:
                self._report(
                    path,
                    f"{path[-1]}: the text ends before {cut(comment, 40)!r}, which YAML reads as a comment; "
                    "put the text in quotes",
                )

    # --- steps

    def _steps(self, raw: Mapping[str, Any]) -> Iterator[tuple[tuple[str, int], CompiledStep]]:
        entries = [
            (phase, index, entry, written_steps.id_of(entry, index, phase))
            for phase in EVERY_PHASE
            for index, entry in enumerate(written_steps.of(raw, phase)[:MOST_STEPS])
        ]
        ids = [step_id for *_, step_id in entries]
        outputs: dict[str, Mapping[str, Shape]] = {}
        for position, (phase, index, entry, step_id) in enumerate(entries):
            if not isinstance(entry, dict):
                continue
            place: DocumentPath = (*place_of(phase), index)
            if step_id == APPROVAL:
                self._report((*place, "id"), f"the id {step_id!r} is reserved for the question of mode approve")
            if step_id in ids[:position]:
                self._report((*place, "id"), f"the id {step_id!r} is used by an earlier step")
            # The last phases of a group belong to its parent run, whose own steps are `check`.
            seen = (phase,) if phase in _ISOLATED_PHASES else (CHECK if self._is_group else "steps", phase)
            before = [earlier for of, *_, earlier in entries[:position] if of in seen]
            later = [other for other in ids if other not in (*before, step_id)]
            kind = self._kind_in(phase)
            visible = STEP_NAMES if phase == ON_LIMITED else _names_for(kind)
            names = self._visible(visible, kind, before, outputs, later)
            use = next((use for use in self.uses if use.phase == phase and use.covers(index)), None)
            if use is not None:
                names = self._names_in_fragment(use, index, names, outputs)
            step = self._step(entry, place, step_id, names)
            is_merged = place in self._on_jobs  # one output of several jobs, whose members are not known
            outputs[step_id] = {} if is_merged else written_actions.outputs_of(entry, self.actions, kind)
            yield (phase, index), step

    def _names_in_fragment(
        self, use: Use, index: int, outer: VisibleNames, outputs: Mapping[str, Mapping[str, Shape]]
    ) -> VisibleNames:
        """Return the names that a fragment's step sees. At the first step, also compile the given inputs."""
        if index == use.first:
            values = self._template(use.values, use.place, outer, f"inputs of fragment {use.fragment}")
            made = CompiledUse(use.id, use.fragment, use.ids, use.declared, values)
            self._used |= {(use.phase, use.first + each): made for each in range(len(use.ids))}
        place = index - use.first
        own = {name: outputs[full] for name in use.ids if (full := f"{use.id}.{name}") in outputs}
        return VisibleNames(
            names=(*(name for name in outer.names if name not in ("vars", scope_check.INPUTS)), scope_check.INPUTS),
            kind=outer.kind,
            steps=use.ids[:place],
            outputs=own,
            later=use.ids[place + 1 :],
            inputs={name: _shape_of_input(spec.type) for name, spec in use.declared.items()},
            owner="fragment",
        )

    def _approval(self, written: Any) -> dict[tuple[str, int], CompiledStep]:
        text = written.get("message") if isinstance(written, dict) else None
        kind = self._kind_in(APPROVAL)
        names = self._visible(_names_for(kind), kind)
        message = self._text(text, ("approval", "message"), names) if isinstance(text, str) else ""
        return {(APPROVAL, 0): CompiledStep(APPROVAL, message=message)}

    def _step(self, entry: Mapping[str, Any], path: DocumentPath, step_id: str, names: VisibleNames) -> CompiledStep:
        when = self._expression(entry.get("when"), (*path, "when"), names)
        if isinstance(entry.get("action"), str):
            return self._action_step(entry, path, step_id, names, when)
        if isinstance(entry.get("wait_for"), dict):
            return self._polled_step(entry["wait_for"], (*path, "wait_for"), step_id, names, when)
        key = next((key for key in ("wait", "wait_until") if key in entry), "approve")
        question = entry.get(key)
        place = (*path, key)
        if isinstance(question, dict):
            question, place = question.get("message"), (*place, "message")
        message = self._text(question, place, names) if isinstance(question, str) else ""
        return CompiledStep(step_id, when, message=message)

    def _action_step(
        self, entry: Mapping[str, Any], path: DocumentPath, step_id: str, names: VisibleNames, when: Expression | None
    ) -> CompiledStep:
        action = self._action(entry["action"], path)
        if action is not None and len(path) == 2:  # a step of a phase on the top level, no undo
            self._check_target(action, entry, path)
        raw = self._with_manifest(action, _mapping(entry.get("with")), path)
        step = self._with_params(action, raw, (*path, "with"), CompiledStep(step_id, when), names)
        if action is not None:
            self._check_suitable(action, entry, path)
            self.problems = written_actions.with_misplaced(self.problems, action, entry, self.document, path)
            if written_actions.has_own_undo(entry):
                step = replace(step, undo=self._own_undo(entry["undo"], action, path, step_id, names))
        return step

    def _own_undo(
        self, written: Mapping[str, Any], action: type[Action], path: DocumentPath, step_id: str, names: VisibleNames
    ) -> CompiledStep:
        if written_actions.can_be_undone(action):
            self._report((*path, "undo"), f"undo: {action.name} has its own undo; write on_resolve or on_failure")
        output = value_types.of_outputs(getattr(action, "outputs", ()))
        names = replace(names, names=(*names.names, scope_check.OUTPUT), output=output)
        undo = self._action_step(written, (*path, "undo"), f"undo of {step_id}", names, None)
        uses_output = any(_uses_output(text) for _, text in _texts(written.get("with"), ()))
        return replace(undo, uses_output=uses_output)

    def _polled_step(
        self, entry: Mapping[str, Any], path: DocumentPath, step_id: str, names: VisibleNames, when: Expression | None
    ) -> CompiledStep:
        step = CompiledStep(step_id, when)
        if "query" in entry:
            action = self._action(PROMETHEUS_QUERY, path)
            query = entry["query"]
            return self._with_params(action, {"query": query} if isinstance(query, str) else {}, path, step, names)
        if not isinstance(entry.get("action"), str):
            return step
        action = self._action(entry["action"], path)
        step = self._with_params(action, _mapping(entry.get("with")), (*path, "with"), step, names)
        if action is None:
            return step
        self._check_suitable(action, entry, (*path[:-1],))
        if action.harmful or getattr(action, "leaves_results", False):
            does = "changes something" if action.harmful else "leaves a result each time"
            self._report((*path, "action"), f"action {action.name} {does}; a wait repeats only actions that look")
        kind = self._kind_in(_phase_at(path))
        inside = replace(
            names,
            names=(*names.names, scope_check.OUTPUT),
            output=written_actions.outputs_of(entry, self.actions, kind),
        )
        return replace(step, until=self._expression(entry.get("until"), (*path, "until"), inside))

    def _action(self, name: str, path: DocumentPath) -> type[Action] | None:
        action = self.actions.action_class(name)
        if action is None:
            hint = did_you_mean(name, self.actions.names()) or written_actions.hint_by_prefix(name, self.actions)
            self._report((*path, "action"), f"there is no action {name!r}{hint}")
        self._asks_first |= getattr(action, "asks_first", False)
        return action

    def _with_params(
        self, action: type[Action] | None, raw: Mapping[str, Any], path: DocumentPath, step: CompiledStep,
        names: VisibleNames,
    ) -> CompiledStep:  # fmt: skip
        queries: dict[str, quoted_query.QuotedQuery] = {}
        for name in getattr(action, "promql", ()):  # parameters with PromQL, in which templates are quoted
            if evaluation.is_template(raw.get(name)) and (query := self._query(raw[name], (*path, name), names)):
                queries[name] = query
        rest = {name: value for name, value in raw.items() if name not in getattr(action, "promql", ())}
        # PromQL without templates, or with a refused one.
        constants = {name: raw[name] for name in raw.keys() - rest.keys() - queries.keys()}
        template = self._template({**rest, **constants}, path, names, f"with of step {step.name}")
        step = replace(step, params=template, queries=queries)
        return step if action is None else replace(step, model=action.Params, fixed=self._params(action, raw, path))

    def _with_manifest(
        self, action: type[Action] | None, raw: Mapping[str, Any], path: DocumentPath
    ) -> Mapping[str, Any]:
        name = raw.get(attachments.PARAMETER)
        if not isinstance(name, str) or action is None or attachments.MANIFEST not in action.Params.model_fields:
            return raw
        self.place = (*path, "with", attachments.PARAMETER)
        self.allowance.spend_on_manifest(attachments.length(self.document, name))
        if name not in self.manifests:
            self.manifests[name] = attachments.manifest(self.document, self.place, name)
        manifest = self.manifests[name]
        if isinstance(manifest, list):
            self.problems.extend(manifest)
            manifest = {}
        rest = {key: value for key, value in raw.items() if key != attachments.PARAMETER}
        return {**rest, attachments.MANIFEST: manifest}

    def _check_target(self, action: type[Action], entry: Mapping[str, Any], path: DocumentPath) -> None:
        """Check which of the playbook's targets the step works on, and note steps on the jobs."""
        kind, written = self._kind_in(_phase_at(path)), entry.get("target")
        if kind is None:
            return
        if not self._has_jobs or kind is TargetKind.GROUP:
            if written is not None:
                self._report((*path, "target"), "target: the steps have one target here; leave it out")
            return
        has_own_nodes = isinstance(action, MultiNodeAction)
        if written == JOBS and has_own_nodes:
            message = f"target: {action.name} works on all nodes of one job, not on several jobs; write target: {kind}"
            self._report((*path, "target"), message)
        elif written not in (None, JOBS, str(kind)):
            self._report((*path, "target"), f"target: write {kind} or jobs, as the playbook's target has them")
        if written is None and action.targets >= {kind, TargetKind.JOB} and TargetKind.CLUSTER not in action.targets:
            if not has_own_nodes:
                message = f"action {action.name} could work on the {kind} or on the jobs; write target: {kind}, or jobs"
                self._report((*path, "action"), message)
            return
        is_of_job_only = TargetKind.JOB in action.targets and kind not in action.targets
        if not has_own_nodes and (written == JOBS or (written is None and is_of_job_only)):
            self._on_jobs.add(path)

    def _with_targets(self, definition: Playbook) -> Playbook:
        if not self._has_jobs:
            return definition
        chosen: dict[str, Any] = {}
        for phase in ("steps", "on_success", "on_failure"):  # the others are never on jobs
            chosen[phase] = tuple(
                step.model_copy(update={"target": JOBS if (phase, index) in self._on_jobs else None})
                if isinstance(step, ActionStep)
                else step
                for index, step in enumerate(definition.phase(phase))
            )
        return definition.model_copy(update=chosen)

    def _check_suitable(self, action: type[Action], entry: Mapping[str, Any], path: DocumentPath) -> None:
        phase = _phase_at(path)
        kind = TargetKind.JOB if entry_of(path) in self._on_jobs else self._kind_in(phase)
        if kind is TargetKind.GROUP and action.harmful:
            message = (
                f"action {action.name} changes something; {phase} of a group belongs to its parent run, which cannot"
            )
            self._report((*path, "action"), message)
        elif phase == ON_LIMITED and action.harmful:
            message = f"action {action.name} changes something; on_limited notifies people, as with action: notify"
            self._report((*path, "action"), message)
        elif kind is not None and (TargetKind.CLUSTER if kind is TargetKind.GROUP else kind) not in action.targets:
            kinds = " or ".join(sorted(action.targets))
            self._report((*path, "action"), f"action {action.name} works on a {kinds}, not on a {kind}")
        elif entry_of(path) in self._on_jobs and isinstance(action, MultiNodeAction):
            self._report((*path, "action"), f"action {action.name} works on the nodes of one job, not on several jobs")
        is_asked = entry.get("undo") not in (None, UndoTrigger.NEVER) and not written_actions.has_own_undo(entry)
        if is_asked and not written_actions.can_be_undone(action):
            own = "write how: undo: {when: on_resolve, action: NAME, with: {…}}"
            self._report((*path, "undo"), f"action {action.name} cannot be undone by itself; {own}")
        if (problem := written_actions.too_short_timeout(action, entry)) is not None:
            self._report((*path, "timeout"), problem)

    def _params(self, action: type[Action], raw: Mapping[str, Any], place: DocumentPath) -> BaseModel | None:
        """Report errors that rendering cannot fix. Return None unless all parameters are constants and valid."""
        templates = [inner for inner, text in _texts(raw, ()) if evaluation.is_template(text)]
        filled = evaluation.with_variables(raw, self._vars)
        unknown = [inner for inner, text in _texts(filled, ()) if evaluation.is_template(text)]
        faults: list[model_errors.ValidationFault] = []
        params: BaseModel | None = None
        try:
            params = action.Params.model_validate(filled)
            faults = model_errors.booleans_as_numbers(filled, params)
        except ValidationError as error:
            wrong = model_errors.faults(
                error, action.Params, filled, cure=lambda inner, kind, _: cures.of_parameter(action.name, inner, kind)
            )
            # A rendered number is written out where text is required.
            faults = [
                fault
                for fault in wrong
                if written_actions.stays_after_rendering(fault, templates if fault.type == "string_type" else unknown)
            ]
        self.problems.extend(model_errors.problems(self.document, place, faults))
        # Faults of constants are reported already.
        if isinstance(action, TemplateChecked) and (templates or not faults):
            try:
                action.check_template(raw)
            except ValueError as error:
                self._report(place, f"with: {error}")
        return None if templates else params

    # --- expressions and templates

    def _expression(self, text: Any, path: DocumentPath, names: VisibleNames) -> Expression | None:
        if not isinstance(text, str) or not text:
            return None
        name = str(path[-1]) if path[0] == "on" else f"{path[-1]} of {path_text(entry_of(path))}"
        made = self._compiled(text, path, names, name, template_syntax.parse_expression)
        assert made is None or isinstance(made, Expression)
        return made

    def _text(self, text: str, path: DocumentPath, names: VisibleNames) -> Expression | TextTemplate | str:
        if not evaluation.is_template(text):
            return text
        return self._compiled(text, path, names, ".".join(map(str, path))) or text

    def _template(
        self, raw: Mapping[str, Any], path: DocumentPath, names: VisibleNames, name: str
    ) -> ValueTemplate | None:
        compiled: dict[str, Expression | TextTemplate] = {}
        are_fine = True
        for inner, text in _texts(raw, path):
            if evaluation.is_template(text) and text not in compiled:
                template = self._compiled(text, inner, names, name)
                if template is None:
                    are_fine = False
                else:
                    compiled[text] = template
        return ValueTemplate(raw, name, compiled) if are_fine else None

    def _compiled(
        self,
        text: str,
        path: DocumentPath,
        names: VisibleNames,
        name: str,
        parse: Callable[[str], SyntaxTree] = template_syntax.parse_template,
    ) -> Expression | TextTemplate | None:
        """Return None after reporting wrong syntax or names."""
        self.place = path
        try:
            tree = parse(text)
            self.allowance.spend_on_template(len(tree.every))
            wrong = scope_check.check(tree, names)
            if scope_check.RUNS in names.names and not wrong:
                windows, wrong = memory_check.windows(tree)
                if windows is not None:
                    self._windows = {**(self._windows or {}), **windows}
            made = evaluation.compile_parsed(tree, name)
        except Malformed as error:
            self._report(path, f"{path[-1]}: {error}{cures.of_expression(text)}")
            return None
        for each in wrong:
            self._report(path, f"{path[-1]}: {each}")
        return None if wrong else made

    def _report(self, path: DocumentPath, message: str) -> None:
        self.problems.append(self.document.problem(path, message))


def _texts(value: Any, path: DocumentPath) -> Iterator[tuple[DocumentPath, str]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _texts(each, (*path, key))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _texts(each, (*path, index))
    elif isinstance(value, str):
        yield path, value


def _phase_at(path: DocumentPath) -> str:
    return str(entry_of(path)[-2])


def _mapping(written: Any) -> Mapping[Any, Any]:
    return written if isinstance(written, dict) else {}


def _shape_of_input(kind: Any) -> Shape:
    kinds: Mapping[Any, Shape] = {InputType.NUMBER: NUMBER, InputType.NODES: TEXT_LIST}
    return kinds.get(kind, TEXT)


def _uses_output(text: str) -> bool:
    if not evaluation.is_template(text):
        return False
    try:
        tree = template_syntax.parse_template(text)
    except Malformed:
        return False
    return any(name.name == scope_check.OUTPUT for name in tree.all_of(nodes.Name))


def _names_for(kind: TargetKind | None) -> tuple[str, ...]:
    return GROUP_NAMES if kind is TargetKind.GROUP else STEP_NAMES
