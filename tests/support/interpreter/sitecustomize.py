"""Set the garbage collector of Python programs that tests start, our own commands excluded: what they import stays.

Python imports this at its start where `programs.PYTHON_PATH` is set. Collections among imported objects, and the last
one, at the exit, took a third of the processor time of a training that imports PyTorch and makes an optimizer.
"""

from __future__ import annotations

import atexit
import gc
import sys

# Our commands set theirs, and tests measure their memory.
if not any(word.startswith("trainmedic") for word in sys.orig_argv[1:4]):
    gc.set_threshold(50_000, 20, 100)
    atexit.register(gc.freeze)  # after all other exit functions: the collection at the exit finds nothing
