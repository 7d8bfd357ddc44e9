"""Start conditions of a run: guards, mode and breaker.

The first reason that applies is the decision, so the most useful ones come first.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from datetime import datetime

from msgspec import Struct

from trainmedic_core import duration, words
from trainmedic_server.domain.cron import CronWindow
from trainmedic_server.domain.pause import OperatorPause
from trainmedic_server.domain.playbook import Again, Guards, Mode
from trainmedic_server.domain.run import Controls, Decision, Status
from trainmedic_server.domain.time_gaps import Ago
from trainmedic_server.engine import windows as allowed_times
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.ports.store import GuardFacts, LinkedRun


class GuardDecision(Struct, frozen=True):
    decision: Decision
    why: str = ""


def decide(
    guards: Guards,
    mode: Mode,
    facts: GuardFacts,
    controls: Controls,
    limits: EngineLimits,
    starts_at: datetime,
    now: datetime,
    ago: Ago,
    pause: OperatorPause | None = None,
    windows: Sequence[CronWindow] = (),
) -> GuardDecision:
    """Return whether a run may start, apart from the breaker's count (`why_breaker_opens`).

    `pause` would hold the run. An alert from before the open window ages from the window's opening.
    """
    if pause is not None:
        return GuardDecision(Decision.PAUSED, pause.why(now))
    outside = allowed_times.why_outside(windows, now)
    if outside is not None:
        return GuardDecision(Decision.OUTSIDE_WINDOW, outside)
    age = now - allowed_times.could_act_since(windows, starts_at, now)
    if age > limits.max_age:
        began = f"the alert began {duration.write_rounded(age)} ago"
        return GuardDecision(Decision.STALE, f"{began}, over the maximum age of {duration.write(limits.max_age)}")
    if controls.breaker_open and mode is not Mode.OBSERVE:
        return GuardDecision(Decision.BREAKER_OPEN, controls.breaker_reason or "the breaker is open")
    if guards.cooldown and facts.last_ended_at and facts.last_ended_at > ago(guards.cooldown):
        left = duration.write_rounded(facts.last_ended_at - ago(guards.cooldown))
        return GuardDecision(Decision.COOLDOWN, f"the last run for this target has ended; cooldown for another {left}")
    if guards.max_runs and facts.started >= guards.max_runs.count:
        return GuardDecision(
            Decision.RATE_LIMITED,
            f"{words.count(facts.started, 'run')}{' on this target' if guards.max_runs.per_target else ''} in the last "
            f"{duration.write(guards.max_runs.per)}, at most {guards.max_runs.count}",
        )
    if guards.max_concurrent and guards.queue is None and facts.open_runs >= guards.max_concurrent:
        return GuardDecision(
            Decision.CONCURRENCY_LIMITED,
            f"{words.count(facts.open_runs, 'run')} {'is' if facts.open_runs == 1 else 'are'} open, "
            f"at most {guards.max_concurrent}",
        )
    return GuardDecision(Decision.OBSERVE_ONLY if mode is Mode.OBSERVE else Decision.STARTED)


# No cancelled or rejected run: a person may have decided against further ones.
_MAY_BE_TRIED_AGAIN = frozenset({Status.SUCCEEDED, Status.FAILED})


def again_at(again: Again | None, acted: Sequence[LinkedRun]) -> datetime | None:
    """Return when a further run is due; None for never, or while the last one is open.

    `acted` are the alert's runs of the playbook, oldest first.
    """
    last = acted[-1]
    if again is None or last.status not in _MAY_BE_TRIED_AGAIN or last.ended_at is None:
        return None
    return last.ended_at + again.after if times_left(again, acted) > 0 else None


def times_left(again: Again, acted: Sequence[LinkedRun]) -> int:
    return again.times - sum(run.is_again for run in acted)


def counts_per_target(guards: Guards) -> bool:
    return guards.max_runs is not None and guards.max_runs.per_target


def why_group_refused(nodes: Set[str], acted_on: Set[str], known_nodes: Set[str], limits: EngineLimits) -> str | None:
    """Return why a group is refused whole, or None. Unlike a single run, it does not open the breaker."""
    reason = why_breaker_opens(nodes, acted_on, known_nodes, limits)
    if reason is None:
        return None
    return f"{reason}; with mode: approve, a person can approve the whole list"


def why_breaker_opens(nodes: Set[str], acted_on: Set[str], known_nodes: Set[str], limits: EngineLimits) -> str | None:
    # A run would act on `nodes`; `acted_on` are those of the breaker's window.
    return why_breaker_opens_by_count(
        len(nodes - acted_on), len(acted_on), len(known_nodes) + len(nodes - known_nodes), limits
    )


def why_breaker_opens_by_count(new: int, acted_on: int, total: int, limits: EngineLimits) -> str | None:
    count = acted_on + new
    if not new or count <= limits.breaker_min_nodes or count / total <= limits.breaker_share:
        return None
    of_share = int(limits.breaker_share * total)
    of_share += (of_share + 1) / total <= limits.breaker_share  # the product may be just below a whole number
    allowed = max(limits.breaker_min_nodes, of_share)
    bound = f"{limits.breaker_share:.0%} of them, and {limits.breaker_min_nodes} in any case"
    return (
        f"{acted_on} of {total} known nodes were acted on within {duration.write(limits.breaker_window)}; "
        f"with {new} more it would be {count}, and at most {allowed} may be ({bound})"
    )
