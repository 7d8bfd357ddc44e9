"""Removal of prefixes of Kubernetes, torchrun, torch, srun, Ray, mpirun, kubectl and docker compose."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any, NamedTuple

from trainmedic_logs.lines import times

_CRI = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)) (stdout|stderr) ([FP])(?: |$)")
DIVIDED = rb"std(?:out|err) P"
"""Byte pattern in lines divided by a container runtime."""
_DOCKER = '{"log":"'
_TAGGED_RANK = re.compile(r"\[rank(\d{1,6})\]:[ ]?")
_TORCHRUN = re.compile(r"\[[A-Za-z_][A-Za-z_-]{0,30}(\d{1,4})\]:[ ]?")
_SRUN = re.compile(r" {0,5}(\d{1,6}): ")
_RAY = re.compile(r"\([A-Za-z_][\w.<>:]{0,80} pid=\d{1,8}(?:, ip=[0-9a-fA-F.:]{3,45})?\) ?")
# Open MPI up to 4, SageMaker and PRRTE
_MPIRUN = re.compile(
    r"\[\d{1,9},(?:mpirank:)?(\d{1,6})(?:,[\w.-]{1,80})?\]<std(?:out|err)>:"
    r"|\[[\w.-]{1,90}@\d{1,9},(\d{1,6})\]<std(?:out|err)>: ?"
)
# Kaggle's seconds and line number, and other tables of numbered or timed lines
_NUMBERED = re.compile(r"(?:\d{1,7}\.\ds\t)?\d{1,13}\t")
_KUBECTL = re.compile(r"\[pod/[a-z0-9.-]{1,253}/[a-z0-9.-]{1,63}\] ")
_COMPOSE = re.compile(r"[A-Za-z0-9][\w.-]{0,127}[_-]\d{1,5} +\| ")
_COMPOSE_WITHIN = 140  # characters: the longest name and number, and what separates them from the line
# Members of log exports that hold a program's line, and those that state where it comes from.
_LINE_MEMBERS = ("textPayload", "log", "message", "msg", "line")
_HAS_LINE = re.compile(rf'"(?:{"|".join(_LINE_MEMBERS)})" ?: ?"')
_PLACE_MEMBERS = ("pod", "pod_name", "container", "container_name", "host", "hostname", "stream", "rank")
_PLACE_OBJECTS = ("kubernetes", "labels", "resource")
_FIRST_CHARACTERS = frozenset("([{ 0123456789")
_SRUN_CHARACTERS = frozenset(" 0123456789")


class Prefixed(NamedTuple):
    text: str
    at: datetime | None = None
    is_partial: bool = False
    """True if the container runtime divided the line."""
    rank: int | None = None
    local_rank: int | None = None
    key: str = ""
    """Prefixes without times, equal for a block's lines."""


def split(text: str, source: str) -> Prefixed:
    """Remove all known prefixes. srun's number is a rank only in `slurm` logs."""
    is_composed = " | " in text[:_COMPOSE_WITHIN]
    if not text or (text[0] not in _FIRST_CHARACTERS and not is_composed):
        return Prefixed(text)
    prefixed = _container(text)
    text = prefixed.text
    if not text or (text[0] not in _FIRST_CHARACTERS and not is_composed):
        return prefixed
    rank, local_rank, end, numbered = None, None, 0, 0
    # Check first characters before patterns: most lines have no prefix.
    if is_composed:
        end = match.end() if (match := _COMPOSE.match(text)) else 0
    elif text.startswith("[pod/") and (match := _KUBECTL.match(text)):
        end = match.end()
    begin = text[end : end + 1]
    if begin in _SRUN_CHARACTERS and "\t" in text[end : end + 26] and (match := _NUMBERED.match(text, end)):
        end = numbered = match.end()
        begin = text[end : end + 1]
    if begin == "[" and (match := _MPIRUN.match(text, end)):
        rank, end = int(match[1] or match[2]), match.end()
    elif begin in _SRUN_CHARACTERS and (match := _SRUN.match(text, end)):
        rank, end = int(match[1]) if source == "slurm" else None, match.end()
    if text.startswith("(", end) and (match := _RAY.match(text, end)):
        end = match.end()
    if text.startswith("[", end):
        if match := _TAGGED_RANK.match(text, end):
            rank, end = int(match[1]), match.end()
        elif match := _TORCHRUN.match(text, end):
            local_rank, end = int(match[1]), match.end()
            if inner := _TAGGED_RANK.match(text, end):
                rank, end = int(inner[1]), inner.end()
    if not end:
        return prefixed
    key = text[:end].rstrip() if numbered == 0 else text[numbered:end].rstrip() or "\t"
    return Prefixed(text[end:], prefixed.at, prefixed.is_partial, rank, local_rank, key)


def exported(prefixed: Prefixed, source: str) -> Prefixed | None:
    """Return the program's line in a JSON object of a log store or collector. None for others."""
    text = prefixed.text
    if not text.startswith('{"') or _HAS_LINE.search(text) is None:
        return None
    try:
        entry: Any = json.loads(text)
        inner = next(entry[name] for name in _LINE_MEMBERS if isinstance(entry.get(name), str)).rstrip("\n")
        places = [str(entry[name])[:253] for name in _PLACE_MEMBERS if isinstance(entry.get(name), (str, int))]
        places += [str(entry[name])[:1000] for name in _PLACE_OBJECTS if isinstance(entry.get(name), dict)]
    except (ValueError, AttributeError, RecursionError, StopIteration):
        return None
    if "\n" in inner:
        return None
    whole = split(inner.encode("utf-8", "replace").decode(), source)
    return whole._replace(at=whole.at or prefixed.at, key="\0".join(["{", prefixed.key, *places, whole.key]))


def _container(text: str) -> Prefixed:
    if text[0] in "0123456789" and (match := _CRI.match(text)):
        at = times.with_zone(match[1])
        return Prefixed(text[match.end() :], at, match[3] == "P", key=match[2])
    if text.startswith(_DOCKER):
        return _docker(text)
    return Prefixed(text)


def _docker(text: str) -> Prefixed:
    try:
        entry: Any = json.loads(text)
        inner, stream, at = entry["log"], str(entry["stream"]), times.with_zone(str(entry["time"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return Prefixed(text)
    if not isinstance(inner, str):
        return Prefixed(text)
    whole = inner.encode("utf-8", "replace").decode()  # JSON can hold half a surrogate pair, which is not text
    return Prefixed(whole.rstrip("\n"), at, not whole.endswith("\n"), key=stream)
