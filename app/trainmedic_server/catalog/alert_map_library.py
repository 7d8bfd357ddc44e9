"""Alert map of some files, kept up to date.

An invalid file, or a configured path that is missing, keeps its last valid content. If it was never valid, no alert is
accepted. A file deleted from a folder with others is dropped.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_core import yaml_files
from trainmedic_core.problems import FileProblem
from trainmedic_server import telemetry
from trainmedic_server.catalog import alert_map_compiler
from trainmedic_server.catalog.alert_map import CompiledAlertMap, CompiledFile

RESCAN = 2.0  # Seconds between two checks of the files.

log = telemetry.logger(__name__)


class LoadedMap(Struct, frozen=True):
    path: Path
    digest: str = ""  # SHA-256 of the text; empty if it is unreadable or gone
    content: CompiledFile | None = None  # last valid one; None if there never was one
    problems: tuple[FileProblem, ...] = ()


def load_file(path: Path, before: LoadedMap | None = None) -> LoadedMap:
    kept = before.content if before is not None else None
    text = yaml_files.read_text(path)
    if isinstance(text, FileProblem):
        return LoadedMap(path, "", kept, (text,))
    digest = hashlib.sha256(text.encode()).hexdigest()
    if before is not None and before.digest == digest:
        return before
    made = alert_map_compiler.compile_text(text, str(path))
    if isinstance(made, list):
        return LoadedMap(path, digest, kept, tuple(made[: yaml_files.MOST_PROBLEMS]))
    return LoadedMap(path, digest, made)


_MAP = "the alert map"  # in place of a file, in the problem of a failed reload


class AlertMapLibrary:
    """Alert map of all files in order: the first entry that takes an alert wins. Empty until the first `reload`."""

    def __init__(self, roots: Sequence[Path], metrics: telemetry.Metrics | None = None) -> None:
        self._roots = tuple(roots)
        self._metrics = metrics
        self._files: dict[Path, LoadedMap] = {}
        self._problems: tuple[FileProblem, ...] = ()
        self._current = CompiledAlertMap()

    @property
    def is_used(self) -> bool:  # False if no path is set
        return bool(self._roots)

    @property
    def current(self) -> CompiledAlertMap:
        return self._current

    @property
    def contents(self) -> tuple[CompiledFile, ...]:
        return tuple(file.content for file in self._files.values() if file.content is not None)

    @property
    def problems(self) -> Sequence[FileProblem]:
        return self._problems

    def reload(self) -> bool:  # True if anything changed
        files: dict[Path, LoadedMap] = {}
        problems: list[FileProblem] = []
        for root in self._roots:
            paths = list(yaml_files.document_files(root)) or [FileProblem(str(root), None, None, "has no alert map")]
            for path in paths:
                if isinstance(path, FileProblem):
                    problems.append(path)
                    files.update(self._kept_below(Path(path.file)))
                elif path not in files:
                    files[path] = load_file(path, self._files.get(path))
        problems += [problem for file in files.values() for problem in file.problems]
        never_loaded = [file.path for file in files.values() if file.content is None]
        if files == self._files and tuple(problems) == self._problems:
            return False
        before, self._problems, self._files = self._problems, tuple(problems), files
        unknown = "could not be loaded, so it is not known which alerts it accepts"
        unusable = f"the alert map {never_loaded[0]} {unknown}" if never_loaded else ""
        self._current = CompiledAlertMap.of(self.contents, unusable)
        self._log_result(before)
        return True

    def _kept_below(self, path: Path) -> dict[Path, LoadedMap]:
        known = {old: file for old, file in self._files.items() if old == path or path in old.parents}
        # Without digest, so that a file that comes back is read again, and its problems are known.
        return {old: replace(file, digest="", problems=()) for old, file in known.items()} or {path: LoadedMap(path)}

    async def watch(self) -> None:
        while self._roots:
            await asyncio.sleep(RESCAN)
            try:
                await asyncio.to_thread(self.reload)
            except Exception as error:  # The loaded map stays active after any error of the file system.
                log.exception("loading the alert map failed; keeping the loaded one")
                problem = FileProblem(_MAP, None, None, f"loading failed: {type(error).__name__}; see the log")
                self._problems = (*(other for other in self._problems if other.file != _MAP), problem)
                if self._metrics is not None:
                    self._metrics.loop_errors.labels("alert map").inc()

    def _log_result(self, before: Sequence[FileProblem]) -> None:
        renames = sum(len(content.renames) for content in self.contents)
        log.info("alert map loaded", files=len(self._files), renames=renames, problems=len(self._problems))
        for problem in self._problems:
            if problem not in before:
                log.warning("cannot load alert map", problem=str(problem))
        if self._metrics is not None:
            self._metrics.alert_map_errors.set(len({problem.file for problem in self._problems}))
