"""Reader of request bodies within limits of size, time and memory, and their parser."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from trainmedic_server.errors import PayloadError, Saturated
from trainmedic_server.http.body_memory import BodyArrival, BodyMemory
from trainmedic_server.http.limits import KIB, ServerLimits
from trainmedic_server.http.problems import HttpProblem, from_error, sentence

_MOST_CONTAINERS = 1_200_000  # lists and objects, of 60 bytes of memory or more each; an alert has three
_MODEL_BYTES = 16 * KIB  # largest body for `read_model`
_Model = TypeVar("_Model", bound=BaseModel)


class BodyReader:
    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._memory = BodyMemory(limits)

    def read(self, request: Request, largest: int | None = None) -> _BodyInWork:
        """Return a context with the body in its turn, which holds its memory until exit. Entering raises HttpProblem:
        400, 408, 413, 415 or 503.
        """
        largest = self._limits.body_bytes if largest is None else largest
        return _BodyInWork(self._memory, request, self._limits.body_seconds, largest)

    async def read_model(self, request: Request, model: type[_Model]) -> _Model:
        """Read the optional body as `model`, within a limit and after authentication, unlike FastAPI."""
        async with self.read(request, _MODEL_BYTES) as raw:
            document = parse_json(raw) if raw.strip() else {}
        try:
            return model.model_validate(document, strict=True)
        except ValidationError as error:
            problems = [(".".join(map(str, each["loc"])), sentence(each["msg"])) for each in error.errors()[:20]]
            raise PayloadError.at(problems) from None


class _BodyInWork:
    """Context of one body."""

    # No generator, because the event loop tracks each.

    def __init__(self, memory: BodyMemory, request: Request, seconds: float, largest: int) -> None:
        self._memory = memory
        self._request = request
        self._seconds = seconds
        self._largest = largest
        self._arrival = BodyArrival()

    async def __aenter__(self) -> bytearray:
        _check_headers(self._request, self._largest)
        try:
            body = await self._receive_in_time()
            self._turns = self._memory.arrived(self._arrival)
            await self._turns.take(self._arrival.size)
        except BaseException:
            self._memory.release(self._arrival)
            raise
        return body

    async def __aexit__(self, *error: object) -> None:
        self._turns.give_back(self._arrival.size)
        self._memory.release(self._arrival)

    async def _receive_in_time(self) -> bytearray:
        try:
            if _has_arrived(self._request):
                return await self._receive()
            self._arrival.deadline = asyncio.timeout(self._seconds)
            async with self._arrival.deadline:
                return await self._receive()
        except TimeoutError:
            if self._arrival.gave_way:
                raise _full(closes=True) from None
            raise HttpProblem(
                HTTPStatus.REQUEST_TIMEOUT, f"The body did not arrive within {self._seconds:g} s.", closes=True
            ) from None

    async def _receive(self) -> bytearray:
        body = bytearray()
        more = True
        while more:
            message = await self._request.receive()
            if message["type"] == "http.disconnect":
                raise HttpProblem(HTTPStatus.BAD_REQUEST, "The connection ended before the body did.")
            chunk = message.get("body", b"")
            more = message.get("more_body", False)
            size = len(chunk)
            if len(body) + size > self._largest:
                raise _too_large(self._largest)
            if not self._memory.grow(self._arrival, size):
                raise _full(closes=more)
            body += chunk
        return body


def parse_json(body: bytes | bytearray, *, keep_half_pairs: bool = False) -> Any:
    """Return the JSON value in `body`. Raises HttpProblem 400 for other content, 413 for too many lists and objects.

    Half a surrogate pair is valid JSON (RFC 8259, section 8.2) but not text: raises PayloadError unless
    `keep_half_pairs`; then the caller must replace them.
    """
    # Brackets within texts count too, which makes no difference to alerts.
    if len(body) > _MOST_CONTAINERS and body.count(b"{") + body.count(b"[") > _MOST_CONTAINERS:
        raise HttpProblem(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body has more than {_MOST_CONTAINERS} lists and objects."
        )
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        if b"\\ud" in body.lower() and (document := _with_half_pairs(body)) is not None:
            if keep_half_pairs:
                return document
            _refuse_half_pairs(document)
        # The parser's message states the fault and its position, and quotes nothing of the body.
        raise HttpProblem(HTTPStatus.BAD_REQUEST, f"The body is not JSON in UTF-8: {error}.") from None


def _has_arrived(request: Request) -> bool:
    """Return whether the whole body is here (`HttpConnection`), so that no costly time limit is needed."""
    has_arrived = request.scope.get("state", {}).get("has_arrived")
    return has_arrived is not None and has_arrived()


def _check_headers(request: Request, largest: int) -> None:
    # Read the raw list once: `request.headers` searches all of it for each name.
    headers: dict[bytes, bytes] = dict(request.scope["headers"])
    encoding = headers.get(b"content-encoding")
    if encoding and encoding.strip().lower() not in (b"", b"identity"):
        # Decompression can expand a few bytes to gigabytes. Alertmanager never compresses.
        raise HttpProblem(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "The body must not be compressed: Content-Encoding must be absent or identity.",
            headers={"Accept-Encoding": "identity"},
            closes=True,
        )
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length[:20]) > largest:
        raise _too_large(largest)


def _too_large(largest: int) -> HttpProblem:
    return HttpProblem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body is larger than {largest} bytes.", closes=True)


def _full(closes: bool) -> HttpProblem:
    problem = from_error(Saturated("request bodies exceed their memory budget"))
    problem.closes = closes
    return problem


def _with_half_pairs(body: bytes | bytearray) -> Any:  # None if it is not JSON either way
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _refuse_half_pairs(document: Any) -> None:
    # Use a stack, because the body may be nested deeper than Python's recursion limit. Its elements are iterators,
    # because a list of all members would need a multiple of the body's memory.
    being_read = [iter([("", document)])]
    while being_read:
        for path, value in being_read[-1]:
            if isinstance(value, str):
                if any("\ud800" <= character <= "\udfff" for character in value):
                    raise PayloadError.at([(path, "contains half a surrogate pair, which is not text")])
            elif isinstance(value, dict | list):
                being_read.append(_members(path, value))
                break
        else:
            being_read.pop()


def _members(path: str, value: dict[str, Any] | list[Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, member in value.items():
            yield path, name
            yield _join(path, name), member
    else:
        for index, member in enumerate(value):
            yield _join(path, str(index)), member


def _join(path: str, name: str) -> str:
    shown = name[:64].encode("utf-8", "replace").decode()
    return f"{path}.{shown}" if path else shown
