"""Base classes of the API's models."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ApiModel(BaseModel):
    """Built on first use, so that a server starts sooner."""

    model_config = ConfigDict(defer_build=True)


class View(ApiModel):
    model_config = ConfigDict(from_attributes=True)
