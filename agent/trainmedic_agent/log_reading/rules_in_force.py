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
            if kept is not None and self._use(kept[1]):
                self._active = kept
        except ValueError as error:
            log.error("cannot read log rules on disk", extra={"reason": str(error)})

    def take(self, at: datetime, raw: bytes) -> None:
        """Activate and store verified rules, unless they are unchanged, older, or cannot be compiled."""
        if self._active is not None and (raw == self._active[1] or at < self._active[0]):
            return
        if self._use(raw):
            self._active = (at, raw)
            try:
                self._store.keep_rules(at, raw)
            except JournalUnavailable as error:
                log.warning("cannot store log rules", extra={"reason": str(error)})

    def _use(self, raw: bytes) -> bool:
        """Return False, which is logged, if they cannot be used."""
        try:
            rule_set = RuleSet.decode(raw)
            self._runner.use(rule_set)
        except (ValueError, TrainmedicError) as error:
            self._refuse(f"the log rules cannot be used here: {error}")
            return False
        self._refused = ""
        log.info("log rules", extra={"version": rule_set.version, "rules": len(rule_set.rules)})
        if rule_set.left_out:
            log.warning("skipping log rules of a newer server", extra={"rules": list(rule_set.left_out)})
        return True

    def _refuse(self, reason: str) -> None:
        if reason != self._refused:
            self._refused = reason
            log.error("rejecting new log rules; keeping the earlier ones", extra={"reason": reason})
