"""What the playbooks would do about an alert, and why: without a server, a store or an effect.

Guards that look at earlier runs cannot be judged here; they are told. A step whose condition or
parameters depend on how earlier steps end is undetermined.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from jinja2 import meta

from trainmedic_server import errors
from trainmedic_server.catalog import expressions
from trainmedic_server.domain import duration
from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.playbook import ActionStep, ApproveStep, Mode, UndoTrigger, step_id
from trainmedic_server.domain.run import Controls, Decision, Run, Status
from trainmedic_server.domain.target import Target, Unresolved
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine import guards, scope
from trainmedic_server.ports.actions import Actions
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.ports.playbooks import Catalog, CompiledPlaybook, Scope, Step
from trainmedic_server.ports.store import GuardFacts
from trainmedic_server.server import payload

_RUN_ID = "00000000-0000-7000-8000-000000000000"
"""Stands in for the id of a run that is not there."""


class StepForecast(StrEnum):
    """What would become of a step."""

    RUNS = "runs"
    SKIPPED = "skipped"
    UNDETERMINED = "undetermined"
    FAILS = "fails"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: what it is, whether it would run, with which parameters, and why.

    ``params`` are rendered and checked; None where there are none or they are not known.
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
    """One playbook and one alert. ``guards`` and ``steps`` are empty where it does not react.

    ``decision`` is what would be decided as far as the alert alone tells: ``started``,
    ``observe_only``, ``stale``, ``target_unknown`` or ``target_ambiguous``; None where it does not react.
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
    """For each alert and each playbook, in the order of alerts and of the playbooks' names."""
    return tuple(_explained(book, actions, alert, limits, now, topology) for alert in alerts for book in catalog.all())


def _explained(
    book: CompiledPlaybook, actions: Actions, alert: Alert, limits: EngineLimits, now: datetime, topology: Topology
) -> Explanation:
    match = book.match(alert)
    if not match.matched:
        return Explanation(book.spec.name, book.source, alert, False, match.why)
    mode = Mode.stricter(book.spec.mode, limits.mode)
    target = book.target_of(alert, topology)
    if isinstance(target, Unresolved):
        refused = Decision(target.reason)
        return Explanation(book.spec.name, book.source, alert, True, target.why, mode, None, refused)
    verdict = guards.decide(
        book.spec.guards, mode, GuardFacts(), Controls(), limits, starts_at=alert.starts_at, now=now
    )
    names = _scope(book, alert, target, mode, now)
    return Explanation(
        playbook=book.spec.name,
        source=book.source,
        alert=alert,
        matched=True,
        why=verdict.why,
        mode=mode,
        target=target.key,
        decision=verdict.decision,
        guards=_guards(book),
        steps=_steps(book, actions, names),
    )


def _scope(book: CompiledPlaybook, alert: Alert, target: Target, mode: Mode, now: datetime) -> Scope:
    """The names as they are before any step has run."""
    run = Run(
        _RUN_ID, book.spec.name, book.version, target, mode, Status.RUNNING, Decision.STARTED,
        alert.identity, alert.name, alert.labels, now,
    )  # fmt: skip
    return scope.build(run, book, [alert], hindsight=False)


def _guards(book: CompiledPlaybook) -> tuple[str, ...]:
    wanted = book.spec.guards
    found = []
    if wanted.cooldown is not None:
        found.append(f"cooldown: not within {duration.write(wanted.cooldown)} after its last run on this target ended")
    if wanted.max_runs is not None:
        per = duration.write(wanted.max_runs.per)
        found.append(f"max_runs: at most {wanted.max_runs.count} runs started in {per}")
    if wanted.max_concurrent is not None:
        found.append(f"max_concurrent: at most {wanted.max_concurrent} runs open at once")
    return tuple(found)


def _steps(book: CompiledPlaybook, actions: Actions, names: Scope) -> tuple[StepPlan, ...]:
    return tuple(
        _step(book, actions, phase, index, step, names)
        for phase, steps in (("steps", book.spec.steps), ("on_failure", book.spec.on_failure))
        for index, step in enumerate(steps)
    )


def _step(book: CompiledPlaybook, actions: Actions, phase: str, index: int, step: Step, names: Scope) -> StepPlan:
    known_as, what = step_id(step, index, phase), _what(step)
    verdict, why = _condition(book, phase, index, step, names)
    if verdict in (StepForecast.SKIPPED, StepForecast.FAILS) or not isinstance(step, ActionStep):
        if isinstance(step, ApproveStep) and verdict is StepForecast.RUNS:
            what = f"{what}: {_question(book, phase, index, step, names)}"
        return StepPlan(phase, known_as, what, verdict, why)
    undo = None if step.undo is UndoTrigger.NEVER else str(step.undo)
    if actions.spec(step.action) is None:
        return StepPlan(phase, known_as, what, StepForecast.FAILS, f"there is no action {step.action!r} in this server")
    if _speaks_of_steps(step.with_):
        told = why or "its parameters depend on how earlier steps end"
        return StepPlan(phase, known_as, what, StepForecast.UNDETERMINED, told, undo=undo)
    try:
        params = book.params(phase, index, names)
    except errors.ExpressionError as error:
        return StepPlan(phase, known_as, what, StepForecast.FAILS, str(error), undo=undo)
    shown = params.model_dump(mode="json", by_alias=True, exclude_none=True)
    return StepPlan(phase, known_as, what, verdict, why, shown, undo)


def _condition(book: CompiledPlaybook, phase: str, index: int, step: Step, names: Scope) -> tuple[StepForecast, str]:
    if step.when and _speaks_of_steps(step.when, is_expression=True):
        return StepForecast.UNDETERMINED, f"depends on how earlier steps end: {step.when}"
    try:
        if book.when(phase, index, names):
            return StepForecast.RUNS, f"when holds: {step.when}" if step.when else ""
    except errors.ExpressionError as error:
        return StepForecast.FAILS, str(error)
    return StepForecast.SKIPPED, f"when does not hold: {step.when}"


def _question(book: CompiledPlaybook, phase: str, index: int, step: ApproveStep, names: Scope) -> str:
    try:
        return book.message(phase, index, names)
    except errors.ExpressionError:
        return step.message


def _speaks_of_steps(value: Any, *, is_expression: bool = False) -> bool:
    """Whether a checked expression, or a template anywhere in `value`, uses the name ``steps``."""
    if isinstance(value, Mapping):
        return any(_speaks_of_steps(each) for each in value.values())
    if isinstance(value, list):
        return any(_speaks_of_steps(each) for each in value)
    if not isinstance(value, str) or not (is_expression or expressions.is_template(value)):
        return False
    tree = expressions.parse_expression(value) if is_expression else expressions.parse_template(value)
    return "steps" in meta.find_undeclared_variables(tree)


def _what(step: Step) -> str:
    limit = f", at most {duration.write(step.timeout)}" if step.timeout else ""
    if isinstance(step, ActionStep):
        return f"action {step.action}"
    if isinstance(step, ApproveStep):
        return f"approve{limit}"
    return f"wait_for {step.wait_for}{limit}"
