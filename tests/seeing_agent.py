"""``trainmedic agent`` on a node whose processes are those in a directory of the test, which ``PROC`` names."""

import os
from pathlib import Path

from app.agent import pods
from app.cli import main

if __name__ == "__main__":
    pods.PROC = Path(os.environ["PROC"])
    main(prog_name="trainmedic")
