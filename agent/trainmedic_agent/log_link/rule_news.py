"""The server's log rules, verified with the node's signed notice, but not parsed."""

from __future__ import annotations

import logging
from typing import Any

import redis

from trainmedic.wire.findings import LARGEST_RULES, RULES, RulesNotice, notice_of_rules
from trainmedic.wire.signing import Signer
from trainmedic_agent.log_link.messages import RulesNow

log = logging.getLogger(__name__)


class RuleNews:
    def __init__(self, node: str, signer: Signer | None) -> None:
        self._node = node
        self._signer = signer
        self._known: RulesNotice | None = None  # of the last rules sent to the reader
        self._refused = ""  # why the last rules were rejected

    def forget(self) -> None:
        """Fetch the rules again, for a reader that lacks them."""
        self._known = None

    def fetch_changed(self, client: redis.Redis) -> RulesNow | None:
        """Return the rules if they are valid, changed, and not older than the last. Raises Redis errors."""
        value: Any = client.get(notice_of_rules(self._node))
        if value is None:
            return None  # no server has published rules in the last hour: the reader keeps its own
        try:
            notice = RulesNotice.decode(value, self._node, self._signer)
        except ValueError as error:  # BadSignature, EnvelopeError
            self._refuse(f"the notice of log rules {error}")
            return None
        if self._known is not None and (notice == self._known or notice.at < self._known.at):
            return None
        raw: Any = client.getrange(RULES, 0, LARGEST_RULES)
        if not raw or len(raw) > LARGEST_RULES or not notice.is_of(raw):
            self._refuse("the log rules differ from those in the notice")
            return None
        self._known = notice
        self._refused = ""
        return RulesNow(notice.at, raw)

    def _refuse(self, reason: str) -> None:
        if reason != self._refused:
            self._refused = reason
            log.error("rejecting new log rules; keeping the earlier ones", extra={"reason": reason})
