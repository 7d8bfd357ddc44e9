"""A rollback says what was compared, and never claims what did not happen; over a real Redis."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import trainmedic
import trainmedic.torch
from tests.integration.plain_torch.training import Training, same
from tests.support.command_sender import Commander
from trainmedic.errors import TrainmedicError
from trainmedic.job.loss_log import EXACT_KERNELS
from trainmedic.recovery import checkpoints
from trainmedic.wire.envelope import Reply, utc_now, write_time

Begin = Callable[..., Training]


def batches_of(reply: Reply) -> Mapping[str, Any]:
    told: Mapping[str, Any] = reply.output["verified"]["batches"]
    return told


def damage(path: Path) -> None:
    """Change one bit of the model's weights in a file that is whole otherwise: of the right size, with checksums."""
    states = torch.load(path, weights_only=True)
    states["model"]["0.weight"].view(torch.int32)[0, 0] ^= 1
    size = path.stat().st_size
    with path.open("wb") as file:
        torch.save(states, file)
    assert path.stat().st_size == size


def test_a_replay_is_compared_and_reported(begin: Begin) -> None:
    """The comparison covers all parameters and moments, and the next sixteen batches."""
    training = begin()
    training.train(60, {30: training.order("job.rollback", step=10)})
    (told,) = training.outputs()
    tensors = len(list(training.model.parameters())) * 4 + len(list(training.ema.parameters()))
    assert told["verified"] == {
        "parameters": {"compared": tensors, "agreed": tensors, "ranks": 1},
        "batches": {"compared": 16, "agreed": 16},
        "losses": {"compared": 20, "agreed": 20, "finite": 20, "tolerance": EXACT_KERNELS},
    }
    assert told["step"] == 10


@pytest.mark.parametrize("skip", [1, 8, 14, 25])
def test_a_skip_is_compared_and_reported(begin: Begin, skip: int) -> None:
    """The batches after the skip come as before; none of the skipped ones does."""
    data = [(torch.full((4, 4), float(number)), torch.tensor([number] * 4)) for number in range(100)]
    training = begin(loader=data)
    training.train(60, {30: training.order("job.rollback", step=10, skip_batches=skip)})
    (reply,) = training.replies()
    assert reply.status == "applied"
    assert batches_of(reply) == {"compared": 16, "agreed": 16}


@pytest.mark.parametrize(("workers", "compared"), [(0, 0), (1, 16)])
def test_batches_made_with_random_numbers_may_differ_after_a_skip(begin: Begin, workers: int, compared: int) -> None:
    """The main process uses the training's numbers, those of the checkpoint; a worker those of the batch's own
    place. What cannot be compared is not called a mismatch."""
    training = begin(workers=workers)
    training.train(45, {30: training.order("job.rollback", step=10, skip_batches=4)})
    (reply,) = training.replies()
    assert reply.status == "applied"
    told = batches_of(reply)
    assert (told["compared"], told["agreed"]) == (compared, compared)
    assert ("random numbers differ" in told.get("why", "")) == (compared == 0)


class Liar:
    """It says that it keeps its place, and gives other batches whatever place is restored."""

    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Any:
        while True:
            self.drawn += 1
            yield torch.full((4, 4), float(self.drawn)), torch.tensor([self.drawn] * 4)

    def state_dict(self) -> dict[str, int]:
        return {"place": 3}

    def load_state_dict(self, state: Any) -> None:
        pass


class Deaf:
    """A list that gives its batches in turn, whatever place is asked for."""

    def __init__(self) -> None:
        self.turn = 0

    def __getitem__(self, place: int) -> Any:
        self.turn += 1
        return torch.full((4, 4), float(self.turn)), torch.tensor([self.turn] * 4)


@pytest.mark.parametrize("loader", [Liar, Deaf])
def test_other_batches_are_never_called_applied(begin: Begin, loader: Callable[[], Any], tmp_path: Path) -> None:
    """The answer says what happened: the weights were restored, the data were not."""
    training = begin(loader=loader())
    training.train(20, {16: training.order("job.rollback", step=10)})
    (reply,) = training.replies()
    assert reply.status == "failed"
    assert reply.output["reason"] == (
        "the training went back to step 10, and its parameters are those of the checkpoint; but different batches "
        "follow: 6 of the first 6 are not those from before"
    )
    assert batches_of(reply) == {"compared": 6, "agreed": 0}
    assert reply.output["verified"]["parameters"]["agreed"] == reply.output["verified"]["parameters"]["compared"] > 0
    assert training.run.global_step == 20


def test_a_skip_that_does_not_happen_is_not_called_applied(begin: Begin) -> None:
    """The batches to be skipped come all the same."""

    class Restarting:
        """It does not count what is drawn to be left out."""

        def __getitem__(self, number: int) -> Any:
            if back:
                number, back[0] = max(back[0], 10), back[0] + 1
            return torch.full((4, 4), float(number)), torch.tensor([number] * 4)

    back: list[int] = []
    training = begin(loader=Restarting())
    order = training.order("job.rollback", step=10, skip_batches=8)
    training.train(40, {30: [order, lambda: back.append(2)]})
    (reply,) = training.replies()
    assert reply.status == "failed"
    assert "of the first 16 are not those after the 8 that were to be skipped" in reply.output["reason"]


def test_a_source_declared_not_to_repeat_claims_nothing(begin: Begin) -> None:
    """The answer says so at once."""
    training = begin(loader=iter([(torch.randn(4, 4), torch.arange(4)) for _ in range(50)]))
    training.train(20, {16: training.order("job.rollback", step=10)})
    (reply,) = training.replies()
    assert reply.status == "applied"
    told = batches_of(reply)
    assert (told["compared"], told["agreed"]) == (0, 0)
    assert told["why"].startswith("not the same batches: a stream only goes on")


def test_a_checkpoint_changed_on_disk_is_not_restored(begin: Begin, tmp_path: Path) -> None:
    """A single bit differs under a correct checksum: the digests were stored separately."""
    calm = begin(directory=tmp_path / "calm")
    calm.train(40)
    training = begin(directory=tmp_path / "shaken")
    training.train(35)
    damage(tmp_path / "shaken" / "step-00000030" / "training.pt")
    training.train(40, {36: training.order("job.rollback")})
    (told,) = training.outputs()
    assert told["step"] == 20
    assert told["unusable"] == [
        "step-00000030 was loaded otherwise than it was saved: 1 of 30 tensors are not as they were saved: "
        "model.0.weight"
    ]
    assert training.losses == calm.losses
    assert same(training.state(), calm.state())


def test_if_all_checkpoints_were_changed_the_training_ends(begin: Begin, tmp_path: Path) -> None:
    """None is known to be intact; a restart rejects them too, unless told not to compare."""
    training = begin(checkpoint_at_start=False)
    training.train(10)
    damage(tmp_path / "step-00000010" / "training.pt")
    with pytest.raises(TrainmedicError, match="1 of 30 tensors are not as they were saved"):
        training.train(20, {12: training.order("job.rollback")})
    assert training.replies()[0].status == "failed"
    with pytest.raises(TrainmedicError, match="not as they were saved"):
        begin().run.resume()
    assert begin(verify=False).run.resume() == 10


def test_a_loader_of_the_user_is_compared_too(begin: Begin, tmp_path: Path) -> None:
    """A loader that leaves out the optimizer has not rolled back."""
    found: list[trainmedic.torch.SavedCheckpoint] = []

    def save(step: int, state: Any) -> None:
        torch.save((training.model.state_dict(), state), tmp_path / f"{step}.pt")
        found.append(trainmedic.torch.SavedCheckpoint(step, utc_now(), tmp_path / f"{step}.pt"))

    def load(one: trainmedic.torch.SavedCheckpoint) -> Any:
        model, state = torch.load(one.path)
        training.model.load_state_dict(model)
        return state

    training = begin(checkpoints=trainmedic.torch.OwnCheckpoints(save, load, lambda: found), checkpoint_at_start=False)
    with pytest.raises(TrainmedicError, match="tensors are not as they were saved: ema"):
        training.train(20, {15: training.order("job.rollback")})


# --- what comes while an answer waits ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "params", "why"),
    [
        ("job.stop", {"checkpoint": False}, "the training was told to stop"),
        ("job.pause", {"max": "100ms"}, "the training is paused"),
        ("job.rollback", {"step": 0}, "another rollback was ordered"),
        ("job.scale_batch", {"factor": 0.5, "keep_global_batch": False}, "a command has changed the batches"),
        ("job.dataloader_workers", {"count": 1}, "a command has changed the batches"),
    ],
)
def test_a_command_in_between_ends_the_wait(
    begin: Begin, action: str, params: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer lists what was compared by then and the reason; the log calls no other batches a mismatch."""
    training = begin()
    training.train(40, {30: training.order("job.rollback", step=10)}, {33: training.order(action, **params)})
    first, second = training.replies()
    assert (first.status, second.status) == ("applied", "applied")
    assert batches_of(first) == {"compared": 3, "agreed": 3, "why": why}
    assert "different batches follow" not in caplog.text


@pytest.mark.parametrize(
    ("action", "params", "why"),
    [
        ("job.rollback", {"before": "2020-01-01T00:00:00Z"}, "no complete checkpoint"),
        ("job.scale_batch", {"factor": 100.0, "keep_global_batch": False}, "an epoch has only"),
    ],
)
def test_a_rejected_command_in_between_does_not_end_the_wait(
    begin: Begin, action: str, params: dict[str, Any], why: str
) -> None:
    """It has changed nothing."""
    training = begin()
    training.train(40, {30: training.order("job.rollback", step=10)}, {33: training.order(action, **params)})
    first, second = training.replies()
    assert (first.status, second.status) == ("applied", "rejected")
    assert why in second.output["reason"]
    assert batches_of(first) == {"compared": 16, "agreed": 16}


def test_workers_that_fail_to_start_do_not_end_the_wait(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """The previous workers deliver the batches that were to come."""
    training = begin()
    source = training.run.training.batch_source
    assert source is not None
    set_workers = source.set_workers

    def fail(count: int) -> None:
        set_workers(count)
        if count:
            raise OSError("no process can be started")

    monkeypatch.setattr(source, "set_workers", fail)
    orders = {33: training.order("job.dataloader_workers", count=1)}
    training.train(40, {30: training.order("job.rollback", step=10)}, orders)
    first, second = training.replies()
    assert (first.status, second.status) == ("applied", "failed")
    assert batches_of(first) == {"compared": 16, "agreed": 16}


def test_a_command_that_changes_no_batches_does_not_end_the_wait(begin: Begin) -> None:
    """Its undo does not end the wait, either."""
    training = begin()
    slower = training.order("job.scale_lr", factor=0.5)
    orders = {32: slower, 34: training.undo(1, "job.scale_lr", factor=2.0), 36: training.order("job.checkpoint")}
    training.train(40, {30: training.order("job.rollback", step=10)}, orders)
    assert [reply.status for reply in training.replies()] == ["applied"] * 4
    assert batches_of(training.replies()[0]) == {"compared": 16, "agreed": 16}


def test_a_pause_does_not_wait_for_batches(begin: Begin) -> None:
    """A playbook that pauses, rolls back and resumes would wait for itself."""
    training = begin()
    resume = training.order("job.resume")

    def go_back_and_resume() -> None:
        training.order("job.pause", max="20s")()
        training.order("job.rollback", step=10)()
        resume()

    training.train(32, {30: go_back_and_resume})
    assert [reply.status for reply in training.replies()] == ["applied"] * 3
    assert batches_of(training.replies()[1]) == {"compared": 0, "agreed": 0, "why": "the training is paused"}


def test_the_answer_reports_a_training_that_ended_first(begin: Begin) -> None:
    """It ends by its steps, by an error in the loop, by leaving the loop, or with the job."""
    training = begin()
    training.train(12, {12: training.order("job.rollback", step=0)})
    assert batches_of(training.replies()[0]) == {"compared": 12, "agreed": 12}

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        training.train(30, {25: training.order("job.rollback", step=10)}, {30 + 12: fail})
    told = batches_of(training.replies()[1])
    assert told["compared"] == told["agreed"] < 15
    assert told["why"] == "the loop raised ZeroDivisionError"


def test_a_job_that_ends_answers_for_what_it_has_done(commander: Commander, tmp_path: Path) -> None:
    """After an error between two steps nothing of the loop is called any more."""
    with commander.connect() as medic:
        training = Training(commander, medic, tmp_path)
        drawn = iter(training.run.batches())
        for number in range(1, 25):
            batch, _ = next(drawn)
            with training.run.step() as step:
                step.backward(training.model(batch).square().mean())
                step.update()
                if number == 20:
                    training.order("job.rollback", step=0)()
    (reply,) = training.replies()
    assert (reply.status, reply.output["step"]) == ("applied", 0)
    assert batches_of(reply) == {"compared": 4, "agreed": 4, "why": "the job ended"}
    training.run.close()


def test_an_answer_is_in_time(begin: Begin) -> None:
    """Batches that would come too late are not waited for."""
    training = begin()

    def soon() -> None:
        training.sent.append(
            training.commander.send_and_wait(training.run.training.medic, "job.rollback", seconds=4.5, step=10)
        )

    training.train(40, {30: soon})
    (reply,) = training.replies()
    assert reply.status == "applied"
    why = "the next batches would have come too late for the answer"
    assert batches_of(reply) == {"compared": 1, "agreed": 1, "why": why}


def test_batches_of_another_size_are_not_compared(begin: Begin) -> None:
    """The checkpoint precedes the change: the same samples come in other batches, which the answer says. After a
    restart they are of the same size as in the checkpoint, and compared."""
    training = begin()
    halve = training.order("job.scale_batch", factor=0.5, keep_global_batch=False)
    training.train(30, {15: halve, 26: training.order("job.rollback", step=10)})
    told = training.outputs()[1]
    assert told["data"].startswith("the same samples again, in other batches")
    assert told["verified"]["batches"] == {"compared": 0, "agreed": 0, "why": told["data"]}
    training.run.close()
    again = begin()
    assert again.run.resume() == 30
    again.train(38, {35: again.order("job.rollback", step=20), 36: ()})
    assert batches_of(again.replies()[0])["compared"] > 0


def test_a_restart_knows_the_batches_from_before_it(begin: Begin) -> None:
    """A rollback beyond the checkpoint of the resume is compared as well."""
    first = begin()
    first.train(35)
    first.run.close()
    second = begin(seed=77)
    assert second.run.resume() == 30
    second.train(40, {33: second.order("job.rollback", step=20)})
    (reply,) = second.replies()
    assert reply.status == "applied"
    assert batches_of(reply) == {"compared": 13, "agreed": 13}


# --- the choice ----------------------------------------------------------------------------------------


class Course:
    """A training that reports the losses that it is told."""

    def __init__(self, commander: Commander, medic: trainmedic.Medic, directory: Path, keep: int | None = None) -> None:
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        data = TensorDataset(torch.randn(400, 4))
        self.run = trainmedic.torch.attach(
            medic,
            model=self.model,
            optimizer=self.optimizer,
            loader=DataLoader(data, 4),
            checkpoints=directory,
            checkpoint_every=10,
            keep=keep,
        )
        self.commander, self.medic = commander, medic
        self.steps_at: dict[int, str] = {}

    def train(
        self, steps: int, loss: Callable[[int], float], at: Mapping[int, Callable[[], Any]] | None = None
    ) -> None:
        waiting = dict(at or {})
        for (batch,) in self.run.batches(steps=steps):
            with self.run.step() as step:
                step.backward(self.model(batch).square().mean())
                step.update()
                noise = random.Random(step.number).gauss(0, 0.02)
                step.report(loss=torch.tensor(loss(step.number) * (1 + noise)))
                self.steps_at.setdefault(step.number, write_time(utc_now()))
                waiting.pop(step.number, lambda: None)()

    def go_back(self, before: int) -> str:
        """Order a rollback to before the time of that step."""
        return self.commander.send_and_wait(self.medic, "job.rollback", before=self.steps_at[before])


def test_a_checkpoint_between_loss_jump_and_alert_is_skipped(
    commander: Commander, medic: trainmedic.Medic, tmp_path: Path, every_report_counts: None
) -> None:
    """The loss is 1.9 and jumps to 4.13 at step 96; a checkpoint is written at step 100, and the alert starts at
    step 108."""
    course = Course(commander, medic, tmp_path)
    sent: list[str] = []
    course.train(112, lambda step: 4.13 if step >= 96 else 1.9, {110: lambda: sent.append(course.go_back(108))})
    reply = commander.final(sent[0])
    assert (reply.status, reply.output["step"]) == ("applied", 90)
    (passed,) = reply.output["passed_over"]
    assert (passed["checkpoint"], passed["step"]) == ("step-00000100", 100)
    assert "against a median of 1.89" in passed["why"]
    course.run.close()


def test_a_recurring_fault_is_rolled_back_further(
    commander: Commander, medic: trainmedic.Medic, tmp_path: Path, every_report_counts: None
) -> None:
    """It recurs at step 96: the next rollback goes beyond the last one, though that one is healthy and only
    few are kept."""
    course = Course(commander, medic, tmp_path, keep=2)
    sent: list[str] = []

    def go_back() -> None:
        sent.append(course.commander.send_and_wait(medic, "job.rollback", before=write_time(utc_now())))

    jumped: Callable[[int], float] = lambda step: 4.13 if step >= 96 else 1.9  # noqa: E731
    course.train(110, jumped, {99: go_back, 105: go_back})
    assert [commander.final(each).output["step"] for each in sent] == [90, 80]
    ill, tried = commander.final(sent[1]).output["passed_over"]
    assert (ill["step"], tried["step"]) == (100, 90)
    assert tried["why"] == "the fault returned after a rollback to step 90"
    course.run.close()


def test_a_checkpoint_with_nan_weights_is_not_a_rollback_target(
    begin: Begin, tmp_path: Path, every_report_counts: None
) -> None:
    """It serves neither a rollback nor a restart; if there is no other, the command is rejected with the reason."""
    training = begin()

    def spoil() -> None:
        with torch.no_grad():
            training.model[0].weight[0, 0] = float("nan")

    training.train(25, {15: spoil, 22: training.order("job.rollback")})
    told = training.outputs()[0]
    assert told["step"] == 10
    assert told["passed_over"] == [
        {
            "checkpoint": "step-00000020",
            "step": 20,
            "why": "its weights or the optimizer's state are not all finite numbers",
        }
    ]
    spoil()
    training.train(30)
    training.run.close()
    again = begin()
    assert again.run.resume() == 20
    for step in (0, 10, 20):
        (tmp_path / f"step-{step:08d}" / checkpoints.COMPLETE).unlink()
    again.train(21, {21: again.order("job.rollback")})
    (reply,) = again.replies()
    assert reply.status == "rejected"
