"""Explains what the playbooks would do about an alert, and why: without a server, a store or an effect.

Guards that look at earlier runs cannot be judged here; they are listed. A step whose condition or
parameters depend on how earlier steps end is undetermined.

The decision and the steps are the engine's own. Its plan of mode observe (`engine.plan.observe`) is not used,
because it says less: it calls a step observed whether it runs, fails or is undetermined, and leaves out
approvals' questions and the steps of ``on_success`` and ``on_failure``.

Who calls it: ``cli.playbook``, which shows an `Explanation` as text (``report``) or as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from trainmedic_server import errors
from trainmedic_server.domain import duration
from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.playbook import ActionStep, ApproveStep, Mode, UndoTrigger
from trainmedic_server.domain.run import Controls, Decision, Run, Status, StepState
from trainmedic_server.domain.target import Target, Unresolved
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine import guards, scope, step_sequence
from trainmedic_server.expressions import evaluation, template_syntax
from trainmedic_server.ports.actions import Actions
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.ports.playbooks import Catalog, CompiledPlaybook, Scope, Step
from trainmedic_server.ports.store import GuardFacts
from trainmedic_server.server import payload

_RUN_ID = "00000000-0000-7000-8000-000000000000"
"""The id of the imagined run, which templates may use."""


class StepForecast(StrEnum):
    """What would become of a step, as far as the alert alone tells."""

    RUNS = "runs"
    SKIPPED = "skipped"
    UNDETERMINED = "undetermined"
    FAILS = "fails"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: what it is, whether it would run, with which parameters, and why.

    The fields are those of the JSON output. ``params`` are rendered and checked; None where the step has none
    or they are undetermined.
    """

    phase: str
    id: str
    what: str
    verdict: StepForecast
    why: str = ""
    params: Mapping[str, Any] | None = None
    undo: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one playbook would do about one alert. ``guards`` and ``steps`` are empty where it does not react.

    The fields are those of the JSON output. ``decision`` is the engine's, as far as the alert alone tells:
    ``started``, ``observe_only``, ``stale``, ``target_unknown`` or ``target_ambiguous``; None where the
    playbook does not react.
    """

    playbook: str
    source: str
    alert: Alert
    matched: bool
    why: str = ""
    mode: Mode | None = None
    target: str | None = None
    decision: Decision | None = None
    guards: tuple[str, ...] = ()
    steps: tuple[StepPlan, ...] = ()


def read_alerts(raw: bytes, now: datetime) -> tuple[Alert, ...]:
    """The alerts of a JSON file: a delivery as Alertmanager posts it, or one alert alone.

    An alert alone may leave out its status (firing) and its beginning (`now`). Raises PayloadError.
    """
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise errors.PayloadError(f"not JSON: {error}") from error
    if isinstance(document, dict) and "alerts" not in document:
        if "labels" not in document:
            raise errors.PayloadError("neither a delivery (with 'alerts') nor an alert (with 'labels')")
        alone = {"status": "firing", "startsAt": now.isoformat(), **document}
        document = {"version": payload.VERSION, "alerts": [alone]}
    return payload.delivery(document, "explained", now).alerts


def explain(
    catalog: Catalog,
    actions: Actions,
    alerts: Sequence[Alert],
    limits: EngineLimits,
    now: datetime,
    topology: Topology = Topology(),
) -> tuple[Explanation, ...]:
    """An explanation for each alert and each playbook, in the order of the alerts and of the playbooks' names."""
    return tuple(
        _explained(playbook, actions, alert, limits, now, topology) for alert in alerts for playbook in catalog.all()
    )


def _explained(
    playbook: CompiledPlaybook, actions: Actions, alert: Alert, limits: EngineLimits, now: datetime, topology: Topology
) -> Explanation:
    match = playbook.match(alert)
    explanation = Explanation(playbook.definition.name, playbook.source, alert, match.matched, match.why)
    if not match.matched:
        return explanation
    mode = Mode.stricter(playbook.definition.mode, limits.mode)
    target = playbook.target_of(alert, topology)
    if isinstance(target, Unresolved):
        return replace(explanation, why=target.why, mode=mode, decision=Decision(target.reason))
    decided = guards.decide(
        playbook.definition.guards,
        mode,
        GuardFacts(),
        Controls(),
        limits,
        alert.starts_at,
        now,
        lambda span: now - span,
    )
    names = _scope(playbook, alert, target, mode, now)
    return replace(
        explanation,
        why=decided.why,
        mode=mode,
        target=target.key,
        decision=decided.decision,
        guards=_guards(playbook),
        steps=tuple(
            _step_plan(playbook, actions, names, state)
            for state in step_sequence.initial_steps(playbook, ask_first=False)
        ),
    )


def _scope(playbook: CompiledPlaybook, alert: Alert, target: Target, mode: Mode, now: datetime) -> Scope:
    """The names that expressions can use before any step has run."""
    run = Run(
        _RUN_ID, playbook.definition.name, playbook.version, target, mode, Status.RUNNING, Decision.STARTED,
        alert.identity, alert.name, alert.labels, now,
    )  # fmt: skip
    return scope.build(run, playbook, [alert], hindsight=False)


def _guards(playbook: CompiledPlaybook) -> tuple[str, ...]:
    """A sentence for each guard that the playbook has."""
    spec = playbook.definition.guards
    sentences = []
    if spec.cooldown is not None:
        sentences.append(
            f"cooldown: not within {duration.write(spec.cooldown)} after its last run on this target ended"
        )
    if spec.max_runs is not None:
        per = duration.write(spec.max_runs.per)
        sentences.append(f"max_runs: at most {spec.max_runs.count} runs started in {per}")
    if spec.max_concurrent is not None:
        sentences.append(f"max_concurrent: at most {spec.max_concurrent} runs open at once")
    return tuple(sentences)


def _step_plan(playbook: CompiledPlaybook, actions: Actions, names: Scope, state: StepState) -> StepPlan:
    spec = step_sequence.step_definition(playbook, state)
    plan = StepPlan(state.phase, state.id, _describe(spec), *_condition(playbook, names, state, spec))
    if plan.verdict in (StepForecast.SKIPPED, StepForecast.FAILS):
        return plan
    if isinstance(spec, ApproveStep) and plan.verdict is StepForecast.RUNS:
        return replace(plan, what=f"{plan.what}: {_question(playbook, names, state, spec)}")
    if not isinstance(spec, ActionStep):
        return plan
    if actions.action_class(spec.action) is None:
        return replace(plan, verdict=StepForecast.FAILS, why=f"there is no action {spec.action!r} in this server")
    plan = replace(plan, undo=None if spec.undo is UndoTrigger.NEVER else str(spec.undo))
    if _uses_steps(spec.with_):
        reason = plan.why or "its parameters depend on how earlier steps end"
        return replace(plan, verdict=StepForecast.UNDETERMINED, why=reason)
    try:
        params = playbook.params(state.phase, state.index, names)
    except errors.ExpressionError as error:
        return replace(plan, verdict=StepForecast.FAILS, why=str(error))
    return replace(plan, params=params.model_dump(mode="json", by_alias=True, exclude_none=True))


def _condition(playbook: CompiledPlaybook, names: Scope, state: StepState, spec: Step) -> tuple[StepForecast, str]:
    """What the step's ``when`` makes of it, and why."""
    if spec.when and _uses_steps(spec.when, is_expression=True):
        return StepForecast.UNDETERMINED, f"depends on how earlier steps end: {spec.when}"
    try:
        if playbook.when(state.phase, state.index, names):
            return StepForecast.RUNS, f"when holds: {spec.when}" if spec.when else ""
    except errors.ExpressionError as error:
        return StepForecast.FAILS, str(error)
    return StepForecast.SKIPPED, f"when does not hold: {spec.when}"


def _question(playbook: CompiledPlaybook, names: Scope, state: StepState, spec: ApproveStep) -> str:
    """What the step asks; unrendered where that depends on how earlier steps end."""
    try:
        return playbook.message(state.phase, state.index, names)
    except errors.ExpressionError:
        return spec.question.message


def _uses_steps(value: Any, *, is_expression: bool = False) -> bool:
    """Whether a checked expression, or a template anywhere in `value`, uses the name ``steps``."""
    if isinstance(value, Mapping):
        return any(_uses_steps(member) for member in value.values())
    if isinstance(value, list):
        return any(_uses_steps(member) for member in value)
    if not isinstance(value, str) or not (is_expression or evaluation.is_template(value)):
        return False
    tree = template_syntax.parse_expression(value) if is_expression else template_syntax.parse_template(value)
    return "steps" in template_syntax.free_names(tree, value)


def _describe(spec: Step) -> str:
    limit = f", at most {duration.write(spec.timeout)}" if spec.timeout else ""
    if isinstance(spec, ActionStep):
        return f"action {spec.action}"
    if isinstance(spec, ApproveStep):
        return f"approve{limit}"
    return f"wait_for {spec.wait_for}{limit}"
