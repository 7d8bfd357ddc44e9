"""The routes of one part of the API: FastAPI's router, whose answers are ``ascii_json``.

Who calls it: the modules that declare routes; the factory puts the routes of all of them into the application.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from fastapi.params import Depends

from trainmedic_server.http.ascii_json import AsciiJson


class ApiRoutes(APIRouter):
    """The routes under one heading of the API's documentation, `tag`, to all of which `dependencies` apply."""

    def __init__(self, tag: str, dependencies: Sequence[Depends] | None = None) -> None:
        super().__init__(tags=[tag], dependencies=dependencies, default_response_class=AsciiJson)
