"""Log part of ``trainmedic agent check``, imported only if needed."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from typing import Any

from msgspec import Struct, field

from trainmedic.errors import ConfigurationError
from trainmedic_agent.log_opening.node_files import LogRefused, NodeFiles, others_may_rename
from trainmedic_agent.log_opening.rights import UserDatabase
from trainmedic_agent.log_reading import kernel_log
from trainmedic_agent.log_reading.discovery import PODS, Discovery
from trainmedic_agent.log_reading.log_policy import KernelLog, KernelReading, LogsPolicy
from trainmedic_agent.log_reading.scan_units import FoundFile
from trainmedic_agent.log_shipping.ship_policy import ShipPolicy
from trainmedic_agent.settings.agent import AgentSettings
from trainmedic_agent.wiring.agent_files import node_files
from trainmedic_agent.wiring.agent_link import chosen_user


class LogsCheck(Struct):
    values: dict[str, Any]
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def check_logs(policy: LogsPolicy, settings: AgentSettings) -> LogsCheck:
    report = LogsCheck({})
    _check_user(settings, report)
    tops = [*policy.roots, *policy.paths, *(files.path.base for files in policy.files)]
    tops += [pattern.base for pattern in policy.slurm] + ([PODS] if policy.pods else [])
    files = node_files(policy)
    report.values["directories"] = {top: _check_directory(top, files, report) for top in dict.fromkeys(tops)}
    report.warnings += [
        f"users may rename each other's jobs in {root}: set its sticky bit (chmod +t {root})"
        for root in (*policy.roots, *(files.path.base for files in policy.files), *(each.base for each in policy.slurm))
        if _may_be_renamed_in(root)
    ]
    scan = Discovery(policy, settings.node, files=files).scan(known=(), is_stopping=lambda: False)
    report.values["files"] = len(scan.files)
    report.values["refused"] = {reason.value: count for reason, count in sorted(scan.refused.items()) if count}
    for reason, count in report.values["refused"].items():
        report.warnings.append(f"{count} files in log directories are not read: {reason}")
    if scan.is_cut:
        report.warnings.append(
            "a directory has more entries than a scan allows, so logs in it may not be read; remove old files, or "
            "raise max_job_entries"
        )
    unreadable = [file.path for file in scan.files if not _may_open(file, files)]
    if unreadable:
        report.errors.append(
            f"{len(unreadable)} logs may not be read by this user, {unreadable[0]} among them; give the agent's "
            "service their group, or CAP_DAC_READ_SEARCH"
        )
    report.values["kernel"] = None if policy.kernel is None else _check_kernel(policy.kernel, report)
    report.values["ship"] = None if policy.ship is None else _check_ship(policy.ship, report)
    return report


def _check_user(settings: AgentSettings, report: LogsCheck) -> None:
    try:
        user, reason = chosen_user(settings)
    except ConfigurationError as error:
        report.values["user"] = None
        report.errors.append(str(error))
        return
    report.values["user"] = user.uid
    if reason is not None:
        report.warnings.append(
            f"logs would be read under the agent's own user {user.uid}: {reason}. That process could send signals "
            "to the agent, and open its files; name another user with --reader-user, or give the agent CAP_SETUID, "
            "CAP_SETGID and CAP_CHOWN"
        )


def _may_be_renamed_in(path: str) -> bool:
    try:
        facts = os.stat(path, follow_symlinks=False)  # noqa: PTH116
    except OSError:
        return False
    if not stat.S_ISDIR(facts.st_mode) or not others_may_rename(facts.st_mode):
        return False
    return bool(facts.st_mode & stat.S_IWOTH) or UserDatabase().is_shared(facts.st_gid, facts.st_uid)


def _may_open(file: FoundFile, files: NodeFiles) -> bool:
    try:
        os.close(files.open(file.path, file.named_by))
    except (OSError, LogRefused):
        return False
    return True


def _check_directory(path: str, files: NodeFiles, report: LogsCheck) -> str | None:
    try:
        files.listing(path, 0)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            reason = "a symbolic link, or no directory, is on the way; name the real path"
        sentences = report.warnings if isinstance(error, FileNotFoundError) else report.errors
        sentences.append(f"logs in {path} cannot be read: {reason}")
        return reason
    return None


def _check_ship(ship: ShipPolicy, report: LogsCheck) -> str:
    for path in filter(None, (ship.token_file, ship.ca_file)):
        if not os.access(path, os.R_OK):
            report.errors.append(f"lines cannot be shipped: {path} is not there, or may not be read by this user")
    return f"{ship.kind} at {ship.url}"


def _check_kernel(kernel: KernelLog, report: LogsCheck) -> str:
    way = kernel_log.choose_reading(kernel)
    if way is KernelReading.KMSG and not os.access(kernel_log.KMSG, os.R_OK):
        report.errors.append(f"{kernel_log.KMSG} cannot be read: that needs CAP_SYSLOG, and the device")
    if way is KernelReading.JOURNAL and shutil.which("journalctl") is None:
        report.errors.append("the journal cannot be read: there is no journalctl")
    if way is KernelReading.FILE and not os.access(kernel.path, os.R_OK):
        report.errors.append(f"the kernel's log cannot be read: {kernel.path} is not there, or may not be read")
    return way.value
