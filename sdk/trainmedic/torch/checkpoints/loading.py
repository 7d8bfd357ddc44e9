"""Loading of the first intact checkpoint, the same on all ranks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

import torch

from trainmedic.errors import NotAgreed, Refusal, is_explained
from trainmedic.job.group import Group
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.torch.checkpoints.checkpoint_storage import HalfLoaded, PartlyLoaded, UnusableCheckpoint
from trainmedic.torch.checkpoints.digests import DigestComparison
from trainmedic.torch.checkpoints.state_digests import compare_with
from trainmedic.torch.rank_agreement import failures, first_line
from trainmedic.torch.training_state import TrainingState

log = logging.getLogger("trainmedic")

_NO_DIGESTS = "the checkpoint holds no digests of them for this rank"

RunState = Mapping[str, Any]


@dataclass(frozen=True)
class LoadedCheckpoint:
    checkpoint: SavedCheckpoint
    run_state: RunState | None  # the run's own state; None if the checkpoint lacks it
    unusable: list[str]  # problems of the checkpoints tried before
    verified: Mapping[str, Any]  # the answer's ``verified.parameters``


class CheckpointLoading:
    def __init__(self, training: TrainingState) -> None:
        self._training = training

    def load_first(self, candidates: Sequence[SavedCheckpoint], group: Group) -> LoadedCheckpoint:
        """Load the first intact checkpoint. After any error but HalfLoaded no rank has changed."""
        problems: list[str] = []
        is_changed = False
        for checkpoint in candidates:
            try:
                run_state, comparison, fault = self._load(checkpoint)
            except UnusableCheckpoint as error:  # raised on all ranks together
                problems.append(str(error))
                cause = None if is_explained(error) else error
                is_changed = is_changed or isinstance(error, PartlyLoaded)
            else:
                different = self.confirm_on_all_ranks(group, fault, comparison.problem if comparison else "")
                if not different:
                    return LoadedCheckpoint(checkpoint, run_state, problems, _verified(comparison, group))
                problems.append(f"{checkpoint.name} was loaded otherwise than it was saved: {different}")
                cause, is_changed = None, True
            log.error("%s: %s", self._training.medic.job, problems[-1], exc_info=cause)
        if is_changed:
            self._training.broken = _broken("; ".join(problems))
            raise self._training.broken
        raise UnusableCheckpoint(f"no checkpoint could be loaded: {'; '.join(problems)}")

    def confirm_on_all_ranks(self, group: Group, fault: Exception | None, different: str = "") -> str:
        """Return all ranks' differences, or "". Raises HalfLoaded if a rank failed."""
        if fault is not None:
            log.error("%s: a checkpoint was loaded only in part", self._training.medic.job, exc_info=fault)
        try:
            reports = group.poll([None if fault is None else first_line(fault), different or None])
            if len(reports) < group.world_size:
                failures({rank: report[0] or report[1] for rank, report in reports.items()}, group)
            failed = failures({rank: report[0] for rank, report in reports.items()}, group)
            differs = failures({rank: report[1] for rank, report in reports.items()}, group)
        except NotAgreed as error:
            failed = differs = str(error)
        if failed:
            self._training.broken = _broken(failed)
            raise self._training.broken from fault
        return differs

    def _load(self, checkpoint: SavedCheckpoint) -> tuple[RunState | None, DigestComparison | None, Exception | None]:
        """Return this rank's error instead of raising it, unless all ranks raise it together."""
        training = self._training
        assert training.storage is not None
        try:
            put_back_tensors = remember_group_tensors(list(training.parts.optimizers().values()))
            run_state = training.storage.load(checkpoint, training.parts)
            put_back_tensors()
            before = run_state.get("digests") if run_state is not None and training.verifies else None
            if before is None:
                return run_state, None, None
            return run_state, compare_with(before, training.parts), None
        except (Refusal, UnusableCheckpoint, NotAgreed):
            raise  # on all ranks together
        except Exception as error:  # any error: the other ranks wait for this report
            return None, None, error


def _verified(comparison: DigestComparison | None, group: Group) -> Mapping[str, Any]:
    if comparison is None:
        return {"compared": 0, "agreed": 0, "ranks": group.world_size, "why": _NO_DIGESTS}
    return {"compared": comparison.compared, "agreed": comparison.compared, "ranks": group.world_size}


def _broken(why: str) -> HalfLoaded:
    return HalfLoaded(
        f"a checkpoint was loaded only in part ({why}), so that there is nothing left to train on; start "
        "the job again, to resume from one that is whole, and move away those that cannot be loaded"
    )


def remember_group_tensors(optimizers: Sequence[Any]) -> Callable[[], None]:
    """Return a function that puts the tensor objects back after a load; the loop may hold one."""
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
