"""The exceptions by which a command fails: one for each exit code.

The codes are part of the command line's contract; `trainmedic_server.cli.EXIT_CODES` is their help text.
"""

from __future__ import annotations

import click


class Failure(click.ClickException):
    """A check or test failed, or the server refused the request."""

    exit_code = 1


class InvalidInput(click.ClickException):
    """A flag, argument, file or setting is wrong."""

    exit_code = 2


class Unreachable(click.ClickException):
    """The server cannot be reached, or cannot serve now."""

    exit_code = 3


class NotAllowed(click.ClickException):
    """The token is missing, unknown or not allowed to do that."""

    exit_code = 4


class UnknownName(click.ClickException):
    """There is nothing of that name."""

    exit_code = 5
