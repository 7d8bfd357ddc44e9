"""By which labels alerts are known that Trainmedic itself raises, of what it found and of what it makes of that."""

from __future__ import annotations

from collections.abc import Mapping

SOURCE = "source"
LOG = "log"
"""The `SOURCE` of the alert of a finding."""
DIAGNOSIS = "diagnosis"
"""That of the alert of a verdict, and of `NODE_SUSPECT`."""
NODE_SUSPECT = "NodeSuspect"


def is_own(labels: Mapping[str, str]) -> bool:
    """Return whether these are the labels of one of Trainmedic's own alerts. The delivery must have been checked."""
    return labels.get(SOURCE) in (LOG, DIAGNOSIS)
