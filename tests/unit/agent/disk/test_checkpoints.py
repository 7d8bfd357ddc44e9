"""Cleaning checkpoints: deleted whole or left, and never the ones that a run may need."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agent.disk.trees import aged, checkpoint, clean, cleaner, filled_by, left, put
from trainmedic_agent.disk import checkpoint_removal, checkpoints
from trainmedic_agent.disk.checkpoint_names import step_of
from trainmedic_agent.disk.cleaner import Cleaner
from trainmedic_agent.disk.filesystems import MeasureSpace
from trainmedic_agent.disk.metadata_reader import MetadataReader
from trainmedic_agent.disk.walk import DELETING


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "runs" / "one").mkdir(parents=True)
    return tmp_path / "runs" / "one"


def by(run: Path, measure: MeasureSpace | None = None, **rule: Any) -> Cleaner:
    given = {"roots": [run.parent], "globs": "*/*", "kind": "checkpoints", **rule}
    return cleaner({"old": given}, measure=measure)


def present(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir() if path.is_dir())


def test_the_newest_two_complete_checkpoints_of_each_directory_stay(run: Path) -> None:
    """They stay whatever their age, and even if other runs have newer ones; incomplete ones do not count."""
    other = run.parent / "two"
    for number in range(1, 6):
        checkpoint(run / f"step-{number}", days=100 - number)
        checkpoint(other / f"step-{number}", days=50 - number)
    checkpoint(run / "tmp-step-9", days=20, mark=None)
    output = clean(by(run))
    assert (present(run), present(other)) == (["step-4", "step-5"], ["step-4", "step-5"])
    assert (output["rules"]["old"]["checkpoints"], output["files"]) == (7, 20)
    assert left(output, "old") == {"among_newest": 4}


def test_the_rule_can_keep_more_checkpoints_but_never_fewer(run: Path) -> None:
    """keep_newest: 3 keeps three, keep_newest: 1 keeps two."""
    for number in range(1, 6):
        checkpoint(run / f"step-{number}", days=100 - number)
    clean(by(run, keep_newest=3))
    assert present(run) == ["step-3", "step-4", "step-5"]
    clean(by(run, keep_newest=1))
    assert present(run) == ["step-4", "step-5"]


def test_as_many_checkpoints_of_unknown_format_are_kept_in_addition(run: Path) -> None:
    """They may be complete, so they do not count against those known to be complete."""
    for number in (1, 2, 3):
        checkpoint(run / f"step-{number}", days=100 - number, mark=None)
        checkpoint(run / f"step-{number}0", days=90 - number)
    clean(by(run))
    assert present(run) == ["step-2", "step-20", "step-3", "step-30"]


def test_after_a_rollback_the_newest_by_time_and_by_step_are_kept(run: Path) -> None:
    """The run went back to 20 and wrote 30 again, so it is unknown which line is needed."""
    for step, days in ((10, 60), (20, 50), (40, 40), (50, 39), (25, 30), (30, 20)):
        checkpoint(run / f"step-{step}", days=days)
    clean(by(run))
    assert present(run) == ["step-25", "step-30", "step-40", "step-50"]


def test_a_rollback_target_stays(run: Path) -> None:
    """The checkpoint stays for as long as it carries the marker."""
    for number in range(1, 5):
        checkpoint(run / f"step-{number}", days=100 - number)
    put(run / "step-1" / ".trainmedic-pinned")
    aged(run / "step-1", 99)
    assert left(clean(by(run)), "old") == {"pinned": 1, "among_newest": 2}
    (run / "step-1" / ".trainmedic-pinned").unlink()
    aged(run / "step-1", 99)
    clean(by(run))
    assert present(run) == ["step-3", "step-4"]


def test_a_checkpoint_in_use_or_being_written_stays_whole(run: Path) -> None:
    """One open or young file anywhere in it keeps all of it."""
    for number in range(1, 7):
        checkpoint(run / f"step-{number}", days=100 - number)
    aged(run / "step-3" / "ranks" / "0" / "optimizer.pt", 95.5)
    with (run / "step-1" / "ranks" / "0" / "optimizer.pt").open("rb"):
        output = clean(by(run, min_age="96d"))
    assert left(output, "old") == {"among_newest": 2, "open": 1, "young": 1}
    assert present(run) == ["step-1", "step-3", "step-5", "step-6"]
    assert len(list((run / "step-1").rglob("*"))) == 5


def test_a_directory_that_is_no_checkpoint_stays_and_is_searched(run: Path) -> None:
    """A pattern that matches a run's directory does not delete the run."""
    put(run / "logs" / "a")
    for number in range(1, 4):
        checkpoint(run / "inner" / f"step-{number}", days=100 - number)
    output = clean(by(run, globs="**"))
    assert present(run) == ["inner", "logs"]
    assert present(run / "inner") == ["step-2", "step-3"]
    assert left(output, "old") == {"not_a_checkpoint": 3, "among_newest": 2}


def test_a_pipe_in_place_of_a_checkpoint_file_is_not_opened(tmp_path: Path) -> None:
    """Opening would be visible to the job, or trigger a device. The pipe counts as a file without content."""
    directory = tmp_path / "checkpoint-100"
    directory.mkdir()
    os.mkfifo(tmp_path / "latest")
    pipe = os.open(tmp_path / "latest", os.O_RDWR | os.O_NONBLOCK)
    parent, fd = os.open(tmp_path, os.O_RDONLY), os.open(directory, os.O_RDONLY)
    try:
        os.write(pipe, b"100")
        with closing(MetadataReader()) as metadata:
            traits = checkpoints.traits_of(parent, fd, "checkpoint-100", 1, metadata)
        assert (traits.completeness, traits.best) == (checkpoints.Completeness.UNKNOWN, None)
        assert os.read(pipe, 10) == b"100", "nothing was taken out of the pipe"
    finally:
        for each in (pipe, parent, fd):
            os.close(each)


def test_nothing_is_deleted_where_the_metadata_parser_gives_no_answer(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best checkpoint is unknown then. Other directories are cleaned as before."""
    for step in (100, 200, 300, 400):
        hugging_face(run, step, best=100)
        checkpoint(run.parent / "two" / f"step-{step}", days=100 - step / 100)
    monkeypatch.setattr("trainmedic_agent.disk.metadata_child.__name__", "trainmedic_server.no_such_program")
    output = clean(by(run))
    assert len(present(run)) == 4
    assert present(run.parent / "two") == ["step-300", "step-400"]
    assert left(output, "old") == {"metadata_unread": 4, "among_newest": 2}


@pytest.mark.parametrize("marker", [".trainmedic-pinned", ".trainmedic-complete"])
def test_a_marker_that_cannot_be_looked_up_does_not_count_as_missing(
    run: Path, monkeypatch: pytest.MonkeyPatch, marker: str
) -> None:
    """A failing file system does not show whether a checkpoint is pinned or owns a file."""
    for number in range(1, 5):
        checkpoint(run / f"step-{number}", days=100 - number)
    put(run / "step-1" / marker, days=99)
    aged(run / "step-1", 99)
    put(run / "best" / marker, days=99)
    put(run / "best" / "model.pt", days=99)
    failing = (run / "step-1").stat().st_ino, (run / "best").stat().st_ino
    look_up = os.stat

    def fails(name: Any, *arguments: Any, dir_fd: int | None = None, **options: Any) -> os.stat_result:
        if name == marker and dir_fd is not None and os.fstat(dir_fd).st_ino in failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return look_up(name, *arguments, dir_fd=dir_fd, **options)

    monkeypatch.setattr(os, "stat", fails)
    assert left(clean(by(run)), "old") == {"metadata_unread": 5}
    files = cleaner({"files": {"roots": [run.parent], "globs": "**"}})
    assert left(clean(files), "files") == {"in_checkpoint": 4, "metadata_unread": 1}
    assert len(present(run)) == 5
    monkeypatch.undo()
    assert clean(by(run))["files"] > 0


def test_the_agent_parses_no_metadata(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """User-written metadata is parsed by a process that has dropped its rights and cannot open files."""
    parsed: list[bytes] = []
    monkeypatch.setattr("trainmedic_agent.disk.metadata_child.latest_step", parsed.append)
    monkeypatch.setattr("trainmedic_agent.disk.metadata_child.best_name", parsed.append)
    for step in (100, 200, 300, 400):
        hugging_face(run, step, best=100)
    clean(by(run))
    assert (present(run), parsed) == (["checkpoint-100", "checkpoint-300", "checkpoint-400"], [])


def test_the_metadata_parser_has_no_rights() -> None:
    """It can open no file and has no capability, whichever user starts it."""
    program = (
        "import builtins, sys\n"
        "from trainmedic_agent.disk import metadata_child\n"
        "status = open('/proc/self/status')\n"
        "def parsed(raw):\n"
        "    try:\n"
        "        open('/etc/hostname')\n"
        "    except OSError as error:\n"
        "        status.seek(0)\n"
        "        rights = [line.split()[1] for line in status if line.startswith(('CapEff', 'CapPrm', 'NoNewPrivs'))]\n"
        "        print(type(error).__name__, *(int(right, 16) for right in rights), file=sys.stderr)\n"
        "metadata_child.latest_step = parsed\n"
        "metadata_child.main()\n"
    )
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, input=b"latest 3\n100", capture_output=True, check=True
    )
    assert done.stderr.split() == [b"OSError", b"0", b"0", b"1"]


def test_the_oldest_go_first_until_enough_is_free(run: Path) -> None:
    """Each checkpoint is deleted whole, and the target is checked in between."""
    for number in range(1, 7):
        checkpoint(run / f"step-{number}", days=100 - number, size=4096)
    output = clean(by(run, measure=filled_by(run, 100 * 4096)), until=87)
    assert present(run) == ["step-3", "step-4", "step-5", "step-6"]
    assert (output["free_percent_before"], output["free_percent_after"]) == (82.0, 88.0)


@pytest.mark.parametrize("target", [None, 87])
def test_a_dry_run_predicts_the_deletion(run: Path, target: float | None) -> None:
    """The dry run gives the same counts and reasons, and touches nothing."""
    for number in range(1, 7):
        checkpoint(run / f"step-{number}", days=100 - number, size=4096)
    put(run / "step-2" / ".trainmedic-pinned")
    before = sorted(run.rglob("*"))
    measure = filled_by(run, 100 * 4096)
    trial = clean(by(run, measure), until=target, dry_run=True)
    assert sorted(run.rglob("*")) == before
    assert {**clean(by(run, measure), until=target), "dry_run": True} == trial


def test_a_limit_on_files_keeps_a_checkpoint_whole(run: Path) -> None:
    """The checkpoint is left rather than deleted in part."""
    for number in range(1, 5):
        checkpoint(run / f"step-{number}", days=100 - number)
    output = clean(by(run, max_files=4))
    assert present(run) == ["step-2", "step-3", "step-4"]
    assert left(output, "old") == {"among_newest": 2, "limit_files": 1}


def test_an_interrupted_deletion_never_leaves_half_a_checkpoint(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest has a name that no job reads, and the next cleaning deletes it despite its age."""
    for number in range(1, 4):
        checkpoint(run / f"step-{number}", days=100 - number)
    rmdir, calls = os.rmdir, iter(range(100))

    def killed(*args: Any, **options: Any) -> None:
        if next(calls) == 1:
            raise KeyboardInterrupt
        rmdir(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", killed)
        with pytest.raises(KeyboardInterrupt):
            clean(by(run))
    assert present(run) == [f"{DELETING}step-1", "step-2", "step-3"]
    clean(by(run))
    assert present(run) == ["step-2", "step-3"]


def test_a_checkpoint_pinned_at_the_last_moment_gets_its_name_back(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second check, after the rename, finds the marker."""
    for number in range(1, 4):
        checkpoint(run / f"step-{number}", days=100 - number)
    rename = os.rename

    def pinned_meanwhile(source: str, target: str, **descriptors: Any) -> None:
        if target.startswith(DELETING):
            put(run / "step-1" / ".trainmedic-pinned")
            aged(run / "step-1", 99)
        rename(source, target, **descriptors)

    monkeypatch.setattr(os, "rename", pinned_meanwhile)
    assert left(clean(by(run)), "old") == {"among_newest": 2, "pinned": 1}
    assert present(run) == ["step-1", "step-2", "step-3"]


def test_a_checkpoint_that_loses_a_file_during_deletion_gets_its_name_back(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 4):
        checkpoint(run / f"step-{number}", days=100 - number)
    open_for_reading = checkpoint_removal.open_for_reading

    def vanished_meanwhile(parent: int, name: str) -> int | None:
        if (run / f"{DELETING}step-1").exists():
            os.unlink(name, dir_fd=parent)
        return open_for_reading(parent, name)

    monkeypatch.setattr(checkpoint_removal, "open_for_reading", vanished_meanwhile)
    assert left(clean(by(run)), "old") == {"among_newest": 2, "vanished_meanwhile": 1}
    assert present(run) == ["step-1", "step-2", "step-3"]


def hugging_face(run: Path, step: int, best: int) -> None:
    path = checkpoint(run / f"checkpoint-{step}", days=100 - step / 100, mark=None)
    state = {"best_metric": 1.0, "best_model_checkpoint": f"./out/checkpoint-{best}", "log_history": [{}] * 2000}
    (path / "trainer_state.json").write_text(json.dumps(state, indent=2, sort_keys=True))
    for one in (path / "trainer_state.json", path):
        aged(one, 100 - step / 100)


def test_the_frameworks_formats_are_recognised(run: Path) -> None:
    """The formats are Hugging Face with its best one, torch.distributed.checkpoint, DeepSpeed and Megatron."""
    for step in (100, 200, 300, 400):
        hugging_face(run, step, best=200)
    distributed, deepspeed, megatron = (run.parent / name for name in ("distributed", "deepspeed", "megatron"))
    for step in (1, 2, 3, 4):
        checkpoint(distributed / f"{step}", days=100 - step, mark=".metadata" if step < 4 else None)
        checkpoint(deepspeed / f"global_step{step}", days=100 - step, mark=None)
        checkpoint(megatron / f"iter_000000{step}", days=100 - step, mark=None)
    (deepspeed / "latest").write_text("global_step3")
    (megatron / "latest_checkpointed_iteration.txt").write_text("4\n")
    (run / "trainer_state.json").write_text("{}")
    output = clean(by(run))
    assert present(run) == ["checkpoint-200", "checkpoint-300", "checkpoint-400"]
    assert present(distributed) == ["2", "3", "4"]
    assert present(deepspeed) == ["global_step2", "global_step3", "global_step4"]
    assert present(megatron) == ["iter_0000003", "iter_0000004"]
    assert left(output, "old") == {"among_newest": 9, "best_checkpoint": 1, "not_a_checkpoint": 1}


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-100", 100),
        ("global_step7", 7),
        ("iter_0000012", 12),
        ("epoch=3-step=500.ckpt", 500),
        ("last", None),
    ],
)
def test_the_step_is_read_from_the_name(name: str, step: int | None) -> None:
    """If a name has several numbers, the step is the one after "step"."""
    assert step_of(name) == step


def test_all_checkpoints_are_kept_if_there_are_too_many_to_compare(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest are known only when all have been seen."""
    monkeypatch.setattr("trainmedic_agent.disk.search.MAX_CHECKPOINTS", 3)
    for number in range(1, 5):
        checkpoint(run / f"step-{number}", days=100 - number)
    assert left(clean(by(run)), "old")["too_many_checkpoints"] == 4
    assert len(present(run)) == 4


def test_a_search_that_ends_early_deletes_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a search cannot know which are the newest."""
    for number in range(1, 5):
        checkpoint(run / f"step-{number}", days=100 - number)
    monkeypatch.setattr("trainmedic_agent.disk.walk._ENTRIES_PER_CHECK", 1)
    asked = iter(range(1000))
    output: Mapping[str, Any] = clean(by(run), stopping=lambda: next(asked) >= 6)
    assert (output["stopped"], output["files"], len(present(run))) == ("agent_stopping", 0, 4)
