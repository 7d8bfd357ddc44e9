"""Subset of JSON Schema with which a job announces the parameters of its own commands.

Keywords that `_check` does not know are refused rather than ignored.
"""

from __future__ import annotations

import difflib
import json
from typing import Any, Iterator, Mapping

MOST_BYTES = 4096  # of a schema as JSON
_NOTES = ("title", "description", "default")  # without effect
_LIMITS = ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems")
_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}


def check(schema: Any) -> None:
    """Raise ValueError or TypeError unless it is a small, supported schema of an object."""
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise ValueError("the schema of parameters must have type: object")
    if len(json.dumps(schema)) > MOST_BYTES:
        raise ValueError(f"the schema is longer than {MOST_BYTES} bytes")
    _check(schema, "schema")


def problems(schema: Mapping[str, Any], value: Any, name: str = "") -> Iterator[str]:
    """Yield what is wrong with a value, by path. The schema was checked."""
    where = f"{name}: " if name else ""
    kind = schema.get("type")
    if kind is not None and not _has_type(value, kind):
        yield f"{where}must be {' or '.join(kind) if isinstance(kind, list) else kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}must be one of {', '.join(map(json.dumps, schema['enum']))}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield from _beyond_limits(schema, value, where, "imum", "")
    elif isinstance(value, str):
        yield from _beyond_limits(schema, len(value), where, "Length", " characters")
    elif isinstance(value, list):
        yield from _beyond_limits(schema, len(value), where, "Items", " items")
        for index, item in enumerate(value):
            yield from problems(schema.get("items", {}), item, f"{name}[{index}]")
    elif isinstance(value, dict):
        yield from _of_members(schema, value, name)


def _of_members(schema: Mapping[str, Any], value: Mapping[str, Any], name: str) -> Iterator[str]:
    known = schema.get("properties", {})
    for missing in schema.get("required", ()):
        if missing not in value:
            yield f"{_path(name, missing)} is missing"
    for member, inner in value.items():
        if member in known:
            yield from problems(known[member], inner, _path(name, member))
        elif schema.get("additionalProperties", False) is False:  # unlike JSON Schema, the default is false
            near = difflib.get_close_matches(member, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            yield f"there is no parameter {_path(name, member)[:64]!r}{hint}"


def _path(owner: str, member: str) -> str:
    return f"{owner}.{member}" if owner else member


def _has_type(value: Any, kind: Any) -> bool:
    if isinstance(kind, list):
        return any(_has_type(value, each) for each in kind)
    if isinstance(value, bool):
        return bool(kind == "boolean")
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _beyond_limits(schema: Mapping[str, Any], value: float, where: str, suffix: str, unit: str) -> Iterator[str]:
    least, most = schema.get(f"min{suffix}"), schema.get(f"max{suffix}")  # such as minimum, maxLength
    if least is not None and not value >= least:  # NaN is not
        yield f"{where}must be at least {least}{unit}"
    if most is not None and not value <= most:
        yield f"{where}must be at most {most}{unit}"


def _check(schema: Any, path: str) -> None:
    if not isinstance(schema, dict):
        raise ValueError(f"{path} must be a mapping")
    for key, value in schema.items():
        if key == "type":
            names = value if isinstance(value, list) else [value]
            wrong = [name for name in names if not isinstance(name, str) or name not in _TYPES]
            if wrong or not names:
                raise ValueError(f"{path}.type: {next(iter(wrong), None)!r} is not one of {', '.join(_TYPES)}")
        elif key == "properties":
            if not isinstance(value, dict):
                raise ValueError(f"{path}.properties must be a mapping")
            for name, inner in value.items():
                _check(inner, f"{path}.properties.{name}")
        elif key == "items":
            _check(value, f"{path}.items")
        elif key == "additionalProperties":
            if not isinstance(value, bool):
                raise ValueError(f"{path}.additionalProperties must be true or false")
        elif key == "required":
            if not isinstance(value, list) or not all(name in schema.get("properties", {}) for name in value):
                raise ValueError(f"{path}.required must list names of its properties")
        elif key == "enum":
            if not isinstance(value, list) or not value:
                raise ValueError(f"{path}.enum must list values")
        elif key in _LIMITS:
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"{path}.{key} must be a number")
        elif key not in _NOTES:
            raise ValueError(f"{path}: the keyword {key!r} is not supported")
