"""Router for routes with a token and ASCII JSON. It refuses unknown and repeated query parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any, get_args, get_origin

from fastapi import APIRouter, Request
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import get_parameterless_sub_dependant
from fastapi.params import Depends
from fastapi.routing import APIRoute
from fastapi.types import DecoratedCallable
from msgspec import Struct
from pydantic import BaseModel

from trainmedic_core.problems import cut, did_you_mean
from trainmedic_server.auth.auth import Authenticator, requires
from trainmedic_server.auth.tokens import TokenRole
from trainmedic_server.errors import PayloadError
from trainmedic_server.http.ascii_json import AsciiJson
from trainmedic_server.http.body import BodyReader
from trainmedic_server.http.limits import ServerLimits
from trainmedic_server.http.problems import responses
from trainmedic_server.http.read_turns import ReadTurns
from trainmedic_server.ports.outside import Clock

_PROBLEMS_REPORTED = 20


class RouteParts(Struct, frozen=True):
    auth: Authenticator
    bodies: BodyReader
    clock: Clock
    limits: ServerLimits
    reads: ReadTurns  # of the history


class ApiRoutes(APIRouter):
    def __init__(self, tag: str, auth: Authenticator) -> None:
        super().__init__(
            tags=[tag],
            default_response_class=AsciiJson,
            route_class=_StrictRoute,
            responses=responses(401, 403, 422, 503),
        )
        self.viewer = requires(auth, TokenRole.VIEWER)
        self.operator = requires(auth, TokenRole.OPERATOR)
        self.body_models: list[type[BaseModel]] = []  # FastAPI does not document them

    def read(self, path: str, *refusals: int, **options: Any) -> Callable[[DecoratedCallable], DecoratedCallable]:
        """Declare a GET for viewers. `refusals`: its further statuses."""
        options["responses"] = {**options.get("responses", {}), **responses(*refusals)}
        return self.get(path, dependencies=[Depends(self.viewer)], **options)

    def act(
        self, path: str, body: type[BaseModel], *refusals: int, **options: Any
    ) -> Callable[[DecoratedCallable], DecoratedCallable]:
        """Declare a POST for operators. Its handler reads `body`, which may be absent."""
        self.body_models.append(body)
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        is_required = any(field.is_required() for field in body.model_fields.values())
        request = {"required": is_required, "content": {"application/json": {"schema": schema}}}
        options["responses"] = responses(400, 408, 413, 415, *refusals)
        return self.post(path, dependencies=[Depends(self.operator)], openapi_extra={"requestBody": request}, **options)


class _StrictRoute(APIRoute):
    def __init__(self, path: str, *args: Any, **options: Any) -> None:
        super().__init__(path, *args, **options)
        parameters = list(_parameters(self.dependant))
        known = tuple(parameter.alias for parameter in parameters)
        single = {each.alias for each in parameters if not _is_list(each.field_info.annotation)}

        async def check(request: Request) -> None:
            refuse_unknown(request.query_params, known)
            given = Counter(name for name, _ in request.query_params.multi_items() if name in single)
            # Only the last would count.
            if repeated := [
                (name, "takes one value, and is given more than once") for name in given if given[name] > 1
            ]:
                raise PayloadError.at(repeated)

        # As the last dependency, so that it follows authentication.
        self.dependant.dependencies.append(get_parameterless_sub_dependant(depends=Depends(check), path=path))


def refuse_unknown(names: Iterable[str], known: Collection[str]) -> None:
    """Raise PayloadError for unknown query parameters: without a misspelled filter, everything would match."""
    unknown = [name for name in names if name not in known]
    if not unknown:
        return
    listed = f"; known are: {', '.join(sorted(known))}" if known else "; this call takes no query parameters"
    raise PayloadError.at(
        [
            (cut(name) or "''", f"is not known here{did_you_mean(name, known) or listed}")
            for name in unknown[:_PROBLEMS_REPORTED]
        ]
    )


def _parameters(dependant: Dependant) -> Iterable[Any]:
    yield from dependant.query_params
    for each in dependant.dependencies:
        yield from _parameters(each)


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is list or any(map(_is_list, get_args(annotation)))
