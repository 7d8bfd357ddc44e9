"""Whether the ranks still have the same weights, in a job where each has all of them, as with DDP.

A rank whose memory or processor has changed a bit without a word trains on with other weights than the others, and what
it adds to the gradients spoils theirs. Nothing in DDP notices. So whenever a checkpoint is written to the disk, the
ranks compare the digests that go into it anyway. Where they differ, which they had not before, the checkpoint is ill,
those in memory since the last comparison are forgotten, and the metric ``training_ranks_differing`` raises an alert; a
rollback then gives all ranks one state again.

Ranks that have never agreed, as on processors that compute differently, or where each is to have weights of its own,
are left alone. Who calls it: ``checkpoint_writer``, and ``restore`` after a rollback.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter

from trainmedic.client import Medic
from trainmedic.errors import NotAgreed
from trainmedic.job.group import ranks_named
from trainmedic.torch.checkpoints.digests import Digests
from trainmedic.torch.memory.memory_checkpoints import MemoryCheckpoints

log = logging.getLogger("trainmedic")


class RankComparison:
    """The comparisons of one training, on one rank."""

    def __init__(self, medic: Medic) -> None:
        self._medic = medic
        self._agreed_at: int | None = None
        self.agree: bool | None = None
        """What the last comparison has shown; None where it says nothing, and after a rollback."""

    def compare(self, step: int, digests: Digests, memory: MemoryCheckpoints | None) -> None:
        """Compare the ``digests`` of the state of ``step``. Every rank calls it, with its own."""
        if self._medic.world_size == 1:
            return
        mine = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
        try:
            found = self._medic.group(f"compare-{step}").poll(mine)
        except NotAgreed as error:
            log.warning("%s: the ranks' weights were not compared: %s", self._medic.job, error)
            return
        if len(found) == self._medic.world_size:
            usual = Counter(found.values()).most_common(1)[0][0]
            self._judge(step, [rank for rank in sorted(found) if found[rank] != usual], memory)

    def went_back(self) -> None:
        """Say that a rollback has given all ranks one state."""
        if self.agree is False:
            self.agree = None
            self._medic.progress.ranks_differing = 0

    def _judge(self, step: int, others: list[int], memory: MemoryCheckpoints | None) -> None:
        progress = self._medic.progress
        if not others:
            self.agree, progress.ranks_differing = True, 0
            # Before the first step of a process the ranks agree however they compute.
            self._agreed_at = step if progress.steps else self._agreed_at
        elif self._agreed_at is not None:
            message = "%s: at step %d the weights of %s are not those of the others, as they were at step %d"
            log.error(message, self._medic.job, step, ranks_named(others), self._agreed_at)
            self.agree, progress.ranks_differing = False, len(others)
            if memory is not None:
                memory.forget_after(self._agreed_at)
