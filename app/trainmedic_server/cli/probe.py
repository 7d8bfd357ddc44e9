"""``trainmedic probe``."""

from __future__ import annotations

import os
import sys

import click


@click.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def probe(arguments: tuple[str, ...]) -> None:
    """Measure the network between idle nodes: barriers and all-reduces.

    Same options as trainmedic-probe; see 'trainmedic probe --help'.
    """
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "trainmedic.probe", *arguments])  # noqa: S606 - this very Python
