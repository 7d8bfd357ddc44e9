"""Executor of ``node.restart_unit``. An invocation ID other than before shows that the unit was started again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from trainmedic.wire.envelope import Command
from trainmedic.wire.steady_time import utc_now
from trainmedic_agent.errors import CommandFailed, CommandRejected
from trainmedic_agent.executors import AcceptedCommand
from trainmedic_agent.repairs import programs
from trainmedic_agent.repairs.intents import IntentBook, failing_if_begun
from trainmedic_agent.repairs.policy import UNIT, RestartPolicy
from trainmedic_agent.repairs.timing import LOOK_EVERY, SETTLED_SECONDS, RepairTime, checked_parameters

_PROPERTIES = (
    *("LoadState", "ActiveState", "SubState", "InvocationID"),
    *("MainPID", "Result", "Type", "ConditionResult", "ConditionTimestampMonotonic"),
)
_UNSEEN_START_NOTE = (
    "systemctl reported success, and systemd has forgotten this end. A unit whose condition is not met ends so too, "
    "without a start"
)
_SHOW_SECONDS = 20.0  # limit of ``systemctl show``


class UnitState(Struct, frozen=True):
    load: str
    active: str
    sub: str
    invocation: str
    main_pid: int
    result: str
    kind: str
    condition: str
    condition_at: str

    @property
    def has_unmet_condition(self) -> bool:
        """Return whether systemd has not started it because of a condition."""
        return self.active == "inactive" and self.condition == "no" and self.condition_at not in ("", "0")

    @property
    def has_ended_well(self) -> bool:
        return self.kind == "oneshot" and self.active == "inactive" and self.result == "success"

    def output(self) -> Mapping[str, Any]:
        return {
            "active_state": self.active,
            "sub_state": self.sub,
            "invocation_id": self.invocation,
            "main_pid": self.main_pid,
        }


class RestartUnitExecutor(Struct, frozen=True):
    policy: RestartPolicy
    intents: IntentBook
    systemctl: Sequence[str] = ("systemctl",)
    action: str = "node.restart_unit"
    queue: str = "node"

    def perform(self, accepted: AcceptedCommand) -> Mapping[str, Any]:
        command, time = accepted.command, RepairTime(accepted)
        kept = self.intents.find(command.id)
        is_begun = kept is not None
        with failing_if_begun(is_begun):
            unit = self._allowed_unit(command)
            state = self._read_state(unit)
        if kept is None:
            if state.load != "loaded":
                raise CommandRejected(f"systemd has no usable unit {unit}: its LoadState is {state.load}")
            kept = {"invocation": state.invocation}
            self.intents.keep(command.id, kept, utc_now())
        before = kept["invocation"]
        is_restarted_here = state.invocation == before
        if is_restarted_here:
            with failing_if_begun(is_begun):
                self._restart(unit, time)
        after = self._state_after(unit)
        # systemd forgets the invocation of a oneshot unit that has ended; systemctl has waited for that end.
        has_ended = is_restarted_here and after.has_ended_well and not after.has_unmet_condition
        if not has_ended:
            after = self._wait_until_settled(unit, before, time)
        note = {"note": _UNSEEN_START_NOTE} if has_ended and after.invocation in ("", before) else {}
        return {"unit": unit, "invocation_id_before": before, **after.output(), **note, "resumed": accepted.resumed}

    def _allowed_unit(self, command: Command) -> str:
        unit = str(checked_parameters(command, ("unit",))["unit"])
        if not UNIT.fullmatch(unit):
            raise CommandRejected(f"{unit[:200]!r} is not the full name of a service, such as sshd.service")
        if not self.policy.allows_unit(unit):
            raise CommandRejected(f"this node's policy does not list {unit} in restart.units")
        return unit

    def _restart(self, unit: str, time: RepairTime) -> None:
        answer = programs.run([*self.systemctl, "restart", "--no-ask-password", "--", unit], time.to_act())
        time.check_killed(answer)
        if answer.code != 0:
            raise CommandFailed(
                f"systemctl could not restart {unit}: {answer.said or f'exit code {answer.code}'}",
                {"unit": unit, **self._state_after(unit).output()},
            )

    def _wait_until_settled(self, unit: str, before: str, time: RepairTime) -> UnitState:
        """Return the state of a new invocation that stays active."""
        first = self._state_after(unit)
        while first.active in ("activating", "deactivating", "reloading") and time.left() > 0:
            time.pause(LOOK_EVERY)
            first = self._state_after(unit)
        if first.active == "active" and first.invocation != before:
            time.pause(SETTLED_SECONDS)
        last = self._state_after(unit)
        if last.has_unmet_condition:
            raise CommandFailed(f"{unit} was not started: a condition of the unit is not met", last.output())
        if last.invocation == before:
            raise CommandFailed(
                f"{unit} was not started again: its invocation ID is the one from before", last.output()
            )
        if last.active != "active":
            raise CommandFailed(f"{unit} was started again, and is {last.active} ({last.result})", last.output())
        if last.invocation != first.invocation:
            raise CommandFailed(f"{unit} was started again, and ended within {SETTLED_SECONDS:.0f} s", last.output())
        return last

    def _state_after(self, unit: str) -> UnitState:
        with failing_if_begun(True):
            return self._read_state(unit)

    def _read_state(self, unit: str) -> UnitState:
        argv = [*self.systemctl, "show", f"--property={','.join(_PROPERTIES)}", "--", unit]
        answer = programs.run(argv, _SHOW_SECONDS, acts=False)
        if answer.code != 0:
            raise CommandFailed(f"systemctl does not show {unit}: {answer.said or f'exit code {answer.code}'}")
        values = dict(line.partition("=")[::2] for line in answer.output.splitlines())
        missing = [name for name in _PROPERTIES[:4] if name not in values]  # the others may lack a value
        if missing:
            raise CommandFailed(f"systemctl does not show {', '.join(missing)} of {unit}")
        pid = values.get("MainPID", "")
        return UnitState(
            values["LoadState"],
            values["ActiveState"],
            values["SubState"],
            values["InvocationID"],
            int(pid) if pid.isdigit() else 0,
            values.get("Result", ""),
            values.get("Type", ""),
            values.get("ConditionResult", ""),
            values.get("ConditionTimestampMonotonic", ""),
        )
