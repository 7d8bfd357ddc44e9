"""Checks of a step as written against its action's class."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

from trainmedic_core import duration, model_errors
from trainmedic_core.problems import DocumentPath, FileProblem
from trainmedic_core.target import TargetKind
from trainmedic_core.yaml_text import YamlDocument
from trainmedic_server.domain import value_types
from trainmedic_server.domain.playbook import PROMETHEUS_QUERY, ActionStep
from trainmedic_server.domain.value_types import Shape
from trainmedic_server.ports.actions import Action, Actions, MultiNodeAction


def can_be_undone(action: type[Action]) -> bool:
    """Return False if the class declares ``def inverse(...) -> None``. ``Inverse | None`` is decided for each use."""
    returned = getattr(action.inverse, "__annotations__", {}).get("return", "")
    return returned is not None and returned != "None"


def hint_by_prefix(name: str, actions: Actions) -> str:
    """Name the actions with the same first word, or those whose last word is the name."""
    first = name.partition(".")[0]
    near = [each for each in actions.names() if first in (each.partition(".")[0], each.rpartition(".")[2])]
    return f"; there are {', '.join(near)}" if near else "; 'trainmedic playbook schema' and docs/reference list them"


def stays_after_rendering(fault: model_errors.ValidationFault, templates: list[tuple[str | int, ...]]) -> bool:
    """Return whether rendering cannot fix the fault. `templates` are the paths of values that are rendered."""
    if fault.type in ("missing", "extra_forbidden"):
        return True
    return not any(
        fault.path[: len(template)] == template or template[: len(fault.path)] == fault.path for template in templates
    )


def has_own_undo(entry: Mapping[str, Any]) -> bool:
    undo = entry.get("undo")
    return isinstance(undo, dict) and isinstance(undo.get("action"), str)


def too_short_timeout(action: type[Action], entry: Mapping[str, Any]) -> str | None:
    """Return the problem and its cure; None if the timeout is long enough, not written or invalid."""
    shortest: timedelta = getattr(action, "shortest_timeout", timedelta(0))
    try:
        timeout = duration.parse(str(entry["timeout"]))
    except (KeyError, ValueError):
        return None
    if timeout >= shortest:
        return None
    return (
        f"timeout: {action.name} cannot succeed in {duration.write(timeout)}; write {duration.write(shortest)} or more"
    )


def outputs_of(entry: Any, actions: Actions, kind: TargetKind | None) -> Mapping[str, Shape]:
    """Return an empty mapping if unknown, as for a job's nodes, whose outputs are merged."""
    step = entry if isinstance(entry, dict) else {}
    polled = step["wait_for"] if isinstance(step.get("wait_for"), dict) else {}
    name = PROMETHEUS_QUERY if "query" in polled else {**step, **polled}.get("action")
    action = actions.action_class(name) if isinstance(name, str) else None
    outputs: Collection[str] = getattr(action, "outputs", ())
    if kind in (None, TargetKind.JOB) and (isinstance(action, MultiNodeAction) or not isinstance(outputs, Mapping)):
        return {}
    return value_types.of_outputs(outputs)


def with_misplaced(
    problems: list[FileProblem],
    action: type[Action],
    entry: Mapping[str, Any],
    document: YamlDocument,
    path: DocumentPath,
) -> list[FileProblem]:
    """Replace errors about unknown keys that are parameters of the action."""
    for key in entry:
        if key in action.Params.model_fields and key not in ActionStep.model_fields and key != "with":
            misplaced = document.problem((*path, key), f"{key!r} belongs under 'with'", at_key=True)
            problems = [*(each for each in problems if not _is_of_key(each, misplaced, key)), misplaced]
    return problems


def _is_of_key(problem: FileProblem, at: FileProblem, key: str) -> bool:
    is_there = (problem.line, problem.column) == (at.line, at.column)
    return is_there and problem.message.startswith(f"unknown key {key!r}")
