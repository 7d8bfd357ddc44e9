"""Alert rules of the demo, faster than the shipped ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum

from msgspec import Struct


class PastComparison(StrEnum):
    ABOVE = "above"
    """The highest value of the period is above the limit."""
    RISEN = "risen"
    """The value is above the lowest of the period by more than the limit."""


class DemoRule(Struct, frozen=True):
    alert: str
    metric: str
    comparison: PastComparison
    limit: float
    seconds: int  # the period
    component: str
    summary: str  # With ``{name}`` for a label

    def promql(self) -> str:
        value = f"max_over_time({self.metric}[{self.seconds}s])"
        if self.comparison is PastComparison.RISEN:
            value = f"{self.metric} - min_over_time({self.metric}[{self.seconds}s])"
        # The address of an endpoint on loopback says nothing about a simulated node.
        return f"max without (instance, job) ({value}) > {self.limit:g}"

    def holds(self, values: Sequence[float]) -> bool:
        """`values` are those of the period, oldest first."""
        if not values:
            return False
        if self.comparison is PastComparison.ABOVE:
            return max(values) > self.limit
        return values[-1] > min(values) + self.limit

    def labels(self) -> Mapping[str, str]:
        return {"severity": "critical", "component": self.component}


RULES = (
    # The lowest of five losses: a single bad batch is no jump.
    DemoRule(
        *("TrainingLossSpike", "training_loss_lowest_of_five", PastComparison.RISEN, 0.9, 40, "training"),
        "The loss of {job_name} jumped",
    ),
    DemoRule(
        *("GradientExplosion", "gradient_norm", PastComparison.ABOVE, 40, 5, "training"),
        "The gradients of {job_name} exploded",
    ),
    # The alert fires for 25 s after the last value above the limit. By then the capped GPU has cooled, so that the cap
    # does not end near the limit.
    DemoRule(
        *("GPUTemperatureHigh", "gpu_temperature_celsius", PastComparison.ABOVE, 85, 25, "gpu"),
        "GPU {gpu_id} on {node} is hot",
    ),
)


def rules_file() -> str:
    """Return JSON, which is YAML, for Prometheus."""
    rules = [
        {
            "alert": rule.alert,
            "expr": rule.promql(),
            "labels": rule.labels(),
            "annotations": {"summary": rule.summary.replace("{", "{{ $labels.").replace("}", " }}")},
        }
        for rule in RULES
    ]
    return json.dumps({"groups": [{"name": "demo", "interval": "1s", "rules": rules}]}, indent=1)
