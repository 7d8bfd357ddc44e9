"""The cleaner under attack by what a user opens, maps, mounts and names: it answers, in time, and guesses nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.attack.cleaner_places import fill, in_process
from tests.attack.effort import random_source, trials
from tests.unit.agent.disk.trees import NEVER, clean, cleaner, left, names, put
from trainmedic_agent.disk.filesystems import inode_of
from trainmedic_agent.disk.open_files import FileUsage
from trainmedic_agent.disk.report import Reason
from trainmedic_agent.disk.throttle import Clocks, Throttle

FEW_DESCRIPTORS = """
import json, resource, sys
from tests.unit.agent.disk.trees import clean, cleaner
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]),) * 2)
rule = {"roots": [sys.argv[1]], "globs": "**"}
print(json.dumps(clean(cleaner({"tmp": rule, "old": {**rule, "kind": "checkpoints"}}))))
"""


@pytest.mark.parametrize("limit", [12, 30, 70])
def test_a_cleaner_without_descriptors_answers_and_deletes_what_it_can(base: Path, outside: Path, limit: int) -> None:
    """The tree is deeper than the available descriptors; what remains has its reason."""
    alive = names(outside)
    fill(base / "root")
    put(base / "root" / "/".join("d" * 60) / "deep")
    with in_process(FEW_DESCRIPTORS, base / "root", limit) as process:
        text, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    output = json.loads(text)
    assert output["files"] or output["rules"]["tmp"]["left"]
    assert names(outside) == alive
    assert {"run/checkpoint-3", "run/checkpoint-4"} <= {name.rpartition("/")[0] for name in names(base / "root")}


def test_strange_entries_do_not_stop_the_cleaner(base: Path) -> None:
    """Odd names, pipes, sockets, devices, link loops, 1000 levels, immutable files: regular files are deleted."""
    random = random_source()
    for trial in range(trials(2, 500)):
        root = base / f"trial-{trial}"
        for _ in range(40):
            name = bytes(random.choice(ODD_BYTES) for _ in range(random.randint(1, 40)))
            put(root / "odd" / f"x{os.fsdecode(name)}")
        deep_directories(root / "deep", 1_000)
        os.mkfifo(root / "pipe")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(root / "s"))
        (root / "loop").symlink_to(root)
        (root / "self").symlink_to("self")
        if os.geteuid() == 0:
            os.mknod(root / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
            put(root / "other's").chmod(0)
            os.chown(root / "other's", 12345, 12345)
        put(root / "sealed" / "kept").chmod(0)
        output = clean(cleaner({"tmp": {"roots": [root]}}))
        assert not any(path.is_file() for path in (root / "odd").iterdir())
        assert left(output, "tmp")["too_deep"] == 1
        assert left(output, "tmp")["not_a_regular_file"] >= 4
        subprocess.run(["rm", "-rf", root], check=True)


ODD_BYTES = bytes(set(range(1, 256)) - {ord("/")})


def deep_directories(top: Path, levels: int) -> None:
    """Directories in each other, which no single path reaches."""
    top.mkdir(parents=True)
    fd = os.open(top, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("a-long-name", dir_fd=fd)
        inner = os.open("a-long-name", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)


OPENS_MUCH = """
import mmap, os, resource, sys
limit = min(int(sys.argv[2]) + 50, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
fd = os.open(sys.argv[1], os.O_RDONLY)
fds = [os.dup(fd) for _ in range(limit - 20)]
odd = os.fsencode(sys.argv[1]) + b"\\r7f00-7f01 r-xp 0 zz:zz zz x\\x0c\\x85"
with open(odd, "wb") as file:
    file.write(b"x" * 5000)
with open(odd, "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print(len(fds), flush=True)
sys.stdin.read()
"""


def test_a_process_with_many_open_files_and_odd_maps_costs_only_time(base: Path) -> None:
    """Its open files stay, the cleaning ends, and if time runs out nothing is guessed."""
    kept, free = put(base / "kept"), put(base / "free")
    count = trials(4_000, 500_000)
    argv = [sys.executable, "-c", OPENS_MUCH, kept, str(count)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        print(f"a process with {process.stdout.readline().strip()} open files")
        clocks = Clocks(sleep=lambda _: None)
        usage = FileUsage(clocks, Throttle(clocks, NEVER, lambda: False))
        began = time.monotonic()
        assert usage.obstacle(None, inode_of(kept.stat())) is Reason.OPEN
        print(f"looked through in {time.monotonic() - began:.1f} s")
        assert usage.obstacle(None, inode_of(free.stat())) in (None, Reason.OPEN_UNKNOWN)
        late = FileUsage(clocks, Throttle(clocks, 0, lambda: False))
        assert late.obstacle(None, inode_of(free.stat())) is Reason.OPEN_UNKNOWN
        process.kill()


HANGS = """
import ctypes, os, subprocess, sys
from pathlib import Path
from tests.unit.agent.disk.trees import NEVER, put
from trainmedic_agent.disk.filesystems import inode_of
from trainmedic_agent.disk.open_files import FileUsage
from trainmedic_agent.disk.throttle import Clocks, Throttle
base = Path(sys.argv[1])
(base / "hanging").mkdir()
device = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mount(b"x", os.fsencode(base / "hanging"), b"fuse", 0, options) == 0, os.strerror(ctypes.get_errno())
named = os.open(base / "hanging", os.O_PATH)
kept = put(base / "kept")
opened = kept.open("rb")
holder = subprocess.Popen(["sleep", "100"], pass_fds=[named, opened.fileno()])
clocks = Clocks(sleep=lambda _: None)
print(FileUsage(clocks, Throttle(clocks, NEVER, lambda: False)).obstacle(None, inode_of(kept.stat())), flush=True)
holder.kill()
"""
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


def may_mount() -> bool:
    trial = [*NAMESPACE, "test", "-w", "/dev/fuse"]
    return (
        shutil.which("unshare") is not None and not subprocess.run(trial, capture_output=True, check=False).returncode
    )


@pytest.mark.skipif(not may_mount(), reason="this machine has no FUSE that users may mount")
def test_a_filesystem_that_never_answers_does_not_block_the_cleaner(base: Path) -> None:
    """A process has a directory open on it; the cleaner asks only for its location, which needs no answer from it."""
    with in_process(HANGS, base, before=NAMESPACE) as process:
        text, error = process.communicate(timeout=60)
    assert text.strip() == "open", error
