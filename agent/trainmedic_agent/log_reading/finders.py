"""Identification of logs and their origin: by policy pattern, job layout or kubelet layout."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from trainmedic.wire import log_layout
from trainmedic_agent.log_reading.job_sources import JobSources
from trainmedic_agent.log_reading.log_policy import LogsPolicy
from trainmedic_agent.log_reading.path_patterns import NUMBERS, PathPattern
from trainmedic_logs.domain.finding import Origin

_DEEPEST = 10  # directories below a root
_CONTAINER_LOG = re.compile(r"\d{1,9}\.log\Z")
_STREAM_SOURCES = {
    log_layout.STDOUT: "training",
    log_layout.STDERR: "training",
    log_layout.LAUNCHER: "launcher",
}


class Finder(Protocol):
    def enter(self, name: str) -> Finder | None:
        """Return a subdirectory's finder, None to skip it."""
        ...

    def origin(self, name: str) -> Origin | None:
        """Return a file's origin, None if it is no log of this node."""
        ...


class PatternFinder(Struct, frozen=True):
    """Files that match a policy's pattern. `places`: values of its placeholders."""

    pattern: PathPattern
    source: str
    node: str
    depth: int = 0
    places: Mapping[str, str] = field(default_factory=dict)

    def enter(self, name: str) -> PatternFinder | None:
        if self.depth + 1 >= len(self.pattern.parts):
            return None
        places = self._places(name)
        return None if places is None else replace(self, depth=self.depth + 1, places=places)

    def origin(self, name: str) -> Origin | None:
        if self.depth + 1 != len(self.pattern.parts):
            return None
        places = self._places(name)
        if places is None:
            return None
        attempt, rank, local_rank, node_rank = (int(places[name]) if name in places else None for name in NUMBERS)
        job = readable(places["job"]) if "job" in places else None
        return Origin(self.source, self.node, job, attempt, rank, local_rank, node_rank)

    def _places(self, name: str) -> dict[str, str] | None:
        match = self.pattern.parts[self.depth].match(name)
        if match is None or match.groupdict().get("node", self.node) != self.node:
            return None
        return {**self.places, **match.groupdict()}


class LayoutFinder(Struct, frozen=True):
    """Files in the layout of ``trainmedic.wire.log_layout``."""

    root: str
    node: str
    sources: JobSources
    parts: tuple[str, ...] = ()
    first_name: str | None = None  # name of the job's directory before renames (`DirectoryNames`); None: the current

    def enter(self, name: str) -> LayoutFinder | None:
        depth = len(self.parts)  # 0: the root, with jobs; 1: a job, with attempts; 2: an attempt
        if depth == 1 and log_layout.attempt_number(name) is None:
            return None
        if depth == 2 and name not in (f"ranks-{log_layout.encoded(self.node)}", log_layout.FLIGHT_RECORDER):
            return None
        if depth >= _DEEPEST:
            return None
        return replace(self, parts=(*self.parts, name))

    def origin(self, name: str) -> Origin | None:
        if len(self.parts) < 2:
            return None  # logs are in attempt directories; other files must cost nothing
        file = log_layout.file_at(PurePosixPath(self.first_name or self.parts[0], *self.parts[1:], name))
        if file is None or file.is_rotated:
            return None
        directory = "/".join((self.root, *self.parts))
        if file.kind == log_layout.SOURCES and file.node == self.node:
            self.sources.register(directory, name)
            return None
        if file.kind == log_layout.RECORDS:
            # On a shared directory the rank number does not identify the node; its sources file does.
            return self.sources.of_rank(directory, file.rank)
        if file.kind == log_layout.FLIGHT_RECORDER and file.rank is not None:
            return self._origin_of_dump(file, file.rank)
        if file.kind == log_layout.LAUNCHER:
            self.sources.register_launcher(directory, file.node)
        if file.kind not in _STREAM_SOURCES or file.node != self.node:
            return None
        job = readable(file.job if file.job is not None else file.directory)
        attempt = "/".join((self.root, *self.parts[:2]))
        if file.job is not None and self.sources.is_of_another_job(attempt, file.job):
            return None
        origin = Origin(_STREAM_SOURCES[file.kind], self.node, job=job, attempt=file.attempt)
        if file.local_rank is None:
            return origin
        return self.sources.of_local_rank(attempt, file.local_rank) or replace(origin, local_rank=file.local_rank)

    def _origin_of_dump(self, file: log_layout.LogFile, rank: int) -> Origin | None:
        attempt = "/".join((self.root, *self.parts[:2]))
        origin = self.sources.of_rank(attempt, rank)
        if origin is not None:
            return replace(origin, source=log_layout.FLIGHT_RECORDER)
        if self.sources.launchers(attempt) != {self.node}:
            return None  # without a sources file, only a job on this node alone identifies the node
        if file.job is not None and self.sources.is_of_another_job(attempt, file.job):
            return None
        job = readable(file.job if file.job is not None else file.directory)
        return Origin(log_layout.FLIGHT_RECORDER, self.node, job=job, attempt=file.attempt, rank=rank)


class PodFinder(Struct, frozen=True):
    """The kubelet's container logs: ``<namespace>_<pod>_<uid>/<container>/<restarts>.log``."""

    policy: LogsPolicy
    node: str
    pod: str | None = None
    depth: int = 0

    def enter(self, name: str) -> PodFinder | None:
        if self.depth == 1:
            return replace(self, depth=2)
        parts = name.split("_")
        if self.depth != 0 or len(parts) != 3 or not self.policy.reads_pods_of(parts[0]):
            return None
        return replace(self, pod=f"{parts[0]}/{parts[1]}", depth=1)

    def origin(self, name: str) -> Origin | None:
        if self.depth != 2 or _CONTAINER_LOG.match(name) is None:
            return None
        return Origin("training", self.node, pod=self.pod)


class NamedFiles(Struct, frozen=True):
    """Files of one directory, by name."""

    origins: Mapping[str, Origin]

    def enter(self, name: str) -> None:
        return None

    def origin(self, name: str) -> Origin | None:
        return self.origins.get(name)


def readable(name: str) -> str:
    r"""Escape bytes that are not UTF-8 as ``\xe4``."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
