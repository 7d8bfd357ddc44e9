"""The server's commands of ``trainmedic``."""

from trainmedic_core.command import main as main
