"""How the measured effect of a run is shown."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from trainmedic_server.api.view import View
from trainmedic_server.domain.effect import Effect, EffectVerdict
from trainmedic_server.domain.run import Run
from trainmedic_server.reports.compiling import NO_PROMETHEUS


class EffectView(View):
    """What became of the alert's metric: 10 minutes before the run acted, then, and 10 minutes after.

    It says what was measured, not that the run was the cause.
    """

    verdict: EffectVerdict = Field(description="pending until it is measured.")
    reason: str | None = Field(description="What the verdict rests on, or why there is none.")
    acted_at: datetime
    due_at: datetime | None = Field(description="When it is measured; null where that is over.")
    before: float | None = Field(description="The metric 10 minutes before the act.")
    at: float | None = Field(description="The metric at the act.")
    after: float | None = Field(description="The metric 10 minutes after the act.")
    better: Literal["lower", "higher"] | None = Field(description="Which way the metric gets better.")
    operator: str | None = Field(description="Of the alert's condition, where the query is from its rule.")
    limit: float | None = Field(description="What the alert's condition compares with, where that is one number.")
    query: str | None = Field(description="What Prometheus was asked.")
    origin: Literal["playbook", "rule"] | None = Field(description="Who named the query.")
    series: list[tuple[float, float | None]] = Field(
        description="Seconds since 1970 and value, each half minute; null where it was no number.",
        examples=[[[1769860920.0, 88.0], [1769860950.0, 71.5]]],
    )


def view(run: Run, effect: Effect | None, are_measured: bool) -> EffectView | None:
    """The run's effect, or why there is none; None for a run that changed nothing. `are_measured` is whether this
    server measures effects."""
    if run.acted_at is None:
        return None
    if effect is not None:
        return EffectView.model_validate(effect)
    why_none = "it acted before its effect was to be measured" if are_measured else NO_PROMETHEUS
    missing = Effect(run.id, run.playbook, run.acted_at, None).not_measured(why_none)
    return EffectView.model_validate(missing).model_copy(update={"origin": None})
