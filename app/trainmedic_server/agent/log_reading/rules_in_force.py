"""Which rules an agent applies: the server's, and where no server can be asked the last good ones of the disk.

Rules are taken where the node's notice of them is genuine and they are the ones that it names. Rules that this program
cannot read or compile, and such as are older than those in force, change nothing.
"""

from __future__ import annotations

import logging
from typing import Any

import redis

from trainmedic.errors import TrainmedicError
from trainmedic.wire.findings import LARGEST_RULES, RULES, RulesNotice, notice_of_rules
from trainmedic.wire.signing import Signer
from trainmedic_server.agent.log_reading.log_store import LogStore
from trainmedic_server.agent.log_reading.rule_runner import RuleRunner
from trainmedic_server.errors import JournalUnavailable
from trainmedic_server.logs.rule import RuleSet

log = logging.getLogger(__name__)


class RulesInForce:
    """The rules of one node. One thread asks for new ones."""

    def __init__(self, node: str, store: LogStore, runner: RuleRunner) -> None:
        self._node = node
        self._store = store
        self._runner = runner
        self._now: tuple[Any, bytes] | None = None
        self._refused = ""

    def restore(self) -> None:
        """Put the rules of the disk in force, where there are any. Raises JournalUnavailable."""
        try:
            kept = self._store.rules()
            if kept is not None and self._use(kept[1]):
                self._now = kept
        except ValueError as error:
            log.error("the log rules of the disk cannot be read", extra={"reason": str(error)})

    def look(self, client: redis.Redis, signer: Signer | None) -> None:
        """Ask for new rules. Raises an error of Redis, JournalUnavailable."""
        key = notice_of_rules(self._node)
        value: Any = client.get(key)
        if value is None:
            return  # no server hands out rules, or none has for an hour: those in force stay
        try:
            notice = RulesNotice.decode(value, self._node, signer)
        except ValueError as error:  # BadSignature, EnvelopeError
            self._refuse(f"the notice of log rules {error}")
            return
        if self._now is not None and (notice.is_of(self._now[1]) or notice.at < self._now[0]):
            return
        raw: Any = client.getrange(RULES, 0, LARGEST_RULES)
        if not raw or len(raw) > LARGEST_RULES or not notice.is_of(raw):
            self._refuse("the log rules are not those that the notice names")
            return
        if self._use(raw):
            self._now = (notice.at, raw)
            try:
                self._store.keep_rules(notice.at, raw)
            except JournalUnavailable as error:
                log.warning("the log rules could not be kept", extra={"reason": str(error)})

    def _use(self, raw: bytes) -> bool:
        try:
            rule_set = RuleSet.decode(raw)
            self._runner.use(rule_set)
        except (ValueError, TrainmedicError) as error:
            self._refuse(f"the log rules cannot be used here: {error}")
            return False
        self._refused = ""
        log.info("log rules", extra={"version": rule_set.version, "rules": len(rule_set.rules)})
        if rule_set.left_out:
            log.warning("log rules of a newer server are left out", extra={"rules": list(rule_set.left_out)})
        return True

    def _refuse(self, reason: str) -> None:
        """Say once why rules are not taken."""
        if reason != self._refused:
            self._refused = reason
            log.error("new log rules are not taken; those from before stay", extra={"reason": reason})
