"""Claims of runs and attempts, from their actions.

A run locks its target, or only the node's disks if it only cleans disks. One on a GPU that changes the whole node locks
the node. Without changes it locks nothing, except on a job. Unknown actions count as changing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from msgspec.structs import replace

from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain.claim import Claim
from trainmedic_server.domain.playbook import APPROVAL, FREE_WAITS, JOBS, ActionStep
from trainmedic_server.domain.run import Run
from trainmedic_server.ports.actions import Action, Actions
from trainmedic_server.ports.playbooks import CompiledPlaybook


def is_unlocked(run: Run) -> bool:
    """Return whether a run holds no lock, because it has only waited so far."""
    if any(step.attempts for step in run.steps):
        return False
    current = next((step for step in run.steps if step.phase in (APPROVAL, "steps") and not step.status.is_final), None)
    return current is not None and current.kind == "wait"  # one of `FREE_WAITS`


def at_start(run: Run, actions: Actions) -> Claim:
    """Return the claim at the start: nothing during first waits."""
    claim = of_run(run, actions)
    return Claim(claim.target, nothing=True) if is_unlocked(run) else claim


def of_run(run: Run, actions: Actions) -> Claim:
    """Return the claim, from persisted data only, so that a restart does not change it."""
    assert run.target is not None
    if run.is_limited:
        return Claim(run.target, nothing=True)
    names = (step.action for step in run.steps if step.action and step.target is None)
    return _claim(run.target, names, actions, run.also)


def of_playbook(
    playbook: CompiledPlaybook, target: Target, actions: Actions, also: tuple[Target, ...] = (), *, asks: bool = False
) -> Claim:
    """`asks`: the run begins with a question, during which the target is locked."""
    definition = playbook.definition
    if isinstance(definition.steps[0], FREE_WAITS) and not asks:
        return Claim(target, nothing=True)
    steps = chain(definition.steps, definition.on_success, definition.on_failure)
    of_target = (step.action for step in steps if isinstance(step, ActionStep) and step.target != JOBS)
    return _claim(target, of_target, actions, also)


def of_attempt(
    targets: Sequence[Target], action_class: type[Action] | None, params: Mapping[str, Any]
) -> Sequence[Claim]:
    # For `TargetLocks.acting`, which keeps attempts of different runs apart.
    if _changes_elsewhere(action_class):
        locked = [_locked(target, [action_class]) for target in targets]
        return [replace(claim, nothing=claim.target.kind is TargetKind.CLUSTER) for claim in locked]
    if not _changes_only_disks(action_class):
        locked = [_locked(target, [action_class]) for target in targets]
        reaches_disks = _reaches_disks(action_class, params)
        return [replace(claim, leaves_disks=claim.leaves_disks and not reaches_disks) for claim in locked]
    return [Claim.of_disks(target.node) if target.node is not None else Claim(target) for target in targets]


def _claim(target: Target, names: Iterable[str], actions: Actions, also: tuple[Target, ...]) -> Claim:
    return replace(_claim_of_one(target, names, actions), also=also) if also else _claim_of_one(target, names, actions)


def _claim_of_one(target: Target, names: Iterable[str], actions: Actions) -> Claim:
    if target.kind is TargetKind.GROUP:
        return Claim(target, nothing=True)  # its members are locked; they would wait for a parent that waits for them
    if target.kind is TargetKind.JOB:
        return Claim(target)  # even a checkpoint of a job could disturb another run's steps
    classes = [actions.action_class(name) for name in names]
    changing = [each for each in classes if each is None or each.harmful]
    if target.kind is TargetKind.CLUSTER:
        changing = [each for each in changing if not _changes_elsewhere(each)]
    if not changing:
        return Claim(target, nothing=True)
    if target.kind is TargetKind.NODE and target.node is not None and all(map(_changes_only_disks, changing)):
        return Claim.of_disks(target.node)
    return _locked(target, changing)


def _locked(target: Target, changing: Sequence[type[Action] | None]) -> Claim:
    locked = _whole_node(target) if any(map(_changes_whole_node, changing)) else target
    leaves_disks = locked.kind is TargetKind.NODE and all(map(_leaves_disks, changing))
    return Claim(locked, leaves_disks=leaves_disks)


def _whole_node(target: Target) -> Target:
    is_gpu = target.kind is TargetKind.GPU and target.node is not None
    return Target(TargetKind.NODE, node=target.node) if is_gpu else target


def _has(trait: str, action_class: type[Action] | None) -> bool:  # one of `ActionTraits`
    return bool(getattr(action_class, trait, False))


_changes_whole_node = functools.partial(_has, "changes_node")
_changes_elsewhere = functools.partial(_has, "changes_elsewhere")
_changes_only_disks = functools.partial(_has, "changes_disks_only")
_leaves_disks = functools.partial(_has, "leaves_disks")


def _reaches_disks(action_class: type[Action] | None, params: Mapping[str, Any]) -> bool:
    reaches_disks = getattr(action_class, "reaches_disks", None)
    return bool(reaches_disks and reaches_disks(params))
