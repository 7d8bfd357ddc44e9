"""Settings of the log reader, none of them secret."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from trainmedic.errors import ConfigurationError
from trainmedic_agent.settings import agent
from trainmedic_core import setting_sources

NAMES = ("state_dir", "reader_user", "reader_memory", "log_level")


class ReaderSettings(Struct, frozen=True):
    state_dir: Path
    reader_user: str | None
    reader_memory: int  # bytes
    log_level: str


def load(flags: Mapping[str, Any], environ: Mapping[str, str]) -> ReaderSettings:
    """Raises ConfigurationError with all errors."""
    values: dict[str, Any] = {}
    faults: list[str] = []
    for name in NAMES:
        setting = agent.SETTINGS[name]
        value = setting_sources.read(setting.source, flags.get(name), environ)
        try:
            values[name] = setting.default() if value is None else setting.read(str(value[0]))
        except ValueError as error:
            faults.append(f"{value[1] if value is not None else name}: {error}")
    if faults:
        raise ConfigurationError("\n".join(faults))
    return ReaderSettings(**values)
