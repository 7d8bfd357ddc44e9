"""A checkpoint is there whole or not at all, and only what may go is deleted."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from trainmedic.errors import ConfigurationError
from trainmedic.job.group import SingleRankGroup
from trainmedic.recovery import checkpoints
from trainmedic.recovery.checkpoints import COMPLETE, PINNED, SavedCheckpoint
from trainmedic.torch import Directory, OwnCheckpoints
from trainmedic.torch.checkpoints.checkpoint_files import TRAINING, read_file
from trainmedic.torch.checkpoints.checkpoint_storage import RUN, UnusableCheckpoint
from trainmedic.torch.checkpoints.joint_checkpoints import JointCheckpointDirectory
from trainmedic.torch.state_parts import StateParts
from trainmedic.wire import envelope

WHY = {"why": "a test"}


class Held:
    """Something of the user's that keeps a state which safe loading does not know."""

    def __init__(self) -> None:
        self.value: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


def parts(width: int = 3, **more: Any) -> StateParts:
    model = nn.Linear(width, 1)
    return StateParts(model=model, optimizer=torch.optim.AdamW(model.parameters()), **more)


def weight(of: StateParts) -> torch.Tensor:
    found: torch.Tensor = of.by_name["model"].weight
    return found


def change(of: StateParts) -> None:
    with torch.no_grad():
        weight(of).add_(1.0)


def age(checkpoint: Path, minutes: int) -> None:
    """Make it look as if it had been written earlier."""
    facts = dict(checkpoints.completion(checkpoint) or {})
    at = datetime.now(UTC) - timedelta(minutes=minutes)
    checkpoints.mark_complete(checkpoint, {**facts, "at": envelope.write_time(at)})


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    """The parts in place, and the run's own state."""
    storage, training = Directory(tmp_path / "made" / "on the way"), parts()
    found = storage.save(150, training, {"step": 150})
    kept = weight(training).clone()
    change(training)
    assert storage.checkpoints() == [found]
    assert storage.load(found, training) == {"step": 150}
    assert torch.equal(weight(training), kept)
    assert found.path.name == "step-00000150"


def test_there_is_nothing_where_there_is_no_directory(tmp_path: Path) -> None:
    """A run that has not saved yet."""
    assert Directory(tmp_path / "none").checkpoints() == []


def cut(path: Path) -> None:
    (path / TRAINING).write_bytes((path / TRAINING).read_bytes()[:-100])


def without_mark(path: Path) -> None:
    (path / COMPLETE).unlink()


def without_file(path: Path) -> None:
    (path / RUN).unlink()


def half_a_mark(path: Path) -> None:
    (path / COMPLETE).write_bytes((path / COMPLETE).read_bytes()[:10])


def odd_mark(path: Path) -> None:
    checkpoints.mark_complete(path, {"step": "many", "at": 3, "files": []})


def endless_mark(path: Path) -> None:
    checkpoints.mark_complete(path, {**(checkpoints.completion(path) or {}), "step": math.inf})


@pytest.mark.parametrize("harm", [cut, without_mark, without_file, half_a_mark, odd_mark, endless_mark])
def test_a_half_written_one_is_seen_and_never_counts(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    """A file cut off or missing, a mark missing or unreadable."""
    storage, training = Directory(tmp_path), parts()
    harm(storage.save(150, training, {}).path)
    assert [(one.step, one.complete) for one in storage.checkpoints()] == [(150, False)]
    storage.save(150, training, {})
    assert [one.complete for one in storage.checkpoints()] == [True]


def test_a_damaged_one_changes_nothing_when_it_is_loaded(tmp_path: Path) -> None:
    """Bytes that changed on the disk, the length being right: the archive's checksums do not agree."""
    storage, training = Directory(tmp_path), parts(width=1000)
    found = storage.save(150, training, {})
    raw = bytearray((found.path / TRAINING).read_bytes())
    middle = raw.index(weight(training).detach().numpy().tobytes()[:16]) + 100
    raw[middle : middle + 50] = bytes(50)
    (found.path / TRAINING).write_bytes(raw)
    change(training)
    kept = weight(training).clone()
    with pytest.raises(UnusableCheckpoint, match=r"step-00000150/training\.pt cannot be read"):
        storage.load(found, training)
    assert torch.equal(weight(training), kept)


def test_one_with_a_damaged_directory_is_unusable(tmp_path: Path) -> None:
    """Its entry names a compression that its data does not have."""
    storage, training = Directory(tmp_path), parts()
    found = storage.save(150, training, {})
    raw = bytearray((found.path / TRAINING).read_bytes())
    raw[raw.index(b"PK\1\2") + 10] = 8
    (found.path / TRAINING).write_bytes(raw)
    with pytest.raises(UnusableCheckpoint, match=r"step-00000150/training\.pt cannot be read"):
        storage.load(found, training)


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04", b"\x80\x04."])
def test_whatever_stands_in_the_file_only_makes_it_unusable(tmp_path: Path, content: bytes) -> None:
    """Also where its length is what the mark says."""
    storage, training = Directory(tmp_path), parts()
    found = storage.save(150, training, {})
    (found.path / RUN).write_bytes(content)
    with pytest.raises(UnusableCheckpoint):
        storage.load(found, training)


def _compressed(raw: bytes) -> bytes:
    """Change the method of the first file in the archive's directory from stored to compressed."""
    method = raw.index(b"PK\x01\x02") + 10
    return raw[:method] + b"\x08" + raw[method + 1 :]


def _of_another_kind(raw: bytes) -> bytes:
    return raw.replace(b"storage", b"storaoe")


@pytest.mark.parametrize(("damage", "checked"), [(_compressed, True), (_of_another_kind, False)])
def test_a_damaged_part_that_has_no_checksum_makes_it_unusable(
    tmp_path: Path, damage: Callable[[bytes], bytes], checked: bool
) -> None:
    storage, training = Directory(tmp_path), parts()
    path = storage.save(150, training, {}).path / TRAINING
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UnusableCheckpoint, match="cannot be read"):
        read_file(path, checked)


def test_without_memory_to_read_it_no_older_one_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It may be intact, and training on from an older one would lose steps.
    storage, training = Directory(tmp_path), parts()
    found = storage.save(150, training, {})
    monkeypatch.setattr(torch, "load", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        storage.load(found, training)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: parts(width=4), "weight has another shape"),
        (lambda: parts(ema=nn.Linear(3, 1)), "it has no ema"),
        (lambda: StateParts(model=nn.Linear(3, 1, bias=False)), "1 names differ, such as bias"),
        (
            lambda: StateParts(model=(m := nn.Linear(3, 1)), optimizer=torch.optim.SGD([m.weight])),
            "other parameter groups",
        ),
    ],
)
def test_one_of_another_training_is_refused_whole(tmp_path: Path, other: Callable[[], StateParts], words: str) -> None:
    """Before anything of it is loaded."""
    storage = Directory(tmp_path)
    found = storage.save(150, parts(), {})
    present = other()
    kept = weight(present).clone()
    with pytest.raises(UnusableCheckpoint, match=words):
        storage.load(found, present)
    assert torch.equal(weight(present), kept)


def test_a_save_that_fails_leaves_nothing_and_harms_nothing(tmp_path: Path) -> None:
    """What cannot be pickled; the checkpoint from before stays as it is."""
    held = Held()
    storage, training = Directory(tmp_path), parts(also=held)
    storage.save(100, training, {})
    held.value = lambda: None
    with pytest.raises(Exception, match="lambda"):
        storage.save(150, training, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000100"]


def test_one_that_cannot_be_marked_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk, which it would keep full: without its mark it counts for nothing and is never pruned."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "mark_complete", full)
    with pytest.raises(OSError, match="No space"):
        Directory(tmp_path).save(100, parts(), {})
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_does_not_take_its_state_makes_a_checkpoint_unusable(tmp_path: Path) -> None:
    """So that the next older one is tried, which also replaces what was loaded by then."""
    held = Held()
    storage, training = Directory(tmp_path), parts(also=held)
    found = storage.save(100, training, {})
    monkey = {"load_state_dict": lambda _: 1 / 0}
    vars(held).update(monkey)
    with pytest.raises(UnusableCheckpoint, match="loaded in part: ZeroDivisionError"):
        storage.load(found, training)


def test_a_state_of_the_users_own_classes_is_loaded_from_files_of_ones_own(tmp_path: Path) -> None:
    """Safe loading does not know the class; where others could write, it stays refused."""
    held = Held()
    held.value = {timedelta(seconds=3)}
    storage, training = Directory(tmp_path), parts(also=held)
    found = storage.save(100, training, {})
    held.value = None
    storage.load(found, training)
    assert held.value == {timedelta(seconds=3)}
    found.path.chmod(0o777)
    with pytest.raises(UnusableCheckpoint):
        storage.load(found, training)


def test_only_surplus_is_deleted(tmp_path: Path) -> None:
    """The newest stay, a pinned one stays and one beyond it, leftovers of a killed process go, and what another process
    is writing stays."""
    (tmp_path / "unfinished-77-step-00000450").mkdir()
    storage, training = Directory(tmp_path, keep=2), parts()
    for step in (50, 100, 200, 300, 400, 500):
        age(storage.save(step, training, {}).path, minutes=100 - step // 10)
    checkpoints.pin(tmp_path / "step-00000200", {**WHY, "left_step": 500})
    for name in ("unfinished-77-step-00000450", "abandoned-1-step-00000320", "unfinished-78-step-00000450"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / TRAINING).write_bytes(b"half")
    (tmp_path / "mine").mkdir()
    (tmp_path / "notes.txt").write_text("kept")
    storage.prune()
    kept = ["mine", "notes.txt", "step-00000100", "step-00000200", "step-00000400", "step-00000500"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*kept, "unfinished-78-step-00000450"]


def test_two_processes_write_into_places_of_their_own(tmp_path: Path) -> None:
    """Also where both have the same process id, as in two containers."""
    names = {Directory(tmp_path).begin_parts(100) for _ in range(2)}
    assert len(names) == len(list(tmp_path.iterdir())) == 2


def test_too_few_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With figures: a rollback would find none from before its alert."""
    storage, training = Directory(tmp_path, keep=3), parts()
    for number in range(8):
        age(storage.save(number, training, {}).path, minutes=10 - number / 3)
        storage.prune()
    (told,) = [record.getMessage() for record in caplog.records]
    assert "the 3 kept checkpoints reach back 40 s" in told
    assert "may come 120 s after its start" in told
    assert "keep about 7" in told


def test_those_in_memory_count_among_those_that_reach_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A rollback may go to them, so nothing is said where they reach back far enough, and the whole reach is told."""
    storage, training = Directory(tmp_path, keep=3), parts()
    began = datetime.now(UTC) - timedelta(minutes=13)
    storage.in_memory = lambda: [SavedCheckpoint(0, began, "memory-step-00000000")]
    for number in range(8):
        age(storage.save(number, training, {}).path, minutes=10 - number / 3)
        storage.prune()
    assert caplog.records == []


def test_enough_are_not_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nor is a directory from which nothing was deleted yet."""
    storage, training = Directory(tmp_path, keep=3), parts()
    for number in range(8):
        age(storage.save(number, training, {}).path, minutes=100 - number)
        storage.prune()
    quick = Directory(tmp_path / "quick", keep=3)
    for number in range(3):
        quick.save(number, training, {})
        quick.prune()
    assert caplog.records == []


def test_the_target_of_a_rollback_stays_until_training_is_well_past_its_trouble(tmp_path: Path) -> None:
    """As many as are kept have to lie beyond the step that was left; for ever it would be gone back to very late."""
    storage, training = Directory(tmp_path, keep=3), parts()
    start = storage.save(0, training, {})
    storage.rolled_back_to(start, {**WHY, "step": 0, "left_step": 250})
    for step in (100, 200, 300, 400):
        storage.save(step, training, {})
        storage.prune()
        assert start.path.exists()
    storage.save(500, training, {})
    storage.prune()
    assert sorted(one.step for one in storage.checkpoints()) == [300, 400, 500]


def test_one_that_cannot_be_deleted_keeps_no_other(tmp_path: Path) -> None:
    storage, training = Directory(tmp_path / "run", keep=2), parts()
    for step in (50, 100, 200, 300):
        age(storage.save(step, training, {}).path, minutes=100 - step // 10)
    link = tmp_path / "run/step-00000100"
    link.rename(tmp_path / "moved")
    link.symlink_to(tmp_path / "moved")  # `rmtree` refuses links
    with pytest.raises(OSError, match="symbolic link"):
        storage.prune()
    assert not (tmp_path / "run/step-00000050").exists()


def test_without_a_number_none_is_deleted(tmp_path: Path) -> None:
    """The user deletes them."""
    storage, training = Directory(tmp_path, keep=None), parts()
    for step in range(5):
        storage.save(step, training, {})
    storage.prune()
    assert len(storage.checkpoints()) == 5


def test_after_a_rollback_later_ones_are_put_aside_and_the_target_is_pinned(tmp_path: Path) -> None:
    """Until the next rollback, which pins another; half-written ones are put aside too."""
    storage, training = Directory(tmp_path, keep=None), parts()
    found = {step: storage.save(step, training, {}) for step in (100, 200, 300, 400)}
    without_mark(found[400].path)
    storage.rolled_back_to(found[200], {**WHY, "left_step": 400})
    assert sorted(one.step for one in storage.checkpoints()) == [100, 200]
    assert sorted(path.name for path in tmp_path.glob("abandoned*")) == [
        "abandoned-1-step-00000300",
        "abandoned-1-step-00000400",
    ]
    assert (found[200].path / PINNED).exists()
    storage.save(300, training, {})
    storage.rolled_back_to(found[100], {**WHY, "left_step": 300})
    assert not checkpoints.is_pinned(tmp_path / "abandoned-1-step-00000200")
    assert (tmp_path / "abandoned-2-step-00000300").exists()
    assert [one.step for one in storage.checkpoints()] == [100]


def test_a_rollback_on_a_full_disk_leaves_no_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart would continue from it. Renames need no space; the pin does, and an earlier one stays until then."""
    storage, training = Directory(tmp_path, keep=2), parts()
    found = {step: storage.save(step, training, {}) for step in (100, 200, 300, 400)}
    storage.rolled_back_to(found[400], {**WHY, "left_step": 450})

    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "write_durably", full)
        with pytest.raises(OSError, match="No space left"):
            storage.rolled_back_to(found[200], {**WHY, "left_step": 450})
    assert [one.step for one in storage.checkpoints()] == [100, 200]
    assert checkpoints.is_pinned_by_rollback(tmp_path / "abandoned-1-step-00000400")
    storage.prune()
    assert not list(tmp_path.glob("abandoned*"))


def test_a_pointer_that_cannot_be_written_keeps_none_from_being_put_aside(tmp_path: Path) -> None:
    """As DeepSpeed's, on a full disk."""
    contents: Any = None
    storage, training = Directory(tmp_path, keep=None), parts()
    found = {step: storage.save(step, training, {}) for step in (100, 200)}
    ranks: Any = SimpleNamespace(rank=0, world_size=2, group=lambda purpose: SingleRankGroup())
    joint = JointCheckpointDirectory(tmp_path, None, ranks, contents)

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    joint.on_latest_changed = full
    with pytest.raises(OSError, match="No space left"):
        joint.rolled_back_to(found[100], {**WHY, "left_step": 250})
    assert [one.step for one in joint.checkpoints()] == [100]


def test_one_that_cannot_be_put_aside_keeps_no_other_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, training = Directory(tmp_path, keep=None), parts()
    found = {step: storage.save(step, training, {}) for step in (100, 200, 300, 400)}
    rename = Path.rename

    def refusing(path: Path, target: Path) -> Path:
        if path == found[300].path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refusing)
    with pytest.raises(PermissionError):
        storage.rolled_back_to(found[100], {**WHY, "left_step": 450})
    assert sorted(one.step for one in storage.checkpoints()) == [100, 300]
    assert checkpoints.is_pinned_by_rollback(found[100].path)


def test_what_the_user_has_pinned_makes_way_for_another_of_its_step(tmp_path: Path) -> None:
    """As after a resume from an older one."""
    storage, training = Directory(tmp_path, keep=2), parts()
    checkpoints.pin(storage.save(150, training, {}).path, WHY)
    for step in (150, 160, 170):
        storage.save(step, training, {})
    storage.prune()
    kept = ["abandoned-1-step-00000150", "step-00000160", "step-00000170"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    assert checkpoints.pin_reason(tmp_path / kept[0]) == WHY


def test_what_the_user_has_pinned_stays_pinned_and_is_not_deleted(tmp_path: Path) -> None:
    """Through rollbacks to it, to an earlier one and to a later one."""
    storage, training = Directory(tmp_path, keep=2), parts()
    found = {step: storage.save(step, training, {}) for step in (100, 200, 300)}
    for step in (100, 200):
        checkpoints.pin(found[step].path, WHY)
    for number, target in enumerate((found[300], found[200], found[100])):
        storage.rolled_back_to(target, {**WHY, "left_step": 300 + number})
    assert checkpoints.pin_reason(found[100].path) == WHY
    for step in (400, 500, 600, 700):
        storage.save(step, training, {})
        storage.prune()
    assert found[100].path.exists()
    assert checkpoints.pin_reason(tmp_path / "abandoned-1-step-00000200") == WHY
    assert not (tmp_path / "abandoned-1-step-00000300").exists()


def test_own_functions_save_load_and_list(tmp_path: Path) -> None:
    """What was saved after a checkpoint that was gone back to does not count any more, after a restart neither."""
    written: dict[int, tuple[datetime, Mapping[str, Any]]] = {}

    def storage() -> OwnCheckpoints:
        return OwnCheckpoints(
            save=lambda step, state: written.update({step: (datetime.now(UTC), state)}),
            load=lambda found: written[found.step][1],
            found=lambda: [SavedCheckpoint(step, at, f"mine-{step}") for step, (at, _) in written.items()],
            directory=tmp_path,
        )

    mine = storage()
    for step in (100, 200):
        mine.save(step, parts(), {"step": step})
    first = min(mine.checkpoints(), key=lambda one: one.step)
    assert mine.load(first, parts()) == {"step": 100}
    mine.rolled_back_to(first, WHY)
    assert [one.step for one in mine.checkpoints()] == [100]
    assert [one.step for one in storage().checkpoints()] == [100]
    storage().save(200, parts(), {})
    assert sorted(one.step for one in storage().checkpoints()) == [100, 200]
    (tmp_path / ".trainmedic-abandoned.json").write_text("[[")
    assert len(storage().checkpoints()) == 2


def test_own_times_without_a_time_zone_are_refused() -> None:
    # They may be local or in UTC, and are compared with alerts' times.
    found = SavedCheckpoint(100, datetime(2026, 1, 31, 12), "mine-100")
    own = OwnCheckpoints(lambda step, state: None, lambda one: None, lambda: [found])
    with pytest.raises(ConfigurationError, match=r"mine-100 the time .* with a time zone"):
        own.checkpoints()


def test_a_span_that_a_full_disk_refused_is_written_at_a_later_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollback reports it, and pins its checkpoint if that still fits."""
    found: list[SavedCheckpoint] = []

    def save(step: int, state: Any) -> None:
        path = tmp_path / f"mine-{step}"
        path.mkdir()
        found.append(SavedCheckpoint(step, datetime.now(UTC), path))

    def storage() -> OwnCheckpoints:
        return OwnCheckpoints(save, lambda one: None, lambda: found, tmp_path)

    def full(path: Path, content: bytes) -> None:
        if path.name == ".trainmedic-abandoned.json":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, content)

    write, mine = checkpoints.write_durably, storage()
    for step in (100, 200):
        mine.save(step, parts(), {})
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "write_durably", full)
        with pytest.raises(OSError, match="No space left"):
            mine.rolled_back_to(found[0], {**WHY, "left_step": 200})
        mine.save(150, parts(), {})
    assert checkpoints.is_pinned_by_rollback(found[0].path)
    assert [one.step for one in mine.checkpoints()] == [100, 150]
    assert [one.step for one in storage().checkpoints()] == [100, 200, 150], "not recorded yet"
    mine.save(160, parts(), {})
    assert [one.step for one in storage().checkpoints()] == [100, 150, 160]


def test_own_functions_that_fail_make_a_checkpoint_unusable() -> None:
    """So that an older one is tried."""

    def load(found: SavedCheckpoint) -> None:
        raise KeyError("model")

    mine = OwnCheckpoints(lambda step, state: None, load, list)
    with pytest.raises(UnusableCheckpoint, match="mine-1 could not be loaded: KeyError: 'model'"):
        mine.load(SavedCheckpoint(1, datetime.now(UTC), "mine-1"), parts())


def test_what_keeps_no_state_is_an_error_at_once() -> None:
    """And several of a kind have names of their own."""
    with pytest.raises(ConfigurationError, match="scheduler: a function has no state_dict"):
        StateParts(model=nn.Linear(1, 1), scheduler=age)
    several = StateParts(model={"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}, optimizer=[Held(), Held()], scaler=None)
    assert list(several.by_name) == ["model.a", "model.b", "optimizer.0", "optimizer.1"]


def test_nobody_else_may_read_what_was_not_meant_for_them(tmp_path: Path) -> None:
    """Files get the user's usual mode, no wider one."""
    previous = os.umask(0o077)
    try:
        found = Directory(tmp_path).save(1, parts(), {})
    finally:
        os.umask(previous)
    assert {path.stat().st_mode & 0o077 for path in (found.path, *found.path.iterdir())} == {0}
