"""Base of the actions that a training job or a node agent performs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

from msgspec.structs import replace
from pydantic import BaseModel

from trainmedic.wire import envelope, undoing
from trainmedic_core import words
from trainmedic_core.problems import did_you_mean
from trainmedic_core.target import Target
from trainmedic_server import errors
from trainmedic_server.actions.base import BasicAction, NoParams, check_wanted, clearance_of
from trainmedic_server.domain.topology import SLURM, slurm_job_id
from trainmedic_server.ports.actions import Call, Clearance, Services
from trainmedic_server.ports.outside import Presence

WAITED_OUT = timedelta(seconds=1)  # the bus waits for missing replies until this long after the deadline
_MOST_SHOWN = 8
_LOOK_AGAIN_AFTER = timedelta(seconds=2)
_REFUSED = (envelope.REJECTED, envelope.UNSUPPORTED)
COMPARED = "verified"
"""Output member of receivers that checked the effect. In a reply ``failed``, the effect was wrong."""


class CommandAction(BasicAction):
    """Sends one command and waits for every rank that must reply.

    - All applied it: success. The output is the first rank's, with ``ranks`` (their number) and, for several,
      ``by_rank``.
    - All replied, and one found a wrong effect: `EffectDisproved`.
    - All replied, and none applied it: `PermanentFailure` if any refused it, otherwise `TemporaryFailure`.
    - Otherwise the outcome is unknown. The undo stays pending. Retries keep the command ID, so no rank applies it
      twice.
    """

    Params: ClassVar[type[BaseModel]] = NoParams
    waits_for_receiver: ClassVar[bool] = True
    """Whether an attempt waits for an absent receiver: a restarting job connects again."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._bus = services.bus
        self._clock = services.clock
        self._sent: dict[str, list[str]] = {}  # IDs of several commands that are one attempt, by the attempt's ID

    async def perform(self, call: Call) -> Mapping[str, Any]:
        call = replace(call, target=await self.target_for_commands(call))

        async def report_no_receiver() -> bool:
            if call.report_wait is not None:
                await call.report_wait(_why_not_connected(call.target) + await self._similar_job_hint(call.target))
            return not self.waits_for_receiver  # True ends the request

        replies = await self._bus.request(self._command(call), report_no_receiver)
        presence = None
        missing = "" if any(reply.is_final for reply in replies) else "no one answered"
        if missing or self._clock.now() >= call.deadline:  # before it, the bus returns only complete replies
            try:
                presence = await self._presence(call.target)
                missing = self._missing_replies(call, replies, presence)
            except errors.BusUnavailable:
                missing = missing or "it is unknown whether every rank answered"
                raise errors.OutcomeUnknown(f"{missing}, and Redis is unavailable", _outputs(replies)) from None
        receiver = _receiver(call.target)
        # An undo is tried again by a new command: receivers repeat replies.
        output = judge(receiver, replies, missing, trusts_failures=call.undo_of is not None or not self.harmful)
        if call.undo_of is not None:
            check_undone(receiver, replies, output, call.undoes_applied)
        return output

    async def target_for_commands(self, call: Call) -> Target:
        """Return the target under the name that takes commands: a Slurm job's SDK name, once connected.

        Raises PermanentFailure if several jobs run in the allocation, TemporaryFailure if none connects in time, and
        `check_wanted`'s errors.
        """
        target = call.target
        clearance: Clearance = "go_on"
        while target.job is not None and target.job.startswith(SLURM):
            try:
                jobs = sorted(
                    each.name for each in await self._bus.jobs() if f"{SLURM}{slurm_job_id(each.details)}" == target.job
                )
            except errors.BusUnavailable as error:
                raise errors.TemporaryFailure(
                    "it is unknown while Redis is unavailable which jobs are connected"
                ) from error
            if len(jobs) > 1:
                raise errors.PermanentFailure(
                    f"several connected jobs run in {target.job}: {', '.join(jobs)}; name one of them"
                )
            if jobs and clearance == "go_on":
                return replace(target, job=jobs[0])
            why = "the server is paused" if jobs else f"no connected job reports that it is {target.job}"
            if self._clock.now() + _LOOK_AGAIN_AFTER >= call.deadline:
                raise errors.TemporaryFailure(why)
            await self._clock.sleep_until(self._clock.now() + _LOOK_AGAIN_AFTER)
            clearance = await clearance_of(call)
            check_wanted(clearance, why)
        return target

    def outcome_saved(self, command_id: str) -> None:
        for sent_id in self._sent.pop(command_id, [command_id]):
            self._bus.acknowledge(sent_id)

    def wire_action(self, call: Call) -> str:
        return self.name

    def wire_params(self, call: Call) -> Mapping[str, Any]:
        return call.params.model_dump(mode="json", by_alias=True, exclude_none=True)

    def _command(self, call: Call) -> envelope.Command:
        target = call.target
        if target.job is None and target.node is None:
            raise errors.PermanentFailure(f"{self.name} works on a job or a node, not on {target.key}")
        parts = {"kind": str(target.kind), **target.parts}
        return envelope.Command(
            id=call.command_id,
            action=self.wire_action(call),
            target={name: value for name, value in parts.items() if value is not None},
            params=self.wire_params(call),
            run_id=call.run_id,
            playbook=call.playbook,
            reason=call.reason,
            issued_at=call.issued_at,
            expires_at=call.deadline,
            undo_of=call.undo_of,
        )

    async def _presence(self, target: Target) -> Presence | None:
        present = await (self._bus.jobs() if target.job is not None else self._bus.agents())
        name = target.job if target.job is not None else target.node
        return next((presence for presence in present if presence.name == name), None)

    async def _similar_job_hint(self, target: Target) -> str:
        """Return a similarly named connected job if the target was not connected lately, else ""."""
        try:
            known = [] if target.job is None else [presence.name for presence in await self._bus.jobs()]
        except errors.BusUnavailable:
            return ""
        return "" if target.job is None or self.services.may_connect(target.job) else did_you_mean(target.job, known)

    def _missing_replies(self, call: Call, replies: Sequence[envelope.Reply], presence: Presence | None) -> str:
        """Return which receivers have not replied, "" if all have.

        Without listed ranks, one final reply counts for all, unless the bus waited in vain for another.
        """
        finals = {reply.rank for reply in replies if reply.is_final}
        counts = [reply.ranks for reply in replies if reply.is_final and reply.ranks is not None]
        if counts and len(finals) < max(counts):
            return f"only {len(finals)} of {max(counts)} ranks of {_receiver(call.target)} answered in time"
        if not replies and (presence is None or (presence.doubt is not None and not presence.details)):
            return _why_not_connected(call.target, presence)
        expected = stated_ranks(presence)
        silent = sorted(expected - finals)
        if not silent and finals and (expected or self._clock.now() < call.deadline + WAITED_OUT):
            return ""
        begun = {reply.rank for reply in replies} - finals
        missing = f"{_receiver(call.target)} did not answer in time"
        if silent and call.target.job is not None:
            missing = f"{listed_ranks(silent)} of {missing}"
        elif finals:
            missing = f"not every rank of {_receiver(call.target)} answered in time"
        if begun:
            missing += f", but {'has' if len(begun) == 1 else 'have'} accepted the command"
        return missing if presence is not None else f"{missing}; {_why_not_connected(call.target)}"


def judge(
    receiver: str, replies: Sequence[envelope.Reply], missing: str, trusts_failures: bool = True
) -> Mapping[str, Any]:
    """Return the output if all ranks applied the command, otherwise raise. `missing`: who did not reply, or "".

    Without `trusts_failures`, a failure with ``may_be_done`` is an unknown outcome.
    """
    finals = sorted((reply for reply in replies if reply.is_final), key=lambda reply: reply.rank or 0)
    bad = [reply for reply in finals if reply.status != envelope.APPLIED]
    outputs = _outputs(finals)
    reason = "; ".join([*(_refusal(receiver, reply) for reply in bad[:4]), *([missing] if missing else [])])
    if len(bad) > 4:
        reason += f"; and {len(bad) - 4} more ranks"
    applied = [reply.rank for reply in finals if reply.status == envelope.APPLIED and reply.rank is not None]
    if applied and bad:
        reason = f"{listed_ranks(applied)} applied it, but {reason}"
    if not missing and any(reply.status == envelope.FAILED and COMPARED in reply.output for reply in bad):
        raise errors.EffectDisproved(reason, outputs)
    is_doubtful = not trusts_failures and any(reply.output.get("may_be_done") is True for reply in bad)
    if missing or is_doubtful or (bad and len(bad) < len(finals)):
        raise errors.OutcomeUnknown(reason, outputs)
    if bad:
        kind: type[errors.ActionFailure] = errors.TemporaryFailure
        if any(reply.status in _REFUSED for reply in bad):
            kind = errors.PermanentFailure
        raise kind(reason, outputs)
    return outputs


def check_undone(
    receiver: str, replies: Sequence[envelope.Reply], output: Mapping[str, Any], was_applied: bool
) -> None:
    """Raise TemporaryFailure if something may be left to revert. The retry needs a new ID: receivers repeat replies."""
    for reply in replies:
        if reply.is_final and (reason := undo_doubt(reply.output, was_applied)) is not None:
            raise errors.TemporaryFailure(f"{_sender(receiver, reply)} {reason}", output)


def _outputs(replies: Sequence[envelope.Reply]) -> dict[str, Any]:
    finals = sorted((reply for reply in replies if reply.is_final), key=lambda reply: reply.rank or 0)
    if not finals:
        return {}
    ranked = [reply for reply in finals if reply.rank is not None]
    output = dict(finals[0].output)
    if ranked:
        output["ranks"] = len(ranked)
    if len(ranked) > 1:
        output["by_rank"] = {
            str(reply.rank): {**reply.output, "status": reply.status, "at": envelope.write_time(reply.at)}
            for reply in ranked
        }
    return output


def _refusal(receiver: str, reply: envelope.Reply) -> str:
    sender = _sender(receiver, reply)
    verb = {
        envelope.REJECTED: "rejected the command",
        envelope.UNSUPPORTED: "does not support the command",
        envelope.FAILED: "failed",
        envelope.EXPIRED: "got the command too late",
    }[reply.status]
    reason = reply.output.get("reason")
    return f"{sender} {verb}: {reason}" if isinstance(reason, str) and reason else f"{sender} {verb}"


def _sender(receiver: str, reply: envelope.Reply) -> str:
    return receiver if reply.rank is None else f"rank {reply.rank} of {receiver}"


def stated_ranks(presence: Presence | None) -> set[int]:
    ranks = presence.details.get("ranks") if presence else None
    return {rank for rank in ranks if isinstance(rank, int)} if isinstance(ranks, list) else set()


def _receiver(target: Target) -> str:
    return f"job {target.job!r}" if target.job is not None else f"the agent on node {target.node!r}"


def _why_not_connected(target: Target, presence: Presence | None = None) -> str:
    if presence is not None:
        return f"{_receiver(target)} did not answer, and its presence is not trusted: {presence.doubt}"
    if target.job is not None:
        return f"no job named {target.job!r} is connected"
    command = f"trainmedic agent --node {shlex.quote(target.node or '')}"
    return f"no agent on node {target.node!r} is connected: start `{command}` there"


def listed_ranks(ranks: Sequence[int | str], most: int = _MOST_SHOWN) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {words.some([*map(str, ranks)], most, ', ')}"


def undo_doubt(output: Mapping[str, Any], was_applied: bool) -> str | None:
    """Return why an undo answered ``applied`` is uncertain, None if it is certain.

    A receiver that lost its memory also finds nothing to revert. So ``nothing_to_undo`` needs a reason:
    ``not_in_force``, or ``never_applied`` unless the command is recorded as applied.
    """
    if not output.get(undoing.NOTHING):
        return None
    match output.get(undoing.KNOWN):
        case undoing.NOT_IN_FORCE:
            return None
        case undoing.NEVER_APPLIED if was_applied:
            return "states that it never applied the command, which it had reported as applied"
        case undoing.NEVER_APPLIED:
            return None
        case _:
            return "states that there is nothing to undo, but not how it knows: it may have forgotten the command"
