"""Terms of the playbook language that need no pydantic."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """The most a run may do. The stricter of the server's and the playbook's applies."""

    OBSERVE = "observe"
    APPROVE = "approve"
    ENFORCE = "enforce"

    @classmethod
    def stricter(cls, first: Mode, second: Mode) -> Mode:
        return min(first, second, key=_BY_STRICTNESS.index)


_BY_STRICTNESS = tuple(Mode)


class UndoTrigger(StrEnum):
    """When an action is reverted automatically."""

    NEVER = "never"
    ON_RESOLVE = "on_resolve"
    ON_FAILURE = "on_failure"
