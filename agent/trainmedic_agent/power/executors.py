"""Executors of ``gpu.power_limit`` and ``gpu.renew_lease``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from trainmedic.wire import undoing
from trainmedic_agent.errors import CommandFailed, CommandRejected, GpuError, NotSupported
from trainmedic_agent.executors import AcceptedCommand, refuse_unknown_parameters
from trainmedic_agent.ports.gpus import PowerLimits
from trainmedic_agent.power import outputs
from trainmedic_agent.power.control import Outcomes, PowerControl

DEFAULT_LEASE = 300.0  # seconds
_PARAMETERS = ("watts", "percent", "restore", "lease_seconds")
MOST_GPUS = 64


class PowerLimitExecutor(Struct, frozen=True):
    """A cap in watts, or in percent of the card's default, on one or more GPUs."""

    control: PowerControl
    action: str = "gpu.power_limit"
    queue: str = "gpu"

    def perform(self, accepted: AcceptedCommand) -> Mapping[str, Any]:
        command = accepted.command
        if command.undo_of is not None:
            return self._undo(command.id, command.undo_of)
        refuse_unknown_parameters(command, _PARAMETERS)
        requested = _requested(command.params)
        lease = _number(command.params, "lease_seconds", DEFAULT_LEASE)
        uuids = self._uuids(command.target)
        if requested is None:
            return self._restore(command.id, uuids)
        ended_by = self.control.ended_by(command.id)
        if ended_by is not None:
            reason = outputs.end_reason(ended_by)
            output = {"may_be_done": True} if self._unrestored(command.id, uuids) else {}
            raise CommandFailed(f"the cap was begun before the agent restarted and has ended since: {reason}", output)
        outcomes = self.control.cap(command.id, requested, uuids, lease)
        errors = outputs.errors_of(outcomes)
        if errors:
            raise outputs.refusal_of(errors, len(uuids), self._unrestored(command.id, uuids))
        return outputs.one_or_all(outputs.describe_caps(command.id, outcomes), "gpus" in command.target)

    def _unrestored(self, cap_id: str, uuids: Sequence[str]) -> list[str]:
        # Without GPUs that only an earlier cap has left unrestored.
        states = {uuid: self.control.ledger.of(uuid) for uuid in uuids}
        return [uuid for uuid, state in states.items() if state.needs_reconciling and state.cap(cap_id) is not None]

    def remembers(self, command_id: str) -> bool:
        """Return whether the ledger has the cap, which can outlast its journal entry."""
        return any(state.cap(command_id) is not None for state in self.control.ledger.all().values())

    def abandon(self, accepted: AcceptedCommand) -> None:
        self.control.forget(accepted.command.id)

    def _uuids(self, target: Mapping[str, Any]) -> list[str]:
        names = target["gpus"] if "gpus" in target else [target.get("gpu")]
        if (
            not isinstance(names, list)
            or not names
            or not all(isinstance(name, str) and name.strip() for name in names)
        ):
            raise CommandRejected(
                "the target names no GPU: gpu must be a UUID, a PCI address or an index, or gpus a list of them"
            )
        if len(names) > MOST_GPUS:
            raise CommandRejected(f"the target names {len(names)} GPUs; a command may name {MOST_GPUS}")
        uuids: dict[str, None] = {}  # an ordered set
        errors: dict[str, GpuError] = {}
        for name in names:
            try:
                uuids[self.control.gpus.find(name).uuid] = None
            except GpuError as error:
                errors[name] = error
        if errors:
            raise outputs.refusal_of(errors, len(names))
        return list(uuids)

    def _undo(self, command_id: str, cap_id: str) -> Mapping[str, Any]:
        by = f"undo {command_id}"
        ended_by = self.control.ended_by(cap_id)
        outcomes = self.control.end({cap_id}, by)
        # GPUs whose cap this undo had ended before the agent was restarted, or whose limit is not restored yet.
        begun = [
            uuid
            for uuid, state in self.control.ledger.all().items()
            if uuid not in outcomes
            and (cap := state.cap(cap_id)) is not None
            and (cap.ended_by == by == ended_by or state.needs_reconciling)
        ]
        if outcomes or begun:
            return self._output_if_restored(outcomes | self.control.reconcile(begun))
        note = outputs.end_reason(ended_by) if ended_by else "no such cap is active here"
        return undoing.nothing_to_undo(undoing.NOT_IN_FORCE, note=note)

    def _restore(self, command_id: str, uuids: Sequence[str]) -> Mapping[str, Any]:
        cap_ids = {cap.id for uuid in uuids for cap in self.control.ledger.of(uuid).caps}
        self.control.record_ended(cap_ids, f"undo {command_id}", uuids)
        return self._output_if_restored(self.control.reconcile(uuids))

    def _output_if_restored(self, outcomes: Outcomes) -> Mapping[str, Any]:
        errors = outputs.errors_of(outcomes)
        if errors:
            reason = "; ".join(f"{uuid}: {error}" for uuid, error in errors.items())
            raise CommandFailed(f"not restored yet: {reason}. The agent keeps trying", {"owed": sorted(errors)})
        return outputs.one_or_all(outputs.describe_restored(outcomes), len(outcomes) > 1)


class RenewLeaseExecutor(Struct, frozen=True):
    """Extends leases of caps to ``issued_at + lease_seconds``.

    - ``holds``: IDs of the commands that set the caps
    - ``again``: those to reapply if expired
    """

    control: PowerControl
    action: str = "gpu.renew_lease"
    queue: str = "gpu"

    def perform(self, accepted: AcceptedCommand) -> Mapping[str, Any]:
        command = accepted.command
        cap_ids, again = _ids(command.params, "holds"), _ids(command.params, "again", [])
        # From the time of issue, so that a repeated or late renewal changes nothing.
        until = command.issued_at.timestamp() + _number(command.params, "lease_seconds", DEFAULT_LEASE)
        renewed = self.control.renew(set(cap_ids), until)
        outcomes = {
            cap_id: self.control.set_again(cap_id, until)
            for cap_id in cap_ids
            if cap_id in again and cap_id not in renewed
        }
        failures = {cap_id: reason for cap_id, by_gpu in outcomes.items() if (reason := _set_again_failure(by_gpu))}
        renewed |= {cap_id for cap_id, by_gpu in outcomes.items() if by_gpu and cap_id not in failures}
        unknown = [cap_id for cap_id in cap_ids if cap_id not in renewed]
        ended = {cap_id: by for cap_id in unknown if (by := self.control.ended_by(cap_id)) is not None}
        optional = {
            "ended": {cap_id: outputs.end_reason(by) + failures.get(cap_id, "") for cap_id, by in ended.items()},
            "lapsed": [cap_id for cap_id in unknown if self.control.has_expired(cap_id)],
            "again": {
                cap_id: outputs.describe_caps(cap_id, outcomes[cap_id]) for cap_id in outcomes if cap_id in renewed
            },
        }
        return {
            "renewed": [cap_id for cap_id in cap_ids if cap_id in renewed],
            "unknown": unknown,
            **{name: value for name, value in optional.items() if value},
        }


def _requested(params: Mapping[str, Any]) -> Callable[[PowerLimits], int] | None:
    """Return a function from a card's limits to milliwatts; None if the caps are to end.

    Raises CommandRejected; the function raises NotSupported.
    """
    names = [name for name in ("watts", "percent", "restore") if params.get(name) is not None]
    if len(names) != 1:
        raise CommandRejected("give exactly one of watts and percent")
    if names == ["restore"]:
        if params["restore"] is not True:
            raise CommandRejected("restore can only be true")
        return None
    value = _number(params, names[0], 0.0)
    if names == ["watts"]:
        return lambda _: round(value * 1000)
    if value > 100:
        raise CommandRejected(f"percent is of the card's default limit, and at most 100, not {value:g}")

    def fraction_of_default(limits: PowerLimits) -> int:
        if limits.default_mw is None:
            raise NotSupported("the card does not report its default limit, so percent is undefined: use watts")
        return round(limits.default_mw * value / 100)

    return fraction_of_default


def _ids(params: Mapping[str, Any], name: str, default: Sequence[str] | None = None) -> Sequence[str]:
    value = params.get(name, default)
    if not isinstance(value, list) or not all(isinstance(element, str) for element in value):
        raise CommandRejected(f"{name} must be a list of command ids")
    return value


def _number(params: Mapping[str, Any], name: str, default: float) -> float:
    value = params.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise CommandRejected(f"{name} must be a number above 0 and below 1e9, not {value!r:.100}")
    return float(value)


def _set_again_failure(outcomes: Outcomes) -> str:
    errors = [str(error) for error in outputs.errors_of(outcomes).values()]
    return f", and it could not be reapplied: {'; '.join(errors)}" if errors else ""
