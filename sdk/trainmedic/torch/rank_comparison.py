"""Comparison of ranks' weights that should be equal, as with DDP.

A silent hardware fault changes one rank's weights and degrades all gradients. A new difference makes the checkpoint
unhealthy and discards in-memory ones since the last agreement.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from typing import Any, Iterable, Mapping

from trainmedic.client import Medic
from trainmedic.errors import NotAgreed
from trainmedic.job.group import ranks_named
from trainmedic.torch.checkpoints.digests import Digests
from trainmedic.torch.memory.memory_checkpoints import MemoryCheckpoints

log = logging.getLogger("trainmedic")


class RankComparison:
    """``differs_on_purpose``: parts that are not compared, as with local SGD."""

    def __init__(self, medic: Medic, differs_on_purpose: Iterable[str] = ()) -> None:
        self._medic = medic
        self._agreed_at: dict[str, int] = {}  # step of the last agreement, by part
        self._faulty: frozenset[str] = frozenset()
        self._differs_on_purpose: set[str] = set(differs_on_purpose)
        self.differing: tuple[str, ...] = ()  # parts that differ, on purpose or not
        self.agree: bool | None = None  # False after a new difference; None if unknown, and after a rollback
        self.trouble_at: int | None = None  # first step with a possibly wrong loss; None without a fault

    def compare(self, step: int, digests: Digests, memory: MemoryCheckpoints | None) -> None:
        """Compare the ranks' digests. Every rank calls it."""
        if self._medic.world_size == 1:
            return
        mine: dict[str, Any] = {}
        for name, digest in sorted(digests.items()):
            part = _part(name)
            if part:
                mine.setdefault(part, hashlib.sha256()).update(f"{name} {digest}\n".encode())
        try:
            reports = self._medic.group(f"compare-{step}").poll({part: each.hexdigest() for part, each in mine.items()})
        except NotAgreed as error:
            log.warning("%s: the ranks' weights were not compared: %s", self._medic.job, error)
            return
        if len(reports) == self._medic.world_size:
            minority = {}
            for part in sorted({part for report in reports.values() for part in report}):
                of_part = {rank: reports[rank].get(part) for rank in sorted(reports)}
                most_common = Counter(of_part.values()).most_common(1)[0][0]
                minority[part] = [rank for rank, digest in of_part.items() if digest != most_common]
            self.differing = tuple(part for part, ranks in minority.items() if ranks)
            self._judge(step, minority, memory)

    def is_faulty(self, part: str) -> bool:
        return _part(part) in self._faulty

    def reset_after_rollback(self) -> None:
        self._faulty, self.trouble_at = frozenset(), None
        if self.agree is False:
            self.agree = None
            self._medic.progress.ranks_differing = 0

    def _judge(self, step: int, minority: Mapping[str, list[int]], memory: MemoryCheckpoints | None) -> None:
        """Find faults among ``minority``, the ranks that differ, by part."""
        progress = self._medic.progress
        for part in [part for part in self._faulty if not minority.get(part)]:
            # A hardware fault does not heal by itself: the training averages the ranks at some steps.
            log.info("%s: the ranks differ in %s at some steps only; it is not compared", self._medic.job, part)
            self._differs_on_purpose.add(part)
        judged = {part: ranks for part, ranks in minority.items() if part not in self._differs_on_purpose}
        self._faulty = frozenset(part for part, ranks in judged.items() if ranks and part in self._agreed_at)
        if self._faulty:
            faulty = sorted({rank for part in self._faulty for rank in judged[part]})
            agreed_at = min(self._agreed_at[part] for part in self._faulty)
            message = "%s: at step %d the weights of %s differ from the other ranks'; at step %d they were equal"
            log.error(message, self._medic.job, step, ranks_named(faulty), agreed_at)
            self.agree, progress.ranks_differing = False, len(faulty)
            # A rank in the majority computed one more loss before it received wrong gradients.
            is_sound = self._medic.rank not in faulty and 2 * len(faulty) < self._medic.world_size
            self.trouble_at = agreed_at + (2 if is_sound else 1)
            if memory is not None:
                memory.drop_after(agreed_at, until=step)
            return
        agreed = [part for part, ranks in judged.items() if not ranks]
        if agreed or self.agree is False:
            self.agree, progress.ranks_differing = (True if agreed else None), 0
            self.trouble_at = None
        # Before a process's first step the ranks agree in any case.
        self._agreed_at.update((part, step) for part in agreed if progress.steps)


def _part(name: str) -> str:
    """Return a digest's part: "model" for "model.0.weight"."""
    return name.partition(":")[0].partition(".")[0]
