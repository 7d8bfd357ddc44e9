"""Action ``http.request``.

In the URL, alerts may only fill a path segment or a query value (`HttpRequest.check_template`). Secrets are named by
variables, and not part of parameters or outputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Literal, cast
from urllib.parse import quote, unquote, urlencode, urlsplit

import jinja2
from jinja2 import nodes
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    WithJsonSchema,
    model_validator,
)

from trainmedic.wire.reading import read_json
from trainmedic_server.actions.base import BasicAction, Irreversible, refuse_templates
from trainmedic_server.domain.value_types import ANY, BOOLEAN, NUMBER, TEXT, Shape
from trainmedic_server.errors import OutcomeUnknown, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.actions import Action, Call
from trainmedic_server.ports.outside import HttpAccess, HttpReply

KEPT_HEADERS = ("content-length", "content-type", "date", "etag", "retry-after", "x-request-id")
"""Other headers may contain cookies or signed URLs."""

_SECRET_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie"})  # only in `headers_from_env`
_OWN_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection", "upgrade", "idempotency-key"})
_REFERENCES = (  # parameters that name variables of the server
    *("bearer_from_env", "headers_from_env", "basic_auth"),
    *("certificate_from_env", "ca_from_env", "socket_from_env"),
)
_TOKEN = re.compile(r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")  # RFC 9110, section 5.6.2
_STATUSES = re.compile(r"^(?:([1-5])xx|([1-5]\d\d)(?:-([1-5]\d\d))?)$")
MAY_PASS = frozenset({408, 425, 429})  # client errors after which a repeat may succeed
GATEWAY_LOST_ANSWER = frozenset({502, 504})  # of a gateway: the effect is unknown (RFC 9110, 15.6.3 and 15.6.5)


def safe_url(text: str) -> str:
    """Reject a URL that could lead elsewhere than it appears to. Errors omit it: it may contain a password."""
    if re.search(r"[\x00-\x20\x7f\\]", text):
        raise ValueError("a URL has no spaces, control characters or backslashes")
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https"):
        raise ValueError("a URL begins with http:// or https://")
    if "@" in parts.netloc:
        raise ValueError(
            "a user name or password in a URL would be kept in the history; use bearer_from_env or basic_auth"
        )
    if not parts.hostname:
        raise ValueError("the URL names no host")
    if parts.port == 0:
        raise ValueError("the URL's port is 0")
    if "#" in text:
        raise ValueError("a URL that is called has no fragment (#)")
    if any(unquote(segment) in (".", "..") for segment in parts.path.split("/")):
        raise ValueError("the URL's path has a '.' or '..' segment")
    return text


def _check_header_name(name: str) -> None:
    if not _TOKEN.fullmatch(name):
        raise ValueError(f"{name!r} is not a header name")
    if name.lower() in _SECRET_HEADERS:
        raise ValueError(f"header {name} would be kept in the history; use headers_from_env or bearer_from_env")
    if name.lower() in _OWN_HEADERS:
        raise ValueError(f"header {name} is set by Trainmedic")


def _check_headers(headers: dict[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        _check_header_name(name)
        if re.search(r"[\x00-\x08\x0a-\x1f\x7f]", value):
            raise ValueError(f"header {name} has a control character in its value")
    return headers


def _as_list(value: Any) -> Any:
    return [str(item) for item in (value if isinstance(value, (list, tuple)) else [value])]


def _check_statuses(statuses: tuple[str, ...]) -> tuple[str, ...]:
    for status in statuses:
        match = _STATUSES.fullmatch(status)
        if match is None or (match[3] is not None and match[3] < match[2]):
            raise ValueError(f"{status!r} is not a status or a range of them; write 204, 2xx or 200-204")
    return statuses


def _check_secret_headers(headers: dict[str, str]) -> dict[str, str]:
    for name in headers:
        if name.lower() not in _SECRET_HEADERS:
            _check_header_name(name)
    return headers


def _check_secret_name(name: str) -> str:
    if not re.fullmatch(r"TRAINMEDIC_HTTP_[A-Z0-9_]+", name):
        raise ValueError("name a variable of the server, which begins with TRAINMEDIC_HTTP_; it has the secret or path")
    return name


SecretName = Annotated[
    str,
    AfterValidator(_check_secret_name),
    WithJsonSchema({"type": "string", "pattern": "^TRAINMEDIC_HTTP_[A-Z0-9_]+$"}),
]
"""A variable of the server, or with ``_FILE`` appended the path of a file with the value."""


class BasicAuth(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    # Printable ASCII without the colon, which would end the user name.
    user: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[ -9;-~]+$")]
    password_from_env: SecretName


class HttpParams(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"] = Field(description="The HTTP method.")
    url: Annotated[str, Field(max_length=8192), AfterValidator(safe_url)] = Field(
        description="URL. Scheme and host are literal; an expression may only follow the host's '/', "
        "and ends in `| urlencode`. No user name or password."
    )
    query: dict[str, str] = Field(default_factory=dict, description="Query parameters; they are encoded.")
    headers: Annotated[dict[str, str], AfterValidator(_check_headers)] = Field(
        default_factory=dict, description="Request headers. Not for secrets: those of a playbook are in the history."
    )
    json_: JsonValue = Field(None, alias="json", description="Body, sent as JSON.")
    body: str | None = Field(None, description="Body, sent unchanged in UTF-8.")
    expect: Annotated[
        tuple[str, ...],
        Field(min_length=1),
        BeforeValidator(_as_list, json_schema_input_type=int | str | list[int | str]),
        AfterValidator(_check_statuses),
    ] = Field(("2xx",), description="Statuses that count as success: `204`, `2xx`, `200-204`, or a list of them.")
    idempotent: bool | None = Field(
        None,
        description="Whether the call may be repeated when its outcome is not known, because a repeat changes nothing "
        "or the service honours `Idempotency-Key`. By default true for GET, HEAD, PUT and DELETE.",
    )
    bearer_from_env: SecretName | None = Field(
        None,
        description="Environment variable of the server with the bearer token. The same name with "
        "`_FILE` is the path of a file with the token.",
    )

    headers_from_env: Annotated[dict[str, SecretName], AfterValidator(_check_secret_headers)] = Field(
        default_factory=dict, description="Headers with a secret: by header name, the variable that has the value."
    )
    basic_auth: BasicAuth | None = Field(None, description="User name, and the variable with the password.")
    certificate_from_env: SecretName | None = Field(
        None, description="Variable with the path of a PEM file: a client certificate and its key."
    )
    ca_from_env: SecretName | None = Field(
        None, description="Variable with the path of a PEM file: the only certificates to trust."
    )
    socket_from_env: SecretName | None = Field(
        None, description="Variable with the path of a UNIX socket, to which the call goes instead of the URL's host."
    )

    @model_validator(mode="after")
    def _has_no_contradiction(self) -> HttpParams:
        if self.body is not None and self.json_ is not None:
            raise ValueError("give json or body, not both")
        names = {name.lower() for name in self.headers_from_env}
        if sum([self.bearer_from_env is not None, self.basic_auth is not None, "authorization" in names]) > 1:
            raise ValueError("give one of bearer_from_env, basic_auth and a header Authorization")
        if twice := names & {name.lower() for name in self.headers}:
            raise ValueError(f"header {min(twice)} is in headers and in headers_from_env")
        return self

    @property
    def access(self) -> HttpAccess:
        basic = self.basic_auth
        return HttpAccess(
            self.headers_from_env,
            basic.user if basic else None,
            basic.password_from_env if basic else None,
            self.certificate_from_env,
            self.ca_from_env,
            self.socket_from_env,
        )

    @property
    def may_repeat(self) -> bool:
        if self.idempotent is not None:
            return self.idempotent
        return self.method in ("GET", "HEAD", "PUT", "DELETE")

    def expects(self, status: int) -> bool:
        for expected in self.expect:
            low, _, high = expected.replace("xx", "00").partition("-")
            last = int(low) + 99 if expected.endswith("xx") else int(high or low)
            if int(low) <= status <= last:
                return True
        return False

    @property
    def full_url(self) -> str:
        if not self.query:
            return self.url
        return f"{self.url}{'&' if '?' in self.url else '?'}{urlencode(self.query, quote_via=quote)}"


class HttpRequest(Irreversible, BasicAction):
    name: ClassVar[str] = "http.request"
    summary: ClassVar[str] = "Make one HTTP call."
    changes_elsewhere: ClassVar[bool] = True
    default_timeout: ClassVar[timedelta] = timedelta(seconds=10)
    Params: ClassVar[type[BaseModel]] = HttpParams
    outputs: ClassVar[Mapping[str, Shape]] = {
        "status": NUMBER,
        "headers": dict.fromkeys(KEPT_HEADERS, TEXT),
        "body": TEXT,
        "truncated": BOOLEAN,
        "json": ANY,
    }

    async def perform(self, call: Call) -> Mapping[str, Any]:
        params = cast(HttpParams, call.params)
        if call.resumed and not params.may_repeat:
            raise OutcomeUnknown("the call may have been made before, and is not declared idempotent")
        left = call.deadline - self.services.clock.now()
        if left <= timedelta(0):
            raise TemporaryFailure("no time was left to make the call")
        headers = {**params.headers, "Idempotency-Key": call.command_id}
        body = None if params.body is None else params.body.encode()
        if params.json_ is not None:
            body = json.dumps(params.json_).encode()
            if not any(name.lower() == "content-type" for name in headers):
                headers["Content-Type"] = "application/json"
        secret = params.bearer_from_env
        send = self.services.http.call
        reply = await send(params.method, params.full_url, headers, body, left, secret, params.access)
        return _output_of(params, reply)

    @classmethod
    def check_template(cls, raw: Mapping[str, Any]) -> None:
        """Raise ValueError if an alert could change the destination of the call or of a secret."""
        refuse_templates(raw, "method", *_REFERENCES)
        headers = raw.get("headers")
        for name in headers if isinstance(headers, dict) else ():
            _check_header_name(str(name))
        if isinstance(raw.get("url"), str):
            _check_url_template(raw["url"])


def _check_url_template(text: str) -> None:
    try:
        parts = jinja2.Environment(autoescape=True).parse(text).body
    except jinja2.TemplateSyntaxError:
        return  # The compiler of templates reports it, with its line.
    pieces: list[nodes.Node] = []
    for part in parts:
        if not isinstance(part, nodes.Output):
            raise ValueError("a URL has expressions ({{ … }}), not statements ({% … %})")
        pieces.extend(part.nodes)
    if len(pieces) == 1 and isinstance(pieces[0], nodes.TemplateData):
        safe_url(text)
        return
    first = pieces[0].data if pieces and isinstance(pieces[0], nodes.TemplateData) else ""
    if not re.match(r"^https?://[^/?#\s\\@]+/", first):
        raise ValueError(
            "the scheme and host of a URL are written out, so that no alert can change where the call goes: "
            "https://host/… before the first {{"
        )
    for piece in pieces:
        encoded = isinstance(piece, nodes.Filter) and piece.name == "urlencode"
        if not isinstance(piece, nodes.TemplateData) and not encoded:
            raise ValueError("an expression in a URL ends in '| urlencode', so that a value stays a value")


def _output_of(params: HttpParams, reply: HttpReply) -> Mapping[str, Any]:
    output: dict[str, Any] = {
        "status": reply.status,
        "headers": {name: reply.headers[name] for name in KEPT_HEADERS if name in reply.headers},
        "body": reply.body,
        "truncated": reply.is_cut,
    }
    if "json" in reply.headers.get("content-type", ""):
        try:
            output["json"] = read_json(reply.body.encode("utf-8", "replace"))
        except ValueError:  # Truncated, or not JSON despite the header.
            output["json"] = None
    if params.expects(reply.status):
        return output
    reason = (
        f"{params.method} {urlsplit(params.url).netloc} was answered {reply.status}, not {', '.join(params.expect)}"
    )
    if reply.status in GATEWAY_LOST_ANSWER and not params.may_repeat:
        raise OutcomeUnknown(f"{reason}; the service behind it may have acted", output)
    if reply.status >= 500 or reply.status in MAY_PASS:
        raise TemporaryFailure(reason, output)
    raise PermanentFailure(reason, output)


ACTIONS: tuple[type[Action], ...] = (HttpRequest,)
