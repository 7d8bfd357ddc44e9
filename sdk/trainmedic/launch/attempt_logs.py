"""Number, log directories and environment variables of an attempt."""

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
# Seconds. An attempt's directory that changed within them may be of this launch, begun by another node.
_SAME_LAUNCH = 600.0
# PyTorch's names of one setting, newest first.
_BUFFER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_DUMP_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_NEW_NAMES_SINCE = (2, 8)
_DUMP_ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"
_ENTRIES = "2000"  # collectives that a flight recorder keeps


def first_number(job: Path, node: str, is_one_of_several: bool) -> int:
    """Return the number of a launch's first attempt.

    Each of several nodes' launchers continues its own numbers. A node without any joins the newest attempt if it is
    recent.
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
        is_recent = time.time() - newest.path.stat().st_mtime <= _SAME_LAUNCH
    except OSError:
        is_recent = True
    return max(kept) if is_recent else max(kept) + 1


def make_directories(logs: AttemptLogs) -> None:
    logs.path.mkdir(mode=_OWNERS_DIRECTORY, parents=True, exist_ok=True)
    logs.flight_recorder.mkdir(mode=_OWNERS_DIRECTORY, exist_ok=True)


def variables(
    logs: AttemptLogs | None, log_dir: Path | None, node: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return variables to add for an attempt.

    PyTorch's flight recorder dumps on timeouts, unless the user has set its options.
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
    try:
        numbers = re.match(r"(\d+)\.(\d+)", version("torch") or "")
    except PackageNotFoundError:
        return False
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= _NEW_NAMES_SINCE
