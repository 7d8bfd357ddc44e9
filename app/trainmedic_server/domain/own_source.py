"""By which labels alerts are known that Trainmedic itself raises, of what it found and of what it makes of that."""

from __future__ import annotations

SOURCE = "source"
LOG = "log"
"""The `SOURCE` of the alert of a finding."""
DIAGNOSIS = "diagnosis"
"""That of the alert of a verdict, and of `NODE_SUSPECT`."""
NODE_SUSPECT = "NodeSuspect"
