"""Query parameters that several routes share."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, TypeVar

from fastapi import Query
from pydantic import Field

from trainmedic_server.http.problems import HttpProblem

Name = Annotated[str, Query(min_length=1, max_length=1000, pattern=r"^[^\x00]*$")]
MOST_VALUES = 20
Value = TypeVar("Value")
Few = Annotated[list[Value], Field(max_length=MOST_VALUES)]
Names = Few[Name] | None
"""Any of these matches. A route adds its meaning: ``Annotated[Names, Query(description=…)]``."""
PageLimit = Annotated[int, Query(ge=1, le=1000, description="Items of a page.")]
PageCursor = Annotated[str | None, Query(max_length=1000, description="`next` of the page before.")]


@contextmanager
def cursor_checked() -> Iterator[None]:
    try:
        yield
    except ValueError:
        message = "is not a cursor of this server"
        raise HttpProblem(422, f"cursor: {message}", problems=[("cursor", message)]) from None


async def all_items(
    page_after: Callable[[str | None], Awaitable[tuple[Sequence[Value], str | None]]],
) -> AsyncGenerator[Value, None]:
    cursor = None
    while True:
        page, cursor = await page_after(cursor)
        for item in page:
            yield item
        if cursor is None:
            return
