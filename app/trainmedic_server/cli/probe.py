"""``trainmedic probe``: the SDK's ``trainmedic-probe``, where this machine has PyTorch.

The probe is a program of the SDK, for it needs PyTorch, which the server does not have. Here it only gets its name.
"""

from __future__ import annotations

import os
import sys

import click


@click.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def probe(arguments: tuple[str, ...]) -> None:
    """Measure how fast nodes that do not train can speak with each other: barriers and all-reduces.

    It is trainmedic-probe, with the same options: 'trainmedic probe --help' shows them.
    """
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "trainmedic.probe", *arguments])  # noqa: S606 - this very Python
