"""Used memory, connections and other servers of Redis."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Mapping
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from trainmedic_core.problems import shown
from trainmedic_server import telemetry
from trainmedic_server.adapters.redis_connection import FAULTS, open_client
from trainmedic_server.errors import ConfigurationError

LOOK_SECONDS = 30.0
NEARLY_FULL = 0.9
_MB = 1_000_000
_ASK_SECONDS = 1.0
# Key in which each leader writes its name. Two names in turn are two servers that take each other's replies.
_SERVER = "trainmedic:server"
_LONGEST_NAME = 200

log = telemetry.logger(__name__)


async def check_is_no_cluster(url: str) -> None:
    client = open_client(url)
    try:
        async with asyncio.timeout(_ASK_SECONDS):
            info = await client.info("cluster")
    except FAULTS:  # unavailable, or the user lacks the permission
        return
    finally:
        await client.aclose()
    if info.get("cluster_enabled"):
        raise ConfigurationError(
            "this Redis is part of a Redis Cluster, which is not supported: use a single Redis, or one "
            "that fails over by Sentinels (redis+sentinel://)"
        )


class RedisCapacity:
    def __init__(self, url: str, metrics: telemetry.Metrics, caveat: str = "") -> None:
        self._client: Redis = open_client(url)
        self._share = metrics.redis_used_share
        self._loop_errors = metrics.loop_errors
        self._caveat = caveat
        self._warnings: Mapping[str, str] = {}
        # The last part distinguishes containers with equal host names and process IDs.
        self._own = f"host {socket.gethostname()}, process {os.getpid()}, {secrets.token_hex(4)}"
        self._is_announced = False
        self._other_server = ""  # a warning
        self._others_in_a_row = 0  # looks; a replaced leader is seen once

    def caveat(self) -> str:
        # Shown by `status`; empty for none.
        return "; ".join(filter(None, (self._caveat, *self._warnings.values(), self._other_server)))

    async def watch(self) -> None:
        try:
            while True:
                try:
                    await self.look()
                    await self.look_for_other_servers()
                except FAULTS as error:
                    log.debug("cannot read Redis capacity", error=type(error).__name__)
                except Exception:  # A connection can fail in ways for which redis-py has no error.
                    self._loop_errors.labels(loop="capacity").inc()
                    log.exception("reading Redis capacity failed; trying again")
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            await self._client.aclose()

    async def look(self) -> None:
        try:
            info = dict(await self._client.info("clients")) | dict(await self._client.info("memory"))
        except ResponseError:  # The user lacks the permission.
            return
        if "maxclients" not in info:  # older than Redis 7
            info |= await self._setting("maxclients")
        shares, warnings = judged(info)
        for resource, share in shares.items():
            self._share.labels(resource).set(share)
        for resource, warning in warnings.items():
            if resource not in self._warnings:
                log.warning("Redis may not be large enough", reason=warning)
        self._warnings = warnings

    async def look_for_other_servers(self) -> None:
        try:
            found = await self._client.get(_SERVER)
            await self._client.set(_SERVER, self._own)
        except ResponseError:  # The user lacks the permission.
            return
        name = found.decode(errors="replace") if isinstance(found, bytes) else None
        is_other = self._is_announced and name is not None and name != self._own
        self._is_announced = True
        self._others_in_a_row = self._others_in_a_row + 1 if is_other else 0
        if self._others_in_a_row < 2:
            self._other_server = ""
            return
        if not self._other_server:
            log.warning("another server uses this Redis", server=shown(name, _LONGEST_NAME))
        self._other_server = (
            f"another server uses it ({shown(name, _LONGEST_NAME)}): each takes replies to the other's commands, which "
            "then end as unanswered, so give each server its own Redis, or let them share one database"
        )

    async def _setting(self, name: str) -> dict[str, Any]:
        try:
            answer: Any = await self._client.config_get(name)
            return dict(answer)
        except ResponseError:
            return {}


def judged(info: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Return used shares, 0 to 1, and warnings, by resource."""
    shares: dict[str, float] = {}
    warnings: dict[str, str] = {}
    clients, most = int(info.get("connected_clients", 0)), int(info.get("maxclients", 0))
    if most:
        shares["clients"] = clients / most
        if clients >= NEARLY_FULL * most:
            warnings["clients"] = (
                f"it has {clients} clients of at most {most}: soon no further agents and jobs can connect, "
                "so raise its maxclients, and its limit of open files"
            )
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if limit:
        shares["memory"] = used / limit
        if used >= NEARLY_FULL * limit:
            warnings["memory"] = (
                f"it uses {used / _MB:.0f} MB of a maxmemory of {limit / _MB:.0f} MB: when it is full, no command "
                "is accepted and agents count as missing, so raise it"
            )
        if policy != "noeviction":
            warnings["policy"] = (
                f"its maxmemory-policy is {policy}: when it is full it silently drops commands "
                "and the jobs' records of them, so set noeviction"
            )
    return shares, warnings
