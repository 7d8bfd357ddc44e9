"""``trainmedic backup``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from trainmedic_core.cli import exits
from trainmedic_core.cli.setting_flags import setting_flag
from trainmedic_server.adapters.sql_store import backup as store_backup
from trainmedic_server.errors import ConfigurationError, TrainmedicError
from trainmedic_server.settings import server as settings
from trainmedic_server.settings import server_defaults


def _flags(command: Callable[..., None]) -> Callable[..., None]:
    for name in ("database", "state_dir"):
        description = settings.ServerSettings.model_fields[name].description or ""
        default, choices = server_defaults.default_of(name), server_defaults.choices_of(name)
        command = setting_flag(name, settings.SOURCES[name], description, default, choices)(command)
    return command


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@_flags
def backup(file: Path, **flags: Any) -> None:
    """Copy the run store to FILE, as it is at one moment.

    Works while the server runs, on the same machine and as a user who may read the run store. It delays no alert. The
    copy is verified before it gets its name. For PostgreSQL, use PostgreSQL's own tools.

    \b
    trainmedic backup --state-dir /var/lib/trainmedic backup.db
    """
    try:
        size = store_backup.copy(settings.load(flags, os.environ).database_url, file)
    except ConfigurationError as error:
        raise exits.InvalidInput(str(error)) from error
    except TrainmedicError as error:
        raise exits.Unreachable(str(error)) from error
    click.echo(f"{file}: {size / 1e6:,.1f} MB, read back")
