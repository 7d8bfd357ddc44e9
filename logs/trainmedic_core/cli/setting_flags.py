from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from trainmedic_core.setting_sources import SettingSource


def setting_flag(
    name: str, source: SettingSource, description: str, default: str, choices: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the setting's flag."""
    # The settings, not the flag, have the default and read the variable.
    if source.flag is None:
        return lambda command: command
    variable = source.variable + (", _FILE" if source.can_be_a_file else "")
    return click.option(
        source.flag,
        name,
        metavar=source.value,
        multiple=source.repeatable,
        # The log reader may traverse the state directory but not list it.
        type=click.Path(readable=source.value != "DIR") if source.value in ("DIR", "FILE") else str,
        shell_complete=(lambda ctx, param, begun: [c for c in choices if c.startswith(begun)]) if choices else None,
        help=f"{description}  [{variable}; default: {default}]",
    )
