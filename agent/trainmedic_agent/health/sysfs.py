"""Files of ``/sys`` and ``/proc``. The roots are parameters: a container may mount the node's elsewhere."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from trainmedic_agent.health.checks import CheckResults, HealthCheck, at_maximum
from trainmedic_agent.health.checks import unread as not_read

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV)
"""The device lacks the value, perhaps only now: the speed of a link that is down."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_UNKNOWN_WIDTH = 255  # written by the kernel for a link that it cannot read

SYS = Path("/sys")
PROC = Path("/proc")


class NodeRoots(Struct, frozen=True):
    sys: Path
    proc: Path


def text(path: Path) -> str | None:
    """Return None if the device lacks it. Raises OSError if it cannot be read."""
    try:
        return path.read_bytes().decode(errors="backslashreplace").strip()
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise


def number(path: Path, base: int = 10) -> int | None:
    """Like `text`. Raises ValueError for text that is no number."""
    content = text(path)
    return None if content is None else int(content, base)


def entries(directory: Path) -> Iterator[Path]:
    """Yield nothing without the directory."""
    try:
        yield from sorted(directory.iterdir())
    except OSError as error:
        if error.errno not in _ABSENT:
            raise


@contextlib.contextmanager
def unknown_if_unread(results: CheckResults, name: str, part: str) -> Iterator[None]:
    """Turn a failed reading into an unknown check."""
    try:
        yield
    except (OSError, ValueError) as error:
        results.checks.append(not_read(name, part, error))


def pcie_checks(device: Path, part: str) -> Iterator[HealthCheck]:
    """Compare width and speed of a PCI device's link with what device and slot can do. Virtual devices have neither."""
    real = device.resolve()
    for name, prefix in (("width", "x"), ("speed", "GT/s ")):
        of_device, of_slot = (_link_maximum(end / f"max_link_{name}") for end in (real, real.parent))
        present = text(real / f"current_link_{name}")
        if not of_device or present is None:
            continue
        number_now = _first_number(present)
        if number_now > 0:
            yield at_maximum(f"pcie_{name}", part, number_now, min(of_device, of_slot or of_device), prefix)
        else:
            yield not_read(f"pcie_{name}", part, present)


def _link_maximum(path: Path) -> float:
    return _first_number(text(path) or "")


def _first_number(content: str) -> float:
    match = _NUMBER.search(content)
    value = float(match[0]) if match else 0.0
    return 0.0 if value == _UNKNOWN_WIDTH else value
