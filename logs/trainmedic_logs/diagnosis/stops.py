"""Attributions of ends that a user or scheduler caused."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

from trainmedic_logs.diagnosis.attribution import Attribution, EvidenceSource, evidence_of, moment_of
from trainmedic_logs.diagnosis.evidence_sources import MEMORY_FULL, TRAINING_PROCESS
from trainmedic_logs.diagnosis.facts import Facts
from trainmedic_logs.diagnosis.verdict import Confidence
from trainmedic_logs.diagnosis.window import TRUSTED_SOURCES, Relevant
from trainmedic_logs.domain.finding import CauseClass, Finding, Role

_BY_USER = re.compile(
    r"KeyboardInterrupt|Received (?:1|2|SIGHUP|SIGINT) death signal|got signal: (?:1|2)\b|CANCELLED AT"
)
_BY_SIGNAL = re.compile(r"death signal|got signal: ")


def on_purpose(facts: Facts, relevant: Relevant) -> Iterator[Attribution]:
    """Yield the requested end, if nothing had failed before."""
    requests = [(finding, level) for finding in relevant.stopped if (level := _confidence_of(finding)) is not None]
    requests.sort(key=lambda request: list(Confidence).index(request[1]))  # the surest first
    others = [cascade for cascade in relevant.cascades if cascade.cause is not CauseClass.UNKNOWN]
    if not requests or relevant.roots or relevant.trusted or others:
        return
    leading, confidence = requests[0]
    if _has_failed(facts, confidence):
        return
    yield Attribution(
        EvidenceSource.PURPOSE,
        CauseClass.PREEMPTION,
        confidence,
        tuple(
            evidence_of(finding, "a user or scheduler ended it, and nothing had failed before")
            for finding, _ in requests[:4]
        ),
        moment=moment_of(leading),
        fingerprint=f"{CauseClass.PREEMPTION}:{leading.rule}",
    )


def scheduler_kills(facts: Facts, relevant: Relevant) -> Iterator[Attribution]:
    """Yield an OOM kill that a scheduler, or the kernel in a job's log, reports, if no end is another failure."""
    # A process succeeded and nothing else failed: the kill did not end the training.
    if any(ended.code == 0 for ended in facts.exits) and not relevant.cascades and not relevant.roots:
        return
    kills = [
        finding
        for finding in facts.findings
        if finding.cause is CauseClass.HOST_MEMORY
        if finding.role is Role.CONFIRMATION or TRAINING_PROCESS.match(finding.fields.get("process", "-"))
        if finding.origin.source not in TRUSTED_SOURCES and finding.id not in facts.outlived
        if finding.rule != MEMORY_FULL
    ]
    # A kernel's line may stand in a job's log, beside the shell's report that the process was killed.
    if kills and kills[0].role is Role.CONFIRMATION:
        has_failed = any(ended.is_failure for ended in facts.exits)
    else:
        has_failed = any(ended.is_failure and ended.signal != signal.SIGKILL for ended in facts.exits)
    if kills and not has_failed:
        yield Attribution(
            EvidenceSource.EXIT,
            CauseClass.HOST_MEMORY,
            Confidence.MEDIUM,
            (evidence_of(kills[0], "a process was killed there, out of memory"),),
            node=kills[0].origin.node,
            moment=moment_of(kills[0]),
            fingerprint=f"{CauseClass.HOST_MEMORY}:{kills[0].rule}",
        )


def _confidence_of(finding: Finding) -> Confidence | None:
    """Return None if no reason, user or received signal is stated. Launchers also send signals to victims: LOW."""
    if finding.fields.get("why", "").strip():
        return Confidence.HIGH
    if _BY_USER.search(finding.line):
        return Confidence.MEDIUM
    return Confidence.LOW if _BY_SIGNAL.search(finding.line) else None


def _has_failed(facts: Facts, confidence: Confidence) -> bool:
    """Return whether a process failed by itself, unless the stop has a reason, or several processes were killed."""
    failed = [ended for ended in facts.exits if ended.is_failure and not ended.is_victims]
    were_all_killed = len(failed) > 1 and all(ended.signal == signal.SIGKILL for ended in failed)
    return bool(failed) and confidence is not Confidence.HIGH and not were_all_killed
