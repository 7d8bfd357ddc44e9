"""Query API (version 1) of Prometheus."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

from trainmedic_server.adapters.foreign_answers import UNREADABLE
from trainmedic_server.adapters.httpx_caller import Endpoint
from trainmedic_server.errors import ActionFailure, MetricsRefused, MetricsUnavailable
from trainmedic_server.ports.metric_history import MOST_POINTS, AlertRule, MetricsAndRules, MetricSeries
from trainmedic_server.ports.outside import HttpReply

T = TypeVar("T")

TIMEOUT = timedelta(seconds=10)
BODY_LIMIT = 32 * 1024 * 1024  # Bytes: 1.2 million points.
_FORM = "application/x-www-form-urlencoded"
_ABOUT_THE_QUERY = ("PromQL info:", "PromQL warning:")
# Beginnings of warnings about the query (Prometheus 2.48 to 2.53 lists infos there). Others: stores did not answer.


class PrometheusApi(MetricsAndRules):
    def __init__(self, url: str, token_file: Path | None = None, on_error: Callable[[], None] = lambda: None) -> None:
        self._endpoint = Endpoint(url, token_file, "--prometheus-token", BODY_LIMIT)
        self.close = self._endpoint.close
        self._on_error = on_error

    async def read(self, query: str, begin: datetime, end: datetime, every: timedelta) -> Sequence[MetricSeries]:
        if (end - begin) / every >= MOST_POINTS:
            raise ValueError(f"a query for more than {MOST_POINTS} points")
        try:
            return await self._ask(query, begin, end, every)
        except MetricsUnavailable:
            self._on_error()
            raise

    async def _ask(self, query: str, begin: datetime, end: datetime, every: timedelta) -> Sequence[MetricSeries]:
        fields = {
            "query": query,
            "start": f"{begin.timestamp():.3f}",
            "end": f"{end.timestamp():.3f}",
            "step": f"{every.total_seconds():.3f}",
            "timeout": f"{TIMEOUT.total_seconds():g}s",
        }
        # A query may be longer than a URL.
        body = urlencode(fields).encode()
        return _read(
            await self._call("POST", "/api/v1/query_range", body),
            lambda data: [_series(entry) for entry in data["result"]],
        )

    async def check(self) -> None:
        """Raise MetricsUnavailable if it does not answer a query."""
        _read(await self._call("POST", "/api/v1/query", b"query=vector(1)"), lambda data: list(data["result"]))

    async def rules_of(self, alertname: str) -> Sequence[AlertRule]:
        query = urlencode({"type": "alert", "rule_name[]": alertname, "exclude_alerts": "true"})
        try:
            rules = _read(await self._call("GET", f"/api/v1/rules?{query}", None), _all_rules)
        except MetricsUnavailable:
            self._on_error()
            raise
        # Prometheus before 2.46 ignores this filter and returns all rules.
        return [rule for name, rule in rules if name == alertname]

    async def _call(self, method: str, path: str, body: bytes | None) -> HttpReply:
        try:
            headers = {"Content-Type": _FORM, **await self._endpoint.authorization()}
        except ActionFailure as error:
            raise MetricsUnavailable(f"Prometheus was not asked: {error}") from error
        try:
            return await self._endpoint.call(method, path, headers, body, TIMEOUT)
        except ActionFailure as error:
            raise MetricsUnavailable(f"Prometheus does not answer: {error}") from error


def _read(reply: HttpReply, read: Callable[[Any], T]) -> T:
    try:
        answer = json.loads(reply.body)
        if reply.status == 200 and answer["status"] == "success":
            _require_whole(answer)
            return read(answer["data"])
        reason = str(answer.get("error"))
    except UNREADABLE as error:
        if reply.status == 200:
            raise MetricsUnavailable("what Prometheus answers cannot be read, or is too long") from error
        reason = reply.body.strip()
    kind = MetricsRefused if reply.status in (400, 422) else MetricsUnavailable
    raise kind(f"Prometheus refuses: status {reply.status}: {reason[:200]}")


def _require_whole(answer: dict[str, Any]) -> None:
    warnings = [text for each in answer.get("warnings") or () if not (text := str(each)).startswith(_ABOUT_THE_QUERY)]
    if warnings:
        more = f" (and {len(warnings) - 1} more)" if len(warnings) > 1 else ""
        raise MetricsUnavailable(f"Prometheus answers only in part: {warnings[0][:200]}{more}")
    if answer.get("isPartial"):  # a cluster of VictoriaMetrics
        raise MetricsUnavailable("Prometheus answers only in part: a part of its cluster did not answer")


def _all_rules(data: Any) -> list[tuple[str, AlertRule]]:
    rules = [rule for group in data["groups"] for rule in group["rules"] if rule["type"] == "alerting"]
    return [
        (rule["name"], AlertRule(str(rule["query"]), {str(k): str(v) for k, v in rule.get("labels", {}).items()}))
        for rule in rules
    ]


def _series(entry: dict[str, Any]) -> MetricSeries:
    # Values are texts, because JSON has no NaN and no infinity.
    points = tuple((float(at), float(value)) for at, value in entry["values"])
    return MetricSeries({str(name): str(value) for name, value in entry["metric"].items()}, points)
