"""``trainmedic-run``, also as ``python -m trainmedic.launch``. Not here: the program itself (``program``)."""

from __future__ import annotations

import signal
import sys
from typing import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is another one under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # To load it takes half a second, in which Ctrl-C is to end it like any other command.
    from trainmedic.launch import program

    return program.main(argv)


if __name__ == "__main__":
    sys.exit(main())
