"""Executor of ``logs.read`` without logs in the policy, which loads no log reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from trainmedic_agent.errors import CommandRejected
from trainmedic_agent.executors import AcceptedCommand
from trainmedic_logs.domain.log_search import READ


class NoLogsExecutor(Struct, frozen=True):
    action: str = READ
    queue: str = "facts"

    def perform(self, accepted: AcceptedCommand) -> Mapping[str, Any]:
        raise CommandRejected("this node's policy has no logs part: its agent reads none")
