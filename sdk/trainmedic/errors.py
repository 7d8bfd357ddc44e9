"""Every error of this package.

The tree::

    TrainmedicError
    ├── ConfigurationError      connect() or share() was given something it cannot work with
    ├── NotAgreed               raised to a handler when the ranks cannot agree
    └── Refusal                 raised by a handler, to answer a command
        ├── Rejected            the command makes no sense here and now
        └── Unsupported         this job cannot carry out such a command

    Interrupted (a BaseException)   ends a training step that hangs; see ``job.interrupt``

`ConfigurationError` is raised while a job is set up, `NotAgreed` to handlers in jobs of several ranks.
Once a job is connected this package raises nothing into the training loop: when Redis is unreachable, it logs
a line and keeps trying in the background. There is one exception: where a checkpoint was loaded only in
part, or is damaged, and there is none to go back to in its place, a `TrainmedicError` is raised, which ends the
training. (`trainmedic.wire.envelope.EnvelopeError`, a ValueError, is for programs that read or
write the wire format themselves.)
"""

from __future__ import annotations


class TrainmedicError(Exception):
    """Base of the tree; its text is meant for a person."""


class ConfigurationError(TrainmedicError):
    """A name, URL, key, rank or port cannot be used."""


class NotAgreed(TrainmedicError):
    """The ranks could not agree, because one of them is gone or does not answer."""


class Refusal(TrainmedicError):
    """Raised by a handler that does not carry out its command. The text is the reason."""


class Rejected(Refusal):
    """The command makes no sense here and now: no checkpoint from before that time, for instance."""


class Unsupported(Refusal):
    """This job cannot carry out such a command."""


class Interrupted(BaseException):
    """Raised inside a step that hangs, when a command waits that can help it.

    The integration that armed it catches it again. Not an Exception, so that no ``except Exception`` of the
    step swallows it; code that cleans up in ``finally`` works as always.
    """
