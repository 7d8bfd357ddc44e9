"""Fragments, whose steps take the place of ``use`` before a playbook is checked.

Their texts become part of the playbook's version under ``fragments``, so a run keeps its steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_core import model_errors, yaml_files, yaml_text
from trainmedic_core.expressions.evaluation import is_template
from trainmedic_core.problems import DocumentPath, FileProblem, did_you_mean, entry_of
from trainmedic_core.yaml_text import TextPosition, YamlDocument
from trainmedic_server.catalog import attachments, cures, written_steps
from trainmedic_server.domain import inputs
from trainmedic_server.domain.fragment import Fragment, UseStep
from trainmedic_server.domain.playbook import EVERY_PHASE, MOST_STEPS, default_id, place_of

KEY = "fragment"  # key that makes a document a fragment
INSERTED = "fragments"  # key of a playbook with the texts of its fragments
_USES = re.compile(r"""\buse["']?\s*:""")  # quick check, without parsing
_Fragments = Mapping[str, YamlDocument]  # by name


class Use(Struct, frozen=True):
    """A fragment's steps in a playbook's phase."""

    id: str
    fragment: str
    phase: str
    first: int  # index of its first step in the expanded list
    ids: tuple[str, ...]  # of the steps within the fragment; in the playbook ``<id>.<step>``
    place: DocumentPath  # under which the expanded document has the positions of `values`
    declared: Mapping[str, inputs.Input]
    values: Mapping[str, Any]  # ``with``, maybe with templates

    def covers(self, index: int) -> bool:
        return self.first <= index < self.first + len(self.ids)


class FragmentPlace(Struct, frozen=True):
    name: str
    source: str
    line: int


class Expanded(Struct, frozen=True):
    document: YamlDocument
    uses: tuple[Use, ...] = ()


class FragmentFolders:
    def __init__(self) -> None:
        # Each folder's fragments, read once: use an object for one load only.
        self._read: dict[Path, Sequence[tuple[str, YamlDocument]]] = {}

    def named_in(self, text: str, path: Path) -> _Fragments:
        """Return the fragments of other files that `text` uses."""
        if not _USES.search(text):
            return {}
        documents, _ = yaml_text.read(text, str(path))
        names = {name for document in documents for name in _used_names(document)}
        own = in_documents(documents)
        available = self._in_folder(path.parent) if names - own.keys() else ()
        by_name: dict[str, YamlDocument] = {}
        for name, document in available:
            if name in names and name not in own and document.source != str(path):
                by_name.setdefault(name, document)
        return by_name

    def _in_folder(self, folder: Path) -> Sequence[tuple[str, YamlDocument]]:
        if folder not in self._read:
            self._read[folder] = tuple(
                (name, document)
                for path in yaml_files.document_files(folder)
                if isinstance(path, Path) and path.parent == folder
                for name, document in _in_file(path)
            )
        return self._read[folder]


def _in_file(path: Path) -> Iterator[tuple[str, YamlDocument]]:
    text = yaml_files.read_text(path)
    if isinstance(text, str) and KEY in text:
        yield from in_documents(yaml_text.read(text, str(path))[0]).items()


def is_fragment(document: YamlDocument) -> bool:
    return isinstance(document.value, dict) and KEY in document.value


def in_documents(documents: Sequence[YamlDocument]) -> dict[str, YamlDocument]:
    by_name: dict[str, YamlDocument] = {}
    for document in documents:
        if is_fragment(document) and isinstance(document.value[KEY], str):
            by_name.setdefault(document.value[KEY], document)
    return by_name


def places(text: str, source: str) -> tuple[FragmentPlace, ...]:
    by_name = in_documents(yaml_text.read(text, source)[0]) if KEY in text else {}
    return tuple(FragmentPlace(name, source, document.marks[()].line) for name, document in by_name.items())


def check(document: YamlDocument, of_file: _Fragments) -> list[FileProblem]:
    """Check the form only. Steps are checked where they are used."""
    first = of_file.get(str(document.value[KEY]), document)
    if first is not document:
        line = first.marks[()].line
        return [document.problem((KEY,), f"fragment {document.value[KEY]!r} is on line {line} too; rename one")]
    form = _form(document)
    return form if isinstance(form, list) else []


def _form(document: YamlDocument) -> Fragment | list[FileProblem]:
    used = [
        document.problem(("steps", index, "use"), "use: a fragment cannot use another; copy the steps into it")
        for index, entry in enumerate(_list(document.value.get("steps")))
        if isinstance(entry, dict) and "use" in entry
    ]
    if used:
        return used
    form = model_errors.validate(Fragment, document, ("steps",), cures.of_fragment)
    if isinstance(form, list):
        return form
    return [
        document.problem(("inputs", name, "default"), message)
        for name, message in inputs.wrong_defaults(form.inputs)
    ] or form  # fmt: skip


def expand(document: YamlDocument, others: _Fragments) -> Expanded | list[FileProblem]:
    """Replace each use by its fragment's steps, and add the fragments' texts. Return errors if there are any."""
    raw = document.value
    if not isinstance(raw, dict) or not any(_used_names(document)):
        return Expanded(document)
    inside = raw.get(INSERTED)  # in a stored version, which does not depend on files
    available = others if inside is None else _of_version(document, inside)
    expansion = _Expansion(document, available)
    for phase in EVERY_PHASE:
        expansion.expand(phase)
    if expansion.problems:
        return expansion.problems
    text, value = document.text, written_steps.with_lists(raw, expansion.lists)
    if inside is None:
        used = {use.fragment: available[use.fragment].text.rstrip("\n") for use in expansion.uses}
        value[INSERTED] = used
        whole = attachments.with_texts(document, INSERTED, used)
        if isinstance(whole, FileProblem):
            return [whole]
        text = whole
    made = replace(
        document, value=value, text=text, marks=expansion.marks, keys=expansion.keys, remarks=expansion.remarks,
        written=expansion.written,
    )  # fmt: skip
    return Expanded(made, tuple(expansion.uses))


def _of_version(document: YamlDocument, texts: Any) -> _Fragments:
    entries = texts.items() if isinstance(texts, dict) else ()
    by_name: dict[str, YamlDocument] = {}
    for name, text in entries:
        if isinstance(text, str):
            by_name |= in_documents(yaml_text.read(text, f"{document.source}, {INSERTED}.{name}")[0])
    return by_name


def _used_names(document: YamlDocument) -> Iterator[str]:
    for phase in EVERY_PHASE:
        for entry in written_steps.of(document.value, phase):
            if isinstance(entry, dict) and "use" in entry:
                yield str(entry["use"])


def _list(written: Any) -> list[Any]:
    return written if isinstance(written, list) else []


class _Expansion:
    def __init__(self, document: YamlDocument, available: _Fragments) -> None:
        self.document = document
        self.problems: list[FileProblem] = []
        self.uses: list[Use] = []
        self.lists: dict[str, list[Any]] = {}  # Expanded steps by phase.
        self.marks = dict(document.marks)
        self.keys = dict(document.keys)
        self.remarks = dict(document.remarks)
        self.written: dict[DocumentPath, DocumentPath] = {}  # Original paths by path in the expanded document.
        self._available = available
        self._entries: dict[str, list[_ByEntry]] = {}  # marks, keys and remarks of a document, by its file:line
        self._forms: dict[str, Fragment | None] = {}

    def expand(self, phase: str) -> None:
        entries, at = written_steps.of(self.document.value, phase), place_of(phase)
        if not any(isinstance(entry, dict) and "use" in entry for entry in entries):
            return
        # All entries get new positions: those after an inserted fragment move.
        for paths in (self.marks, self.keys, self.remarks):
            for path in [path for path in paths if path[: len(at)] == at and len(path) > len(at)]:
                del paths[path]
        made: list[Any] = []
        self.lists[phase] = made
        for index, entry in enumerate(entries):
            if len(made) > MOST_STEPS:
                self._problem((*at, index), f"{phase}: has over {MOST_STEPS} steps with those of its fragments")
                return
            if isinstance(entry, dict) and "use" in entry:
                self._insert(phase, index, entry, made)
            else:
                self._copy(self.document, (*at, index), (*at, len(made)))
                made.append(entry)

    def _insert(self, phase: str, index: int, entry: Mapping[str, Any], made: list[Any]) -> None:
        here: DocumentPath = (*place_of(phase), index)
        wrong = _use_problems(self.document, here, entry)
        if wrong:
            self.problems.extend(wrong)
            return
        name, use_id = entry["use"], entry.get("id") or entry["use"]
        form = self._fragment(name, here)
        if form is None:
            return
        place: DocumentPath = ("with", len(self.uses))
        self._copy(self.document, (*here, "with"), place)
        self.marks.setdefault(place, self.document.position(here))
        values = dict(entry.get("with") or {})
        if any(use.id == use_id for use in self.uses):
            self._problem((*here, "use"), f"use: {use_id!r} is the id of an earlier use; give this one its own id")
        for key, message in _value_problems(form.inputs, values):
            at = (*here, "with", key) if key in values else (*here, "use")
            self._problem(at, f"with.{key}: {message}; fragment {name!r}, {self._place_of(name)}")
        ids = tuple(step.id or default_id(position, "steps") for position, step in enumerate(form.steps))
        self.uses.append(Use(use_id, name, phase, len(made), ids, place, form.inputs, values))
        fragment = self._available[name]
        line = self.document.position((*here, "use")).line
        note = f" (fragment {name!r}, used at {self.document.source}:{line})"
        for inner, step in enumerate(fragment.value["steps"]):
            self._copy(fragment, ("steps", inner), (*place_of(phase), len(made)), note)
            made.append({**step, "id": f"{use_id}.{ids[inner]}"})

    def _fragment(self, name: str, here: DocumentPath) -> Fragment | None:
        if name not in self._available:
            near = did_you_mean(name, self._available) or (
                f"; there are {', '.join(sorted(self._available))}" if self._available else
                "; write a document 'fragment: NAME' in a file of this folder"
            )  # fmt: skip
            self._problem((*here, "use"), f"use: there is no fragment {name!r} in this folder{near}")
            return None
        if name not in self._forms:
            form = _form(self._available[name])
            self._forms[name] = form if isinstance(form, Fragment) else None
        if self._forms[name] is None:
            self._problem((*here, "use"), f"use: fragment {name!r} has errors, {self._place_of(name)}")
        return self._forms[name]

    def _place_of(self, name: str) -> str:
        fragment = self._available[name]
        return f"{fragment.source}:{fragment.marks[()].line}"

    def _copy(self, of: YamlDocument, old: DocumentPath, new: DocumentPath, note: str = "") -> None:
        if new != old:
            self.written[new] = old
        length, place = len(old), f"{of.source}:{of.marks[()].line}"
        if place not in self._entries:
            # A search of all positions for each copied step would take quadratic time.
            self._entries[place] = [_by_entry(values) for values in (of.marks, of.keys, of.remarks)]
        positions: Sequence[dict[DocumentPath, Any]] = (self.marks, self.keys, self.remarks)
        for by_entry, into in zip(self._entries[place], positions, strict=True):
            for path, value in by_entry.get(entry_of(old), ()):
                if path[:length] == old:
                    into[(*new, *path[length:])] = _moved(value, of, note)

    def _problem(self, path: DocumentPath, message: str) -> None:
        self.problems.append(self.document.problem(path, message))


_ByEntry = Mapping[DocumentPath, Sequence[tuple[DocumentPath, Any]]]


def _by_entry(values: Mapping[DocumentPath, Any]) -> _ByEntry:
    by_name: dict[DocumentPath, list[tuple[DocumentPath, Any]]] = {}
    for path, value in values.items():
        by_name.setdefault(entry_of(path), []).append((path, value))
    return by_name


def _moved(value: Any, of: YamlDocument, note: str) -> Any:
    # `note` is empty for the playbook's own steps.
    return replace(value, file=of.source, note=note) if note and isinstance(value, TextPosition) else value


def _use_problems(document: YamlDocument, here: DocumentPath, entry: Mapping[str, Any]) -> list[FileProblem]:
    try:
        UseStep.model_validate(entry)
    except ValueError as error:
        wrong = model_errors.faults(error, UseStep, entry, (), cures.of_use)  # type: ignore[arg-type]
        return model_errors.problems(document, here, wrong)
    return []


def _value_problems(declared: Mapping[str, inputs.Input], values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    rendered = {name for name, value in values.items() if name in declared and is_template(value)}
    rest = {name: spec for name, spec in declared.items() if name not in rendered}
    constants = {name: value for name, value in values.items() if name not in rendered}
    yield from inputs.read(rest, constants, "fragment").problems
