"""Findings as nodes tell them, and rules that they are of."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from msgspec.structs import replace

from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.domain.finding import CauseClass, Excerpt, Finding, Origin, Role
from trainmedic_logs.domain.finding_codec import FindingUpdate
from trainmedic_logs.lines.rule import Confirmation, LogRule, RuleAlert, RuleSet

GPU = "GPU-5f3a0c11-9f41-4c1c-8a52-0a2b3c4d5e6f"
SUSPECT = Confirmation(timedelta(minutes=10), ("gpu-xid", "NodeDown"))
RULES = RuleSet(
    (
        LogRule(
            "gpu-xid",
            ("kernel",),
            Role.ROOT,
            CauseClass.GPU,
            TargetKind.GPU,
            until="boot",
            alert=RuleAlert(
                "GPUXidLogged",
                severity="critical",
                component="gpu",
                labels={"xid": "{{ fields.xid }}", "node": "{{ fields.xid }}"},
                summary="GPU {{ target.gpu }} on {{ target.node }} reported XID {{ fields.xid }}",
            ),
        ),
        LogRule("cuda-oom", ("training",), Role.ROOT, CauseClass.GPU_MEMORY, until="attempt",
                alert=RuleAlert("TrainingOutOfMemory", summary="{{ finding.count }} times")),
        LogRule("loader", ("training",), Role.ROOT, CauseClass.DATA, alert=RuleAlert("LoaderSlow", confirm=SUSPECT)),
        LogRule("nccl-timeout", ("training",), Role.CASCADE, CauseClass.HANG),
        LogRule("nfs-away", ("kernel",), Role.ROOT, CauseClass.STORAGE, TargetKind.NODE, until="ends",
                alert=RuleAlert("StorageAway", severity="critical", component="storage")),
    )
)  # fmt: skip
_BY_NAME = RULES.by_name


def of_kernel(rule: str, node: str, at: datetime, gpu: str | None = None, **members: Any) -> Finding:
    """What a rule has found in the kernel's log of a node."""
    target = Target(TargetKind.NODE, node) if gpu is None else Target(TargetKind.GPU, node, gpu)
    return _finding(rule, Origin("kernel", node, stream="/dev/kmsg"), target, at, **members)


def of_training(rule: str, node: str, job: str, rank: int, at: datetime, **members: Any) -> Finding:
    """What a rule has found in what a rank of a job has printed."""
    origin = Origin("training", node, job, 1, rank, stream=f"/logs/{job}/rank-{rank}")
    return _finding(rule, origin, Target(TargetKind.JOB, job=job), at, ranks=frozenset({rank}), **members)


def _finding(rule: str, origin: Origin, target: Target, at: datetime, **members: Any) -> Finding:
    finding = Finding(
        id=f"{origin.stream}:{rule}",
        rule=rule,
        role=_BY_NAME[rule].role if rule in _BY_NAME else Role.ROOT,
        cause=_BY_NAME[rule].cause if rule in _BY_NAME else CauseClass.UNKNOWN,
        target=target,
        origin=origin,
        first_at=at,
        last_at=at,
        line=f"a line of {rule}",
    )
    return replace(finding, **members)


def told(finding: Finding, number: int = 1, lines: Sequence[str] = (), **members: Any) -> FindingUpdate:
    """What the finding's node says of it; of the lines the one in the middle is the finding's."""
    excerpt = Excerpt(tuple(lines), len(lines) // 2) if lines else None
    return FindingUpdate(finding.origin.node, "agent-1", number, finding, excerpt, **members)
