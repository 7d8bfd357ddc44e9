"""The cleaner on mounts of its own: it stays on the root's filesystem and mount, and stops at a real free space.

The tests run in a mount namespace of their own, as root of a user namespace; where the machine allows
neither, they are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import PYTHON_PATH, ROOT

UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]


def _may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    trial = [*UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not _may_mount(), reason="this machine lets nobody mount in a namespace of his own")

SCRIPT = """
import contextlib, json, os, subprocess, sys, threading, time
from pathlib import Path
from tests.unit.agent.disk.trees import DAY, aged, checkpoint, clean, cleaner, names, put
from trainmedic_agent.disk.throttle import Clocks
base = Path(sys.argv[1])
def mount(*args):
    subprocess.run(["mount", *map(str, args)], check=True)
@contextlib.contextmanager
def reading(*paths):
    stop = threading.Event()
    def read():
        while not stop.wait(0.05):
            for path in paths:
                subprocess.run(["cat", path], stdout=subprocess.DEVNULL, check=True)
    reader = threading.Thread(daemon=True, target=read)
    reader.start()
    time.sleep(0.3)
    try:
        yield
    finally:
        stop.set()
        reader.join()
def in_future(seconds):
    "Clocks that are so much ahead, and by which waiting takes a twentieth of the time."
    return Clocks(now=lambda: time.time() + seconds, sleep=lambda rest: time.sleep(rest / 20))
"""


def in_namespace(base: Path, script: str) -> Any:
    """What `script` prints as JSON, run where it may mount; ``base`` is its directory."""
    done = subprocess.run(
        [*UNSHARE, sys.executable, "-c", SCRIPT + script, base],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PYTHON_PATH},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_mounts_below_a_root_are_skipped(tmp_path: Path) -> None:
    """These are other filesystems, and directories and files that are bind mounts of the same one."""
    result = in_namespace(
        tmp_path,
        """
root, elsewhere = base / "root", base / "elsewhere"
for name in ("a", "other/b", "bound/c", "file"):
    put(root / name)
for name in ("c", "f"):
    put(elsewhere / name)
mount("-t", "tmpfs", "none", root / "other")
put(root / "other" / "b")
mount("--bind", elsewhere, root / "bound")
mount("--bind", elsewhere / "f", root / "file")
output = clean(cleaner({"tmp": {"roots": [root]}}))
print(json.dumps([sorted(names(base)), output["files"], output["rules"]["tmp"]["left"]]))
""",
    )
    kept, files, left = result
    assert kept == ["elsewhere/c", "elsewhere/f", "root/bound/c", "root/bound/f", "root/file", "root/other/b"]
    assert files == 1
    assert left["other_filesystem"]["count"] == 2
    assert left["busy"]["count"] == 1


@pytest.mark.parametrize("kind", ["files", "checkpoints"])
def test_files_hidden_by_a_new_mount_during_cleaning_stay(tmp_path: Path, kind: str) -> None:
    """The directory is still open below the mount, but its path no longer leads to it."""
    before, after, left = in_namespace(
        tmp_path,
        f"""
root = base / "root"
for number in range(60):
    put(root / "a" / "checkpoint-1" / "ranks" / f"{{number}}", days=90)
put(root / "a" / "checkpoint-1" / ".trainmedic-complete", days=90)
for directory in ("ranks", "."):
    aged(root / "a" / "checkpoint-1" / directory, 90)
for step in (2, 3):
    checkpoint(root / "a" / f"checkpoint-{{step}}", days=20)
for number in range(60):
    put(root / "a" / "b" / f"{{number}}", days=90)
everything, hidden = len(names(root)), []
def mount_over():
    if not hidden and len(names(root)) <= everything - 20:
        hidden.append(len(names(root)))
        mount("-t", "tmpfs", "none", root / "a")
    return False
rule = {{"roots": [root], "kind": "{kind}", "globs": "a/b/*" if "{kind}" == "files" else "a/*"}}
output = clean(cleaner({{"rule": rule}}), stopping=mount_over)
subprocess.run(["umount", root / "a"], check=True)
print(json.dumps([hidden, len(names(root)), output["rules"]["rule"]["left"]]))
""",
    )
    assert before == [after]
    assert left["moved_meanwhile"]["count"] == 1


def test_a_full_filesystem_is_cleaned_only_until_the_target(tmp_path: Path) -> None:
    """The filesystem is real and small, and so is its statvfs; the trial run predicts the exact files."""
    trial, run, left = in_namespace(
        tmp_path,
        """
root = base / "full"
root.mkdir()
mount("-t", "tmpfs", "-o", "size=4M", "none", root)
for number in range(60):
    put(root / f"{number:02}", days=100 - number, size=65536)
by = cleaner({"tmp": {"roots": [root]}})
trial = clean(by, until=50, dry_run=True)
run = clean(by, until=50)
print(json.dumps([trial, run, sorted(names(root))]))
""",
    )
    assert run["free_percent_before"] == pytest.approx(6.25, abs=1)
    assert run["reached"] is True
    assert run["free_percent_after"] == pytest.approx(50, abs=1.6)
    assert left == [f"{number:02}" for number in range(run["files"], 60)]
    assert {**run, "dry_run": True} == trial


def test_a_read_only_filesystem_is_reported_as_such(tmp_path: Path) -> None:
    """A trial run reports it too."""
    trial, run = in_namespace(
        tmp_path,
        """
put(base / "root" / "a")
mount("--bind", base / "root", base / "root")
mount("-o", "remount,bind,ro", base / "root")
by = cleaner({"tmp": {"roots": [base / "root"]}})
print(json.dumps([clean(by, dry_run=True)["rules"]["tmp"]["left"], clean(by)["rules"]["tmp"]["left"]]))
""",
    )
    assert trial == run
    assert run["read_only"]["count"] == 1


@pytest.mark.parametrize("options", ["relatime", "noatime"])
def test_a_repeatedly_read_file_stays_however_it_is_mounted(tmp_path: Path, options: str) -> None:
    """With relatime only the first read is recorded, with noatime none; unused files go if that is known, also
    beside a process that has ended and for which its parent has not waited."""
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    kept, left, told = in_namespace(
        tmp_path,
        f"""
root = base / "root"
root.mkdir()
mount("-t", "tmpfs", "-o", "{options}", "none", root)
put(root / "used" / "read")
put(root / "used" / "beside")
for name in ("1", "2", "3"):
    put(root / "other" / name)
with reading(root / "used" / "read"):
    rules = {{"tmp": {{"roots": [root], "age_by": "used", "min_age": "1m"}}}}
    output = clean(cleaner(rules, clocks=in_future(120)))
rule = output["rules"]["tmp"]
print(json.dumps([sorted(names(root)), rule["left"], rule["access_times"][str(root)]]))
""",
    )
    ended.wait()
    assert kept == (["used/beside", "used/read"] if options == "noatime" else ["used/read"])
    assert {reason: entries["count"] for reason, entries in left.items()} == (
        {"read_meanwhile": 2} if options == "noatime" else {"young": 1}
    )
    assert told == ("not kept: mounted noatime" if options == "noatime" else "a day behind at most")


def test_files_that_cannot_be_watched_stay(tmp_path: Path) -> None:
    """The kernel's inotify watches are used up, so readers cannot be detected."""
    left = in_namespace(
        tmp_path,
        """
root = base / "root"
root.mkdir()
mount("-t", "tmpfs", "-o", "noatime", "none", root)
put(root / "a" / "unread")
Path("/proc/sys/user/max_inotify_watches").write_text("0")
rule = {"roots": [root], "age_by": "used", "min_age": "1m"}
print(json.dumps(clean(cleaner({"tmp": rule}, clocks=in_future(120)))["rules"]["tmp"]["left"]))
""",
    )
    assert {reason: entries["count"] for reason, entries in left.items()} == {"use_unknown": 1}


def test_a_file_goes_a_day_after_the_last_read_that_relatime_shows(tmp_path: Path) -> None:
    """Only then is it certain that it was not read for as long as the rule requires."""
    counts = in_namespace(
        tmp_path,
        """
root = base / "root"
root.mkdir()
mount("-t", "tmpfs", "-o", "relatime", "none", root)
put(root / "read")
time.sleep(0.1)
(root / "read").read_bytes()
rule = {"roots": [root], "age_by": "used", "min_age": "1h"}
print(json.dumps([clean(cleaner({"tmp": rule}, clocks=in_future(ahead)))["files"]
                  for ahead in (0, 2 * 3600, DAY + 3500, DAY + 3700)]))
""",
    )
    assert counts == [0, 0, 0, 1]


def test_a_checkpoint_being_read_stays_where_reads_leave_no_trace(tmp_path: Path) -> None:
    """It stays whole, though only one file deep in it is read; the one next to it goes."""
    left, kept = in_namespace(
        tmp_path,
        """
root = base / "root"
root.mkdir()
mount("-t", "tmpfs", "-o", "noatime", "none", root)
for step in range(1, 5):
    checkpoint(root / f"step-{step}", days=100 - step)
with reading(root / "step-1" / "ranks" / "0" / "optimizer.pt"):
    rule = {"roots": [root], "globs": "*", "kind": "checkpoints", "age_by": "used", "min_age": "1m"}
    output = clean(cleaner({"old": rule}, clocks=in_future(120)))
print(json.dumps([output["rules"]["old"]["left"], sorted(path.name for path in root.iterdir())]))
""",
    )
    assert {reason: entries["count"] for reason, entries in left.items()} == {"among_newest": 2, "read_meanwhile": 1}
    assert kept == ["step-1", "step-3", "step-4"]
