"""FastAPI's router, with ASCII JSON as the default response."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from fastapi.params import Depends

from trainmedic_server.http.ascii_json import AsciiJson


class ApiRoutes(APIRouter):
    def __init__(self, tag: str, dependencies: Sequence[Depends] | None = None) -> None:
        super().__init__(tags=[tag], dependencies=dependencies, default_response_class=AsciiJson)
