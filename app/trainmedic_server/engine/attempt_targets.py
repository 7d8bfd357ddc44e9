"""Targets, nodes and commands of attempts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from trainmedic.errors import described
from trainmedic_core.target import Target, TargetKind
from trainmedic_server import errors, telemetry
from trainmedic_server.domain import places
from trainmedic_server.domain.destinations import command_id_of
from trainmedic_server.domain.run import Run
from trainmedic_server.engine import performing
from trainmedic_server.engine.plan_values import PerformAttempt
from trainmedic_server.ports.actions import ON_RECORD, Actions, MultiNodeAction, NodeTouchingAction

log = telemetry.logger(__name__)


def targets_of(run: Run, act: PerformAttempt, actions: Actions) -> Sequence[Target]:
    """Return what the attempt locks: its targets (a job under each of its names), and if it changes something the
    nodes that the action names.
    """
    state = run.step(act.key)
    is_on_job = run.target is not None and run.target.kind is TargetKind.JOB
    own = run.targets if is_on_job else run.targets_of(state)
    undo = state.undo if act.undo else None
    action_class = actions.action_class(undo.action if undo else state.action or "")
    if action_class is None or not action_class.harmful or not performing.has_methods_of(action_class, MultiNodeAction):
        return own
    try:
        params = action_class.Params.model_validate(undo.params if undo else state.params, context=ON_RECORD)
    except ValueError:
        return own  # no attempt will be made
    return (*own, *cast("type[MultiNodeAction]", action_class).places(params))


def nodes_touched(run: Run, act: PerformAttempt, actions: Actions, targets: Sequence[Target]) -> set[str]:
    """Return the nodes that the breaker counts: none for reading actions and undos.

    Raises ConfigurationError if the action does not state them.
    """
    state = run.step(act.key)
    action_class = actions.action_class(state.action or "")
    if act.undo or action_class is None or not action_class.harmful:
        return set()
    nodes = set[str]().union(*map(places.counted_nodes, targets))
    if performing.has_methods_of(action_class, NodeTouchingAction):
        try:
            params = action_class.Params.model_validate(state.params, context=ON_RECORD)
            touching = cast("type[NodeTouchingAction]", action_class)
            nodes |= {node for target in run.targets_of(state) for node in touching.touches(params, target)}
        except Exception as error:  # third-party code, whose nodes must be known
            log.exception("action does not say which nodes it touches", action=state.action)
            raise errors.ConfigurationError(
                f"action {state.action} does not say which nodes it touches: {described(error)}"
            ) from error
    return nodes


def ended_between(before: Run, after: Run) -> Iterator[tuple[str, str]]:
    """Yield action and command ID of each attempt that has ended."""
    for old, new in zip(before.steps, after.steps, strict=True):
        if old is new:
            continue
        pairs = [(new.action, old.attempts, new.attempts)]
        if old.undo and new.undo:
            pairs.append((new.undo.action, old.undo.attempts, new.undo.attempts))
        for action, attempts_before, attempts_after in pairs:
            if not action or not attempts_before or attempts_before[-1].status != "running":
                continue
            last = attempts_before[-1]
            if all(attempt.status != "running" for attempt in attempts_after if attempt.number == last.number):
                for target in after.targets_of(new):
                    yield action, command_id_of(last.command_id, new, target)
