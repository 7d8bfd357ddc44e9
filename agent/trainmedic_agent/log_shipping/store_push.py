"""Client of Loki's push API, also VictoriaLogs'."""

from __future__ import annotations

import base64
import encodings.idna  # noqa: F401 - loaded with the first host name, which a confined reader may be unable to do
import gzip
import http.client
import json
import re
import ssl
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from urllib.parse import urlsplit

from msgspec import Struct, field

from trainmedic.errors import described
from trainmedic_agent import __version__
from trainmedic_agent.log_shipping.entries import Labels, StoreEntry
from trainmedic_agent.log_shipping.ship_counters import LostReason
from trainmedic_agent.log_shipping.ship_policy import ShipPolicy, StoreKind
from trainmedic_agent.log_shipping.store_access import StoreAccess

_PATHS = {StoreKind.LOKI: "/loki/api/v1/push", StoreKind.VICTORIALOGS: "/insert/loki/api/v1/push"}
_TIMEOUT = 10.0  # seconds
_LONGEST_ANSWER = 64 * 1024  # bytes
_LONGEST_TEXT = 300  # characters
_COMPRESSION = 3  # gzip's level, for speed
_MOST_RETRY_AFTER = 300.0  # seconds
_LINE_ERRORS = (
    ("timestamp too old", LostReason.TOO_OLD),
    ("timestamp too new", LostReason.TOO_NEW),
    ("too far behind", LostReason.OUT_OF_ORDER),
    ("out of order", LostReason.OUT_OF_ORDER),
    ("max entry size", LostReason.TOO_LARGE),
)  # phrases in Loki's answers, from its ``pkg/validation`` and ``pkg/chunkenc``
_IGNORED = re.compile(r"total ignored: (\d{1,9}) out of")
_COUNTED_ERROR = re.compile(r"(\d{1,9}) errors? like: ([^;]*)")


class Outcome(StrEnum):
    TAKEN = "taken"
    LATER = "later"
    """A retry may succeed."""
    SMALLER = "smaller"  # rate limit: retry with less
    REFUSED = "refused"  # perhaps because of single lines, so the caller divides the batch


class Answer(Struct, frozen=True):
    outcome: Outcome
    reason: str = ""
    """``unavailable``, ``rate_limited``, ``unauthorized``, ``not_found``, ``refused`` or ``too_large``."""
    text: str = ""
    lost: Mapping[LostReason, int] = field(default_factory=dict)  # lines that the store rejected among TAKEN ones
    retry_after: float | None = None
    """Seconds, if stated."""


class StorePush:
    """Not thread-safe."""

    def __init__(self, policy: ShipPolicy, access: Callable[[], StoreAccess] = StoreAccess) -> None:
        parts = urlsplit(policy.url)
        self._is_secure = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port
        self._path = parts.path + _PATHS[policy.kind]
        self._policy = policy
        self._access = access
        self._certificates: str | None = None  # of the connection
        self._connection: http.client.HTTPConnection | None = None
        self._was_used = False  # True if the last request reused a connection

    def push(self, entries: Sequence[StoreEntry]) -> Answer:
        """Return errors as answers."""
        body = gzip.compress(body_of(entries), _COMPRESSION, mtime=0)
        try:
            try:
                answer, text = self._post(body)
            except (ConnectionError, http.client.RemoteDisconnected):
                if not self._was_used:
                    raise
                self.close()  # the store closed an idle connection
                answer, text = self._post(body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            return Answer(Outcome.LATER, "unavailable", described(error)[:_LONGEST_TEXT])
        return answer_of(answer.status, text, len(entries), answer.headers.get("Retry-After"))

    def _post(self, body: bytes) -> tuple[http.client.HTTPResponse, str]:
        """Raises OSError, ValueError, HTTPException."""
        headers = self._headers()
        self._was_used = self._connection is not None
        if self._connection is None:
            self._connection = self._connect()
        self._connection.request("POST", self._path, body, headers)
        answer = self._connection.getresponse()
        text = answer.read(_LONGEST_ANSWER).decode(errors="replace").strip()
        if not answer.isclosed():  # longer than we read
            self.close()
        return answer, text

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> http.client.HTTPConnection:
        """Raises OSError, ValueError for invalid certificates."""
        if not self._is_secure:
            return http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT)
        self._certificates = self._access().certificates
        context = ssl.create_default_context(cadata=self._certificates)
        return http.client.HTTPSConnection(self._host, self._port, timeout=_TIMEOUT, context=context)

    def _headers(self) -> dict[str, str]:
        """Raises OSError for unusable credentials."""
        access = self._access()
        if access.problem:
            raise OSError(access.problem)
        if access.certificates != self._certificates:
            self.close()
        headers = {
            "Content-Type": "application/json",
            "Content-Encoding": "gzip",
            "User-Agent": f"trainmedic-agent/{__version__}",
        }
        tenant = self._policy.tenant
        if tenant and self._policy.kind is StoreKind.LOKI:
            headers["X-Scope-OrgID"] = tenant
        elif tenant:
            account, _, project = tenant.partition(":")
            headers |= {"AccountID": account, "ProjectID": project or "0"}
        token = (access.token or "").strip()
        if ":" in token:
            headers["Authorization"] = f"Basic {base64.b64encode(token.encode()).decode()}"
        elif token:
            if not (token.isascii() and token.isprintable()):  # http.client's error would contain the token
                raise OSError("the token is not one line of printable ASCII characters")
            headers["Authorization"] = f"Bearer {token}"
        return headers


def body_of(entries: Sequence[StoreEntry]) -> bytes:
    streams: dict[Labels, list[list[object]]] = {}
    for entry in entries:
        value: list[object] = [str(entry.at), entry.text]
        if entry.metadata:
            value.append(dict(entry.metadata))
        streams.setdefault(entry.labels, []).append(value)
    document = {"streams": [{"stream": dict(labels), "values": values} for labels, values in streams.items()]}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def answer_of(status: int, text: str, count: int, retry_after: str | None = None) -> Answer:
    full_text, text = text, f"{status} {text}"[:_LONGEST_TEXT]
    if 200 <= status < 300:
        return Answer(Outcome.TAKEN)
    if status in (400, 422) and (lost := lost_lines(full_text, count)):
        return Answer(Outcome.TAKEN, "refused", text, lost)
    if status in (400, 422):
        return Answer(Outcome.REFUSED, "refused", text)
    if status == 413:
        return Answer(Outcome.REFUSED, "too_large", text)
    if status == 429:
        return Answer(Outcome.SMALLER, "rate_limited", text, retry_after=_seconds(retry_after))
    reason = {401: "unauthorized", 403: "unauthorized", 404: "not_found"}.get(status, "unavailable")
    return Answer(Outcome.LATER, reason, text, retry_after=_seconds(retry_after))


def lost_lines(text: str, count: int) -> Mapping[LostReason, int]:
    """Return how many of `count` lines were rejected, by reason.

    Loki's long answer lists only some, and ends with the total.
    """
    lost: Counter[LostReason] = Counter()
    for number, like in _COUNTED_ERROR.findall(text):
        lost[next((reason for phrase, reason in _LINE_ERRORS if phrase in like), LostReason.REFUSED)] += int(number)
    if not lost:
        for phrase, reason in _LINE_ERRORS:
            lost[reason] += text.count(phrase)
        ignored = sum(int(number) for number in _IGNORED.findall(text))
        lost[LostReason.OUT_OF_ORDER] = max(lost[LostReason.OUT_OF_ORDER], ignored)
    left, counted = count, {}
    for reason, number in lost.most_common():
        if taken := min(number, left):
            counted[reason] = taken
        left -= taken
    return counted


def _seconds(text: str | None) -> float | None:
    return min(float(text), _MOST_RETRY_AFTER) if text is not None and text.isascii() and text.isdigit() else None
