"""Parameters of job commands are typed and checked before the training loop sees them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import trainmedic
from trainmedic.errors import Rejected
from trainmedic.job import parameters
from trainmedic_server.actions import jobs


@pytest.mark.parametrize(
    ("action", "params", "typed"),
    [
        ("job.checkpoint", {}, trainmedic.Checkpoint()),
        ("job.rollback", {}, trainmedic.Rollback()),
        (
            "job.rollback",
            {"before": "2026-01-31T12:00:00.000000Z", "skip_batches": 200},
            trainmedic.Rollback(before=datetime(2026, 1, 31, 12, tzinfo=UTC), skip_batches=200),
        ),
        ("job.rollback", {"step": 0, "before": None}, trainmedic.Rollback(step=0)),
        ("job.scale_lr", {"factor": 2}, trainmedic.ScaleLr(2.0)),
        ("job.scale_batch", {"factor": 0.5}, trainmedic.ScaleBatch(0.5, keep_global_batch=True)),
        ("job.accumulate", {"factor": 0.25}, trainmedic.Accumulate(0.25)),
        ("job.dataloader_workers", {"count": 0}, trainmedic.DataloaderWorkers(0)),
        ("job.dataloader_workers", {"at_most": 3}, trainmedic.DataloaderWorkers(at_most=3)),
        ("job.dataloader_workers", {"at_most": 3, "count": None}, trainmedic.DataloaderWorkers(at_most=3)),
        ("job.empty_cache", {}, trainmedic.EmptyCache()),
        ("job.pause", {"max": "1h30m"}, trainmedic.Pause(timedelta(minutes=90))),
        ("job.resume", {}, trainmedic.Resume()),
        ("job.stop", {"checkpoint": False}, trainmedic.Stop(checkpoint=False)),
        ("acme.dance", {"anything": [1]}, None),
    ],
)
def test_good_parameters_become_a_typed_value(action: str, params: dict[str, Any], typed: Any) -> None:
    """An action that is not known is handed on as it is."""
    assert parameters.parse(action, params) == typed


@pytest.mark.parametrize(
    ("action", "params", "named"),
    [
        ("job.checkpoint", {"force": True}, "force"),
        ("job.rollback", {"step": 1, "steps_back": 1}, "steps_back"),
        ("job.rollback", {"step": -1}, "step"),
        ("job.rollback", {"step": 1.0}, "step"),
        ("job.rollback", {"step": True}, "step"),
        ("job.rollback", {"step": 10**400}, "step"),
        ("job.rollback", {"steps_back": 2**63}, "steps_back"),
        ("job.rollback", {"skip_batches": 1_000_001}, "skip_batches"),
        ("job.rollback", {"before": "yesterday"}, "before"),
        ("job.rollback", {"before": "2026-01-31T12:00:00"}, "before"),
        ("job.rollback", {"before": 7}, "before"),
        ("job.rollback", {"skip_batches": None}, "skip_batches"),
        ("job.scale_lr", {}, "factor"),
        ("job.scale_lr", {"factor": float("nan")}, "factor"),
        ("job.scale_lr", {"factor": -1}, "factor"),
        ("job.scale_lr", {"factor": 0}, "factor"),
        ("job.scale_lr", {"factor": 10**400}, "factor"),
        ("job.scale_lr", {"factor": -(10**400)}, "factor"),
        ("job.scale_lr", {"factor": "0.5"}, "factor"),
        ("job.scale_lr", {"factor": [0.5]}, "factor"),
        ("job.dataloader_workers", {"count": 10**400}, "count"),
        ("job.dataloader_workers", {"at_most": -1}, "at_most"),
        ("job.dataloader_workers", {"at_most": True}, "at_most"),
        ("job.dataloader_workers", {"count": 1, "at_most": 1}, "count and at_most"),
        ("job.dataloader_workers", {}, "count or at_most"),
        ("job.scale_batch", {"factor": 1, "keep_global_batch": 1}, "keep_global_batch"),
        ("job.pause", {"extends": 5}, "extends"),
        ("job.pause", {"extends": ""}, "extends"),
        ("job.pause", {"max": "0s"}, "max"),
        ("job.pause", {"max": "31d"}, "max"),
        ("job.pause", {"max": "9" * 50 + "d"}, "max"),
        ("job.pause", {"max": "soon"}, "max"),
        ("job.pause", {"max": 60}, "max"),
    ],
)
def test_a_bad_parameter_is_named(action: str, params: dict[str, Any], named: str) -> None:
    """The reason goes into the history."""
    with pytest.raises(ValueError, match=named):
        parameters.parse(action, params)


def test_the_server_and_the_sdk_know_the_same_commands() -> None:
    """Every job action of the server has its typed parameters here, with the same names; the job's own have none."""
    fixed = [kind for kind in jobs.ACTIONS if kind is not jobs.JobOwnCommand]
    sent = {kind.name: set(kind.Params.model_fields) for kind in fixed}
    known = {name: set(kind.__dataclass_fields__) for name, kind in parameters.ACTIONS.items()}
    assert sent == known


@pytest.mark.parametrize(
    ("present", "at_most", "wanted"),
    [(9, 3, 3), (4, 3, 3), (3, 3, None), (2, 3, None), (0, 3, None), (1, 0, 0), (0, 0, None)],
)
def test_an_upper_bound_only_ever_lowers_the_workers(present: int, at_most: int, wanted: int | None) -> None:
    """A job that has no more than the bound keeps what it has, and says so."""
    bound = trainmedic.DataloaderWorkers(at_most=at_most)
    if wanted is None:
        with pytest.raises(Rejected, match=f"nothing to lower: each data loader has {present} worker"):
            bound.wanted(present)
    else:
        assert bound.wanted(present) == wanted


def test_a_count_is_what_it_says() -> None:
    """More workers as well as fewer."""
    assert [trainmedic.DataloaderWorkers(count=5).wanted(present) for present in (0, 5, 9)] == [5, 5, 5]
