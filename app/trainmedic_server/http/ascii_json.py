"""JSON in ASCII: the same data, in which no text from outside steers a terminal that shows it.

JSON escapes control characters up to U+001F by itself, but not those up to U+009F, nor the marks that reverse the
direction of text. Who calls it: the factory makes it the response of every route; ``history`` renders by it.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from starlette.responses import JSONResponse

from trainmedic_core.plain_text import json_bytes


class AsciiJson(JSONResponse):
    """A response whose content is rendered as JSON in ASCII."""

    @classmethod
    def of(cls, model: BaseModel, exclude_unset: bool = False) -> AsciiJson:
        return cls(model.model_dump(mode="json", exclude_unset=exclude_unset))

    def render(self, content: Any) -> bytes:
        return json_bytes(content)
