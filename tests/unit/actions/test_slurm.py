"""The actions ``slurm.*`` when Slurm's answer is lost, and when several runs hold a job."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from trainmedic_core.target import Target, TargetKind
from trainmedic_server.actions import registry
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.errors import ClusterUnavailable, ObjectMissing, OutcomeUnknown, TemporaryFailure
from trainmedic_server.ports.actions import Call, Services
from trainmedic_server.ports.slurm import SlurmJob, SlurmNode

NOW = datetime.now(UTC)
ALERT = Alert("f" * 16, AlertStatus.FIRING, {"alertname": "SlurmJobHangs"}, {}, NOW)


class OneJob:
    """Stand-in for Slurm with one running job. It does not model states, permissions, or delays of slurmctld."""

    def __init__(self) -> None:
        self.known = SlurmJob("7", "llm", "mia", frozenset({"RUNNING"}), "n1", False, True, 0)
        self.signals: list[str] = []
        self.lost: ClusterUnavailable | None = None
        """Failure of the call that sends a signal."""
        self.is_down = False
        """Whether reading fails."""

    async def job(self, job_id: str) -> SlurmJob:
        if self.is_down:
            raise ClusterUnavailable("slurmrestd: connection refused")
        return self.known

    async def signal(self, job_id: str, signal: str, with_batch: bool = False) -> None:
        if self.lost is not None:
            raise self.lost
        self.signals.append(signal)
        self.is_down = True

    async def hold(self, job_id: str) -> None:
        self.known = replace(self.known, is_held=True)

    async def unhold(self, job_id: str) -> None:
        self.known = replace(self.known, is_held=False)

    async def set_admin_comment(self, job_id: str, text: str) -> None:
        self.known = replace(self.known, admin_comment=text)


JOB = Target(TargetKind.JOB, job="slurm:7")


async def do(slurm: OneJob, name: str, run_id: str = "a", target: Target = JOB, **given: Any) -> Any:
    services = Services(SystemClock(), None, None, slurm=slurm)  # type: ignore[arg-type]  # no bus and no HTTP is used
    action = registry.build(services).get(name)
    call = Call(
        command_id="c-1",
        run_id=run_id,
        playbook="hanging-job",
        target=target,
        params=action.Params.model_validate(given),
        reason="it hangs",
        issued_at=NOW,
        deadline=datetime.now(UTC) + timedelta(seconds=2),
        alert=ALERT,
    )
    return await action.perform(call)


async def test_a_signal_whose_answer_was_lost_is_not_reported_as_failed() -> None:
    """A failed attempt is retried, and the job would get the signal twice."""
    slurm = OneJob()
    slurm.lost = ClusterUnavailable("slurmrestd: no answer in 20 s", may_be_done=True)
    with pytest.raises(OutcomeUnknown, match="no answer in 20 s"):
        await do(slurm, "slurm.signal", signal="USR1")


async def test_a_signal_that_was_not_sent_may_be_tried_again() -> None:
    slurm = OneJob()
    slurm.lost = ClusterUnavailable("slurmrestd: connection refused")
    with pytest.raises(TemporaryFailure):
        await do(slurm, "slurm.signal", signal="USR1")


async def test_a_signal_counts_as_sent_when_slurm_fails_after_it() -> None:
    """Nothing that is read after the signal can fail the step."""
    slurm = OneJob()
    output = await do(slurm, "slurm.signal", signal="USR1")
    assert (slurm.signals, output["note"]) == (["USR1"], "Slurm has taken the signal")


async def test_a_job_held_by_two_runs_is_released_with_the_second_undo() -> None:
    """The admin comment names both."""
    slurm = OneJob()
    await do(slurm, "slurm.hold", "a")
    await do(slurm, "slurm.hold", "b")
    first = await do(slurm, "slurm.release", "a", restore=True)
    assert (first["held"], first["note"]) == (True, "stays held for other runs")
    second = await do(slurm, "slurm.release", "b", restore=True)
    assert (second["held"], slurm.known.admin_comment) == (False, "")


async def test_the_undo_of_a_released_hold_leaves_a_persons_hold() -> None:
    """A release ends the holds of all runs, so their undos find none of theirs."""
    slurm = OneJob()
    slurm.known = replace(slurm.known, admin_comment="Mia's job")
    await do(slurm, "slurm.hold", "a")
    await do(slurm, "slurm.release", "c")
    assert slurm.known.admin_comment == "Mia's job"
    await slurm.hold("7")
    output = await do(slurm, "slurm.release", "a", restore=True)
    assert output["held"] is True


async def test_a_cluster_that_lists_no_nodes_is_no_proof_that_a_node_is_gone() -> None:
    """A user who may not see nodes gets an empty list. The undo of a drain stays pending."""

    class Blind(OneJob):
        async def node(self, name: str) -> SlurmNode:
            raise ObjectMissing(f"Slurm has no node {name}")

        async def nodes(self) -> list[SlurmNode]:
            return []

    with pytest.raises((TemporaryFailure, OutcomeUnknown), match="lists no nodes"):
        await do(Blind(), "slurm.resume", target=Target(TargetKind.NODE, node="n1"), restore=True)
