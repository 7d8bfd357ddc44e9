"""End of a process: normal, or by an uncaught error."""

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
_LOST_CONNECTION = re.compile(
    r"(?i)connection (?:\w+ )?(?:closed|reset|refused|aborted)|reset by peer|broken pipe|remote (?:process|peer|error)"
    r"|ncclRemoteError|pair closure|was aborted|timed? ?out|recvValue failed|failed to (?:recv|receive)|socket closed"
)
_SEARCHED = 4000  # characters
_LONGEST_CHAIN = 8  # an error and its causes


def fatal_error() -> BaseException | None:
    """Return the uncaught error that Python has printed, or None."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None


def failure(error: BaseException | None) -> str | None:
    """Return why the job failed; None for a normal end or Ctrl-C. The error's text may hold secrets and is omitted."""
    if error is None or isinstance(error, KeyboardInterrupt):
        return None
    if isinstance(error, SystemExit):
        return None if error.code in (None, 0) else "its process exited with an error"
    return f"its process ended by {kind_of(error)}"


def kind_of(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def is_lost_peer(text: str) -> bool:
    """Return whether an error's text states a lost rank, or a timeout in waiting for one.

    It needs the communication library's words, because storage connections can also be lost.
    """
    text = text[:_SEARCHED]
    return _COMMUNICATION.search(text) is not None and _LOST_CONNECTION.search(text) is not None


def _has_lost_peer(error: BaseException) -> bool:
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain and len(chain) < _LONGEST_CHAIN:
        if is_lost_peer("".join(traceback.format_exception_only(type(link), link))):
            return True
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


def write_error_file(error: BaseException | None) -> None:
    """Write the ending error to TORCHELASTIC_ERROR_FILE, unless it exists.

    torchrun takes the earliest as the root cause, so ranks that lost another write none.
    """
    path = os.environ.get(ERROR_FILE)
    # Like torchrun's own `record`, none for SystemExit.
    if not path or error is None or isinstance(error, SystemExit) or failure(error) is None:
        return
    try:
        if _has_lost_peer(error):
            return
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        extra = {"py_callstack": "".join(lines), "timestamp": str(int(time.time()))}
        content = json.dumps({"message": {"message": lines[-1].rstrip("\n"), "extraInfo": extra}})
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "w", encoding="utf-8", errors="replace") as opened:
            opened.write(content)
    except Exception as fault:  # the user's code makes the error's text, and the process ends anyway
        if not isinstance(fault, FileExistsError):
            is_explained = isinstance(fault, OSError)
            log.warning("cannot write the error file for the launcher: %s", fault, exc_info=not is_explained)
