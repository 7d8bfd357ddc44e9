"""Typed inputs of playbooks that people start."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Struct, field
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictFloat, StrictInt, StrictStr

from trainmedic.wire.envelope import write_time
from trainmedic_core import duration
from trainmedic_core.problems import did_you_mean, shown
from trainmedic_server.domain import host_lists

MOST_INPUTS = 50
ANNOTATION = "inputs"  # annotation of the stand-in alert with the inputs as JSON
_LONGEST = 4096  # characters of a text
_MOST_NODES = 1000
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]{0,251}[A-Za-z0-9])?")

InputName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]


def _of_some_type(value: Any) -> Any:
    names = value if isinstance(value, list) else ()
    if isinstance(value, bool) or not isinstance(value, (str, int, float, list)) or not _all_text(names):
        raise ValueError("must be text, a number or a list of names")  # once, not for each type of the union
    return value


def _all_text(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


Value = Annotated[StrictStr | StrictInt | StrictFloat | list[StrictStr], BeforeValidator(_of_some_type)]


class InputType(StrEnum):
    TEXT = "text"
    NUMBER = "number"
    DURATION = "duration"
    TIME = "time"
    NODES = "nodes"
    JOB = "job"


class Input(BaseModel):
    """A value that the person who starts the playbook gives."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: InputType
    default: Value | None = None
    required: bool = False


class ReadInputs(Struct, frozen=True):
    values: Mapping[str, Value | None]
    problems: Sequence[tuple[str, str]] = field(default=())  # as (name, message)

    @property
    def as_annotations(self) -> dict[str, str]:
        return {ANNOTATION: json.dumps(self.values, sort_keys=True)} if self.values else {}


def read(declared: Mapping[str, Input], given: Mapping[str, Value | None], owner: str = "playbook") -> ReadInputs:
    """Check values, and add defaults; None for an absent one. `owner` is a noun for errors."""
    values: dict[str, Value | None] = {}
    problems: list[tuple[str, str]] = []
    for name in given.keys() - declared.keys():
        hint = did_you_mean(name, declared) or (f"; there are {', '.join(declared)}" if declared else "")
        problems.append((name, f"the {owner} has no such input{hint}"))
    for name, spec in declared.items():
        value = given.get(name)
        value = spec.default if value is None else value
        if value is None:
            values[name] = None
            if spec.required:
                wanted = "names of nodes, separated by commas" if spec.type == InputType.NODES else f"a {spec.type}"
                problems.append((name, f"is required; give {wanted}"))
            continue
        try:
            values[name] = read_value(spec.type, value)
        except ValueError as error:
            problems.append((name, str(error)))
    return ReadInputs(values, tuple(sorted(problems)))


def wrong_defaults(declared: Mapping[str, Input]) -> Iterator[tuple[str, str]]:
    """Yield (name, problem) for invalid defaults."""
    for name, spec in declared.items():
        if spec.default is not None:
            if spec.required:
                yield name, "default: a required input has none"
            for _, message in read({name: spec}, {}).problems:
                yield name, f"default: {message}"


def read_value(kind: InputType, value: Value) -> Value:
    """Return the value in its canonical form: durations and times as text. Raises ValueError."""
    match kind:
        case InputType.NUMBER:
            return _number(value)
        case InputType.NODES:
            return _nodes(value)
    if not isinstance(value, str) or not value.strip() or len(value) > _LONGEST or "\0" in value:
        raise ValueError(f"must be text of 1 to {_LONGEST} characters")
    match kind:
        case InputType.DURATION:
            return duration.write(duration.parse(value.strip()))
        case InputType.TIME:
            return write_time(read_time(value.strip()))
        case InputType.JOB if not _NAME.fullmatch(value.strip()):
            raise ValueError(f"{shown(value)} is not the name of a job")
        case InputType.JOB:
            return value.strip()
    return value


def of_annotations(annotations: Mapping[str, str]) -> dict[str, Any]:
    text = annotations.get(ANNOTATION)
    values: dict[str, Any] = json.loads(text) if text else {}
    return values


def _number(value: Value) -> int | float:
    if isinstance(value, str) and len(value) <= 40:  # reading very long ones is slow
        try:
            value = int(value)
        except ValueError:
            with contextlib.suppress(ValueError):
                value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{shown(value)} is not a number, or too large")
    return value


def read_time(text: str) -> datetime:
    """Raises ValueError, also without a zone."""
    try:
        read = datetime.fromisoformat(text)
    except ValueError:
        read = None
    if read is None or read.tzinfo is None:
        raise ValueError(f"{shown(text)} is not a time with its zone, such as 2026-01-31T12:00:00Z")
    return read.astimezone(UTC)


def _nodes(value: Value) -> list[str]:
    if not isinstance(value, (str, list)):
        raise ValueError("must be names of nodes, separated by commas")
    texts = [value] if isinstance(value, str) else value
    if not _all_text(texts):
        raise ValueError("must be names of nodes, separated by commas")
    names = list(dict.fromkeys(name for text in texts for name in host_lists.expand(text)))
    if not 0 < len(names) <= _MOST_NODES:
        raise ValueError(f"must be 1 to {_MOST_NODES} names of nodes, separated by commas")
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{shown(name)} is not the name of a node")
    return names
