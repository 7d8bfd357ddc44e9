"""Replacement for a missing Alertmanager or Prometheus: it finds firing alerts and posts changes to the webhook.

Not modelled: grouping, routes, silences and inhibition.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

import httpx
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from trainmedic_server.demo.demo_rules import RULES, DemoRule

_NEVER = "0001-01-01T00:00:00Z"  # Alertmanager's end of a firing alert
LabelSet = frozenset[tuple[str, str]]


class FiringAlert(Struct, frozen=True):
    labels: Mapping[str, str]
    summary: str

    @property
    def identity(self) -> LabelSet:
        return frozenset(self.labels.items())


class AlertFinder(Protocol):
    def firing(self) -> Iterable[FiringAlert]:
        """Raises httpx.HTTPError."""
        ...


class PrometheusAlerts:
    def __init__(self, url: str) -> None:
        self._url = url

    def firing(self) -> Iterator[FiringAlert]:
        answer = httpx.get(f"{self._url}/api/v1/alerts", timeout=5, trust_env=False).raise_for_status().json()
        for alert in answer["data"]["alerts"]:
            if alert["state"] == "firing":
                yield FiringAlert(alert["labels"], alert["annotations"].get("summary", ""))


class MeasuredAlerts:
    """The demo's rules on metrics that it reads itself."""

    def __init__(self, endpoints: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._endpoints = endpoints
        self._clock = clock
        self._values: dict[tuple[DemoRule, LabelSet], deque[tuple[float, float]]] = defaultdict(deque)

    def firing(self) -> Iterator[FiringAlert]:
        for endpoint in self._endpoints:
            self.take(httpx.get(endpoint, timeout=5, trust_env=False).raise_for_status().text)
        now = self._clock()
        for (rule, labels), values in self._values.items():
            while values and values[0][0] < now - rule.seconds:
                values.popleft()
            if rule.holds([value for _, value in values]):
                named = dict(labels)
                yield FiringAlert({"alertname": rule.alert, **named, **rule.labels()}, rule.summary.format_map(named))

    def take(self, exposition: str) -> None:
        """Add one endpoint's values, in Prometheus's text format."""
        now = self._clock()
        rules = {rule.metric: rule for rule in RULES}
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                if (rule := rules.get(sample.name)) is None or not math.isfinite(sample.value):
                    continue
                self._values[rule, frozenset(sample.labels.items())].append((now, sample.value))


class AlertRelay:
    """Posts started and resolved alerts. A failed delivery is repeated at the next call."""

    def __init__(self, finder: AlertFinder, webhook: str, post: Callable[[str, Any], object] | None = None) -> None:
        self._finder = finder
        self._webhook = webhook
        self._post = post or _post
        self._known: dict[LabelSet, tuple[FiringAlert, str]] = {}
        """Alerts posted as firing, with their start."""

    def relay(self) -> None:
        """Post the changes since the last call. Raises httpx.HTTPError."""
        now = datetime.now(UTC).isoformat()
        firing = {alert.identity: alert for alert in self._finder.firing()}
        begun = {key: (alert, now) for key, alert in firing.items() if key not in self._known}
        over = {key: entry for key, entry in self._known.items() if key not in firing}
        entries = [_entry(alert, "firing", since, _NEVER) for alert, since in begun.values()]
        entries += [_entry(alert, "resolved", since, now) for alert, since in over.values()]
        if entries:
            status = "firing" if begun else "resolved"
            self._post(self._webhook, {"version": "4", "receiver": "demo", "status": status, "alerts": entries})
        self._known = {key: entry for key, entry in (self._known | begun).items() if key in firing}


def _entry(alert: FiringAlert, status: str, since: str, until: str) -> dict[str, Any]:
    annotations = {"summary": alert.summary}
    times = {"startsAt": since, "endsAt": until}
    return {"status": status, "labels": dict(alert.labels), "annotations": annotations, **times}


def _post(url: str, body: Any) -> None:
    httpx.post(url, json=body, timeout=5, trust_env=False).raise_for_status()
