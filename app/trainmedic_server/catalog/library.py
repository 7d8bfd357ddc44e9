"""Playbooks of some directories, kept up to date.

An invalid file keeps its last valid playbooks; a deleted file removes its playbooks.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import watchfiles
from msgspec import Struct
from msgspec.structs import replace

from trainmedic.wire.backoff import Backoff
from trainmedic_core import yaml_files
from trainmedic_core.problems import FileProblem
from trainmedic_server import telemetry
from trainmedic_server.catalog import chains, loader
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook
from trainmedic_server.catalog.fragments import FragmentFolders, FragmentPlace
from trainmedic_server.catalog.loader import LoadedFile
from trainmedic_server.domain.alert import Alert
from trainmedic_server.ports.actions import Actions
from trainmedic_server.ports.playbooks import Shortlist

RESCAN = 30.0  # seconds between checks; some file systems, such as NFS, send no notifications
_RETRY = 1.0  # seconds, first pause after a failure or while no directory exists
_MOST_SECONDS = 60.0  # for one reload; the next one reads the remaining files
_MOST_CHARACTERS = 32 << 20  # of all playbooks
_PLAYBOOKS = "the playbooks"  # in place of a file, in the problem of a failed reload
_VERSIONS_KEPT = 256  # compiled earlier versions, for the runs that began with them; one more drops all
_Equality = tuple[str, str]  # label and value

log = telemetry.logger(__name__)


class _MatcherIndex:
    """Index of playbooks by one ``=`` matcher each: the one that fewest others share. An alert without this label and
    value cannot match.
    """

    def __init__(self, playbooks: Sequence[YamlPlaybook]) -> None:
        self.playbooks = tuple(playbooks)
        shared = Counter(equality for playbook in playbooks for equality in set(_equalities(playbook)))
        self._without_equality: list[int] = []  # Positions in `playbooks`, as below.
        self._by_label: dict[str, dict[str, list[int]]] = {}
        for position, playbook in enumerate(playbooks):
            equalities = list(_equalities(playbook))
            if not equalities:
                self._without_equality.append(position)
                continue
            label, value = min(equalities, key=shared.__getitem__)
            self._by_label.setdefault(label, {}).setdefault(value, []).append(position)

    def shortlist(self, labels: Mapping[str, str]) -> Shortlist:
        if not self._by_label:
            return Shortlist(self.playbooks)
        positions = list(self._without_equality)
        for label, by_value in self._by_label.items():
            positions += by_value.get(labels.get(label, ""), ())
        if len(positions) == len(self.playbooks):
            return Shortlist(self.playbooks)
        positions.sort()
        chosen = set(positions)
        ruled_out = (playbook for position, playbook in enumerate(self.playbooks) if position not in chosen)
        return Shortlist([self.playbooks[each] for each in positions], ruled_out, len(self.playbooks) - len(positions))


def _equalities(playbook: YamlPlaybook) -> Iterator[_Equality]:
    return ((matcher.label, matcher.value) for matcher in playbook.matchers if matcher.operator == "=")


_NO_PLAYBOOKS = _MatcherIndex(())


class _Snapshot(Struct, frozen=True):
    playbooks: Mapping[str, YamlPlaybook]
    by_alert: Mapping[str, _MatcherIndex]
    problems: tuple[FileProblem, ...]
    fragments: tuple[FragmentPlace, ...] = ()


class _ReloadLimits:
    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self._until = seconds() + _MOST_SECONDS
        self._files = 0
        self._characters = 0

    def reason_to_skip(self) -> str | None:  # the next file, which keeps its last valid playbooks
        if self._files >= yaml_files.MOST_FILES:
            return f"there are over {yaml_files.MOST_FILES} files of playbooks"
        if self._characters > _MOST_CHARACTERS:
            return f"the playbooks before it have over {_MOST_CHARACTERS >> 20} MiB"
        if self._seconds() > self._until:
            return f"loading the files before it took over {_MOST_SECONDS:g} s; the next reload reads it"
        return None

    def count(self, file: LoadedFile) -> None:
        self._files += 1
        self._characters += sum(len(playbook.text) for playbook in file.playbooks)


class StaticCatalog:  # a `ports.playbooks.Catalog`, used as such by simulations
    def __init__(self, playbooks: Iterable[YamlPlaybook], actions: Actions) -> None:
        self._actions = actions
        self._snapshot = _snapshot(playbooks)
        self._versions: dict[str, YamlPlaybook] = {}

    def for_alert(self, alertname: str) -> Sequence[YamlPlaybook]:
        return self._snapshot.by_alert.get(alertname, _NO_PLAYBOOKS).playbooks

    def shortlist(self, alert: Alert) -> Shortlist:
        return self._snapshot.by_alert.get(alert.name, _NO_PLAYBOOKS).shortlist(alert.labels)

    def get(self, name: str) -> YamlPlaybook | None:
        return self._snapshot.playbooks.get(name)

    def all(self) -> Sequence[YamlPlaybook]:
        return tuple(self._snapshot.playbooks.values())

    def compile(self, text: str, source: str) -> YamlPlaybook:
        playbook = self._versions.get(text)
        if playbook is None:
            playbook = loader.load_one(text, source, self._actions)
            if len(self._versions) >= _VERSIONS_KEPT:
                self._versions.clear()
            self._versions[text] = playbook
        return playbook


class Library(StaticCatalog):
    """Empty until the first `reload`."""

    def __init__(
        self,
        roots: Sequence[Path],
        actions: Actions,
        metrics: telemetry.Metrics | None = None,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__((), actions)
        self._roots = tuple(roots)
        self._metrics = metrics
        self._files: dict[Path, LoadedFile] = {}
        self._reloading = threading.Lock()  # `reload` runs in threads; readers take `_snapshot` as a whole
        self._seconds = seconds
        self._retry_backoff = Backoff(first=_RETRY, longest=RESCAN)

    @property
    def problems(self) -> Sequence[FileProblem]:
        return self._snapshot.problems

    @property
    def fragments(self) -> Sequence[FragmentPlace]:
        return self._snapshot.fragments

    def reload(self) -> bool:
        """Return whether anything changed. Failures are added to `problems`, and the loaded playbooks stay."""
        with self._reloading:
            try:
                return self._reload()
            except Exception as error:  # The loaded playbooks stay active after any error.
                log.exception("loading playbooks failed; keeping the loaded ones")
                self._count_failure()
                problem = FileProblem(_PLAYBOOKS, None, None, f"loading failed: {type(error).__name__}; see the log")
                others = tuple(other for other in self._snapshot.problems if other.file != _PLAYBOOKS)
                self._publish(replace(self._snapshot, problems=(*others, problem)))
                return True

    def _reload(self) -> bool:
        files: dict[Path, LoadedFile] = {}
        problems: list[FileProblem] = []
        limits, folders = _ReloadLimits(self._seconds), FragmentFolders()
        for root in self._roots:
            for path in yaml_files.document_files(root):
                if isinstance(path, FileProblem):
                    problems.append(path)
                    if os.path.lexists(path.file):  # unreadable, but its files may exist
                        files.update((old, file) for old, file in self._files.items() if Path(path.file) in old.parents)
                elif path not in files:
                    files[path] = self._load_within(limits, path, folders)
        snapshot = _assemble(files.values(), problems, self._snapshot)
        changed = files != self._files or snapshot.problems != self._snapshot.problems
        self._files = files
        if changed:
            self._publish(snapshot)
        return changed

    async def watch(self) -> None:
        """Reload on every change, or every `RESCAN` seconds without notifications. Call `reload` first."""
        while True:
            try:
                await self._watch_once()
            except Exception:  # The loaded playbooks stay active after any error.
                log.exception("watching playbooks failed; checking them periodically")
                self._count_failure()
                await asyncio.to_thread(self.reload)
                await asyncio.sleep(self._retry_backoff.next())

    def _count_failure(self) -> None:
        if self._metrics is not None:
            self._metrics.loop_errors.labels("playbooks").inc()

    async def _watch_once(self) -> None:
        present = [root for root in self._roots if yaml_files.exists(root)]
        if not present:
            await asyncio.sleep(_RETRY)
            await asyncio.to_thread(self.reload)
            return
        # `rust_timeout` and `debounce` are in ms.
        async for _ in watchfiles.awatch(
            *present, watch_filter=None, rust_timeout=int(RESCAN * 1000), yield_on_timeout=True, debounce=200
        ):
            await asyncio.to_thread(self.reload)
            self._retry_backoff.reset()
            if any(yaml_files.exists(root) for root in self._roots if root not in present):
                return

    def _load_within(self, limits: _ReloadLimits, path: Path, folders: FragmentFolders) -> LoadedFile:
        before = self._files.get(path, LoadedFile(path, ""))
        reason = limits.reason_to_skip()
        if reason is not None:
            problem = FileProblem(str(path), None, None, f"not read: {reason}")
            return replace(before, digest="", problems=(problem,))  # without digest, the next reload reads it
        loaded = self._load(path, folders)
        limits.count(loaded)
        return loaded

    def _load(self, path: Path, folders: FragmentFolders) -> LoadedFile:
        before = self._files.get(path)
        loaded = loader.load_file(path, self._actions, before, folders)
        if before is None or loaded is before or not loaded.problems:
            return loaded
        valid = {playbook.definition.name for playbook in loaded.playbooks}
        kept = tuple(playbook for playbook in before.playbooks if playbook.definition.name not in valid)
        return LoadedFile(path, loaded.digest, (*loaded.playbooks, *kept), loaded.problems, loaded.fragments)

    def _publish(self, snapshot: _Snapshot) -> None:
        before, self._snapshot = set(self._snapshot.problems), snapshot
        log.info("playbooks loaded", playbooks=len(snapshot.playbooks), problems=len(snapshot.problems))
        for problem in snapshot.problems:
            if problem not in before:
                log.warning("cannot load playbook", problem=str(problem))
        if self._metrics is not None:
            self._metrics.playbooks_loaded.set(len(snapshot.playbooks))
            self._metrics.playbook_errors.set(len({problem.file for problem in snapshot.problems}))


def _assemble(files: Iterable[LoadedFile], unreadable: Iterable[FileProblem], before: _Snapshot) -> _Snapshot:
    """If two playbooks have one name, the loaded one stays, else the first. `unreadable`: problems of paths."""
    files = list(files)
    chosen: dict[str, YamlPlaybook] = {}
    problems = [*unreadable, *(problem for file in files for problem in file.problems)]
    playbooks = [playbook for file in files for playbook in file.playbooks]
    for playbook in sorted(playbooks, key=lambda playbook: not _was_chosen(playbook, before)):
        first = chosen.setdefault(playbook.definition.name, playbook)
        if first is not playbook:
            message = f"playbook {playbook.definition.name!r} is also in {first.source}:{first.line}; that one is used"
            problems.append(FileProblem(playbook.source, playbook.line, 1, message))
    kept = _without_cycles(chosen, problems, before)
    places = [place for file in files for place in file.fragments]
    problems += _repeated_fragments(places)
    return _snapshot(kept.values(), problems, places)


def _without_cycles(
    chosen: Mapping[str, YamlPlaybook], problems: list[FileProblem], before: _Snapshot
) -> Mapping[str, YamlPlaybook]:
    """Refuse playbooks that start each other without end. The loaded version of a changed one stays."""
    kept, cycles = dict(chosen), list(chains.cycles(chosen))
    problems.extend(problem for _, problem in cycles)
    for playbook, _ in cycles:
        name = playbook.definition.name
        loaded = before.playbooks.get(name)
        if loaded is not None:
            kept[name] = loaded
        else:
            del kept[name]
    # A loaded version that closes another cycle, with a changed playbook, goes. Its file has a problem already.
    for playbook, _ in list(chains.cycles(kept)):
        if playbook is not chosen[playbook.definition.name]:
            del kept[playbook.definition.name]
    return kept


def _repeated_fragments(places: Iterable[FragmentPlace]) -> Iterator[FileProblem]:
    first: dict[tuple[Path, str], FragmentPlace] = {}
    for place in sorted(places, key=lambda place: place.source):
        other = first.setdefault((Path(place.source).parent, place.name), place)
        if other is not place:
            message = f"fragment {place.name!r} is also in {other.source}:{other.line}; rename one"
            yield FileProblem(place.source, place.line, 1, message)


def _was_chosen(playbook: YamlPlaybook, before: _Snapshot) -> bool:
    chosen = before.playbooks.get(playbook.definition.name)
    return chosen is not None and (chosen.source, chosen.line) == (playbook.source, playbook.line)


def _snapshot(
    playbooks: Iterable[YamlPlaybook], problems: Iterable[FileProblem] = (), places: Iterable[FragmentPlace] = ()
) -> _Snapshot:
    by_name = {
        playbook.definition.name: playbook for playbook in sorted(playbooks, key=lambda each: each.definition.name)
    }
    naming: dict[str, list[YamlPlaybook]] = {}
    for playbook in by_name.values():
        for name in dict.fromkeys(playbook.definition.begins_with):
            naming.setdefault(name, []).append(playbook)
    by_alert = {name: _MatcherIndex(playbooks) for name, playbooks in naming.items()}
    return _Snapshot(by_name, by_alert, tuple(sorted(problems)), tuple(places))
