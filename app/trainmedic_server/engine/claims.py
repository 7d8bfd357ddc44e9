"""Claims of runs and attempts, from their actions. Pure.

A run locks its target, or only the node's disks if it only cleans disks: a full disk need not wait for a hot GPU.
Without changes on a node or GPU it locks nothing. Unknown actions count as changing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain.claim import Claim
from trainmedic_server.domain.playbook import ActionStep
from trainmedic_server.domain.run import Run
from trainmedic_server.ports.actions import Action, Actions
from trainmedic_server.ports.playbooks import CompiledPlaybook


def of_run(run: Run, actions: Actions) -> Claim:
    """Return the claim, from persisted data only, so that a restart does not change it."""
    assert run.target is not None
    return _claim(run.target, (step.action for step in run.steps if step.action), actions)


def of_playbook(playbook: CompiledPlaybook, target: Target, actions: Actions) -> Claim:
    definition = playbook.definition
    steps = chain(definition.steps, definition.on_success, definition.on_failure)
    return _claim(target, (step.action for step in steps if isinstance(step, ActionStep)), actions)


def of_attempt(targets: Sequence[Target], action_class: type[Action] | None) -> Sequence[Claim]:
    if not _is_of_disks(action_class):
        return [Claim(target) for target in targets]
    return [Claim.of_disks(target.node) if target.node is not None else Claim(target) for target in targets]


def _claim(target: Target, names: Iterable[str], actions: Actions) -> Claim:
    if target.kind is TargetKind.GROUP:
        return Claim(target, nothing=True)  # its members are locked; they would wait for a parent that waits for them
    if target.node is None or target.kind not in (TargetKind.NODE, TargetKind.GPU):
        return Claim(target)  # even a checkpoint of a job could disturb another run's steps
    classes = [actions.action_class(name) for name in names]
    changing = [each for each in classes if each is None or each.harmful]
    if not changing:
        return Claim(target, nothing=True)
    is_of_disks = target.kind is TargetKind.NODE and all(map(_is_of_disks, changing))
    return Claim.of_disks(target.node) if is_of_disks else Claim(target)


def _is_of_disks(action_class: type[Action] | None) -> bool:
    return bool(getattr(action_class, "changes_disks_only", False))
