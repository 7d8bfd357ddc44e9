"""Options that name playbooks and their alert map."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from trainmedic_core.cli import exits
from trainmedic_core.cli.choice import NearestChoice
from trainmedic_core.plain_text import visible
from trainmedic_core.problems import FileProblem
from trainmedic_core.setting_sources import paths_in
from trainmedic_server.catalog import alert_map_roots
from trainmedic_server.catalog.alert_map import CompiledAlertMap
from trainmedic_server.catalog.alert_map_library import AlertMapLibrary
from trainmedic_server.catalog.library import Library
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.ports.actions import Actions

playbooks_option = click.option(
    "--playbooks",
    "paths",
    metavar="PATH",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Playbook file or directory. Repeatable.",
)
alert_map_option = click.option(
    "--alert-map",
    "alert_map",
    metavar="FILE",
    multiple=True,
    type=click.Path(path_type=Path),
    envvar=alert_map_roots.SETTING,
    help="Alert map, or the name of a shipped one. Repeatable.",
)
inventory_option = click.option(
    "--inventory",
    metavar="FILE",
    type=click.Path(path_type=Path),
    envvar="TRAINMEDIC_INVENTORY",
    help="File that maps addresses to node names.",
)
mode_option = click.option(
    "--mode",
    type=NearestChoice([mode.value for mode in Mode]),
    default=Mode.ENFORCE.value,
    show_default=True,
    help="The server's mode.",
)


def playbook_roots(paths: Sequence[Path]) -> list[Path]:
    if paths:
        return list(paths)
    return paths_in(os.environ.get("TRAINMEDIC_PLAYBOOKS") or "playbooks")


def loaded_playbooks(paths: Sequence[Path], actions: Actions) -> Library:
    """Report unloadable files. Raises InvalidInput without any playbook."""
    roots = playbook_roots(paths)
    library = Library(roots, actions)
    library.reload()
    _report(library.problems)
    if not library.all():
        raise exits.InvalidInput(f"No playbook was loaded from {', '.join(map(str, roots))}.")
    return library


def loaded_alert_map(paths: Sequence[Path]) -> CompiledAlertMap:
    """Report unloadable files on standard error."""
    library = AlertMapLibrary(alert_map_roots.roots(paths, {}))
    library.reload()
    _report(library.problems)
    return library.current


def _report(problems: Iterable[FileProblem]) -> None:
    for problem in problems:
        click.echo(visible(f"Not loaded: {problem}", keep="\n"), err=True)
