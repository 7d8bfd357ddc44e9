"""Two words of the playbook language that runs and ports use too; so they are apart from its pydantic models."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """What a run may do. The stricter of the server's and the playbook's is used."""

    OBSERVE = "observe"
    APPROVE = "approve"
    ENFORCE = "enforce"

    @classmethod
    def stricter(cls, first: Mode, second: Mode) -> Mode:
        return min(first, second, key=_BY_STRICTNESS.index)


_BY_STRICTNESS = tuple(Mode)


class UndoTrigger(StrEnum):
    """When an applied action is taken back by itself. By hand it always can be."""

    NEVER = "never"
    ON_RESOLVE = "on_resolve"
    ON_FAILURE = "on_failure"
