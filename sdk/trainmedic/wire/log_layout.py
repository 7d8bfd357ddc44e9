"""Paths of a job's log files on a node.

::

    <log_dir>/<job>/attempts.jsonl                            how each attempt failed, by trainmedic-run
    <log_dir>/<job>/attempt-<n>/
        rank-<r>.jsonl                                        records of a rank, by the SDK
        sources-<node>-<local rank>.json                      owner and other outputs of the rank
        launcher-<node>.log                                   all output of the launcher and its ranks there
        error-<node>.json                                     the first error there, as torchelastic writes it
        ended-<node>.json                                     exit with code 0, by trainmedic-run
        ranks-<node>/…/attempt_<k>/<local rank>/stdout.log    of one rank, by torchrun; stderr.log, error.json
        flight-recorder/rank-<r>                              flight recorder dump of a rank

A full file is kept once more with the suffix ``.1``. Names of jobs and nodes are percent-encoded to one path part each.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import unquote_to_bytes

RECORDS = "records"
LAUNCHER = "launcher"
STDOUT = "stdout"
STDERR = "stderr"
ERROR = "error"
SOURCES = "sources"
ENDED = "ended"
FLIGHT_RECORDER = "flight-recorder"
ROTATED = ".1"

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_LONGEST = 180  # bytes of an encoded name
_ATTEMPT = re.compile(r"attempt-([1-9]\d{0,8})\Z")
_OF_RANK = re.compile(r"rank-(\d{1,9})(?:\.jsonl(?:\.1)?)?\Z")
_OF_NODE = re.compile(r"(launcher|error|ended)-(.+?)\.(?:log(?:\.1)?|json)\Z")
_SOURCES = re.compile(r"sources-(.+)-(\d{1,9})\.json\Z")
_RANKS = re.compile(r"ranks-(.+)\Z")
_LOCAL_RANK = re.compile(r"[0-9]{1,9}\Z")
_STREAMS = {"stdout.log": STDOUT, "stderr.log": STDERR, "error.json": ERROR}


def encoded(name: str) -> str:
    """Return the name of a job or node as one path part.

    Unsafe bytes become ``%`` and two hexadecimal digits. Results over 180 bytes are cut and end with ``%-`` and a hash
    of the name, irreversible for `decoded`.
    """
    raw = name.encode("utf-8", "surrogateescape")
    parts = [chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in raw]
    if parts and parts[0] == ".":
        parts[0] = "%2E"
    whole = "".join(parts)
    if len(whole) <= _LONGEST:
        return whole
    digest = hashlib.sha256(raw).hexdigest()[:32]
    kept, room = "", _LONGEST - len(digest) - 2
    for part in parts:
        if len(kept) + len(part) > room:
            break
        kept += part
    return f"{kept}%-{digest}"


def decoded(part: str) -> str | None:
    # None for a name that `encoded` has cut or never returns. Users can create directories whose names are not UTF-8.
    name = unquote_to_bytes(part.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")
    return name if part and encoded(name) == part else None


@dataclass(frozen=True)
class AttemptLogs:
    path: Path

    @classmethod
    def of(cls, log_dir: Path, job: str, attempt: int) -> AttemptLogs:
        return cls(job_directory(log_dir, job) / f"attempt-{attempt}")

    def records(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.jsonl"

    def sources(self, node: str, local_rank: int) -> Path:
        return self.path / f"sources-{encoded(node)}-{local_rank}.json"

    def launcher(self, node: str) -> Path:
        return self.path / f"launcher-{encoded(node)}.log"

    def error(self, node: str) -> Path:
        return self.path / f"error-{encoded(node)}.json"

    def ended(self, node: str) -> Path:
        return self.path / f"ended-{encoded(node)}.json"

    def ranks(self, node: str) -> Path:
        return self.path / f"ranks-{encoded(node)}"

    @property
    def flight_recorder(self) -> Path:
        return self.path / "flight-recorder"

    def dump(self, rank: int) -> Path:
        """PyTorch gets this path without the number and appends it."""
        return self.flight_recorder / f"rank-{rank}"


def job_directory(log_dir: Path, job: str) -> Path:
    return log_dir / encoded(job)


def attempt_number(name: str) -> int | None:
    match = _ATTEMPT.match(name)
    return int(match[1]) if match is not None else None


@dataclass(frozen=True)
class LogFile:
    kind: str
    """`RECORDS`, `LAUNCHER`, `STDOUT`, `STDERR`, `ERROR`, `SOURCES`, `ENDED` or `FLIGHT_RECORDER`."""
    job: str | None
    """None if its name cannot be `decoded`; `directory` is the name as in the path."""
    directory: str
    attempt: int
    node: str | None = None
    rank: int | None = None
    local_rank: int | None = None
    is_rotated: bool = False


def file_at(path: PurePath) -> LogFile | None:
    """Parse a path relative to ``log_dir``; None unless it is an attempt's."""
    parts = path.parts
    attempt = attempt_number(parts[1]) if len(parts) > 2 else None
    if attempt is None:
        return None
    fields = _fields_of(parts[2:])
    if fields is None:
        return None
    is_rotated = path.name.endswith(ROTATED)
    return LogFile(job=decoded(parts[0]), directory=parts[0], attempt=attempt, is_rotated=is_rotated, **fields)


def _fields_of(parts: tuple[str, ...]) -> dict[str, Any] | None:
    name = parts[-1]
    if len(parts) == 1:
        if (match := _OF_RANK.match(name)) is not None and ".jsonl" in name:
            return {"kind": RECORDS, "rank": int(match[1])}
        if (match := _OF_NODE.match(name)) is not None:
            return {"kind": match[1], "node": decoded(match[2])}
        if (match := _SOURCES.match(name)) is not None:
            return {"kind": SOURCES, "node": decoded(match[1]), "local_rank": int(match[2])}
        return None
    if parts[0] == FLIGHT_RECORDER and len(parts) == 2:
        match = _OF_RANK.match(name)
        return {"kind": FLIGHT_RECORDER, "rank": int(match[1])} if match is not None and "." not in name else None
    match = _RANKS.match(parts[0])
    if match is None or name not in _STREAMS or len(parts) < 3 or _LOCAL_RANK.match(parts[-2]) is None:
        return None
    return {"kind": _STREAMS[name], "node": decoded(match[1]), "local_rank": int(parts[-2])}
