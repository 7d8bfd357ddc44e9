"""A plain PyTorch training goes back exactly, or says how far not; over a real Redis."""

from __future__ import annotations

import errno
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset

import trainmedic
import trainmedic.torch
from tests.integration.plain_torch.training import Augmented, Training, same
from tests.support.command_sender import Commander
from trainmedic.recovery import checkpoints
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.health import CheckpointHealth

Begin = Callable[..., Training]

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=1000),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 50)),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 40, eta_min=1e-3),
}


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), **{"batch_size": 4, "shuffle": True, **options})


@pytest.mark.parametrize(
    ("schedule", "workers", "accumulation"),
    [("OneCycleLR", 2, 2), ("LambdaLR", 0, 1), ("CosineAnnealingLR", 0, 3)],
)
def test_after_rollbacks_training_continues_as_if_undisturbed(
    begin: Begin, tmp_path: Path, schedule: str, workers: int, accumulation: int
) -> None:
    """Every loss, weight, moment, average and sample of a batch is the same, to the bit: after a
    rollback within an epoch, one over several epochs, and one to the same checkpoint again."""
    options = {"scheduler": SCHEDULES[schedule], "workers": workers, "accumulation": accumulation}
    calm = begin(directory=tmp_path / "calm", **options)
    calm.train(60)
    shaken = begin(directory=tmp_path / "shaken", **options)
    back = shaken.order
    orders = {14: back("job.rollback"), 47: back("job.rollback", step=20), 31: back("job.rollback", steps_back=7)}
    shaken.train(60, orders)
    told = shaken.outputs()
    assert [(one["step"], one["left_step"]) for one in told] == [(10, 14), (20, 31), (20, 47)]
    assert {one["data"] for one in told} == {"the same batches again"}
    assert shaken.losses == calm.losses
    assert same(shaken.state(), calm.state())
    assert shaken.seen[-13 * accumulation :] == calm.seen[-13 * accumulation :]


def test_skipped_batches_are_excluded_permanently(begin: Begin, tmp_path: Path) -> None:
    """Neither a later rollback nor a restart brings them back."""
    calm = begin(directory=tmp_path / "calm")
    calm.train(40)
    training = begin()
    back = training.order("job.rollback", skip_batches=6, step=10)
    training.train(20, {15: [back], 18: training.order("job.rollback", step=10)})
    assert training.outputs()[0]["skipped_batches"] == 6
    wanted = calm.seen[:10] + calm.seen[16:]
    assert training.seen[15:23] == wanted[10:18]
    assert training.seen[23:33] == wanted[10:20]
    again = begin(seed=99)
    assert again.run.resume() == 20
    again.train(22)
    assert again.seen == wanted[20:22]


def test_a_restart_after_a_rollback_skips_the_skipped_batches_again(begin: Begin) -> None:
    """It may come before the next checkpoint: the one restored is from before the skip."""
    training = begin()
    training.train(12, {12: training.order("job.rollback", skip_batches=5)})
    training.run.close()
    met = begin(seed=99)
    assert met.run.resume() == 10
    calm = begin(directory=Path("/nowhere"), checkpoint_every=None)
    calm.train(20)
    met.train(13)
    assert met.seen == calm.seen[15:18]


def test_the_newest_checkpoint_from_before_the_alert_is_selected(begin: Begin) -> None:
    """The time of its completion counts, whatever came after."""
    training = begin()
    training.train(30)
    saved = {one.step: one.at for one in training.run.training.storage.checkpoints()}  # type: ignore[union-attr]
    moment = saved[20].isoformat()
    training.train(32, {31: training.order("job.rollback", before=moment)})
    (told,) = training.outputs()
    assert (told["step"], told["checkpoint"]) == (10, "step-00000010")
    assert datetime.fromisoformat(told["saved_at"]) == saved[10]
    assert checkpoints.is_pinned(training.run.training.storage.directory / told["checkpoint"])  # type: ignore[union-attr,operator]


def test_a_checkpoint_that_cannot_be_loaded_is_skipped(begin: Begin, tmp_path: Path) -> None:
    """The next older one is used, and the answer gives the reason; if there is none, nothing is changed."""
    training = begin()
    training.train(35)
    for step in (20, 30):
        (tmp_path / f"step-000000{step}" / "training.pt").write_bytes(b"x" * 10)
        facts = dict(checkpoints.completion(tmp_path / f"step-000000{step}") or {})
        checkpoints.mark_complete(tmp_path / f"step-000000{step}", {**facts, "files": {"training.pt": 10}})
    training.train(36, {36: training.order("job.rollback")})
    (told,) = training.outputs()
    assert told["step"] == 10
    assert [text.partition(":")[0] for text in told["unusable"]] == [
        "step-00000030/training.pt cannot be read",
        "step-00000020/training.pt cannot be read",
    ]


def test_without_a_loadable_checkpoint_nothing_is_changed(begin: Begin, tmp_path: Path) -> None:
    """The command fails, and training continues from its present state."""
    calm = begin(directory=tmp_path / "calm")
    calm.train(20)
    training = begin(checkpoint_at_start=False)
    training.train(10)
    run = tmp_path / "step-00000010" / "run.pt"
    run.write_bytes(run.read_bytes()[::-1])
    training.train(20, {12: training.order("job.rollback"), 13: training.order("job.rollback", step=9)})
    failed, rejected = training.replies()
    assert (failed.status, rejected.status) == ("failed", "rejected")
    assert "no checkpoint could be loaded: step-00000010/run.pt cannot be read" in failed.output["reason"]
    assert training.losses == calm.losses


def test_repeated_rollbacks_are_rejected(begin: Begin, tmp_path: Path) -> None:
    """Beyond the budget the playbook gets a reason to escalate, even from a job restarted in between."""
    training = begin(rollbacks=2)
    back = training.order("job.rollback", step=10)
    training.train(25, {15: back, 16: back})
    assert [one["rollback_number"] for one in training.outputs()] == [1, 2]
    training.run.close()
    later = begin(rollbacks=2)
    later.run.resume()
    later.train(26, {26: later.order("job.rollback", step=10)})
    assert later.replies()[0].status == "rejected"
    assert "the budget is 2" in later.replies()[0].output["reason"]


def test_abandoned_checkpoints_are_not_rollback_targets(begin: Begin, tmp_path: Path) -> None:
    """Checkpoints of the abandoned course no longer count, and are deleted when there is a newer one."""
    training = begin(keep=5)
    stop = training.order("job.stop", checkpoint=False)
    training.train(31, {31: [training.order("job.rollback", step=10), stop]})
    assert training.run.global_step == 10
    assert sorted(one.step for one in training.run.training.storage.checkpoints()) == [0, 10]  # type: ignore[union-attr]
    assert len(list(tmp_path.glob("abandoned-*"))) == 2
    later = begin(keep=5)
    later.run.resume()
    later.train(20)
    assert not list(tmp_path.glob("abandoned-*"))


def test_a_rollback_that_cannot_be_recorded_reports_it(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may be full. The rollback is complete all the same."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "move_rollback_pin", full)
    training = begin(keep=5)
    training.train(25, {25: training.order("job.rollback", step=10)})
    (told,) = training.outputs()
    assert told["step"] == 10
    assert told["note"].startswith(
        "cannot pin its checkpoint, or put all later ones aside: OSError: [Errno 28] No space"
    )


class Lines(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.full((4,), float(number)), number) for number in range(40)])


@pytest.mark.parametrize(
    ("source", "seen", "data"),
    [
        (lambda: DataLoader(Lines(), batch_size=4), [[16, 17, 18, 19]], "the same batches again, if"),
        (lambda: iter(DataLoader(Lines(), batch_size=4)), [[24, 25, 26, 27]], "not the same batches: a stream"),
        (lambda: [(torch.ones(4, 4), torch.arange(4) + 4 * n) for n in range(10)], [[16, 17, 18, 19]], "the same"),
    ],
    ids=["iterable data set", "iterator", "list"],
)
def test_other_sources_rewind_as_far_as_they_can(begin: Begin, source: Any, seen: Any, data: str) -> None:
    """The answer says whether the same batches are repeated."""
    training = begin(loader=source(), checkpoint_every=4)
    training.train(8, {6: training.order("job.rollback", step=4)})
    (told,) = training.outputs()
    assert told["data"].startswith(data)
    assert training.seen[6:7] == seen


def test_user_functions_serve_as_checkpoints(begin: Begin, tmp_path: Path) -> None:
    """With the run's state saved along, a rollback is exact; without it, only the step is known."""
    kept: dict[int, Any] = {}
    found: list[SavedCheckpoint] = []

    def save(step: int, state: Any) -> None:
        torch.save([part.state_dict() for part in parts(training)] + [state], tmp_path / f"{step}.pt")
        found.append(SavedCheckpoint(step, datetime.now(UTC), tmp_path / f"{step}.pt"))

    def load(one: SavedCheckpoint) -> Any:
        *states, state = torch.load(one.path)
        for part, held in zip(parts(training), states, strict=True):
            part.load_state_dict(held)
        return kept.get(one.step, state)

    def parts(of: Training) -> list[Any]:
        return [of.model, of.optimizer, of.scheduler, of.ema]

    calm = begin(directory=tmp_path / "calm")
    calm.train(25)
    training = begin(checkpoints=trainmedic.torch.OwnCheckpoints(save, load, lambda: found))
    training.train(25, {24: training.order("job.rollback", step=10)})
    assert training.losses == calm.losses
    assert same(training.state(), calm.state())
    kept[20] = None
    training.train(32, {28: training.order("job.rollback", step=20)})
    assert training.outputs()[-1]["data"].startswith("the checkpoint does not hold the data position")
    assert training.run.global_step == 32


@pytest.mark.parametrize("is_new_process", [False, True])
def test_an_unhealthy_checkpoint_of_the_user_is_skipped(tmp_path: Path, is_new_process: bool) -> None:
    """Its health at the time of writing is kept next to it: the user's functions know nothing of it."""
    written: list[SavedCheckpoint] = []

    def save(step: int, state: Any) -> None:
        written.append(SavedCheckpoint(step, datetime.now(UTC), f"mine-{step}"))

    def own() -> Any:
        return trainmedic.torch.OwnCheckpoints(save, lambda _: None, lambda: written, tmp_path)

    storage = own()
    for step, finite in ((10, True), (20, False)):
        storage.save(step, None, {"health": CheckpointHealth(finite=finite).to_json()})
    written.append(SavedCheckpoint(20, datetime.now(UTC) - timedelta(hours=1), "of another course"))
    written.append(SavedCheckpoint(30, datetime.now(UTC), "judged", health=CheckpointHealth(finite=True)))
    found = {each.path: each.health for each in (own() if is_new_process else storage).checkpoints()}
    assert found == {
        "mine-10": CheckpointHealth(finite=True),
        "mine-20": CheckpointHealth(finite=False),
        "of another course": None,
        "judged": CheckpointHealth(finite=True),
    }


def test_a_run_resumes_where_it_was_killed(begin: Begin, tmp_path: Path) -> None:
    """Another process with another seed produces the same losses from the newest checkpoint on."""
    calm = begin(directory=tmp_path / "calm")
    calm.train(40)
    first = begin()
    first.train(25)
    first.run.close()
    second = begin(seed=1234)
    assert second.run.resume() == 20
    second.train(40)
    assert second.losses == {step: loss for step, loss in calm.losses.items() if step > 20}
    assert same(second.state(), calm.state())


def test_a_resume_stops_if_all_checkpoints_are_damaged(begin: Begin, tmp_path: Path) -> None:
    """Starting from scratch or at step 0, which is the same, would lose them one by one."""
    first = begin()
    first.train(10)
    (tmp_path / "step-00000010" / "run.pt").write_bytes((tmp_path / "step-00000010" / "run.pt").read_bytes()[::-1])
    assert (tmp_path / "step-00000000").exists()
    with pytest.raises(trainmedic.TrainmedicError, match=r"no checkpoint could be loaded: .* move them away"):
        begin().run.resume()
    assert begin(directory=tmp_path / "empty").run.resume() is None


def test_training_continues_if_a_checkpoint_cannot_be_written(begin: Begin, tmp_path: Path, caplog: Any) -> None:
    """A regular one is missed with a log line; an ordered one is answered as failed."""
    (tmp_path / "file").write_text("in the way")
    training = begin(directory=tmp_path / "file")
    training.train(12, {11: training.order("job.checkpoint")})
    (reply,) = training.replies()
    assert reply.status == "failed"
    assert "FileExistsError" in reply.output["reason"]
    assert "no checkpoint of step 10" in caplog.text
    assert training.run.global_step == 12


def test_training_continues_without_redis(tmp_path: Path) -> None:
    """No Redis listens at that address."""
    absent = Commander("redis://127.0.0.1:1/0")
    with absent.connect() as medic:
        training = Training(absent, medic, tmp_path)
        training.train(25)
        training.run.close()
    assert training.run.global_step == 25
    absent.close()
