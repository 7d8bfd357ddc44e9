"""Runs as traces, over real HTTP, read by OpenTelemetry's own schema of OTLP."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from msgspec.structs import replace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.contract.run_store_values import at, attempt, closed, event, gpu, heard, step, undo
from tests.integration.test_doors import StandIn, act, told
from trainmedic.wire.envelope import write_time
from trainmedic_server import errors
from trainmedic_server.adapters.json_endpoint import JsonEndpoint
from trainmedic_server.adapters.run_traces import RunTraces
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.domain.run import Run, StepStatus, UndoStatus
from trainmedic_server.domain.run import Status as RunStatus


class Collector(StandIn):
    """An OTLP receiver: what it is sent must fit the schema, to the last member."""

    def __init__(self) -> None:
        self.exports: list[ExportTraceServiceRequest] = []
        self.answer: dict[str, Any] = {}
        super().__init__()

    def act(self, method: str, path: str, document: Any) -> Any:
        assert (method, path) == ("POST", "/otlp/v1/traces")
        for span in document["resourceSpans"][0]["scopeSpans"][0]["spans"]:
            # OTLP's JSON writes ids in hexadecimal; protobuf's own mapping, which reads it here, in base64.
            for name in {"traceId", "spanId", "parentSpanId"} & set(span):
                span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
        self.exports.append(ParseDict(document, ExportTraceServiceRequest()))
        return self.answer

    @property
    def spans(self) -> dict[str, Span]:
        """By name, the last of each."""
        scopes = [scope for export in self.exports for each in export.resource_spans for scope in each.scope_spans]
        return {span.name: span for scope in scopes for span in scope.spans}


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()
    made.thread.join()


def tracing(collector: Collector, store: InMemoryStore) -> tuple[RunTraces, list[int]]:
    left_out: list[int] = []
    door = JsonEndpoint(f"{collector.url}/otlp/", None, "the collector of traces")
    return RunTraces(door, store, "cluster-7", "https://t.example.org", left_out.append), left_out


def a_run() -> Run:
    """Its first attempt failed; then both ranks of a job answered, one of them late; it owes an undo."""
    answers = {
        "0": {"status": "applied", "at": write_time(at(2.5))},
        "1": {"status": "applied", "at": write_time(at(3))},
        "2": {"status": "applied"},
    }
    tries = (
        attempt("c1", status="failed", error="nobody answers", started_at=at(1), ended_at=at(1.5)),
        attempt("c2", 2, status="applied", started_at=at(2), ended_at=at(3)),
    )
    given_back = undo(UndoStatus.DONE, attempts=(attempt("c3", status="applied", started_at=at(8), ended_at=at(9)),))
    acted = step(
        status=StepStatus.SUCCEEDED,
        started_at=at(1),
        ended_at=at(3),
        attempts=tries,
        output={"by_rank": answers},
        undo=given_back,
    )
    skipped = step(1, status=StepStatus.SKIPPED, action="gpu.reset")
    return closed(0, gpu(), acted_at=at(1), ended_at=at(4), steps=(acted, skipped), message="cool again")


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def named(span: Span) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


async def test_a_run_is_a_trace_down_to_the_ranks_that_answered(collector: Collector) -> None:
    """The spans are run, step, attempts and ranks, with start, end and errors."""
    store = InMemoryStore()
    listener, left_out = tracing(collector, store)
    await store.transact(lambda tx: tx.save_alerts([heard()]))
    await told(store, listener)
    run = a_run()
    await act(store, run, None, "started")
    await store.transact(lambda tx: tx.append([event("closed", run.id, 4), event("paused", minute=5)]))
    await told(store, listener)
    spans = collector.spans
    root = spans["run cool"]
    assert {span.trace_id for span in spans.values()} == {bytes.fromhex(run.id.replace("-", ""))}
    assert root.parent_span_id == b""
    assert named(root)["trainmedic.run.link"] == f"https://t.example.org/runs/{run.id}"
    assert [each.name for each in root.events] == ["started", "closed"]
    above = {
        span.name: next((p.name for p in spans.values() if p.span_id == span.parent_span_id), "")
        for span in spans.values()
    }
    assert above == {
        "run cool": "",
        "step steps-0": "run cool",
        "attempt 1 of gpu.power_limit": "step steps-0",
        "attempt 2 of gpu.power_limit": "step steps-0",
        "rank 0": "attempt 2 of gpu.power_limit",
        "rank 1": "attempt 2 of gpu.power_limit",
    }
    assert {name: seconds(span) for name, span in spans.items()} == {
        "run cool": 240,
        "step steps-0": 120,
        "attempt 1 of gpu.power_limit": 30,
        "attempt 2 of gpu.power_limit": 60,
        "rank 0": 30,
        "rank 1": 60,
    }
    failed = spans["attempt 1 of gpu.power_limit"].status
    assert (failed.code, failed.message) == (Status.STATUS_CODE_ERROR, "nobody answers")
    assert root.status.code == Status.STATUS_CODE_OK
    assert left_out == []


async def test_a_later_revert_joins_the_trace(collector: Collector) -> None:
    """Although a kill makes it be sent twice, it is the same span."""
    store = InMemoryStore()
    listener, _ = tracing(collector, store)
    await store.transact(lambda tx: tx.save_alerts([heard()]))
    await told(store, listener)
    run = a_run()
    await act(store, run, None, "closed")
    await told(store, listener)
    assert "undo of steps-0" not in collector.spans
    await store.transact(
        lambda tx: tx.append([event("undo_done", run.id, 9, step="steps-0", action="uncap", output={})])
    )
    collector.statuses = [0]
    for _ in range(2):
        with suppress(errors.TrainmedicError):
            await told(store, listener)
    first, second = collector.exports[-2:]
    assert first == second
    undone = collector.spans["undo of steps-0"]
    assert undone.parent_span_id == collector.spans["run cool"].span_id
    assert seconds(undone) == 60
    assert collector.spans["attempt 1 of gpu.power_limit"].parent_span_id == undone.span_id


async def test_spans_rejected_by_a_collector_are_counted_and_delay_nothing(collector: Collector) -> None:
    """All are rejected (400), or a part, which its answer states; an outage is waited for."""
    store = InMemoryStore()
    listener, left_out = tracing(collector, store)
    await store.transact(lambda tx: tx.save_alerts([heard()]))
    await told(store, listener)
    failed = replace(a_run(), status=RunStatus.FAILED, steps=())
    await act(store, failed, None, "closed")
    collector.statuses = [503, 400]
    with pytest.raises(errors.TemporaryFailure):
        await told(store, listener)
    await told(store, listener)
    assert left_out == [1]
    collector.answer = {"partialSuccess": {"rejectedSpans": "1", "errorMessage": "too old"}}
    await store.transact(lambda tx: tx.append([event("closed", failed.id, 4)]))
    await told(store, listener)
    assert left_out == [1, 1]
    collector.answer = {"partialSuccess": {"rejectedSpans": "1" * 5000}}
    await store.transact(lambda tx: tx.append([event("closed", failed.id, 5)]))
    await told(store, listener)
    assert left_out == [1, 1]
    assert collector.spans["run cool"].status.code == Status.STATUS_CODE_ERROR
