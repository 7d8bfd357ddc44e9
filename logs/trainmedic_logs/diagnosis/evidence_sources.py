"""Attributions of each evidence source, not yet weighed."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping

from trainmedic_core import gpu_names
from trainmedic_logs.diagnosis import exits, wording
from trainmedic_logs.diagnosis.attribution import Attribution, EvidenceSource, Moment, evidence_of, moment_of, rank_of
from trainmedic_logs.diagnosis.clock_guess import UNKNOWN
from trainmedic_logs.diagnosis.exits import Exit
from trainmedic_logs.diagnosis.facts import Facts
from trainmedic_logs.diagnosis.verdict import Confidence, Evidence
from trainmedic_logs.diagnosis.window import TRUSTED_SOURCES, Relevant
from trainmedic_logs.domain.finding import CauseClass, Finding, Role

# Faults of the node itself. Not OOM, which another job may cause.
_OWN_FAULTS = frozenset({CauseClass.GPU, CauseClass.NODE, CauseClass.NETWORK, CauseClass.STORAGE})
# Faults that affect any job on the GPU or node; a link or file system may be unused.
_SURE_ALONE = frozenset({CauseClass.GPU, CauseClass.NODE})
TRAINING_PROCESS = re.compile(r"(?i)(?:i?python|pt_|ray|torch|deepspeed|accelerate|train)|^$")
"""Names of training processes, or no name. Process IDs differ in containers, so they cannot decide."""
# Longest time between two lines on one fault.
_SAME_FAULT_S = 120.0
# Longest time from an OOM kill of a job's process to its launcher's report.
_LAUNCHER_REPORTS_WITHIN_S = 120.0
# torchrun polls every 5 s and writes whole seconds.
_LAUNCHER_POLL_S = 6.0
# Share of the ranks; if more than this and more than one fail first, none is named.
_MOST_TO_ACCUSE = 0.25
MEMORY_FULL = "host-memory-full"  # rule
_WHY_MEMORY = {MEMORY_FULL: "the machine's memory was nearly full before, as the training printed it"}


def kernel(facts: Facts, relevant: Relevant) -> Iterator[Attribution]:
    """Yield attributions by trusted sources, without other jobs' faults."""
    ours = [finding for finding in relevant.trusted if _killed_job_process(finding, facts)]
    for finding in relevant.trusted:
        if finding.cause is CauseClass.HOST_MEMORY:
            # If a kill names a process of the job, the other kills count as those of other jobs.
            if finding in ours or not (ours or _is_of_other_job(finding, facts, relevant)):
                yield _out_of_memory(finding, facts, relevant)
        elif finding.role is Role.ROOT:
            gpu = finding.target.gpu or finding.fields.get("pci") or None
            ranks = _ranks_of(finding.origin.node, gpu, facts)
            if ranks is None:
                continue  # none of the job's ranks uses this GPU
            if not ranks and finding.origin.node not in facts.nodes:
                # No rank is known there: it may be one without a node that printed a GPU error at that time.
                errors = _matching_gpu_errors(finding, relevant)
                ranks = frozenset(
                    rank for own in errors if (rank := rank_of(own)) is not None and not facts.node_of(rank)
                )
            yield Attribution(
                EvidenceSource.KERNEL,
                finding.cause,
                _kernel_confidence(finding, gpu, facts, relevant),
                (evidence_of(finding, _reported(finding)),),
                ranks,
                finding.origin.node,
                gpu,
                _moment_for_job(finding, facts, relevant),
                is_trusted=True,
                names_node=_is_nodes_fault(finding, relevant, facts),
                fingerprint=f"{finding.cause}:{finding.rule}",
            )


def _reported(finding: Finding) -> str:
    return f"the {finding.origin.source.replace('-', ' ')} of {finding.origin.node or 'a node'} reported it"


def _kernel_confidence(finding: Finding, gpu: str | None, facts: Facts, relevant: Relevant) -> Confidence:
    if _is_elsewhere(finding.origin.node, facts):
        return Confidence.LOW
    on_node = [facts.ranks[rank].gpu for rank in facts.ranks_on(finding.origin.node)]
    if gpu and any(on_node) and not any(_same_gpu(used, gpu) for used in on_node):
        return Confidence.LOW  # the GPU can only be that of a rank whose GPU is unknown
    is_sure = finding.cause in _SURE_ALONE and _moment_for_job(finding, facts, relevant).is_known
    return Confidence.HIGH if is_sure and _concerns_job(finding, facts, relevant) else Confidence.MEDIUM


def _moment_for_job(finding: Finding, facts: Facts, relevant: Relevant) -> Moment:
    """Return the line's time, unknown if nothing of the job has a time."""
    has_times = facts.progressed_at is not None or (relevant.first_sign is not None and relevant.first_sign.is_known)
    return moment_of(finding) if has_times else Moment(finding.first_at, UNKNOWN)


def _concerns_job(finding: Finding, facts: Facts, relevant: Relevant) -> bool:
    if facts.is_sure_of(finding.origin.node):
        return True
    words = finding.fields.get("detail", "") + finding.line
    if any(ended.pid and f"pid={ended.pid}," in words for ended in facts.exits):
        return True
    return bool(_matching_gpu_errors(finding, relevant))


def _matching_gpu_errors(finding: Finding, relevant: Relevant) -> list[Finding]:
    if finding.cause is not CauseClass.GPU:
        return []
    return [
        own
        for own in relevant.roots
        if own.cause is CauseClass.GPU
        and moment_of(own).is_known
        and abs((own.first_at - finding.first_at).total_seconds()) <= _SAME_FAULT_S
    ]


def _is_elsewhere(node: str, facts: Facts) -> bool:
    return bool(facts.nodes) and node not in facts.nodes and all(known.node for known in facts.ranks.values())


def _is_nodes_fault(finding: Finding, relevant: Relevant, facts: Facts) -> bool:
    # By lost storage only if the kernel logs of all other nodes were read and report none.
    if not finding.origin.node or finding.cause not in _OWN_FAULTS or not _concerns_job(finding, facts, relevant):
        return False
    if finding.cause is not CauseClass.STORAGE:
        return True
    affected = {other.origin.node for other in relevant.trusted if other.rule == finding.rule}
    others = facts.nodes - affected
    return len(affected) == 1 and bool(others) and others <= (facts.kernel_read or set())


def _ranks_of(node: str, gpu: str | None, facts: Facts) -> frozenset[int] | None:
    """Return the node's ranks that use `gpu`. Empty if unknown, None if none uses it."""
    on_node = facts.ranks_on(node)
    if gpu is None or not all(facts.ranks[rank].gpu for rank in on_node) or not on_node:
        return frozenset()
    using = frozenset(rank for rank in on_node if _same_gpu(facts.ranks[rank].gpu, gpu))
    return using or None


def _same_gpu(one: str | None, other: str) -> bool:
    if one is None:
        return False
    addresses = gpu_names.normal_pci(one), gpu_names.normal_pci(other)
    if all(addresses):
        return addresses[0] == addresses[1]
    uuids = [gpu_names.uuid_key(name) for name in (one, other) if name.lower().startswith(("gpu-", "mig-gpu-"))]
    # Other pairs, such as a UUID and an address, or a MIG instance's own UUID, cannot be compared: the node decides.
    return len(uuids) < 2 or uuids[0] == uuids[1]


def _out_of_memory(finding: Finding, facts: Facts, relevant: Relevant) -> Attribution:
    node, pid = finding.origin.node, finding.fields.get("pid", "")
    killed = [ended for ended in facts.exits if ended.signal == signal.SIGKILL and _may_be_on(ended, node, facts)]
    # Process IDs differ in containers: if none is equal, each of these may be the process that the kernel killed.
    named = [ended for ended in killed if pid and str(ended.pid) == pid] or killed
    loaders = [
        other
        for other in facts.findings
        if pid and other.cause is CauseClass.DATA and other.fields.get("pid") == pid and rank_of(other) is not None
    ]
    ranks = {r for r in (_rank_of_exit(ended, facts) for ended in named) if r is not None}
    ranks |= {rank for other in loaders if (rank := rank_of(other)) is not None}
    by_pid = {rank for rank, known in facts.ranks.items() if pid and str(known.pid) == pid and known.node == node}
    if not killed and not loaders and by_pid:
        ranks = by_pid
    evidence = [evidence_of(finding, "a process was killed there because the machine was out of memory")]
    evidence += [_evidence_of_exit(ended, "a process of the job was killed on that node") for ended in named]
    evidence += [evidence_of(other, "the process that was killed was its data loader") for other in loaders]
    is_ours = bool(by_pid or loaders) or any(pid and str(ended.pid) == pid for ended in named)
    fits_exits = not facts.exits or (bool(named) and _is_at_first_sign(finding, relevant))
    is_likely = fits_exits and bool(TRAINING_PROCESS.match(finding.fields.get("process", "")))
    names_one = len(ranks) == 1 or (bool(killed) and len(named) == 1)
    if not is_ours and not is_likely:
        confidence = Confidence.LOW
    else:
        confidence = Confidence.HIGH if names_one else Confidence.MEDIUM
    return Attribution(
        EvidenceSource.KERNEL,
        CauseClass.HOST_MEMORY,
        confidence,
        tuple(evidence),
        frozenset(ranks),
        node,
        moment=moment_of(finding),
        is_trusted=True,
        is_proven=_killed_job_process(finding, facts),
        fingerprint=f"host_memory:{finding.rule}",
    )


def _is_at_first_sign(finding: Finding, relevant: Relevant) -> bool:
    killed, sign = moment_of(finding), relevant.first_sign
    return sign is None or not (killed.is_before(sign, _LAUNCHER_POLL_S) or sign.is_before(killed, _LAUNCHER_POLL_S))


def _is_kill_without_pid(finding: Finding, relevant: Relevant) -> bool:
    return "pid" not in finding.fields and finding in relevant.trusted and _is_at_first_sign(finding, relevant)


def _is_of_other_job(finding: Finding, facts: Facts, relevant: Relevant) -> bool:
    # The launcher would have reported the job's own process earlier.
    has_launcher = any(ended.is_failure and _may_be_on(ended, finding.origin.node, facts) for ended in facts.exits)
    sign = relevant.first_sign
    return has_launcher and sign is not None and moment_of(finding).is_before(sign, by=_LAUNCHER_REPORTS_WITHIN_S)


def _killed_job_process(finding: Finding, facts: Facts) -> bool:
    pid = finding.fields.get("pid")
    return finding.cause is CauseClass.HOST_MEMORY and any(
        ended.signal == signal.SIGKILL and str(ended.pid) == pid and _may_be_on(ended, finding.origin.node, facts)
        for ended in facts.exits
    )


def _may_be_on(ended: Exit, node: str, facts: Facts) -> bool:
    where = facts.node_of(ended.rank) or ended.node
    return not node or not where or where == node


def _rank_of_exit(ended: Exit, facts: Facts) -> int | None:
    if ended.rank is not None:
        return ended.rank
    on_node = facts.ranks_on(ended.node)
    if ended.local_rank is not None and ended.local_rank < len(on_node):
        return on_node[ended.local_rank]  # a node's ranks ascend with its local ranks
    # A single node with unknown ranks: the local rank is the rank.
    return ended.local_rank if len(facts.nodes) <= 1 else None


def _evidence_of_exit(ended: Exit, why: str) -> Evidence:
    return Evidence(why, ended.line, "exit", ended.node, ended.rank, ended.at)


def recorder(facts: Facts) -> Iterator[Attribution]:
    reading = facts.recorder
    if reading is None:
        return
    if reading.differing:
        wait = next(wait for wait in reading.waits if wait.differing)
        why = (
            f"{wording.ranks(reading.differing)} called another operation than the others as number {wait.number} of "
            f"{wait.group.description or wait.group.name}"
        )
        evidence = (Evidence(why, source="flight recorder", at=wait.since),)
        yield Attribution(
            EvidenceSource.RECORDER, CauseClass.CODE, Confidence.HIGH, evidence, frozenset(reading.differing),
            moment=Moment(wait.since) if wait.since else None, fingerprint="code:flight-recorder",
        )  # fmt: skip
        return
    culprits = reading.culprits
    if not culprits:
        return
    first = next(wait for wait in reading.waits if set(wait.absent) & set(culprits))
    why = (
        f"{len(first.waiting)} of the {len(first.group.ranks)} ranks of {first.group.description or first.group.name} "
        f"wait in {first.operation} number {first.number}, which {wording.ranks(first.absent)} did not call"
    )
    nodes = {facts.node_of(rank) for rank in culprits}
    yield Attribution(
        EvidenceSource.RECORDER,
        CauseClass.HANG,
        Confidence.MEDIUM if reading.silent else Confidence.HIGH,
        (Evidence(why, source="flight recorder", at=first.since),),
        frozenset(culprits),
        nodes.pop() if len(nodes) == 1 else "",
        moment=Moment(first.since, 1.0) if first.since else None,  # the ranks' clocks differ
        fingerprint="hang:flight-recorder",
    )


def gone_nodes(facts: Facts, relevant: Relevant) -> Iterator[Attribution]:
    for node, since in facts.gone_nodes.items():
        moment = Moment(since, 60.0)  # the server notices a silent node with this delay
        if node not in facts.nodes or (relevant.first_sign and relevant.first_sign.plus(60.0).is_before(moment)):
            continue  # not a node of the job, or silent only after the failure
        yield Attribution(
            EvidenceSource.NODE,
            CauseClass.NODE,
            Confidence.HIGH,
            (Evidence("the node fell silent before the others failed", source="presence", node=node, at=since),),
            frozenset(facts.ranks_on(node)),
            node,
            moment=moment,
            is_trusted=True,
            names_node=True,
            fingerprint="node:gone",
        )


def first_exits(facts: Facts, relevant: Relevant) -> Iterator[Attribution]:
    """Yield the few ranks that ended first; ends by signals precede others."""
    victims = relevant.victims
    failed = [
        ended
        for ended in facts.exits
        if ended.is_failure
        and not ended.is_victims
        and (ended.signal is not None or _rank_of_exit(ended, facts) not in victims)
        and not (ended.rank is None and relevant.is_printed_by_victims(ended.said))
    ]
    # A launcher kills slow processes; only the first failure that it saw counts.
    firsts = [ended for ended in failed if ended.is_first] or failed
    by_signal = [ended for ended in firsts if ended.signal is not None]
    chosen = by_signal or firsts
    by_process = _by_rank_or_node(chosen, facts)
    printed = {rank_of(finding) for finding in relevant.roots}
    if not chosen or len(by_process) > max(1, _MOST_TO_ACCUSE * len(facts.ranks)):
        return
    for (rank, _), ended in by_process.items():
        cause, why = exits.meaning(ended)
        if ended.signal is None and relevant.roots:
            cause = CauseClass.UNKNOWN  # a line states the same exception: no second source
        if ended.signal is None and not ended.said and rank in printed:
            why = "after it printed an error"
        confirming = _memory_evidence(ended, facts, relevant) if ended.signal == signal.SIGKILL else []
        if confirming:
            cause, why = CauseClass.HOST_MEMORY, confirming[0].why
        yield Attribution(
            EvidenceSource.EXIT,
            cause,
            _exit_confidence(
                (bool(by_signal) or cause is not CauseClass.UNKNOWN) and len(by_process) == 1,
                any(each.rule != MEMORY_FULL for each in confirming),
            ),
            (_evidence_of_exit(ended, f"it ended first, {ended.manner}: {why}"), *confirming),
            frozenset() if rank is None else frozenset({rank}),
            facts.node_of(rank) or ended.node,
            is_kill=ended.signal == signal.SIGKILL and by_signal == firsts,
            fingerprint=f"{cause}:exit:{ended.how}",
        )


def _by_rank_or_node(ends: list[Exit], facts: Facts) -> Mapping[tuple[int | None, str], Exit]:
    by_process: dict[tuple[int | None, str], Exit] = {}
    unknown_ranks_at = {ended.node for ended in ends if ended.node and _rank_of_exit(ended, facts) is None}
    for ended in reversed(ends):
        rank = _rank_of_exit(ended, facts)
        node = ended.node if rank is None and len(unknown_ranks_at) > 1 else ""
        by_process[rank, node] = ended
    return by_process


def _exit_confidence(is_only_one: bool, is_confirmed: bool) -> Confidence:
    confidence = Confidence.HIGH if is_confirmed else Confidence.MEDIUM
    return confidence if is_only_one else Confidence.LOW


def _memory_evidence(ended: Exit, facts: Facts, relevant: Relevant) -> list[Evidence]:
    return [
        evidence_of(finding, _WHY_MEMORY.get(finding.rule, "a process was killed there, out of memory"))
        for finding in facts.findings
        if finding.origin.source not in TRUSTED_SOURCES or _is_kill_without_pid(finding, relevant)
        if finding.role in (Role.CONFIRMATION, Role.ROOT) and finding.cause is CauseClass.HOST_MEMORY
        if not finding.origin.node or _may_be_on(ended, finding.origin.node, facts)
    ][:3]
