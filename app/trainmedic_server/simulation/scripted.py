"""Scripted actions for tests, with the names, parameters and inverses of the real ones.

Replies are looked up by step ID, else action; for undos by ``<step id>.undo``, else inverse action. Each attempt takes
the next reply; the last one repeats. Without replies, attempts are applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from msgspec import Struct
from pydantic import BaseModel

from trainmedic_core.target import Target
from trainmedic_server import errors
from trainmedic_server.actions.base import BasicAction
from trainmedic_server.actions.commands import COMPARED
from trainmedic_server.domain import promql
from trainmedic_server.domain.destinations import command_id_of
from trainmedic_server.domain.playbook import PROMETHEUS_QUERY
from trainmedic_server.domain.run import Run, StepStatus
from trainmedic_server.ports.actions import Action, Actions, Call
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.store import RunStore
from trainmedic_server.simulation.suite_format import ReplyModel, ReplyOutcome

_APPLIED = ReplyModel(outcome=ReplyOutcome.APPLIED)


class RecordedCall(Struct, frozen=True):
    action: str
    target: str
    params: Mapping[str, Any]
    undo: bool


class Script:
    def __init__(self, replies: Mapping[str, Sequence[ReplyModel]]) -> None:
        self._replies = replies
        self._used: dict[str, int] = {}
        self.calls: list[RecordedCall] = []

    def next(self, *keys: str) -> ReplyModel:
        key = next((key for key in keys if self._replies.get(key)), None)
        if key is None:
            return _APPLIED
        used = self._used.get(key, 0)
        self._used[key] = used + 1
        replies = self._replies[key]
        return replies[min(used, len(replies) - 1)]


class ScriptedActions:
    """`ports.actions.Actions` with real classes and scripted outcomes."""

    def __init__(self, real: Actions, script: Script, store: RunStore, clock: Clock) -> None:
        self._real = real
        self._script = script
        self._store = store
        self._clock = clock

    def names(self) -> Sequence[str]:
        return self._real.names()

    def action_class(self, name: str) -> type[Action] | None:
        return self._real.action_class(name)

    def get(self, name: str) -> Action:
        spec = self._real.action_class(name)
        if spec is None:
            raise errors.PermanentFailure(f"there is no action {name}")
        return _ScriptedAction(spec, self._script, self._store, self._clock)


class _ScriptedAction(BasicAction):
    """The engine uses the real class for parameters, targets and inverses."""

    name: ClassVar[str] = "scripted"
    summary: ClassVar[str] = "Does as a test says."
    Params: ClassVar[type[BaseModel]] = BaseModel

    def __init__(self, real: type[Action], script: Script, store: RunStore, clock: Clock) -> None:
        self._real = real
        self._script = script
        self._store = store
        self._clock = clock

    async def perform(self, call: Call) -> Mapping[str, Any]:
        params = call.params.model_dump(mode="json", by_alias=True, exclude_none=True)
        run = await self._store.transact(lambda tx: tx.run(call.run_id))
        step = _step_of(run, call.command_id, call.target)
        is_undo = call.undo_of is not None
        if step.is_attempt:
            self._script.calls.append(RecordedCall(self._real.name, call.target.key, params, is_undo))
        reply = self._script.next(f"{step.id}.undo" if is_undo else step.id, self._real.name)
        await asyncio.sleep(reply.after.total_seconds())
        match reply.outcome:
            case ReplyOutcome.APPLIED:
                return _query_output(reply.output, params) if self._real.name == PROMETHEUS_QUERY else reply.output
            case ReplyOutcome.FAILED if COMPARED in reply.output:  # as an action that reads its effect back
                raise errors.EffectDisproved(reply.reason or "something else came of it", reply.output)
            case ReplyOutcome.FAILED:
                raise errors.TemporaryFailure(reply.reason or "failed", reply.output)
            case ReplyOutcome.REJECTED | ReplyOutcome.UNSUPPORTED:
                raise errors.PermanentFailure(reply.reason or str(reply.outcome), reply.output)
            case ReplyOutcome.SKIPPED:
                raise errors.NotSetUp(reply.reason or "the server is not set up for it", reply.output)
            case ReplyOutcome.TIMEOUT:
                await self._clock.sleep_until(call.deadline)
                raise errors.OutcomeUnknown(reply.reason or "no reply in time", reply.output)


class _CallingStep(Struct, frozen=True):
    id: str
    is_attempt: bool
    """False for a poll by a wait."""


def _step_of(run: Run | None, command_id: str, target: Target) -> _CallingStep:
    steps = run.steps if run else ()
    for step in steps:
        attempts = (*step.attempts, *step.undo_attempts)
        if any(command_id_of(attempt.command_id, step, target) == command_id for attempt in attempts):
            return _CallingStep(step.id, True)
    waiting = next((step.id for step in steps if step.kind == "wait" and step.status is StepStatus.WAITING), "")
    return _CallingStep(waiting, False)


def _query_output(output: Mapping[str, Any], params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Complete a reply's output: apply the query's comparison to its `value`."""
    value = output.get("value", output.get("compared"))
    comparisons = promql.comparisons(params["query"])
    if len(comparisons) == 1 and isinstance(value, (int, float)):
        passes = comparisons[0].holds(float(value)) is not False
    else:
        passes = "value" not in output or value is not None
    samples = [{"labels": {}, "value": value}] if passes else []
    made = {"value": value if passes else None, "series": samples, "count": len(samples), "compared": value}
    return {**made, **{name: each for name, each in output.items() if name != "value"}}
