"""Errors of this package::

    TrainmedicError
    ├── ConfigurationError
    ├── NotAgreed               raised to a handler when the ranks cannot agree
    └── Refusal                 raised by a handler, to answer a command
        ├── Rejected
        └── Unsupported

    Interrupted (a BaseException)   ends a training step that hangs; see ``job.interrupt``

Otherwise a connected job raises only a `TrainmedicError` into the training loop, if a checkpoint was loaded only partly
or is damaged and no other is available.
"""

from __future__ import annotations


class TrainmedicError(Exception):
    """Base class; the text is for humans."""


_MOST_CAUSES = 8


def described(error: BaseException) -> str:
    """Return ``Type: text``. Without a text, continue with the causes, up to the first that has one."""
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(parts) < _MOST_CAUSES:
        parts.append(type(cause).__name__)
        if text := text_of(cause):
            return ": ".join((*parts, text))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return ": ".join(parts)


def text_of(error: BaseException) -> str:
    """Return "" if the error has no text, or its `str` fails."""
    try:
        return str(error).strip()
    except Exception:  # the user's code makes the text
        return ""


def is_explained(error: BaseException) -> bool:
    """Return whether a log needs no traceback: a file's error, or our own without another cause."""
    cause = error.__cause__
    return isinstance(error, (OSError, TrainmedicError)) and (cause is None or is_explained(cause))


class ConfigurationError(TrainmedicError):
    """A name, URL, key, rank or port is invalid."""


class NotAgreed(TrainmedicError):
    """The ranks could not agree: one is gone or silent, or rank 0 has failed."""


class Refusal(TrainmedicError):
    """A handler does not carry out its command, for the given reason."""


class Rejected(Refusal):
    """The command makes no sense here and now, such as without an earlier checkpoint."""


class Unsupported(Refusal):
    """This job cannot carry out such a command."""


class Interrupted(BaseException):
    """End of a hanging step. Not an Exception, so that ``except Exception`` does not swallow it."""
