"""The base of the models in which the API shows what the server knows."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class View(BaseModel):
    """A view is made from a domain value's attributes of the same names."""

    model_config = ConfigDict(from_attributes=True, defer_build=True)
