"""What a plain PyTorch run makes of each command, and of taking it back; over a real Redis."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import trainmedic
import trainmedic.torch
from tests.integration.plain_torch.training import SAMPLES, Augmented, Training
from tests.support.command_sender import Commander
from tests.support.programs import eventually
from trainmedic.errors import ConfigurationError
from trainmedic.job import progress
from trainmedic.job.progress import REPORT_INTERVAL
from trainmedic.recovery import health
from trainmedic.recovery.changes import LEARNING_RATE
from trainmedic.torch.restore import CheckpointRestore
from trainmedic.wire import envelope

Begin = Callable[..., Training]


def constant(optimizer: Any) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def sizes(training: Training) -> list[int]:
    return [len(batch) for batch in training.seen]


def test_a_scaled_learning_rate_survives_rollbacks_and_restarts(begin: Begin) -> None:
    """Scaled, then rolled back to before; rolled back, then scaled; the job killed and restarted."""
    training = begin(scheduler=constant)
    half, back = training.order("job.scale_lr", factor=0.5), training.order("job.rollback", step=10)
    training.train(20, {12: [half, back], 15: [back, half]})
    scaled, went_back, _, again = training.outputs()
    assert (scaled["before"], scaled["after"], scaled["step"]) == (0.01, 0.005, 12)
    assert went_back["learning_rate"] == 0.005
    assert (again["before"], again["after"], again["scale"], again["step"]) == (0.005, 0.0025, 0.25, 10)
    assert training.run.training.rate.value == 0.0025
    training.run.close()
    later = begin(scheduler=constant)
    later.run.resume()
    later.train(22)
    assert (later.run.training.rate.value, later.run.lr_scale) == (0.0025, 0.25)


def test_a_scale_is_undone_exactly_and_stays_undone(begin: Begin) -> None:
    """The undo names its command, in any order, across a rollback to a scaled step and across a restart."""
    training = begin(scheduler=constant)
    third, tenth = training.order("job.scale_lr", factor=0.3), training.order("job.scale_lr", factor=0.1)
    undo = training.undo(0, "job.scale_lr", factor=1 / 0.3)
    training.train(26, {5: third, 8: tenth, 15: undo, 17: training.order("job.rollback", step=10)})
    assert training.run.lr_scale == 0.1
    assert training.run.training.rate.value == 0.01 * 0.1
    training.run.close()
    later = begin(scheduler=constant)
    later.run.resume()
    later.train(28, {27: later.order("job.scale_lr", undo_of=training.sent[1], factor=10.0)})
    assert (later.run.lr_scale, later.run.training.rate.value) == (1.0, 0.01)


def test_a_scale_is_undone_by_its_record_if_redis_lost_the_command(
    commander: Commander, redis_url: str, tmp_path: Path
) -> None:
    """Redis comes back empty, and the job restarts from a checkpoint with the halved rate. The undo is carried
    out; a second one of the same command, and one of a command that nobody knows, find nothing in force."""
    with commander.connect() as first:
        training = Training(commander, first, tmp_path, scheduler=constant)
        training.train(12, {5: training.order("job.scale_lr", factor=0.5)})
        assert training.run.training.rate.value == 0.005
        training.run.close()
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    with commander.connect() as second:
        later = Training(commander, second, tmp_path, scheduler=constant)
        later.run.resume()
        assert later.run.training.rate.value == 0.005
        undos = [later.order("job.scale_lr", undo_of=training.sent[0], factor=2.0) for _ in range(2)]
        unknown = later.order("job.scale_lr", undo_of=envelope.new_id(1_700_000_000_000), factor=2.0)
        later.train(20, {14: undos[0], 16: undos[1], 18: unknown})
        assert (later.run.lr_scale, later.run.training.rate.value) == (1.0, 0.01)
        done, again, idle = later.outputs()
        assert (done["before"], done["after"]) == (0.005, 0.01)
        assert again["known"] == idle["known"] == "not_in_force"
        later.run.close()


def test_the_expected_rate_is_reported_next_to_the_actual_one(begin: Begin, medic: trainmedic.Medic) -> None:
    """This way a jump without a command is visible, and one with a command is not counted."""
    training = begin(scheduler=constant)
    looked_at: dict[int, Any] = dict.fromkeys(
        range(1, 8), lambda: time.sleep(REPORT_INTERVAL)
    )  # else it is not at each step
    training.train(8, {**looked_at, 6: [training.order("job.scale_lr", factor=0.5), looked_at[6]]})
    values = medic.progress.values(time.perf_counter())
    assert values["training_learning_rate"] == values["training_learning_rate_expected"] == 0.005
    training.optimizer.param_groups[0]["lr"] = 1.0
    time.sleep(REPORT_INTERVAL)
    training.run.step().report()
    assert medic.progress.values(time.perf_counter())["training_learning_rate_deviation"] > 0.9


@pytest.mark.parametrize("jumps", [True, False])
def test_a_rate_off_its_schedule_is_still_off_after_a_restart(
    begin: Begin, medic: trainmedic.Medic, monkeypatch: pytest.MonkeyPatch, jumps: bool
) -> None:
    """Many schedulers continue from the rate that they find: the resumed process does not accept it as its own, if
    the rate was off for so long that checkpoints with it are not ill any more."""
    monkeypatch.setattr(progress, "REPORT_INTERVAL", 0.0)  # these steps are quicker than any
    monkeypatch.setattr(health, "_LONGEST_RISE", -1.0)
    cosine = partial(lr_scheduler.CosineAnnealingLR, T_max=100)
    training = begin(scheduler=cosine)

    def jump() -> None:
        training.optimizer.param_groups[0]["lr"] *= 30 if jumps else 1

    training.train(22, {14: jump})
    training.run.close()
    later = begin(scheduler=cosine)
    assert later.run.resume() == 20
    later.train(24)
    off = medic.progress.values(time.perf_counter())["training_learning_rate_deviation"]
    assert off > 0.9 if jumps else off < 1e-6


def test_a_restart_resumes_from_before_the_rate_was_off(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint with a rate off its schedule is unhealthy as long as the rate cannot be intended."""
    monkeypatch.setattr(progress, "REPORT_INTERVAL", 0.0)
    cosine = partial(lr_scheduler.CosineAnnealingLR, T_max=100)
    training = begin(scheduler=cosine)

    def jump() -> None:
        training.optimizer.param_groups[0]["lr"] *= 30

    training.train(22, {14: jump})
    training.run.close()
    assert begin(scheduler=cosine).run.resume() == 10


def test_a_smaller_batch_keeps_the_global_one_and_loses_no_sample(begin: Begin) -> None:
    """Half the batch, twice the accumulation, in the middle of an epoch, and exactly back again."""
    training = begin(accumulation=1)
    half = training.order("job.scale_batch", factor=0.5)
    training.train(13, {4: half, 8: training.undo(0, "job.scale_batch", factor=2.0)})
    told, _ = training.outputs()
    assert (told["before"], told["after"], told["accumulation_before"], told["accumulation_after"]) == (4, 2, 1, 2)
    assert told["global_batch_before"] == told["global_batch_after"] == 4
    assert sizes(training) == [4] * 4 + [2] * 8 + [4] * 4 + [2]
    assert sorted(index for batch in training.seen for index in batch) == list(range(SAMPLES))
    assert (training.run.accumulation, training.run.training.batch_source.batch_size) == (1, 4)  # type: ignore[union-attr]


def test_two_half_batches_train_like_a_whole_one(begin: Begin, tmp_path: Path) -> None:
    """Their gradients equal those of the whole one, if nothing depends on the batch."""
    losses = []
    for name, at in (("whole", {}), ("halves", {2: True})):
        data = [(torch.ones(4, 4) * number, torch.arange(4)) for number in range(4)]
        loader = DataLoader(_Rows(data), batch_size=4)
        training = begin(directory=tmp_path / name, loader=loader, accumulation=1)
        training.model = training.run.training.parts.by_name["model"].eval()
        orders = {2: training.order("job.scale_batch", factor=0.5)} if at else {}
        training.train(4, orders)
        losses.append(training.model[0].weight.detach().clone())
    assert torch.allclose(losses[0], losses[1], atol=1e-6)


class _Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, batches: list[Any]) -> None:
        self.rows = [(row, int(index)) for rows, indices in batches for row, index in zip(rows, indices, strict=True)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def test_accumulation_is_changed_at_a_step_boundary(begin: Begin) -> None:
    """Three batches make a step from then on, also across a rollback; after the undo, one does again."""
    training = begin(accumulation=1)
    triple = training.order("job.accumulate", factor=3)
    undo = training.undo(0, "job.accumulate", factor=1 / 3)
    training.train(14, {11: [triple, training.order("job.rollback")], 12: undo})
    told, _, undone = training.outputs()
    assert (told["before"], told["after"], undone["before"], undone["after"]) == (1, 3, 3, 1)
    assert len(training.seen) == 11 + 2 * 3 + 2


def test_changes_by_commands_are_reapplied_after_a_restart(begin: Begin) -> None:
    """These are batch size, accumulation and workers: the script starts with its own, and the run remembers."""
    training = begin(accumulation=1)
    half, workers = training.order("job.scale_batch", factor=0.5), training.order("job.dataloader_workers", count=1)
    training.train(10, {9: [half, workers]})
    training.outputs()
    training.run.close()
    later = begin(accumulation=1)
    later.run.resume()
    later.train(11)
    assert sizes(later) == [2, 2]
    assert later.run.training.batch_source.workers == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("action", "params", "words"),
    [
        ("job.scale_batch", {"factor": 0.3}, "the micro-batch would be 1.2"),
        ("job.scale_batch", {"factor": 2.0}, "the number of accumulation steps would be 0.5"),
        ("job.accumulate", {"factor": 0.5}, "the number of accumulation steps would be 0.5"),
        ("job.scale_lr", {"factor": 1e-320}, "the learning rate would be"),
        ("job.scale_lr", {"factor": 50}, "the learning rate would be 50 times the script's own"),
        ("job.scale_lr", {"factor": 1e300}, "the learning rate would be 1e+300 times the script's own"),
        ("job.scale_batch", {"factor": 1e308, "keep_global_batch": False}, "the batch size would be"),
        ("job.accumulate", {"factor": 1e308}, "the accumulation would be"),
        ("job.rollback", {"before": "2020-01-01T00:00:00Z"}, "no complete checkpoint from before 2020-01-01T00:00:00"),
    ],
)
def test_invalid_commands_are_rejected_and_change_nothing(
    begin: Begin, action: str, params: dict[str, Any], words: str
) -> None:
    """The answer has the reason; training continues as before."""
    training = begin(accumulation=1)
    training.train(6, {5: training.order(action, **params)})
    (reply,) = training.replies()
    assert (reply.status, words in reply.output["reason"]) == ("rejected", True)
    assert sizes(training) == [4] * 6


def test_an_excessive_rate_recorded_by_an_older_release_does_not_stop_a_restart(
    begin: Begin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is dropped and logged, though the record and the checkpoint both have it."""
    training = begin(scheduler=constant)
    training.train(8)
    training.run.training.rate.set_scale(1e300)
    training.run.training.changes.set_factors(LEARNING_RATE, {"an old command": 1e300})
    training.run.training.global_step = 10
    training.run.training.current_checkpoint = None
    training.run.checkpoint()
    training.run.close()
    later = begin(scheduler=constant)
    assert later.run.resume() == 10
    assert later.run.training.rate.value == pytest.approx(0.01)
    later.train(12)
    assert all(math.isfinite(loss) for loss in later.losses.values())
    assert "the learning rate was scaled by 1e+300, by command an old command" in caplog.text


def test_a_change_that_prevents_every_checkpoint_after_a_start_is_dropped(begin: Begin) -> None:
    """The job ends twice before one, as if the larger batch did not fit into its memory."""
    training = begin()
    training.train(12, {11: training.order("job.scale_batch", factor=2.0, keep_global_batch=False)})
    training.outputs()
    training.run.close()
    for size in (8, 4):
        later = begin()
        later.run.resume()
        later.train(13)
        assert sizes(later)[0] == size
        later.run.close()


@pytest.mark.parametrize(("start", "count"), [(0, 2), (2, 1), (1, 0)])
def test_workers_are_changed_without_losing_or_repeating_a_batch(begin: Begin, start: int, count: int) -> None:
    """In the middle of an epoch; the answer has the previous number, which undoes the change."""
    training = begin(workers=start)
    training.train(13, {5: training.order("job.dataloader_workers", count=count)})
    (told,) = training.outputs()
    assert (told["previous"], told["count"]) == (start, count)
    assert sorted(index for batch in training.seen for index in batch) == list(range(SAMPLES))
    assert training.run.training.batch_source.workers == count  # type: ignore[union-attr]


@pytest.mark.parametrize(("start", "at_most"), [(0, 1), (1, 1), (0, 0), (1, 3)])
def test_an_upper_bound_that_is_already_met_changes_nothing(begin: Begin, start: int, at_most: int) -> None:
    """It never raises workers, and the answer does not report a change."""
    training = begin(workers=start)
    training.train(6, {3: training.order("job.dataloader_workers", at_most=at_most)})
    (reply,) = training.replies()
    assert (reply.status, "nothing to lower" in reply.output["reason"]) == ("rejected", True)
    assert training.run.training.batch_source.workers == start  # type: ignore[union-attr]


def test_lowered_workers_are_restored_exactly(begin: Begin) -> None:
    """The answer has the previous number, and the undo sets it."""
    training = begin(workers=2)
    training.train(
        9,
        {
            3: training.order("job.dataloader_workers", at_most=1),
            6: training.undo(0, "job.dataloader_workers", count=2),
        },
    )
    lowered, undone = training.outputs()
    assert (lowered["previous"], lowered["count"], undone["previous"], undone["count"]) == (2, 1, 1, 2)
    assert training.run.training.changes.workers is None


def test_undoing_the_scripts_own_count_restores_the_change_before_it(begin: Begin) -> None:
    training = begin(workers=2)
    orders: dict[int, Any] = {3: training.order("job.dataloader_workers", count=1)}
    orders |= {5: training.order("job.dataloader_workers", count=2)}
    training.train(9, orders | {7: training.undo(1, "job.dataloader_workers", count=1)})
    assert [told["count"] for told in training.outputs()] == [1, 2, 1]
    assert training.run.training.batch_source.workers == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(("script", "lowered", "undone"), [(2, 1, 2), (1, 1, 1), (0, 0, 0)])
def test_a_script_that_restarts_with_fewer_workers_keeps_them(
    begin: Begin, script: int, lowered: int, undone: int
) -> None:
    """A lowered limit of the process before does not raise them, and neither does its undo."""
    training = begin(workers=2)
    training.train(10, {9: training.order("job.dataloader_workers", at_most=1)})
    training.outputs()
    training.run.close()
    later = begin(workers=script)
    later.run.resume()
    source = later.run.training.batch_source
    assert source is not None
    assert source.workers == lowered
    later.train(12, {11: later.order("job.dataloader_workers", undo_of=training.sent[0], count=2)})
    assert source.workers == undone


def test_workers_that_cannot_be_started_leave_the_loader_unchanged(begin: Begin, tmp_path: Path) -> None:
    """The command fails, the training does not."""

    def refuses(batch: Any) -> Any:  # a local function cannot be handed to a spawned process
        return torch.utils.data.default_collate(batch)

    loader = DataLoader(Augmented(), 4, collate_fn=refuses, multiprocessing_context=None)
    training = begin(loader=loader)
    training.run.training.batch_source._pattern = DataLoader(  # type: ignore[union-attr]
        Augmented(), 4, collate_fn=refuses, num_workers=1, multiprocessing_context="spawn"
    )
    training.train(13, {5: training.order("job.dataloader_workers", count=2)})
    assert training.replies()[0].status == "failed"
    assert len(training.seen) == 13


def test_a_pause_ends_by_command_or_after_its_duration(begin: Begin, commander: Commander) -> None:
    """Other commands are carried out during the pause, and a stop ends it at once."""
    training = begin()
    training.train(3, {1: training.order("job.pause", max="300ms")})
    assert training.outputs()[0]["max_seconds"] == 0.3
    began = time.monotonic()

    def later() -> None:
        training.order("job.pause", max="1h")()
        training.order("job.resume")()

    training.train(6, {4: later})
    assert training.outputs()[-1]["was_paused"] is True
    stop = training.order("job.stop", checkpoint=False)
    training.train(20, {8: [training.order("job.pause", max="1h"), stop]})
    assert (training.run.global_step, training.run.stopping) == (8, True)
    assert time.monotonic() - began < 600


def test_a_pause_is_extended_while_it_lasts_and_not_restarted(begin: Begin) -> None:
    """The ID of the command that started it identifies it; that command's undo ends it."""
    training = begin()

    def later() -> None:
        training.order("job.pause", max="1h")()
        training.order("job.pause", max="2h", extends=training.sent[0])()
        training.undo(0, "job.resume")()

    training.train(6, {4: later})
    assert [output.get("max_seconds") for output in training.outputs()] == [3600.0, 7200.0, None]
    assert training.outputs()[-1]["was_paused"] is True
    training.train(10, {8: training.order("job.pause", max="1h", extends=training.sent[0])})
    assert [reply.status for reply in training.replies()] == ["applied", "applied", "applied", "rejected"]
    assert training.run.global_step == 10


def test_a_stop_ends_the_batches_after_a_checkpoint(begin: Begin, tmp_path: Path) -> None:
    """The run continues from it when it is restarted."""
    training = begin()
    training.train(30, {7: training.order("job.stop", checkpoint=True)})
    assert training.outputs()[0]["checkpoint"] == "step-00000007"
    assert training.run.global_step == 7
    assert begin().run.resume() == 7


def test_a_script_may_end_the_batches_itself(begin: Begin) -> None:
    """It sets the same attribute as a stop; the other numbers of a run can be set as well."""
    training = begin()
    training.train(30, {5: lambda: setattr(training.run, "stopping", True)})
    assert (training.run.global_step, training.run.stopping) == (5, True)
    training.run.global_step, training.run.accumulation = 12, 2
    assert training.run.state_dict()["step"] == 12
    assert training.run.accumulation == 2


def test_a_stop_does_not_wait_for_an_impossible_checkpoint(begin: Begin, tmp_path: Path) -> None:
    """The loop stops, and the answer reports the missing checkpoint."""
    (tmp_path / "file").write_text("in the way")
    training = begin(directory=tmp_path / "file")
    training.train(30, {7: training.order("job.stop", checkpoint=True)})
    assert "FileExistsError" in training.outputs()[0]["no_checkpoint"]
    assert training.run.global_step == 7


def test_an_ordered_checkpoint_is_written_once(begin: Begin) -> None:
    """The second command at the same step finds it."""
    training = begin()
    save = training.order("job.checkpoint")
    training.train(8, {7: [save, save]})
    first, second = training.outputs()
    assert first["checkpoint"] == second["checkpoint"] == "step-00000007"
    assert first["saved_at"] == second["saved_at"]


def test_a_bug_in_a_command_costs_the_command_and_not_the_job(begin: Begin, monkeypatch: Any) -> None:
    """It is answered failed; the next command works."""
    training = begin()

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(CheckpointRestore, "roll_back", broken)
    training.train(14, {11: training.order("job.rollback"), 12: training.order("job.scale_lr", factor=0.5)})
    failed, applied = training.replies()
    assert (failed.status, failed.output["reason"], applied.status) == ("failed", "ZeroDivisionError: a bug", "applied")
    assert training.run.global_step == 14


def capabilities(redis_url: str) -> dict[str, str]:
    with redis.Redis.from_url(redis_url) as client:
        raw: Any = eventually(lambda: client.get(envelope.job_presence("llm-1")), 60, "presence")
    found: dict[str, str] = json.loads(raw)["capabilities"]
    return found


def test_a_run_announces_its_capabilities(begin: Begin, redis_url: str) -> None:
    """Everything is live, except a missing accelerator and accumulation that the loop ignores."""
    begin()
    known = capabilities(redis_url)
    eventually(lambda: len(capabilities(redis_url)) == 10, 60, "all capabilities")
    known = capabilities(redis_url)
    unsupported = {action for action, how in known.items() if how == "unsupported"}
    expected = {"job.accumulate"} if torch.cuda.is_available() else {"job.accumulate", "job.empty_cache"}
    assert unsupported == expected
    assert set(known.values()) == {"live", "unsupported"}


def test_a_run_without_checkpoints_or_loader_reports_it(begin: Begin, commander: Commander) -> None:
    """Each command that needs them is answered with what is missing."""
    training = begin(checkpoints=None, checkpoint_every=None, loader=[(torch.ones(4, 4), torch.arange(4))] * 9)
    orders = [training.order(f"job.{name}") for name in ("rollback", "checkpoint")]
    orders += [training.order("job.dataloader_workers", count=1), training.order("job.scale_batch", factor=2.0)]
    training.train(3, {1: orders})
    replies = training.replies()
    assert [reply.status for reply in replies] == ["unsupported"] * 4
    assert [reply.output["reason"].partition(":")[0] for reply in replies] == [
        "the run has no checkpoint storage",
        "the run has no checkpoint storage",
        "only the workers of a plain DataLoader over an indexed data set can be changed",
        "only the batch size of a plain DataLoader over an indexed data set can be changed",
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_every": 0},
        {"keep": -1},
        {"accumulation": 0},
        {"accumulation": True},
        {"loader": 3},
        {"also": {"model": 1}},
        {"also": ["best"]},
        {"also": {"best": 1.0}},
        {"checkpoints": ""},
        {"checkpoints": 7},
        {"checkpoints": None, "checkpoint_every": 10},
        {"keep_global_batch": "yes"},
        {"rollbacks": -1},
        {"rollbacks": "3"},
        {"reread": None},
        {"memory": True},
        {"accelerator": object()},
    ],
)
def test_an_error_in_the_script_is_raised_at_once(begin: Begin, options: dict[str, Any]) -> None:
    """It is not delayed until the first alert."""
    with pytest.raises(ConfigurationError):
        begin(**options)


@pytest.mark.parametrize(
    "given",
    [{"model": None}, {"model": []}, {"optimizer": None}, {"optimizer": {}}, {"optimizer": torch.optim.SGD}],
)
def test_a_training_requires_a_model_and_an_optimizer(medic: trainmedic.Medic, given: dict[str, Any]) -> None:
    """Checkpoints without them would be worthless."""
    model = torch.nn.Linear(1, 1)
    parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **given}
    with pytest.raises(ConfigurationError, match=r"rollback needs it|is a class"):
        trainmedic.torch.attach(medic, **parts)


def test_an_exception_in_the_step_reaches_the_user(begin: Begin) -> None:
    """The step does not count, and pending commands are answered when the job ends."""
    training = begin()
    with pytest.raises(KeyError):
        training.train(5, {3: lambda: {}["missing"]})
    assert training.run.global_step == 2


def test_a_custom_loop_works_without_batches(begin: Begin, medic: trainmedic.Medic, tmp_path: Path) -> None:
    """It finds its data by the step, which a rollback sets back."""
    training = begin()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = trainmedic.torch.attach(medic, model=model, optimizer=optimizer, checkpoints=tmp_path / "own", rollbacks=1)
    steps = []
    while run.global_step < 6 and len(steps) < 20:
        steps.append(run.global_step)
        with run.step() as step:
            step.backward(model(torch.ones(1, 1)).sum())
            step.update()
            if len(steps) == 3:
                training.order("job.checkpoint")()
            if len(steps) == 5:
                training.order("job.rollback")()
    run.close()
    assert steps == [0, 1, 2, 3, 4, 3, 4, 5]
    with pytest.raises(ConfigurationError, match="needs a loader"):
        next(run.batches())


def test_an_empty_loader_ends_the_batches(begin: Begin) -> None:
    """Otherwise the loop would never end."""
    training = begin(loader=[])
    training.train(5)
    assert training.run.global_step == 0


def test_epochs_are_counted_from_the_start_of_the_training(begin: Begin, tmp_path: Path) -> None:
    """A rollback into an earlier epoch repeats it; a resumed run ends where it would have ended."""
    batches = [(torch.ones(4, 4) * number, torch.arange(4) + 4 * number) for number in range(5)]
    training = begin(loader=batches, checkpoint_every=4)
    orders = {7: training.order("job.rollback", step=4)}
    for _ in training.run.batches(epochs=2):
        with training.run.step() as step:
            act = orders.pop(step.number, None)
            if act is not None:
                act()
    assert (training.run.epoch, training.run.global_step) == (2, 10)
    later = begin(loader=batches)
    assert later.run.resume() == 8
    assert len(list(later.run.batches(epochs=2))) == 2


def test_excessive_numbers_are_rejected_at_once(begin: Begin) -> None:
    """Neither a million skipped batches nor a million processes prevent the training."""
    training = begin()
    skip, workers = (
        training.order("job.rollback", skip_batches=10**6),
        training.order("job.dataloader_workers", count=10**6),
    )
    training.train(13, {11: [skip, workers]})
    left_out, choked = training.replies()
    assert (left_out.status, choked.status) == ("rejected", "rejected")
    assert "cannot skip 1000000 batches" in left_out.output["reason"]
    assert "1000000 workers" in choked.output["reason"]
    assert training.run.global_step == 13


class Endless:
    """Batches that can be read anew, of a kind that the training did not have before."""

    def __iter__(self) -> Any:
        while True:
            yield torch.randn(4, 4), torch.arange(4)


def test_a_run_resumes_with_another_kind_of_loader(begin: Begin, caplog: Any) -> None:
    """A position of one kind means nothing to the other: the epoch starts again."""
    first = begin()
    first.train(20)
    epoch = first.run.epoch
    first.run.close()
    later = begin(loader=Endless())
    assert later.run.resume() == 20
    assert (later.run.epoch, later.run.training.batch_source.position if later.run.training.batch_source else None) == (
        epoch,
        0,
    )
    later.train(22)
    assert sorted(later.losses) == [21, 22]


def test_optimizers_and_schedulers_may_have_names(medic: trainmedic.Medic) -> None:
    """A dict of several works like a list of them."""
    model = torch.nn.Linear(2, 1)
    optimizers = {name: torch.optim.SGD([one], lr=0.1) for name, one in model.named_parameters()}
    schedulers = {name: constant(one) for name, one in optimizers.items()}
    with trainmedic.torch.attach(medic, model=model, optimizer=optimizers, scheduler=schedulers) as run:
        run.training.rate.set_scale(0.5)
        assert run.training.rate.values == [0.05, 0.05]
        assert set(run.training.parts.by_name) >= {"optimizer.weight", "optimizer.bias", "scheduler.weight"}
