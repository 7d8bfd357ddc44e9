"""The playbooks of some directories, kept up to date: the real `ports.playbooks.Catalog`.

What is loaded is one immutable snapshot that `reload` replaces, so readers need no lock and never
see half a change. A file that cannot be used keeps the playbooks that it last gave; a file that is
gone takes its playbooks with it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import watchfiles

from trainmedic_server import telemetry
from trainmedic_server.catalog import loader
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook
from trainmedic_server.catalog.loader import LoadedFile
from trainmedic_server.catalog.problems import FileProblem
from trainmedic_server.domain.target import IdentityLabels
from trainmedic_server.ports.actions import Actions

RESCAN = 30.0
"""Seconds between looks at the directories without a notification: some file systems, such as NFS, send none."""
_RETRY = 1.0
_VERSIONS_KEPT = 256
"""Compiled texts of earlier versions; runs that are open seldom need more than a few."""

log = telemetry.logger(__name__)


@dataclass(frozen=True)
class _Snapshot:
    playbooks: Mapping[str, YamlPlaybook]
    by_alert: Mapping[str, tuple[YamlPlaybook, ...]]
    problems: tuple[FileProblem, ...]


class StaticCatalog:
    """A catalog of the playbooks that it is made with: `ports.playbooks.Catalog` for simulations and tests."""

    def __init__(
        self, playbooks: Iterable[YamlPlaybook], actions: Actions, identity: IdentityLabels = IdentityLabels()
    ) -> None:
        self._actions = actions
        self._identity = identity
        self._snapshot = _snapshot(playbooks)
        self._versions: dict[str, YamlPlaybook] = {}

    def for_alert(self, alertname: str) -> Sequence[YamlPlaybook]:
        """Return the playbooks that name this alertname, in the order of their names."""
        return self._snapshot.by_alert.get(alertname, ())

    def get(self, name: str) -> YamlPlaybook | None:
        return self._snapshot.playbooks.get(name)

    def all(self) -> Sequence[YamlPlaybook]:
        """Return the playbooks in the order of their names."""
        return tuple(self._snapshot.playbooks.values())

    def compile(self, text: str, source: str) -> YamlPlaybook:
        """Compile the text of an earlier version. Raises PlaybookError."""
        playbook = self._versions.get(text)
        if playbook is None:
            playbook = loader.load_one(text, source, self._actions, self._identity)
            if len(self._versions) >= _VERSIONS_KEPT:
                self._versions.clear()
            self._versions[text] = playbook
        return playbook


class Library(StaticCatalog):
    """A catalog of what `roots` (directories, or single files) hold. Empty until the first `reload`."""

    def __init__(
        self,
        roots: Sequence[Path],
        actions: Actions,
        identity: IdentityLabels = IdentityLabels(),
        metrics: telemetry.Metrics | None = None,
    ) -> None:
        super().__init__((), actions, identity)
        self._roots = tuple(roots)
        self._metrics = metrics
        self._files: dict[Path, LoadedFile] = {}
        self._reloading = threading.Lock()

    @property
    def problems(self) -> Sequence[FileProblem]:
        """What is wrong with the files as they are now, in the order of files and lines."""
        return self._snapshot.problems

    def reload(self) -> bool:
        """Take in what has changed on disk; whether anything had. Never raises for a file's sake."""
        with self._reloading:
            files: dict[Path, LoadedFile] = {}
            absent: list[FileProblem] = []
            for root in self._roots:
                if not root.exists():
                    absent.append(FileProblem(str(root), None, None, "there is no such file or directory"))
                    continue
                for path in loader.playbook_files(root):
                    files.setdefault(path, self._load(path))
            snapshot = _assemble(files.values(), absent, self._snapshot)
            changed = files != self._files or snapshot.problems != self._snapshot.problems
            if changed:
                self._report(snapshot)
            self._files, self._snapshot = files, snapshot
            return changed

    async def watch(self) -> None:
        """Reload on every change, until cancelled. Runs in the background; the first `reload` comes before."""
        while True:
            try:
                await self._watch_once()
            except Exception:  # whatever the file system does, the playbooks that are loaded go on
                log.exception("watching the playbooks failed; trying again")
                if self._metrics is not None:
                    self._metrics.loop_errors.labels("playbooks").inc()
                await asyncio.sleep(_RETRY)

    async def _watch_once(self) -> None:
        present = [root for root in self._roots if root.exists()]
        if not present:
            await asyncio.sleep(_RETRY)
            await asyncio.to_thread(self.reload)
            return
        async for _ in watchfiles.awatch(
            *present, watch_filter=None, rust_timeout=int(RESCAN * 1000), yield_on_timeout=True, debounce=200
        ):
            await asyncio.to_thread(self.reload)
            if any(root.exists() for root in self._roots if root not in present):
                return

    def _load(self, path: Path) -> LoadedFile:
        """Return the file as it is now, with the playbooks that it last gave where it cannot be used."""
        before = self._files.get(path)
        now = loader.load_file(path, self._actions, self._identity, before)
        if before is None or now is before or not now.problems:
            return now
        fresh = {playbook.definition.name for playbook in now.playbooks}
        kept = tuple(playbook for playbook in before.playbooks if playbook.definition.name not in fresh)
        return LoadedFile(path, now.digest, (*now.playbooks, *kept), now.problems)

    def _report(self, snapshot: _Snapshot) -> None:
        log.info("playbooks loaded", playbooks=len(snapshot.playbooks), problems=len(snapshot.problems))
        for problem in snapshot.problems:
            if problem not in self._snapshot.problems:
                log.warning("a playbook cannot be loaded", problem=str(problem))
        if self._metrics is not None:
            self._metrics.playbooks_loaded.set(len(snapshot.playbooks))
            self._metrics.playbook_errors.set(len({problem.file for problem in snapshot.problems}))


def _assemble(files: Iterable[LoadedFile], absent: Iterable[FileProblem], before: _Snapshot) -> _Snapshot:
    """Return one catalog of all files. Of two playbooks with one name the one that is loaded already stays."""
    files = list(files)
    chosen: dict[str, YamlPlaybook] = {}
    problems = [*absent, *(problem for file in files for problem in file.problems)]
    playbooks = [playbook for file in files for playbook in file.playbooks]
    for playbook in sorted(playbooks, key=lambda playbook: not _was_chosen(playbook, before)):
        first = chosen.setdefault(playbook.definition.name, playbook)
        if first is not playbook:
            message = f"playbook {playbook.definition.name!r} is also in {first.source}:{first.line}; that one is used"
            problems.append(FileProblem(playbook.source, playbook.line, 1, message))
    return _snapshot(chosen.values(), problems)


def _was_chosen(playbook: YamlPlaybook, before: _Snapshot) -> bool:
    chosen = before.playbooks.get(playbook.definition.name)
    return chosen is not None and (chosen.source, chosen.line) == (playbook.source, playbook.line)


def _snapshot(playbooks: Iterable[YamlPlaybook], problems: Iterable[FileProblem] = ()) -> _Snapshot:
    by_name = {
        playbook.definition.name: playbook for playbook in sorted(playbooks, key=lambda each: each.definition.name)
    }
    by_alert: dict[str, tuple[YamlPlaybook, ...]] = {}
    for playbook in by_name.values():
        for name in dict.fromkeys(playbook.definition.on.alertnames):
            by_alert[name] = (*by_alert.get(name, ()), playbook)
    return _Snapshot(by_name, by_alert, tuple(sorted(problems)))
