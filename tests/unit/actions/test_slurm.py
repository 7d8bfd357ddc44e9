"""The actions ``slurm.*`` when Slurm's answer is lost, and when several runs hold a job."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace

from tests.support.clocks import START, ManualClock
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.actions import registry, slurm_marks
from trainmedic_server.adapters.slurm_topology import topology_of
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.domain.topology import NO_SLURM, SlurmTopology
from trainmedic_server.errors import (
    ActionFailure,
    ClusterRefused,
    ClusterUnavailable,
    ObjectMissing,
    OutcomeUnknown,
    PermanentFailure,
    TemporaryFailure,
)
from trainmedic_server.ports.actions import Action, Call, Services
from trainmedic_server.ports.outside import Presence
from trainmedic_server.ports.slurm import UNLIMITED, JobChange, SlurmJob, SlurmNode

NOW = START
ALERT = Alert("f" * 16, AlertStatus.FIRING, {"alertname": "SlurmJobHangs"}, {}, NOW)


class Slurm:
    """What the stand-ins share: how often they were read."""

    def __init__(self) -> None:
        self.readings = 0


class OneJob(Slurm):
    """Stand-in for Slurm with one running job. It does not model states, permissions, or delays of slurmctld."""

    def __init__(self) -> None:
        super().__init__()
        self.known = SlurmJob("7", "llm", "mia", frozenset({"RUNNING"}), "n1", False, True, 0)
        self.signals: list[str] = []
        self.lost: ClusterUnavailable | None = None
        """Failure of the call that sends a signal."""
        self.is_down = False
        """Whether reading fails."""

    @property
    def topology(self) -> SlurmTopology:
        return topology_of([], [self.known], NO_SLURM)

    async def job(self, job_id: str) -> SlurmJob:
        if self.is_down:
            raise ClusterUnavailable("slurmrestd: connection refused")
        self.readings += 1
        return self.known

    async def node(self, name: str) -> SlurmNode:
        return SlurmNode(name, name, name, frozenset({"IDLE"}), "")

    async def signal(self, job_id: str, signal: str, with_batch: bool = False) -> None:
        if self.lost is not None:
            raise self.lost
        self.signals.append(signal)
        self.is_down = True

    async def hold(self, job_id: str) -> None:
        self.known = replace(self.known, is_held=True)

    async def unhold(self, job_id: str) -> None:
        self.known = replace(self.known, is_held=False)

    async def update(self, job_id: str, change: JobChange) -> None:
        changed = {name: value for name, value in structs.asdict(change).items() if value is not None}
        if changed.get("time_limit") == UNLIMITED:
            changed["time_limit"] = None
        self.known = replace(self.known, **changed)

    async def set_admin_comment(self, job_id: str, text: str) -> None:
        self.known = replace(self.known, admin_comment=text)


JOB = Target(TargetKind.JOB, job="slurm:7")


async def do(slurm: OneJob | OneNode, name: str, run_id: str = "a", target: Target = JOB, **given: Any) -> Any:
    services = Services(ManualClock(NOW), None, None, slurm=slurm)  # type: ignore[arg-type]  # no bus and no HTTP is used
    action = registry.build(services).get(name)
    return await action.perform(call_of(action, target, given, run_id))


def call_of(action: Action, target: Target, given: Mapping[str, Any], run_id: str = "a") -> Call:
    return Call(
        command_id="c-1",
        run_id=run_id,
        playbook="hanging-job",
        target=target,
        params=action.Params.model_validate(given),
        reason="it hangs",
        issued_at=NOW,
        deadline=NOW + timedelta(seconds=2),
        alert=ALERT,
    )


async def test_a_signal_with_a_lost_answer_is_not_reported_as_failed() -> None:
    """A failed attempt is retried, and the job would get the signal twice."""
    slurm = OneJob()
    slurm.lost = ClusterUnavailable("slurmrestd: no answer in 20 s", may_be_done=True)
    with pytest.raises(OutcomeUnknown, match="no answer in 20 s"):
        await do(slurm, "slurm.signal", signal="USR1")


async def test_an_unsent_signal_may_be_retried() -> None:
    slurm = OneJob()
    slurm.lost = ClusterUnavailable("slurmrestd: connection refused")
    with pytest.raises(TemporaryFailure):
        await do(slurm, "slurm.signal", signal="USR1")


async def test_a_signal_counts_as_sent_when_slurm_fails_after_it() -> None:
    """No failed read after the signal can fail the step."""
    slurm = OneJob()
    output = await do(slurm, "slurm.signal", signal="USR1")
    assert (slurm.signals, output["note"]) == (["USR1"], "Slurm has taken the signal")


async def test_a_job_held_by_two_runs_is_released_by_the_second_undo() -> None:
    """The admin comment names both runs."""
    slurm = OneJob()
    await do(slurm, "slurm.hold", "a")
    await do(slurm, "slurm.hold", "b")
    first = await do(slurm, "slurm.release", "a", restore=True)
    assert (first["held"], first["note"]) == (True, "stays held for other runs")
    second = await do(slurm, "slurm.release", "b", restore=True)
    assert (second["held"], slurm.known.admin_comment) == (False, "")


async def test_the_undo_of_a_released_hold_leaves_a_users_hold() -> None:
    """A release ends the holds of all runs, so their undos find none of their own."""
    slurm = OneJob()
    slurm.known = replace(slurm.known, admin_comment="Mia's job")
    await do(slurm, "slurm.hold", "a")
    await do(slurm, "slurm.release", "c")
    assert slurm.known.admin_comment == "Mia's job"
    await slurm.hold("7")
    output = await do(slurm, "slurm.release", "a", restore=True)
    assert output["held"] is True


@pytest.mark.parametrize("name", ["slurm.release", "slurm.update"])
async def test_a_job_hidden_by_slurm_does_not_count_as_gone(name: str) -> None:
    """Slurm refuses an empty change of it, so the undo stays pending. For a deleted job, it finds nothing to undo."""

    class Hidden(OneJob):
        answer: ActionFailure = ClusterRefused("Slurm: access denied")

        async def job(self, job_id: str) -> SlurmJob:
            raise ObjectMissing(f"Slurm knows no job {job_id}")

        async def update(self, job_id: str, change: JobChange) -> None:
            assert change == JobChange()
            raise self.answer

    slurm = Hidden()
    given = {"priority": 7} if name == "slurm.update" else {}
    with pytest.raises(ActionFailure, match="access denied"):
        await do(slurm, name, restore=True, **given)
    slurm.answer = ObjectMissing("Slurm: invalid job id")
    assert (await do(slurm, name, restore=True, **given))["note"] == "it is gone: nothing to take back"


async def test_an_update_and_its_undo_are_exact() -> None:
    """This holds also for a job that excluded nodes before, and after two steps of one run."""
    slurm = OneJob()
    before = SlurmJob("7", "llm", "mia", frozenset({"PENDING"}), "", False, True, 0, ("n[1-2]",), priority=9)
    slurm.known = before
    first: dict[str, Any] = {"exclude_nodes": ["n7"], "time_limit": "2h"}
    await do(slurm, "slurm.update", **first)
    assert (slurm.known.excluded_nodes, slurm.known.time_limit) == (("n1", "n2", "n7"), timedelta(hours=2))
    await do(slurm, "slurm.update", exclude_nodes=["n8"])
    await do(slurm, "slurm.update", **first)  # again, as after a crash
    assert slurm.known.excluded_nodes == ("n1", "n2", "n7")
    await do(slurm, "slurm.update", exclude_nodes=["n8"])
    await do(slurm, "slurm.update", restore=True, exclude_nodes=["n8"])
    await do(slurm, "slurm.update", restore=True, **first)
    assert slurm.known == replace(before, excluded_nodes=("n1", "n2"))


async def test_the_undo_of_an_update_leaves_another_users_changes() -> None:
    slurm = OneJob()
    slurm.known = replace(slurm.known, priority=9)
    await do(slurm, "slurm.update", priority=100, time_limit="2h")
    slurm.known = replace(slurm.known, time_limit=timedelta(hours=5))
    output = await do(slurm, "slurm.update", restore=True, priority=100, time_limit="2h")
    assert output["note"] == "time_limit has been changed since, and stays"
    assert (slurm.known.priority, slurm.known.time_limit, slurm.known.admin_comment) == (9, timedelta(hours=5), "")


async def test_unreadable_excluded_nodes_are_left_unchanged() -> None:
    """The undo could not restore them."""
    slurm = OneJob()
    slurm.known = replace(slurm.known, excluded_nodes=("n[1-9999]",))
    with pytest.raises(PermanentFailure, match="list of excluded nodes names more than 4096 hosts"):
        await do(slurm, "slurm.update", exclude_nodes=["n1"])
    assert slurm.known.excluded_nodes == ("n[1-9999]",)


async def test_a_held_job_gets_no_priority() -> None:
    """A new priority would release the job."""
    slurm = OneJob()
    slurm.known = replace(slurm.known, is_held=True)
    with pytest.raises(PermanentFailure, match="would release it"):
        await do(slurm, "slurm.update", priority=100)


class OneNode(Slurm):
    """Stand-in for Slurm with one node. It does not model states other than IDLE and DRAIN, or delays of slurmctld."""

    def __init__(self) -> None:
        super().__init__()
        self.known = SlurmNode("n1", "n1", "n1", frozenset({"IDLE"}), "")

    @property
    def topology(self) -> SlurmTopology:
        return topology_of([self.known], [], NO_SLURM)

    async def node(self, name: str) -> SlurmNode:
        self.readings += 1
        return self.known

    async def drain(self, node: str, reason: str, resume_after: timedelta | None = None) -> None:
        ends_at = self.known.resume_after
        if resume_after is not None:
            ends_at = None if resume_after == UNLIMITED else NOW + resume_after
        states = frozenset({"IDLE", "DRAIN"})
        self.known = replace(self.known, states=states, reason=reason, resume_after=ends_at)

    async def set_reason(self, node: str, reason: str) -> None:
        self.known = replace(self.known, reason=reason)

    async def undrain(self, node: str) -> None:
        self.known = SlurmNode("n1", "n1", "n1", frozenset({"IDLE"}), "")


NODE = Target(TargetKind.NODE, node="n1")


async def test_an_undo_whose_earlier_request_arrived_late_is_done() -> None:
    """Slurm refuses to end a drain that has ended in the same way as one that it cannot end."""

    class Late(OneNode):
        is_done = True

        async def undrain(self, node: str) -> None:
            if self.is_done:
                await super().undrain(node)
            raise ClusterRefused("Invalid node state specified")

    slurm = Late()
    await do(slurm, "slurm.drain", target=NODE)
    slurm.is_done = False
    with pytest.raises(ClusterRefused):
        await do(slurm, "slurm.resume", target=NODE, restore=True)
    slurm.is_done = True
    assert (await do(slurm, "slurm.resume", target=NODE, restore=True))["state"] == "IDLE"


async def test_what_another_has_done_is_no_change_of_ours() -> None:
    """The outputs of a drain and a hold report it."""
    node, job = OneNode(), OneJob()
    assert "changed" not in await do(node, "slurm.drain", target=NODE)
    assert "changed" not in await do(node, "slurm.drain", target=NODE)  # a resumed attempt
    await node.drain("n1", "NHC: disk")
    assert (await do(node, "slurm.drain", target=NODE))["changed"] is False
    await job.hold("7")
    assert (await do(job, "slurm.hold"))["changed"] is False
    assert "changed" not in await do(job, "slurm.release")
    assert "changed" not in await do(job, "slurm.hold")
    job.known = replace(job.known, states=frozenset({"CANCELLED"}))
    assert "changed" not in await do(job, "slurm.cancel")  # an unanswered cancel of ours looks the same


async def test_an_empty_node_list_does_not_prove_that_a_node_is_gone() -> None:
    """A user who may not see nodes gets an empty list. The undo of a drain stays pending."""

    class Blind(OneJob):
        async def node(self, name: str) -> SlurmNode:
            raise ObjectMissing(f"Slurm has no node {name}")

        async def nodes(self) -> list[SlurmNode]:
            return []

    with pytest.raises((TemporaryFailure, OutcomeUnknown), match="lists no nodes"):
        await do(Blind(), "slurm.resume", target=Target(TargetKind.NODE, node="n1"), restore=True)


class NoJobs:
    """A bus without connected jobs."""

    async def jobs(self) -> list[Presence]:
        return []


async def hold_by_name(slurm: OneJob, slurm_id: str | None, name: str, **given: Any) -> Any:
    services = Services(ManualClock(NOW), NoJobs(), None, slurm=slurm, slurm_id_of={"llm": slurm_id}.get)  # type: ignore[arg-type]  # no HTTP is used
    action = registry.build(services).get(name)
    return await action.perform(call_of(action, Target(TargetKind.JOB, job="llm"), given))


async def test_an_sdk_job_is_identified_by_the_id_that_it_reports() -> None:
    """The undo uses the id that was held, because the job may be gone by then."""
    slurm = OneJob()
    output = await hold_by_name(slurm, "7", "slurm.hold")
    assert slurm.known.is_held
    action = registry.build(Services(ManualClock(NOW), None, None)).get("slurm.hold")  # type: ignore[arg-type]
    inverse = action.inverse(action.Params(), output)
    assert inverse is not None
    assert inverse.params["job_id"] == "7"
    await hold_by_name(slurm, None, inverse.action, **inverse.params)
    assert not slurm.known.is_held


async def test_a_job_that_reports_no_slurm_id_is_rejected() -> None:
    """A name is never looked up in Slurm, where it is not unique."""
    with pytest.raises(PermanentFailure, match="the Slurm job is not known: give job_id"):
        await hold_by_name(OneJob(), None, "slurm.hold")


async def test_an_update_of_an_sdk_job_is_undone_by_its_id() -> None:
    """The mark in the admin comment is the same with and without the id."""
    slurm = OneJob()
    slurm.known = replace(slurm.known, states=frozenset({"PENDING"}))
    output = await hold_by_name(slurm, "7", "slurm.update", exclude_nodes=["n1"])
    assert slurm.known.excluded_nodes == ("n1",)
    action = registry.build(Services(ManualClock(NOW), None, None)).get("slurm.update")  # type: ignore[arg-type]
    inverse = action.inverse(action.Params(exclude_nodes=["n1"]), output)
    assert inverse is not None
    await hold_by_name(slurm, None, inverse.action, **inverse.params)
    assert (slurm.known.excluded_nodes, slurm.known.admin_comment) == ((), "")


def test_a_reason_is_one_printable_line_without_a_trailing_quote() -> None:
    """The agent rejects other characters, and scontrol removes the quote."""
    assert slurm_marks.marked(("r1",), 'a\u200bb\x1b\n say "hi"') == 'trainmedic:r1 a b say "hi'


class EndingJob(OneJob):
    """A requeued job whose processes have not ended at first, as Slurm shows it. The first requeue is another's."""

    def __init__(self) -> None:
        super().__init__()
        self.known = replace(
            self.known, states=frozenset({"PENDING", "COMPLETING"}), admin_comment="[trainmedic:requeue c-1 0]"
        )
        self.refused = 0

    async def requeue(self, job_id: str, hold: bool = False) -> None:
        self.refused += 1
        if self.refused > 1:
            self.known = replace(self.known, states=frozenset({"PENDING"}), restarts=1)
        raise ClusterRefused("Job is pending execution")


async def test_a_requeue_started_by_an_earlier_attempt_is_awaited_until_the_job_has_ended() -> None:
    """Slurm refuses another requeue, and has not counted the restart yet."""
    slurm = EndingJob()
    output = await do(slurm, "slurm.requeue")
    assert output["restarts"] == 1


async def test_a_completed_requeue_with_a_lost_outcome_is_not_repeated() -> None:
    """The mark stays in the job's admin comment; another command's mark is replaced."""
    slurm = EndingJob()
    slurm.known = replace(slurm.known, states=frozenset({"RUNNING"}), restarts=1)
    output = await do(slurm, "slurm.requeue")
    assert (output["restarts"], slurm.refused) == (1, 0)
    slurm.known = replace(slurm.known, admin_comment="mine[trainmedic:requeue c-0 0]")
    slurm.refused = 1
    with pytest.raises(ClusterRefused):
        await do(slurm, "slurm.requeue")
    assert slurm.known.admin_comment == "mine[trainmedic:requeue c-1 1]"


async def test_a_repeated_undo_of_an_update_blames_no_user_for_its_own_change() -> None:
    """The undo is repeated, for example, after a crash between the change and the removal of the mark."""
    slurm = OneJob()
    slurm.known = replace(slurm.known, priority=9)
    await do(slurm, "slurm.update", priority=100)
    slurm.known = replace(slurm.known, priority=9)
    output = await do(slurm, "slurm.update", restore=True, priority=100)
    assert not output.get("note")
    assert (slurm.known.priority, slurm.known.admin_comment) == (9, "")
