"""``trainmedic playbook``: checking, explaining and testing playbooks, without a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from app.actions import registry
from app.catalog.library import Library
from app.catalog.schema import json_schema
from app.cli import exits

_paths = click.argument(
    "paths",
    metavar="[PATH]...",
    nargs=-1,
    type=click.Path(path_type=Path),
    envvar="TRAINMEDIC_PLAYBOOKS",
)


@click.group()
def playbook() -> None:
    """Check, explain and test playbooks, without a server.

    PATH is a file or a directory; without one it is TRAINMEDIC_PLAYBOOKS, else playbooks.
    """


@playbook.command()
@_paths
def check(paths: Sequence[Path]) -> None:
    """Check playbooks: each mistake is told with file, line and column.

    Ends with 1 where there is one.
    """
    library = _library(paths)
    for problem in library.problems:
        click.echo(str(problem))
    if library.problems:
        raise exits.Refused(_count(len(library.problems), "mistake"))
    click.echo(f"{_count(len(library.all()), 'playbook')}, no mistake.")


@playbook.command()
def schema() -> None:
    """Print the JSON Schema of the playbook language, for editors.

    \b
    trainmedic playbook schema > playbook.schema.json
    and on top of a playbook:
    # yaml-language-server: $schema=playbook.schema.json
    """
    click.echo(json.dumps(json_schema(registry.specs_only()), indent=2))


def _library(paths: Sequence[Path]) -> Library:
    """The playbooks at these paths, as a server would load them."""
    library = Library(paths or [Path("playbooks")], registry.specs_only())
    library.reload()
    return library


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
