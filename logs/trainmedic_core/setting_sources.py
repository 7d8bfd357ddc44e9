"""Where a setting's value comes from: a flag, which wins, an environment variable, or a file for a secret.

Who calls it: ``server`` and ``agent``, which define the settings.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from trainmedic.errors import ConfigurationError
from trainmedic.settings import is_withdrawn

PREFIX = "TRAINMEDIC_"


class SettingSource(Struct, frozen=True):
    """The environment variable of a setting, and its flag where it has one.

    ``value`` is the placeholder for the flag's value in the help. A ``secret`` is never shown, and can be read
    from the file that ``<variable>_FILE`` names. A ``repeatable`` setting takes several values: its flag can
    be repeated, and its variable separates them by a colon, as ``PATH`` does. A ``family`` takes every variable
    that begins with ``variable``. One that ``can_be_withdrawn`` is not set where its file is gone or empty.
    ``shown_default`` is the default in the documentation, where it is not the field's own. A setting that
    ``has_file`` can be read from a file as a secret can, and is shown.
    """

    variable: str
    flag: str | None = None
    value: str = "TEXT"
    secret: bool = False
    repeatable: bool = False
    family: bool = False
    shown_default: str | None = None
    can_be_withdrawn: bool = False
    has_file: bool = False

    @property
    def can_be_a_file(self) -> bool:
        """Whether ``<variable>_FILE`` may name a file that holds the value."""
        return self.secret or self.has_file


def read(source: SettingSource, flag: Any, environ: Mapping[str, str]) -> tuple[Any, str] | None:
    """The value of a setting, and the flag or variable that it came from; None where it is not set.

    `flag` is None or an empty tuple where the flag is absent. An empty variable counts as unset. Raises
    ConfigurationError.
    """
    if source.family:
        # A member that ends in _FILE stays a path: its user reads the file each time, so that it can be renewed.
        members = {name: value for name, value in environ.items() if name.startswith(source.variable) and value}
        return (members, source.variable) if members else None
    if flag is not None and flag != ():
        return flag, source.flag or source.variable
    text, file = environ.get(source.variable), environ.get(f"{source.variable}_FILE") if source.can_be_a_file else None
    if text and file:
        raise ConfigurationError(f"{source.variable} and {source.variable}_FILE are both set; keep one of them")
    if file and source.can_be_withdrawn and is_withdrawn(file):
        return None
    if file:
        return _read_file(f"{source.variable}_FILE", file), f"{source.variable}_FILE"
    if not text:
        return None
    if source.variable == "TRAINMEDIC_PORT" and text.startswith("tcp://"):
        # Kubernetes sets this in every pod beside a Service that is called trainmedic.
        return None
    return (tuple(filter(None, text.split(os.pathsep))) if source.repeatable else text), source.variable


def without_empty(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The variables that are set: an empty one counts as unset."""
    return {name: value for name, value in environ.items() if value}


def _read_file(variable: str, file: str) -> str:
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8").strip(" \t\r\n\f\v")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigurationError(f"{variable}: cannot read {file}: {reason}") from error
    if not text:
        raise ConfigurationError(f"{variable}: {file} is empty")
    return text


def misspelt(
    environ: Mapping[str, str], sources: Collection[SettingSource], of_other_programs: Collection[str]
) -> list[tuple[str, str]]:
    """Variables with our prefix that are never read, each with the most similar one that is."""
    variables = {source.variable for source in sources} | set(of_other_programs)
    variables |= {f"{source.variable}_FILE" for source in sources if source.can_be_a_file}
    families = tuple(source.variable for source in sources if source.family)
    unread = sorted(
        name for name in environ if name.startswith(PREFIX) and name not in variables and not name.startswith(families)
    )
    nearest = [(name, difflib.get_close_matches(name, variables, n=1, cutoff=0.85)) for name in unread]
    return [(name, close[0]) for name, close in nearest if close]
