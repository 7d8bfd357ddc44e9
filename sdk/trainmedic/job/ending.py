"""How a process comes to its end: as it should, or by an error that nobody has caught.

Who calls it: `trainmedic.Medic`, its records and ``server_connection``, when a job is closed. A process that is killed
says nothing, and a script that leaves by ``sys.exit`` ends as it should, as far as can be known here; a launcher knows
its exit status.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import traceback

log = logging.getLogger("trainmedic")

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_COMMUNICATION = re.compile(
    r"gloo/|\bDist(?:Backend|Network|Store)?Error\b|[NRH]CCL|[nrh]ccl|ProcessGroup|TCPStore|c10d|\bUCC\b|MPI_"
)
_LOSS = re.compile(
    r"(?i)connection (?:\w+ )?(?:closed|reset|refused|aborted)|reset by peer|broken pipe|remote (?:process|peer|error)"
    r"|ncclRemoteError|pair closure|was aborted|timed? ?out|recvValue failed|failed to (?:recv|receive)|socket closed"
)
_SEARCHED = 4000
_LONGEST_CHAIN = 8


def fatal_error() -> BaseException | None:
    """The error that ends the interpreter, where it has printed one in its main thread; else None."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None


def failure(error: BaseException | None) -> str | None:
    """In a sentence, why a job that ends by this error has failed; None where it ends as it should.

    The text of the error stays here, for nobody knows what is in it.
    """
    if error is None or isinstance(error, KeyboardInterrupt):
        return None
    if isinstance(error, SystemExit):
        return None if error.code in (None, 0) else "its process left with an error"
    return f"its process ended by {kind_of(error)}"


def kind_of(error: BaseException) -> str:
    """Such as ``ValueError``, or ``torch.OutOfMemoryError``."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def is_lost_peer(text: str) -> bool:
    """Return whether an error's text states that a rank lost another rank, or that its wait for one timed out.

    Such a rank is a victim. Words of the communication library are required too, because a program can also lose the
    connection to its storage.
    """
    text = text[:_SEARCHED]
    return _COMMUNICATION.search(text) is not None and _LOSS.search(text) is not None


def _is_victims(error: BaseException) -> bool:
    """Return whether the error, or one that caused it, states that a rank lost another one."""
    chain: list[BaseException] = []
    led: BaseException | None = error
    while led is not None and led not in chain and len(chain) < _LONGEST_CHAIN:
        if is_lost_peer("".join(traceback.format_exception_only(type(led), led))):
            return True
        chain.append(led)
        led = led.__cause__ or (None if led.__suppress_context__ else led.__context__)
    return False


def write_error_file(error: BaseException | None) -> None:
    """Leave an error that ends the process for its launcher, in the file that torchrun names in
    TORCHELASTIC_ERROR_FILE.

    With it torchrun's summary has the time of the error and the error itself, by which it tells the rank that failed
    first. The error of a rank that lost another one is not written: torchrun takes the earliest error as the root
    cause, and a rank that was killed, or that called ``sys.exit``, writes none. A file that is there already, as by
    PyTorch's own ``record``, stays.
    """
    path = os.environ.get(ERROR_FILE)
    if not path or error is None or isinstance(error, SystemExit) or failure(error) is None:
        return
    try:
        if _is_victims(error):
            return
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        extra = {"py_callstack": "".join(lines), "timestamp": str(int(time.time()))}
        content = json.dumps({"message": {"message": lines[-1].rstrip("\n"), "extraInfo": extra}})
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "w", encoding="utf-8", errors="replace") as opened:
            opened.write(content)
    except Exception as fault:  # the text of an error is made by the user's code, and the process ends anyway
        if not isinstance(fault, FileExistsError):
            log.warning("the error that ends the process cannot be left for its launcher: %s", fault)
