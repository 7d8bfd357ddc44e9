"""Writer's cache of open runs and nodes, cleared whenever a write may have been rolled back."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta

from trainmedic_server.domain.run import Decision, Run

_REWRITE_NODE_AFTER = timedelta(hours=1)  # The stored time is at most this old. It only decides when a row is pruned.


class WriterCache:
    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        # In these fields, None means that `SqlTransaction` has not read the data yet.
        self._open: dict[tuple[str, str], str] | None = None  # Run IDs by (playbook, target key).
        self._open_ids: dict[str, set[str]] = {}  # By playbook, without members of groups.
        self._acted_since: datetime | None = None
        self._acted: dict[str, datetime] = {}  # Last act on each node since then.
        self._acted_first: datetime | None = None  # Earliest time in `_acted`.
        self.nodes: dict[str, datetime] | None = None  # Last write of each node's row.
        self.playbooks: set[tuple[str, str]] = set()  # Stored (name, version).

    @property
    def open_runs(self) -> dict[tuple[str, str], str] | None:
        return self._open

    def set_open_runs(self, open_runs: dict[tuple[str, str], str], members: Collection[str] = ()) -> None:
        """`members` of groups are not counted."""
        self._open = open_runs
        self._open_ids = {}
        for (playbook, _), run_id in open_runs.items():
            if run_id in members:
                continue
            self._open_ids.setdefault(playbook, set()).add(run_id)

    def count_open(self, playbook: str) -> int:
        return len(self._open_ids.get(playbook, ()))

    def nodes_acted_on_since(self, since: datetime) -> set[str] | None:
        """Return None if the cache does not reach back that far."""
        if self._acted_since is None or since < self._acted_since:
            return None
        if self._acted_first is not None and self._acted_first > since:
            return set(self._acted)
        return {node for node, at in self._acted.items() if at > since}

    def set_acted_on(self, since: datetime, latest: dict[str, datetime]) -> None:
        self._acted_since, self._acted = since, latest
        self._acted_first = min(latest.values(), default=None)

    def touch(self, nodes: Collection[str], at: datetime) -> None:
        if self._acted_since is None or not nodes:
            return
        for node in nodes:
            self._acted[node] = max(at, self._acted.get(node, at))
        self._acted_first = at if self._acted_first is None else min(self._acted_first, at)

    def should_write_node(self, node: str, at: datetime) -> bool:
        """Return whether the row is old or missing, and count it as written."""
        if self.nodes is None:
            return True
        last = self.nodes.get(node)
        if last is not None and at - last < _REWRITE_NODE_AFTER:
            return False
        self.nodes[node] = at
        return True

    def update(self, run: Run) -> None:
        if self._open is not None:
            key = (run.playbook, run.target_key)
            ids = self._open_ids.setdefault(run.playbook, set())
            if run.is_open:
                self._open[key] = run.id
                if run.parent is None:
                    ids.add(run.id)
            else:
                ids.discard(run.id)
                if self._open.get(key) == run.id:
                    del self._open[key]
        if self._acted_since is not None and run.target and run.target.node and not run.is_vouched_for:
            node, latest = run.target.node, self._acted.get(run.target.node)
            if run.decision is Decision.STARTED:
                self.touch([node], run.created_at)
            elif latest == run.created_at:
                self._acted_since = None  # This run may have been the latest one, and no longer counts.
