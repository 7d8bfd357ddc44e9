"""``trainmedic agent-reader``: the process that reads logs for the agent."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import click

from trainmedic.errors import ConfigurationError, TrainmedicError
from trainmedic_agent import own_log
from trainmedic_agent.settings import agent as agent_settings
from trainmedic_agent.settings import agent_reader as settings
from trainmedic_agent.wiring import agent_reader as wiring
from trainmedic_core.cli import exits
from trainmedic_core.cli.setting_flags import setting_flag


def _flags(command: Callable[..., None]) -> Callable[..., None]:
    for name in reversed(settings.NAMES):
        setting = agent_settings.SETTINGS[name]
        command = setting_flag(name, setting.source, setting.description, str(setting.source.shown_default))(command)
    return command


@click.command("agent-reader")
@_flags
@click.option(
    "--once", is_flag=True, help="Exit when the link to the agent ends; the agent then starts the next process."
)
def agent_reader(*, once: bool, **flags: Any) -> None:
    """Read logs for the agent of this node.

    The agent starts this process itself, unless it runs with --reader external. The process connects to reader.sock in
    the agent's state directory, from which it gets the logs to read. It has no signing key and no access to Redis. Only
    its part that opens files may have capabilities.
    """
    try:
        loaded = settings.load(flags, os.environ)
        own_log.configure(loaded.log_level)
        status = wiring.run(loaded, once=once)
    except ConfigurationError as error:
        raise exits.InvalidInput(str(error)) from error
    except TrainmedicError as error:
        raise exits.Unreachable(f"The log reader cannot start: {error}") from error
    sys.exit(status)
