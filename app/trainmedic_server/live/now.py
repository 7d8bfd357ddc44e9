"""``GET /now``: the current state, by a fixed number of bounded queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from msgspec.structs import replace
from pydantic import Field

from trainmedic_server.api.approvals import ApprovalView, approvals
from trainmedic_server.api.change_views import ChangeView, change_views
from trainmedic_server.api.view import View
from trainmedic_server.api.views import NextView
from trainmedic_server.domain import changes
from trainmedic_server.domain.alert import AlertRecord
from trainmedic_server.domain.changes import Change
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.pause import OperatorPause
from trainmedic_server.domain.run import Controls, Decision, Event, OperatorOrder, Run, Status
from trainmedic_server.engine.service import Engine
from trainmedic_server.http.api_routes import ApiRoutes, RouteParts
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.present import Present
from trainmedic_server.ports.store import History, HistoryFilter, Values

MOST = 500  # Most open runs in an answer, and most with a pending undo; as many members of groups. Others are counted.
MOST_ENDED = 200  # Most ended runs that are searched: for changes without an undo, and for failures
_MOST_GROUPS = 20  # Most groups whose ended members are searched. They may have thousands
LASTING_CHANGES_FOR = timedelta(days=7)  # Age of a run up to which its changes without an undo are listed
_ENDED = (Status.SUCCEEDED, Status.FAILED, Status.CANCELLED, Status.REJECTED)  # statuses of runs that may have acted
_DAY = timedelta(days=1)
_HOUR = timedelta(hours=1)


class PauseLine(View):
    """An active pause and its scope."""

    scope: str = Field(description="everything, or the limit of its scope.")
    by: str | None
    since: datetime | None
    note: str = ""
    until: datetime | None = Field(None, description="null if it lasts until someone resumes.")


class BreakerView(View):
    open: bool
    since: datetime | None
    reason: str | None = Field(description="Its count, for people.")


class _RunView(View):
    run_id: str
    playbook: str
    target: str
    alert_name: str


class RunningView(_RunView):
    status: Status
    waiting_on: str | None
    since: datetime
    message: str
    next: NextView | None


class FailedView(_RunView):
    ended_at: datetime | None
    message: str


class LostView(View):
    kind: str = Field(description="agent or job.")
    name: str
    since: datetime = Field(description="When the agent last reported, or the job was found gone.")
    reason: str


class HourView(View):
    decisions: dict[str, int]
    statuses: dict[str, int] = Field(description="Present statuses of these runs.")


class CountsView(View):
    open: dict[str, int] = Field(description="Open runs by status.")
    owing: int = Field(description="Closed runs with a pending undo.")
    left_out: int = Field(description="Runs omitted from this answer's lists.")


class NowView(View):
    at: datetime
    mode: Mode
    paused: list[PauseLine] = Field(description="Active pauses.")
    breaker: BreakerView
    approvals: list[ApprovalView]
    changed: list[ChangeView] = Field(
        description="Pending undos, then changes that are not reverted automatically (`undo: never`), the newest first."
    )
    changed_since: datetime = Field(
        description="Changes without an undo are listed for runs that were created since then, pending undos for all."
    )
    running: list[RunningView] = Field(description="The other open runs.")
    failed: list[FailedView] = Field(
        description="The newest failed run of the last day for each playbook and target, unless its alert resolved or "
        "has an open run; the newest first."
    )
    lost: list[LostView] = Field(description="In the last day, and not back.")
    last_hour: HourView
    counts: CountsView
    notifications: str = Field(
        "",
        description="What is missing for notifications: a channel, or a default channel for messages that no route "
        "takes. Empty if nothing is missing.",
    )


class NowApi:
    def __init__(
        self,
        present: Present,
        history: History,
        engine: Engine,
        clock: Clock,
        external_url: str = "",
        notifications: str = "",
    ) -> None:
        self.present = present
        self._history = history
        self._engine = engine
        self._clock = clock
        self.external_url = external_url
        self._notifications = notifications

    async def view(self) -> NowView:
        now, controls = self._clock.now(), self._engine.controls
        open_runs, _ = await self._history.page(HistoryFilter(is_open=True), MOST, None)
        owing, _ = await self._history.page(HistoryFilter(owes_undo=True), MOST, None)
        ended, covered_since = await self._ended_runs(now)
        members, ended_members, of_members = await self._members([*open_runs, *owing, *ended], now)
        counts = await self.present.open_counts()
        alerts = await self.present.alerts_of_runs([run.id for run in (*open_runs, *owing)])
        orders = await self.present.orders_of_runs([run.id for run in open_runs])
        nexts = {run.id: await self.next_of(run, alerts.get(run.id, ()), orders.get(run.id, ())) for run in open_runs}
        asked = await approvals(self._history, self.external_url)
        return NowView(
            at=now,
            mode=self._engine.mode,
            paused=pauses_of(controls, now),
            breaker=breaker_of(controls),
            approvals=asked.items,
            changed=await self._changed([*open_runs, *owing, *members], [*ended, *ended_members], alerts, now),
            changed_since=max(covered_since, of_members),
            running=[_running(run, nexts[run.id]) for run in open_runs if run.status is not Status.AWAITING_APPROVAL],
            failed=await self._failed(now, open_runs),
            lost=await self._lost(now),
            last_hour=_hour(await self.present.decided_since(now - _HOUR)),
            counts=CountsView(
                open=dict(counts.by_status),
                owing=counts.owing,
                left_out=max(sum(counts.by_status.values()) + counts.owing - len(open_runs) - len(owing), 0)
                + max(sum(map(_unfinished_members, (*open_runs, *owing))) - len(members), 0),
            ),
            notifications=self._notifications,
        )

    async def _members(self, runs: Sequence[Run], now: datetime) -> tuple[list[Run], list[Run], datetime]:
        """Return members of the groups among `runs`: unfinished ones, and as `_ended_runs`."""
        groups = sorted((run for run in runs if run.is_group), key=lambda run: run.created_at, reverse=True)
        if not groups:
            return [], [], now - LASTING_CHANGES_FOR
        unfinished = tuple(run.id for run in groups if run.is_open or run.owes_undo)
        working, _ = await self._history.page(HistoryFilter(parent=unfinished, is_open=True), MOST, None)
        owing, _ = await self._history.page(HistoryFilter(parent=unfinished, owes_undo=True), MOST, None)
        ended, since = await self._ended_runs(now, tuple(run.id for run in groups[:_MOST_GROUPS]))
        omitted = (run.ended_at or now for run in groups[_MOST_GROUPS:])
        return [*working, *owing], ended, max(since, *omitted, since)

    async def _ended_runs(self, now: datetime, parents: Values = None) -> tuple[list[Run], datetime]:
        """Return ended runs that acted, and the creation time since which none is missing."""
        since = now - LASTING_CHANGES_FOR
        # Only the pages without members have an index by status.
        closed = HistoryFilter(status=_ENDED) if parents is None else HistoryFilter(is_open=False, parent=parents)
        matching = replace(closed, has_acted=True, owes_undo=False, since=since)
        ended, cursor = await self._history.page(matching, MOST_ENDED, None)
        if cursor is None:
            return ended, since
        return ended, ended[-1].created_at if ended else now

    def changes_of(self, run: Run, alerts: Sequence[AlertRecord], events: Sequence[Event]) -> list[ChangeView]:
        lost = {run.id: changes.lost_effects(events)}
        pending = changes.of_run(run, changes.firing_names(alerts), lost[run.id])
        lasting = self._lasting([run], {run.alerts_run_id: alerts}, lost, self._clock.now())
        return [*change_views(pending), *change_views(lasting)]

    async def _changed(
        self,
        unfinished: Sequence[Run],
        ended: Sequence[Run],
        alerts: Mapping[str, Sequence[AlertRecord]],
        now: datetime,
    ) -> list[ChangeView]:
        events = await self.present.losses_of_runs([run.id for run in (*unfinished, *ended)])
        lost = {run_id: changes.lost_effects(of_run) for run_id, of_run in events.items()}
        alerts = {**alerts, **await self.present.alerts_of_runs([run.alerts_run_id for run in ended])}
        pending = [
            change
            for run in unfinished
            for change in changes.of_run(
                run, changes.firing_names(alerts.get(run.alerts_run_id, ())), lost.get(run.id, {})
            )
        ]
        return [*change_views(pending), *change_views(self._lasting([*unfinished, *ended], alerts, lost, now))]

    def _lasting(
        self,
        runs: Sequence[Run],
        alerts: Mapping[str, Sequence[AlertRecord]],
        lost: Mapping[str, Mapping[str, str]],
        now: datetime,
    ) -> Sequence[Change]:
        lasting = [
            change
            for run in runs
            for change in changes.never_given_back(
                run,
                self._engine.leaves_change,
                changes.Lapses(alerts.get(run.alerts_run_id, ()), now, self._engine.lease_of),
                lost.get(run.id, {}),
            )
        ]
        return sorted(lasting, key=lambda change: change.since, reverse=True)

    async def _failed(self, now: datetime, open_runs: Sequence[Run]) -> list[FailedView]:
        """Return the newest failed run for each playbook and target, unless its alert resolved or has an open run."""
        failed, _ = await self._history.page(HistoryFilter(status=Status.FAILED, since=now - _DAY), MOST_ENDED, None)
        newest = {(run.playbook, run.target_key): run for run in reversed(failed)}  # the page begins with the newest
        alerts = await self.present.alerts_of_runs([run.id for run in newest.values()])
        handled = {run.alert for run in open_runs}
        waiting = [
            run for run in newest.values() if run.alert not in handled and changes.firing_names(alerts.get(run.id, ()))
        ]
        return [_failed(run) for run in sorted(waiting, key=lambda run: run.created_at, reverse=True)]

    async def next_of(
        self, run: Run, alerts: Sequence[AlertRecord], orders: Sequence[OperatorOrder]
    ) -> NextView | None:
        upcoming = await self._engine.upcoming(run, alerts, orders)
        return NextView.model_validate(upcoming) if upcoming is not None else None

    async def _lost(self, now: datetime) -> list[LostView]:
        agents, jobs = await self.present.lost(now - _DAY)
        silent = "it is silent"
        lost = [LostView(kind="agent", name=life.name, since=life.seen_at, reason=silent) for life in agents]
        lost += [LostView(kind="job", name=life.name, since=life.since, reason=life.reason) for life in jobs]
        return sorted(lost, key=lambda each: each.since, reverse=True)


def router(now: NowApi, parts: RouteParts) -> ApiRoutes:
    routes = ApiRoutes("status", parts.auth)

    @routes.read("/now", summary="Current state")
    async def how_things_stand() -> NowView:
        """Pending approvals, failed runs, active changes and their end, open runs, lost agents and jobs.

        Lists have the newest 500 open runs and 500 with a pending undo, and the changes of as many members of groups.
        """
        async with parts.reads.take():
            return await now.view()

    return routes


def pauses_of(controls: Controls, now: datetime) -> list[PauseLine]:
    return [
        PauseLine.of(
            pause,
            scope=f"{pause.scope}{', observe only' if pause.observe else ''}",
            since=_in_force_since(pause, now),
            until=pause.until(now),
        )
        for pause in controls.pauses
        if pause.is_in_force(now)
    ]


def _in_force_since(pause: OperatorPause, now: datetime) -> datetime:
    window = pause.window(now)
    return max(pause.at, window[0] if window is not None else pause.starts_at)


def breaker_of(controls: Controls) -> BreakerView:
    return BreakerView(open=controls.breaker_open, since=controls.breaker_opened_at, reason=controls.breaker_reason)


def _running(run: Run, upcoming: NextView | None) -> RunningView:
    return RunningView.of(run, run_id=run.id, target=run.target_key, since=run.created_at, next=upcoming)


def _failed(run: Run) -> FailedView:
    return FailedView.of(run, run_id=run.id, target=run.target_key)


def _unfinished_members(run: Run) -> int:
    return run.group.open + run.group.owing if run.group is not None else 0


def _hour(counts: Mapping[tuple[str, str], int]) -> HourView:
    decisions: dict[str, int] = {}
    statuses: dict[str, int] = {}
    for (decision, status), number in counts.items():
        decisions[decision] = decisions.get(decision, 0) + number
        if decision == Decision.STARTED or status != Status.NOT_STARTED:  # not a mere refusal
            statuses[status] = statuses.get(status, 0) + number
    return HourView(decisions=decisions, statuses=statuses)
