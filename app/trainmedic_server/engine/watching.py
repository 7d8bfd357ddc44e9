"""Looks of a polled wait. They are no attempts: nothing is committed before and after one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from msgspec.structs import replace

from trainmedic_core import errors as core_errors
from trainmedic_core.problems import cut
from trainmedic_server import errors
from trainmedic_server.domain.playbook import PROMETHEUS_QUERY
from trainmedic_server.engine import performing
from trainmedic_server.engine.engine_services import EngineServices
from trainmedic_server.engine.looking import Look, Observed, Sight
from trainmedic_server.engine.plan_values import RunDraft
from trainmedic_server.ports.actions import ON_RECORD, Call

_LONGEST_REASON = 300  # characters


class Watching:
    def __init__(self, key: tuple[str, int]) -> None:
        self.sight = Sight(key)
        self.task: asyncio.Task[Observed] | None = None

    def begin(self, look: Coroutine[Any, Any, Observed]) -> None:
        self.task = asyncio.create_task(look)

    def take(self, look: Look) -> bool:
        """Record the look that has ended; return whether it is news."""
        assert self.task is not None
        observed, self.task = self.task.result(), None
        before, self.sight = self.sight.holds, self.sight.after(look, observed)
        return self.sight.holds is not before or self.sight.is_over(look)

    def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            self.task = None


async def observe(services: EngineServices, draft: RunDraft, look: Look) -> Observed:
    """Look once. Errors of any kind mean that it does not hold."""
    async with services.looks:
        began = services.clock.now()
        outcome = await _call_action(services, draft, look)
    ended = services.clock.now()
    if isinstance(outcome, str):
        return Observed(False, began, ended, cut(outcome, _LONGEST_REASON))
    try:
        holds = draft.playbook.until(*look.key, draft.scope(), outcome)
    except core_errors.ExpressionError as error:
        return Observed(False, began, ended, cut(str(error), _LONGEST_REASON), outcome)
    if holds is None:  # without a condition, a query holds while it has a sample
        holds = look.action != PROMETHEUS_QUERY or bool(outcome.get("series"))
    return Observed(holds, began, ended, "", outcome)


async def _call_action(services: EngineServices, draft: RunDraft, look: Look) -> Mapping[str, Any] | str:
    # The output, or why there is none.
    actions, run, now = services.actions, draft.run, services.clock.now()
    action_class = actions.action_class(look.action)
    if action_class is None:
        return f"this server has no action {look.action!r}"
    if run.target is None:
        return "the run has no target"
    alert = draft.outside.alerts[0].alert
    try:
        params = action_class.Params.model_validate(look.params, context=ON_RECORD)
        action, several = actions.get(look.action), performing.multi_node_action(actions, look.action)
    except (errors.PermanentFailure, ValueError) as error:
        return str(error)
    command_id = services.new_id()
    call = Call(
        command_id,
        run.id,
        run.playbook,
        run.target,
        params,
        alert.name,
        now,
        now + action_class.default_timeout,
        alert,
    )

    async def work(call: Call) -> Mapping[str, Any]:
        return await action.perform(call if several is None else replace(call, params=await several.locate(call)))

    outcome = await performing.outcome_of(look.action, call, work, now, services.metrics)
    action.outcome_saved(command_id)
    return outcome.output if outcome.status == "applied" else outcome.error or outcome.status
