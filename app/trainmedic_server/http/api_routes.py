"""FastAPI's router, with ASCII JSON as the default response. It refuses unknown query parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import get_parameterless_sub_dependant
from fastapi.params import Depends
from fastapi.routing import APIRoute

from trainmedic_core.problems import cut, did_you_mean
from trainmedic_server.errors import PayloadError
from trainmedic_server.http.ascii_json import AsciiJson
from trainmedic_server.http.problems import responses

_PROBLEMS_REPORTED = 20


class ApiRoutes(APIRouter):
    def __init__(
        self, tag: str, dependencies: Sequence[Depends] | None = None, *, takes_any_query: bool = False
    ) -> None:
        super().__init__(
            tags=[tag],
            dependencies=dependencies,
            default_response_class=AsciiJson,
            route_class=APIRoute if takes_any_query else _StrictRoute,
            responses=None if takes_any_query else responses(HTTPStatus.UNPROCESSABLE_ENTITY),
        )


class _StrictRoute(APIRoute):
    def __init__(self, path: str, *args: Any, **options: Any) -> None:
        super().__init__(path, *args, **options)
        known = tuple(_parameters(self.dependant))

        async def check(request: Request) -> None:
            refuse_unknown(request.query_params, known)

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


def _parameters(dependant: Dependant) -> Iterable[str]:
    yield from (parameter.alias for parameter in dependant.query_params)
    for each in dependant.dependencies:
        yield from _parameters(each)
