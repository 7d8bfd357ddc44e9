"""Any tree, any rule: exactly what the rule names goes, oldest first until the target, and a trial run says so."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.unit.agent.disk.trees import DAY, aged, clean, cleaner, filled_by, names, stored_below

BLOCK = 4096
DIRECTORIES = ("a", ".c", "\n")
NAMES = ("a", "b.log", ".c", "d e", "\n", "\udcff", "é", "b", "a.log")
PARTS = ("a", "b*", "*", "**", "?", "[!a]*", ".c", "*.log")


@dataclass(frozen=True)
class Entry:
    """One entry of a tree: its path, its kind, its age in days and its size in blocks."""

    path: tuple[str, ...]
    kind: str
    days: int
    blocks: int


paths = st.tuples(st.lists(st.sampled_from(DIRECTORIES), max_size=3), st.sampled_from(NAMES)).map(
    lambda path: (*path[0], path[1])
)
entries = st.builds(
    Entry,
    path=paths,
    kind=st.sampled_from(["file"] * 15 + ["link", "dirlink", "hardlink", "pipe", "dir"]),
    days=st.integers(0, 20),
    blocks=st.integers(0, 3),
)
globs = st.sampled_from(["**", "**/*", "*", "a/**"]) | st.lists(st.sampled_from(PARTS), min_size=1, max_size=3).map(
    "/".join
)
rule = st.fixed_dictionaries(
    {"globs": st.lists(globs, min_size=1, max_size=2), "min_age": st.integers(1, 6).map("{}d".format)},
    optional={
        "exclude": st.lists(globs, max_size=2),
        "keep_newest": st.integers(0, 2),
        "min_size": st.sampled_from([1, BLOCK, 2 * BLOCK]),
        "max_size": st.sampled_from([2 * BLOCK, 3 * BLOCK]),
        "max_files": st.integers(1, 9),
    },
)


@contextmanager
def tree(members: list[Entry]) -> Iterator[Path]:
    """The tree on disk, in two roots by turns, beside a directory with files that links point to."""
    base = Path(tempfile.mkdtemp(prefix="any-tree-"))
    try:
        (base / "outside" / "a").mkdir(parents=True)
        for name in NAMES:
            (base / "outside" / name / "x" if name == "a" else base / "outside" / name).write_text("precious")
            aged(base / "outside" / name, 100)
        for number, member in enumerate(members):
            make(base, base / f"root{number % 2}", member, number)
        for name in ("root0", "root1"):
            (base / name).mkdir(exist_ok=True)
        yield base
    finally:
        shutil.rmtree(base)


def make(base: Path, root: Path, member: Entry, number: int) -> None:
    path = root.joinpath(*member.path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path):
            return
    except OSError:  # a file is where a directory would be
        return
    if member.kind == "file":
        path.write_bytes(b"x" * (member.blocks * BLOCK))
    elif member.kind == "dir":
        path.mkdir()
    elif member.kind == "pipe":
        os.mkfifo(path)
    elif member.kind == "hardlink":
        os.link(base / "outside" / "b", path)
        return
    else:
        path.symlink_to(base / "outside" / ("a" if member.kind == "dirlink" else "b.log"))
    # No two of one age, so that the order is known.
    aged(path, member.days + 0.5 + number / 1000)


def expression(glob: str) -> re.Pattern[str]:
    """The pattern as one regular expression over whole paths, written independently of the code."""
    parts = glob.split("/")
    text = ""
    for at, part in enumerate(parts):
        if part == "**":
            text += "(?:.+)" if at == len(parts) - 1 else "(?:[^/]+/)*"
            continue
        text += "".join({"*": "[^/]*", "?": "[^/]"}.get(char, re.escape(char)) for char in part.replace("[!a]", "\x01"))
        text += "" if at == len(parts) - 1 else "/"
    return re.compile(text.replace(re.escape("\x01"), "[^a/]").replace("\x01", "[^a/]"), re.DOTALL)


def meant(base: Path, raw: dict[str, Any], began: float) -> list[tuple[float, str]]:
    """The time and path of each file that the rule means, oldest first, derived from its documentation."""
    found: list[tuple[float, str]] = []
    patterns, excluded = ([expression(glob) for glob in raw.get(key, [])] for key in ("globs", "exclude"))
    for root in ("root0", "root1"):
        matched: dict[str, list[tuple[float, str, os.stat_result]]] = {}
        for name in names(base / root):
            above = ["/".join(name.split("/")[: depth + 1]) for depth in range(name.count("/") + 1)]
            if any(one.fullmatch(part) for one in excluded for part in above):
                continue
            facts = os.lstat(base / root / name)
            if stat.S_ISREG(facts.st_mode) and any(one.fullmatch(name) for one in patterns):
                matched.setdefault(str(Path(name).parent), []).append((facts.st_mtime, f"{root}/{name}", facts))
        for siblings in matched.values():
            siblings.sort(reverse=True)
            for modified, path, facts in siblings[raw.get("keep_newest", 0) :]:
                stored = facts.st_blocks * 512
                old = began - modified >= int(raw["min_age"][:-1]) * DAY
                if old and facts.st_nlink == 1 and raw.get("min_size", 0) <= stored <= raw.get("max_size", 1 << 60):
                    found.append((modified, path))
    return sorted(found)


@settings(deadline=None, max_examples=examples(100))
@given(
    members=st.lists(entries, min_size=5, max_size=40),
    raw=rule,
    target=st.none() | st.integers(20, 99),
    batch=st.sampled_from([1, 2, 3, 1000]),
)
@example(members=[Entry(("a",), "dirlink", 20, 0)], raw={"globs": ["**"], "min_age": "1d"}, target=None, batch=1)
def test_only_the_files_that_a_rule_names_are_deleted(
    members: list[Entry], raw: dict[str, Any], target: int | None, batch: int
) -> None:
    """The oldest go first, and no more than the target needs; a dry run predicts the result."""
    with tree(members) as base:
        total = max(1, stored_below(base) * 5 // 4)
        before, due = names(base), meant(base, raw, time.time())
        expected: list[str] = []
        left = stored_below(base)
        for _, path in due[: raw.get("max_files")]:
            if target is not None and 100 * (total - left) / total >= target:
                break
            expected.append(path)
            left -= os.lstat(base / path).st_blocks * 512
        by = cleaner({"any": {**raw, "roots": [base / "root0", base / "root1"]}}, measure=filled_by(base, total))
        by = type(by)(by.cleaning, by.clocks, by.measure, batch_size=batch)
        trial = clean(by, until=target, dry_run=True)
        assert names(base) == before
        run = clean(by, until=target)
        event(f"{min(len(expected), 3)} deleted, {run['stopped']}")
        assert before - names(base) == set(expected)
        assert {**run, "dry_run": True} == trial
        assert (run["files"], run["bytes"]) == (len(expected), stored_gone(run))


def stored_gone(run: Any) -> int:
    """The bytes by which the free space has grown."""
    [filesystem] = run["filesystems"]
    gone: int = filesystem["free_bytes_after"] - filesystem["free_bytes_before"]
    return gone
