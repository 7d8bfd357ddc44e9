"""Forecast of a playbook's steps from an alert alone.

Steps that depend on earlier results, or on unknown earlier runs, are undetermined.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_core import duration, errors
from trainmedic_core.expressions import evaluation, template_syntax
from trainmedic_core.target import Target
from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.job_verdict import VerdictsOnJob
from trainmedic_server.domain.memory import RunMemory
from trainmedic_server.domain.playbook import (
    PHASES,
    ActionStep,
    ApproveStep,
    DelayStep,
    Mode,
    PolledQuery,
    PollStep,
    UndoTrigger,
    UntilStep,
)
from trainmedic_server.domain.run import Decision, Run, Status, StepState
from trainmedic_server.engine import scope, step_sequence
from trainmedic_server.ports.actions import Actions
from trainmedic_server.ports.playbooks import CompiledPlaybook, Scope, Step

_RUN_ID = "00000000-0000-7000-8000-000000000000"  # of the imagined run


class StepForecast(StrEnum):
    RUNS = "runs"
    SKIPPED = "skipped"
    UNDETERMINED = "undetermined"
    FAILS = "fails"


class StepPlan(Struct, frozen=True):
    """Forecast of one step, with the field names of the JSON output.

    ``params`` are rendered and checked; None without parameters or if not known.
    """

    phase: str
    id: str
    what: str
    verdict: StepForecast
    why: str = ""
    params: Mapping[str, Any] | None = None
    undo: str | None = None  # its trigger; None for never


def step_plans(
    playbook: CompiledPlaybook,
    actions: Actions,
    alert: Alert,
    target: Target,
    mode: Mode,
    now: datetime,
    verdicts: Mapping[str, VerdictsOnJob],
    also: tuple[Target, ...] = (),
    phases: Sequence[str] = PHASES,
    memory: RunMemory | None = None,
) -> tuple[StepPlan, ...]:
    """Return each step as a run started now would perform it. `memory`: None if the earlier runs are unknown."""
    run = replace(_imagined(playbook, alert, target, mode, now), also=also, memory=memory)
    names = scope.build(run, playbook, [alert], hindsight=False, verdicts=verdicts, now=now)
    states = step_sequence.initial_steps(playbook, ask_first=False, phases=phases)
    return tuple(_with_jobs(run, state, _step_plan(playbook, actions, names, state)) for state in states)


def _with_jobs(run: Run, state: StepState, plan: StepPlan) -> StepPlan:
    if state.target is None:
        return plan
    if why := step_sequence.why_without_target(run, state):
        return replace(plan, verdict=StepForecast.SKIPPED, why=why, params=None)
    return replace(plan, what=f"{plan.what} on {', '.join(target.key for target in run.also)}")


def _imagined(playbook: CompiledPlaybook, alert: Alert, target: Target, mode: Mode, now: datetime) -> Run:
    return Run(
        id=_RUN_ID,
        playbook=playbook.definition.name,
        version=playbook.version,
        target=target,
        mode=mode,
        status=Status.RUNNING,
        decision=Decision.STARTED,
        alert=alert.identity,
        alert_name=alert.name,
        alert_labels=alert.labels,
        created_at=now,
    )


def _step_plan(playbook: CompiledPlaybook, actions: Actions, names: Scope, state: StepState) -> StepPlan:
    spec = step_sequence.step_definition(playbook, state)
    plan = StepPlan(state.phase, state.id, _describe(spec), *_condition(playbook, names, state, spec))
    if plan.verdict in (StepForecast.SKIPPED, StepForecast.FAILS):
        return plan
    if isinstance(spec, ApproveStep) and plan.verdict is StepForecast.RUNS:
        return replace(plan, what=f"{plan.what}: {_question(playbook, names, state, spec)}")
    if isinstance(spec, PollStep):
        return _rendered(playbook, names, state, plan, spec.wait_for.model_dump(by_alias=True))
    if not isinstance(spec, ActionStep):
        return plan
    if actions.action_class(spec.action) is None:
        return replace(plan, verdict=StepForecast.FAILS, why=f"there is no action {spec.action!r} in this server")
    plan = replace(plan, undo=None if spec.undo_trigger is UndoTrigger.NEVER else str(spec.undo_trigger))
    return _rendered(playbook, names, state, plan, spec.with_)


def _rendered(
    playbook: CompiledPlaybook, names: Scope, state: StepState, plan: StepPlan, written: Mapping[str, Any]
) -> StepPlan:
    if unknown := _unknown(written, names):
        reason = plan.why or f"its parameters depend on {unknown}"
        return replace(plan, verdict=StepForecast.UNDETERMINED, why=reason)
    try:
        params = playbook.params(state.phase, state.index, names)
    except errors.ExpressionError as error:
        return replace(plan, verdict=StepForecast.FAILS, why=str(error))
    return replace(plan, params=params.model_dump(mode="json", by_alias=True, exclude_none=True))


def _condition(playbook: CompiledPlaybook, names: Scope, state: StepState, spec: Step) -> tuple[StepForecast, str]:
    if spec.when and (unknown := _unknown(spec.when, names, is_expression=True)):
        return StepForecast.UNDETERMINED, f"depends on {unknown}: {spec.when}"
    try:
        if playbook.when(state.phase, state.index, names):
            return StepForecast.RUNS, f"when holds: {spec.when}" if spec.when else ""
    except errors.ExpressionError as error:
        return StepForecast.FAILS, str(error)
    return StepForecast.SKIPPED, f"when does not hold: {spec.when}"


def _question(playbook: CompiledPlaybook, names: Scope, state: StepState, spec: ApproveStep) -> str:
    try:
        return playbook.message(state.phase, state.index, names)
    except errors.ExpressionError:
        return spec.question.message


def _unknown(written: Any, names: Scope, *, is_expression: bool = False) -> str:
    """Return what the text uses that is not known yet."""
    used = _names_in(written, is_expression)
    if "steps" in used or "group" in used:
        return "how earlier steps end"
    return "earlier runs" if "runs" in used and "runs" not in names else ""


def _names_in(value: Any, is_expression: bool = False) -> Collection[str]:
    if isinstance(value, Mapping):
        return {name for member in value.values() for name in _names_in(member)}
    if isinstance(value, list):
        return {name for member in value for name in _names_in(member)}
    if not isinstance(value, str) or not (is_expression or evaluation.is_template(value)):
        return set()
    return _free_names(value, is_expression)


@functools.lru_cache(maxsize=4096)  # the same texts for each alert, of which parsing is nearly all the time
def _free_names(text: str, is_expression: bool) -> frozenset[str]:
    tree = template_syntax.parse_expression(text) if is_expression else template_syntax.parse_template(text)
    return frozenset(template_syntax.free_names(tree))


def _describe(spec: Step) -> str:
    limit = f", at most {duration.write(spec.timeout)}" if spec.timeout else ""
    if isinstance(spec, ActionStep):
        return f"action {spec.action}"
    if isinstance(spec, ApproveStep):
        return f"approve{limit}"
    if isinstance(spec, DelayStep):
        return f"wait {spec.wait}"
    if isinstance(spec, UntilStep):
        return f"wait_until {spec.wait_until}"
    if isinstance(spec, PollStep):
        polled = spec.wait_for
        what = "query" if isinstance(polled, PolledQuery) else f"action {polled.action}"
        held = f" to hold for {duration.write(polled.for_)}" if polled.for_ else ""
        return f"wait_for {what}{held}, every {duration.write(polled.every)}{limit}"
    return f"wait_for {spec.wait_for}{limit}"
