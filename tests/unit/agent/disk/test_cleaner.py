"""Cleaning files by a rule: what goes, what stays and why, and what the output says of it."""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import stat
import tempfile
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.unit.agent.disk.trees import DAY, NEVER, aged, checkpoint, clean, cleaner, filled_by, left, names, put
from trainmedic_agent.disk.filesystems import DiskSpace, Filesystems, Root
from trainmedic_agent.disk.throttle import Clocks, Throttle


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def test_files_named_by_a_rule_are_deleted_and_the_rest_stays(root: Path) -> None:
    """Matched files that are old enough are deleted at any depth; excluded or young ones are left and counted."""
    for name in ("a.tmp", "b/c.tmp", "b/c/d/e.tmp"):
        put(root / name, size=5000)
    for name in ("a.txt", "keep/a.tmp", "b/kept.tmp"):
        put(root / name)
    put(root / "b/new.tmp", days=1)
    output = clean(cleaner({"tmp": {"roots": [root], "globs": "**/*.tmp", "exclude": ["keep", "**/kept*"]}}))
    assert names(root) == {"a.txt", "keep/a.tmp", "b/kept.tmp", "b/new.tmp"}
    assert (output["files"], output["bytes"], output["stopped"]) == (3, 3 * 8192, None)
    assert output["rules"]["tmp"]["left"] == {"young": {"count": 1, "examples": [f"{root}/b/new.tmp"]}}


def test_the_oldest_go_first_until_enough_is_free(root: Path) -> None:
    """The order holds over all roots of the rule together; the remaining files are counted."""
    other = root.parent / "other"
    for day in range(10, 20):
        put((root if day % 2 else other) / f"{day}", days=day, size=4096)
    by = cleaner({"tmp": {"roots": [root, other]}}, measure=filled_by(root.parent, 100 * 4096))
    output = clean(by, until=94)
    assert names(root.parent) == {"scratch/11", "scratch/13", "scratch/15", "other/10", "other/12", "other/14"}
    assert output["stopped"] == "free_enough"
    assert output["reached"] is True
    assert (output["free_percent_before"], output["free_percent_after"]) == (90.0, 94.0)
    assert left(output, "tmp") == {"free_enough": 6}


def test_nothing_is_touched_if_enough_space_is_free_already(root: Path) -> None:
    """The rule does nothing if the command's target is reached or its own condition does not hold."""
    put(root / "a", size=4096)
    by = cleaner({"low": {"roots": [root], "when_free_below": 50}}, measure=filled_by(root, 100 * 4096))
    assert clean(by)["rules"]["low"]["free_enough_roots"] == [str(root)]
    output = clean(cleaner({"any": {"roots": [root]}}, measure=filled_by(root, 100 * 4096)), until=99)
    assert (output["files"], output["stopped"], names(root)) == (0, "free_enough", {"a"})


def test_the_newest_files_of_each_directory_stay(root: Path) -> None:
    """They stay whatever their age; the patterns define which files are counted."""
    for directory in ("x", "y"):
        for day in (10, 20, 30, 40):
            put(root / directory / f"core.{day}", days=day)
        put(root / directory / "other", days=1)
    output = clean(cleaner({"cores": {"roots": [root], "globs": "*/core.*", "keep_newest": 2}}))
    assert names(root) == {f"{d}/{name}" for d in "xy" for name in ("core.10", "core.20", "other")}
    assert left(output, "cores") == {"among_newest": 4}


def test_age_counts_from_the_last_use_by_default(root: Path) -> None:
    """By default, a file is young if it was just put there with an old date, or just read."""
    put(root / "unpacked")
    assert left(clean(cleaner({"tmp": {"roots": [root], "age_by": "used"}})), "tmp") == {"young": 1}
    assert left(clean(cleaner({"tmp": {"roots": [root], "age_by": "changed"}})), "tmp") == {"young": 1}
    later = Clocks(now=lambda: time.time() + 8 * DAY, sleep=lambda _: None)
    os.utime(root / "unpacked", (time.time() + 5 * DAY, time.time()))
    assert left(clean(cleaner({"tmp": {"roots": [root], "age_by": "used"}}, clocks=later)), "tmp") == {"young": 1}
    assert clean(cleaner({"tmp": {"roots": [root], "age_by": "changed"}}, clocks=later))["files"] == 1


def test_a_file_open_in_a_process_stays(root: Path) -> None:
    """It may be open for reading or writing, or only mapped; once closed, it is deleted."""
    for name in ("read", "written", "mapped", "free"):
        put(root / name, size=5000)
    by = cleaner({"tmp": {"roots": [root]}})
    with (root / "mapped").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    with (root / "read").open("rb"), (root / "written").open("ab"), mapped:
        assert left(clean(by), "tmp") == {"open": 3}
        assert names(root) == {"read", "written", "mapped"}
    assert clean(by)["files"] == 3


def test_another_processes_lease_is_respected(root: Path) -> None:
    """A file with another process's lease is in use, and the cleaner does not wait for it."""
    path = put(root / "leased")
    with path.open("rb") as file:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        assert left(clean(cleaner({"tmp": {"roots": [root]}})), "tmp") == {"open": 1}


def test_only_plain_files_with_one_name_are_deleted(root: Path) -> None:
    """Links of both kinds, pipes and sockets stay, because deleting them frees nothing or is not intended."""
    put(root.parent / "outside" / "precious")
    put(root / "one")
    os.link(root / "one", root / "two")
    (root / "directory-link").symlink_to(root.parent / "outside")
    (root / "file-link").symlink_to(root.parent / "outside/precious")
    os.mkfifo(root / "pipe")
    for name in ("directory-link", "file-link", "pipe"):
        aged(root / name, 30)
    before = names(root.parent)
    output = clean(cleaner({"tmp": {"roots": [root]}}))
    assert names(root.parent) == before
    assert left(output, "tmp") == {"hard_link": 2, "not_a_regular_file": 3}


ODD = ["new\nline", "tab\tquote'\"", "-rf", " ", "*", "\udcff\udcfe", "\x1b[31m", "x" * 255, "ä" * 127, "a\\b"]


def test_any_name_can_be_deleted_and_reported(root: Path) -> None:
    """Names may contain line breaks or invalid UTF-8, or be very long; the output escapes them."""
    for name in ODD:
        put(root / name)
        put(root / "young" / name, days=1)
    output = clean(cleaner({"tmp": {"roots": [root]}}))
    assert output["files"] == len(ODD)
    assert {Path(name).parts[0] for name in names(root)} == {"young"}
    for example in output["rules"]["tmp"]["left"]["young"]["examples"]:
        assert example.isprintable()
        assert len(example) <= 200
        example.encode()


def test_a_tree_deeper_than_any_path_is_walked_as_far_as_is_safe(root: Path) -> None:
    """Directories below the deepest level entered are left, with that reason; nothing fails."""
    fd = os.open(root, os.O_RDONLY)
    for level in range(300):
        name = f"level-{level:0200}"
        os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
        if level in (100, 200):
            os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
            os.utime("file", (0, 0), dir_fd=fd)
    os.close(fd)
    output = clean(cleaner({"tmp": {"roots": [root]}}))
    assert (output["files"], left(output, "tmp")) == (1, {"too_deep": 1})


def test_sizes_are_allocated_sizes(root: Path) -> None:
    """The size of a sparse file is the space that it occupies."""
    put(root / "large", size=100_000)
    put(root / "small", size=100)
    with put(root / "sparse").open("r+b") as file:
        file.truncate(10_000_000)
    aged(root / "sparse", 30)
    output = clean(cleaner({"tmp": {"roots": [root], "min_size": "50kB", "max_size": "1MB"}}))
    assert names(root) == {"small", "sparse"}
    assert left(output, "tmp") == {"size": 2}


def test_limits_on_files_and_bytes_apply_across_all_rules(root: Path) -> None:
    """The policy's limits apply to the command, the rule's to the rule; oversized files are skipped."""
    for day in range(10, 16):
        put(root / "a" / f"{day}", days=day, size=4096)
        put(root / "b" / f"{day}", days=day, size=4096)
    put(root / "a" / "huge", days=50, size=40_960)
    rules = {"a": {"roots": [root / "a"], "max_bytes": 12_288}, "b": {"roots": [root / "b"]}}
    output = clean(cleaner(rules, max_files=5))
    assert {name: entry["files"] for name, entry in output["rules"].items()} == {"a": 3, "b": 2}
    assert left(output, "a") == {"limit_bytes": 4}
    assert left(output, "b") == {"limit_files": 4}
    assert output["stopped"] == "limit_files"
    assert (root / "a" / "huge").exists()


@pytest.mark.parametrize("dry_run", [True, False])
def test_the_cleaning_stops_between_files_when_the_agent_stops(root: Path, dry_run: bool) -> None:
    """The output says what it did until then."""
    for day in range(10, 20):
        put(root / f"{day}", days=day)
    asked = iter(range(1000))
    output = clean(cleaner({"tmp": {"roots": [root]}}), dry_run=dry_run, stopping=lambda: next(asked) >= 4)
    assert (output["files"], output["stopped"]) == (4, "agent_stopping")
    assert left(output, "tmp") == {"agent_stopping": 6}
    assert len(names(root)) == (10 if dry_run else 6)


def test_the_cleaning_ends_at_the_deadline(root: Path) -> None:
    """It ends in time even while it is still searching."""
    put(root / "a")
    by = cleaner({"tmp": {"roots": [root]}}, clocks=Clocks(now=lambda: 2 * NEVER, sleep=lambda _: None))
    output = clean(by)
    assert (output["files"], output["stopped"], names(root)) == (0, "out_of_time", {"a"})


def test_more_files_than_fit_in_memory_are_deleted_in_the_same_order(root: Path) -> None:
    """They are deleted in several rounds, and the target ends the cleaning within one."""
    for day in range(10, 40):
        put(root / f"{day % 3}" / f"{day}", days=day, size=4096)
    by = cleaner({"tmp": {"roots": [root]}}, measure=filled_by(root, 100 * 4096))
    small = type(by)(by.cleaning, by.clocks, by.measure, batch_size=4)
    output = clean(small, until=87)
    assert {int(Path(name).name) for name in names(root)} == set(range(10, 23))
    assert (output["files"], left(output, "tmp")) == (17, {"free_enough": 13})


def test_a_filesystem_that_frees_space_late_is_given_time(root: Path) -> None:
    """The deleted files are enough, so no more are deleted before the filesystem shows it."""
    for day in range(10, 20):
        put(root / f"{day}", days=day, size=4096)
    moments = [0]
    shown = filled_by(root, 100 * 4096)

    def late(fd: int) -> DiskSpace:
        return shown(fd) if moments[0] >= 5 else DiskSpace(90 * 4096, 100 * 4096)

    def sleep(seconds: float) -> None:
        moments[0] += 1

    output = clean(cleaner({"tmp": {"roots": [root]}}, measure=late, clocks=Clocks(sleep=sleep)), until=93)
    assert (output["files"], output["reached"]) == (3, True)


@pytest.mark.parametrize(("answers", "deleted"), [(3, 1), (5, 3)])
def test_unreadable_free_space_ends_the_rule_but_not_the_report(root: Path, answers: int, deleted: int) -> None:
    """This happens, for example, on a network file system whose server is gone."""
    for day in range(10, 20):
        put(root / f"{day}", days=day, size=4096)
    asked = iter(range(answers))

    def measure(_: int) -> DiskSpace:
        if next(asked, None) is None:
            raise OSError(errno.EIO, "as the test says")
        return DiskSpace(5_000_000, 100_000_000)

    output = clean(cleaner({"tmp": {"roots": [root]}}, measure=measure), until=10)
    assert (output["files"], len(names(root))) == (deleted, 10 - deleted)
    assert (output["stopped"], left(output, "tmp")) == ("io_error", {"io_error": 10 - deleted})
    assert (output["free_percent_before"], output["free_percent_after"], output["reached"]) == (5, None, None)


@pytest.mark.parametrize(("percent", "reached"), [(20, None), (5, False)])
def test_a_target_missed_on_one_filesystem_is_missed_although_another_is_unknown(
    root: Path, percent: int, reached: bool | None
) -> None:
    """The target counts as reached only if all filesystems can be read."""
    answers = iter((percent, percent, percent))

    def measure(_: int) -> DiskSpace:
        if (free := next(answers, None)) is None:
            raise OSError(errno.EIO, "as the test says")
        return DiskSpace(free, 100)

    throttle = Throttle(Clocks(), math.inf, lambda: False)
    filesystems = Filesystems(measure, 10.0, dry_run=False, throttle=throttle)
    fd = os.open(root, os.O_RDONLY)
    try:
        for device in (1, 2):
            filesystems.add(Root(str(root), fd, device, None))
        assert filesystems.output()["reached"] is reached
    finally:
        filesystems.close()
        os.close(fd)


def test_a_filesystem_that_others_fill_during_cleaning_is_cleaned_further(root: Path) -> None:
    """The measured free space counts in the end, not the amount deleted."""
    for day in range(10, 20):
        put(root / f"{day}", days=day, size=4096)
    output = clean(cleaner({"tmp": {"roots": [root]}}, measure=lambda _: DiskSpace(5, 100)), until=10)
    assert (output["files"], output["reached"], output["stopped"]) == (10, False, None)


def test_untrusted_roots_are_rejected_and_the_others_cleaned(root: Path) -> None:
    """A link, a link on the path, a missing root, a file, or one that others could replace or own is rejected."""
    base = root.parent
    put(root / "a")
    put(base / "real" / "inner" / "b")
    put(base / "open" / "inner" / "c")
    (base / "link").symlink_to(base / "real")
    (base / "open").chmod(0o777)
    put(base / "file")
    roots = [base / name for name in ("link", "link/inner", "missing", "file", "open/inner", "scratch")]
    output = clean(cleaner({"link": {"roots": [roots[0]]}, "rest": {"roots": roots[1:]}}))
    refused = {**output["rules"]["link"]["refused_roots"], **output["rules"]["rest"]["refused_roots"]}
    assert {
        Path(path).relative_to(base).as_posix(): reason.partition(f"{base}/")[2] for path, reason in refused.items()
    } == {
        "link": f"link is a symbolic link; name the real path of {base}/link",
        "link/inner": f"link is a symbolic link; name the real path of {base}/link/inner",
        "missing": "missing: No such file or directory",
        "file": "file: Not a directory",
        "open/inner": "open, a parent directory, is writable for others, who could replace the root",
    }
    assert names(base) == {"link", "file", "real/inner/b", "open/inner/c"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to somebody else")
def test_a_root_of_another_user_requires_that_user_in_the_policy(root: Path) -> None:
    """Its owner could put anything into it; the policy states which users it trusts."""
    put(root / "a")
    os.chown(root, 12345, 12345)
    output = clean(cleaner({"tmp": {"roots": [root]}}))
    assert "belongs to user 12345" in output["rules"]["tmp"]["refused_roots"][str(root)]
    assert clean(cleaner({"tmp": {"roots": [root]}}, owners=[12345]))["files"] == 1


def test_a_checkpoint_is_not_entered_by_a_rule_about_files(root: Path) -> None:
    """It is recognised by its name or content: only a rule about checkpoints touches it."""
    for name in ("run/checkpoint-100/model.pt", "run/last/.trainmedic-complete", "run/last/model.pt", "run/log"):
        put(root / name)
    output = clean(cleaner({"tmp": {"roots": [root]}}))
    assert names(root) == {"run/checkpoint-100/model.pt", "run/last/.trainmedic-complete", "run/last/model.pt"}
    assert left(output, "tmp") == {"in_checkpoint": 2}


def test_two_rules_that_match_the_same_file_count_it_once(root: Path) -> None:
    """This holds also in a dry run, where the file still exists for the second rule."""
    for day in (10, 20, 30):
        put(root / f"{day}", days=day, size=4096)
    by = cleaner({"one": {"roots": [root], "min_age": "15d"}, "two": {"roots": [root]}})
    trial = clean(by, dry_run=True)
    assert {name: entry["files"] for name, entry in trial["rules"].items()} == {"one": 2, "two": 1}
    run = clean(by)
    assert (run["rules"], run["files"], run["bytes"]) == (trial["rules"], trial["files"], trial["bytes"])


def test_a_file_that_may_not_be_deleted_is_also_reported_in_a_dry_run(root: Path) -> None:
    """The directory is not writable; root is blocked only by the immutable attribute."""
    put(root / "closed" / "a")
    put(root / "open" / "b")
    mode = stat.S_IMODE((root / "closed").stat().st_mode)
    (root / "closed").chmod(0o555)
    try:
        by = cleaner({"tmp": {"roots": [root]}})
        trial, run = clean(by, dry_run=True), clean(by)
    finally:
        (root / "closed").chmod(mode)
    assert (trial["files"], left(trial, "tmp")) == (run["files"], left(run, "tmp"))
    assert run["files"] == (2 if os.geteuid() == 0 else 1)


def test_the_agents_own_directory_is_never_touched(tmp_path: Path) -> None:
    """It may be anywhere below a root: its content is left, and files next to it are deleted."""
    put(tmp_path / "root/state/agent.db")
    put(tmp_path / "root/state/deep/old")
    put(tmp_path / "root/other/old")
    by = replace(cleaner({"tmp": {"roots": [tmp_path / "root"]}}), state_dir=tmp_path / "root/state")
    output = clean(by)
    assert output["files"] == 1
    assert left(output, "tmp") == {"agents_own": 1}
    assert (tmp_path / "root/state/agent.db").exists()
    assert (tmp_path / "root/state/deep/old").exists()


def test_a_checkpoint_that_holds_the_agents_directory_stays(tmp_path: Path) -> None:
    """A checkpoint is deleted whole or not at all."""
    for step in (1, 2, 3):
        checkpoint(tmp_path / f"root/checkpoint-{step}", days=40 - step)
    put(tmp_path / "root/checkpoint-1/state/agent.db")
    rule = {"roots": [tmp_path / "root"], "kind": "checkpoints", "globs": "*"}
    by = replace(cleaner({"old": rule}), state_dir=tmp_path / "root/checkpoint-1/state")
    assert clean(by)["files"] == 0
    assert (tmp_path / "root/checkpoint-1/state/agent.db").exists()


@pytest.mark.parametrize("inside", ["", "cache"])
def test_a_root_in_the_agents_own_directory_is_rejected(tmp_path: Path, inside: str) -> None:
    """The message states the remedy."""
    state = tmp_path / "state"
    put(state / "cache/old")
    by = replace(cleaner({"tmp": {"roots": [state / inside]}}), state_dir=state)
    (refusal,) = clean(by)["rules"]["tmp"]["refused_roots"].values()
    assert "is the agent's state directory" in refusal
    assert (state / "cache/old").exists()


def test_a_file_with_a_very_old_timestamp_does_not_block_others() -> None:
    """tmpfs stores the year 1000. The file is the oldest, and the others are still processed."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None) as name:
        root = Path(name)
        for number in (1, 2):
            put(root / str(number))
        os.utime(root / "1", ns=(-31 * 10**18, -31 * 10**18))
        assert clean(cleaner({"old": {"roots": [root], "globs": "*", "age_by": "modified"}}))["files"] == 2
