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
    """Environment variable and flag of a setting."""

    variable: str
    flag: str | None = None
    value: str = "TEXT"  # placeholder in the help
    secret: bool = False  # never shown, and can be read from the file in `<variable>_FILE`
    repeatable: bool = False  # the variable separates values by colons, as `PATH` does
    family: bool = False  # all variables that begin with `variable`
    shown_default: str | None = None  # documented default, if it differs from the field's
    can_be_withdrawn: bool = False  # unset if its file is missing or empty
    has_file: bool = False  # can be read from a file like a secret, but is shown

    @property
    def can_be_a_file(self) -> bool:
        return self.secret or self.has_file


def read(source: SettingSource, flag: Any, environ: Mapping[str, str]) -> tuple[Any, str] | None:
    """Return the value and its flag or variable, None if not set. Raises ConfigurationError."""
    if source.family:
        # A member that ends in _FILE stays a path: its user rereads the file, to support rotation.
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
        # Kubernetes sets this in every pod if a Service is named trainmedic.
        return None
    return (tuple(filter(None, text.split(os.pathsep))) if source.repeatable else text), source.variable


def without_empty(environ: Mapping[str, str]) -> Mapping[str, str]:
    return {name: value for name, value in environ.items() if value}


def expanded(path: str | Path) -> Path:
    """Replace ``~``. Raises ValueError for an unknown user's."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"there is no home directory {Path(path).parts[0]}; write the whole path") from None


def paths_in(text: str) -> list[Path]:
    """Return the paths of a variable like ``PATH``."""
    # The ``~`` of an unknown user stays: there is no such file.
    return [Path(os.path.expanduser(part)) for part in text.split(os.pathsep) if part]  # noqa: PTH111


def unreadable_file(setting: str, path: str | Path, error: Exception) -> str:
    """Return an error's text with the setting that names the file, the reason, and what to do."""
    reason = str(error)
    if isinstance(error, OSError):
        reason = error.strerror or type(error).__name__
    elif isinstance(error, UnicodeDecodeError):
        reason = "not UTF-8 text"
    return f"{setting}: cannot read {path}: {reason}; name a text file that user {os.geteuid()} can read"


def read_text(setting: str, path: Path) -> str:
    """Return the text of the file that `setting` names. Raises ConfigurationError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(unreadable_file(setting, path, error)) from error


def _read_file(variable: str, file: str) -> str:
    try:
        text = expanded(file).read_text(encoding="utf-8").strip(" \t\r\n\f\v")
    except (OSError, ValueError) as error:
        raise ConfigurationError(unreadable_file(variable, file, error)) from error
    if not text:
        raise ConfigurationError(f"{variable}: {file} is empty; write the value into it, or unset {variable}")
    return text


def misspelt(
    environ: Mapping[str, str], sources: Collection[SettingSource], of_other_programs: Collection[str]
) -> list[tuple[str, str]]:
    """Return unread variables with our prefix that resemble a known one, each with this one."""
    variables = {source.variable for source in sources} | set(of_other_programs)
    variables |= {f"{source.variable}_FILE" for source in sources if source.can_be_a_file}
    families = tuple(source.variable for source in sources if source.family)
    unread = sorted(
        name for name in environ if name.startswith(PREFIX) and name not in variables and not name.startswith(families)
    )
    nearest = [(name, difflib.get_close_matches(name, variables, n=1, cutoff=0.85)) for name in unread]
    return [(name, close[0]) for name, close in nearest if close]
