"""A node for tests: its agent as a real process that can be killed and started again, and the server's part.

Here: starting and ending the agent, sending it commands over Redis, waiting for its replies. Not here: what
the agent's executors do (``recording_agent``, or the real ones).
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import redis

from tests.support.programs import PYTHON_PATH, ROOT, Program, eventually
from trainmedic.wire import envelope
from trainmedic.wire.envelope import Command, Reply

KEY = "a signing key of the tests"
POLICY = "allow: [gpu.power_limit, disk.clean]\n"


class Node:
    """One node. Its state and notes outlive its agent."""

    def __init__(self, directory: Path, url: str, policy: str | None = POLICY, name: str = "n1") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.url = url
        self.directory = directory
        self.state = directory / "state"
        self.notes_file = directory / "notes"
        self.starts = 0
        self.program: Program | None = None
        self._policy = directory / "policy.yaml"
        if policy is not None:
            self._policy.write_text(policy)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.program is not None:
            self.program.end()

    # --- the agent ------------------------------------------------------------------------------------

    def start(self, *options: str, wait: bool = True, **environment: str) -> None:
        self.starts += 1
        allowed = ("--policy", str(self._policy)) if self._policy.exists() else ()
        self.program = Program(
            [
                *(*self._launcher(), sys.executable, *self._entry(), "agent", "--node", self.name),
                *("--state-dir", self.state, "--redis", self.url, "--exporter-port", "0", *allowed, *options),
            ],
            self.directory / f"agent-{self.starts}.log",
            {
                "PYTHONPATH": PYTHON_PATH,
                "TRAINMEDIC_SIGNING_KEY": KEY,
                **environment,
            },
        )
        if wait:
            pid = self.program.process.pid
            eventually(lambda: (self.presence() or {}).get("pid") == pid, 60, "the agent's presence", every=0.02)

    def _launcher(self) -> tuple[str | Path, ...]:
        """What starts the agent, if it is not started directly; it must become the agent's process."""
        return ()

    def _entry(self) -> tuple[str | Path, ...]:
        return ROOT / "tests" / "support" / "recording_agent.py", self.notes_file

    @property
    def agent(self) -> Program:
        assert self.program is not None
        return self.program

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.agent.process.kill()
        self.agent.process.wait()

    def notes(self) -> list[str]:
        """What the executors have noted, oldest first."""
        return self.notes_file.read_text().splitlines() if self.notes_file.exists() else []

    def noted(self, line: str, within: float = 60.0) -> None:
        """Wait until the executors have noted `line`."""
        eventually(lambda: line in self.notes(), within, f"the note {line!r}", every=0.005)

    def recorded(self, command: Command, status: str, within: float = 60.0) -> None:
        """Wait until the agent's journal has the command with that status: from then on a kill does not undo it."""

        def ask() -> bool:
            with closing(sqlite3.connect(f"file:{self.state / 'agent.db'}?mode=ro", uri=True)) as journal:
                row = journal.execute("SELECT status FROM commands WHERE id = ?", (command.id,)).fetchone()
            return row == (status,)

        eventually(ask, within, f"{status!r} in the journal for {command.action}", every=0.005)

    # --- the server's part ----------------------------------------------------------------------------

    def presence(self) -> dict[str, Any] | None:
        with redis.Redis.from_url(self.url) as client:
            raw: Any = client.get(envelope.agent_presence(self.name))
        return json.loads(raw) if raw else None

    def command(self, action: str, lasting: float = 30.0, undo_of: str | None = None, **params: Any) -> Command:
        now = datetime.now(UTC)
        return Command(
            id=envelope.new_id(),
            action=action,
            target={"kind": "node", "node": self.name},
            params=params,
            run_id="run-1",
            playbook="a playbook",
            reason="a test",
            issued_at=now,
            expires_at=now + timedelta(seconds=lasting),
            undo_of=undo_of,
        )

    def send(self, command: Command, key: str | None = KEY) -> Command:
        raw = command.encode()
        fields: dict[Any, Any] = {"command": raw}
        if key is not None:
            fields["signature"] = envelope.sign(raw, key.encode())
        with redis.Redis.from_url(self.url) as client:
            client.xadd(envelope.node_commands(self.name), fields)
        return command

    def replies(self, command_id: str) -> list[Reply]:
        """What has been answered to a command by now, in order."""
        with redis.Redis.from_url(self.url) as client:
            entries: Any = client.xrange(envelope.REPLIES)
        found = [Reply.of_entry(fields) for _, fields in entries]
        return [reply for reply in found if reply.command_id == command_id]

    def final(self, command: Command, within: float = 60.0, nth: int = 1) -> Reply:
        """The nth final reply to a command."""

        def ask() -> Reply | None:
            finals = [reply for reply in self.replies(command.id) if reply.is_final]
            return finals[nth - 1] if len(finals) >= nth else None

        return eventually(ask, within, f"final reply {nth} to {command.action}", every=0.005)

    def do(self, action: str, **params: Any) -> tuple[str, Mapping[str, Any]]:
        """Send a command and return its outcome."""
        reply = self.final(self.send(self.command(action, **params)))
        return reply.status, reply.output

    def pending(self) -> int:
        """How many entries wait on the node's stream."""
        with redis.Redis.from_url(self.url) as client:
            return int(client.xlen(envelope.node_commands(self.name)))  # type: ignore[arg-type]


def later(command: Command, seconds: float) -> Command:
    """The same command, sent once more with more time."""
    return replace(command, expires_at=command.expires_at + timedelta(seconds=seconds))
