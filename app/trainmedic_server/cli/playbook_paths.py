"""Where the playbooks are that a command works on. Who uses it: ``playbook`` and ``explain``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def playbook_roots(paths: Sequence[Path]) -> list[Path]:
    """The paths on the command line, else those of the setting."""
    if paths:
        return list(paths)
    setting = os.environ.get("TRAINMEDIC_PLAYBOOKS") or "playbooks"
    return [Path(part).expanduser() for part in setting.split(os.pathsep) if part]
