"""Commands of repairs, as an executor gets them, and small programs in place of the machine's."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from trainmedic.wire import envelope
from trainmedic_agent.executors import AcceptedCommand


def accepted(
    action: str,
    command_id: str = "c1",
    *,
    gpu: str | None = None,
    seconds: float = 60.0,
    resumed: bool = False,
    stopping: bool = False,
    undo_of: str | None = None,
    **params: object,
) -> AcceptedCommand:
    """A command issued now; ``stopping``: the agent stops from the beginning."""
    now = datetime.now(UTC)
    command = envelope.Command(
        id=command_id,
        action=action,
        target={"kind": "node", "node": "n1"} if gpu is None else {"kind": "gpu", "node": "n1", "gpu": gpu},
        params=params,
        run_id="r1",
        playbook="p",
        reason="",
        issued_at=now,
        expires_at=now + timedelta(seconds=seconds),
        undo_of=undo_of,
    )
    return AcceptedCommand(command, resumed, lambda: stopping)


def program(path: Path, text: str) -> Path:
    """Write an executable shell script."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
