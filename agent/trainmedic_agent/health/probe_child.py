"""Program that gives up all capabilities and becomes the probe: users may be able to write its environment."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from trainmedic_core import confined_child

_PR_SET_PDEATHSIG = 1


def main() -> int:
    command = sys.argv[1:]
    confined_child.drop_bounding_set()
    try:
        confined_child.drop_capabilities()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.execvp(command[0], command)  # noqa: S606 - the policy names the program
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
