"""``trainmedic agent`` on a node whose processes are those in a directory of the test, which ``PROC`` names."""

import os
from pathlib import Path

from trainmedic_agent import pods
from trainmedic_core.command import main

if __name__ == "__main__":
    pods.PROC = Path(os.environ["PROC"])
    main(prog_name="trainmedic")
