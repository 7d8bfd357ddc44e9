"""Excluded nodes of an elastic job.

A node's own launcher waits while it is excluded; a launcher of several nodes (srun) restarts on the others.
"""

from __future__ import annotations

from typing import Any, Collection, Mapping

from trainmedic.errors import Rejected
from trainmedic.job.command import JobCommand

EXCLUDE = "launcher.exclude_node"
INCLUDE = "launcher.include_node"


class NodeExclusions:
    """``cannot``: why no node can be excluded, or ""."""

    def __init__(self, node: str, starts_all_nodes: bool, cannot: str = "") -> None:
        self.node = node
        self._cannot = cannot
        self.starts_all_nodes = starts_all_nodes
        self._left_out: dict[str, str] = {}  # node by command
        self._for_load: set[str] = set()  # commands that exclude for load
        self._pending: list[JobCommand] = []
        self.has_changed = False  # since the attempt began

    @property
    def without(self) -> tuple[str, ...]:  # excluded nodes
        return tuple(sorted(set(self._left_out.values())))

    @property
    def without_for_load(self) -> tuple[str, ...]:  # nodes excluded for load alone
        otherwise = {node for by, node in self._left_out.items() if by not in self._for_load}
        return tuple(node for node in self.without if node not in otherwise)

    @property
    def is_left_out(self) -> bool:
        return not self.starts_all_nodes and self.node in self._left_out.values()

    def is_in_force(self, command_id: str) -> bool:
        return command_id in self._left_out

    def exclude(self, command: JobCommand) -> Mapping[str, Any] | None:
        """Handle `EXCLUDE`, answered at once if the attempt runs without the node, else after its end."""
        node = self._node_of(command)
        if self._cannot:
            raise Rejected(self._cannot)
        before = self.without
        self._left_out[command.id] = node
        if command.params.get("for_load") is True:
            self._for_load.add(command.id)
        return self._answered(command, before)

    def include(self, command: JobCommand) -> Mapping[str, Any] | None:
        """Handle `INCLUDE`. An undo reverts its command's exclusion; otherwise all of the node's exclusions end.

        ``for_load`` includes only a node excluded just for load.
        """
        node = self._node_of(command)
        before = self.without
        if command.params.get("for_load") is True and node in before and node not in self.without_for_load:
            raise Rejected("the node is excluded for another reason than load, such as a fault")
        if command.undo_of is not None:
            self._left_out.pop(command.undo_of, None)
        else:
            self._left_out = {by: other for by, other in self._left_out.items() if other != node}
        self._for_load &= self._left_out.keys()
        return self._answered(command, before)

    def answer(self) -> None:
        """Answer the commands that waited for the attempt's end."""
        self.has_changed = False
        pending, self._pending = self._pending, []
        for command in pending:
            command.applied(self._output(command))

    def _answered(self, command: JobCommand, before: Collection[str]) -> Mapping[str, Any] | None:
        # None if the answer follows after the attempt's end.
        if self.without == before and not self.has_changed:
            return self._output(command)
        self.has_changed = True
        self._pending.append(command)
        command.later()
        return None

    def _output(self, command: JobCommand) -> Mapping[str, Any]:
        return {"node": self._node_of(command), "left_out": list(self.without)}

    def _node_of(self, command: JobCommand) -> str:
        node = command.params.get("node")
        if not isinstance(node, str) or not node or node.startswith("-") or any(mark in node for mark in ", /"):
            raise Rejected("node is not a valid node name")
        if not self.starts_all_nodes and node != self.node:
            raise Rejected(f"this launcher starts only the processes of {self.node}")
        return node
