"""The way into a test's Slurm through an agent: the real agent, whose commands of Slurm run in the cluster's root."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.agent_node import KEY, Node
from tests.support.slurm_cluster import SlurmCluster
from trainmedic.wire.signing import Signer
from trainmedic_agent.slurm import policy
from trainmedic_server import telemetry
from trainmedic_server.adapters.redis_bus import RedisBus
from trainmedic_server.adapters.slurm_agent import SlurmAgent
from trainmedic_server.adapters.system_clock import SystemClock

LOGIN = "login"
WITHOUT_RIGHTS = "--userspec=1:1"
_COMMAND = """#!/bin/sh
echo "{name} $*" >> {calls}
while [ "$1" = update ] && [ -e {blocked} ]; do sleep 0.05; done
{enter} "$@"
status=$?
while [ "$1" = update ] && [ -e {held} ]; do sleep 0.05; done
exit $status
"""


class SlurmLogin(Node):
    """The agent of a login node. `calls` has the arguments of each command that it has run."""

    def __init__(
        self, directory: Path, url: str, cluster: SlurmCluster, allow: tuple[str, ...] = policy.CHANGING, user: str = ""
    ) -> None:
        """`user`: option of chroot, which runs the commands as another user than root."""
        commands = directory / "commands"
        commands.mkdir(parents=True)
        text = f"allow: [{', '.join(allow)}]\nslurm: {{commands: {commands}, conf: /mnt/slurm.conf}}\n"
        super().__init__(directory, url, text, LOGIN)
        self._calls = directory / "calls"
        self.held = directory / "held"
        """While this file is there, an update does not return after it is done."""
        self.blocked = directory / "blocked"
        """While this file is there, an update does not begin."""
        for name in ("scontrol", "scancel"):
            enter = shlex.join(cluster.entering(f"/usr/bin/{name}"))
            script = _COMMAND.format(
                name=name,
                calls=self._calls,
                held=self.held,
                blocked=self.blocked,
                enter=f"CHROOT_OPTIONS={user} {enter}",
            )
            (commands / name).write_text(script)
            (commands / name).chmod(0o755)

    def _entry(self) -> tuple[str | Path, ...]:
        return "-m", "trainmedic_server"

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines() if self._calls.exists() else []

    def changes(self, beginning: str) -> int:
        """How many commands with this beginning have been run."""
        return sum(call.startswith(beginning) for call in self.calls)


@asynccontextmanager
async def by_agent(url: str) -> AsyncIterator[SlurmAgent]:
    bus = RedisBus(url, SystemClock(), telemetry.Metrics(), Signer.of(KEY.encode()))
    await bus.start()
    try:
        yield SlurmAgent(bus, SystemClock(), LOGIN)
    finally:
        await bus.close()
