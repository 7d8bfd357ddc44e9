"""Executor of ``disk.prune_containers``, which is rejected where a kubelet runs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import Struct

from trainmedic_agent.containers.engine_api import ContainerEngine, EngineAnswer
from trainmedic_agent.containers.kubelet import is_of_kubelet, sign_of_kubelet
from trainmedic_agent.containers.leftovers import LeftoverRemover
from trainmedic_agent.containers.policy import ContainersPolicy
from trainmedic_agent.disk.executor import named_filesystems
from trainmedic_agent.disk.filesystems import mount_of
from trainmedic_agent.disk.mounts import FilesystemSearch
from trainmedic_agent.disk.open_files import FileUsage
from trainmedic_agent.disk.throttle import Clocks, Throttle
from trainmedic_agent.errors import CommandFailed, CommandNotExecuted, CommandRejected
from trainmedic_agent.executors import AcceptedCommand

_PARAMETERS = ("dry_run", "filesystems")
_LONGEST_ANSWER = 120.0  # seconds; removing a large image takes a while


class PruneContainersExecutor(Struct, frozen=True):
    policy: ContainersPolicy | None
    kubelet_sign: Callable[[], str | None] = sign_of_kubelet
    action: str = "disk.prune_containers"
    queue: str = "disk"

    def perform(self, accepted: AcceptedCommand) -> Mapping[str, Any]:
        command = accepted.command
        if command.undo_of is not None:
            raise CommandRejected("disk.prune_containers has no undo: removed objects cannot be restored")
        unknown = sorted(name for name in command.params if name not in _PARAMETERS)
        if unknown:
            raise CommandRejected(f"disk.prune_containers does not know {', '.join(map(repr, unknown))[:300]}")
        if self.policy is None:
            raise CommandRejected("the agent's policy has no part containers, so nothing may be removed")
        dry_run = command.params.get("dry_run", False)
        if not isinstance(dry_run, bool):
            raise CommandRejected("dry_run must be true or false")
        deadline = accepted.deadline
        stopped: list[str] = []

        def seconds_left() -> float:
            return min(_LONGEST_ANSWER, max(0.1, (deadline - datetime.now(UTC)).total_seconds()))

        def may_continue() -> bool:
            if accepted.is_stopping():
                stopped[:] = ["agent_stopping"]
            elif datetime.now(UTC) >= deadline:
                stopped[:] = ["out_of_time"]
            return not stopped

        self._refuse_kubernetes()
        engine = ContainerEngine(self.policy.socket)
        try:
            storage = str(engine.info(seconds_left()).get("DockerRootDir") or "")
            if any(is_of_kubelet(container) for container in engine.containers(seconds_left())):
                raise CommandRejected("the engine has Kubernetes containers; the kubelet removes their leftovers")
        except EngineAnswer as answer:
            raise CommandFailed(f"the container engine did not list its objects: {answer}") from answer
        self._refuse_other_filesystem(storage, command.params.get("filesystems", ()))
        before = _free_bytes(storage)
        remover = LeftoverRemover(engine, self.policy, datetime.now(UTC), dry_run, seconds_left, may_continue)

        def output() -> Mapping[str, Any]:
            return {
                **remover.pruning.output(),
                "storage": storage,
                "free_bytes_before": before,
                "free_bytes_after": _free_bytes(storage),
                "dry_run": dry_run,
                "stopped": stopped[0] if stopped else None,
                "resumed": accepted.resumed,
            }

        try:
            remover.remove()
        except EngineAnswer as answer:
            reason = f"the container engine did not list its objects: {answer}"
            raise CommandFailed(reason, output()) from answer
        except CommandNotExecuted as error:
            raise CommandFailed(str(error), output()) from error
        return output()

    def _refuse_kubernetes(self) -> None:
        sign = self.kubelet_sign()
        if sign is not None:
            raise CommandRejected(f"{sign}, so this is a Kubernetes node; its kubelet removes images and containers")
        clocks = Clocks()
        if not FileUsage(clocks, Throttle(clocks, math.inf, lambda: False)).sees_every_process():
            raise CommandRejected(
                "cannot check whether a kubelet runs here: the agent needs the machine's first PID namespace and a "
                "/proc without hidepid"
            )

    def _refuse_other_filesystem(self, storage: str, raw: object) -> None:
        names = named_filesystems(raw)
        if not names:
            return
        try:
            fd = os.open(storage, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise CommandRejected(
                f"cannot check whether the engine's storage {storage!r} lies on {', '.join(map(str, names))[:300]}: "
                f"{error.strerror}"
            ) from error
        try:
            if not FilesystemSearch(names, Path("/proc")).finds(mount_of(fd)):
                raise CommandRejected(
                    f"the engine's storage {storage} does not lie on {', '.join(map(str, names))[:300]}"
                )
        finally:
            os.close(fd)


def _free_bytes(storage: str) -> int | None:
    try:
        space = os.statvfs(storage)
    except OSError:
        return None
    return space.f_bavail * space.f_frsize
