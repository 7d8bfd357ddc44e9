"""Defaults and choices of the server's settings, for ``--help`` and the documentation."""

from __future__ import annotations

from datetime import timedelta
from typing import get_args

from trainmedic_core import duration
from trainmedic_server.domain.modes import Mode
from trainmedic_server.settings.server import SOURCES, ServerSettings
from trainmedic_server.settings.values import LogFormat, LogLevel


def default_of(name: str) -> str:
    source, value = SOURCES[name], ServerSettings.model_fields[name].default
    if source.shown_default is not None:
        return source.shown_default
    if value is None or value == {}:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return duration.write(value) if isinstance(value, timedelta) else str(value)


def choices_of(name: str) -> tuple[str, ...]:
    """Return the allowed values if they are a short list. Otherwise empty."""
    return {"mode": tuple(Mode), "log_level": get_args(LogLevel), "log_format": get_args(LogFormat)}.get(name, ())
