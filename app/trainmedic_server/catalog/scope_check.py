"""Check that expressions use existing names, in ways that their types allow."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jinja2 import nodes
from msgspec import Struct, field

from trainmedic_core.expressions import names, template_syntax
from trainmedic_core.expressions.template_syntax import SyntaxTree
from trainmedic_core.problems import did_you_mean
from trainmedic_core.target import MEMBER_KINDS, PARTS, TargetKind
from trainmedic_server.catalog import cures, expression_types
from trainmedic_server.domain import memory, value_types
from trainmedic_server.domain.playbook_target import JOBS, ON_NODE, is_group, kind_of_parts
from trainmedic_server.domain.run import StepStatus
from trainmedic_server.domain.value_types import ANY, NUMBER, TEXT, TEXT_LIST, TEXTS, Each, Shape

# Names in expressions: before a run (`names_before_run`), and in a run's steps.
ALERT_NAMES = ("alert", "labels", "annotations", "vars")
INPUTS = "inputs"
ENDED_RUN = "ended_run"
OUTPUT = "output"
RUNS = "runs"  # earlier runs of the playbook on the target
STEP_NAMES = ("alert", "alerts", "labels", "annotations", "target", "job", "vars", "steps", "run", RUNS, "now")

GROUP_NAMES = (*STEP_NAMES, "group")

# Members of the names.
_ALERT = ("name", "status", "labels", "annotations", "startsAt", "endsAt", "generatorURL", "fingerprint")
_STEP = ("status", "params", "output", "error", "attempts")
_JOB = ("name", "verdict")
_VERDICT = ("cause", "confidence", "advice", "node", "ranks")
_RUN = ("id", "playbook", "mode", "message", "created_at", "url")
_TARGET = ("kind", "key")
_ENDED_RUN = ("id", "playbook", "status", "message", "alert", "target", *PARTS)
_GROUP = ("total", "succeeded", "failed", "skipped", "not_begun", "batch")


class VisibleNames(Struct, frozen=True):
    """`steps` are the IDs of finished steps, `outputs` their outputs' types, `later` the IDs of others."""

    names: Collection[str]  # top-level ones
    vars: Mapping[str, Any] = field(default_factory=dict)
    kind: TargetKind | None = None  # of the target; None if invalid or not known yet
    steps: Collection[str] = ()
    outputs: Mapping[str, Mapping[str, Shape]] = field(default_factory=dict)
    later: Collection[str] = ()
    inputs: Mapping[str, Shape] = field(default_factory=dict)
    output: Mapping[str, Shape] = field(default_factory=dict)
    """Output of the step itself, in its own undo and in the condition of its wait."""
    has_jobs: bool = False  # True if ``target.jobs`` exists
    owner: str = "playbook"  # or ``fragment``


def names_of_beginning(trigger: Mapping[Any, Any]) -> tuple[str, ...]:  # in addition to those of all playbooks
    return tuple(name for key, name in (("manual", INPUTS), ("run", ENDED_RUN)) if key in trigger)


def names_before_run(trigger: Mapping[Any, Any]) -> tuple[str, ...]:
    """Return the names in conditions and targets. A schedule has no labels."""
    return ("vars",) if "schedule" in trigger else ALERT_NAMES


def kind_of(target: Any) -> TargetKind | None:
    if isinstance(target, str):
        is_kind = target in list(TargetKind) and target != TargetKind.GROUP
        return TargetKind(target) if is_kind else None
    if is_group(target):
        return next((kind for plural, kind in MEMBER_KINDS.items() if target.get(plural, ON_NODE) != ON_NODE), None)
    if isinstance(target, dict):
        return kind_of_parts(target)
    return None


def check(tree: SyntaxTree, scope: VisibleNames) -> list[str]:
    """Return the errors. Raises Malformed."""
    used = template_syntax.free_names(tree)
    unknown = used - set(scope.names)
    compared = set(_compared(tree)) if unknown else set()
    wrong = [_unknown_name(name, scope, tree.text, compared) for name in sorted(unknown)]
    if "job" in used - unknown and scope.kind not in (None, TargetKind.JOB):
        wrong.append(f"there is no job here: the target is a {scope.kind}")
    assigned = {name.name for name in tree.all_of(nodes.Name) if name.ctx != "load"}
    for parts in names.chains(tree):
        if parts[0] not in assigned and not (parts[0] == INPUTS and INPUTS in unknown):
            mistake = _unknown_member(parts, scope)
            if mistake is not None and mistake not in wrong:
                wrong.append(mistake)
    wrong.extend(_unknown_statuses(tree))
    wrong.extend(expression_types.check(tree, _shapes(scope)))
    bare = expression_types.bare_variables(tree)
    wrong.extend(filter(None, (expression_types.always_true(name, scope.vars.get(name)) for name in bare)))
    return list(dict.fromkeys(wrong))


def is_list(text: str, scope: VisibleNames) -> bool:
    """Raises Malformed."""
    return expression_types.is_list(template_syntax.parse_template(text), _shapes(scope))


def _shapes(scope: VisibleNames) -> Mapping[str, Shape]:
    alert: Mapping[str, Shape] = {**dict.fromkeys(_ALERT, TEXT), "labels": TEXTS, "annotations": TEXTS}
    step: Mapping[str, Shape] = {"status": TEXT, "error": TEXT, "attempts": NUMBER}
    return {
        "alert": alert,
        "alerts": Each(alert, is_list=True),
        "labels": TEXTS,
        "annotations": TEXTS,
        "target": {**dict.fromkeys((*_TARGET, *PARTS), TEXT), JOBS: TEXT_LIST},
        "job": {"name": TEXT, "verdict": {**dict.fromkeys(_VERDICT, TEXT), "ranks": Each(NUMBER, is_list=True)}},
        "run": dict.fromkeys(_RUN, TEXT),
        "runs": {"last": {**dict.fromkeys(memory.LAST, TEXT), "at": NUMBER, "ended_at": NUMBER}},
        "vars": value_types.of_constant(dict(scope.vars)),
        "inputs": scope.inputs,
        ENDED_RUN: dict.fromkeys(_ENDED_RUN, TEXT),
        "output": scope.output or ANY,
        "now": NUMBER,
        "group": dict.fromkeys(_GROUP, NUMBER),
        "steps": {name: {**step, "output": scope.outputs.get(name) or ANY} for name in scope.steps},
    }


def _unknown_name(name: str, scope: VisibleNames, text: str, compared: Collection[str]) -> str:
    dashed = next((step for step in (*scope.steps, *scope.vars) if f"-{name}" in step and step in text), None)
    if dashed is not None:
        owner = "steps" if dashed in scope.steps else "vars"
        return f"a name with a dash is written in brackets: {owner}[{dashed!r}]"
    if name in scope.steps:
        return f"there is no name {name!r} here; write steps.{name}"
    if name in scope.vars:
        return f"there is no name {name!r} here; write vars.{name}"
    if name == "vars":
        return "a fragment has no vars; declare an input, and give it under 'with' where it is used"
    if name in cures.NAMES:
        return f"there is no name {name!r} here; {cures.NAMES[name]}"
    if name in compared:
        return f'there is no name {name!r} here; text is put in quotes: "{name}"'
    return names.unknown_name(name, scope.names)


def _compared(tree: SyntaxTree) -> Iterator[str]:  # names on the right side, maybe meant as text
    for compare in tree.all_of(nodes.Compare):
        for operand in compare.ops:
            listed = operand.expr.items if isinstance(operand.expr, (nodes.List, nodes.Tuple)) else [operand.expr]
            yield from (each.name for each in listed if isinstance(each, nodes.Name))


def _unknown_member(parts: tuple[str, ...], scope: VisibleNames) -> str | None:
    owner, member = parts[:-1], parts[-1]
    match owner:
        case ("vars",):
            return _missing("the playbook has no variable", member, scope.vars)
        case ("vars", *inner):
            return _missing(f"{'.'.join(owner)} has no", member, _members_at(scope.vars, inner))
        case ("inputs",):
            where = "on.manual.inputs" if scope.owner == "playbook" else "its inputs"
            return _missing(f"the {scope.owner} has no input", member, scope.inputs, f"; declare it under {where}")
        case ("steps",):
            return _unknown_step(member, scope)
        case ("steps", step) if step in scope.steps:
            cure = cures.STEP_MEMBERS.get(member, "").replace("{id}", step)
            if member in _STEP:
                cure = ""
            elif not cure and member in scope.outputs.get(step, {}):
                cure = f"write steps.{step}.output.{member}"
            return f"a step has no {member!r}; {cure}" if cure else _missing("a step has no", member, _STEP)
        case ("alert",):
            return _missing("an alert has no", member, _ALERT, f"; of a label, write labels.{member}")
        case ("ended_run",):
            return _missing("an ended run has no", member, _ENDED_RUN, "; of a label of its alert, write labels.NAME")
        case ("run",):
            return _missing("a run has no", member, _RUN)
        case ("runs",):
            return _missing("runs has no", member, ("count", "last"), '; write runs.count("1d"), or runs.last.status')
        case ("runs", "last"):
            return _missing("a last run has no", member, memory.LAST)
        case ("group",):
            return _missing("a group has no", member, _GROUP)
        case ("job",):
            return _missing("a job has no", member, _JOB)
        case ("job", "verdict"):
            return _missing("a verdict has no", member, _VERDICT)
        case ("target",) if scope.kind is not None:
            article = f"a target of kind {scope.kind} has no"
            return _missing(article, member, (*_TARGET, *scope.kind.parts, *([JOBS] if scope.has_jobs else [])))
        case _:
            return None


def _missing(prefix: str, member: str, members: Collection[str] | None, otherwise: str = "") -> str | None:
    if members is None or member in members or member in expression_types.METHODS:
        return None
    hint = did_you_mean(member, members) or otherwise or (f"; there are {', '.join(members)}" if members else "")
    return f"{prefix} {member!r}{hint}"


def _members_at(value: Any, path: Collection[str]) -> Collection[str] | None:
    """Return the names below `path`, None if they are unknown."""
    for part in path:
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value if isinstance(value, Mapping) else None


def _unknown_step(member: str, scope: VisibleNames) -> str | None:
    if member in scope.steps:
        return None
    dashed = next((step for step in scope.steps if step.startswith(f"{member}-")), None)
    if dashed is not None:
        return f"there is no step {member!r} before; a name with a dash is written in brackets: steps[{dashed!r}]"
    of_fragment = next((step for step in scope.steps if step.startswith(f"{member}.")), None)
    if of_fragment is not None:
        return f"{member!r} is a fragment's; its steps are written in brackets: steps[{of_fragment!r}]"
    if scope.owner == "fragment" and "." not in member and member not in scope.later:
        hint = did_you_mean(member, scope.steps) or "; give what it needs of the playbook's steps as an input"
        return f"the fragment has no step {member!r} before{hint}"
    if member in scope.later:
        return f"step {member!r} has not run here; only steps before this one are known"
    return _missing("there is no step", member, scope.steps)


def _unknown_statuses(tree: SyntaxTree) -> Iterator[str]:
    for compare in tree.all_of(nodes.Compare):
        parts = names.chain(compare.expr)
        if parts is None or len(parts) != 3 or parts[0] != "steps" or parts[2] != "status":
            continue
        for operand in compare.ops:
            for value in _constants(operand.expr):
                if value not in list(StepStatus):
                    near = did_you_mean(str(value), StepStatus) or f"; there are {', '.join(StepStatus)}"
                    yield f"{value!r} is not a status of a step{near}"


def _constants(node: nodes.Node) -> Iterator[Any]:
    if isinstance(node, (nodes.List, nodes.Tuple)):
        for item in node.items:
            yield from _constants(item)
    elif isinstance(node, nodes.Const):
        yield from node.value if isinstance(node.value, (list, tuple)) else (node.value,)
