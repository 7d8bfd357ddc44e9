"""Start of ``trainmedic-run``."""

from __future__ import annotations

import signal
import sys
from typing import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as in a script's background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Imported late: it takes half a second, in which Ctrl-C must end the program.
    from trainmedic.launch import program

    return program.main(argv)


if __name__ == "__main__":
    sys.exit(main())
