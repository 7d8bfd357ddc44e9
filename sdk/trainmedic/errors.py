"""Errors of this package::

    TrainmedicError
    ├── ConfigurationError      invalid arguments of connect() or share()
    ├── NotAgreed               raised to a handler when the ranks cannot agree
    └── Refusal                 raised by a handler, to answer a command
        ├── Rejected            the command makes no sense here and now
        └── Unsupported         this job cannot carry out such a command

    Interrupted (a BaseException)   ends a training step that hangs; see ``job.interrupt``

A connected job raises nothing into the training loop but a `TrainmedicError`, if a checkpoint was loaded only partly
or is damaged and no other is available.
"""

from __future__ import annotations


class TrainmedicError(Exception):
    """Base class; the text is for humans."""


class ConfigurationError(TrainmedicError):
    """A name, URL, key, rank or port is invalid."""


class NotAgreed(TrainmedicError):
    """The ranks could not agree, because one is gone or silent."""


class Refusal(TrainmedicError):
    """A handler does not carry out its command, for the given reason."""


class Rejected(Refusal):
    """The command makes no sense here and now, such as without an earlier checkpoint."""


class Unsupported(Refusal):
    """This job cannot carry out such a command."""


class Interrupted(BaseException):
    """A training step hangs, and a waiting command can help.

    Not an Exception, so that ``except Exception`` does not swallow it.
    """
