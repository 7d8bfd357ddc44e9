"""The exceptions by which a command fails: one for each exit code.

The codes are part of the command line's contract; `trainmedic_core.command.EXIT_CODES` is their help text.
"""

from __future__ import annotations

import click

from trainmedic_core.plain_text import visible


class CommandError(click.ClickException):
    """The base of all. What a server or file has put into its message does not steer the terminal."""

    def format_message(self) -> str:
        return visible(self.message, keep="\n")


class Failure(CommandError):
    """A check or test failed, or the server refused the request."""

    exit_code = 1


class InvalidInput(CommandError):
    """A flag, argument, file or setting is wrong."""

    exit_code = 2


class Unreachable(CommandError):
    """The server cannot be reached, or cannot serve now."""

    exit_code = 3


class NoAnswerYet(Unreachable):
    """The server has taken longer than a client waits."""


class NotAllowed(CommandError):
    """The token is missing, unknown or not allowed to do that."""

    exit_code = 4


class UnknownName(CommandError):
    """There is nothing of that name."""

    exit_code = 5
