"""`trainmedic diagnose --dir`: from a folder of logs and dumps to the verdict on each attempt, without a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from trainmedic_server.adapters import dump_reader, log_folder
from trainmedic_server.adapters.log_folder import FolderFile, Kind
from trainmedic_server.diagnosis import exits
from trainmedic_server.diagnosis.collecting import Collector
from trainmedic_server.diagnosis.facts import Earlier
from trainmedic_server.diagnosis.flight_recorder import absentees
from trainmedic_server.diagnosis.judge import diagnose
from trainmedic_server.diagnosis.verdict import Verdict
from trainmedic_server.errors import ConfigurationError
from trainmedic_server.logs.rule import KERNEL_SOURCES, RuleSet

_LARGEST_DOCUMENT = 1024 * 1024


@dataclass(frozen=True, slots=True)
class AttemptVerdict:
    """The verdict on one attempt."""

    job: str | None
    attempt: int | None
    """None where the folder does not tell attempts apart."""
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class FolderDiagnosis:
    """What a folder says of a job."""

    attempts: tuple[AttemptVerdict, ...]
    """The last one is the newest."""
    files_read: int
    left_out: dict[str, str]
    """Names of files that were not read, and why."""


def diagnose_folder(directory: Path, rule_set: RuleSet, job: str | None = None) -> FolderDiagnosis:
    """The verdicts on the attempts of the job whose logs are in `directory`.

    Raises:
        ConfigurationError: There is nothing to read, or there are logs of several jobs and `job` is none of them.
    """
    try:
        folder = log_folder.look_into(directory)
    except OSError as error:
        raise ConfigurationError(f"{directory}: {error.strerror or error}") from error
    jobs = sorted({file.origin.job for file in folder.files if file.origin.job})
    if len(jobs) > 1 and job not in jobs:
        raise ConfigurationError(f"{directory}: there are logs of {len(jobs)} jobs, {', '.join(jobs[:8])}; say which")
    files = [file for file in folder.files if not job or file.origin.job in (job, None)]
    if not files:
        raise ConfigurationError(f"{directory}: there are no logs and no dumps")
    numbers: list[int] = sorted({file.origin.attempt for file in files if file.origin.attempt is not None})
    left_out = dict(folder.left_out)
    verdicts: list[AttemptVerdict] = []
    attempts: list[int | None] = [*numbers] or [None]
    for number in attempts:
        earlier = [Earlier(each.attempt or 0, each.verdict.fingerprint) for each in verdicts]
        of_attempt = [file for file in files if _is_of(file, number, numbers)]
        verdict = _attempt(of_attempt, rule_set, earlier, left_out)
        verdicts.append(AttemptVerdict(job or (jobs[0] if jobs else None), number, verdict))
    return FolderDiagnosis(tuple(verdicts), len(files), left_out)


def _is_of(file: FolderFile, attempt: int | None, attempts: Sequence[int]) -> bool:
    """What tells no attempt is the newest one's; the kernel's log counts for each, by its times."""
    if file.origin.attempt is not None:
        return file.origin.attempt == attempt
    return file.origin.source in KERNEL_SOURCES or not attempts or attempt == attempts[-1]


def _attempt(
    files: Sequence[FolderFile], rule_set: RuleSet, earlier: Sequence[Earlier], left_out: dict[str, str]
) -> Verdict:
    collector = Collector(rule_set)
    # Who a rank is has to be known before its lines are read.
    for file in sorted(files, key=lambda file: file.kind is not Kind.SOURCES):
        try:
            _take(file, collector)
        except OSError as error:
            left_out[file.origin.stream] = error.strerror or str(error)
    dumps, refused = dump_reader.read_files([file.path for file in files if file.kind is Kind.DUMP])
    names = {file.path: file.origin.stream for file in files}
    reading = absentees.read_together(dumps) if dumps else None
    refused_dumps = {names[path]: reason for path, reason in refused.items()}
    return diagnose(collector.facts(recorder=reading, refused_dumps=refused_dumps, earlier=earlier))


def _take(file: FolderFile, collector: Collector) -> None:
    match file.kind:
        case Kind.LINES:
            collector.stream(file.origin, log_folder.lines_of(file), file.written)
        case Kind.ERROR:
            _take_error(file, collector)
        case Kind.SOURCES:
            _take_sources(file, collector)
        case Kind.DUMP:
            pass


def _take_error(file: FolderFile, collector: Collector) -> None:
    raw = b"\n".join(log_folder.lines_of(file))[:_LARGEST_DOCUMENT]
    origin = file.origin
    ended = exits.error_file(raw, rank=origin.rank, local_rank=origin.local_rank, node=origin.node)
    if ended is None:
        return
    collector.exit(replace(ended, is_node_sure=bool(origin.node)))
    written: datetime = ended.at or file.written
    stack = exits.call_stack(raw)
    collector.stream(replace(origin, source="training"), stack.encode(errors="replace").split(b"\n"), written)


def _take_sources(file: FolderFile, collector: Collector) -> None:
    """What the SDK says of a rank. The file is the job's, so a member of another type is left out."""
    try:
        said: Any = json.loads(b"\n".join(log_folder.lines_of(file))[:_LARGEST_DOCUMENT])
        rank = said["rank"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    if not isinstance(rank, int) or not 0 <= rank < 10**6:
        return
    gpus, known = said.get("gpus"), {}
    if isinstance(said.get("node"), str):
        known["node"] = said["node"]
    if isinstance(said.get("pid"), int):
        known["pid"] = said["pid"]
    if isinstance(gpus, list) and len(gpus) == 1 and isinstance(gpus[0], str):
        known["gpu"] = gpus[0]
    collector.rank(rank, **known)
    if isinstance(said.get("world_size"), int) and 0 < said["world_size"] < 10**6:
        collector.world_size(said["world_size"])
