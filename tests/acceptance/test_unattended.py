"""A training run that nobody looks after: three faults, a hang among them, and everything real.

The short form of ``benchmarks.unattended``: PyTorch trains on the CPU with `trainmedic.torch`, Prometheus evaluates
the shipped rules, Alertmanager posts to ``trainmedic serve``, and the shipped playbooks repair.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
from benchmarks.unattended import __main__ as unattended
from benchmarks.unattended import faults, phases

REPAIRED_BY = {
    faults.NAN: "training-loss-nan: job.rollback",
    faults.RATE: "training-learning-rate-off: job.rollback",
    faults.HANG: "training-hang: job.rollback",
}


def test_a_run_gets_over_a_nan_a_wrong_rate_and_a_hang_without_a_person(tmp_path: Path) -> None:
    """Each by its own playbook, in seconds; and it learns what it would have learnt without them."""
    plan = unattended.SHORT
    outcome = unattended.compare(tmp_path, plan)
    told = outcome.told
    calm, alone, medic = (outcome.arms[name] for name in (unattended.CALM, unattended.ALONE, unattended.MEDIC))

    assert {one.kind: one.repairs[0].split(",")[0] for one in told} == REPAIRED_BY
    assert all(one.is_repaired and not one.told_people for one in told), unattended.report(outcome)
    assert all(set(one.seconds) == set(phases.PHASES) for one in told)

    assert medic.end["event"] == "finished"
    assert medic.end["step"] == plan.steps
    assert medic.end["validation"] < calm.end["validation"] * 1.05
    wasted = medic.end["executed"] - plan.steps
    assert 0 < wasted < len(told) * (plan.checkpoint_every + 100)

    # The same faults, with nobody there: no numbers any more, and then nothing at all.
    assert alone.only("nan") is not None
    assert alone.end["kind"] == faults.HANG
    assert alone.end["validation"] != alone.end["validation"]
