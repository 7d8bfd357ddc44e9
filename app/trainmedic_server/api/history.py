"""Routes of the history."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

from fastapi import Depends, Path, Query, Response
from msgspec.structs import replace

from trainmedic_core.target import Target
from trainmedic_server.api import finding_views, run_ids, views
from trainmedic_server.api.diagnoses import JobName
from trainmedic_server.api.exports import AS_STREAM, Accept, Exports, stream_type
from trainmedic_server.api.query_types import Few, Names, PageCursor, PageLimit, cursor_checked
from trainmedic_server.api.run_ids import RunId
from trainmedic_server.api.times import TimeText, span_of
from trainmedic_server.domain.run import FindableDecision, Run, Status
from trainmedic_server.errors import NotFound, PayloadError
from trainmedic_server.http.api_routes import ApiRoutes, RouteParts
from trainmedic_server.http.ascii_json import AsciiJson
from trainmedic_server.live.now import NowApi
from trainmedic_server.ports.findings import FindingHistory
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.store import History, HistoryFilter, RunRecord

WholeRunId = Annotated[str, Path(pattern=r"^[0-9A-Za-z_-]{1,64}$", description="The run's full ID.")]
_PIECE = 100  # runs read at once for a page


def router(
    history: History, findings: FindingHistory, now_api: NowApi, parts: RouteParts, measures_effects: bool
) -> ApiRoutes:
    routes = ApiRoutes("history", parts.auth)
    exports: Exports[Run] = Exports(parts.limits, views.HistoryItem, views.item)

    @routes.read("/history", summary="Runs, newest first", response_model=views.HistoryPage, responses=AS_STREAM)
    async def runs(
        conditions: HistoryFilter = Depends(_filter(parts.clock)),
        limit: PageLimit = 100,
        cursor: PageCursor = None,
        accept: Accept = None,
    ) -> Response:
        """Decisions not to start a run are included.

        With `Accept: application/x-ndjson` or `text/csv`, stream the whole filtered result; `limit` and `cursor` are
        ignored.
        """
        if isinstance(conditions.parent, str):
            conditions = replace(conditions, parent=await run_ids.whole(now_api.present, conditions.parent))
        if kind := stream_type(accept):
            return await exports.response(history.stream(conditions), kind)
        return await _page(history, conditions, limit, cursor, parts)

    @routes.read("/history/{run_id}", 404, 409, summary="One run in full", response_model=views.RunView)
    async def run(run_id: RunId) -> Response:
        async with parts.reads.take():
            record = await history.record(await run_ids.whole(now_api.present, run_id))
            if record is None:
                raise NotFound(f"There is no run {run_id}.")
            return await in_full(record)

    @routes.read(
        "/jobs/{job:path}/history",
        404,
        name="runs",
        summary="Runs on one job, newest first",
        response_model=views.HistoryPage,
    )
    async def runs_on_job(
        job: JobName,
        conditions: HistoryFilter = Depends(_filter_of_job(parts.clock)),
        limit: PageLimit = 100,
        cursor: PageCursor = None,
    ) -> Response:
        """A token with `jobs` may read it."""
        return await _page(history, replace(conditions, target=(f"job:{job}",)), limit, cursor, parts)

    @routes.read(
        "/jobs/{job:path}/history/{run_id}",
        404,
        name="run",
        summary="One run on one job, in full",
        response_model=views.RunView,
    )
    async def run_on_job(job: JobName, run_id: WholeRunId) -> Response:
        """As `GET /history/{run_id}`. The ID must be complete."""
        async with parts.reads.take():
            record = await history.record(run_id)
            target = record.run.target if record is not None else None
            if record is None or target is None or target.job != job:
                # Answer the same for another job's run, to hide its existence.
                raise NotFound(f"There is no run {run_id} on {job}.")
            return await in_full(record)

    async def in_full(record: RunRecord) -> Response:
        of_alerts = await finding_views.of_run(findings, record.alerts)
        upcoming = await now_api.next_of(record.run, record.alerts, record.orders)
        changed = now_api.changes_of(record.run, record.alerts, record.events)
        return AsciiJson.of(views.record(record, of_alerts, measures_effects, upcoming, changed))

    return routes


_SEVERAL = Query(description="Repeatable; any of the values matches.")


def _filter(clock: Clock) -> Callable[..., HistoryFilter]:
    async def conditions(
        alertname: Annotated[Names, _SEVERAL] = None,
        playbook: Annotated[Names, _SEVERAL] = None,
        status: Annotated[Few[Status] | None, _SEVERAL] = None,
        decision: Annotated[Few[FindableDecision] | None, _SEVERAL] = None,
        node: Annotated[Names, Query(description="The target's node, or one that a run on a job touched.")] = None,
        gpu: Annotated[Names, Query(description="Alone, or with its node: node-1/0, gpu:node-1/0.")] = None,
        job: Annotated[Names, _SEVERAL] = None,
        target: Annotated[Names, Query(description="As in items, such as job:llm-1.")] = None,
        by: Annotated[Names, Query(description="Who approved, rejected, cancelled or undid it.")] = None,
        since: TimeText | None = None,
        until: TimeText | None = None,
        is_open: Annotated[bool | None, Query(alias="open", description="Runs that are not closed.")] = None,
        owes_undo: Annotated[bool | None, Query(description="Closed runs with a pending undo.")] = None,
        parent: Annotated[
            str | None,
            Query(pattern=r"^[0-9A-Za-z_-]{1,64}$", description="Members of this group's parent run."),
        ] = None,
    ) -> HistoryFilter:
        _check(target or ())
        since_then, until_then = span_of(since, until, clock.now())
        return HistoryFilter(
            alertname=_several(alertname),
            playbook=_several(playbook),
            status=_several(status),
            decision=_several(decision),
            node=_several(node),
            gpu=_several(gpu),
            job=_several(job),
            target=_several(target),
            by=_several(by),
            since=since_then,
            until=until_then,
            is_open=is_open,
            owes_undo=owes_undo,
            parent=parent,
        )

    return conditions  # type: ignore[return-value]


def _filter_of_job(clock: Clock) -> Callable[..., HistoryFilter]:
    async def conditions(
        alertname: Annotated[Names, _SEVERAL] = None,
        playbook: Annotated[Names, _SEVERAL] = None,
        status: Annotated[Few[Status] | None, _SEVERAL] = None,
        decision: Annotated[Few[FindableDecision] | None, _SEVERAL] = None,
        node: Annotated[Names, Query(description="A node that the run touched.")] = None,
        by: Annotated[Names, Query(description="Who approved, rejected, cancelled or undid it.")] = None,
        since: TimeText | None = None,
        until: TimeText | None = None,
        is_open: Annotated[bool | None, Query(alias="open", description="Runs that are not closed.")] = None,
        owes_undo: Annotated[bool | None, Query(description="Closed runs with a pending undo.")] = None,
    ) -> HistoryFilter:
        since_then, until_then = span_of(since, until, clock.now())
        return HistoryFilter(
            alertname=_several(alertname),
            playbook=_several(playbook),
            status=_several(status),
            decision=_several(decision),
            node=_several(node),
            by=_several(by),
            since=since_then,
            until=until_then,
            is_open=is_open,
            owes_undo=owes_undo,
        )

    return conditions  # type: ignore[return-value]


def _check(targets: Sequence[str]) -> None:
    """Raise PayloadError for impossible targets: an empty page would mislead."""
    for target in targets:
        try:
            Target.of_key(target)
        except ValueError as error:
            raise PayloadError.at([("target", str(error))]) from None


def _several(values: Sequence[str] | None) -> tuple[str, ...] | None:
    return tuple(map(str, values)) if values else None


async def _page(
    history: History, conditions: HistoryFilter, limit: int, cursor: str | None, parts: RouteParts
) -> Response:
    """Answer with fewer runs if `page_bytes` or the search's time limit is reached."""
    runs: list[Run] = []
    size = 0
    async with parts.reads.take():
        while True:
            asked = min(limit - len(runs), _PIECE)
            with cursor_checked():
                piece, cursor = await history.page(conditions, asked, cursor)
            runs += piece
            size += sum(
                len(text) for run in piece for labels in _labels(run) for pair in labels.items() for text in pair
            )
            if cursor is None or len(piece) < asked or len(runs) >= limit or size >= parts.limits.page_bytes:
                return AsciiJson.of(views.page(runs, cursor))


def _labels(run: Run) -> tuple[Mapping[str, str], ...]:
    return (run.alert_labels,) if run.original_labels is None else (run.alert_labels, run.original_labels)
