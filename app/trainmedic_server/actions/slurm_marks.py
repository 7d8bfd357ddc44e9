"""Trainmedic's marks in the reasons of Slurm nodes. Those of jobs begin with `PREFIX` too."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection

from trainmedic_server.ports.slurm import SlurmNode

PREFIX = "trainmedic:"
_OWNERS = re.compile(rf"{PREFIX}(?P<runs>[0-9a-zA-Z_-]+(?:,[0-9a-zA-Z_-]+)*)(?: (?P<text>.*))?", re.DOTALL)
_REASON_LIMIT = 200  # characters of the sentence in a node's reason: ``sinfo -R`` shows one line
_REBOOT = re.compile(r"reboot-[0-9a-f]{8}")
BOOTING = frozenset({"REBOOT_REQUESTED", "REBOOT_ISSUED"})  # until the node has come back


def owners_of(text: str) -> tuple[str, ...]:
    """Return the runs named in a node's reason; empty if it is not ours."""
    match = _OWNERS.fullmatch(text)
    return tuple(match["runs"].split(",")) if match else ()


def marked(owners: Collection[str], text: str) -> str:
    """Return a reason of one printable line, which does not end with a quote: scontrol removes it."""
    line = "".join(char if char.isprintable() else " " for char in text)
    return f"{PREFIX}{','.join(owners)} {' '.join(line.split())[:_REASON_LIMIT]}".rstrip("\"'")


def reboot_mark(command_id: str) -> str:
    """Return the word for one command's reboot, which `_REBOOT` finds."""
    return f"reboot-{hashlib.sha256(command_id.encode()).hexdigest()[:8]}"


def is_out_for_reboot(node: SlurmNode) -> bool:
    """Return whether a reboot of ours keeps the node out of service, before or after it."""
    is_ours = bool(owners_of(node.reason)) and _REBOOT.search(node.reason) is not None
    return is_ours and not node.states.isdisjoint({"DOWN", *BOOTING})
