"""Sentences of verdicts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from trainmedic_logs.diagnosis.attribution import Attribution
from trainmedic_logs.diagnosis.facts import Facts
from trainmedic_logs.diagnosis.verdict import Confidence, Evidence
from trainmedic_logs.domain.finding import CauseClass

_CAUSES = {
    CauseClass.GPU: "A GPU failed",
    CauseClass.GPU_MEMORY: "A GPU ran out of memory",
    CauseClass.HOST_MEMORY: "The machine, or the job's share of it, ran out of memory",
    CauseClass.NETWORK: "The network failed",
    CauseClass.STORAGE: "Storage failed or is full, as seen",
    CauseClass.DATA: "Reading the data failed",
    CauseClass.CODE: "The program failed",
    CauseClass.NUMERICS: "The loss or the gradients exploded or are not finite",
    CauseClass.NODE: "A machine failed",
    CauseClass.PREEMPTION: "A user or a scheduler ended it",
    CauseClass.HANG: "It hangs",
    CauseClass.UNKNOWN: "Why it failed is not known",
}
# Rules for lost machines; others concern refused requests.
_LOST_NODES = frozenset({"step-cancelled", "cluster-node-lost", "rank-failed"})
_REFUSED = "A machine, or its setup, refused what the job needs"
_TOO_FEW = "Too few nodes joined the rendezvous"
_NO_RENDEZVOUS = "rendezvous-timeout"
_DOUBTS = {Confidence.MEDIUM: "Probably", Confidence.LOW: "Perhaps"}
_MOST_NAMED = 8
_LONGEST_WORDS = 200
# tqdm bar without a line end.
_PROGRESS_BAR = re.compile(r"^[^|\n]{0,80}\d%\|[^|\n]{0,400}\|[^\[\n]{0,60}\[[^\]\n]{0,200}\]\s*(?=\S)")


def summary(leader: Attribution, facts: Facts) -> str:
    named = sorted(leader.ranks)
    of_ranks = {facts.node_of(rank) for rank in named} - {""}
    nodes = sorted(of_ranks or ({leader.node} - {""}))
    on = f" ({shortened(nodes)})" if nodes else ""
    first = leader.evidence[0]
    # For process ends, the interpretation says more than the launcher's line.
    says_why_better = first.source in ("exit", "kubernetes") or first.line.startswith("{")
    words = first.why if says_why_better or not first.line else _PROGRESS_BAR.sub("", first.line).partition("\n")[0]
    words = words[:_LONGEST_WORDS].rstrip(". ")
    if not leader.has_started:
        return f"The job did not start{f' on {shortened(nodes)}' if nodes else ''}: {words}."
    if leader.cause is CauseClass.UNKNOWN and named and words.startswith("it "):
        return f"Why it failed is not known; {ranks(named)}{on} {words.removeprefix('it ')}."
    if leader.cause is CauseClass.HANG and named:
        began = {Confidence.MEDIUM: "probably began", Confidence.LOW: "perhaps began"}.get(leader.confidence, "began")
        return f"It hangs, and that {began} on {ranks(named)}{on}: {words}."
    if leader.cause is CauseClass.UNKNOWN and words.startswith("it "):
        return f"Why it failed is not known; a process of the job{on} {words.removeprefix('it ')}."
    places = f"{ranks(named)}{on}" if named else leader.place or shortened(nodes)
    where = f" on {places}" if places else ""
    head = _head(leader, first)
    head = head if where else head.removesuffix(", as seen")
    said = f"{head}{where}: {words}."
    return said if leader.confidence is Confidence.HIGH else f"{_DOUBTS[leader.confidence]} {said[0].lower()}{said[1:]}"


def _head(leader: Attribution, first: Evidence) -> str:
    if leader.cause is CauseClass.HANG and first.rule == _NO_RENDEZVOUS:
        return _TOO_FEW
    if leader.cause is CauseClass.NODE and not leader.is_trusted and first.line and first.rule not in _LOST_NODES:
        return _REFUSED
    return _CAUSES[leader.cause]


def without_origin(cause: CauseClass, *, has_signs: bool, joined: str = "", size: str = "") -> str:
    """`joined` of `size` processes had started; "" if not stated."""
    if cause is CauseClass.HANG and joined:
        return f"It did not start: {joined} of {size} processes joined. The logs do not show why the others did not."
    if cause is CauseClass.HANG:
        return "It hangs, and the logs do not show which rank is missing: those that timed out are victims."
    if not has_signs:
        return "The logs show neither that it failed nor why it ended."
    return "The evidence shows how it ended, but not why."


ENDED_WELL = "Nothing failed: the training states that it completed."


def ranks(numbers: Collection[int]) -> str:
    """Return ``rank 3``, ``ranks 3 and 4``."""
    *others, last = [str(number) for number in sorted(numbers)] or ["?"]
    if len(others) + 1 > _MOST_NAMED:
        return f"ranks {shortened([*others, last])}"
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def shortened(names: Sequence[str]) -> str:
    """Return the first 8 names and the number of others."""
    shown = ", ".join(names[:_MOST_NAMED])
    return f"{shown} and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else shown


def missing(facts: Facts, *, is_sure: bool) -> Iterator[str]:
    """Yield unavailable evidence; for a sure verdict, only what could not be read."""
    for name, reason in list(facts.refused_dumps.items())[:_MOST_NAMED]:
        yield f"the dump {name} was not read: {reason}"
    yield from facts.pods.unread
    if is_sure:
        return
    if facts.recorder is not None and facts.recorder.silent:
        yield f"no flight recorder dump of {ranks(facts.recorder.silent)}"
    elif facts.recorder is None and facts.used_nccl:
        yield "no flight recorder dumps"
    read = facts.kernel_read
    if read is not None and (unread := sorted(facts.nodes - read)):
        yield f"the kernel log of {shortened(unread)} was not read"
    elif read is not None and not read:
        yield "no kernel log was read"
    yield from _unread_output(facts)
    if not facts.exits:
        yield "how the processes ended, as printed by a launcher"


def _unread_output(facts: Facts) -> Iterator[str]:
    silent = [rank for rank in facts.silent_ranks if not (rank in facts.ranks and facts.ranks[rank].was_read)]
    if not silent or not facts.knows_what_was_read:
        return
    if facts.logs_without_rank:
        yield f"which lines of {shortened(facts.logs_without_rank)} are of {ranks(silent)}: they state no rank"
    else:
        yield f"the output of {ranks(silent)}"
