"""What can be said of an action step as it is written, before its templates are known. Who calls it: ``compiler``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trainmedic_core.problems import DocumentPath, FileProblem
from trainmedic_core.target import TargetKind
from trainmedic_core.yaml_text import YamlDocument
from trainmedic_server.domain.playbook import ActionStep
from trainmedic_server.ports.actions import Action, Actions


def output_keys(entry: Any, actions: Actions, kind: TargetKind | None) -> Collection[str]:
    """Return the keys that the output of a step can have; empty where its action does not say so for this kind of
    target."""
    name = entry.get("action") if isinstance(entry, dict) else None
    action = actions.action_class(name) if isinstance(name, str) else None
    keys: Collection[str] = getattr(action, "outputs", ())
    return keys if kind is not None and kind is not TargetKind.JOB else ()


def with_misplaced(
    problems: list[FileProblem],
    action: type[Action],
    entry: Mapping[str, Any],
    document: YamlDocument,
    path: DocumentPath,
) -> list[FileProblem]:
    """Return the problems with one for each parameter that stands beside ``action`` in place of below ``with``; that
    its key is not known there is then left out."""
    for key in entry:
        if key in action.Params.model_fields and key not in ActionStep.model_fields and key != "with":
            misplaced = document.problem((*path, key), f"{key!r} belongs under 'with'", at_key=True)
            problems = [*(each for each in problems if not _is_of_key(each, misplaced, key)), misplaced]
    return problems


def _is_of_key(problem: FileProblem, at: FileProblem, key: str) -> bool:
    """Whether a problem says no more than that this key is not known there."""
    is_there = (problem.line, problem.column) == (at.line, at.column)
    return is_there and problem.message.startswith(f"unknown key {key!r}")
