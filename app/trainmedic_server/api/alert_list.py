"""``GET /alerts``: every received alert, and each playbook's reaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Annotated

from fastapi import Depends, Query, Response
from msgspec.structs import replace
from pydantic import ConfigDict, Field

from trainmedic_core.problems import did_you_mean
from trainmedic_server.api.exports import AS_STREAM, Accept, Exports, stream_type
from trainmedic_server.api.query_types import Few, Name, PageCursor, PageLimit, all_items, cursor_checked
from trainmedic_server.api.times import TimeText, time_of
from trainmedic_server.api.view import View
from trainmedic_server.catalog.library import Library
from trainmedic_server.domain.alert import SHIPPED_RULE_LABEL, Alert, AlertRecord, AlertStatus
from trainmedic_server.domain.alert_suggestions import snippet, suggest
from trainmedic_server.domain.reaction import NoReaction, Reaction
from trainmedic_server.domain.run import Status
from trainmedic_server.errors import PayloadError
from trainmedic_server.http.api_routes import ApiRoutes, RouteParts
from trainmedic_server.http.ascii_json import AsciiJson
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.playbooks import CompiledPlaybook
from trainmedic_server.ports.received_alerts import ReceivedAlertFilter, ReceivedAlerts

ORIGINAL_NAME = "The alertname that Alertmanager sent; null if no alert map changed the alert."
ORIGINAL_LABELS = "The labels that Alertmanager sent; null if no alert map changed them."
_PIECE = 100  # alerts read at once

LabelFilters = Annotated[
    Few[Annotated[str, Field(max_length=10_000, pattern=r"^[^=\x00]+=[^\x00]*$")]],
    Query(
        alias="label",
        description="A label and its exact value, as name=value. Can be repeated; all must hold.",
        examples=["severity=critical"],
    ),
]


class ReactionView(View):
    playbook: str = Field(
        description="Empty if the reason counts playbooks without a recorded reaction, and for not_accepted."
    )
    decision: str = Field(
        description=(
            "A decision of the history, or not_matched (a matcher or `on.when` does not hold), match_failed (one "
            "could not be evaluated), no_proof (the alert lacks what `on.proof` requires), excluded (another playbook "
            "on the target is exclusive), resolved (the alert had resolved when it was first received), not_accepted "
            "(`accept` of the alert map refuses the alert)."
        )
    )
    reason: str = Field(description="Empty if the decision says it all.")
    run_id: str | None = Field(
        description="The run that was started or joined, or the history item with the reason for no start."
    )
    run_status: Status | None = Field(None, description="Its present status; null without a run, and in exports.")


class SuggestedPlaybook(View):
    playbook: str
    summary: str


class SuggestionView(View):
    """Possible alert map entry for an alert that no playbook names."""

    alert_name: str = Field(description="New alertname.")
    because: str = Field(description="Evidence for the meaning of the alert.")
    playbooks: list[SuggestedPlaybook] = Field(
        description="Playbooks that react to that name. The alert must also meet the conditions of each."
    )
    rename: str = Field(description="The entry of the alert map, YAML to paste.")


class HeardAlertView(View):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "alert_name": "GPUTemperatureHigh",
                    "labels": {"alertname": "GPUTemperatureHigh", "node": "node-1", "gpu": "0", "severity": "info"},
                    "annotations": {},
                    "status": "firing",
                    "fingerprint": "2a6f3c0d1b4e5f60",
                    "starts_at": "2026-01-31T12:00:00Z",
                    "first_heard": "2026-01-31T12:00:30Z",
                    "last_heard": "2026-01-31T16:00:30Z",
                    "count": 2,
                    "resolved_at": None,
                    "reacted": False,
                    "reason": "gpu-temperature-high: 'severity' is 'info' and must not match info|informational|debug",
                    "suggestion": None,
                    "original_alert_name": "GPUTempHigh",
                    "original_labels": {"alertname": "GPUTempHigh", "node": "node-1", "gpu": "0"},
                    "reactions": [
                        {
                            "playbook": "gpu-temperature-high",
                            "decision": "not_matched",
                            "reason": "'severity' is 'info' and must not match info|informational|debug",
                            "run_id": None,
                        }
                    ],
                }
            ]
        }
    )

    alert_name: str
    labels: dict[str, str]
    annotations: dict[str, str]
    status: AlertStatus = Field(description="As far as known; an alert may count as resolved without a report.")
    fingerprint: str
    starts_at: datetime
    first_heard: datetime
    last_heard: datetime
    count: int = Field(description="How often it was reported.")
    resolved_at: datetime | None
    reacted: bool = Field(description="Whether a playbook reacted to it, regardless of its guards.")
    reason: str = Field(description="Why no playbook reacted; empty if one did.")
    reactions: list[ReactionView] = Field(
        description="One entry per playbook that names its alertname. One without a playbook stands for the others."
    )
    suggestion: SuggestionView | None = Field(
        description=(
            "Possible rename for the alert map, if no playbook names its alertname and its meaning is known; otherwise "
            "null."
        )
    )
    original_alert_name: str | None = Field(description=ORIGINAL_NAME)
    original_labels: dict[str, str] | None = Field(description=ORIGINAL_LABELS)


class HeardAlertPage(View):
    items: list[HeardAlertView]
    next: str | None = Field(description="Cursor of the next page; null on the last.")


async def _page(
    alerts: ReceivedAlerts,
    catalog: Library,
    matching: ReceivedAlertFilter,
    limit: int,
    cursor: str | None,
    most_bytes: int,
) -> HeardAlertPage:
    """Return fewer items once `most_bytes` is reached. Raises HttpProblem for an invalid cursor."""
    newest_first: list[AlertRecord] = []
    size = 0
    while True:
        with cursor_checked():
            piece, cursor = await alerts.alerts_page(matching, min(limit - len(newest_first), _PIECE), cursor)
        newest_first += piece
        size += sum(_size(record.alert) for record in piece)
        if cursor is None or len(newest_first) >= limit or size >= most_bytes:
            break
    names = by_alertname(catalog)
    run_ids = {reaction.run_id for record in newest_first for reaction in record.reactions if reaction.run_id}
    statuses = await alerts.statuses_of(run_ids)
    return HeardAlertPage(items=[view(record, names, statuses) for record in newest_first], next=cursor)


def _size(alert: Alert) -> int:
    texts = (alert.labels, alert.annotations, alert.original or {})
    return sum(len(name) + len(value) for mapping in texts for name, value in mapping.items())


def view(record: AlertRecord, names: ReactingPlaybooks, statuses: Mapping[str, Status] = {}) -> HeardAlertView:
    alert = record.alert
    suggestion = None if record.reactions else suggested(alert, names)
    return HeardAlertView.of(
        alert,
        alert_name=alert.name,
        status=AlertStatus.RESOLVED if record.is_resolved else AlertStatus.FIRING,
        first_heard=record.first_heard_at,
        last_heard=record.last_heard_at,
        count=record.count,
        resolved_at=record.resolved_at,
        reacted=record.has_reaction,
        reason="" if record.has_reaction else why_no_reaction(record, names, suggestion),
        reactions=[_reaction(reaction, statuses) for reaction in record.reactions],
        suggestion=suggestion,
        original_alert_name=alert.original_name,
        original_labels=alert.original,
    )


def _reaction(reaction: Reaction, statuses: Mapping[str, Status]) -> ReactionView:
    status = statuses.get(reaction.run_id) if reaction.run_id else None
    return ReactionView.model_validate(reaction).model_copy(update={"run_status": status})


_MISSPELT_LIKENESS = 0.8  # least similarity of names, from 0 to 1
ReactingPlaybooks = Mapping[str, Sequence[CompiledPlaybook]]  # By alertname, in alphabetical order


def by_alertname(catalog: Library) -> ReactingPlaybooks:
    naming: dict[str, list[CompiledPlaybook]] = {}
    for playbook in catalog.all():
        for name in dict.fromkeys(playbook.definition.begins_with):
            naming.setdefault(name, []).append(playbook)
    return {name: naming[name] for name in sorted(naming)}


def why_no_reaction(record: AlertRecord, names: ReactingPlaybooks, suggestion: SuggestionView | None = None) -> str:
    if record.reactions:
        return "; ".join(
            f"{each.playbook}: {each.reason or each.decision}" if each.playbook else _without_playbook(each)
            for each in record.reactions
        )
    return why_no_playbook(record.alert.name, names, suggestion)


def _without_playbook(reaction: Reaction) -> str:
    is_refused = reaction.decision == NoReaction.NOT_ACCEPTED
    return f"not accepted by the alert map: {reaction.reason}" if is_refused else reaction.reason


def why_no_playbook(name: str, names: ReactingPlaybooks, suggestion: SuggestionView | None = None) -> str:
    if not name:
        return "it has no alertname, which playbooks match"
    if name in names:
        return f"no playbook reacted to {name!r} when it was received; one does now"
    if suggestion is not None:
        return (
            f"no playbook reacts to {name!r}; by {suggestion.because} it may mean {suggestion.alert_name}, "
            "to which an alert map can rename it"
        )
    return f"no playbook reacts to {name!r}{did_you_mean(name, names, _MISSPELT_LIKENESS)}"


def _renamed(alert: Alert, name: str) -> dict[str, str]:  # labels, as an alert map makes them
    kept = {label: value for label, value in alert.labels.items() if label != SHIPPED_RULE_LABEL}
    return {**kept, "alertname": name}


def suggested(alert: Alert, names: ReactingPlaybooks) -> SuggestionView | None:
    if not alert.name or alert.name in names:
        return None
    rename = suggest(alert.labels, alert.generator_url, alert.annotations.values(), names)
    if rename is None:
        return None
    renamed = replace(alert, labels=_renamed(alert, rename.name))
    reacting = [each.definition for each in names[rename.name] if each.match(renamed).matched]
    if not reacting:  # a rename that starts nothing has no use
        return None
    playbooks = [SuggestedPlaybook(playbook=each.name, summary=each.summary) for each in reacting]
    entry = snippet(alert.original_name or alert.name, rename)
    return SuggestionView(alert_name=rename.name, because=rename.because, playbooks=playbooks, rename=entry)


def router(alerts: ReceivedAlerts, catalog: Library, parts: RouteParts) -> ApiRoutes:
    routes = ApiRoutes("alerts", parts.auth)
    exports: Exports[AlertRecord] = Exports(
        parts.limits, HeardAlertView, lambda record: view(record, by_alertname(catalog))
    )

    @routes.read(
        "/alerts",
        summary="Received alerts, newest first, and the reactions",
        response_model=HeardAlertPage,
        responses=AS_STREAM,
    )
    async def heard(
        conditions: ReceivedAlertFilter = Depends(_filter(parts.clock)),
        limit: PageLimit = 100,
        cursor: PageCursor = None,
        accept: Accept = None,
    ) -> Response:
        """By the time of first receipt. Alerts without a reaction are included; `reacted=false` selects only those.

        A repeated alert with the same start is one item with a higher count. With `Accept: application/x-ndjson` or
        `text/csv`, stream the whole filtered result; `limit` and `cursor` are ignored.
        """
        if kind := stream_type(accept):
            found = all_items(lambda after: alerts.alerts_page(conditions, _PIECE, after))
            return await exports.response(found, kind)
        async with parts.reads.take():
            return AsciiJson.of(await _page(alerts, catalog, conditions, limit, cursor, parts.limits.page_bytes))

    return routes


def _filter(clock: Clock) -> Callable[..., ReceivedAlertFilter]:
    async def conditions(
        alertname: Name | None = None,
        labels: LabelFilters = [],  # noqa: B006 - FastAPI copies it
        status: AlertStatus | None = None,
        since: TimeText | None = None,
        until: TimeText | None = None,
        reacted: Annotated[bool | None, Query(description="Whether a playbook reacted to it.")] = None,
    ) -> ReceivedAlertFilter:
        now = clock.now()
        pairs = [text.split("=", 1) for text in labels]
        by_name = dict(pairs)
        if len(by_name) < len(pairs):
            raise PayloadError.at([("label", "names a label twice")])
        begin = time_of(since, now) if since else None
        end = time_of(until, now) if until else None
        return ReceivedAlertFilter(alertname, by_name, status, begin, end, reacted)

    return conditions  # type: ignore[return-value]
