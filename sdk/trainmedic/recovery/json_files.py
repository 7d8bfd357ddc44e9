from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Callable, TypeVar

log = logging.getLogger("trainmedic")

Value = TypeVar("Value")

_INVALID = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


def read_or_warn(file: Path | None, parse: Callable[[Any], Value], otherwise: Value, warning: str) -> Value:
    """Return the parsed content, else ``otherwise``; an unreadable file is logged."""
    if file is None:
        return otherwise
    try:
        return parse(json.loads(file.read_bytes()))
    except FileNotFoundError:
        return otherwise
    except (OSError, *_INVALID) as error:
        log.warning(warning, file, error)
        return otherwise
