"""The accounts by which actions work on the stand-in: each has what the chart grants for it, and no more.

So every test of an action also tests that its permissions suffice. Used by ``conftest`` and by the tests of
the chart.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from app.adapters.kubernetes_cluster import KubernetesCluster
from tests.kubernetes.api_server import ApiServer, Rule


@contextlib.asynccontextmanager
async def client(
    server: ApiServer, name: str, rules: Sequence[Rule], directory: Path
) -> AsyncIterator[KubernetesCluster]:
    """The cluster, by an account of that name that may do what `rules` say."""
    server.accounts[name] = rules
    path = directory / f"kubeconfig-of-{name}.json"
    path.write_text(json.dumps(server.kubeconfig(name)))
    opened = await KubernetesCluster.opened(path)
    try:
        yield opened
    finally:
        await opened.close()


class Accounts:
    """One account for each action."""

    def __init__(self, server: ApiServer, directory: Path, granted: Callable[[str], Sequence[Rule]]) -> None:
        self._server = server
        self._directory = directory
        self._granted = granted
        self._opened: dict[str, KubernetesCluster] = {}
        self._stack = contextlib.AsyncExitStack()

    async def of(self, action: type[Any]) -> KubernetesCluster:
        if action.name not in self._opened:
            account = client(self._server, action.name, self._granted(action.name), self._directory)
            self._opened[action.name] = await self._stack.enter_async_context(account)
        return self._opened[action.name]

    async def close(self) -> None:
        await self._stack.aclose()
