"""Exceptions of commands, by public exit code."""

from __future__ import annotations

import click

from trainmedic_core.plain_text import visible


class CommandError(click.ClickException):
    """Escapes control characters in the message."""

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
    """The server took longer than the client waits."""


class NotAllowed(CommandError):
    """The token is missing, unknown or without the permission."""

    exit_code = 4


class UnknownName(CommandError):
    exit_code = 5
