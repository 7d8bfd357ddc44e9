"""Loading the first of several checkpoints that can be loaded whole, on all ranks the same one.

What was loaded is compared, on every rank, with the digests that were kept when it was saved. A state that differs from
them counts as one that was loaded in part: an older checkpoint is tried, and where none is whole the training ends
(`HalfLoaded`), on all ranks. Not here: which checkpoints come into question, and going on from one (``restore``); how
one is read (``checkpoint_storage``).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

import torch

from trainmedic.errors import NotAgreed, Refusal
from trainmedic.job.group import Group
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.torch.checkpoints.checkpoint_storage import HalfLoaded, PartlyLoaded, UnusableCheckpoint
from trainmedic.torch.checkpoints.digests import DigestComparison
from trainmedic.torch.checkpoints.state_digests import compare_with
from trainmedic.torch.rank_agreement import failures, first_line
from trainmedic.torch.training_state import TrainingState

log = logging.getLogger("trainmedic")

_NO_DIGESTS = "the checkpoint holds no digests of them for this rank"

KeptState = Mapping[str, Any]
"""What `TrainingState.state_dict` gave when the checkpoint was written."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint whose parts are in place."""

    checkpoint: SavedCheckpoint
    kept: KeptState | None
    """The run's own state; None where it was not kept."""
    unusable: list[str]
    """What was wrong with those that were tried before it."""
    verified: Mapping[str, Any]
    """What was compared: the member ``parameters`` of ``verified`` in the answer."""


class CheckpointLoading:
    """Loads checkpoints of one training."""

    def __init__(self, training: TrainingState) -> None:
        self._training = training

    def load_first(self, candidates: Sequence[SavedCheckpoint], group: Group) -> LoadedCheckpoint:
        """Load the first that is whole on all ranks.

        Raises Refusal, UnusableCheckpoint and NotAgreed where nothing was changed on any rank, else HalfLoaded.
        """
        problems: list[str] = []
        is_changed = False
        for checkpoint in candidates:
            try:
                kept, comparison, fault = self._load(checkpoint)
            except UnusableCheckpoint as error:  # the storage raises it on all ranks alike
                problems.append(str(error))
                is_changed = is_changed or isinstance(error, PartlyLoaded)
            else:
                different = self.confirm_on_all_ranks(group, fault, comparison.problem if comparison else "")
                if not different:
                    return LoadedCheckpoint(checkpoint, kept, problems, _told(comparison, group))
                problems.append(f"{checkpoint.name} was loaded otherwise than it was saved: {different}")
                is_changed = True
            log.error("%s: %s", self._training.medic.job, problems[-1])
        if is_changed:
            self._training.broken = _broken("; ".join(problems))
            raise self._training.broken
        raise UnusableCheckpoint(f"no checkpoint could be loaded: {'; '.join(problems)}")

    def confirm_on_all_ranks(self, group: Group, fault: Exception | None, different: str = "") -> str:
        """Ask all ranks whether they have loaded the checkpoint; each of them calls this. What is different on which.

        Raises HalfLoaded if one has not loaded it, for which ``fault`` is the reason here.
        """
        if fault is not None:
            log.error("%s: a checkpoint was loaded only in part", self._training.medic.job, exc_info=fault)
        try:
            reports = group.poll([None if fault is None else first_line(fault), different or None])
            failed = failures({rank: report[0] for rank, report in reports.items()}, group)
            differs = failures({rank: report[1] for rank, report in reports.items()}, group)
        except NotAgreed as error:
            failed = differs = str(error)
        if failed:
            self._training.broken = _broken(failed)
            raise self._training.broken from fault
        return differs

    def _load(self, checkpoint: SavedCheckpoint) -> tuple[KeptState | None, DigestComparison | None, Exception | None]:
        """Load one here. The run's own state, how it compares with the digests that it holds, and what went wrong."""
        training = self._training
        assert training.storage is not None
        try:
            put_back_tensors = hold_group_tensors(list(training.parts.optimizers().values()))
            kept = training.storage.load(checkpoint, training.parts)
            put_back_tensors()
            before = kept.get("digests") if kept is not None and training.verifies else None
            if before is None:
                return kept, None, None
            return kept, compare_with(before, training.parts), None
        except (Refusal, UnusableCheckpoint, NotAgreed):
            raise  # on all ranks alike
        except Exception as error:  # whatever is raised, because the other ranks wait for this rank's report
            return None, None, error


def _told(comparison: DigestComparison | None, group: Group) -> Mapping[str, Any]:
    if comparison is None:
        return {"compared": 0, "agreed": 0, "ranks": group.world_size, "why": _NO_DIGESTS}
    return {"compared": comparison.compared, "agreed": comparison.compared, "ranks": group.world_size}


def _broken(why: str) -> HalfLoaded:
    return HalfLoaded(
        f"a checkpoint was loaded only in part ({why}), so that there is nothing left to train on; start "
        "the job again, to resume from one that is whole, and move away those that cannot be loaded"
    )


def hold_group_tensors(optimizers: Sequence[Any]) -> Callable[[], None]:
    """Return what puts the present tensors back into the groups after a load, with the values that were loaded."""
    held = [
        (optimizer, number, key, value)
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if isinstance(value, torch.Tensor)
    ]

    def put_back() -> None:
        for optimizer, number, key, tensor in held:
            group = optimizer.param_groups[number]
            loaded = group.get(key)
            if loaded is not tensor and loaded is not None:
                with torch.no_grad():
                    tensor.copy_(torch.as_tensor(loaded))
                group[key] = tensor

    return put_back
