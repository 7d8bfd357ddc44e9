from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Callable


class ModelHook:
    # A hook of the user's model. Its copies, also pickled ones, do nothing and need no Trainmedic.

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")
