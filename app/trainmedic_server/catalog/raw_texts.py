"""The texts in a raw document, and which faults of it templates could still mend. Who calls it: ``compiler``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainmedic_core import model_errors
from trainmedic_core.problems import DocumentPath


def texts(value: Any, path: DocumentPath) -> Iterator[tuple[DocumentPath, str]]:
    """Yield each text in `value`, at any depth, with its path, which begins with `path`."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from texts(each, (*path, key))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from texts(each, (*path, index))
    elif isinstance(value, str):
        yield path, value


def is_sure(fault: model_errors.ValidationFault, templates: list[tuple[str | int, ...]]) -> bool:
    """Return whether a fault of the raw parameters will still be one when the templates are rendered."""
    if fault.type in ("missing", "extra_forbidden"):
        return True
    return not any(
        fault.path[: len(template)] == template or template[: len(fault.path)] == fault.path for template in templates
    )
