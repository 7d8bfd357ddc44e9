"""Messages of the link: bounded structures in MessagePack. Unknown fields are ignored."""

from __future__ import annotations

import re
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from trainmedic.wire.findings import LARGEST_RULES, LARGEST_UPDATE
from trainmedic_agent.log_link.frames import FrameFault
from trainmedic_agent.log_reading.log_policy import LogsPolicy
from trainmedic_agent.log_reading.log_store import NodeBoot
from trainmedic_agent.log_shipping.store_access import StoreAccess

LARGEST_OF_READER = LARGEST_UPDATE + 64 * 1024  # bytes; the largest finding fits
LARGEST_OF_AGENT = LARGEST_RULES + 64 * 1024  # bytes; the largest rules fit
MOST_UPDATES = 50  # of a batch

_Name = Annotated[str, Meta(max_length=64)]
_Text = Annotated[str, Meta(max_length=1000)]
_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]


# --- from the agent ---


class Welcome(Struct, frozen=True, tag="welcome"):
    policy: LogsPolicy
    boot: NodeBoot


class RulesNow(Struct, frozen=True, tag="rules"):
    at: datetime  # when the server published them
    raw: Annotated[bytes, Meta(max_length=LARGEST_RULES)]


class GpusNow(Struct, frozen=True, tag="gpus"):
    """GPU UUIDs by normalised PCI address."""

    uuids: dict[str, str]


class FindingsTaken(Struct, frozen=True, tag="findings_taken"):
    """Redis has these findings."""

    numbers: list[int]


class SearchRequest(Struct, frozen=True, tag="search"):
    id: int
    params: dict[str, Any]


class SearchWithdrawn(Struct, frozen=True, tag="search_withdrawn"):
    id: int  # of a search whose caller no longer waits


class Ping(Struct, frozen=True, tag="ping"):
    number: int
    wants_metrics: bool = False


class EndReading(Struct, frozen=True, tag="end"):
    """The agent stops: send findings, then close the link."""


AgentMessage = (
    Welcome | RulesNow | GpusNow | StoreAccess | FindingsTaken | SearchRequest | SearchWithdrawn | Ping | EndReading
)


# --- from the reader ---


class QueuedFinding(Struct, frozen=True):
    number: _Number
    body: Annotated[bytes, Meta(max_length=LARGEST_UPDATE)]


class FindingBatch(Struct, frozen=True, tag="findings"):
    """The next batch follows this one's `FindingsTaken`."""

    updates: Annotated[list[QueuedFinding], Meta(min_length=1, max_length=MOST_UPDATES)]


class SearchAnswer(Struct, frozen=True, tag="answer"):
    id: int
    pieces: Annotated[list[Annotated[str, Meta(max_length=8192)]], Meta(max_length=256)]  # from `log_pages.packed`


class FailureKind(StrEnum):
    REJECTED = "rejected"
    FAILED = "failed"


class SearchFailure(Struct, frozen=True, tag="failure"):
    id: int
    kind: FailureKind
    reason: _Text


_CutText = Annotated[str, Meta(max_length=256)]
_CutField = _CutText | int | None


class ReaderStatus(Struct, frozen=True):
    rules: _Name = ""  # version, empty without rules
    files: _Number = 0  # followed ones
    kernel: _Name | None = None  # a `KernelReading`; None if the kernel's log is not read
    waiting: _Number = 0  # updates of findings that are not in Redis
    problem: _Text = ""  # why logs are not read, otherwise empty
    shipping_problem: _Text | None = None  # empty without problem, None if shipping is disabled
    cuts: Annotated[list[dict[_Name, _CutField]], Meta(max_length=200)] = []  # from `LogCut.plain`
    uid: _Number | None = None  # the reader's user


class MetricKind(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"
    INFO = "info"


_Label = Annotated[str, Meta(pattern="^[a-z_]{1,40}$")]
_LabelValue = Annotated[str, Meta(max_length=256)]


class LogSample(Struct, frozen=True):
    value: float
    labels: Annotated[dict[_Label, _LabelValue], Meta(max_length=6)]


class LogMetric(Struct, frozen=True):
    """The prefix prevents clashes with the agent's own metrics."""

    name: Annotated[str, Meta(pattern="^trainmedic_agent_log_[a-z_]{1,60}$")]
    kind: MetricKind
    text: Annotated[str, Meta(max_length=300)]
    samples: Annotated[list[LogSample], Meta(max_length=2000)]


class Pong(Struct, frozen=True, tag="pong"):
    number: int
    status: ReaderStatus
    loop_errors: Annotated[dict[_Name, _Number], Meta(max_length=16)]
    metrics: Annotated[list[LogMetric], Meta(max_length=100)] | None = None


ReaderMessage = FindingBatch | SearchAnswer | SearchFailure | Pong


def _encode_pattern(value: object) -> str:
    if isinstance(value, re.Pattern):
        return str(value.pattern)
    raise NotImplementedError(type(value))


def _decode_pattern(kind: Any, value: Any) -> Any:
    if getattr(kind, "__origin__", kind) is re.Pattern:
        return re.compile(value)
    raise NotImplementedError(kind)


_encode = msgspec.msgpack.Encoder(enc_hook=_encode_pattern).encode
_of_agent: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentMessage, dec_hook=_decode_pattern)
_of_reader: msgspec.msgpack.Decoder[ReaderMessage] = msgspec.msgpack.Decoder(ReaderMessage)


def encoded(message: AgentMessage | ReaderMessage) -> bytes:
    return _encode(message)


def agent_message(raw: bytes) -> AgentMessage:
    """Raises FrameFault."""
    try:
        return _of_agent.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FrameFault(f"a message cannot be read: {error}") from error


def reader_message(raw: bytes) -> ReaderMessage:
    """Raises FrameFault."""
    try:
        return _of_reader.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FrameFault(f"a message cannot be read: {str(error)[:200]}") from error
