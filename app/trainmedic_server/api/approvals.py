"""``GET /approvals``."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import Field

from trainmedic_server.api.view import View
from trainmedic_server.domain import approval
from trainmedic_server.domain.approval import Terms
from trainmedic_server.domain.links import run_link
from trainmedic_server.domain.run import Run, Status, StepState
from trainmedic_server.http.api_routes import ApiRoutes, RouteParts
from trainmedic_server.ports.store import History, HistoryFilter

MOST = 1000  # of the newest waiting runs


class StepAheadView(View):
    """A step that an approval would allow."""

    id: str
    action: str
    params: dict[str, Any] = Field(description="As rendered for the question; empty if they depend on the run.")
    targets: list[str] = Field(description="What it changes; empty if it only reads or notifies.")
    nodes: list[str] = Field(description="Nodes that it may change, as far as known.")
    gpus: int | None = Field(description="Number of affected GPUs; null if unknown.")
    note: str | None = Field(description="What decides whether or how it is carried out.")


class ApprovalView(View):
    run_id: str
    playbook: str
    target: str | None
    alert_name: str
    alert_labels: dict[str, str]
    step: str = Field(description="ID of the step that asks; `approval` in mode approve.")
    question: str
    asked_at: datetime = Field(description="When it was last asked.")
    asked: int = Field(description="How often it was asked.")
    until: datetime | None = Field(description="When the question expires; null for never.")
    asked_again_at: datetime | None = Field(description="When an expired question is asked again.")
    on_timeout: str = Field(
        description="What happens without an answer: fail, continue, reject, approve, escalate, ask_again."
    )
    escalated: bool = Field(description="Whether it was escalated to the next approvers.")
    steps: list[StepAheadView]
    nodes: list[str]
    gpus: int | None
    count: int = Field(description="Number of different people who have to approve.")
    by: list[str] = Field(
        description="Allowed approvers: user:NAME, group:NAME, or a name of either; empty for any operator."
    )
    approved_by: list[str] = Field(description="Approvers so far.")
    link: str | None = Field(description="The run's page; null without an external URL.")


class ApprovalList(View):
    items: list[ApprovalView]


async def approvals(history: History, external_url: str = "") -> ApprovalList:
    runs, _ = await history.page(HistoryFilter(status=Status.AWAITING_APPROVAL), MOST, None)
    waiting = [(run, step) for run in runs if (step := approval.waiting_step(run)) is not None]
    items = [_view(run, step, external_url) for run, step in waiting]
    # The first to expire come first; questions without an end follow.
    return ApprovalList(items=sorted(items, key=lambda item: (item.until is None, item.until or item.asked_at)))


def router(history: History, parts: RouteParts, external_url: str) -> ApiRoutes:
    routes = ApiRoutes("operations", parts.auth)

    @routes.read("/approvals", summary="Questions that wait for people")
    async def waiting() -> ApprovalList:
        async with parts.reads.take():
            return await approvals(history, external_url)

    return routes


def _view(run: Run, step: StepState, external_url: str) -> ApprovalView:
    terms = Terms.of(step)
    return ApprovalView.of(
        run,
        run_id=run.id,
        target=run.target_key or None,
        step=step.id,
        question=step.message or "",
        asked_at=step.started_at or run.created_at,
        asked=terms.asked,
        until=step.deadline,
        asked_again_at=step.retry_at if terms.lapsed else None,
        on_timeout=terms.on_timeout,
        escalated=terms.escalated,
        steps=terms.steps,
        nodes=sorted(terms.nodes),
        gpus=terms.gpus,
        count=terms.count,
        by=terms.by,
        approved_by=approval.approvers(step),
        link=run_link(external_url, run.id) or None,
    )
