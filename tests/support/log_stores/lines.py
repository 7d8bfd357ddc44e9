"""Putting lines into a store as a shipper does, with the labels that the documentation names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import httpx

from trainmedic_logs.lines.parsed_line import level_of
from trainmedic_server.adapters.log_stores.paging import nanoseconds

INDEX_TEMPLATE: dict[str, Any] = {
    "index_patterns": ["logs-trainmedic*"],
    "priority": 500,
    "template": {
        "mappings": {
            "properties": {
                "@timestamp": {"type": "date_nanos"},
                "message": {"type": "text"},
                **{name: {"type": "keyword"} for name in ("job", "node", "source", "level")},
                **{name: {"type": "integer"} for name in ("rank", "attempt", "node_rank", "local_rank")},
            }
        }
    },
}
"""As the documentation has it."""


class LineWriter(Protocol):
    """Puts lines into one store."""

    def write(self, job: str, attempt: int, node: str, at: datetime, text: str) -> None: ...
    def write_kernel(self, node: str, at: datetime, text: str) -> None: ...


def labels_of(job: str | None, node: str, source: str, text: str) -> dict[str, str]:
    named = {"job": job} if job is not None else {}
    return {**named, "node": node, "source": source, "level": level_of(text).value}


@dataclass
class LokiPusher:
    """By Loki's push API, which VictoriaLogs has as well; ``call`` posts a document."""

    call: Callable[[Any], None]

    def write(self, job: str, attempt: int, node: str, at: datetime, text: str) -> None:
        self._push(labels_of(job, node, "launcher", text), at, f"{at.isoformat()} {text}", {"attempt": str(attempt)})

    def write_kernel(self, node: str, at: datetime, text: str) -> None:
        self._push(labels_of(None, node, "kernel", text), at, text, {})

    def _push(self, labels: dict[str, str], at: datetime, line: str, metadata: dict[str, str]) -> None:
        self.call({"streams": [{"stream": labels, "values": [[str(nanoseconds(at)), line, metadata]]}]})


def poster(url: str, path: str, headers: dict[str, str] | None = None) -> Callable[[Any], None]:
    """A call that posts JSON to a real store."""

    def post(document: Any) -> None:
        answer = httpx.post(url.rstrip("/") + path, json=document, headers=headers, timeout=30)
        assert answer.is_success, answer.text

    return post


@dataclass
class DocumentWriter:
    """Documents as a shipper puts them into OpenSearch; ``call`` posts one."""

    call: Callable[[Any], None]

    def write(self, job: str, attempt: int, node: str, at: datetime, text: str) -> None:
        labels = labels_of(job, node, "launcher", text)
        self._put(at, {**labels, "attempt": attempt, "message": f"{at.isoformat()} {text}"})

    def write_kernel(self, node: str, at: datetime, text: str) -> None:
        self._put(at, {**labels_of(None, node, "kernel", text), "message": text})

    def _put(self, at: datetime, document: dict[str, Any]) -> None:
        self.call({"@timestamp": at.isoformat(), **document})
