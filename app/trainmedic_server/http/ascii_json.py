"""JSON in ASCII, so that external text cannot control a terminal by U+0080 to U+009F or direction marks."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from starlette.responses import JSONResponse

from trainmedic_core.plain_text import json_bytes


class AsciiJson(JSONResponse):
    @classmethod
    def of(cls, model: BaseModel, exclude_unset: bool = False) -> AsciiJson:
        return cls(model.model_dump(mode="json", exclude_unset=exclude_unset))

    def render(self, content: Any) -> bytes:
        return json_bytes(content)
