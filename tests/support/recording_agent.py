"""The node agent as a program, with hands that note what they do: ``recording_agent.py NOTES agent …``.

Everything but the hands is the real agent. Each effect is one line of the file NOTES: what, which command, and
whether it was resumed. An order takes ``params.seconds``; ``disk.clean`` can be interrupted in that time.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainmedic_server.agent.counters import AgentCounters
from trainmedic_server.agent.executors import AcceptedCommand
from trainmedic_server.agent.journal import Journal
from trainmedic_server.agent.policy import Policy
from trainmedic_server.cli import main
from trainmedic_server.errors import CommandFailed, CommandInterrupted
from trainmedic_server.settings.agent import AgentSettings
from trainmedic_server.wiring import agent as wiring

NOTES = Path(sys.argv[1])


def note(what: str, order: AcceptedCommand) -> None:
    with NOTES.open("a") as file:
        file.write(f"{what} {order.command.id}{' resumed' if order.resumed else ''}\n")


class Cap:
    """Stands for ``gpu.power_limit``: cannot be interrupted, can be abandoned."""

    action = "gpu.power_limit"
    queue = "gpu"

    def perform(self, order: AcceptedCommand) -> Mapping[str, Any]:
        params = order.command.params
        note("undo" if order.command.undo_of else "begin", order)
        time.sleep(params.get("seconds", 0))
        if params.get("fail"):
            raise CommandFailed("as it was told", {"watts": 1})
        note("end", order)
        return {"watts": 320.0, "resumed": order.resumed}

    def abandon(self, order: AcceptedCommand) -> None:
        note("abandon", order)


class Clean:
    """Stands for ``disk.clean``: stops between its pieces of work."""

    action = "disk.clean"
    queue = "disk"

    def perform(self, order: AcceptedCommand) -> Mapping[str, Any]:
        note("begin", order)
        until = time.monotonic() + order.command.params.get("seconds", 0)
        while time.monotonic() < until and not order.resumed:
            if order.is_stopping():
                raise CommandInterrupted("some files are left")
            time.sleep(0.01)
        note("end", order)
        return {"files": 3}


class Facts:
    """Stands for ``node.facts``; goes wrong when it is told to."""

    action = "node.facts"
    queue = "facts"

    def perform(self, order: AcceptedCommand) -> Mapping[str, Any]:
        return {"load": 1 / order.command.params.get("divisor", 1)}


@contextlib.contextmanager
def tools(
    settings: AgentSettings, policy: Policy, journal: Journal, tally: AgentCounters
) -> Iterator[wiring.AgentParts]:
    yield wiring.AgentParts(
        hands=[Cap(), Clean(), Facts()], inventory=lambda: {"gpus": [{"index": 0, "uuid": "GPU-1"}]}
    )


if __name__ == "__main__":
    wiring.tools = tools
    main(sys.argv[2:])
