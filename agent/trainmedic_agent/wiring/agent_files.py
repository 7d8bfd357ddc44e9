"""How the files of a node are opened that its policy lets be read.

Who calls it: ``trainmedic_agent.wiring.agent_reader`` in the process that has the rights, and
``trainmedic_agent.wiring.agent_check_logs``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trainmedic_agent.log_opening.guarded_files import GuardedFiles
from trainmedic_agent.log_opening.node_files import FileFacts, Listing, NamedBy, NodeFiles
from trainmedic_agent.log_opening.thread_rights import ThreadRights
from trainmedic_agent.log_reading import kernel_log, pstore
from trainmedic_agent.log_reading.discovery import PODS
from trainmedic_agent.log_reading.log_policy import KernelReading, LogsPolicy

log = logging.getLogger(__name__)


def node_files(policy: LogsPolicy) -> GuardedFiles:
    """Return the files of this node that the policy lets be read. They are opened with the rights of the users who
    placed or named them, if this process can take these rights, else by a comparison with the files' modes."""
    tops = [*policy.roots, *policy.paths, *(files.path.base for files in policy.files)]
    tops += [pattern.base for pattern in policy.slurm] + ([PODS] if policy.pods else [])
    if policy.kernel is not None:
        tops += pstore.DIRECTORIES
        if kernel_log.way_of(policy.kernel) is KernelReading.FILE:
            tops.append(policy.kernel.path.rpartition("/")[0])
    return GuardedFiles(tops, switch=thread_rights())


class KernelFiles:
    """The files of a policy that lets the kernel's log be read: `/dev/kmsg`, which is a device, and all others.

    Implements `NodeFiles`.
    """

    def __init__(self, files: NodeFiles) -> None:
        self._files = files

    def open(self, path: str, named_by: NamedBy | None = None) -> int:
        if path == kernel_log.KMSG and named_by is None:
            return kernel_log.own_kmsg(path)
        return self._files.open(path, named_by)

    def listing(self, path: str, most: int, named_by: NamedBy | None = None) -> Listing:
        return self._files.listing(path, most, named_by)

    def facts(self, path: str, names: Sequence[str], named_by: NamedBy | None = None) -> list[FileFacts | None]:
        return self._files.facts(path, names, named_by)


def thread_rights() -> ThreadRights | None:
    """Return the way to take users' rights. None if this process cannot, which is logged."""
    try:
        rights = ThreadRights()
    except OSError as error:
        log.warning("cannot open logs with their users' rights; comparing file modes", extra={"reason": str(error)})
        return None
    if not rights.may_be_used():
        log.warning(
            "cannot open logs with their users' rights; comparing file modes",
            extra={"reason": "CAP_SETUID and CAP_SETGID are missing"},
        )
        return None
    return rights
