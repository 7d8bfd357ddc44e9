"""The server's commands of ``trainmedic``, one module each."""

from trainmedic_core.command import main as main
