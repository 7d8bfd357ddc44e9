"""The agent's hand for ``disk.clean``: what a command may ask for, checked, and handed to the cleaner.

A command that comes again, ``resumed`` after the agent ended in the middle of it, is simply carried out: the
rules name what may go and the target says when to end, so what is gone already is not deleted twice. Its
output then counts only the second part, and says so. An agent that is told to end stops between two files
and answers with what it did; the rest is left for the next alert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from trainmedic_server.agent.disk import pace
from trainmedic_server.agent.disk.cleaner import Cleaner, Request
from trainmedic_server.agent.executors import AcceptedCommand
from trainmedic_server.errors import CommandRejected

_MARGIN = timedelta(seconds=5)
"""Before a command expires its answer must be back at the server; of a short command it is a tenth."""
_KNOWN = ("rules", "until_free_percent", "dry_run")
_MOST_RULES = 100


class DiskClean:
    """Frees disk space by the rules of the policy."""

    action = "disk.clean"
    queue = "disk"

    def __init__(self, cleaner: Cleaner) -> None:
        self._cleaner = cleaner
        self._is_gentle = False

    def perform(self, order: AcceptedCommand) -> Mapping[str, Any]:
        """The output is that of `Cleaner.clean`, with ``resumed``. Raises CommandRejected."""
        request = self._request(order)
        if not self._is_gentle:
            # The lane is one thread, and cleaning is all that it does.
            pace.take_low_priority()
            self._is_gentle = True
        output = self._cleaner.clean(request, order.is_stopping)
        if not output["filesystems"] and output["stopped"] is None:
            reasons = [reason for rule in output["rules"].values() for reason in rule.get("refused_roots", {}).values()]
            raise CommandRejected(
                f"no root of {_listed(request.rules)} can be cleaned: {'; '.join(dict.fromkeys(reasons))}"
            )
        return {**output, "resumed": order.resumed}

    def _request(self, order: AcceptedCommand) -> Request:
        command = order.command
        if command.undo_of is not None:
            raise CommandRejected("what disk.clean has deleted cannot be brought back, so it has no undo")
        params = command.params
        unknown = [name for name in params if name not in _KNOWN]
        if unknown:
            raise CommandRejected(f"disk.clean does not know {_listed(unknown)}; it takes {_listed(_KNOWN)}")
        span = command.expires_at - command.issued_at
        return Request(
            rules=self._rules(params.get("rules")),
            deadline=(command.expires_at - min(_MARGIN, span / 10)).timestamp(),
            until_free=_percent(params.get("until_free_percent")),
            dry_run=_flag(params.get("dry_run", False)),
        )

    def _rules(self, raw: object) -> tuple[str, ...]:
        if not isinstance(raw, list | tuple) or not 0 < len(raw) <= _MOST_RULES:
            raise CommandRejected(f"rules must be a list of 1 to {_MOST_RULES} names of rules")
        names = tuple(str(name) for name in raw)
        known = self._cleaner.cleaning.rules
        missing = [name for name in names if name not in known]
        if missing:
            has = f"it has {_listed(sorted(known))}" if known else "it has none"
            raise CommandRejected(f"the agent's policy has no cleaning rule {_listed(missing)}; {has}")
        return names


def _percent(raw: object) -> float | None:
    if raw is None:
        return None
    if isinstance(raw, int | float) and not isinstance(raw, bool) and 0 < raw < 100:
        return float(raw)
    raise CommandRejected("until_free_percent must be a number above 0 and below 100")


def _flag(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    raise CommandRejected("dry_run must be true or false")


def _listed(names: Sequence[object]) -> str:
    return ", ".join(repr(name)[:130] for name in names[:20])
