"""Check at load time that expressions use only existing names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jinja2 import nodes
from msgspec import Struct, field

from trainmedic_core.expressions import names, template_syntax
from trainmedic_core.expressions.template_syntax import SyntaxTree
from trainmedic_core.problems import did_you_mean
from trainmedic_core.target import TargetKind
from trainmedic_server.domain.run import StepStatus

ALERT_NAMES = ("alert", "labels", "annotations", "vars")
INPUTS = "inputs"
"""Only in playbooks that declare inputs."""
STEP_NAMES = ("alert", "alerts", "labels", "annotations", "target", "job", "vars", "steps", "run")

_ALERT = ("name", "status", "labels", "annotations", "startsAt", "endsAt", "generatorURL", "fingerprint")
_STEP = ("status", "params", "output", "error", "attempts")
_JOB = ("name", "verdict")
_VERDICT = ("cause", "confidence", "advice", "node", "ranks")
_RUN = ("id", "playbook", "mode", "message", "created_at", "url")
_TARGET = {
    TargetKind.GPU: ("kind", "key", "node", "gpu"),
    TargetKind.NODE: ("kind", "key", "node"),
    TargetKind.JOB: ("kind", "key", "job"),
    TargetKind.CLUSTER: ("kind", "key"),
}


class VisibleNames(Struct, frozen=True):
    """``steps`` are the IDs of finished steps, ``later`` those of all others."""

    names: Collection[str]
    vars: Mapping[str, Any] = field(default_factory=dict)
    kind: TargetKind | None = None
    steps: Collection[str] = ()
    outputs: Mapping[str, Collection[str]] = field(default_factory=dict)
    later: Collection[str] = ()
    inputs: Collection[str] = ()


def kind_of(target: Any) -> TargetKind | None:
    if isinstance(target, str):
        return TargetKind(target) if target in list(TargetKind) else None
    if isinstance(target, dict):
        for kind in (TargetKind.JOB, TargetKind.GPU, TargetKind.NODE):
            if kind in target:
                return kind
    return None


def check(tree: SyntaxTree, scope: VisibleNames) -> list[str]:
    """Return the errors in the names. Raises Malformed."""
    used = template_syntax.free_names(tree)
    unknown = used - set(scope.names)
    wrong = [_unknown_name(name, scope, tree.text) for name in sorted(unknown)]
    if "job" in used - unknown and scope.kind not in (None, TargetKind.JOB):
        wrong.append(f"there is no job here: the target is a {scope.kind}")
    assigned = {name.name for name in tree.all_of(nodes.Name) if name.ctx != "load"}
    for parts in names.chains(tree):
        if parts[0] not in assigned:
            mistake = _unknown_member(parts, scope)
            if mistake is not None and mistake not in wrong:
                wrong.append(mistake)
    wrong.extend(_unknown_statuses(tree))
    wrong.extend(names.texts_beside_numbers(tree))
    return wrong


def _unknown_name(name: str, scope: VisibleNames, text: str) -> str:
    dashed = next((step for step in (*scope.steps, *scope.vars) if f"-{name}" in step and step in text), None)
    if dashed is not None:
        owner = "steps" if dashed in scope.steps else "vars"
        return f"a name with a dash is written in brackets: {owner}[{dashed!r}]"
    return names.unknown_name(name, scope.names)


def _unknown_member(parts: tuple[str, ...], scope: VisibleNames) -> str | None:
    owner, member = parts[:-1], parts[-1]
    match owner:
        case ("vars",):
            return _missing("the playbook has no variable", member, scope.vars)
        case ("vars", *inner):
            return _missing(f"{'.'.join(owner)} has no", member, _at(scope.vars, inner))
        case ("inputs",):
            return _missing("the playbook has no input", member, scope.inputs)
        case ("steps",):
            return _unknown_step(member, scope)
        case ("steps", _):
            return _missing("a step has no", member, _STEP)
        case ("steps", step, "output") if scope.outputs.get(step):
            return _missing(f"the output of step {step!r} has no", member, scope.outputs[step])
        case ("alert",):
            return _missing("an alert has no", member, _ALERT)
        case ("run",):
            return _missing("a run has no", member, _RUN)
        case ("job",):
            return _missing("a job has no", member, _JOB)
        case ("job", "verdict"):
            return _missing("a verdict has no", member, _VERDICT)
        case ("target",) if scope.kind is not None:
            article = f"a target of kind {scope.kind} has no"
            return _missing(article, member, _TARGET[scope.kind])
        case _:
            return None


def _missing(prefix: str, member: str, members: Collection[str] | None) -> str | None:
    if members is None or member in members or member in ("get", "items", "keys", "values"):
        return None
    hint = did_you_mean(member, members) or (f"; there are {', '.join(members)}" if members else "")
    return f"{prefix} {member!r}{hint}"


def _at(value: Any, path: Collection[str]) -> Collection[str] | None:
    """Return the keys of the mapping at `path`; None if unknown."""
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
