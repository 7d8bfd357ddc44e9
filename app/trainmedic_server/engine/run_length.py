"""Longest time that a run may take by its playbook's own limits.

Excludes waits for a busy target, a turn, a window or the end of a pause.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from msgspec import Struct

from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.playbook import ActionStep, ApproveStep, DelayStep, PollStep, UntilStep, WaitStep
from trainmedic_server.ports.actions import Actions
from trainmedic_server.ports.playbooks import CompiledPlaybook, Step


class LongestRun(Struct, frozen=True):
    span: timedelta = timedelta()
    after_end: bool = False
    """True if `span` counts from the end of the alert, because the run may wait for it."""
    is_limited: bool = True  # False if a step has no known limit

    def ends_by(self, start: datetime, alert_end: datetime | None) -> datetime | None:
        """Return None if there is no limit, or the end of the alert that it waits for is unknown."""
        if not self.is_limited or (self.after_end and alert_end is None):
            return None
        begin = max(start, alert_end) if self.after_end and alert_end else start
        try:
            return begin + self.span
        except OverflowError:  # after the year 9999
            return None


def longest(playbook: CompiledPlaybook, mode: Mode, actions: Actions, before_first_act: timedelta) -> LongestRun:
    """`before_first_act` is the longest delay before the first act: the maximum age of an alert."""
    if mode is Mode.OBSERVE:
        return LongestRun()
    definition = playbook.definition
    first = (definition.approval.step,) if mode is Mode.APPROVE else ()
    steps = _together([_longest_step(step, actions) for step in (*first, *definition.steps)])
    final_phases = (definition.on_success, definition.on_failure)
    final = [_together([_longest_step(step, actions) for step in phase]) for phase in final_phases]
    slowest = LongestRun(
        max(phase.span for phase in final),
        any(phase.after_end for phase in final),
        all(phase.is_limited for phase in final),
    )
    return _together([LongestRun(before_first_act), steps, slowest])


def _together(parts: Iterable[LongestRun]) -> LongestRun:
    parts = list(parts)
    try:
        span = sum((part.span for part in parts), timedelta())
    except OverflowError:  # millions of years
        return LongestRun(is_limited=False)
    return LongestRun(span, any(part.after_end for part in parts), all(part.is_limited for part in parts))


def _longest_step(step: Step, actions: Actions) -> LongestRun:
    match step:
        case ActionStep():
            action = actions.action_class(step.action)
            attempt = step.timeout or (action.default_timeout if action is not None else None)
            if attempt is None:
                return LongestRun(is_limited=False)
            delays = map(step.retry.delay_after, range(1, step.retry.attempts))
            return LongestRun(sum(delays, attempt * step.retry.attempts))
        case PollStep():
            return LongestRun(step.timeout or timedelta(), is_limited=step.timeout is not None)
        case DelayStep() | UntilStep():
            return LongestRun(is_limited=False)  # its time may be a template
        case WaitStep():
            return LongestRun(step.timeout or timedelta(), after_end=step.timeout is None)
        case ApproveStep():
            return _longest_question(step)


def _longest_question(step: ApproveStep) -> LongestRun:
    if step.timeout is None:
        return LongestRun(is_limited=False)
    span, escalation = step.timeout, step.question.escalate
    if step.on_timeout == "escalate" and escalation is not None:
        span += escalation.timeout or step.timeout
    again = step.question.ask_again  # repeated while the alert fires
    return LongestRun(span + (again or timedelta()), after_end=again is not None)
