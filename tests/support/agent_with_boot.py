"""``trainmedic agent`` on a machine whose boot ID is in the file that ``BOOT_ID`` names."""

import os
from functools import partial
from pathlib import Path

from trainmedic_agent.repairs.reboot import RebootExecutor
from trainmedic_agent.wiring import agent as wiring
from trainmedic_core.command import main

if __name__ == "__main__":
    boot = partial(Path(os.environ["BOOT_ID"]).read_text, encoding="ascii")
    wiring.RebootExecutor = partial(RebootExecutor, boot=boot)  # type: ignore[assignment,misc]
    main(prog_name="trainmedic")
