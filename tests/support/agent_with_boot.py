"""``trainmedic agent`` on a machine whose boot ID is in the file that ``BOOT_ID`` names.

It makes a file ``read-PID`` there when it has read it.
"""

import os
from functools import partial
from pathlib import Path

from trainmedic_agent.repairs.reboot import RebootExecutor
from trainmedic_agent.wiring import agent as wiring
from trainmedic_core.command import main


def boot() -> str:
    place = Path(os.environ["BOOT_ID"])
    found = place.read_text(encoding="ascii")
    place.with_name(f"read-{os.getpid()}").touch()
    return found


if __name__ == "__main__":
    wiring.RebootExecutor = partial(RebootExecutor, boot=boot)  # type: ignore[assignment,misc]
    main(prog_name="trainmedic")
