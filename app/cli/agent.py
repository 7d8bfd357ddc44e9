"""``trainmedic agent``: the node agent as a process, and its check. What it is made of is in ``wiring.agent``."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from typing import Any

import click

from app.agent import logs
from app.cli import exits
from app.errors import ConfigurationError, TrainmedicError
from app.settings import agent as settings
from app.wiring import agent as wiring

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _flags(command: Callable[..., None]) -> Callable[..., None]:
    """A flag for each setting that has one. Reading the environment is left to `settings.load`."""
    for name, spec in reversed(list(settings.SPECS.items())):
        option = spec.option
        if option.flag is None:
            continue
        variable = option.variable + (", _FILE" if option.secret else "")
        command = click.option(
            option.flag,
            name,
            metavar=option.value,
            type=click.Path() if option.value in ("DIR", "FILE") else str,
            help=f"{spec.description}  [{variable}; default: {option.shown_default}]",
        )(command)
    return command


@click.group(invoke_without_command=True)
@_flags
@click.pass_context
def agent(ctx: click.Context, /, **flags: Any) -> None:
    """Run the agent of this node, or check what it would do.

    Every flag is an environment variable too, which the flag wins over. Log lines, JSON, go to standard error.
    SIGTERM and SIGINT stop it cleanly: what runs has some seconds to end, and what does not is resumed at the
    next start. A second signal ends it at once, which loses nothing either.
    """
    if ctx.invoked_subcommand is not None:
        ctx.obj = flags
        return
    try:
        made = settings.load(flags, os.environ)
        logs.configure(made.log_level)
        for wrong, right in settings.misspelt(os.environ):
            log.warning("the variable %s is unknown; is %s meant?", wrong, right)
        # Waited for instead of handled: no handler then ever meets a lock that the code under it holds.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        wiring.run(made, _wait_for_a_signal)
    except ConfigurationError as error:
        raise exits.Unusable(str(error)) from error
    except TrainmedicError as error:
        raise exits.Unreachable(f"The agent cannot start: {error}") from error


def _wait_for_a_signal() -> None:
    """Until SIGTERM or SIGINT; the next one then does what it does by default."""
    signal.sigwait(_SIGNALS)
    log.info("stopping")
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
