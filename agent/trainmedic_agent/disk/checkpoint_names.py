from __future__ import annotations

import re

_NAME = re.compile(
    r"(?:tmp-)?(?:checkpoint|ckpt|global_?step|step|iter|iteration|epoch)[-_=]?\d.*|.+\.ckpt", re.IGNORECASE
)
_STEP = re.compile(r"step[-_=]?(\d{1,18})", re.IGNORECASE)
_NUMBER = re.compile(r"\d{1,18}")


def is_name_of_checkpoint(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def step_of(name: str) -> int | None:
    """Return the number after "step", or the first number."""
    if (match := _STEP.search(name)) is not None:
        return int(match[1])
    return int(match[0]) if (match := _NUMBER.search(name)) is not None else None
