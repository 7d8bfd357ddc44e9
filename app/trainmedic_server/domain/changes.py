"""Changes by runs, and when they are reverted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_server.domain import destinations
from trainmedic_server.domain.alert import AlertRecord, decisive
from trainmedic_server.domain.event_codec import content_of
from trainmedic_server.domain.event_kinds import LeaseLost, SetAgainDone
from trainmedic_server.domain.modes import UndoTrigger
from trainmedic_server.domain.run import Event, Run, StepState, StepStatus, Undo, UndoStatus

# Output members for the values before and after, and their unit, in lookup order.
_PAIRS = (("before", "after", ""), ("previous_watts", "limit_watts", " W"), ("previous", "count", ""))
_NOTHING_LOST: Mapping[str, str] = {}
_NOT_PENDING = (UndoStatus.AVAILABLE, UndoStatus.DROPPED)  # so that the change stays, if it was made


class Change(Struct, frozen=True):
    run_id: str
    playbook: str
    target: str
    targets: tuple[str, ...]  # changed targets, if not the run's
    step: str
    action: str
    params: Mapping[str, Any]
    before: str | None
    after: str | None
    is_certain: bool
    unchanged_because: str | None  # why the action changed nothing; None if it changed something
    since: datetime
    undo: UndoTrigger  # NEVER without a pending undo
    is_reversible: bool
    given_back: str  # when it is reverted, for people
    not_before: datetime | None  # time of the next attempt to revert it
    latest: datetime | None  # timeout of the run's current wait
    lease: timedelta | None  # lifetime without renewal; None if it does not end by itself
    undo_error: str | None
    lost_because: str | None = None  # why it has ended before its undo, at least in one place


class Lapses(Struct, frozen=True):
    # What shows whether leases without a pending undo have ended.
    alerts: Sequence[AlertRecord]  # of the run
    now: datetime
    lease_of: Callable[[str, Mapping[str, Any]], timedelta]  # of an action and its output; zero without a lease

    def renewed_until(self, run: Run) -> datetime | None:
        """None: it still renews its leases."""
        records = decisive(self.alerts)
        if run.is_open or run.ended_at is None or not all(record.is_resolved for record in records):
            return None
        return max([run.ended_at, *(record.resolved_at for record in records if record.resolved_at is not None)])


LOSS_KINDS = (LeaseLost, SetAgainDone)  # of the events that `lost_effects` reads


def lost_effects(events: Iterable[Event]) -> dict[str, str]:
    """Return why effects ended, by command ID, without reapplied ones."""
    lost: dict[str, str] = {}
    for event in events:
        content = content_of(event)
        if isinstance(content, LeaseLost):
            lost[content.command_id] = content.why or f"its lease on {content.place} has expired"
        elif isinstance(content, SetAgainDone):
            lost.pop(content.command_id, None)
    return lost


def firing_names(alerts: Sequence[AlertRecord]) -> list[str]:
    return sorted({record.alert.name for record in decisive(alerts) if not record.is_resolved})


def of_run(run: Run, firing: Sequence[str] = (), lost: Mapping[str, str] = _NOTHING_LOST) -> Iterator[Change]:
    """Return the changes with a pending undo, newest first. `firing` are names of the run's firing alerts."""
    waits = (step.deadline for step in run.steps if step.status is StepStatus.WAITING and step.deadline)
    latest = next(waits, None) if run.is_open else None
    for step in reversed(run.steps):
        if step.undo is not None and step.undo.status.is_owed and step.attempts and step.action is not None:
            yield _change(run, step, step.undo, firing, latest, lost)


def never_given_back(
    run: Run,
    leaves_change: Callable[[str], bool],
    lapses: Lapses | None = None,
    lost: Mapping[str, str] = _NOTHING_LOST,
) -> Iterator[Change]:
    """Return certain or possible changes without a pending undo, newest first.

    Excludes actions without `leaves_change`, ended leases, and what a later step reverted or a person closed.
    """
    for step in reversed(run.steps):
        if step.action is None or not step.attempts:
            continue
        undo = step.undo
        # If the action was applied, a dropped undo means that how to revert it was not known.
        if undo is not None and undo.status not in _NOT_PENDING:
            continue
        if any(each.status is StepStatus.SUCCEEDED for each in reverting(run, step)):
            continue
        if step.changed_nothing or not _may_be_applied(step) or not leaves_change(step.action):
            continue
        lease = timedelta(0)
        if lapses is not None and step.status is StepStatus.SUCCEEDED:
            lease = lapses.lease_of(step.action, step.output)
        if not lease or lapses is None:
            yield _change(run, step, undo, (), None, lost)
            continue
        until, firing = lapses.renewed_until(run), firing_names(lapses.alerts)
        if until is None or lapses.now <= until + lease:
            after = f", after {_resolution(firing)}" if firing else ""
            yield replace(_change(run, step, undo, (), None, lost), given_back=f"when its lease ends{after}")


def reverting(run: Run, step: StepState) -> Iterator[StepState]:
    """Yield the later steps that do what the step's undo would."""
    undo = step.undo
    if undo is None:
        return
    for later in run.steps[run.steps.index(step) + 1 :]:
        # An action that is its own inverse, such as a limit, is not reverted by other parameters.
        if later.action == undo.action and (later.action != step.action or later.params == undo.params):
            yield later


def may_have_been_reverted(run: Run, step: StepState) -> bool:
    """Return whether a later step certainly or possibly reverted it."""
    return any(map(_may_be_applied, reverting(run, step)))


def _may_be_applied(step: StepState) -> bool:
    if step.status is StepStatus.SUCCEEDED:
        return True
    return any(attempt.in_part or attempt.status in ("unknown", "running") for attempt in step.attempts)


def difference(output: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the values before and after from an action's output; None if not reported."""
    # Outputs of several GPUs are merged into the highest and the lowest values, of which the lowest are shown.
    values = output.get("lowest") if isinstance(output.get("lowest"), Mapping) else output
    for before, after, unit in _PAIRS:
        if isinstance(values, Mapping) and before in values and after in values:
            return _text(values[before], unit), _text(values[after], unit)
    return None, None


def _change(
    run: Run,
    step: StepState,
    undo: Undo | None,
    firing: Sequence[str],
    latest: datetime | None,
    lost: Mapping[str, str] = _NOTHING_LOST,
) -> Change:
    before, after = difference(step.output)
    last = step.attempts[-1]
    commands = (destinations.command_id_of(last.command_id, step, target) for target in run.targets_of(step))
    return Change(
        run_id=run.id,
        playbook=run.playbook,
        target=run.target_key,
        targets=tuple(target.key for target in run.also) if step.target else (),
        step=step.id,
        action=str(step.action),
        params=step.params,
        before=before,
        after=after,
        is_certain=step.status is StepStatus.SUCCEEDED,
        unchanged_because=str(step.output.get("note") or "nothing had to be done") if step.changed_nothing else None,
        since=last.ended_at or last.started_at,
        undo=undo.trigger if undo is not None and undo.status.is_owed else UndoTrigger.NEVER,
        is_reversible=undo is not None and undo.status is not UndoStatus.DROPPED,
        given_back=_when_reverted(undo, firing),
        not_before=undo.retry_at if undo is not None else None,
        latest=latest,
        lease=_lease(step.output.get("lease_seconds")),
        undo_error=undo.error if undo is not None else None,
        lost_because=next((lost[command] for command in commands if command in lost), None),
    )


def _lease(seconds: Any) -> timedelta | None:
    # Jobs choose the output of their own commands, so the number may be too large for a timedelta.
    is_length = isinstance(seconds, int | float) and 0 < seconds < timedelta.max.total_seconds()
    return timedelta(seconds=seconds) if is_length else None


def _when_reverted(undo: Undo | None, firing: Sequence[str]) -> str:
    if undo is None:
        return "never: it cannot be undone"
    if undo.status is UndoStatus.DROPPED:
        return "never: how to undo it is not known"
    if undo.status is UndoStatus.AVAILABLE:
        return "never automatically, only by an undo order"
    if undo.status is UndoStatus.RUNNING:
        return "when the next attempt to undo it succeeds" if undo.retry_at else "as soon as its undo is confirmed"
    if undo.trigger is UndoTrigger.ON_FAILURE:
        return "if the run ends without success"
    return f"when {_resolution(firing)}"


def _resolution(firing: Sequence[str]) -> str:
    return f"{', '.join(firing) or 'the alert'} {'resolve' if len(firing) > 1 else 'resolves'}"


def _text(value: Any, unit: str) -> str:
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, only),) = value.items()
        return f"{name} {_text(only, '')}"
    if isinstance(value, list) and value and all(entry == value[0] for entry in value):
        return _text(value[0], unit)
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:g}{unit}" if isinstance(value, float) else f"{value}{unit}"
