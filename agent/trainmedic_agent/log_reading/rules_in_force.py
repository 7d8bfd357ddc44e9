"""The reader's active rules: the server's, or the last valid ones on disk."""

from __future__ import annotations

import logging
from datetime import datetime

from trainmedic.errors import TrainmedicError
from trainmedic_agent.errors import JournalUnavailable
from trainmedic_agent.log_reading.log_store import LogStore
from trainmedic_agent.log_reading.rule_runner import RuleRunner
from trainmedic_logs.lines.rule import RuleSet

log = logging.getLogger(__name__)


class RulesInForce:
    """Not thread-safe."""

    def __init__(self, store: LogStore, runner: RuleRunner) -> None:
        self._store = store
        self._runner = runner
        self._active: tuple[datetime, bytes] | None = None  # time and text of the rules, as published
        self._refused = ""  # why the last rules were rejected

    def restore(self) -> None:
        """Raises JournalUnavailable."""
        try:
            kept = self._store.rules()
            problem = self._use(kept[1]) if kept is not None else ""
        except ValueError as error:
            kept, problem = None, str(error)
        if problem:
            log.error("cannot read log rules on disk", extra={"reason": problem})
        else:
            self._active = kept

    def take(self, at: datetime, raw: bytes) -> None:
        """Activate and store verified rules, unless they are older or cannot be compiled."""
        if self._active is not None and (at < self._active[0] or (at, raw) == self._active):
            return
        if self._active is None or raw != self._active[1]:
            problem = self._use(raw)
            if problem:
                self._refuse(problem)
                return
        self._refused = ""
        self._active = (at, raw)
        try:
            self._store.keep_rules(at, raw)
        except JournalUnavailable as error:
            log.warning("cannot store log rules", extra={"reason": str(error)})

    def _use(self, raw: bytes) -> str:
        """Activate rules; return why they cannot be used, or ""."""
        try:
            rule_set = RuleSet.decode(raw)
            self._runner.use(rule_set)
        except (ValueError, TrainmedicError) as error:
            return f"the log rules cannot be used here: {error}"
        log.info("log rules", extra={"version": rule_set.version, "rules": len(rule_set.rules)})
        if rule_set.left_out:
            log.warning("skipping log rules of a newer server", extra={"rules": list(rule_set.left_out)})
        return ""

    def _refuse(self, reason: str) -> None:
        if reason != self._refused:
            self._refused = reason
            log.error("rejecting new log rules; keeping the earlier ones", extra={"reason": reason})
