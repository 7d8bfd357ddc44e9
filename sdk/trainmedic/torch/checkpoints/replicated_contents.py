"""Checkpoint contents of a training that each rank has whole (DDP)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping, Sequence

from trainmedic.torch.checkpoints.checkpoint_files import read_training, write_training
from trainmedic.torch.checkpoints.checkpoint_storage import (
    UnusableCheckpoint,
    check_match,
)
from trainmedic.torch.checkpoints.digests import compare
from trainmedic.torch.checkpoints.frozen_base import FrozenBase
from trainmedic.torch.checkpoints.rank_states import RankState, merge, own_part, unite, why_not_united
from trainmedic.torch.optimizer_states import is_zero_redundancy, owned_numbers
from trainmedic.torch.state_parts import ATTRIBUTES, StateParts

# Key in a rank's own part by `own_part`. The own part of earlier releases, without it, is the modules' buffers.
_PATHS = "paths"


class ReplicatedContents:
    """`BackgroundContents`: rank 0's states, and other ranks' differences."""

    is_replicated = True

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._frozen = FrozenBase()

    def capture(self, parts: StateParts, run: Mapping[str, Any]) -> tuple[Any, Any]:
        return self.divide(parts, parts.capture(), run)

    def comparable(self, parts: StateParts) -> Mapping[str, Any]:
        return parts.capture()

    def use_separate_group(self) -> None:
        """Do nothing: it uses no process group."""

    def divide(self, parts: StateParts, held: Any, run: Mapping[str, Any]) -> tuple[Any, Any]:
        own = own_part(held, RankState.from_plain(run.get("rank_state")), self._rank)
        return (self._frozen.split(parts, held, run) if self._rank == 0 else None), own

    def write(self, path: Path, content: Any) -> None:
        if self._rank == 0:
            write_training(path, content)

    def prepare(self, path: Path, parts: StateParts, own: Any) -> Any:
        return own

    def read(self, path: Path, prepared: Any, parts: StateParts, checked: bool) -> Any:
        states = read_training(path, parts, checked)
        if prepared is not None and _PATHS in prepared:
            merge(states, prepared)
        check_match(path, parts, states)
        return states

    def restore(self, content: Any, parts: StateParts, own: Any) -> None:
        parts.restore(content)
        if own is not None and _PATHS not in own:
            parts.restore_buffers(own)


def with_digests_of_restored(name: str, file: Mapping[str, Any], run_of_rank_0: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return this rank's run state; faulty parts get rank 0's digests.

    Raises UnusableCheckpoint for an earlier release's differing state.
    """
    mine: Mapping[str, Any] = file["run"]
    digests = mine.get("digests")
    if digests is None:
        return mine
    if _PATHS not in (file["own"] or ()) and compare(run_of_rank_0.get("digests") or {}, digests).different:
        raise UnusableCheckpoint(f"{name} holds the state of rank 0 alone, and this rank had another")
    state = RankState.from_plain(mine.get("rank_state"))
    if state is None:
        return mine
    faulty = state.from_rank_0
    of_rank_0 = {key: value for key, value in (run_of_rank_0.get("digests") or {}).items() if _is_in(key, faulty)}
    own = {key: digest for key, digest in digests.items() if not _is_in(key, faulty)}
    return {**mine, "digests": {**own, **of_rank_0}}


def differs_by_rank(file_of_rank_0: Mapping[str, Any]) -> bool:
    state = RankState.from_plain(file_of_rank_0["run"].get("rank_state"))
    return state is not None and bool(state.parts)


def unite_files(name: str, files: Sequence[Mapping[str, Any]], parts: StateParts) -> tuple[Any, Any]:
    """Return one own part, and its digests, for another number of ranks. Raises UnusableCheckpoint."""
    first = files[0]["run"]
    state = RankState.from_plain(first.get("rank_state"))
    if state is None or not state.parts:
        return None, first.get("digests")
    own: dict[str, Any] = {"parts": [], "paths": [], "own": []}
    for part in state.parts:
        part_united = _unite_part(part, files, parts)
        if part_united is None:
            raise UnusableCheckpoint(why_not_united(part, name, len(files)))
        for key, members in part_united.items():
            own[key].extend(members)
    if first.get("digests") is None:
        return own, None
    optimizers = (*parts.optimizer_parts(), ATTRIBUTES)
    digests = dict(first["digests"])
    for file in reversed(files):
        in_file = file["run"].get("digests") or {}
        digests.update((key, digest) for key, digest in in_file.items() if _is_in(key, optimizers))
    return own, _of_owned_parameters(digests, parts)


def _unite_part(part: str, files: Sequence[Mapping[str, Any]], parts: StateParts) -> dict[str, Any] | None:
    # A part's differences on all ranks; None if they cannot be united.
    if part in parts.modules():
        digests = [_of_part(file["run"].get("digests") or {}, part) for file in files]
        is_same = not any(compare(digests[0], each).different for each in digests)
        # Only a trained model must not lose the other ranks' differences.
        return {} if is_same or part.partition(".")[0] != "model" else None
    if part not in parts.optimizer_parts() and part != ATTRIBUTES:
        return {}
    states = [RankState.from_plain(file["run"].get("rank_state")) for file in files]
    known = [each for each in states if each is not None]
    return unite([file["own"] for file in files], known, part) if len(known) == len(files) else None


def _of_owned_parameters(digests: Mapping[str, str], parts: StateParts) -> dict[str, str]:
    # Without those of parameters that other ranks update.
    owned_digests = dict(digests)
    for name, part in parts.optimizers().items():
        if is_zero_redundancy(part):
            owned = owned_numbers(part)
            for key in _of_part(digests, name):
                if int(key.removeprefix(f"{name}.").partition(".")[0]) not in owned:
                    del owned_digests[key]
    return owned_digests


def _of_part(digests: Mapping[str, str], part: str) -> dict[str, str]:
    return {key: digest for key, digest in digests.items() if _is_in(key, (part,))}


def _is_in(name: str, parts: Sequence[str]) -> bool:
    # A digest's name begins with its part and a dot, or a colon for nonstandard states (`state_digests`).
    return name.startswith(tuple(f"{part}{end}" for part in parts for end in ".:"))
