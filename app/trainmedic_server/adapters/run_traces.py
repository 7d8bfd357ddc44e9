"""Listener that sends each closed run as a trace (OTLP over HTTP in JSON).

The run is the root span, with steps, undos, attempts and ranks below it. Spans contain no parameters and no labels
except the alert's name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from trainmedic.wire.envelope import EnvelopeError, read_time
from trainmedic_server import __version__, telemetry
from trainmedic_server.adapters.json_endpoint import JsonEndpoint
from trainmedic_server.domain.event_codec import UNDO_OVER, content_of, names
from trainmedic_server.domain.event_kinds import Closed, UndoClosed, UndoDone
from trainmedic_server.domain.links import run_link
from trainmedic_server.domain.run import Attempt, Event, Run, Status, StepState, StepStatus, UndoStatus
from trainmedic_server.errors import PermanentFailure
from trainmedic_server.ports.store import History, RunRecord

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LONGEST_TEXT = 1_000  # characters
_MOST_EVENTS = 128  # Of a span, by default in OpenTelemetry.
_SPAN_KIND_INTERNAL = 1
_OK, _ERROR = 1, 2  # OTLP's status codes.
_WENT_WRONG = frozenset({Status.FAILED})
_AS_WISHED = ("applied", "running")  # Statuses of attempts.
_STEP_WENT_WRONG = frozenset({StepStatus.FAILED, StepStatus.TIMED_OUT, StepStatus.UNKNOWN})

log = telemetry.logger(__name__)


class RunTraces:  # an `engine.event_dispatch.EventListener`
    name = "traces_to"
    kinds = UNDO_OVER | names(Closed)
    at_once = 50

    def __init__(
        self,
        endpoint: JsonEndpoint,
        runs: History,
        instance: str,
        external_url: str,
        on_left_out: Callable[[int], None],
    ) -> None:
        self._endpoint = endpoint
        self._runs = runs
        self._instance = instance
        self._external_url = external_url
        self._on_left_out = on_left_out

    async def take(self, events: Sequence[Event]) -> None:
        spans: list[dict[str, Any]] = []
        for event in events:
            record = await self._runs.record(event.run_id) if event.run_id is not None else None
            if record is None:
                continue  # deleted by --retention
            content = content_of(event)
            if event.kind not in UNDO_OVER:
                spans += _spans_of_run(record, run_link(self._external_url, record.run.id))
            elif isinstance(content, (UndoDone, UndoClosed)):
                spans += _spans_of_undo(record.run, content.step)
        if spans:
            await self._send(spans)

    async def _send(self, spans: list[dict[str, Any]]) -> None:
        resource = {
            "service.name": "trainmedic",
            "service.version": __version__,
            "service.instance.id": self._instance,
        }
        scope = {"scope": {"name": "trainmedic", "version": __version__}, "spans": spans}
        document = {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}]}
        try:
            answer = await self._endpoint.send("POST", "/v1/traces", document)
        except PermanentFailure as error:
            self._note_rejected(len(spans), str(error))
            return
        partial = answer.get("partialSuccess") if isinstance(answer, dict) else None
        if not isinstance(partial, dict):
            return
        rejected = str(partial.get("rejectedSpans", 0))
        if rejected.isdecimal() and len(rejected) < 19 and int(rejected):  # fits into 64 bits
            self._note_rejected(int(rejected), str(partial.get("errorMessage", "")))

    def _note_rejected(self, number: int, why: str) -> None:
        self._on_left_out(number)
        log.warning("collector rejects spans", spans=number, error=why[:_LONGEST_TEXT])


def _spans_of_run(record: RunRecord, link: str) -> Iterator[dict[str, Any]]:
    run = record.run
    if run.ended_at is None:
        return  # A later closing sends it.
    attributes = {
        "trainmedic.run.id": run.id,
        "trainmedic.run.link": link,
        "trainmedic.playbook": run.playbook,
        "trainmedic.playbook.version": run.version,
        "trainmedic.alert.name": run.alert_name,
        "trainmedic.target": run.target_key,
        "trainmedic.mode": run.mode,
        "trainmedic.status": run.status,
        "trainmedic.decision": run.decision,
        "trainmedic.started_by": run.started_by,
    }
    status = _status(run.status in _WENT_WRONG, run.message)
    span = _span(run, "", f"run {run.playbook}", run.created_at, run.ended_at, status, attributes)
    span["events"] = [
        {"timeUnixNano": _nanoseconds(event.at), "name": event.kind, "attributes": _attributes(_attributes_of(event))}
        for event in record.events[:_MOST_EVENTS]
    ]
    yield span
    for step in run.steps:
        yield from _spans_of_step(run, step)


def _spans_of_step(run: Run, step: StepState) -> Iterator[dict[str, Any]]:
    if step.started_at is None or run.ended_at is None:
        return  # skipped, or the run closed before it
    path = f"{step.phase}.{step.index}"
    ended_at = step.ended_at or run.ended_at
    attributes = {
        "trainmedic.step": step.id,
        "trainmedic.step.phase": step.phase,
        "trainmedic.step.kind": step.kind,
        "trainmedic.action": step.action,
        "trainmedic.status": step.status,
        "trainmedic.attempts": len(step.attempts),
    }
    status = _status(step.status in _STEP_WENT_WRONG, step.error)
    yield _span(run, path, f"step {step.id}", step.started_at, ended_at, status, attributes, parent="")
    for attempt in step.attempts:
        is_last = attempt is step.attempts[-1]
        answers = step.output.get("by_rank") if is_last else None
        yield from _spans_of_attempt(run, path, step.action, attempt, ended_at, answers)


def _spans_of_attempt(
    run: Run, path: str, action: str | None, attempt: Attempt, ended_at: datetime, answers: Any = None
) -> Iterator[dict[str, Any]]:
    own = f"{path}.{attempt.number}"
    ended_at = attempt.ended_at or ended_at
    attributes = {
        "trainmedic.action": action,
        "trainmedic.attempt": attempt.number,
        "trainmedic.command.id": attempt.command_id,
        "trainmedic.status": attempt.status,
    }
    name, status = f"attempt {attempt.number} of {action}", _status(attempt.status not in _AS_WISHED, attempt.error)
    yield _span(run, own, name, attempt.started_at, ended_at, status, attributes, path)
    for rank, answer in answers.items() if isinstance(answers, Mapping) else ():
        if (answered_at := _answered_at(answer)) is None:
            continue
        # The clock of the job's node may differ.
        within = min(max(answered_at, attempt.started_at), ended_at)
        of_rank = {"trainmedic.rank": rank, "trainmedic.status": answer.get("status")}
        status = _status(answer.get("status") != "applied", str(answer.get("reason", "")))
        yield _span(run, f"{own}.rank{rank}", f"rank {rank}", attempt.started_at, within, status, of_rank, own)


def _spans_of_undo(run: Run, step_id: str) -> Iterator[dict[str, Any]]:
    for step in run.steps:
        undo = step.undo
        if undo is None or step.id != step_id or not undo.attempts:
            continue
        path = f"{step.phase}.{step.index}.undo"
        last = undo.attempts[-1]
        ended_at = last.ended_at or last.started_at
        attributes = {
            "trainmedic.step": step.id,
            "trainmedic.action": undo.action,
            "trainmedic.status": undo.status,
            "trainmedic.because": undo.because,
        }
        first = undo.attempts[0]
        status = _status(undo.status is not UndoStatus.DONE, undo.error)
        yield _span(run, path, f"undo of {step.id}", first.started_at, ended_at, status, attributes, parent="")
        for attempt in undo.attempts:
            yield from _spans_of_attempt(run, path, undo.action, attempt, ended_at)


def _span(
    run: Run,
    path: str,
    name: str,
    began_at: datetime,
    ended_at: datetime,
    status: Mapping[str, Any],
    attributes: Mapping[str, Any],
    parent: str | None = None,
) -> dict[str, Any]:
    """`path` is the span's place in the run, `parent` that of the span above."""
    above = {} if parent is None else {"parentSpanId": _span_id(run, parent)}
    return {
        "traceId": run.id.replace("-", "").lower(),
        "spanId": _span_id(run, path),
        **above,
        "name": name,
        "kind": _SPAN_KIND_INTERNAL,
        "startTimeUnixNano": _nanoseconds(began_at),
        "endTimeUnixNano": _nanoseconds(max(began_at, ended_at)),
        "attributes": _attributes(attributes),
        "status": status,
    }


def _span_id(run: Run, path: str) -> str:
    return hashlib.sha256(f"{run.id}/{path}".encode()).hexdigest()[:16]


def _attributes(named: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in named.items() if value not in (None, "")]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"stringValue": str(value)[:_LONGEST_TEXT]}


def _attributes_of(event: Event) -> dict[str, Any]:
    names = ("step", "action", "attempt", "why", "error", "outcome", "holder")
    plain = {name: value for name in names if isinstance(value := event.data.get(name), (str, int))}
    return {"actor": event.actor, **plain}


def _status(went_wrong: bool, message: str | None) -> dict[str, Any]:
    return {"code": _ERROR, "message": (message or "")[:_LONGEST_TEXT]} if went_wrong else {"code": _OK}


def _answered_at(answer: Any) -> datetime | None:
    if not isinstance(answer, Mapping):
        return None
    try:
        return read_time(str(answer.get("at")))
    except EnvelopeError:
        return None


def _nanoseconds(moment: datetime) -> str:
    """OTLP's JSON form of 64-bit integers is decimal text."""
    return str((moment - _EPOCH) // timedelta(microseconds=1) * 1_000)
