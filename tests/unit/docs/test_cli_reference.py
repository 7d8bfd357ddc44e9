"""The command line's reference is complete."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from trainmedic_core.command import EXIT_CODES, main

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
# Said once for all at the top of the page, or in the reference of settings.
EVERYWHERE = {"--help", "-h", "--version"}
IN_SETTINGS = {
    "trainmedic serve",
    "trainmedic agent",
    "trainmedic agent check",
    "trainmedic agent forget",
    "trainmedic agent release",
}


def commands(command: click.Command, path: tuple[str, ...] = ("trainmedic",)) -> Iterator[tuple[str, click.Command]]:
    """Every command with the words that call it."""
    yield " ".join(path), command
    if isinstance(command, click.Group):
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            inner = command.get_command(ctx, name)
            assert inner is not None
            yield from commands(inner, (*path, name))


COMMANDS = dict(commands(main))


@pytest.mark.parametrize(
    "words", [words for words, command in COMMANDS.items() if not isinstance(command, click.Group)]
)
def test_every_command_is_in_the_reference(words: str) -> None:
    """It stands with the words that call it."""
    assert f"`{words}" in PAGE


@pytest.mark.parametrize("words", [words for words in COMMANDS if words not in IN_SETTINGS])
def test_every_option_is_in_the_reference(words: str) -> None:
    """Those of ``serve`` and ``agent`` are in the settings reference, which its own test keeps complete."""
    options = {name for parameter in COMMANDS[words].params for name in parameter.opts if name.startswith("-")}
    missing = [name for name in options - EVERYWHERE if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", PAGE)]
    assert not missing


def test_every_exit_code_is_in_the_reference() -> None:
    """It has the same words as in the help."""
    for code, meaning in re.findall(r"^  (\d)  (.+)$", EXIT_CODES, re.MULTILINE):
        assert f"| {code} | {meaning} |" in PAGE
