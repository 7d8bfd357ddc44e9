"""HTTP errors as problem details (RFC 9457).

Routes raise `HttpProblem` for HTTP faults and let ``trainmedic_server.errors`` pass. Most of pydantic's messages are
reworded.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trainmedic_server import errors, telemetry
from trainmedic_server.api.view import ApiModel

MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = 5  # for clients, while a part of the server is unavailable
_LINGER_SECONDS = 2.0  # longest reading after a response that closes
_MOST_PROBLEMS = 20

log = telemetry.logger(__name__)


class FieldProblem(ApiModel):
    field: str = Field(description="Path of the member, query parameter or header.")
    message: str


class ProblemDetails(ApiModel):
    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {
                    "type": "about:blank",
                    "title": "Unprocessable Content",
                    "status": 422,
                    "detail": "alerts.0.startsAt: is missing",
                    "field": "alerts.0.startsAt",
                    "errors": [{"field": "alerts.0.startsAt", "message": "is missing"}],
                }
            ]
        },
    )

    type: str = "about:blank"
    title: str = Field(description="The status as text.")
    status: int
    detail: str = Field(description="The fault, for people.")
    instance: str | None = Field(None, description="The requested path.")
    field: str | None = Field(None, description="Place of the first problem, if it has one.")
    errors: list[FieldProblem] | None = Field(None, description="All problems, up to 20.")


class HttpProblem(errors.TrainmedicError):
    """The request fails with this status and detail. ``closes``: the body was not read completely, so the connection
    ends. ``problems`` are (field, message).
    """

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        problems: Sequence[tuple[str, str]] = (),
        closes: bool = False,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = dict(headers or {})
        self.problems = tuple(problems)
        self.closes = closes


class ProblemResponse(Response):
    """If the response closes the connection, it first reads on for a moment: a reset could hide it."""

    media_type = MEDIA_TYPE

    def __init__(self, problem: HttpProblem, instance: str | None = None) -> None:
        content: dict[str, Any] = {
            "type": "about:blank",
            "title": _title(problem.status),
            "status": problem.status,
            "detail": problem.detail,
        }
        if instance is not None:
            content["instance"] = instance
        if problem.problems:
            content["field"] = problem.problems[0][0]
            content["errors"] = [{"field": field, "message": message} for field, message in problem.problems]
        super().__init__(json.dumps(content), problem.status, problem.headers)
        self._closes = problem.closes
        if problem.closes:
            self.headers["Connection"] = "close"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._closes:
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        try:
            async with asyncio.timeout(_LINGER_SECONDS):
                while (await receive()).get("more_body", False):
                    pass
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def from_error(error: errors.TrainmedicError) -> HttpProblem:
    match error:
        case HttpProblem():
            return error
        case errors.PayloadError():
            problems = error.problems or ((error.field or "", str(error)),)
            return HttpProblem(HTTPStatus.UNPROCESSABLE_ENTITY, str(error), problems=problems)
        case errors.NotFound():
            return HttpProblem(HTTPStatus.NOT_FOUND, str(error))
        case errors.NotEntitled():
            return HttpProblem(HTTPStatus.FORBIDDEN, str(error))
        case errors.Conflict():
            return HttpProblem(HTTPStatus.CONFLICT, str(error))
        case errors.LogQueryRefused():
            return HttpProblem(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        case errors.Saturated():
            return _retry_later("The server is overloaded.", error.retry_after)
        case errors.StoreSlow():
            advice = "Use a shorter time (since, until) or fewer filters."
            return _retry_later(f"{str(error)[:1].upper()}{str(error)[1:]}. {advice}", RETRY_SECONDS)
        case errors.StoreExplained():
            return _retry_later(f"The run store cannot be used: {error.reason}.", RETRY_SECONDS)
        case errors.StoreUnavailable():
            return _retry_later("The run store does not answer.", RETRY_SECONDS)
        case errors.BusExplained() | errors.LogsUnavailable():
            return _retry_later(f"{error}.", RETRY_SECONDS)
        case errors.BusUnavailable():
            return _retry_later("Redis does not answer.", RETRY_SECONDS)
        case _:
            return HttpProblem(HTTPStatus.INTERNAL_SERVER_ERROR, "Internal error. See the server's log.")


def from_validation(mistakes: Sequence[Mapping[str, Any]]) -> HttpProblem:  # in the form of pydantic's errors()
    problems = [(_path(each["loc"]), sentence(each["msg"])) for each in mistakes[:_MOST_PROBLEMS]]
    detail = "; ".join(f"{field}: {message}" for field, message in problems)
    return HttpProblem(HTTPStatus.UNPROCESSABLE_ENTITY, detail, problems=problems)


def answer(scope: Scope, problem: HttpProblem) -> ProblemResponse:
    client = scope.get("client")
    level = "warning" if problem.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "info"
    getattr(log, level)(
        "request refused",
        method=scope.get("method"),
        path=scope.get("path"),
        status=problem.status,
        detail=problem.detail,
        client=client[0] if client else None,
    )
    return ProblemResponse(problem, instance=scope.get("path"))


def answer_error(scope: Scope, error: errors.TrainmedicError) -> ProblemResponse:
    problem = from_error(error)
    if problem.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("request failed", path=scope["path"], exc_info=error)
    return answer(scope, problem)


def register(app: FastAPI) -> None:
    async def answer_ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, errors.TrainmedicError)
        return answer_error(request.scope, error)

    async def answer_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        detail = _HTTP_DETAILS.get(error.status_code, str(error.detail))
        return answer(request.scope, HttpProblem(error.status_code, detail, headers=error.headers))

    async def answer_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(request.scope, from_validation(error.errors()))

    app.add_exception_handler(errors.TrainmedicError, answer_ours)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_exception_handler(RequestValidationError, answer_validation)


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    schema = {"$ref": f"#/components/schemas/{ProblemDetails.__name__}"}  # FastAPI would compile a model for each route
    return {status: {"description": _title(status), "content": {MEDIA_TYPE: {"schema": schema}}} for status in statuses}


_HTTP_DETAILS = {  # in place of Starlette's
    404: "There is nothing at this path.",
    405: "This path does not support this method. See the header Allow.",
}


def _retry_later(detail: str, seconds: int) -> HttpProblem:
    return HttpProblem(
        HTTPStatus.SERVICE_UNAVAILABLE, f"{detail} Try again.", headers={"Retry-After": str(max(1, seconds))}
    )


def _title(status: int) -> str:
    # Python 3.11 has the older phrases of RFC 4918 (422) and RFC 7231 (413).
    renamed = {413: "Content Too Large", 422: "Unprocessable Content"}
    return renamed.get(status) or HTTPStatus(status).phrase


def _path(location: Sequence[Any]) -> str:
    if location[0] == "query":  # a parameter, even if repeated
        return str(location[1])
    return ".".join(str(part) for part in location[1:]) or str(location[0])


def sentence(message: str) -> str:
    """Return a pydantic message in plain words."""
    text = message.removeprefix("Value error, ")
    for pattern, words in _REWORDED:
        if match := pattern.fullmatch(text):
            return match.expand(words)
    return text


_REWORDED = tuple(  # pydantic's messages; the first match counts
    (re.compile(pattern), words)
    for pattern, words in (
        (r"String should have at least 1 character", "must not be empty"),
        (r"Field required", "is missing"),
        (r"Extra inputs are not permitted", "is not known here"),
        (r"Input should be a valid integer.*", "must be a whole number"),
        (r"Input should be a valid number.*", "must be a number"),
        (r"Input should be a valid boolean.*", "must be true or false"),
        (r"Input should be a valid string", "must be text"),
        (r"Input should be a valid (?:dictionary|object).*", "must be a JSON object"),
        (r"Input should be a valid (?:list|tuple|array)", "must be a list"),
        (r"(?:List|Set) should have at most (\d+) items? after validation.*", r"must have at most \1 values"),
        (r"String should match pattern '\^\[\^=.*'", "must be like name=value"),
        (r"String should match pattern '(.*)'", r"must have the form \1"),
        (r"(?:Input|String|List|Tuple|Dictionary) should (.*)", r"must \1"),
    )
)
