"""Whether the ranks still have the same weights, in a job where each has all of them, as with DDP.

A rank whose memory or processor has changed a bit without a word trains on with other weights than the others, and what
it adds to the gradients spoils theirs. Nothing in DDP notices. So whenever a checkpoint is written to the disk, the
ranks compare the digests that go into it anyway. Where they differ, which they had not before, the checkpoint is ill,
those in memory since the last comparison are forgotten, and the metric ``training_ranks_differing`` raises an alert; a
rollback then gives all ranks one state again.

Model and optimizer are judged each by itself. What has never agreed is left alone: on processors that compute
differently, where each rank is to have weights of its own, or with an optimizer that keeps a state on its owner's rank
only. So is what agrees at some steps only, as ranks do that average their weights now and then.

Who calls it: ``checkpoint_writer``, and ``restore`` after a rollback.
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
    """The comparisons of one training, on one rank. ``apart`` are the parts that differ on purpose at some steps."""

    def __init__(self, medic: Medic, apart: Iterable[str] = ()) -> None:
        self._medic = medic
        self._agreed_at: dict[str, int] = {}  # by part
        self._faulty: frozenset[str] = frozenset()
        # The parts in which the ranks differ on purpose from time to time.
        self._apart: set[str] = set(apart)
        self.differing: tuple[str, ...] = ()
        """The parts in which the ranks differed at the last comparison, on purpose or not."""
        self.agree: bool | None = None
        """What the last comparison has shown; None where it says nothing, and after a rollback."""
        self.trouble_at: int | None = None
        """The first step whose loss on this rank may come of other weights than it should; None without a fault, and
        after a rollback."""

    def compare(self, step: int, digests: Digests, memory: MemoryCheckpoints | None) -> None:
        """Compare the ``digests`` of the state of ``step``. Every rank calls it, with its own."""
        if self._medic.world_size == 1:
            return
        mine: dict[str, Any] = {}
        for name, digest in sorted(digests.items()):
            part = _part(name)
            if part:
                mine.setdefault(part, hashlib.sha256()).update(f"{name} {digest}\n".encode())
        try:
            found = self._medic.group(f"compare-{step}").poll({part: held.hexdigest() for part, held in mine.items()})
        except NotAgreed as error:
            log.warning("%s: the ranks' weights were not compared: %s", self._medic.job, error)
            return
        if len(found) == self._medic.world_size:
            others = {}
            for part in sorted({part for held in found.values() for part in held}):
                of_part = {rank: found[rank].get(part) for rank in sorted(found)}
                usual = Counter(of_part.values()).most_common(1)[0][0]
                others[part] = [rank for rank, held in of_part.items() if held != usual]
            self.differing = tuple(part for part, ranks in others.items() if ranks)
            self._judge(step, others, memory)

    def is_faulty(self, part: str) -> bool:
        """Return whether the ranks have come to differ in that part by a fault, by the last comparison."""
        return _part(part) in self._faulty

    def went_back(self) -> None:
        """Say that a rollback has given the ranks the states of a checkpoint."""
        self._faulty, self.trouble_at = frozenset(), None
        if self.agree is False:
            self.agree = None
            self._medic.progress.ranks_differing = 0

    def _judge(self, step: int, others: Mapping[str, list[int]], memory: MemoryCheckpoints | None) -> None:
        progress = self._medic.progress
        for part in [part for part in self._faulty if not others.get(part)]:
            # A change of memory does not heal by itself: the training averages the ranks now and then.
            log.info("%s: the ranks differ in %s at some steps only; it is not compared", self._medic.job, part)
            self._apart.add(part)
        judged = {part: ranks for part, ranks in others.items() if part not in self._apart}
        self._faulty = frozenset(part for part, ranks in judged.items() if ranks and part in self._agreed_at)
        if self._faulty:
            faulty = sorted({rank for part in self._faulty for rank in judged[part]})
            agreed_at = min(self._agreed_at[part] for part in self._faulty)
            message = "%s: at step %d the weights of %s are not those of the others, as they were at step %d"
            log.error(message, self._medic.job, step, ranks_named(faulty), agreed_at)
            self.agree, progress.ranks_differing = False, len(faulty)
            # A rank like most others computed one more loss before it heard of wrong gradients.
            is_sound = self._medic.rank not in faulty and 2 * len(faulty) < self._medic.world_size
            self.trouble_at = agreed_at + (2 if is_sound else 1)
            if memory is not None:
                memory.forget_after(agreed_at)
            return
        agreed = [part for part, ranks in judged.items() if not ranks]
        if agreed or self.agree is False:
            self.agree, progress.ranks_differing = (True if agreed else None), 0
            self.trouble_at = None
        # Before the first step of a process the ranks agree however they compute.
        self._agreed_at.update((part, step) for part in agreed if progress.steps)


def _part(name: str) -> str:
    """Return model, optimizer and so on, by the name of a part or of a digest; empty for attributes."""
    return name.partition(":")[0].partition(".")[0]
