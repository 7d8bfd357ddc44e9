"""Which steps a run has, and which of them is next. Pure.

Who calls it: ``plan`` and ``undoing``, and ``admission`` for the steps of a new run. Not here: how one step
proceeds (``steps``).
"""

from __future__ import annotations

from trainmedic_server.domain.playbook import APPROVAL, ActionStep, ApproveStep, WaitStep, step_id
from trainmedic_server.domain.run import Run, StepState, StepStatus
from trainmedic_server.ports.playbooks import CompiledPlaybook, Step


def step_definition(playbook: CompiledPlaybook, state: StepState) -> Step:
    """The playbook's entry that a step's state belongs to."""
    if state.phase == APPROVAL:
        return playbook.definition.approval.step
    entries = playbook.definition.steps if state.phase == "steps" else playbook.definition.on_failure
    return entries[state.index]


def initial_steps(playbook: CompiledPlaybook, *, ask_first: bool) -> tuple[StepState, ...]:
    """The steps of a new run, all pending; with mode approve's question in front if `ask_first`."""
    states = [StepState(APPROVAL, 0, APPROVAL, "approve")] if ask_first else []
    for phase, entries in (("steps", playbook.definition.steps), ("on_failure", playbook.definition.on_failure)):
        for index, entry in enumerate(entries):
            action = entry.action if isinstance(entry, ActionStep) else None
            states.append(StepState(phase, index, step_id(entry, index, phase), _kind(entry), action))
    return tuple(states)


def is_fatal(state: StepState, definition: Step) -> bool:
    """Whether the run fails because of how this step ended."""
    match state.status:
        case StepStatus.REJECTED | StepStatus.CANCELLED:
            return True
        case StepStatus.FAILED | StepStatus.UNKNOWN:
            return definition.on_error == "fail"
        case StepStatus.TIMED_OUT:
            return definition.on_error == "fail" and not _tolerates_timeout(definition)
        case _:
            return False


def _tolerates_timeout(definition: Step) -> bool:
    if isinstance(definition, ApproveStep):
        return definition.last_resort == "continue"
    return isinstance(definition, WaitStep) and definition.on_timeout == "continue"


def failed_step(run: Run, playbook: CompiledPlaybook) -> StepState | None:
    """The step because of which the run fails; None if there is none."""
    regular = (step for step in run.steps if step.phase != "on_failure")
    return next((step for step in regular if is_fatal(step, step_definition(playbook, step))), None)


def next_step(run: Run, playbook: CompiledPlaybook, failed: StepState | None) -> StepState | None:
    """The next step to proceed with: the first that is not final; in ``on_failure`` where the run has `failed`.

    In ``on_failure`` a failed action does not keep the steps after it from running, because one of them may
    notify a person. A rejected approval does, and so does a wait or an approval that timed out: the steps after it were
    meant to run only once it had succeeded.
    """
    for state in run.steps:
        if (state.phase == "on_failure") != (failed is not None):
            continue
        if not state.status.is_final:
            return state
        if failed is not None and state.kind != "action" and is_fatal(state, step_definition(playbook, state)):
            return None
    return None


def _kind(entry: Step) -> str:
    if isinstance(entry, WaitStep):
        return "wait_for"
    return "approve" if isinstance(entry, ApproveStep) else "action"
