"""What each witness says of a failure, before anybody compares them."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence

from trainmedic_server.diagnosis import exits
from trainmedic_server.diagnosis.accusation import Accusation, Moment, Witness, evidence_of, moment_of, rank_of
from trainmedic_server.diagnosis.exits import Exit
from trainmedic_server.diagnosis.facts import Facts
from trainmedic_server.diagnosis.verdict import Confidence, Evidence
from trainmedic_server.diagnosis.window import Relevant
from trainmedic_server.domain.finding import CauseClass, Finding, Role

_OWN_FAULTS = frozenset({CauseClass.GPU, CauseClass.NODE, CauseClass.NETWORK, CauseClass.STORAGE})
"""Causes by which a node is at fault. Want of memory is the job's fault, or that of what runs beside it."""
_SURE_ALONE = frozenset({CauseClass.GPU, CauseClass.NODE})
"""A lost card or a panic ends a job; a link or a file system may have been one that the job does not use."""
_NEVER_SURE_BY_LINE = frozenset({CauseClass.UNKNOWN, CauseClass.NETWORK, CauseClass.GPU, CauseClass.NODE})
"""Causes of which a training sees only what they do to it: evidence of a card or a wire is the kernel's."""
_PROGRAMS_XIDS = frozenset({"13", "31"})
_OF_VICTIMS = frozenset({CauseClass.HANG, CauseClass.NETWORK})
"""Causes of cascades: they waited for another rank, or it closed its connection."""
_MOST_TO_ACCUSE = 0.25
"""Of all ranks. Who did not time out is only told apart where nearly everybody did."""


def kernel(facts: Facts, relevant: Relevant) -> Iterator[Accusation]:
    """What the kernels and fabric managers of the job's nodes wrote."""
    for finding in relevant.trusted:
        if finding.cause is CauseClass.HOST_MEMORY:
            yield _out_of_memory(finding, facts)
        elif finding.role is Role.ROOT:
            gpu = finding.target.gpu or _gpu_field(finding)
            ranks = _ranks_of(finding.origin.node, gpu, facts)
            if ranks is None:
                continue  # a card that none of the job's ranks uses
            yield Accusation(
                Witness.KERNEL,
                finding.cause,
                _worth_of_kernel(finding, gpu, facts),
                (evidence_of(finding, f"the kernel of {finding.origin.node or 'a node'} reported it"),),
                ranks,
                finding.origin.node,
                gpu,
                moment_of(finding),
                is_trusted=True,
                names_node=_is_nodes_fault(finding, relevant, facts),
                fingerprint=f"{finding.cause}:{finding.rule}",
            )


def _worth_of_kernel(finding: Finding, gpu: str | None, facts: Facts) -> Confidence:
    on_node = [facts.ranks[rank].gpu for rank in facts.ranks_on(finding.origin.node)]
    if gpu and any(on_node) and not any(_same_gpu(used, gpu) for used in on_node):
        return Confidence.LOW  # of some ranks it is not known which card they use
    is_sure = finding.cause in _SURE_ALONE and moment_of(finding).is_known
    return Confidence.HIGH if is_sure else Confidence.MEDIUM


def _is_nodes_fault(finding: Finding, relevant: Relevant, facts: Facts) -> bool:
    """Whether the node that a line of its kernel is about would be at fault. Storage that several nodes lose at once
    is somewhere else; and where the others' kernel logs were not read, nobody knows."""
    if not finding.origin.node or finding.cause not in _OWN_FAULTS:
        return False
    if finding.cause is not CauseClass.STORAGE:
        return True
    nodes = {other.origin.node for other in relevant.trusted if other.rule == finding.rule}
    others = facts.nodes - nodes
    return len(nodes) == 1 and bool(others) and others <= (facts.kernel_read or set())


def _gpu_field(finding: Finding) -> str | None:
    return finding.fields.get("pci") or None


def _ranks_of(node: str, gpu: str | None, facts: Facts) -> frozenset[int] | None:
    """The ranks on a GPU; those of its node where the ranks' GPUs are not known; None where it is none of theirs."""
    on_node = facts.ranks_on(node)
    if gpu is None or not all(facts.ranks[rank].gpu for rank in on_node) or not on_node:
        return frozenset()
    using = frozenset(rank for rank in on_node if _same_gpu(facts.ranks[rank].gpu, gpu))
    return using or None


def _same_gpu(one: str | None, other: str) -> bool:
    """Drivers write a PCI address with or without its function, and its domain with four or eight digits."""
    if one is None or one.startswith("GPU-") != other.startswith("GPU-"):
        return one is not None  # a UUID and an address cannot be compared here: the node alone counts
    if one.startswith("GPU-"):
        return one == other

    def plain(address: str) -> str:
        return ":".join(part.lstrip("0") for part in address.lower().partition(".")[0].split(":"))

    return plain(one) == plain(other)


def _out_of_memory(finding: Finding, facts: Facts) -> Accusation:
    """The kernel killed a process: whose it was, its number says, or who was killed on that node."""
    node, pid = finding.origin.node, finding.fields.get("pid", "")
    killed = [ended for ended in facts.exits if ended.signal == signal.SIGKILL and _is_on(ended, node, facts)]
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
    evidence = [evidence_of(finding, "the kernel killed a process for want of memory")]
    evidence += [_evidence_of_exit(ended, "it was killed on that node") for ended in named]
    evidence += [evidence_of(other, "the process that was killed was its data loader") for other in loaders]
    return Accusation(
        Witness.KERNEL,
        CauseClass.HOST_MEMORY,
        Confidence.HIGH if len(ranks) == 1 or (killed and len(named) == 1) else Confidence.MEDIUM,
        tuple(evidence),
        frozenset(ranks),
        node,
        moment=moment_of(finding),
        is_trusted=True,
        fingerprint=f"host_memory:{finding.rule}",
    )


def _is_on(ended: Exit, node: str, facts: Facts) -> bool:
    where = facts.node_of(ended.rank) or ended.node
    return not node or not where or where == node


def _rank_of_exit(ended: Exit, facts: Facts) -> int | None:
    if ended.rank is not None:
        return ended.rank
    on_node = facts.ranks_on(ended.node)
    if ended.local_rank is not None and ended.local_rank < len(on_node):
        return on_node[ended.local_rank]
    # One node whose ranks are not known otherwise: then the local rank is the rank.
    return ended.local_rank if len(facts.nodes) <= 1 else None


def _evidence_of_exit(ended: Exit, why: str) -> Evidence:
    return Evidence(why, ended.line, "exit", ended.node, ended.rank, ended.at)


def recorder(facts: Facts) -> Iterator[Accusation]:
    """What the flight recorder's dumps say."""
    reading = facts.recorder
    if reading is None:
        return
    if reading.differing:
        wait = next(wait for wait in reading.waits if wait.differing)
        why = f"they called another operation than the others as number {wait.number} of {wait.group.description}"
        evidence = (Evidence(why, source="flight recorder", at=wait.since),)
        yield Accusation(
            Witness.RECORDER, CauseClass.CODE, Confidence.HIGH, evidence, frozenset(reading.differing),
            moment=Moment(wait.since) if wait.since else None, fingerprint="code:flight-recorder",
        )  # fmt: skip
        return
    culprits = reading.culprits
    if not culprits:
        return
    first = next(wait for wait in reading.waits if set(wait.absent) & set(culprits))
    why = (
        f"of {len(first.group.ranks)} ranks in {first.group.description or first.group.name}, {_few(first.waiting)} "
        f"wait in {first.operation} number {first.number}, which {_few(first.absent)} have not called"
    )
    nodes = {facts.node_of(rank) for rank in culprits}
    yield Accusation(
        Witness.RECORDER,
        CauseClass.HANG,
        Confidence.MEDIUM if reading.silent else Confidence.HIGH,
        (Evidence(why, source="flight recorder", at=first.since),),
        frozenset(culprits),
        nodes.pop() if len(nodes) == 1 else "",
        moment=Moment(first.since, 1.0) if first.since else None,
        fingerprint="hang:flight-recorder",
    )


def _few(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown


def first_line(facts: Facts, relevant: Relevant) -> Iterator[Accusation]:
    """The first line of the job itself that can be where it began."""
    if not relevant.roots:
        return
    first = relevant.roots[0]
    rivals = [other for other in relevant.roots[1:] if not moment_of(first).is_before(moment_of(other))]
    # Of lines whose order is not known, that which names a thing counts before that which only says "an error".
    leading = min([first, *rivals], key=lambda finding: finding.cause in (CauseClass.CODE, CauseClass.UNKNOWN))
    alike = [finding for finding in [first, *rivals] if finding.rule == leading.rule]
    ranks = frozenset(rank for finding in alike if (rank := rank_of(finding)) is not None)
    others = [f for f in [first, *rivals] if f.rule != leading.rule and rank_of(f) not in ranks]
    earlier = [
        cascade
        for cascade in relevant.cascades
        if rank_of(cascade) not in ranks and moment_of(cascade).is_before(moment_of(leading), by=1.0)
    ]
    is_sure = not others and not earlier and leading.cause not in _NEVER_SURE_BY_LINE and not _was_killed(leading)
    # An exception can be what became of another one, on a rank of which nothing was read.
    is_sure = is_sure and not (leading.cause is CauseClass.CODE and facts.unread_ranks)
    yield Accusation(
        Witness.LINE,
        _cause_of_line(leading, facts),
        Confidence.HIGH if is_sure else Confidence.MEDIUM,
        tuple(evidence_of(finding, "no line that can be where it began is earlier") for finding in alike[:8]),
        ranks,
        facts.node_of(rank_of(leading)) or leading.origin.node,
        moment=moment_of(leading),
        fingerprint=f"{leading.cause}:{leading.rule}:{leading.shape}",
    )


def _was_killed(finding: Finding) -> bool:
    """Whether it says that a helper, such as a data loader, was killed, by whomever: as a rank's bare SIGKILL."""
    return "signal: Killed" in finding.line


def _cause_of_line(leading: Finding, facts: Facts) -> CauseClass:
    """What CUDA calls an error is the program's where the kernel says that a program did what it may not (XID 13,
    31)."""
    if leading.cause is not CauseClass.GPU:
        return leading.cause
    node = leading.origin.node or facts.node_of(rank_of(leading))
    programs = [f for f in facts.findings if f.role is Role.CONFIRMATION and f.fields.get("xid") in _PROGRAMS_XIDS]
    is_programs = any(not node or other.origin.node in ("", node) for other in programs)
    return CauseClass.CODE if is_programs else CauseClass.GPU


def gone_nodes(facts: Facts, relevant: Relevant) -> Iterator[Accusation]:
    """Nodes that are not there any more, as the server sees it."""
    for node, since in facts.gone_nodes.items():
        moment = Moment(since, 60.0)
        if node not in facts.nodes or (relevant.ended and relevant.ended.plus(60.0).is_before(moment)):
            continue
        yield Accusation(
            Witness.NODE,
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


def first_exits(facts: Facts, relevant: Relevant) -> Iterator[Accusation]:
    """How processes ended, where that was not as victims do: by a watchdog's signal, or with what they print who lost
    another rank."""
    victims = {rank for finding in relevant.cascades for rank in finding.ranks if finding.cause in _OF_VICTIMS}
    failed = [
        ended
        for ended in facts.exits
        if ended.is_failure
        and not ended.is_victims
        and (ended.signal is not None or _rank_of_exit(ended, facts) not in victims)
    ]
    # A launcher kills those who do not end at once; only the first that it saw fail means something.
    firsts = [ended for ended in failed if ended.is_first] or failed
    hard = [ended for ended in firsts if ended.signal is not None]
    chosen = hard or firsts
    by_rank = {_rank_of_exit(ended, facts): ended for ended in reversed(chosen)}
    if not chosen or len(by_rank) > max(1, _MOST_TO_ACCUSE * len(facts.ranks)):
        return
    for rank, ended in by_rank.items():
        cause, why = exits.meaning(ended)
        confirming = _told_out_of_memory(ended, facts) if ended.signal == signal.SIGKILL else []
        if confirming:
            cause, why = CauseClass.HOST_MEMORY, "it was killed for want of memory, as the scheduler says"
        yield Accusation(
            Witness.EXIT,
            cause,
            _worth_of_exit(bool(hard) and len(by_rank) == 1, bool(confirming)),
            (_evidence_of_exit(ended, f"it ended first, by {ended.how}: {why}"), *confirming),
            frozenset() if rank is None else frozenset({rank}),
            facts.node_of(rank) or ended.node,
            fingerprint=f"{cause}:exit:{ended.how}",
        )


def _worth_of_exit(is_only_one: bool, is_confirmed: bool) -> Confidence:
    if not is_only_one:
        return Confidence.LOW
    return Confidence.HIGH if is_confirmed else Confidence.MEDIUM


def _told_out_of_memory(ended: Exit, facts: Facts) -> list[Evidence]:
    """What the scheduler or the runtime of containers says of a process that was killed for want of memory."""
    return [
        evidence_of(finding, "somebody was killed there for want of memory")
        for finding in facts.findings
        if finding.role in (Role.CONFIRMATION, Role.ROOT) and finding.cause is CauseClass.HOST_MEMORY
        if not finding.origin.node or _is_on(ended, finding.origin.node, facts)
    ][:3]


def not_timed_out(facts: Facts, relevant: Relevant) -> Iterator[Accusation]:
    """Nearly everybody timed out in a collective: who did not was elsewhere."""
    timed_out = [finding for finding in relevant.cascades if finding.cause is CauseClass.HANG]
    victims = {rank for finding in timed_out for rank in (*finding.ranks, rank_of(finding)) if rank is not None}
    everybody = set(facts.ranks) | set(range(facts.world_size or 0))
    others = everybody - victims
    if not victims or not others or len(others) > _MOST_TO_ACCUSE * len(everybody):
        return
    why = f"{len(victims)} of {len(everybody)} ranks timed out in a collective, and these did not"
    nodes = {facts.node_of(rank) for rank in others}
    yield Accusation(
        Witness.TIMED_OUT,
        CauseClass.HANG,
        Confidence.MEDIUM if len(others) == 1 else Confidence.LOW,
        (Evidence(why, source="training", at=timed_out[0].first_at), evidence_of(timed_out[0], "a victim's line")),
        frozenset(others),
        nodes.pop() if len(nodes) == 1 else "",
        moment=None,
        fingerprint="hang:not-timed-out",
    )
