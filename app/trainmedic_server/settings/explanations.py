"""Says in our words what is wrong with a setting. Who calls it: ``server``, where pydantic has refused a value."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from trainmedic_core.setting_sources import SettingSource


def explain(
    error: ValidationError, values: Mapping[str, Any], origins: Mapping[str, str], sources: Mapping[str, SettingSource]
) -> Iterator[str]:
    """A line for each value that is wrong, in the words of our messages rather than pydantic's."""
    for detail in error.errors(include_url=False, include_context=False):
        message = re.sub(r"^(Value error|Assertion failed), ", "", detail["msg"])
        message = re.sub(r"^Input should be ", "must be ", message)
        name = str(detail["loc"][0]) if detail["loc"] else ""
        if name not in origins:
            yield message
        elif sources[name].secret or _may_hold_a_password(values[name]):
            yield f"{origins[name]}: {message}"
        else:
            yield f"{origins[name]}: {_shown(values[name])}: {message}"


def _may_hold_a_password(value: Any) -> bool:
    """Return whether it looks like a URL with a user, even in a setting that takes no URL."""
    text = str(value)
    return "://" in text and "@" in text


def _shown(value: Any) -> str:
    return repr(os.pathsep.join(map(str, value))) if isinstance(value, tuple) else repr(str(value))
