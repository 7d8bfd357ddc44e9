"""Executor of ``disk.clean``.

After a resumption, the output counts only later deletions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from trainmedic_agent.disk import throttle
from trainmedic_agent.disk.cleaner import Cleaner, CleaningRequest
from trainmedic_agent.disk.mounts import NamedFilesystem
from trainmedic_agent.errors import CommandRejected
from trainmedic_agent.executors import AcceptedCommand, listed, refuse_unknown_parameters

_PARAMETERS = ("rules", "until_free_percent", "dry_run", "filesystems")
_MAX_RULES = _MAX_FILESYSTEMS = 100


class DiskCleanExecutor(Struct):
    cleaner: Cleaner
    action: str = "disk.clean"
    queue: str = "disk"
    has_low_priority: bool = False

    def perform(self, accepted: AcceptedCommand) -> Mapping[str, Any]:
        """Return `Cleaner.clean`'s output with ``resumed``. Raises CommandRejected."""
        request = self._request(accepted)
        if not self.has_low_priority:
            # The worker queue's thread does nothing else.
            throttle.take_low_priority()
            self.has_low_priority = True
        output = self.cleaner.clean(request, accepted.is_stopping)
        if not output["filesystems"] and output["stopped"] is None:
            reasons = [reason for rule in output["rules"].values() for reason in rule.get("refused_roots", {}).values()]
            raise CommandRejected(
                f"no root of {listed(request.rules)} can be cleaned: {'; '.join(dict.fromkeys(reasons))}"
            )
        return {**output, "resumed": accepted.resumed}

    def _request(self, accepted: AcceptedCommand) -> CleaningRequest:
        command = accepted.command
        if command.undo_of is not None:
            raise CommandRejected("disk.clean has no undo: deleted files cannot be restored")
        params = command.params
        refuse_unknown_parameters(command, _PARAMETERS)
        return CleaningRequest(
            rules=self._rules(params.get("rules")),
            deadline=accepted.deadline.timestamp(),
            until_free=_percent(params.get("until_free_percent")),
            dry_run=_flag(params.get("dry_run", False)),
            filesystems=named_filesystems(params.get("filesystems", ())),
        )

    def _rules(self, raw: object) -> tuple[str, ...]:
        if not isinstance(raw, list | tuple) or not 0 < len(raw) <= _MAX_RULES:
            raise CommandRejected(f"rules must be a list of 1 to {_MAX_RULES} names of rules")
        names = tuple(str(name) for name in raw)
        rules = self.cleaner.cleaning.rules
        missing = [name for name in names if name not in rules]
        if missing:
            existing = f"it has {listed(sorted(rules))}" if rules else "it has none"
            raise CommandRejected(f"the agent's policy has no cleaning rule {listed(missing)}; {existing}")
        return names


def named_filesystems(raw: object) -> tuple[NamedFilesystem, ...]:
    """Raises CommandRejected."""
    wrong = CommandRejected(
        f"filesystems must be a list of at most {_MAX_FILESYSTEMS} with a mountpoint and a device each"
    )
    if not isinstance(raw, list | tuple) or len(raw) > _MAX_FILESYSTEMS:
        raise wrong
    filesystems = []
    for entry in raw:
        mountpoint, device = (entry.get("mountpoint"), entry.get("device", "")) if isinstance(entry, dict) else ("", "")
        if not isinstance(mountpoint, str) or not mountpoint or not isinstance(device, str):
            raise wrong
        filesystems.append(NamedFilesystem(mountpoint, device))
    return tuple(filesystems)


def _percent(raw: object) -> float | None:
    if raw is None:
        return None
    if isinstance(raw, int | float) and not isinstance(raw, bool) and 0 < raw < 100:
        return float(raw)
    raise CommandRejected("until_free_percent must be a number above 0 and below 100")


def _flag(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    raise CommandRejected("dry_run must be true or false")
