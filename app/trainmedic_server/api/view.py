"""Base classes of the API's models."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class ApiModel(BaseModel):
    """Built on first use, so that a server starts sooner."""

    model_config = ConfigDict(defer_build=True)


class View(ApiModel):
    model_config = ConfigDict(from_attributes=True)

    @classmethod
    def of(cls, source: object, /, **others: Any) -> Self:
        """Return the view with `others`, and for all further fields the attributes of `source`."""
        own = {name: getattr(source, name) for name in cls.model_fields if name not in others}
        return cls(**own, **others)
