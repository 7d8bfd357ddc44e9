"""A verdict's sentences for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainmedic_server.diagnosis.accusation import Accusation
from trainmedic_server.diagnosis.facts import Facts
from trainmedic_server.domain.finding import CauseClass

_CAUSES = {
    CauseClass.GPU: "A GPU failed",
    CauseClass.GPU_MEMORY: "The memory of a GPU did not suffice",
    CauseClass.HOST_MEMORY: "The memory of the machine, or what the job may use of it, did not suffice",
    CauseClass.NETWORK: "The network failed",
    CauseClass.STORAGE: "Storage failed, or is full",
    CauseClass.DATA: "Reading the data failed",
    CauseClass.CODE: "The program failed",
    CauseClass.NUMERICS: "The loss or the gradients are no numbers any more, or exploded",
    CauseClass.NODE: "A machine failed",
    CauseClass.PREEMPTION: "Somebody ended it on purpose",
    CauseClass.HANG: "It hangs",
    CauseClass.UNKNOWN: "Why it failed is not known",
}
_MOST_NAMED = 8


def summary(leader: Accusation, facts: Facts) -> str:
    """One sentence: what, where, and by whose word."""
    ranks = sorted(leader.ranks)
    nodes = sorted({node for rank in ranks if (node := facts.node_of(rank))} or ({leader.node} - {""}))
    where = f" on rank{'s' if len(ranks) > 1 else ''} {few([str(rank) for rank in ranks])}" if ranks else ""
    where += f" ({few(nodes)})" if where and nodes else f" on {few(nodes)}" if nodes else ""
    if leader.cause is CauseClass.UNKNOWN and where:
        where = f"; of{where.removeprefix(' on')}"
    return f"{_CAUSES[leader.cause]}{where}: {leader.evidence[0].why}."


def nobody(cause: CauseClass, facts: Facts) -> str:
    """The sentence where no rank can be named."""
    if cause is CauseClass.HANG:
        return "It hangs, and nothing that was read says who did not come: those that timed out are victims."
    if not facts.findings and not facts.exits:
        return "Nothing was found that says why it ended."
    return "What was found says how it ended, and not why."


def few(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    shown = ", ".join(names[:_MOST_NAMED])
    return f"{shown} and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else shown


def missing(facts: Facts) -> Iterator[str]:
    """What would have told more."""
    if facts.recorder is not None and facts.recorder.silent:
        yield f"no flight recorder dump of rank {few([str(rank) for rank in facts.recorder.silent])}"
    elif facts.recorder is None:
        yield "no flight recorder dumps"
    for name, reason in list(facts.refused_dumps.items())[:_MOST_NAMED]:
        yield f"the dump {name} was not read: {reason}"
    read = facts.kernel_read
    if read is not None and (unread := sorted(facts.nodes - read)):
        yield f"the kernel log of {few(unread)} was not read"
    elif read is not None and not read:
        yield "no kernel log was read"
    if facts.unread_ranks:
        yield f"what rank {few([str(rank) for rank in facts.unread_ranks])} printed"
    if not facts.exits:
        yield "how the processes ended"
