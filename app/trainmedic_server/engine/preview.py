"""Preview of a run's steps with current parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from msgspec.structs import replace

from trainmedic_core import errors, words
from trainmedic_core.target import Target
from trainmedic_server.domain import group, places, selectors
from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.approval import StepAhead
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.playbook import APPROVAL, ActionStep, WaitStep
from trainmedic_server.domain.run import Run, StepState, StepStatus
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine import scope, step_sequence
from trainmedic_server.engine.matching import also_of
from trainmedic_server.ports.actions import ON_RECORD, Action, Actions, NodeTouchingAction
from trainmedic_server.ports.playbooks import CompiledPlaybook, Scope
from trainmedic_server.presentation import times

# A condition that begins with the timeout of a wait.
_TIMED_OUT = re.compile(r"""\s*steps\.(?P<step>\w+)\.status\s*==\s*["']timed_out["'](?=\s*\Z|\s+and\b)""")


_DEPENDS = "would depend on how the run goes: "


def observed(state: StepState, playbook: CompiledPlaybook, names: Scope) -> StepState:
    # As mode observe records it: skipped, or with the parameters that it would have.
    message = None
    try:
        if not playbook.when(state.phase, state.index, names):
            return replace(state, status=StepStatus.SKIPPED, message="its condition was not met")
    except errors.ExpressionError:
        message = f"{_DEPENDS}{step_sequence.step_definition(playbook, state).when}"
    params = state.params
    if state.kind == "action":
        try:
            rendered = playbook.params(state.phase, state.index, names)
            params = rendered.model_dump(mode="json", by_alias=True, exclude_none=True)
        except errors.ExpressionError as error:
            message = f"its parameters depend on the run: {error}"
    return replace(state, status=StepStatus.OBSERVED, message=message, params=params)


def summary(steps: Sequence[StepState]) -> str:
    acting = [step for step in steps if step.action and step.status is StepStatus.OBSERVED]
    return _would_have_applied([(str(step.action), (step.message or "").startswith(_DEPENDS)) for step in acting])


def group_summary(playbook: CompiledPlaybook) -> str:
    acting = [step for step in playbook.definition.steps if isinstance(step, ActionStep)]
    return _would_have_applied([(step.action, step.when is not None) for step in acting])


def _would_have_applied(actions: Sequence[tuple[str, bool]]) -> str:
    """``actions``: name, and whether a condition would decide at the run."""
    certain = ", ".join(action for action, is_conditional in actions if not is_conditional)
    possible = ", ".join(action for action, is_conditional in actions if is_conditional)
    if not certain and possible:
        return f"would have applied {possible}, depending on the run"
    told = f"would have applied {certain or 'nothing'}"
    return f"{told}, and depending on the run {possible}" if possible else told


def steps_after(
    asking: StepState, run: Run, playbook: CompiledPlaybook, names: Scope, actions: Actions, topology: Topology
) -> tuple[StepAhead, ...]:
    """Return the actions that the question allows."""
    phase = "steps" if asking.phase == APPROVAL else asking.phase
    first = 0 if asking.phase == APPROVAL else asking.index + 1
    ahead = [state for state in run.steps if state.phase == phase and state.index >= first and state.kind == "action"]
    return tuple(_steps_ahead(ahead, run, playbook, names, actions, topology))


def steps_of_group(
    members: Sequence[str],
    run: Run,
    playbook: CompiledPlaybook,
    alerts: Sequence[Alert],
    actions: Actions,
    topology: Topology,
    batch: int | None = None,
) -> tuple[StepAhead, ...]:
    """Return the steps as the first member would run them, with the places of all.

    `batch` is the number of their batch, from 1; None for the whole list.
    """
    targets = [Target.of_key(member) for member in members]
    states = step_sequence.initial_steps(playbook, ask_first=False, phases=step_sequence.MEMBER_PHASES)
    jobs = {target: _jobs_of(target, playbook, topology) for target in targets}
    example = replace(run, target=targets[0], steps=states, also=jobs[targets[0]])
    names = scope.build(example, playbook, alerts, hindsight=False, verdicts=topology.verdicts)
    which = f"list {group.digest(members)}" if batch is None else f"batch {batch}"
    note = f"for each of {words.count(len(members), 'member')}, {which}; shown for {members[0]}"
    every_job = list(dict.fromkeys(job for of_member in jobs.values() for job in of_member))
    acting = [state for state in states if state.kind == "action"]
    on_jobs = {state.id for state in acting if state.target is not None}
    ahead = _steps_ahead(acting, example, playbook, names, actions, topology)
    return tuple(_for_all(each, every_job if each.id in on_jobs else targets, topology, note) for each in ahead)


def _jobs_of(target: Target, playbook: CompiledPlaybook, topology: Topology) -> tuple[Target, ...]:
    also = also_of(playbook, target, topology)
    return () if isinstance(also, Unresolved) else also


def _for_all(step: StepAhead, targets: Sequence[Target], topology: Topology, note: str) -> StepAhead:
    note = f"{note}; {step.note}" if step.note else note
    if not step.targets:
        return replace(step, note=note)
    nodes, gpus = tuple(sorted(selectors.nodes_of(targets, topology))), selectors.gpus_of(targets, topology)
    return replace(step, targets=tuple(each.key for each in targets[: group.SHOWN]), nodes=nodes, gpus=gpus, note=note)


def _steps_ahead(
    states: list[StepState],
    run: Run,
    playbook: CompiledPlaybook,
    names: Scope,
    actions: Actions,
    topology: Topology,
) -> Iterator[StepAhead]:
    for state in states:
        would, targets = observed(state, playbook, names), run.targets_of(state)
        if would.status is StepStatus.SKIPPED or not targets or would.action is None:
            continue
        action = actions.action_class(would.action)
        # An action that changes nothing shows no targets.
        reached = targets if action is not None and action.harmful else ()
        nodes = {node for each in reached for node in _nodes_of(action, would.params, each, topology)}
        # One target may have only a number; several need names, to count shared GPUs once.
        gpus = places.gpus_of(targets[0], topology) if len(targets) == 1 else selectors.gpus_of(targets, topology)
        yield StepAhead(
            would.id,
            would.action,
            would.params,
            tuple(each.key for each in reached),
            tuple(sorted(nodes)),
            gpus if reached else 0,
            _condition(state, playbook) or would.message,
        )


def _condition(state: StepState, playbook: CompiledPlaybook) -> str | None:
    """Return ``if the alert still fires after 3 min``. None unless the step depends on a wait."""
    when = str(step_sequence.step_definition(playbook, state).when or "")
    waited = _TIMED_OUT.match(when)
    steps = {str(entry.id): entry for entry in playbook.definition.phase(state.phase)}
    wait = steps.get(waited["step"]) if waited is not None else None
    if waited is None or not isinstance(wait, WaitStep) or wait.wait_for != "resolved":
        return None
    after = f" after {times.span(wait.timeout)}" if wait.timeout else ""
    further = ", and a further condition holds" if when[waited.end() :].strip() else ""
    return f"if the alert still fires{after}{further}"


def _nodes_of(action: type[Action] | None, params: Mapping[str, Any], target: Target, topology: Topology) -> set[str]:
    nodes = set(places.nodes_of(target, topology))
    touching = action is not None and isinstance(action, NodeTouchingAction)
    if touching:
        try:
            parsed = cast("type[Action]", action).Params.model_validate(params, context=ON_RECORD)
            nodes |= set(cast("type[NodeTouchingAction]", action).touches(parsed, target))
        except Exception:  # third-party code; the attempt itself will fail with the reason
            return nodes
    return nodes
