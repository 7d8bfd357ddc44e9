"""The policy's part ``logs``. It imports little, because every agent loads it."""

from __future__ import annotations

import fnmatch
import re
from enum import StrEnum

from msgspec import Struct

from trainmedic.wire.log_layout import FLIGHT_RECORDER
from trainmedic_agent import mapping_reader
from trainmedic_agent.log_reading.path_patterns import PathPattern, checked_path
from trainmedic_agent.log_shipping.ship_policy import ShipPolicy, read_ship
from trainmedic_agent.mapping_reader import FieldFault, MappingReader
from trainmedic_logs.domain.log_sources import fault_of_source

KERNEL_FILE = "/var/log/kern.log"
_NAMESPACE = re.compile(r"[a-z0-9*?-]{1,63}\Z")


class KernelReading(StrEnum):
    ANY = "any"
    """``/dev/kmsg`` if permitted, else the journal, else `KERNEL_FILE`."""
    KMSG = "kmsg"
    JOURNAL = "journal"
    FILE = "file"


class KernelLog(Struct, frozen=True):
    by: KernelReading
    path: str = KERNEL_FILE  # for `KernelReading.FILE`


class FilesOfSource(Struct, frozen=True):
    path: PathPattern
    source: str = "training"
    """``training``, ``launcher``, ``fabric-manager``, or a custom one."""


class LogsPolicy(Struct, frozen=True):
    roots: tuple[str, ...] = ()
    """Log directories in the layout of the SDK and ``trainmedic-run``."""
    paths: tuple[str, ...] = ()
    """Directories, besides `roots`, of files that a job may name."""
    files: tuple[FilesOfSource, ...] = ()
    slurm: tuple[PathPattern, ...] = ()  # output files of Slurm's jobs
    pods: tuple[str, ...] = ()
    """Patterns of namespaces with container logs to read."""
    kernel: KernelLog | None = None  # None: not read
    max_files: int = 1000
    """Files followed, most recently written first."""
    max_lines: int = 2000
    """Per second of a file; the kernel's log is unlimited."""
    max_job_files: int = 500  # of one job, within `max_files`
    max_job_lines: int = 20_000
    """Per second of a job's files together."""
    max_job_entries: int = 100_000
    """Directory entries per scan."""
    max_job_findings: int = 500
    """Per hour."""
    ship: ShipPolicy | None = None
    """None if lines stay on the node."""

    def reads_pods_of(self, namespace: str) -> bool:
        return any(fnmatch.fnmatchcase(namespace, pattern) for pattern in self.pods)


def read_logs(raw: object, faults: list[FieldFault]) -> LogsPolicy:
    """Parse the part. After an appended fault the result must not be used."""
    usual = LogsPolicy()
    reader = MappingReader(("logs",), raw if raw is not None else {}, LogsPolicy.__struct_fields__, faults)
    return LogsPolicy(
        roots=reader.each("roots", _directory),
        paths=reader.each("paths", _directory),
        files=tuple(_file(reader, index, entry) for index, entry in enumerate(reader.listed("files"))),
        slurm=reader.each("slurm", _pattern),
        pods=reader.each("pods", _namespace),
        kernel=reader.optional("kernel", _kernel, None),
        max_files=reader.optional("max_files", mapping_reader.whole(1, 20_000), usual.max_files),
        max_lines=reader.optional("max_lines", mapping_reader.whole(10, 1_000_000), usual.max_lines),
        max_job_files=reader.optional("max_job_files", mapping_reader.whole(1, 20_000), usual.max_job_files),
        max_job_lines=reader.optional("max_job_lines", mapping_reader.whole(10, 1_000_000), usual.max_job_lines),
        max_job_entries=reader.optional(
            "max_job_entries", mapping_reader.whole(100, 10_000_000), usual.max_job_entries
        ),
        max_job_findings=reader.optional(
            "max_job_findings", mapping_reader.whole(10, 1_000_000), usual.max_job_findings
        ),
        ship=reader.optional("ship", lambda ship: read_ship(reader, ship), None),
    )


def _file(parent: MappingReader, index: int, raw: object) -> FilesOfSource:
    entry = {"path": raw} if isinstance(raw, str) else raw
    reader = MappingReader((*parent.path, "files", index), entry, FilesOfSource.__struct_fields__, parent.faults)
    pattern = reader.required("path", _pattern, PathPattern("", "", ()))
    return FilesOfSource(pattern, reader.optional("source", _source, "training"))


def _directory(raw: object) -> str:
    return checked_path(mapping_reader.text(raw))


def _pattern(raw: object) -> PathPattern:
    return PathPattern.read(mapping_reader.text(raw))


def _source(raw: object) -> str:
    name = mapping_reader.text(raw)
    if name == "kernel":
        raise ValueError("read the kernel's log with the key kernel")
    if name == FLIGHT_RECORDER:
        raise ValueError("dumps are not lines; those below roots are read automatically")
    if fault := fault_of_source(name):
        raise ValueError(fault)
    return name


def _namespace(raw: object) -> str:
    name = mapping_reader.text(raw)
    if not _NAMESPACE.match(name):
        raise ValueError(f"{name!r} is not a namespace or a pattern")
    return name


def _kernel(raw: object) -> KernelLog | None:
    if isinstance(raw, bool):
        return KernelLog(KernelReading.ANY) if raw else None
    name = mapping_reader.text(raw)
    if name.startswith("/"):
        return KernelLog(KernelReading.FILE, checked_path(name))
    if name not in list(KernelReading):
        raise ValueError(f"must be true, {', '.join(KernelReading)}, or the path of a file, not {name!r}")
    return KernelLog(KernelReading(name))
