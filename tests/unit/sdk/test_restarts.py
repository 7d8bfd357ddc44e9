"""A loop is restarted as often as its limits say, and its command is answered when that has shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import trainmedic
from tests.support.clocks import START, ManualClock
from tests.support.messages import make_job_command
from trainmedic.errors import Rejected
from trainmedic.job.command import JobCommand
from trainmedic.job.group import SingleRankGroup
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.loop_restart import DamagedCheckpoint, LoopRestart
from trainmedic.recovery.restarts import LoopRestarter, RestartLimits, require_on_all_ranks

NEWEST = Path("checkpoint-10")
LIMITS = RestartLimits(retries=2, delay=10.0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def medic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[trainmedic.Medic]:
    """Of a job whose server has not said where Redis is, so that nothing is connected to."""
    monkeypatch.setenv("TRAINMEDIC_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("TRAINMEDIC_REDIS_URL", raising=False)
    with trainmedic.connect(job="llm-1", rank=1, world_size=2) as connected:
        connected.world_size = 1
        yield connected


@pytest.fixture
def answers() -> list[tuple[str, Mapping[str, Any]]]:
    return []


@pytest.fixture
def restarts(medic: trainmedic.Medic, clock: ManualClock) -> LoopRestarter:
    return make(medic, clock)


def make(
    medic: trainmedic.Medic, clock: ManualClock, newest: Path | None = NEWEST, limits: RestartLimits = LIMITS
) -> LoopRestarter:
    return LoopRestarter(medic, lambda: newest, nothing, limits, clock.sleep, clock.now)


def nothing(_: Any) -> SavedCheckpoint:
    raise Rejected("there is no checkpoint")


@pytest.fixture
def command(answers: list[tuple[str, Mapping[str, Any]]]) -> JobCommand:
    return make_job_command("job.rollback", answers, START, seconds=25)


class Loop:
    """Does the next of ``acts`` each time that it is started; keeps where it was started from."""

    def __init__(self, *acts: Callable[[], None]) -> None:
        self.acts = list(acts)
        self.started: list[Path | None] = []

    def __call__(self, restart: LoopRestart | None) -> int:
        self.started.append(restart.checkpoint if restart is not None else None)
        self.acts.pop(0)()
        return len(self.started)


def crash() -> None:
    raise RuntimeError("out of memory")


def crash_after(restarts: LoopRestarter, step: int) -> Callable[[], None]:
    def act() -> None:
        stepped(restarts, step)
        crash()

    return act


def asking(restarts: LoopRestarter, step: int, restart: LoopRestart) -> Callable[[], None]:
    def act() -> None:
        stepped(restarts, step)
        restarts.request(restart)

    return act


def test_a_crashed_loop_is_tried_again_after_the_delay_and_no_more_often_than_allowed(
    restarts: LoopRestarter, clock: ManualClock
) -> None:
    """Then the error is the caller's."""
    loop = Loop(crash_after(restarts, 12), crash, crash, crash)
    with pytest.raises(RuntimeError, match="out of memory"):
        restarts.run(loop)
    assert loop.started == [None, NEWEST, NEWEST]
    assert clock.time == START + timedelta(seconds=20)


def test_progress_makes_the_tries_anew(restarts: LoopRestarter) -> None:
    """Only failures in a row count."""
    loop = Loop(*(crash_after(restarts, step) for step in (1, 2, 3)), lambda: stepped(restarts, 4))
    assert restarts.run(loop) == 4


def test_a_loop_that_never_did_a_step_is_not_tried_again(restarts: LoopRestarter) -> None:
    """What is wrong with it from the beginning is the program's fault."""
    loop = Loop(crash)
    with pytest.raises(RuntimeError):
        restarts.run(loop)
    assert loop.started == [None]


def test_without_a_checkpoint_the_crash_is_the_callers(medic: trainmedic.Medic, clock: ManualClock) -> None:
    """There is nothing to go on from."""
    restarts = make(medic, clock, newest=None)

    with pytest.raises(RuntimeError):
        restarts.run(Loop(crash_after(restarts, 3)))


def test_with_several_ranks_a_crash_is_left_to_the_launcher(medic: trainmedic.Medic, clock: ManualClock) -> None:
    """The other ranks wait in a collective."""
    medic.world_size = 2
    restarts = make(medic, clock)

    with pytest.raises(RuntimeError):
        restarts.run(Loop(crash_after(restarts, 3)))
    assert clock.time == START


def test_a_command_is_answered_when_the_loop_has_come_up(
    restarts: LoopRestarter, command: JobCommand, answers: list[Any]
) -> None:
    """Not before; a crash on the way costs a try, and not the command."""

    def ask() -> None:
        stepped(restarts, 12)
        restarts.request(LoopRestart(Path("checkpoint-5"), command, output={"left_step": 12}))
        assert restarts.is_requested

    loop = Loop(ask, crash, lambda: stepped(restarts, 6))
    assert restarts.run(loop) == 3
    assert loop.started == [None, Path("checkpoint-5"), Path("checkpoint-5")]
    assert answers == [("applied", {"left_step": 12, "finished": True})]


def test_a_command_that_expires_while_the_loop_does_not_come_up_is_failed(
    medic: trainmedic.Medic, clock: ManualClock, command: JobCommand, answers: list[Any]
) -> None:
    """The server learns of it in time; the loop is tried on, without what the command was to change."""
    restarts = make(medic, clock, limits=RestartLimits(retries=5, delay=10.0))
    begun: list[LoopRestart | None] = []
    to = LoopRestart(Path("checkpoint-5"), command, 3, settings={"batch": 8}, previous={"batch": 4})
    acts = [asking(restarts, 12, to), crash, crash, crash, lambda: stepped(restarts, 6)]

    def attempt(restart: LoopRestart | None) -> None:
        begun.append(restart)
        acts.pop(0)()

    restarts.run(attempt)
    assert begun == [None, to, to, to, LoopRestart(NEWEST, settings={"batch": 4})]
    assert [status for status, _ in answers] == ["failed"]
    assert "expired before the training loop restarted" in answers[0][1]["reason"]
    assert clock.time == START + timedelta(seconds=30)


def test_settings_that_the_loop_does_not_come_up_with_are_taken_back(
    restarts: LoopRestarter, command: JobCommand, answers: list[Any]
) -> None:
    """After the tries, and training goes on as it was."""
    seen: list[Mapping[str, Any]] = []
    ask = asking(restarts, 12, LoopRestart(NEWEST, command, settings={"batch": 8}, previous={"batch": 4}))
    acts = [ask, crash, crash, crash, lambda: stepped(restarts, 13)]

    def attempt(restart: LoopRestart | None) -> None:
        seen.append(restart.settings if restart is not None else {})
        acts.pop(0)()

    restarts.run(attempt)
    assert seen == [{}, {"batch": 8}, {"batch": 8}, {"batch": 8}, {"batch": 4}]
    assert [status for status, _ in answers] == ["failed"]


def test_a_rollback_that_cannot_be_goes_on_from_the_newest(
    restarts: LoopRestarter, command: JobCommand, answers: list[Any]
) -> None:
    """Its checkpoint was deleted meanwhile: the command failed, and the job lives."""
    ask = asking(restarts, 20, LoopRestart(Path("checkpoint-5"), command))
    loop = Loop(ask, crash, crash, crash, lambda: stepped(restarts, 11))
    assert restarts.run(loop) == 5
    assert loop.started == [None, *[Path("checkpoint-5")] * 3, NEWEST]
    assert [status for status, _ in answers] == ["failed"]


OLDER = (SavedCheckpoint(4, START, Path("checkpoint-4")), SavedCheckpoint(2, START, Path("checkpoint-2")))


def test_a_rollback_whose_checkpoint_is_damaged_goes_to_the_next_older_one(
    restarts: LoopRestarter, clock: ManualClock, command: JobCommand, answers: list[Any]
) -> None:
    """At once, for another try would find the same; the answer names where it went and what was wrong."""
    ask = asking(
        restarts, 12, LoopRestart(Path("checkpoint-5"), command, output={"checkpoint": "checkpoint-5"}, others=OLDER)
    )
    loop = Loop(ask, damage("5 is bad"), damage("4 is bad"), lambda: stepped(restarts, 3))
    assert restarts.run(loop) == 4
    assert loop.started == [None, *map(Path, ("checkpoint-5", "checkpoint-4", "checkpoint-2"))]
    ((status, output),) = answers
    assert (status, output["checkpoint"], output["checkpoint_step"]) == ("applied", "checkpoint-2", 2)
    assert output["unusable"] == ["5 is bad", "4 is bad"]
    assert clock.time == START


def test_a_rollback_that_finds_none_but_damaged_ones_ends_the_training(
    restarts: LoopRestarter, command: JobCommand, answers: list[Any]
) -> None:
    """There is nothing to train on. The newest of all is not meant: the trouble may be in it."""
    ask = asking(restarts, 12, LoopRestart(Path("checkpoint-5"), command, others=OLDER[1:]))
    loop = Loop(ask, damage("5 is bad"), damage("2 is bad"))
    with pytest.raises(DamagedCheckpoint, match="2 is bad"):
        restarts.run(loop)
    ((status, output),) = answers
    assert status == "failed"
    assert output["reason"].startswith("2 is bad; there is no older one to use")


def test_a_checkpoint_that_cannot_be_loaded_is_tried_as_often_as_any_and_then_replaced(
    medic: trainmedic.Medic, clock: ManualClock, command: JobCommand, answers: list[Any]
) -> None:
    """A disk may be away for a moment. A loop that had loaded it and failed later fails for another reason."""
    restarts = make(medic, clock, newest=Path("checkpoint-4"))
    ask = asking(restarts, 12, LoopRestart(Path("checkpoint-5"), command, others=OLDER))

    def load_and_crash() -> None:
        restarts.note_loaded()
        crash()

    loop = Loop(ask, crash, crash, crash, load_and_crash, load_and_crash, load_and_crash)
    with pytest.raises(RuntimeError):
        restarts.run(loop)
    assert loop.started == [None, *[Path("checkpoint-5")] * 3, *[Path("checkpoint-4")] * 3]
    assert [status for status, _ in answers] == ["failed"]


def test_a_crash_that_meets_a_damaged_checkpoint_goes_on_from_the_newest_other_one(
    medic: trainmedic.Medic, clock: ManualClock
) -> None:
    """As long as there is one; a damaged one does not count among them any more."""

    left = [Path("checkpoint-10"), Path("checkpoint-5"), None]
    restarts = LoopRestarter(medic, lambda: left.pop(0), nothing, LIMITS, clock.sleep, clock.now)
    loop = Loop(crash_after(restarts, 12), damage("10 is bad"), damage("5 is bad"))
    with pytest.raises(DamagedCheckpoint, match="5 is bad"):
        restarts.run(loop)
    assert loop.started == [None, Path("checkpoint-10"), Path("checkpoint-5")]


def damage(why: str) -> Callable[[], None]:
    def act() -> None:
        raise DamagedCheckpoint(why)

    return act


def test_a_stop_ends_what_was_about_to_restart(
    restarts: LoopRestarter, command: JobCommand, answers: list[Any]
) -> None:
    """The command that wanted the restart is told so."""

    def ask_and_stop() -> None:
        stepped(restarts, 12)
        restarts.request(LoopRestart(NEWEST, command))
        restarts.stop()

    assert restarts.run(Loop(ask_and_stop)) == 1
    assert [status for status, _ in answers] == ["failed"]


def test_all_ranks_have_to_see_the_checkpoint() -> None:
    """Else they refuse together, and name the rank that does not."""
    checkpoint = SavedCheckpoint(10, START, NEWEST)

    class Two(SingleRankGroup):
        world_size = 2

        def poll(self, value: Any = None, patience: float = 0.0) -> Mapping[int, Any]:
            return {0: value, 1: False}

    require_on_all_ranks(SingleRankGroup(), checkpoint, lambda path: True)
    with pytest.raises(Rejected, match="as seen from rank 1"):
        require_on_all_ranks(Two(), checkpoint, lambda path: True)


def stepped(restarts: LoopRestarter, step: int) -> None:
    """As the loop does: answer the command after its restart's first step."""
    restart = restarts.stepped(step)
    if restart is not None and restart.command is not None and not restart.command.is_answered:
        restart.command.applied({**restart.output, "finished": True})
