from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any

import click

from trainmedic_core.cli import groups
from trainmedic_core.cli.choice import NearestChoice
from trainmedic_core.plain_text import json_text


def output_option(text: str = "text") -> Callable[[Any], Any]:
    choices = [text, "json"]

    # A command also takes its group's value (``jobs --output json end``).
    def or_of_group(ctx: click.Context, param: click.Parameter, value: str) -> str:
        typed = groups.typed_before(ctx, "output")
        if typed in (None, "table", "text"):
            return value
        if typed not in choices:
            raise click.UsageError(f"{ctx.info_name} has no --output {typed}; use {' or '.join(choices)}")
        return str(typed)

    return click.option("--output", type=NearestChoice(choices), default=text, show_default=True, callback=or_of_group)


def with_options(options: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Return a decorator that adds the options in this order."""
    return lambda command: reduce(lambda under, option: option(under), reversed(options), command)


def print_document(document: Any, output: str, lines: Callable[[Any], Iterable[str]]) -> None:
    for line in [json_text(document, indent=2)] if output == "json" else lines(document):
        click.echo(line)
