"""Log rules for agents under one key, with a signed notice for each node, written on changes and periodically.

An agent that reads none keeps its rules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from datetime import datetime

from redis.asyncio import Redis

from trainmedic.wire import findings as wire
from trainmedic.wire.signing import Signer
from trainmedic_logs.lines.rule import RuleSet
from trainmedic_server import telemetry
from trainmedic_server.adapters.redis_connection import RedisOutage, open_client, tried_again
from trainmedic_server.ports.fence import Fence, no_fence
from trainmedic_server.ports.outside import Clock

log = telemetry.logger(__name__)

LOOK_SECONDS = 1.0
AGAIN_SECONDS = 60.0  # Unchanged rules and notices are written again after this: notices expire, Redis may lose both.
_NODES_PER_PIPELINE = 500


class RedisLogRules:
    def __init__(
        self,
        url: str,
        rules: Callable[[], RuleSet],
        nodes: Callable[[], Collection[str]],
        clock: Clock,
        metrics: telemetry.Metrics,
        signer: Signer | None = None,
        fence: Fence = no_fence,
    ) -> None:
        self._client: Redis = open_client(url)
        self._rules = rules
        self._nodes = nodes
        self._clock = clock
        self._metrics = metrics
        self._signer = signer
        self._fence = fence
        self._outage = RedisOutage("handing out log rules", url, metrics.bus_errors)
        self._rule_set: RuleSet | None = None
        self._raw = b""
        self._since: datetime = clock.now()  # When these rules became the current ones.
        self._written_at = float("-inf")  # By the event loop's clock.
        self._notified: set[str] = set()  # Nodes with a notice of the last writing.

    async def run(self) -> None:
        while True:
            messages = "not publishing log rules: not the leader", "publishing log rules failed; trying again"
            # Distributed rules stay valid.
            async with tried_again(log, self._outage, self._metrics, "log rules", *messages):
                await self.publish()
                await asyncio.sleep(LOOK_SECONDS)

    async def close(self) -> None:
        await self._client.aclose()

    async def publish(self) -> None:
        self._fence()
        rule_set, now = self._rules(), asyncio.get_running_loop().time()
        if rule_set is not self._rule_set:
            raw = await asyncio.to_thread(rule_set.encode)
            if raw != self._raw:
                self._raw, self._since, self._written_at = raw, self._clock.now(), float("-inf")
                if len(raw) > wire.LARGEST_RULES:
                    log.error("log rules are too large to publish", bytes=len(raw), most=wire.LARGEST_RULES)
            self._rule_set = rule_set
        if len(self._raw) > wire.LARGEST_RULES:
            return
        if now - self._written_at >= AGAIN_SECONDS:
            await self._client.set(wire.RULES, self._raw)
            self._notified.clear()
            self._written_at = now
        await self._notify(sorted(set(self._nodes()) - self._notified))
        self._outage.end()

    async def _notify(self, nodes: list[str]) -> None:
        notice = wire.RulesNotice.of(self._raw, self._since)
        for start in range(0, len(nodes), _NODES_PER_PIPELINE):
            some = nodes[start : start + _NODES_PER_PIPELINE]
            pipeline = self._client.pipeline(transaction=False)
            for node in some:
                value = notice.encode(node, self._signer)
                pipeline.set(wire.notice_of_rules(node), value, ex=wire.NOTICE_SECONDS)
            await pipeline.execute()
            self._notified.update(some)
