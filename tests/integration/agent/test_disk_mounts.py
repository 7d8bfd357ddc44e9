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
import json, os, subprocess, sys
from pathlib import Path
from tests.unit.agent.disk.trees import clean, cleaner, names, put
base = Path(sys.argv[1])
def mount(*args):
    subprocess.run(["mount", *map(str, args)], check=True)
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


def test_mounts_below_a_root_are_left(tmp_path: Path) -> None:
    """That holds for another filesystem, and for a directory and a file that are bind mounts of the same one."""
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


def test_a_full_filesystem_is_cleaned_until_the_target_and_no_further(tmp_path: Path) -> None:
    """The filesystem is real and small, and so is its statvfs; the trial run foretells the very files."""
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


def test_a_read_only_filesystem_is_told_as_that(tmp_path: Path) -> None:
    """A trial run says so too."""
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
