"""YAML 1.2 reader with the position of every key and value.

Plain scalars follow the core schema (section 10.3.2): ``on`` and ``yes`` stay text. Duplicate keys, tags and keys that
are not text are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from msgspec import Struct
from yaml.error import Mark
from yaml.events import (
    AliasEvent,
    DocumentEndEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from trainmedic_core.problems import DocumentPath, FileProblem, entry_of, shown

if not yaml.__with_libyaml__:
    raise ImportError("PyYAML is installed without libyaml: install its wheel, or build it with libyaml")

MAX_BYTES = 1 << 20
"""Limit of a Kubernetes ConfigMap."""
MAX_VALUES = 50_000
_LONGEST_NUMBER = 500  # characters
MAX_DEPTH = 60
"""Within Python's recursion limit."""
_LONGEST_SHOWN = 500  # characters
# A template at the beginning of a value, which YAML reads as a mapping.
_UNQUOTED_BRACES = re.compile(r"(?:^|[:\-,\[{])\s*\{\{")
_BRACED = re.compile(r"\{\{.*?\}\}[^},\]#]*")
_KEY = re.compile(r"([\w.-]+)\s*:")
_COMMENT = re.compile(r"[ \t]+(#[^\s#][^\n]*)")
# Characters forbidden in YAML, or parsed as in YAML 1.1.
_REFUSED = re.compile("[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITIES = {f"{sign}.{word}": f"{sign}inf" for sign in ("", "+", "-") for word in ("inf", "Inf", "INF")}
_NAN = frozenset({".nan", ".NaN", ".NAN"})


class TextPosition(Struct, frozen=True):
    line: int
    column: int
    file: str | None = None
    """File of an inserted fragment; None for the document's own."""
    note: str = ""
    """Appended to messages about it."""


class YamlDocument(Struct, frozen=True):
    source: str
    value: Any
    text: str
    marks: Mapping[DocumentPath, TextPosition]
    keys: Mapping[DocumentPath, TextPosition]
    remarks: Mapping[DocumentPath, str]
    """Comments directly after a plain text, which may be meant as its end."""
    written: Mapping[DocumentPath, DocumentPath] = {}
    """Paths in the file, by path after insertions of fragments."""

    def problem(self, path: DocumentPath, message: str, *, at_key: bool = False) -> FileProblem:
        mark = (self.keys if at_key else self.marks).get(path) or self.position(path)
        return FileProblem(mark.file or self.source, mark.line, mark.column, message + mark.note)

    def as_written(self, path: DocumentPath) -> DocumentPath:
        entry = entry_of(path)
        return (*self.written.get(entry, entry), *path[len(entry) :])

    def position(self, path: DocumentPath) -> TextPosition:
        """At `path` or, in an alias, its nearest parent."""
        while path not in self.marks:
            path = path[:-1]
        return self.marks[path]


class _Refused(Exception):
    def __init__(self, message: str, event: Event | None = None) -> None:
        super().__init__(message)
        self.event = event


def decode(raw: bytes, source: str) -> str | FileProblem:
    if len(raw) > MAX_BYTES:
        return FileProblem(source, None, None, f"the file has over {MAX_BYTES} bytes")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        return FileProblem(source, 1, 1, "the file is UTF-16; save it as UTF-8")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8", "replace")
        line, column = _line_column(before, len(before))
        return FileProblem(source, line, column, f"the file is not UTF-8: byte 0x{raw[error.start]:02x}")


def read(
    text: str, source: str, most_characters: int = MAX_BYTES, most_values: int = MAX_VALUES
) -> tuple[list[YamlDocument], list[FileProblem]]:
    """Return the non-empty documents (none if one has a syntax error) and problems."""
    if len(text) > most_characters:
        return [], [FileProblem(source, None, None, f"the file has over {most_characters} characters")]
    if refused := _REFUSED.search(text):
        message = f"character {shown(refused[0])} is not allowed in YAML, except as an escape in double quotes"
        return [], [FileProblem(source, *_line_column(text, refused.start()), message)]
    reader = _Reader(source, text, most_values)
    try:
        documents = list(reader.documents())
    except _Refused as error:
        place = _place(error.event.start_mark, text) if error.event else (1, 1)
        return [], [FileProblem(source, *place, str(error))]
    except yaml.MarkedYAMLError as error:
        is_unclosed = (error.context or "").startswith("while parsing a flow") or _is_unclosed_quote(error)
        mark = error.context_mark if is_unclosed else error.problem_mark
        return [], [FileProblem(source, *_place(mark, text), _message_of(error, text))]
    return documents, reader.problems


class _OpenContainer(Struct):
    value: dict[str, Any] | list[Any]
    path: DocumentPath
    anchor: str | None
    values_before: int  # values counted before it
    key: str | None = None  # None for a refused key
    awaits_value: bool = False


@dataclass
class _Reader:
    source: str
    text: str
    most_values: int
    problems: list[FileProblem] = field(default_factory=list)

    def documents(self) -> Iterator[YamlDocument]:
        # `read` takes all documents before it returns one: a syntax error anywhere refuses the file.
        self._values = 0  # of all documents
        began: int | None = None
        for event in yaml.parse(self.text, Loader=yaml.CSafeLoader):
            if isinstance(event, DocumentStartEvent):
                self._begin_document()
                began = None
            elif isinstance(event, DocumentEndEvent):
                if self._root is not None and began is not None:
                    text = self.text[self.text.rfind("\n", 0, began) + 1 : event.start_mark.index]
                    yield YamlDocument(self.source, self._root, text, self._marks, self._keys, self._remarks)
            elif isinstance(event, NodeEvent):
                began = event.start_mark.index if began is None else began
                self._take_node(event)
            elif isinstance(event, (MappingEndEvent, SequenceEndEvent)):
                self._close_container()

    def _begin_document(self) -> None:
        self._root: Any = None
        self._marks: dict[DocumentPath, TextPosition] = {}
        self._keys: dict[DocumentPath, TextPosition] = {}
        self._remarks: dict[DocumentPath, str] = {}
        self._stack: list[_OpenContainer] = []
        self._anchors: dict[str, tuple[Any, int]] = {}

    def _take_node(self, event: NodeEvent) -> None:
        top = self._stack[-1] if self._stack else None
        if top is not None and isinstance(top.value, dict) and not top.awaits_value:
            self._take_key(top, event)
            return
        path = self._path_of_next(top)
        self._marks[path] = _position(event)
        if isinstance(event, (MappingStartEvent, SequenceStartEvent)):
            self._refuse_tag(event)
            if len(self._stack) >= MAX_DEPTH:
                raise _Refused(f"nested over {MAX_DEPTH} deep", event)
            self._count(1, event)
            container: dict[str, Any] | list[Any] = {} if isinstance(event, MappingStartEvent) else []
            self._stack.append(_OpenContainer(container, path, event.anchor, self._values))
        elif isinstance(event, AliasEvent):
            self._put_value(self._alias(event))
        else:
            assert isinstance(event, ScalarEvent)
            self._count(1, event)
            value = self._scalar(event)
            if not event.style and isinstance(value, str):
                remark = _COMMENT.match(self.text, event.end_mark.index)
                if remark is not None:
                    self._remarks[path] = remark[1]
            if event.anchor is not None:
                self._anchors[event.anchor] = (value, 1)
            self._put_value(value)

    def _path_of_next(self, top: _OpenContainer | None) -> DocumentPath:
        if top is None:
            return ()
        if isinstance(top.value, list):
            return (*top.path, len(top.value))
        return (*top.path, top.key if top.key is not None else "?")

    def _take_key(self, top: _OpenContainer, event: NodeEvent) -> None:
        if not isinstance(event, ScalarEvent):
            index = event.start_mark.index
            if "{{" in (self.text[index - 1 : index + 1], self.text[index : index + 2]):
                raise _Refused(_unquoted(self.text[index - 1 :].partition("\n")[0]), event)
            raise _Refused("a key must be plain text", event)
        self._refuse_tag(event)
        self._count(1, event)
        top.awaits_value = True
        top.key = None
        plain = not event.style
        if plain and event.value == "<<":
            self._problem(event, "merge keys (<<) are not part of YAML 1.2; write the keys out")
        elif plain and not isinstance(self._scalar(event), str):
            self._problem(event, f"the key {event.value or 'null'} must be text; put it in quotes")
        elif event.value in top.value:
            first = self._keys[(*top.path, event.value)]
            self._problem(event, f"the key {shown(event.value)} is written twice; first on line {first.line}")
        else:
            top.key = event.value
            self._keys[(*top.path, event.value)] = _position(event)

    def _put_value(self, value: Any) -> None:
        if not self._stack:
            self._root = value
            return
        top = self._stack[-1]
        if isinstance(top.value, list):
            top.value.append(value)
            return
        if top.key is not None:
            top.value[top.key] = value
        top.awaits_value = False

    def _close_container(self) -> None:
        done = self._stack.pop()
        if done.anchor is not None:
            self._anchors[done.anchor] = (done.value, 1 + self._values - done.values_before)
        self._put_value(done.value)

    def _alias(self, event: AliasEvent) -> Any:
        anchored = self._anchors.get(event.anchor)
        if anchored is None:
            raise _Refused("there is no complete anchor of this name before this alias", event)
        value, size = anchored
        self._count(size, event)
        return value

    def _scalar(self, event: ScalarEvent) -> Any:
        self._refuse_tag(event)
        try:
            return resolve(event.value) if not event.style else event.value
        except ValueError:
            raise _Refused(f"the number {shown(event.value)} is too long", event) from None

    def _refuse_tag(self, event: ScalarEvent | MappingStartEvent | SequenceStartEvent) -> None:
        if event.tag not in (None, "!"):
            raise _Refused("tags are not supported", event)

    def _count(self, values: int, event: Event) -> None:
        self._values += values
        if self._values > self.most_values:
            raise _Refused(f"the file has over {self.most_values} values, aliases counted as often as used", event)

    def _problem(self, event: Event, message: str) -> None:
        mark = _position(event)
        self.problems.append(FileProblem(self.source, mark.line, mark.column, message))


def resolve(text: str) -> Any:
    """Resolve a plain scalar. Raises ValueError for overlong numbers."""
    if len(text) > _LONGEST_NUMBER:
        if any(grammar.fullmatch(text) for grammar in (_INT, _OCTAL, _HEX)):
            raise ValueError("a number is too long")
        return text
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _OCTAL.fullmatch(text):
        return int(text[2:], 8)
    if _HEX.fullmatch(text):
        return int(text[2:], 16)
    if text in _INFINITIES:
        return float(_INFINITIES[text])
    return float("nan") if text in _NAN else text


def _position(event: Event) -> TextPosition:
    return TextPosition(event.start_mark.line + 1, event.start_mark.column + 1)


def _place(mark: Mark, text: str) -> tuple[int, int]:
    """Return line and column."""
    # At the text's end, the parser's line may be too high.
    return (mark.line + 1, mark.column + 1) if mark.index < len(text) else _line_column(text, len(text))


def _line_column(text: str, index: int) -> tuple[int, int]:
    return text.count("\n", 0, index) + 1, index - (text.rfind("\n", 0, index) + 1) + 1


def _unquoted(line: str) -> str:
    found = _BRACED.search(line[:_LONGEST_SHOWN])  # bounded: each brace is searched to its end
    text = found[0].rstrip() if found else "{{ … }}"
    return "text that begins with {{ must be in quotes: " + (f"'{text}'" if '"' in text else f'"{text}"')


def _is_unclosed_quote(error: yaml.MarkedYAMLError) -> bool:
    return error.context == "while scanning a quoted scalar" and "unexpected" in (error.problem or "")


def _message_of(error: yaml.MarkedYAMLError, text: str) -> str:
    if _is_unclosed_quote(error):
        return "the quote that begins here is not closed"
    problem, context, index = error.problem, error.context or "", error.problem_mark.index
    lines = ["", *text.splitlines(), ""]
    begin = _place(error.context_mark, text)[0] if error.context_mark else 1
    line = lines[_place(error.problem_mark, text)[0]]
    suspect = lines[begin] if context.startswith("while parsing a flow") else line
    if _UNQUOTED_BRACES.search(suspect):
        return _unquoted(suspect)
    if opened := {"while parsing a flow sequence": "[", "while parsing a flow mapping": "{"}.get(context):
        comment = "; a '#' after a blank begins a comment" if " #" in lines[begin] else ""
        return f"the '{opened}' is not closed{comment}"
    if context == "while parsing a flow node" and index >= len(text):
        return "a '[' or a '{' is not closed"
    is_past_an_entry = context in ("while parsing a block mapping", "while parsing a block collection")
    if is_past_an_entry and (key := _KEY.match(text, index)):
        return f"{key[1]!r} belongs to no entry: indent it like the keys of the entry that begins on line {begin}"
    if is_past_an_entry and text.startswith("- ", index):
        return "the indentation of this '-' matches no list: indent it like the others of its list"
    if "mapping values are not allowed" in problem:
        return "a ': ' is not allowed here; put the text in quotes, or check the indentation"
    is_no_beginning = "cannot start any token" in problem or (context.endswith("flow node") and text[index] == ":")
    if "tab character" in problem or (is_no_beginning and text[index] == "\t"):
        return "YAML is indented with spaces, not tabs"
    if is_no_beginning:
        return f"text that begins with {text[index]!r} must be in quotes"
    if "invalid Unicode character escape code" in problem:
        return "an escape sequence is half of a surrogate pair, or not a character"
    if (expected := problem.removeprefix("did not find ").removeprefix("expected ")) != problem:
        problem = f"expected {expected}, but found {shown(text[index]) if index < len(text) else 'the end'}"
    return f"{problem} ({context})" if context else problem
