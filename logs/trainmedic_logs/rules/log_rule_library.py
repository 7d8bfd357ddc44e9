"""Log rules of some directories, reloaded on change.

An invalid file keeps its last rules.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_core import yaml_files, yaml_text
from trainmedic_core.allowance import Allowance
from trainmedic_core.problems import FileProblem
from trainmedic_logs.lines.rule import LogRule, RuleSet
from trainmedic_logs.rules import log_rule_compiler

RESCAN = 5.0  # seconds
MOST_RULES = 1_000
_TOO_MANY_FILES = (
    f"not searched for log rules, nor are the files after it: there are over {yaml_files.MOST_FILES} files"
)

log = logging.getLogger(__name__)


class PlacedRule(Struct, frozen=True):
    rule: LogRule
    source: str  # file
    line: int


class LoadedRules(Struct, frozen=True):
    path: Path
    digest: str  # of the text; "" if unreadable
    rules: tuple[PlacedRule, ...] = ()
    problems: tuple[FileProblem, ...] = ()


def load(text: str, source: str) -> tuple[list[PlacedRule], list[FileProblem]]:
    """Return rules (none if the text has a YAML error) and problems. Never raises."""
    documents, problems = yaml_text.read(text, source)
    rules: list[PlacedRule] = []
    has_yaml_problems, allowance = bool(problems), Allowance()
    if surplus := documents[yaml_files.MOST_DOCUMENTS :]:
        problems = [*problems, surplus[0].problem((), f"a file has at most {yaml_files.MOST_DOCUMENTS} documents")]
    for document in documents[: yaml_files.MOST_DOCUMENTS]:
        if not (isinstance(document.value, dict) and yaml_files.LOG_RULE in document.value):
            continue
        made = log_rule_compiler.compile_document(document, allowance)
        if isinstance(made, list):
            problems.extend(made)
        elif not has_yaml_problems:
            rules.append(PlacedRule(made, source, document.marks[()].line))
    return rules, sorted(set(problems))[: yaml_files.MOST_PROBLEMS]


def load_file(path: Path, before: LoadedRules | None = None) -> LoadedRules:
    """Return `before` if unchanged."""
    text = yaml_files.read_text(path)
    if isinstance(text, FileProblem):
        return LoadedRules(path, "", (), (text,))
    digest = hashlib.sha256(text.encode()).hexdigest()
    if before is not None and before.digest == digest:
        return before
    if yaml_files.LOG_RULE not in text:
        return LoadedRules(path, digest)
    rules, problems = load(text, str(path))
    return LoadedRules(path, digest, tuple(rules), tuple(problems))


class LogRuleLibrary:
    """Rules of `roots` and playbook roots (`beside`), empty until `reload`."""

    def __init__(self, roots: Sequence[Path], beside: Sequence[Path] = ()) -> None:
        self._roots = (*beside, *roots)
        # The playbook library reports their missing paths.
        self._beside = frozenset(beside).difference(roots)
        self._files: dict[Path, LoadedRules] = {}
        self._rule_set = RuleSet()
        self._placed: tuple[PlacedRule, ...] = ()
        self._problems: tuple[FileProblem, ...] = ()

    @property
    def rule_set(self) -> RuleSet:
        return self._rule_set

    @property
    def placed(self) -> tuple[PlacedRule, ...]:
        return self._placed

    @property
    def problems(self) -> Sequence[FileProblem]:
        return self._problems

    def reload(self) -> bool:
        """Return whether the rules changed."""
        files: dict[Path, LoadedRules] = {}
        problems: list[FileProblem] = []
        for root in self._roots:
            for path in yaml_files.document_files(root):
                if isinstance(path, FileProblem):
                    if root not in self._beside:
                        problems.append(path)
                    if os.path.lexists(path.file):  # unreadable, so keep its rules
                        files.update((old, file) for old, file in self._files.items() if Path(path.file) in old.parents)
                elif path not in files:
                    if len(files) >= yaml_files.MOST_FILES:
                        problems.append(FileProblem(str(path), None, None, _TOO_MANY_FILES))
                        break
                    files[path] = self._load(path)
        self._files = files
        chosen = _chosen(files.values(), self._placed, problems)
        before = (self._rule_set, self._problems)
        self._placed, self._problems = tuple(chosen), tuple(sorted(set(problems)))
        self._rule_set = RuleSet(tuple(placed.rule for placed in chosen))
        if (self._rule_set, self._problems) != before:
            self._log_result(before[1])
        return self._rule_set != before[0]

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(RESCAN)
            try:
                await asyncio.to_thread(self.reload)
            except Exception:  # keep the loaded rules
                log.exception("cannot reload log rules; keeping the loaded ones")

    def _load(self, path: Path) -> LoadedRules:
        before = self._files.get(path)
        now = load_file(path, before)
        if before is None or now is before or not now.problems:
            return now
        new_names = {placed.rule.name for placed in now.rules}
        kept = tuple(placed for placed in before.rules if placed.rule.name not in new_names)
        return replace(now, rules=(*now.rules, *kept))

    def _log_result(self, before: Sequence[FileProblem]) -> None:
        log.info("log rules loaded", extra={"rules": len(self._rule_set.rules), "problems": len(self._problems)})
        for problem in self._problems:
            if problem not in before:
                log.warning("cannot load log rule", extra={"problem": str(problem)})


def _chosen(
    files: Iterable[LoadedRules], before: Sequence[PlacedRule], problems: list[FileProblem]
) -> list[PlacedRule]:
    """Return one rule per name, preferably those in use. Adds to `problems`."""
    files = list(files)
    problems.extend(problem for file in files for problem in file.problems)
    used_before = {(placed.rule.name, placed.source, placed.line) for placed in before}
    chosen: dict[str, PlacedRule] = {}
    every = [placed for file in files for placed in file.rules]
    for placed in sorted(every, key=lambda each: (each.rule.name, each.source, each.line) not in used_before):
        first = chosen.setdefault(placed.rule.name, placed)
        if first is not placed:
            message = f"log rule {placed.rule.name!r} is also in {first.source}:{first.line}; that one is used"
            problems.append(FileProblem(placed.source, placed.line, 1, message))
    too_many = f"not used: there are over {MOST_RULES} log rules"
    problems.extend(FileProblem(each.source, each.line, 1, too_many) for each in list(chosen.values())[MOST_RULES:])
    return list(chosen.values())[:MOST_RULES]
