"""Where the logs of an attempt go: its number, its directories, and what its processes are told of them.

The paths themselves are those of ``trainmedic.wire.log_layout``. Who calls it: ``supervisor``.
"""

from __future__ import annotations

import re
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Mapping

from trainmedic.job.ending import ERROR_FILE
from trainmedic.settings import LOG_DIR
from trainmedic.wire.log_layout import AttemptLogs, attempt_number

_OWNERS_DIRECTORY = 0o700
_SAME_LAUNCH = 600.0
"""Seconds. An attempt in whose directory something has changed since then can be one that another node has begun."""
_BUFFER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_DUMP_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""The names of one setting in the versions of PyTorch, newest first. The first of each is known from 2.8 on, where each
rank warns of the second."""
_NEW_NAMES_SINCE = (2, 8)
_DUMP_ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"
_ENTRIES = "2000"


def first_number(job: Path, node: str, is_one_of_several: bool) -> int:
    """The number of the first attempt of a launch: that after those which are kept of the job in this directory.

    Of the launchers of several nodes, one that has taken part before counts from its own last attempt. One that has
    not joins the newest, where that goes on or has just been.
    """
    try:
        kept = {number for each in job.iterdir() if (number := attempt_number(each.name)) is not None}
    except OSError:
        return 1
    if not kept:
        return 1
    newest = AttemptLogs(job / f"attempt-{max(kept)}")
    if not is_one_of_several:
        return max(kept) + 1
    own = [number for number in kept if AttemptLogs(job / f"attempt-{number}").launcher(node).exists()]
    if own:
        return max(own) + 1
    try:
        return max(kept) + (time.time() - newest.path.stat().st_mtime > _SAME_LAUNCH)
    except OSError:
        return max(kept)


def make_directories(logs: AttemptLogs) -> None:
    """Make them for the owner alone. Raises OSError."""
    logs.path.mkdir(mode=_OWNERS_DIRECTORY, parents=True, exist_ok=True)
    logs.flight_recorder.mkdir(mode=_OWNERS_DIRECTORY, exist_ok=True)


def variables(
    logs: AttemptLogs | None, log_dir: Path | None, node: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """What the processes of an attempt find in their environment besides what is there already.

    PyTorch records the last collectives of each rank and writes them where one times out. Whatever the user has set of
    that stays, under any of its names. The rest is set under the names that the PyTorch here has.
    """
    if logs is None or log_dir is None:
        return {LOG_DIR: ""}
    added = {LOG_DIR: str(log_dir)}
    dump = str(logs.flight_recorder / "rank-")
    for names, value in ((_BUFFER, _ENTRIES), ((_DUMP_ON_TIMEOUT,), "1"), (_DUMP_FILE, dump)):
        if not any(name in environment for name in names):
            added.update(dict.fromkeys(names[:1] if _knows_new_names() else names, value))
    if ERROR_FILE not in environment:
        added[ERROR_FILE] = str(logs.error(node))
    return added


def _knows_new_names() -> bool:
    """Not where PyTorch cannot be found here, or its version not be read: both names serve every version."""
    try:
        numbers = re.match(r"(\d+)\.(\d+)", version("torch") or "")
    except PackageNotFoundError:
        return False
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= _NEW_NAMES_SINCE
