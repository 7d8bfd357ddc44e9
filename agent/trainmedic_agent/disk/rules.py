"""Cleaning rules, and parsing of the policy's part ``cleaning`` (``docs/reference/agent-policy.md``)."""

from __future__ import annotations

import os
import posixpath
import pwd
import re
import stat
from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Any

from msgspec import Struct, field

from trainmedic_agent import mapping_reader
from trainmedic_agent.disk.access_times import AccessTimes
from trainmedic_agent.disk.globs import Glob
from trainmedic_agent.mapping_reader import FieldFault, MappingReader
from trainmedic_core import duration

MIN_AGE_TO_DELETE = timedelta(minutes=1)
MIN_KEPT_CHECKPOINTS = 2
MAX_KEEP_NEWEST = 1000
DEFAULT_MAX_FILES = 100_000
_LARGEST_MAX_FILES = 10_000_000

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,126}[A-Za-z0-9])?")
_DECIMAL = {"": 1, "k": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4, "P": 1000**5}
_BINARY = {"Ki": 1024, "Mi": 1024**2, "Gi": 1024**3, "Ti": 1024**4, "Pi": 1024**5}
_SIZES = {f"{prefix}B": size for prefix, size in {**_DECIMAL, "K": 1000, **_BINARY}.items()}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([A-Za-z]*)")
_SYSTEM = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr")
_MEMORY_BACKED = ("/dev/shm", "/run/user")  # noqa: S108
_TOO_HIGH = ("/", "/home", "/mnt", "/opt", "/root", "/srv", "/var", "/var/lib", "/var/spool")
_CLEANED_BY_OTHERS = {
    "/var/lib/containerd": "the container runtime",
    "/var/lib/containers": "the container runtime",
    "/var/lib/docker": "the container runtime",
    "/var/lib/kubelet": "the kubelet",
}


class EntryKind(StrEnum):
    FILES = "files"
    CHECKPOINTS = "checkpoints"


class CleaningOperation(StrEnum):
    DELETE = "delete"
    TRUNCATE = "truncate"
    SHRINK = "shrink"


_EARLIEST_NS = -(2**63)  # so that times fit into 64 bits: tmpfs and btrfs allow others


class AgeBy(StrEnum):
    USED = "used"
    CHANGED = "changed"
    MODIFIED = "modified"

    def last_used_ns(self, facts: os.stat_result, access_times: AccessTimes) -> int:
        """Return the time from which an entry's age counts, in nanoseconds since the epoch.

        For a directory it is the last write: searching and renaming change the others.
        """
        if self is AgeBy.MODIFIED or stat.S_ISDIR(facts.st_mode):
            used = facts.st_mtime_ns
        elif self is AgeBy.CHANGED:
            used = max(facts.st_mtime_ns, facts.st_ctime_ns)
        else:
            used = access_times.last_use_ns(facts)
        return max(_EARLIEST_NS, min(used, -_EARLIEST_NS - 1))


class CleaningRule(Struct, frozen=True):
    name: str
    roots: tuple[str, ...]
    globs: tuple[Glob, ...]
    min_age: timedelta
    exclude: tuple[Glob, ...] = ()
    kind: EntryKind = EntryKind.FILES
    do: CleaningOperation = CleaningOperation.DELETE
    age_by: AgeBy = AgeBy.USED
    keep_newest: int = 0  # per directory
    min_size: int | None = None  # bytes on disk, as max_size
    max_size: int | None = None
    when_free_below: float | None = None  # percentage; with more free space the root is left
    max_files: int | None = None  # per command; None for the policy's limit alone
    max_bytes: int | None = None
    keep_tail: int | None = None  # bytes that ``do: shrink`` keeps

    def allows_size(self, stored: int) -> bool:
        is_too_small = self.min_size is not None and stored < self.min_size
        is_too_large = self.max_size is not None and stored > self.max_size
        return not is_too_small and not is_too_large


class CleaningPolicy(Struct, frozen=True):
    rules: Mapping[str, CleaningRule] = field(default_factory=dict)
    owners: frozenset[int] = frozenset()  # allowed besides root and the agent's user
    max_files: int = DEFAULT_MAX_FILES  # per command, including files in checkpoints
    max_bytes: int | None = None
    """None for no limit."""


def read_cleaning(raw: object, faults: list[FieldFault]) -> CleaningPolicy:
    """Parse the part, empty for None. After a fault, appended to `faults`, the result must not be used."""
    section = raw if raw is not None else {}
    reader = MappingReader(("cleaning",), section, CleaningPolicy.__struct_fields__, faults)
    sections: Mapping[Any, Any] = reader.optional("rules", mapping_reader.mapping, {})
    return CleaningPolicy(
        rules={name: _rule(reader, name, raw) for name, raw in sections.items()},
        owners=frozenset(reader.each("owners", _owner)),
        max_files=reader.optional("max_files", mapping_reader.whole(1, _LARGEST_MAX_FILES), DEFAULT_MAX_FILES),
        max_bytes=reader.optional("max_bytes", _bytes, None),
    )


def _rule(parent: MappingReader, name: object, raw: object) -> CleaningRule:
    faults_before = len(parent.faults)
    keys = tuple(key for key in CleaningRule.__struct_fields__ if key != "name")
    reader = MappingReader(("cleaning", "rules", str(name)), raw, keys, parent.faults)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        reader.fault(
            (), "a rule's name has letters, digits, and '-', '_', '.' between them; at most 128; quote a number"
        )
    rule = CleaningRule(
        name=str(name),
        roots=reader.each("roots", _root, required=True),
        globs=reader.each("globs", _glob, required=True),
        min_age=reader.required("min_age", mapping_reader.age, timedelta(0)),
        exclude=reader.each("exclude", _glob),
        kind=reader.optional("kind", mapping_reader.one_of(EntryKind), EntryKind.FILES),
        do=reader.optional("do", mapping_reader.one_of(CleaningOperation), CleaningOperation.DELETE),
        age_by=reader.optional("age_by", mapping_reader.one_of(AgeBy), AgeBy.USED),
        keep_newest=reader.optional("keep_newest", mapping_reader.whole(0, MAX_KEEP_NEWEST), 0),
        min_size=reader.optional("min_size", _bytes, None),
        max_size=reader.optional("max_size", _bytes, None),
        when_free_below=reader.optional("when_free_below", mapping_reader.percent, None),
        max_files=reader.optional("max_files", mapping_reader.whole(1, _LARGEST_MAX_FILES), None),
        max_bytes=reader.optional("max_bytes", _bytes, None),
        keep_tail=reader.optional("keep_tail", _bytes, None),
    )
    if len(reader.faults) == faults_before:
        _check_together(reader, rule)
    return rule


def _check_together(reader: MappingReader, rule: CleaningRule) -> None:
    if rule.do is CleaningOperation.DELETE and rule.min_age < MIN_AGE_TO_DELETE:
        reader.fault(
            ("min_age",),
            f"must be at least {duration.write(MIN_AGE_TO_DELETE)}: what is deleted must be out of use. To empty a "
            "log that is being written, say do: truncate or do: shrink, which may have 0s",
        )
    if rule.kind is EntryKind.CHECKPOINTS and rule.do is not CleaningOperation.DELETE:
        done = "truncated" if rule.do is CleaningOperation.TRUNCATE else "shrunk"
        reader.fault(("do",), f"a checkpoint cannot be {done}, only deleted whole")
    if rule.do is CleaningOperation.SHRINK and rule.keep_tail is None:
        reader.fault(("keep_tail",), "is missing; state how many bytes at the end of a file stay, such as 10MB")
    if rule.do is not CleaningOperation.SHRINK and rule.keep_tail is not None:
        reader.fault(("keep_tail",), f"is only for do: shrink; this rule's do is {rule.do}")
    if rule.keep_tail is not None and rule.min_size is not None and rule.keep_tail >= rule.min_size:
        reader.fault(
            ("keep_tail",), "must be less than min_size, so that each file that is matched has something to free"
        )
    if rule.min_size is not None and rule.max_size is not None and rule.min_size > rule.max_size:
        reader.fault(("max_size",), "is below min_size, so that nothing is ever matched")
    for index, root in enumerate(rule.roots):
        for other in rule.roots[:index]:
            if _is_within(root, other) or _is_within(other, root):
                reader.fault(("roots", index), f"{root} and {other} are nested; name only the outer one")


def _bytes(value: object) -> int:
    """Return the bytes of a number, or of text with a unit: ``kB`` is 1000, ``KiB`` 1024. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    written = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if written is None or (written[2] or "B") not in _SIZES:
        raise ValueError(f"{value!r} is not a size; write bytes, or a number with its unit: 200MB, 1.5GiB")
    return round(float(written[1]) * _SIZES[written[2] or "B"])


def _glob(raw: object) -> Glob:
    return Glob.read(mapping_reader.text(raw))


def _owner(raw: object) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool) and 0 <= raw < 2**32:
        return raw
    try:
        return pwd.getpwnam(mapping_reader.text(raw)).pw_uid
    except KeyError:
        raise ValueError(f"there is no user {raw!r} on this node; name one, or write the numeric id") from None


def _root(raw: object) -> str:
    path = mapping_reader.text(raw)
    if not path.startswith("/") or posixpath.normpath(path) != path or "\0" in path or path.startswith("//"):
        raise ValueError(f"{path!r} must be an absolute path without '.', '..', double or closing '/'")
    if path in _TOO_HIGH:
        raise ValueError(f"{path} cannot be a root: name the directory in it that is to be cleaned")
    if not _is_within(path, *_MEMORY_BACKED) and _is_within(path, *_SYSTEM):
        raise ValueError(f"{path} cannot be a root: it belongs to the system")
    for directory, cleaner in _CLEANED_BY_OTHERS.items():
        if _is_within(path, directory):
            raise ValueError(f"{path} cannot be a root: it belongs to {cleaner}, which cleans it itself")
    return path


def _is_within(path: str, *directories: str) -> bool:
    return any(path == directory or path.startswith(f"{directory}/") for directory in directories)
