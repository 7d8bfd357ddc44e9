"""Executor of ``gpu.reset``, by ``nvidia-smi``: NVML has no public function for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from trainmedic.wire.steady_time import utc_now
from trainmedic_agent.errors import (
    CommandFailed,
    CommandRejected,
    CommandUnsupported,
    GpuAbsent,
    GpuError,
    GpuStuck,
    NotSupported,
)
from trainmedic_agent.executors import AcceptedCommand
from trainmedic_agent.ports.gpus import GpuReading, Gpus
from trainmedic_agent.repairs import programs
from trainmedic_agent.repairs.intents import IntentBook, failing_if_begun
from trainmedic_agent.repairs.timing import LOOK_EVERY, RepairTime, checked_parameters

_STILL_BROKEN = ("reset", "reboot", "drain_and_reset", "bus_reset", "system_reboot")
"""Recovery actions after which a reset has not helped."""
_SMI_SECONDS = 120.0  # limit of nvidia-smi
_MOST_SHOWN = 4  # processes that an error names


class GpuResetExecutor(Struct, frozen=True):
    gpus: Gpus
    intents: IntentBook
    nvidia_smi: Sequence[str] = ("nvidia-smi",)
    action: str = "gpu.reset"
    queue: str = "gpu"

    def perform(self, accepted: AcceptedCommand) -> Mapping[str, Any]:
        command, time = accepted.command, RepairTime(accepted)
        kept = self.intents.find(command.id)
        is_begun = kept is not None
        gpu = command.target.get("gpu")
        with failing_if_begun(is_begun):
            checked_parameters(command, ())
            uuids = self._all() if command.target.get("kind") == "node" and gpu is None else [self._uuid(gpu)]
        if kept is None:
            kept = {}
            for uuid in uuids:
                kept |= _reading_to_keep(uuid, self._reading_before(uuid))
            self.intents.keep(command.id, kept, utc_now())
        if not all(self._has_restarted(uuid, kept) for uuid in uuids):
            with failing_if_begun(is_begun):
                for uuid in uuids:
                    self._refuse_used(uuid)
                self._reset(uuids, time, ["-i", *uuids] if gpu is not None else [])
        outputs = [{"gpu": uuid, **self._wait_for_answer(uuid, kept, time)} for uuid in uuids]
        return {**(outputs[0] if gpu is not None else {"gpus": outputs}), "resumed": accepted.resumed}

    def _all(self) -> list[str]:
        """Return all UUIDs. Raises CommandFailed if a GPU cannot be checked: nvidia-smi would reset it too."""
        inventory = self.gpus.inventory()
        if inventory.problems or not inventory.gpus:
            reason = "; ".join(inventory.problems) or "there are none"
            raise CommandFailed(f"not every GPU can be checked, so none is reset: {reason}")
        return [info.uuid for info in inventory.gpus]

    def _uuid(self, name: object) -> str:
        if not isinstance(name, str) or not name.strip():
            raise CommandRejected("the target names no GPU: gpu must be a UUID, a PCI address or an index")
        try:
            return self.gpus.find(name).uuid
        except (GpuAbsent, NotSupported) as error:
            raise CommandRejected(str(error)) from error
        except GpuError as error:
            raise CommandFailed(str(error)) from error

    def _refuse_used(self, uuid: str) -> None:
        try:
            pids = self.gpus.processes(uuid)
        except NotSupported as error:
            raise CommandUnsupported(f"{uuid} does not report its processes, so it is not reset: {error}") from error
        except GpuError as error:
            raise CommandFailed(f"it is unknown whether processes use {uuid}, so it is not reset: {error}") from error
        if pids:
            shown = ", ".join(map(str, pids[:_MOST_SHOWN])) + (", …" if len(pids) > _MOST_SHOWN else "")
            raise CommandFailed(
                f"{len(pids)} processes use {uuid}, so it is not reset: {shown}", {"gpu": uuid, "processes": len(pids)}
            )

    def _reading_before(self, uuid: str) -> GpuReading:
        try:
            return self.gpus.read(uuid)
        except GpuError as error:
            raise CommandFailed(f"{uuid} cannot be read, so it is not reset: {error}") from error

    def _reset(self, uuids: Sequence[str], time: RepairTime, selection: Sequence[str]) -> None:
        argv, named = [*self.nvidia_smi, "--gpu-reset", *selection], ", ".join(uuids)
        try:
            answer = self.gpus.while_closed(uuids, lambda: programs.run(argv, min(time.to_act(), _SMI_SECONDS)))
        except GpuStuck as error:
            raise CommandFailed(f"{named} may still be reset: {error}", {"may_be_done": True}) from error
        except GpuError as error:
            raise CommandFailed(f"{named} {'were' if len(uuids) > 1 else 'was'} not reset: {error}") from error
        time.check_killed(answer)
        if answer.code != 0:
            some = "all of " if len(uuids) > 1 else ""
            reason = answer.said or f"exit code {answer.code}"
            raise CommandFailed(f"nvidia-smi did not reset {some}{named}: {reason}")

    def _has_restarted(self, uuid: str, kept: Mapping[str, str]) -> bool:  # False if it is unknown
        try:
            return _energy_restarted(uuid, kept, self.gpus.read(uuid)) is True
        except GpuError:
            return False

    def _wait_for_answer(self, uuid: str, kept: Mapping[str, str], time: RepairTime) -> Mapping[str, Any]:
        while True:
            try:
                reading = self.gpus.read(uuid)
                break
            except GpuError as error:
                if time.left() <= 0:
                    raise CommandFailed(
                        f"nvidia-smi reported the reset of {uuid}, which does not answer since: {error}"
                    ) from error
            time.pause(LOOK_EVERY)
        output = {
            "recovery_action_before": kept.get(f"{uuid} recovery_action"),
            "recovery_action": reading.recovery_action,
            "energy_restarted": _energy_restarted(uuid, kept, reading),
        }
        if reading.recovery_action in _STILL_BROKEN:
            raise CommandFailed(
                f"after the reset of {uuid} its driver still asks for {reading.recovery_action}",
                {"gpu": uuid, **output},
            )
        return {name: value for name, value in output.items() if value is not None}


def _reading_to_keep(uuid: str, reading: GpuReading) -> dict[str, str]:
    values = {"energy_mj": reading.energy_mj, "recovery_action": reading.recovery_action}
    return {f"{uuid} {name}": str(value) for name, value in values.items() if value is not None}


def _energy_restarted(uuid: str, kept: Mapping[str, str], reading: GpuReading) -> bool | None:
    """Return whether the energy counter is lower than before, None if the card has none. False proves nothing: the
    counter may have passed its earlier value.
    """
    before = kept.get(f"{uuid} energy_mj")
    return None if before is None or reading.energy_mj is None else reading.energy_mj < int(before)
