from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any

import click

from trainmedic_core.cli.choice import NearestChoice
from trainmedic_core.plain_text import json_text


def output_option(text: str = "text") -> Callable[[Any], Any]:
    return click.option("--output", type=NearestChoice([text, "json"]), default=text, show_default=True)


def with_options(options: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Return a decorator that adds the options in this order."""
    return lambda command: reduce(lambda under, option: option(under), reversed(options), command)


def print_document(document: Any, output: str, lines: Callable[[Any], Iterable[str]]) -> None:
    for line in [json_text(document, indent=2)] if output == "json" else lines(document):
        click.echo(line)
