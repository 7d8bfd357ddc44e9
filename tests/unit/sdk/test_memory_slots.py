"""Slots in shared memory: what counts, what is refused, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainmedic.recovery import memory_slots
from trainmedic.recovery.memory_pool import SlotPool
from trainmedic.recovery.memory_slots import DirectoryLock, Slot, SlotMark, UntrustedMemory

SIZE = 1 << 16
TAKE = """
import sys, pathlib; from trainmedic.recovery.memory_slots import DirectoryLock
lock = DirectoryLock(pathlib.Path(sys.argv[1]), patience=0.0)
""".strip()


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "shared"
    directory.mkdir()
    monkeypatch.setenv(memory_slots.ENVIRONMENT, str(directory))
    return directory


@pytest.fixture
def place(base: Path) -> Path:
    directory = memory_slots.rank_directory(memory_slots.node_directory("run", "node-1"), 0)
    directory.mkdir()
    return directory


def mark(step: int, size: int = 100, **more: object) -> SlotMark:
    fields = {"at": f"2026-01-01T00:00:{step % 60:02d}Z", "rank": 0, "ranks": 1, "structure": 50, "checksum": 7}
    return SlotMark(set_id=f"set-{step}", step=step, size=size, **{**fields, **more})  # type: ignore[arg-type]


def surviving(place: Path) -> dict[str, SlotMark]:
    return {file.name: found for file, found in memory_slots.surviving(place.parent)}


def test_a_slot_counts_from_its_mark_on_and_for_this_user_alone(place: Path) -> None:
    slot = Slot(SIZE, place / "slot-0")
    assert surviving(place) == {}
    slot.complete(mark(5, health={"loss": 1.0}))
    assert surviving(place) == {"slot-0": mark(5, health={"loss": 1.0})}
    assert {file.stat().st_mode & 0o777 for file in place.iterdir()} == {0o600}
    slot.clear()
    assert surviving(place) == {}


def test_what_another_could_have_put_there_is_not_believed(base: Path, place: Path, tmp_path: Path) -> None:
    """A link, a file that others can write, one that is cut off, a mark that contradicts itself or is nonsense."""
    for number in range(6):
        Slot(SIZE, place / f"slot-{number}").complete(mark(number))
    (place / "slot-0").unlink()
    (place / "slot-0").symlink_to(tmp_path)
    (place / "slot-1").chmod(0o666)
    os.truncate(place / "slot-2", 10)
    (place / "slot-3.json").write_text(json.dumps({"v": 1, "step": -1}))
    (place / "slot-4.json").write_text("[" * 100_000)
    assert list(surviving(place)) == ["slot-5"]
    (place / "slot-5").unlink()
    (place / "slot-5").symlink_to(place / "slot-3")
    with pytest.raises(OSError, match="symbolic"):
        memory_slots.map_file(place / "slot-5", mark(5))


@pytest.mark.parametrize("kind", ["link", "open to others", "file"])
def test_a_directory_that_is_not_ours_alone_is_not_used(kind: str, base: Path, tmp_path: Path) -> None:
    root = base / f"trainmedic-{os.geteuid()}"
    if kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        root.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        root.write_text("")
    else:
        root.mkdir()
        root.chmod(0o777)
    with pytest.raises((UntrustedMemory, OSError)) as refused:
        memory_slots.node_directory("run", "node-1")
    assert ("not a private directory" in str(refused.value)) == (kind != "file")
    assert not (tmp_path / "elsewhere" / "run").exists()


def test_names_stay_within_the_directory(base: Path) -> None:
    """Of a training or a node, whatever they are called."""
    for training, node in (("../../etc", ".."), ("..", "."), ("", "/")):
        directory = memory_slots.node_directory(training, node).resolve()
        assert directory.parent.parent.parent == base.resolve()


def test_long_names_that_differ_at_their_end_have_directories_of_their_own(base: Path) -> None:
    """The end of a training's name tells trainings of one job apart."""
    one, other = (memory_slots.node_directory("обучение" * 20 + end, "node-1") for end in ("-1", "-2"))
    assert one != other
    assert len(one.parent.name) <= 255


def test_one_process_has_a_directory_at_a_time(place: Path) -> None:
    lock = DirectoryLock(place)
    with pytest.raises(UntrustedMemory, match="another run of this process"):
        DirectoryLock(place, patience=0.0)
    taking = [sys.executable, "-c", TAKE, str(place)]
    assert b"held by another process" in subprocess.run(taking, capture_output=True).stderr
    lock.release()
    assert subprocess.run(taking, capture_output=True).returncode == 0
    DirectoryLock(place, patience=0.0).release()


def test_processes_that_outlive_the_one_that_forked_them_hold_nothing(place: Path) -> None:
    """As a data loader's workers do for some seconds; a restart must not wait for them."""
    program = TAKE + "; import os, time; os.fork() or (os.close(1), time.sleep(600)); print(os.getpid())"
    command = [sys.executable, "-c", program, str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline()
        killed.kill()
    DirectoryLock(place, patience=0.0).release()
    os.killpg(killed.pid, signal.SIGKILL)  # the one that it had forked still lived


def test_what_nobody_takes_up_is_removed_after_a_while(base: Path, place: Path) -> None:
    """But not what a living process holds, nor the present training's."""
    Slot(SIZE, place / "slot-0").complete(mark(1))
    past = time.time() - 2 * memory_slots.STALE_AFTER
    for path in (*base.rglob("*"), place):
        os.utime(path, (past, past), follow_symlinks=False)
    memory_slots.node_directory("run", "node-2")
    assert (place / "slot-0").exists()
    lock = DirectoryLock(place)
    os.utime(place / "lock", (past, past))
    os.utime(place, (past, past))
    os.utime(place.parent.parent, (past, past))
    os.utime(place.parent.parent / "node-2", (past, past))
    memory_slots.node_directory("another", "node-1")
    assert (place / "slot-0").exists()
    lock.release()
    memory_slots.node_directory("a third", "node-1")
    assert not place.exists()


# --- the pool -----------------------------------------------------------------------------------------


@pytest.fixture(params=["shared", "private"])
def pool(request: pytest.FixtureRequest, place: Path) -> SlotPool:
    return SlotPool(4, 10 * SIZE, place if request.param == "shared" else None)


def fill(pool: SlotPool, step: int, size: int = 1000, horizon: int = 0, **more: object) -> bool:
    slot = pool.take(size, step, horizon)
    if slot is None:
        return False
    slot.complete(mark(step, size=size, **more))
    pool.release(slot)
    return True


def steps(pool: SlotPool) -> list[int]:
    return [mark.step for mark, _ in pool.complete()]


def test_slots_are_made_beforehand_and_used_again(pool: SlotPool) -> None:
    assert not fill(pool, 1)
    assert pool.needs(1000)
    pool.provide(1000)
    assert not pool.needs(1000)
    assert all(fill(pool, step) for step in range(1, 8))
    assert len(steps(pool)) == 4
    assert steps(pool)[-1] == 7


def test_the_limit_holds_and_too_little_is_said(place: Path) -> None:
    pool = SlotPool(8, 3 * SIZE, place)
    pool.provide(1000)
    assert pool.count == 3
    pool.provide(3 * SIZE)
    assert "2 slots of" in pool.problem
    assert pool.count == 0
    assert not list(place.glob("slot-*"))


def test_a_state_that_grows_gets_larger_slots_and_keeps_its_newest_meanwhile(pool: SlotPool) -> None:
    pool.provide(1000)
    assert all(fill(pool, step) for step in (1, 2, 3))
    assert not fill(pool, 4, size=SIZE + 1)
    pool.provide(SIZE + 1)
    assert steps(pool) == [3]
    assert fill(pool, 4, size=SIZE + 1)
    assert fill(pool, 5, size=SIZE + 1)
    assert steps(pool) == [4, 5]


def test_a_kept_one_stays_when_it_is_outgrown(pool: SlotPool) -> None:
    """Until it is no longer kept, and within the limit: 10 slots of the first size, 4 of the second."""
    pool.provide(1000)
    assert all(fill(pool, step) for step in (1, 2, 3))
    pool.kept = {"set-1", "set-2"}
    assert not fill(pool, 4, size=SIZE + 1)
    assert steps(pool) == [1, 2, 3]
    pool.provide(SIZE + 1)
    assert steps(pool) == [2, 3]
    assert all(fill(pool, step, size=SIZE + 1) for step in (4, 5, 6, 7, 8))
    assert 2 in steps(pool)
    pool.kept = set()
    assert fill(pool, 9, size=SIZE + 1)
    assert 2 not in steps(pool)


def test_what_is_being_read_is_not_written_to(pool: SlotPool) -> None:
    pool.provide(1000)
    assert all(fill(pool, step) for step in (1, 2, 3, 4))
    slot = pool.find("set-2")
    assert slot is not None
    with pool.using(slot):
        assert all(fill(pool, step) for step in (5, 6, 7))
        assert 2 in steps(pool)
    assert all(fill(pool, step) for step in (8, 9, 10))
    assert 2 not in steps(pool)


def test_an_ill_one_goes_first_and_a_kept_one_last(pool: SlotPool) -> None:
    pool.provide(1000)
    assert fill(pool, 1)
    assert fill(pool, 2, health={"finite": False})
    assert fill(pool, 3)
    assert fill(pool, 4)
    assert fill(pool, 5)
    assert 2 not in steps(pool)
    pool.kept = {"set-1"}
    assert all(fill(pool, step, horizon=3) for step in range(6, 12))
    assert 1 in steps(pool)
