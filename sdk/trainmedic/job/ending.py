"""How a process comes to its end: as it should, or by an error that nobody has caught.

Who calls it: ``server_connection``, when a job is closed. A process that is killed says nothing, and a script that
leaves by ``sys.exit`` ends as it should, as far as can be known here; a launcher knows its exit status.
"""

from __future__ import annotations

import sys


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
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"its process ended by {name}"
