"""File access for the logs that the policy names."""

from __future__ import annotations

import logging

from trainmedic_agent.log_opening.guarded_files import GuardedFiles
from trainmedic_agent.log_opening.node_files import NamedBy
from trainmedic_agent.log_opening.thread_rights import ThreadRights
from trainmedic_agent.log_reading import kernel_log, pstore
from trainmedic_agent.log_reading.discovery import PODS
from trainmedic_agent.log_reading.log_policy import KernelReading, LogsPolicy

log = logging.getLogger(__name__)


def node_files(policy: LogsPolicy) -> GuardedFiles:
    """Return the policy's log files, opened with users' rights if possible."""
    tops = [*policy.roots, *policy.paths, *(files.path.base for files in policy.files)]
    tops += [pattern.base for pattern in policy.slurm] + ([PODS] if policy.pods else [])
    if policy.kernel is not None:
        tops += pstore.DIRECTORIES
        if kernel_log.choose_reading(policy.kernel) is KernelReading.FILE:
            tops.append(policy.kernel.path.rpartition("/")[0])
    kind = GuardedFiles if policy.kernel is None else KernelFiles
    return kind(tops, switch=thread_rights())


class KernelFiles(GuardedFiles):
    """Files, and `/dev/kmsg`."""

    def open(self, path: str, named_by: NamedBy | None = None) -> int:
        if path == kernel_log.KMSG and named_by is None:
            return kernel_log.open_kmsg_directly(path)
        return super().open(path, named_by)


def thread_rights() -> ThreadRights | None:
    """Return None, which is logged, if unusable here."""
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
