"""The bases of the models in which the API shows what the server knows, and takes what it is told."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ApiModel(BaseModel):
    """Built when it is first used, so that a server starts sooner."""

    model_config = ConfigDict(defer_build=True)


class View(ApiModel):
    """A view is made from a domain value's attributes of the same names."""

    model_config = ConfigDict(from_attributes=True)
