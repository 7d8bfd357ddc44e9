"""Order of a run's steps, and the next one."""

from __future__ import annotations

from collections.abc import Sequence

from trainmedic_server.domain.playbook import (
    APPROVAL,
    CHECK,
    FREE_WAITS,
    ON_LIMITED,
    PHASES,
    ActionStep,
    ApproveStep,
    PollStep,
    WaitStep,
    step_id,
)
from trainmedic_server.domain.run import Run, StepState, StepStatus
from trainmedic_server.ports.playbooks import CompiledPlaybook, Step

_ENDS = ("on_success", "on_failure", ON_LIMITED)  # phases whose failures no longer change the run's outcome
# Phases of a group's parent run, and of its members.
PARENT_PHASES = (CHECK, "on_success", "on_failure")
MEMBER_PHASES = ("steps",)


def step_definition(playbook: CompiledPlaybook, state: StepState) -> Step:
    if state.phase == APPROVAL:
        return playbook.definition.approval.step
    return playbook.definition.phase(state.phase)[state.index]


def initial_steps(
    playbook: CompiledPlaybook, *, ask_first: bool, phases: Sequence[str] = PHASES
) -> tuple[StepState, ...]:
    """Return a new run's pending steps, with mode approve's question first if `ask_first`."""
    states = [StepState(APPROVAL, 0, APPROVAL, "approve")] if ask_first else []
    for phase in phases:
        for index, entry in enumerate(playbook.definition.phase(phase)):
            action = entry.action if isinstance(entry, ActionStep) else None
            target = entry.target if isinstance(entry, ActionStep) else None
            states.append(StepState(phase, index, step_id(entry, index, phase), _kind(entry), action, target=target))
    return tuple(states)


def why_without_target(run: Run, state: StepState) -> str | None:
    if state.target is None or run.also:
        return None  # a step with `target` works on the jobs, which are the run's further targets
    return f"no job runs on {run.target.node if run.target else 'an unknown node'}"


def is_fatal(state: StepState, definition: Step) -> bool:
    """Return whether the run cannot continue after the step."""
    match state.status:
        case StepStatus.REJECTED:
            return True
        case StepStatus.CANCELLED:
            return state.kind != "action"  # a cancelled action means that the alert resolved: the run continues
        case StepStatus.FAILED | StepStatus.UNKNOWN:
            return definition.on_error == "fail"
        case StepStatus.TIMED_OUT:
            return not tolerates_timeout(definition)
        case _:
            return False


def tolerates_timeout(definition: Step) -> bool:
    if definition.on_error == "continue":
        return True
    if isinstance(definition, ApproveStep):
        return definition.last_resort == "continue"
    return isinstance(definition, (WaitStep, PollStep)) and definition.on_timeout == "continue"


def failed_step(run: Run, playbook: CompiledPlaybook) -> StepState | None:
    regular = (step for step in run.steps if step.phase not in _ENDS)
    return next((step for step in regular if is_fatal(step, step_definition(playbook, step))), None)


def next_step(run: Run, playbook: CompiledPlaybook, failed: StepState | str | None) -> StepState | None:
    """Return the first step that is not final: in ``on_failure`` after a failure, otherwise in the regular phases and
    ``on_success``.

    `failed` is the failed step, or why a group failed. Phases of `_ENDS` continue after a failed action, but not after
    a rejection or a timed-out wait, on which later steps depend.
    """
    # A run with steps in ON_LIMITED has no others.
    phases = ("on_failure",) if failed is not None else (APPROVAL, "steps", "on_success", ON_LIMITED)
    for state in run.steps:
        if state.phase not in phases:
            continue
        if not state.status.is_final:
            return state
        if state.phase in _ENDS and state.kind != "action" and is_fatal(state, step_definition(playbook, state)):
            return None
    return None


def next_of_check(run: Run) -> StepState | None:
    return next((state for state in run.steps if state.phase == CHECK and not state.status.is_final), None)


def _kind(entry: Step) -> str:
    if isinstance(entry, WaitStep):
        return "wait_for"
    if isinstance(entry, FREE_WAITS):
        return "wait"
    return "approve" if isinstance(entry, ApproveStep) else "action"
