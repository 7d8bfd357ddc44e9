"""Which nodes an elastic job is to do without: the commands by which playbooks leave a node out, and take it back.

A launcher that starts the processes of its own node alone, as beside torchrun on each node, ends them when its node is
left out, and waits. One that starts the processes of several nodes, as above srun, starts them anew on the others. Who
calls it: ``supervisor``, in whose thread the handlers are called.
"""

from __future__ import annotations

from typing import Any, Mapping

from trainmedic.errors import Rejected
from trainmedic.job.command import JobCommand

EXCLUDE = "launcher.exclude_node"
INCLUDE = "launcher.include_node"


class NodeExclusions:
    """The nodes that are left out, each by the commands that want it so."""

    def __init__(self, node: str, starts_all_nodes: bool) -> None:
        self.node = node
        self.starts_all_nodes = starts_all_nodes
        self._left_out: dict[str, str] = {}
        """By the id of the command."""
        self._for_load: set[str] = set()
        """IDs of the commands that excluded a node because the job needs fewer nodes."""
        self._pending: list[JobCommand] = []
        self.has_changed = False
        """Whether what runs has to be ended for it."""

    @property
    def without(self) -> tuple[str, ...]:
        """The nodes that are left out."""
        return tuple(sorted(set(self._left_out.values())))

    @property
    def without_for_load(self) -> tuple[str, ...]:
        """The nodes that are excluded only because the job needs fewer nodes."""
        otherwise = {node for by, node in self._left_out.items() if by not in self._for_load}
        return tuple(node for node in self.without if node not in otherwise)

    @property
    def is_left_out(self) -> bool:
        """Whether this launcher has nothing to start."""
        return not self.starts_all_nodes and self.node in self._left_out.values()

    def is_in_force(self, command_id: str) -> bool:
        return command_id in self._left_out

    def exclude(self, command: JobCommand) -> Mapping[str, Any] | None:
        """The handler of `EXCLUDE`; it answers when what ran has ended."""
        node = self._node_of(command)
        is_new = node not in self._left_out.values()
        self._left_out[command.id] = node
        if command.params.get("for_load") is True:
            self._for_load.add(command.id)
        if not is_new:
            return {"node": node, "left_out": list(self.without)}
        self._change(command)
        return None

    def include(self, command: JobCommand) -> Mapping[str, Any] | None:
        """The handler of `INCLUDE`: of an undo, what its command has left out; else whoever has left the node out.

        With ``for_load`` it takes back only a node that is excluded only for load.
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
        if self.without == before:
            return {"node": node, "left_out": list(before)}
        self._change(command)
        return None

    def answer(self) -> None:
        """What ran has ended, or nothing ran: the change is carried out."""
        self.has_changed = False
        pending, self._pending = self._pending, []
        for command in pending:
            command.applied({"node": self._node_of(command), "left_out": list(self.without)})

    def _change(self, command: JobCommand) -> None:
        self.has_changed = True
        self._pending.append(command)
        command.later()

    def _node_of(self, command: JobCommand) -> str:
        node = command.params.get("node")
        if not isinstance(node, str) or not node or node.startswith("-") or any(mark in node for mark in ", /"):
            raise Rejected("node is not the name of a node")
        if not self.starts_all_nodes and node != self.node:
            raise Rejected(f"this launcher starts the processes of {self.node} alone")
        return node
