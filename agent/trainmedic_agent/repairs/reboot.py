"""Executor of ``node.reboot``, which is ``applied`` only under another boot ID than at its beginning."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from msgspec import Struct

from trainmedic.wire import envelope
from trainmedic.wire.steady_time import since_boot, utc_now
from trainmedic_agent.errors import CommandFailed, CommandRejected, CommandUnsupported, JournalUnavailable
from trainmedic_agent.executors import AcceptedCommand
from trainmedic_agent.power.control import boot_id
from trainmedic_agent.repairs import programs
from trainmedic_agent.repairs.intents import IntentBook, failing_if_begun
from trainmedic_agent.repairs.timing import RepairTime, checked_parameters

_PROGRAM_SECONDS = 20.0  # limit of a call of ``shutdown``, which does not wait
DELAY_MINUTES = 1
"""Time for users to stop it by ``shutdown -c``, and for the reply ``accepted``."""
_DELAY_SECONDS = 60 * DELAY_MINUTES
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LONGEST_USEC = 17  # digits; a longer time may be after the year 9999
_OVERDUE = timedelta(minutes=10)  # far longer than a shutdown takes to begin
_CLOCK_ERROR = timedelta(seconds=2)
_SCHEDULE = Path("/run/systemd/shutdown/scheduled")  # written by logind


class RebootExecutor(Struct, frozen=True):
    intents: IntentBook
    shutdown: Sequence[str] = ("shutdown",)
    boot: Callable[[], str] = boot_id
    uptime: Callable[[], float] = since_boot
    schedule_file: Path = _SCHEDULE
    action: str = "node.reboot"
    queue: str = "node"

    def perform(self, accepted: AcceptedCommand) -> Mapping[str, Any]:
        command, time = accepted.command, RepairTime(accepted)
        boot, kept = self.boot(), self.intents.find(command.id)
        with failing_if_begun(kept is not None):
            checked_parameters(command, ())
            if not boot:
                raise CommandUnsupported("the kernel's boot ID cannot be read, so a restart could not be verified")
        if kept is None:
            booted_at = utc_now() - timedelta(seconds=self.uptime())
            if booted_at > command.issued_at:
                raise CommandFailed(
                    f"this node started at {envelope.write_time(booted_at)}, after the command was issued, and the "
                    "agent's journal has no beginning of it; it is not restarted again",
                    {"may_be_done": True},
                )
            if time.left() <= _DELAY_SECONDS:
                raise CommandRejected(
                    f"{time.left():.0f} s are left, and the node restarts {_DELAY_SECONDS} s after the request; give "
                    "the step a longer timeout"
                )
            other = self._scheduled()
            if other is None:
                raise CommandFailed(
                    f"{self.schedule_file} cannot be read, so this restart could replace a scheduled shutdown; let "
                    "the agent read it"
                )
            if other and not _is_overdue(other):
                raise CommandFailed(
                    f"a shutdown is scheduled on this node already ({other}), which this restart would replace; wait "
                    "for it, or cancel it by shutdown -c"
                )
            kept = {"boot": boot}
            self.intents.keep(command.id, kept, utc_now())
            self._schedule(time)
            if schedule := self._scheduled():
                kept = {**kept, "schedule": schedule}
                with contextlib.suppress(JournalUnavailable):  # only a later process lacks the reading
                    self.intents.keep(command.id, kept, utc_now())
            overdue = "the system accepted the restart, and has not restarted in time"
        else:  # Not again after the agent's restart: a user may have stopped it.
            overdue = "an earlier process of the agent may have asked for the restart, which has not come in time"
        before = kept["boot"]
        if boot == before:
            if not time.wait_for(lambda: self.boot() != before):  # cancelled, or it would come after the reply
                found, may_come = self._cancelled(kept.get("schedule"), self.intents.kept_at(command.id))
                raise CommandFailed(f"{overdue}; {found}", {"boot_id": before, "may_be_done": may_come})
            boot = self.boot()
        return {"boot_id_before": before, "boot_id": boot, "uptime_seconds": round(self.uptime())}

    def _schedule(self, time: RepairTime) -> None:
        answer = programs.run(
            [*self.shutdown, "-r", f"+{DELAY_MINUTES}", "Trainmedic repairs this node"], _PROGRAM_SECONDS
        )
        time.check_killed(answer)
        if answer.code != 0:
            raise CommandFailed(f"the system refused to restart: {answer.said or f'exit code {answer.code}'}")

    def _scheduled(self) -> str | None:
        """Return the scheduled shutdown, with its time in microseconds; "" for none, None if unknown."""
        try:
            lines = self.schedule_file.read_text("utf-8", "replace").splitlines()
        except FileNotFoundError:
            return ""
        except OSError:
            return None
        return " ".join(line for line in lines if line.startswith(("USEC=", "MODE=")))

    def _cancelled(self, own: str | None, begun_at: datetime | None) -> tuple[str, bool]:
        """Cancel the restart if it is the scheduled one. Return what was found, and whether it may still come."""
        present = self._scheduled()
        if not own and present and begun_at is not None and _may_be_of(begun_at, present):
            own = present  # an earlier process could not read it
        if not own or present is None:
            return "which shutdown is scheduled is unknown, so none was cancelled, and it may still come", True
        if present != own:
            return f"it is no longer scheduled; {f'left: {present}' if present else 'no other is'}", False
        try:
            answer = programs.run([*self.shutdown, "-c"], _PROGRAM_SECONDS)
        except (CommandFailed, CommandUnsupported) as error:
            return f"it could not be cancelled and may still come: {error}", True
        if answer.code != 0 or self._scheduled() == own:
            return f"it could not be cancelled and may still come: {answer.said}", True
        due = _due(own)
        if due is None or utc_now() >= due:
            return "shutdown -c was accepted after its time, so it may have begun and still come", True
        return "shutdown -c was accepted", False


def _due(schedule: str) -> datetime | None:
    usec = dict(each.partition("=")[::2] for each in schedule.split()).get("USEC", "")
    return _EPOCH + timedelta(microseconds=int(usec)) if usec.isdecimal() and len(usec) <= _LONGEST_USEC else None


def _is_overdue(schedule: str) -> bool:  # it can no longer come
    due = _due(schedule)
    return due is not None and utc_now() > due + _OVERDUE


def _may_be_of(begun_at: datetime, schedule: str) -> bool:
    due, expected = _due(schedule), begun_at + timedelta(seconds=_DELAY_SECONDS)
    is_in_time = (
        due is not None and -_CLOCK_ERROR <= due - expected <= timedelta(seconds=_PROGRAM_SECONDS) + _CLOCK_ERROR
    )
    return is_in_time and "MODE=reboot" in schedule.split()
