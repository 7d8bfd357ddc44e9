"""Validation against pydantic models, with plain error texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import islice
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from msgspec import Struct
from pydantic import BaseModel, Tag, ValidationError
from pydantic_core import ErrorDetails

from trainmedic_core import duration
from trainmedic_core.problems import DocumentPath, FileProblem, did_you_mean, path_text, shown
from trainmedic_core.yaml_text import YamlDocument

M = TypeVar("M", bound=BaseModel)

_MESSAGES = {
    "string_type": "must be text; put it in quotes",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must be a mapping (name: value)",
    "model_type": "must be a mapping (name: value)",
    "model_attributes_type": "must be a mapping (name: value)",
    "finite_number": "must be a finite number",
    **dict.fromkeys(
        ("datetime_type", "datetime_parsing", "datetime_from_date_parsing", "timezone_aware"),
        "must be a time with its zone; write 2026-01-31T12:00:00Z, or a template such as {{ alert.startsAt }}",
    ),
}
_STEP_KINDS = ("action", "wait_for", "wait", "wait_until", "approve", "use")
_IDENTIFIER = "may hold letters, digits, and '-', '_', '.' between them; at most 128"


MOST_FAULTS = 101
"""One more than a file reports."""


class ValidationFault(Struct, frozen=True):
    """``type`` is pydantic's."""

    path: DocumentPath
    type: str
    message: str

    @property
    def is_about_a_key(self) -> bool:
        return self.type == "extra_forbidden"


# Called with the path, pydantic's error type and the value; returns None without advice.
Cure = Callable[[DocumentPath, str, Any], str | None]
"""Returns how to write a refused value."""


def validate(
    model: type[M], document: YamlDocument, tagged: Collection[str] = (), cure: Cure | None = None
) -> M | list[FileProblem]:
    """Return a `model`, or problems.

    `tagged`: keys of lists of steps, in whose paths pydantic inserts the step's kind.
    """
    try:
        read = model.model_validate(document.value)
    except ValidationError as error:
        return problems(document, (), faults(error, model, document.value, tagged, cure))
    return problems(document, (), booleans_as_numbers(document.value, read)) or read


def problems(document: YamlDocument, prefix: DocumentPath, faults: Iterable[ValidationFault]) -> list[FileProblem]:
    """Return the distinct faults of the value at `prefix`, with positions."""
    distinct: dict[FileProblem, None] = {}
    for fault in faults:
        path = (*prefix, *fault.path)
        name = path_text(document.as_written(path))
        message = fault.message if fault.is_about_a_key or not name else f"{name}: {fault.message}"
        distinct.setdefault(document.problem(path, message, at_key=fault.is_about_a_key))
    return list(distinct)


def faults(
    error: ValidationError,
    model: type[BaseModel],
    value: Any,
    tagged: Collection[str] = (),
    cure: Cure | None = None,
) -> list[ValidationFault]:
    """Return errors, without those of union branches that do not apply."""
    details = error.errors(include_url=False)[:MOST_FAULTS]
    places = [_place_of(detail, value, tagged) for detail in details]
    numbers = {place.path for detail, place in zip(details, places, strict=True) if detail["type"].startswith("float_")}
    kept: list[ValidationFault] = []
    for detail, place in zip(details, places, strict=True):
        rivals = [other for other in places if other.labels and other.path[: len(place.path)] == place.path]
        if place.labels and not _is_of_meant_branch(place, rivals):
            continue
        if detail["type"].startswith("int_") and place.path in numbers:
            continue  # any number may stand there
        if detail["type"] in ("too_short", "string_too_short") and place.value:
            continue  # pydantic counts only valid entries; the faults of the others are reported
        message = _message_of(detail, model, tagged)
        if cure is not None and (better := cure(place.path, detail["type"], place.value)):
            is_of_key = detail["type"] == "extra_forbidden"
            message = f"unknown key {place.path[-1]!r}; {better}" if is_of_key else f"{message}; {better}"
        kept.append(ValidationFault(place.path, detail["type"], message))
    return kept


def booleans_as_numbers(value: Any, read: Any, path: DocumentPath = ()) -> list[ValidationFault]:
    """Return a fault for each boolean in `value` that pydantic has read as a number (true as 1)."""
    if isinstance(value, bool):
        is_number = isinstance(read, (int, float)) and not isinstance(read, bool)
        return [ValidationFault(path, "float_type", _MESSAGES["float_type"])] if is_number else []
    parts: Iterable[tuple[int | str, Any]] = ()
    if isinstance(read, BaseModel) and isinstance(value, dict):
        parts = ((info.alias or name, getattr(read, name)) for name, info in type(read).model_fields.items())
    elif isinstance(read, dict) and isinstance(value, dict):
        parts = read.items()
    elif isinstance(read, (list, tuple)) and isinstance(value, list):
        parts = enumerate(read)
    return [
        fault
        for part, inner in parts
        if _contains(value, part)
        for fault in booleans_as_numbers(value[part], inner, (*path, part))
    ]


class _Place(Struct, frozen=True):
    """Place of an error, and the union branches tried there."""

    path: DocumentPath
    labels: tuple[str, ...]  # of the branches, outermost first; empty outside of unions
    value: Any


def _place_of(detail: ErrorDetails, value: Any, tagged: Collection[str]) -> _Place:
    # Parts that name no member of the value are labels of union branches.
    loc = detail["loc"][:-1] if detail["type"] == "missing" else detail["loc"]
    path: list[int | str] = []
    labels: list[str] = []
    tag_at = -1
    for part in loc:
        # A step's tag may equal one of its keys, so it is recognised by its position.
        is_step = len(path) >= 2 and isinstance(path[-1], int) and path[-2] in tagged
        if is_step and tag_at != len(path):
            tag_at = len(path)
        elif _contains(value, part):
            value = value[part]
            path.append(part)
        elif part != "[key]":
            labels.append(str(part))
    return _Place(tuple(path), tuple(labels), value)


def _contains(value: Any, part: int | str) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, dict) and part in value


def _is_of_meant_branch(place: _Place, rivals: Sequence[_Place]) -> bool:
    """Return whether the error's branch takes the value's kind, or is the first if none does."""
    kind = _kind_of_value(place.value)
    if kind in [_kind_of_branch(rival.labels[0]) for rival in rivals]:
        return _kind_of_branch(place.labels[0]) == kind
    return place is rivals[0]


def _kind_of_value(value: Any) -> str:
    if isinstance(value, dict):
        return "mapping"
    return "list" if isinstance(value, list) else "scalar"


def _kind_of_branch(label: str) -> str:
    # Labels are pydantic's, such as `tuple[Step, ...]`, `literal['a']`, `str` or a model's name.
    if re.search(r"\b(tuple|list|set|frozenset)\[", label):
        return "list"
    if "enum[" in label or "literal[" in label:
        return "scalar"
    name = re.split(r"[\[\], ]+", label.rstrip("]) "))[-1]
    return "mapping" if name[:1].isupper() or "dict[" in label else "scalar"


def _message_of(detail: ErrorDetails, model: type[BaseModel], tagged: Collection[str]) -> str:
    kind, loc, value = detail["type"], detail["loc"], detail.get("input")
    context = detail.get("ctx", {})
    is_of_step = len(loc) >= 4 and loc[-4] in tagged and loc[-1] in _STEP_KINDS
    if is_of_step and kind in ("missing", "extra_forbidden"):
        return f"a step has exactly one of {', '.join(_STEP_KINDS)}"
    if kind == "missing":
        return f"{loc[-1]!r} is missing"
    if kind == "extra_forbidden":
        return f"unknown key {loc[-1]!r}{_key_suggestion(str(loc[-1]), allowed_keys(model, loc[:-1]))}"
    if kind == "string_type" and isinstance(value, (list, dict)):
        return "must be text"
    if kind in ("enum", "literal_error"):
        allowed = re.findall(r"'([^']*)'", str(context.get("expected", "")))
        hint = did_you_mean(value, allowed) if isinstance(value, str) else ""
        if not allowed:  # no texts
            return f"must be {str(context.get('expected')).lower()}"
        if len(allowed) == 1:
            return f"must be {allowed[0]!r}, not {shown(value)}"
        return f"{shown(value)} is not one of {', '.join(allowed)}{hint}"
    if kind == "greater_than" and context.get("gt") in _NO_TIME:
        return "must be longer than 0s"
    if kind in ("value_error", "assertion_error"):
        return str(context.get("error", detail["msg"]))
    if kind == "string_pattern_mismatch":
        return _of_pattern(value, str(context.get("pattern", "")))
    if kind in ("too_short", "string_too_short"):
        return "must not be empty"
    if kind in ("tuple_type", "list_type") and isinstance(value, dict):
        return f"must be a list{_as_list(loc, value, tagged)}"
    if kind in ("tuple_type", "list_type") and isinstance(value, (str, int)) and loc[-1] not in tagged:
        return f"must be a list: [{value}]"
    if kind in ("int_parsing", "float_parsing") and isinstance(value, str) and (number := _NUMBER.match(value)):
        if value.rstrip().endswith("%") and any("factor" in str(part) for part in loc):
            return f"must be a number; write {float(number[1]) / 100:g}"
        return f"{_MESSAGES[kind]}; write {number[1]}"
    message = _TIMEDELTA.sub(_written_duration, detail["msg"])
    return _MESSAGES.get(kind) or message.replace("Input should be ", "must be ").replace("Value error, ", "")


# Python's text for a limit of an optional duration. Other limits have pydantic's, such as ``1 minute``.
_TIMEDELTA = re.compile(r"datetime\.timedelta\((?:0|(?:days=(\d+))?(?:, )?(?:seconds=(\d+))?)\)")


def _written_duration(match: re.Match[str]) -> str:
    return duration.write(timedelta(days=int(match[1] or 0), seconds=int(match[2] or 0)))


_CHOICES = re.compile(r"\^\((\w+(?:\|\w+)+)\)\$")


def _of_pattern(value: Any, pattern: str) -> str:
    if (choices := _CHOICES.fullmatch(pattern)) is not None:
        allowed = choices[1].split("|")
        return f"{shown(value)} is not one of {', '.join(allowed)}{did_you_mean(str(value), allowed)}"
    described = "{0,126}" in pattern  # `fields.Identifier`
    return f"{shown(value)} {_IDENTIFIER if described else f'does not match {pattern}'}"


_OTHER_WORDS = {  # usual words of other tools, and ours
    "trigger": "on",
    "triggers": "on",
    "name": "playbook",
    "description": "summary",
    "tasks": "steps",
    "if": "when",
    "params": "with",
    "parameters": "with",
    "args": "with",
    "arguments": "with",
}


def _key_suggestion(wrong: str, allowed: Collection[str]) -> str:
    meant = _OTHER_WORDS.get(wrong.lower(), wrong)
    return did_you_mean(meant if meant in allowed else wrong, set(allowed) - {wrong})


_NO_TIME = (timedelta(0), "0 seconds", repr(timedelta(0)))  # as pydantic states the bound of a duration
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*\D{1,8}$")


def _as_list(loc: Sequence[int | str], value: Mapping[Any, Any], tagged: Collection[str]) -> str:
    if loc and loc[-1] == "matchers":
        entries = (f"{name}={json.dumps(str(text), ensure_ascii=False)}" for name, text in islice(value.items(), 3))
        return f": [{', '.join(repr(entry) for entry in entries)}]"
    return "; each entry begins with '- '" if loc and loc[-1] in tagged else ""


def allowed_keys(model: Any, loc: Sequence[int | str]) -> Collection[str]:
    """Return the mapping's keys at `loc` (pydantic's form), if known."""
    candidates = [model]
    for part in loc:
        stepped: list[Any] = []
        for candidate in candidates:
            stepped.extend(_step_into(candidate, part))
        candidates = stepped or candidates
    keys: set[str] = set()
    for candidate in candidates:
        for kind in _models_of(candidate):
            keys.update(info.alias or name for name, info in kind.model_fields.items())
    return keys


def _step_into(annotation: Any, part: int | str) -> Iterator[Any]:
    for branch, tag in _branches(annotation):
        if isinstance(branch, type) and issubclass(branch, BaseModel):
            if part in (tag, branch.__name__):
                yield branch
                continue
            for name, info in branch.model_fields.items():
                if part in (name, info.alias):
                    yield info.annotation if not info.metadata else Annotated[info.annotation, *info.metadata]
            continue
        inner = [each for each in get_args(branch) if each is not Ellipsis]
        if isinstance(part, int) and get_origin(branch) in (tuple, list):
            yield from inner
        elif get_origin(branch) in (dict, Mapping) and len(inner) == 2:
            yield inner[1]


def _branches(annotation: Any, tag: str | None = None) -> Iterator[tuple[Any, str | None]]:
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        own = next((each.tag for each in metadata if isinstance(each, Tag)), tag)
        yield from _branches(inner, own)
    elif get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _branches(member, tag)
    else:
        yield annotation, tag


def _models_of(annotation: Any) -> Iterator[type[BaseModel]]:
    for branch, _ in _branches(annotation):
        if isinstance(branch, type) and issubclass(branch, BaseModel):
            yield branch
