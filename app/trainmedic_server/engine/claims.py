"""Claims of runs and attempts, by their actions. Pure.

A run locks its target. A run on a node whose changing steps only clean disks locks the disks of the node. So a full
disk does not wait for a hot GPU, nor the GPU for the disk. A run on a node or GPU that changes nothing locks nothing,
so that a message does not wait for a repair. The class of an action declares what it changes
(`ports.actions.DiskAction`). An unknown action counts as one that changes anything.

Callers: all that request something from ``locks``. Not here: granting the claims.
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
    """Return what the run locks. It depends on persisted data alone, so it is the same after a restart."""
    assert run.target is not None
    return _claim(run.target, (step.action for step in run.steps if step.action), actions)


def of_playbook(playbook: CompiledPlaybook, target: Target, actions: Actions) -> Claim:
    """Return what a run of the playbook on this target would lock."""
    definition = playbook.definition
    steps = chain(definition.steps, definition.on_success, definition.on_failure)
    return _claim(target, (step.action for step in steps if isinstance(step, ActionStep)), actions)


def of_attempt(targets: Sequence[Target], action_class: type[Action] | None) -> Sequence[Claim]:
    """Return what an attempt of an action on these targets works on."""
    if not _is_of_disks(action_class):
        return [Claim(target) for target in targets]
    return [Claim.of_disks(target.node) if target.node is not None else Claim(target) for target in targets]


def _claim(target: Target, names: Iterable[str], actions: Actions) -> Claim:
    if target.node is None or target.kind not in (TargetKind.NODE, TargetKind.GPU):
        return Claim(target)  # On a job, even a checkpoint could come between the steps of another run.
    classes = [actions.action_class(name) for name in names]
    changing = [each for each in classes if each is None or each.harmful]
    if not changing:
        return Claim(target, nothing=True)
    is_of_disks = target.kind is TargetKind.NODE and all(map(_is_of_disks, changing))
    return Claim.of_disks(target.node) if is_of_disks else Claim(target)


def _is_of_disks(action_class: type[Action] | None) -> bool:
    return bool(getattr(action_class, "changes_disks_only", False))
