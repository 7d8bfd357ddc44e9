"""Sizes in bytes, such as ``500GB`` and ``1.5GiB``."""

from __future__ import annotations

import re

_DECIMAL = {"": 1, "k": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4, "P": 1000**5}
_BINARY = {"Ki": 1024, "Mi": 1024**2, "Gi": 1024**3, "Ti": 1024**4, "Pi": 1024**5}
_UNITS = {f"{prefix}B": size for prefix, size in {**_DECIMAL, "K": 1000, **_BINARY}.items()}
_GRAMMAR = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([A-Za-z]*)")


def parse(value: object) -> int:
    """Return the bytes of a number, or of text with a unit: ``kB`` is 1000, ``KiB`` 1024. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    written = _GRAMMAR.fullmatch(value) if isinstance(value, str) else None
    if written is None or (written[2] or "B") not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write bytes, or a number with its unit: 200MB, 1.5GiB")
    return round(float(written[1]) * _UNITS[written[2] or "B"])
