"""Who is left behind: by the last step that each rank completed, where nothing else tells."""

from __future__ import annotations

from collections.abc import Iterator

from trainmedic_server.diagnosis.accusation import Accusation, Witness
from trainmedic_server.diagnosis.facts import Facts
from trainmedic_server.diagnosis.verdict import Confidence, Evidence
from trainmedic_server.diagnosis.window import Relevant
from trainmedic_server.domain.finding import CauseClass

_FEWEST_RANKS = 3
_MOST_BEHIND = 0.25


def left_behind(facts: Facts, counting: Relevant) -> Iterator[Accusation]:
    """The few ranks whose last step is earlier than that of all others.

    A rank that waits in a collective has not completed its step either, so this tells only where ranks run a step
    ahead of each other; it is a hint.
    """
    steps = {rank: known.last_step for rank, known in facts.ranks.items() if known.last_step is not None}
    if len(steps) < _FEWEST_RANKS or len(set(steps.values())) < 2:
        return
    furthest = max(steps.values())
    behind = {rank for rank, step in steps.items() if step < furthest}
    if len(behind) > _MOST_BEHIND * len(steps):
        return
    why = f"the others completed step {furthest}, and it had come to step {min(steps[rank] for rank in behind)}"
    nodes = {facts.node_of(rank) for rank in behind}
    yield Accusation(
        Witness.STRAGGLER,
        CauseClass.HANG if counting.cascades else CauseClass.UNKNOWN,
        Confidence.LOW,
        (Evidence(why, source="training", rank=min(behind)),),
        frozenset(behind),
        nodes.pop() if len(nodes) == 1 else "",
        fingerprint="hang:left-behind",
    )
