"""Checkpoint contents of a training that each rank has whole (DDP)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping, Sequence

from trainmedic.torch.checkpoints.checkpoint_files import read_training, write_training
from trainmedic.torch.checkpoints.checkpoint_storage import (
    UnusableCheckpoint,
    check_match,
)
from trainmedic.torch.checkpoints.frozen_base import FrozenBase
from trainmedic.torch.checkpoints.rank_states import RankState, merge, own_of, unite, why_not_united
from trainmedic.torch.optimizer_states import is_zero_redundancy, owned_numbers
from trainmedic.torch.state_parts import ATTRIBUTES, StateParts

_OWN = "paths"  # present in this release; earlier ones hold each module's buffers


class ReplicatedContents:
    is_replicated = True

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._frozen = FrozenBase()

    def capture(self, parts: StateParts, run: Mapping[str, Any]) -> tuple[Any, Any]:
        return self.of_memory(parts, parts.capture(), run)

    def comparable(self, parts: StateParts) -> Mapping[str, Any]:
        return parts.capture()

    def use_group_of_its_own(self) -> None:
        """Do nothing: it uses no process group."""

    def of_memory(self, parts: StateParts, held: Any, run: Mapping[str, Any]) -> tuple[Any, Any]:
        own = own_of(held, RankState.of(run.get("rank_state")), self._rank)
        return (self._frozen.split(parts, held, run) if self._rank == 0 else None), own

    def write(self, path: Path, content: Any) -> None:
        if self._rank == 0:
            write_training(path, content)

    def prepare(self, path: Path, parts: StateParts, own: Any) -> Any:
        return own

    def read(self, path: Path, prepared: Any, parts: StateParts, checked: bool) -> Any:
        states = read_training(path, parts, checked)
        if prepared is not None and _OWN in prepared:
            merge(states, prepared)
        check_match(path, parts, states)
        return states

    def restore(self, content: Any, parts: StateParts, own: Any) -> None:
        parts.restore(content)
        if own is not None and _OWN not in own:
            parts.restore_buffers(own)


def as_written(name: str, file: Mapping[str, Any], first: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return this rank's own state with its digests; after a fault rank 0's (``first``).

    Raises UnusableCheckpoint for an earlier release's differing state.
    """
    mine: Mapping[str, Any] = file["run"]
    digests = mine.get("digests")
    if digests is None:
        return mine
    if _OWN not in (file["own"] or ()) and digests != first.get("digests"):
        raise UnusableCheckpoint(f"{name} holds the state of rank 0 alone, and this rank had another")
    state = RankState.of(mine.get("rank_state"))
    if state is None:
        return mine
    of_rank_0 = {key: digest for key, digest in (first.get("digests") or {}).items() if _is_of(key, state.from_rank_0)}
    others = {key: digest for key, digest in digests.items() if not _is_of(key, state.from_rank_0)}
    return {**mine, "digests": {**others, **of_rank_0}}


def differs(first: Mapping[str, Any]) -> bool:
    state = RankState.of(first["run"].get("rank_state"))
    return state is not None and bool(state.parts)


def united(name: str, files: Sequence[Mapping[str, Any]], parts: StateParts) -> tuple[Any, Any]:
    """Return the united differences and their digests. Raises UnusableCheckpoint."""
    first = files[0]["run"]
    state = RankState.of(first.get("rank_state"))
    if state is None or not state.parts:
        return None, first.get("digests")
    states = [RankState.of(file["run"].get("rank_state")) for file in files]
    rank_states = [each for each in states if each is not None]
    own: dict[str, Any] = {"parts": [], "paths": [], "own": []}
    digests = [file["run"].get("digests") or {} for file in files]
    for part in state.parts:
        if part in parts.modules():
            same = all(_of(of_file, part) == _of(digests[0], part) for of_file in digests)
            part_united: dict[str, Any] | None = {} if same or part.partition(".")[0] != "model" else None
        elif part in parts.of_optimizers() or part == ATTRIBUTES:
            part_united = (
                unite([file["own"] for file in files], rank_states, part) if len(rank_states) == len(files) else None
            )
        else:
            part_united = {}
        if part_united is None:
            raise UnusableCheckpoint(why_not_united(part, name, len(files)))
        for key, members in part_united.items():
            own[key].extend(members)
    optimizers = (*parts.of_optimizers(), ATTRIBUTES)
    together = {
        key: digest for of_file in reversed(digests) for key, digest in of_file.items() if _is_of(key, optimizers)
    }
    return own, _held_here({**digests[0], **together}, parts) if first.get("digests") is not None else None


def _held_here(digests: Mapping[str, str], parts: StateParts) -> dict[str, str]:
    held = dict(digests)
    for name, part in parts.optimizers().items():
        if is_zero_redundancy(part):
            owned = owned_numbers(part)
            for key in _of(digests, name):
                if int(key.removeprefix(f"{name}.").partition(".")[0]) not in owned:
                    del held[key]
    return held


def _of(digests: Mapping[str, str], part: str) -> dict[str, str]:
    return {key: digest for key, digest in digests.items() if _is_of(key, (part,))}


def _is_of(name: str, parts: Sequence[str]) -> bool:
    return name.startswith(tuple(f"{part}{end}" for part in parts for end in ".:"))
