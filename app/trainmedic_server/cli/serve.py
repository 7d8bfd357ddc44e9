"""``trainmedic serve``."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import uvloop

from trainmedic_core.cli import exits
from trainmedic_core.cli.setting_flags import setting_flag
from trainmedic_core.problems import did_you_mean
from trainmedic_server import telemetry
from trainmedic_server.catalog import alert_map_roots
from trainmedic_server.domain.modes import Mode
from trainmedic_server.errors import ConfigurationError, TrainmedicError
from trainmedic_server.settings import server as settings
from trainmedic_server.settings import server_defaults
from trainmedic_server.wiring import interpreter
from trainmedic_server.wiring.server import TrainmedicServer

log = telemetry.logger(__name__)


def _flags(command: Callable[..., None]) -> Callable[..., None]:
    for name, source in reversed(list(settings.SOURCES.items())):
        description = settings.ServerSettings.model_fields[name].description or ""
        default, choices = server_defaults.default_of(name), server_defaults.choices_of(name)
        flag = setting_flag(name, source, description, default, choices)
        command = flag(command)
    return command


@click.command()
@_flags
def serve(**flags: Any) -> None:
    """Start the server.

    Every flag is also an environment variable, which the flag overrides. Logs go to standard error, as JSON unless it
    is a terminal. SIGTERM and SIGINT stop cleanly: active requests finish, and open runs continue at the next start. A
    second signal ends the process at once and loses nothing either.
    """
    try:
        loaded = settings.load(flags, os.environ)
        _check_paths(loaded, flags)
        readable = loaded.log_format == "text" or (loaded.log_format == "auto" and sys.stderr.isatty())
        telemetry.configure_logging(loaded.log_level.upper(), readable=readable)
        for wrong, right in settings.misspelt(os.environ):
            log.warning("unknown environment variable", variable=wrong, nearest=right)
        interpreter.tune()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(loaded))
    except ConfigurationError as error:
        raise exits.InvalidInput(str(error)) from error
    except TrainmedicError as error:
        raise exits.Unreachable(f"The server cannot start: {error}") from error


def _check_paths(loaded: settings.ServerSettings, flags: Mapping[str, Any]) -> None:
    """Raise ConfigurationError if a named path does not exist. An unreadable path can recover."""
    named = {
        "playbooks": loaded.playbooks,
        "log_rules": loaded.log_rules,
        "alert_map": alert_map_roots.roots(loaded.alert_map, {}),
    }
    problems = []
    for name in named.keys() & loaded.model_fields_set:
        origin = settings.SOURCES[name].flag if flags.get(name) else settings.SOURCES[name].variable
        shipped = alert_map_roots.shipped_names() if name == "alert_map" else ()
        missing = filter(_is_missing, named[name])
        problems += [
            f"{origin}: '{path}': there is no such file or directory{did_you_mean(str(path), shipped)}"
            for path in missing
        ]
    if problems:
        raise ConfigurationError("\n".join(sorted(problems)))


def _is_missing(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


async def _run(loaded: settings.ServerSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)

    def begin_stop() -> None:
        log.info("stopping")
        stop.set()
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in signals:
        loop.add_signal_handler(number, begin_stop)
    announce = functools.partial(_announce, loaded.mode, has_channels=bool(loaded.notify_urls))
    await TrainmedicServer(loaded).run(stop, announce)


_MEANS = {
    Mode.OBSERVE: "nothing is changed; actions are only recorded",
    Mode.APPROVE: "each run asks before it acts: trainmedic approvals",
    Mode.ENFORCE: "runs act by themselves",
}


def _announce(mode: Mode, host: str, port: int, *, has_channels: bool) -> None:
    if sys.stderr.isatty():
        shown = f"[{host}]" if ":" in host else host
        click.echo(f"Trainmedic listens on http://{shown}:{port} (API: /docs). Stop it with Ctrl-C.", err=True)
        click.echo(f"Mode {mode}: {_MEANS[mode]}.", err=True)
        if not has_channels:
            click.echo("No notification channel is set: no messages are sent. Set TRAINMEDIC_NOTIFY_URLS.", err=True)
