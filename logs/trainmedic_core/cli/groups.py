"""Options before a subcommand of a group that is itself a command, such as ``history``."""

from __future__ import annotations

from typing import Any

import click

_TYPED = click.core.ParameterSource.COMMANDLINE


def typed_before(ctx: click.Context, option: str) -> Any:
    """Return an option's value if typed only before the subcommand (``history --server URL show RUN``), else None."""
    if ctx.parent is None or ctx.get_parameter_source(option) is _TYPED:
        return None
    return ctx.parent.params.get(option) if ctx.parent.get_parameter_source(option) is _TYPED else None


def refuse_options(about: str, *but: str) -> None:
    """Raise UsageError for options before a subcommand, except server, token and `but`."""
    ctx = click.get_current_context()
    for param in ctx.command.params:
        if ctx.get_parameter_source(param.name or "") is _TYPED and param.name not in ("server", "token", *but):
            raise click.UsageError(f"{param.opts[0]} is for {about}; omit it before {ctx.invoked_subcommand}")
