"""Executor of ``node.restart_container``. Another start time than before shows that it was started again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from trainmedic.wire.steady_time import utc_now
from trainmedic_agent.containers.engine_api import ContainerEngine, EngineAnswer
from trainmedic_agent.containers.kubelet import is_of_kubelet
from trainmedic_agent.errors import CommandFailed, CommandRejected
from trainmedic_agent.executors import AcceptedCommand
from trainmedic_agent.repairs.intents import IntentBook, failing_if_begun
from trainmedic_agent.repairs.policy import RestartPolicy
from trainmedic_agent.repairs.timing import SETTLED_SECONDS, RepairTime, checked_parameters

_LOOK_SECONDS = 20.0  # limit of a request for the state
_NOT_FOUND = 404


class ContainerState(Struct, frozen=True):
    id: str
    name: str
    labels: Mapping[str, str]
    is_running: bool
    started_at: str
    exit_code: object

    def output(self) -> Mapping[str, Any]:
        return {"id": self.id, "running": self.is_running, "started_at": self.started_at}


class RestartContainerExecutor(Struct, frozen=True):
    policy: RestartPolicy
    intents: IntentBook
    engine: ContainerEngine
    action: str = "node.restart_container"
    queue: str = "node"

    def perform(self, accepted: AcceptedCommand) -> Mapping[str, Any]:
        command, time = accepted.command, RepairTime(accepted)
        kept = self.intents.find(command.id)
        is_begun = kept is not None
        with failing_if_begun(is_begun):
            name = str(checked_parameters(command, ("container",))["container"])
            state = self._read_state(name if kept is None else kept["id"])
            self._refuse_forbidden(state)
        if kept is None:
            kept = {"id": state.id, "started_at": state.started_at}
            self.intents.keep(command.id, kept, utc_now())
        before = kept["started_at"]
        if state.started_at == before:
            with failing_if_begun(is_begun):
                self._restart(state, time)
        after = self._wait_until_settled(state, before, time)
        return {"container": state.name, "started_at_before": before, **after.output(), "resumed": accepted.resumed}

    def _refuse_forbidden(self, state: ContainerState) -> None:
        if is_of_kubelet({"Labels": state.labels}):
            raise CommandRejected(f"{state.name} belongs to Kubernetes; its kubelet restarts it")
        if not self.policy.allows_container(state.name, state.labels):
            raise CommandRejected(
                f"this node's policy does not list {state.name} in restart.containers, nor a label of it in "
                "restart.container_labels"
            )

    def _restart(self, state: ContainerState, time: RepairTime) -> None:
        seconds = time.to_act()
        try:
            self.engine.restart_container(state.id, seconds)
        except EngineAnswer as answer:
            raise CommandFailed(f"the container engine could not restart {state.name}: {answer}") from answer
        except CommandFailed as error:
            raise CommandFailed(f"{error}; it may still restart {state.name}", {"may_be_done": True}) from error

    def _wait_until_settled(self, state: ContainerState, before: str, time: RepairTime) -> ContainerState:
        with failing_if_begun(True):
            first = self._read_state(state.id)
            if first.is_running and first.started_at != before:
                time.pause(SETTLED_SECONDS)
            last = self._read_state(state.id)
        if last.started_at == before:
            raise CommandFailed(f"{state.name} was not started again: its start time is unchanged", last.output())
        if not last.is_running:
            raise CommandFailed(f"{state.name} was started again, and exited ({last.exit_code})", last.output())
        if last.started_at != first.started_at:
            raise CommandFailed(
                f"{state.name} was started again, and ended within {SETTLED_SECONDS:.0f} s", last.output()
            )
        return last

    def _read_state(self, name: str) -> ContainerState:
        try:
            answer = self.engine.container(name, _LOOK_SECONDS)
        except EngineAnswer as error:
            if error.status == _NOT_FOUND:
                raise CommandRejected(f"there is no container {name[:200]}") from error
            raise CommandFailed(f"the container engine does not show {name[:200]}: {error}") from error
        state, config = answer.get("State"), answer.get("Config")
        labels = config.get("Labels") if isinstance(config, Mapping) else None
        if not isinstance(state, Mapping) or not answer.get("Id") or not state.get("StartedAt"):
            raise CommandFailed(f"the container engine does not state when {name[:200]} was started")
        return ContainerState(
            str(answer["Id"]),
            str(answer.get("Name", "")).lstrip("/"),
            {str(key): str(value) for key, value in labels.items()} if isinstance(labels, Mapping) else {},
            state.get("Running") is True,
            str(state["StartedAt"]),
            state.get("ExitCode"),
        )
