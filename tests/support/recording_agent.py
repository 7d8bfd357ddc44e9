"""The node agent as a program, with executors that note what they do: ``recording_agent.py NOTES agent …``.

Everything but the executors is the real agent. Each effect is one line of the file NOTES: what, which command, and
whether it was resumed. A command takes ``params.seconds``; ``disk.clean`` can be interrupted in that time.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainmedic_agent.context import AgentContext
from trainmedic_agent.errors import CommandFailed, CommandInterrupted
from trainmedic_agent.executors import AcceptedCommand
from trainmedic_agent.service import AgentParts
from trainmedic_agent.settings.agent import AgentSettings
from trainmedic_agent.wiring import agent as wiring
from trainmedic_core.command import main

NOTES = Path(sys.argv[1])


def note(event: str, accepted: AcceptedCommand) -> None:
    with NOTES.open("a") as file:
        file.write(f"{event} {accepted.command.id}{' resumed' if accepted.resumed else ''}\n")


class Cap:
    """Stands for ``gpu.power_limit``: cannot be interrupted, can be abandoned."""

    action = "gpu.power_limit"
    queue = "gpu"

    def perform(self, accepted: AcceptedCommand) -> Mapping[str, Any]:
        params = accepted.command.params
        note("undo" if accepted.command.undo_of else "begin", accepted)
        time.sleep(params.get("seconds", 0))
        if params.get("fail"):
            raise CommandFailed("as it was told", {"watts": 1})
        note("end", accepted)
        return {"watts": 320.0, "resumed": accepted.resumed}

    def abandon(self, accepted: AcceptedCommand) -> None:
        note("abandon", accepted)


class Clean:
    """Stands for ``disk.clean``: stops between its pieces of work."""

    action = "disk.clean"
    queue = "disk"

    def perform(self, accepted: AcceptedCommand) -> Mapping[str, Any]:
        note("begin", accepted)
        until = time.monotonic() + accepted.command.params.get("seconds", 0)
        while time.monotonic() < until and not accepted.resumed:
            if accepted.is_stopping():
                raise CommandInterrupted("some files are left")
            time.sleep(0.01)
        note("end", accepted)
        return {"files": 3}


class Facts:
    """Stands for ``node.facts``; goes wrong when it is told to."""

    action = "node.facts"
    queue = "facts"

    def perform(self, accepted: AcceptedCommand) -> Mapping[str, Any]:
        return {"load": 1 / accepted.command.params.get("divisor", 1)}


@contextlib.contextmanager
def node_parts(settings: AgentSettings, context: AgentContext) -> Iterator[AgentParts]:
    yield AgentParts(executors=[Cap(), Clean(), Facts()], inventory=lambda: {"gpus": [{"index": 0, "uuid": "GPU-1"}]})


if __name__ == "__main__":
    wiring.node_parts = node_parts
    main(sys.argv[2:])
