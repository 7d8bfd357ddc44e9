"""``trainmedic agent`` on a node whose ``/sys`` and ``/proc`` for health checks are those of NODE_TREE."""

import os
from pathlib import Path

from trainmedic_agent.health import sysfs
from trainmedic_core.command import main

if __name__ == "__main__":
    sysfs.SYS, sysfs.PROC = (Path(os.environ["NODE_TREE"]) / name for name in ("sys", "proc"))
    main(prog_name="trainmedic")
