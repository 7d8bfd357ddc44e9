"""A training run of four ranks that nobody looks after: three faults, a killed rank among them, and everything real.

The short form of ``benchmarks.unattended``: PyTorch trains on the CPU with `trainmedic.torch`, started by
``trainmedic-run -- torchrun`` on two nodes; Prometheus evaluates the shipped rules, Alertmanager posts to
``trainmedic serve``, and the shipped playbooks repair.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
from benchmarks.unattended import __main__ as unattended
from benchmarks.unattended import arms, faults, phases

REPAIRED_BY = {
    faults.NAN: ("training-loss-nan: job.rollback",),
    # With durations so short, the alert on the rate does not always come soon enough to silence that on the loss.
    faults.RATE: ("training-learning-rate-off: job.rollback", "training-loss-spike: job.rollback"),
    faults.KILL_RANK: ("launcher: resumed",),
}


def test_a_run_survives_a_nan_a_wrong_rate_and_a_killed_rank_unattended(tmp_path: Path) -> None:
    """The playbooks or the launcher repair each within seconds; the run learns the same as without them.

    People learn of the killed rank alone, by the verdict on the attempt, while the launcher starts the job again.
    """
    plan = unattended.SHORT
    found = arms.run(tmp_path, plan)
    calm, alone, medic = (found.by_name[name] for name in (arms.CALM, arms.ALONE, arms.MEDIC))
    told = phases.accounts(medic.events, medic.executions, found.runs)
    printed = unattended.report(plan, found)

    assert {one.kind for one in told} == set(REPAIRED_BY)
    assert all(any(repair.startswith(REPAIRED_BY[one.kind]) for repair in one.repairs) for one in told), printed
    assert all(one.is_repaired for one in told), printed
    assert {one.kind for one in told if one.told_people} <= {faults.KILL_RANK}, printed
    for one in told:
        assert set(one.seconds) == set(phases.RESTART_PHASES if one.kind == faults.KILL_RANK else phases.PHASES), (
            printed
        )

    end, usual = medic.only("finished"), calm.only("finished")
    assert end is not None
    assert usual is not None
    assert end["step"] == plan.steps
    assert end["agree"]
    assert end["validation"] < usual["validation"] * 1.05
    # What lay in memory is newer than what lay on the disk.
    killed = next(one for one in told if one.kind == faults.KILL_RANK)
    assert 0 <= killed.good_steps_lost < plan.checkpoint_every
    assert 0 < len(medic.executions) - plan.steps < len(told) * (plan.checkpoint_every + 100)

    # The same faults, with nobody there: it ends when the first process dies.
    assert alone.only("finished") is None
    assert alone.executions[-1].step < plan.steps // 2 + plan.checkpoint_every
