"""The flag of a setting, for the commands that run a process: ``serve`` and ``agent``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from trainmedic_core.setting_sources import SettingSource


def setting_flag(
    name: str, source: SettingSource, description: str, default: str, choices: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that gives a command the setting's flag, or nothing where the setting has none.

    The flag reads no environment variable and has no default; both are left to the settings, which its help
    names. A shell completes `choices`, and paths.
    """
    if source.flag is None:
        return lambda command: command
    variable = source.variable + (", _FILE" if source.secret else "")
    return click.option(
        source.flag,
        name,
        metavar=source.value,
        multiple=source.repeatable,
        # A reader of logs may pass through the state directory, and not list it.
        type=click.Path(readable=source.value != "DIR") if source.value in ("DIR", "FILE") else str,
        shell_complete=(lambda ctx, param, begun: [c for c in choices if c.startswith(begun)]) if choices else None,
        help=f"{description}  [{variable}; default: {default}]",
    )
