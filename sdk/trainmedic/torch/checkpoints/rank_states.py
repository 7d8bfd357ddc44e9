"""Differences between ranks with mostly equal states, such as Muon's momentum or buffers.

A checkpoint stores rank 0's states, and other ranks' differing leaves (values in nested mappings).
"""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import dataclass
from typing import Any, Iterator, Mapping, Sequence

import torch

from trainmedic.errors import NotAgreed
from trainmedic.job.group import Group
from trainmedic.torch.checkpoints.digests import KnownDigests, earlier_digests_of
from trainmedic.torch.optimizer_attributes import HOOK
from trainmedic.torch.state_parts import ATTRIBUTES

Path = tuple[Any, ...]  # keys from the outermost mapping to a leaf
_DIGITS = 16  # of a hexadecimal hash, to keep files small


@dataclass(frozen=True)
class RankState:
    """Differences of this rank's states from rank 0's."""

    rank: int
    parts: tuple[str, ...]  # parts that differ on any rank
    own: tuple[Path, ...]  # this rank's leaves that rank 0 lacks or has with another value
    digests: Mapping[str, str]  # digests of this rank's leaves in `parts`, by path as text
    from_rank_0: tuple[str, ...] = ()  # parts that differ by a fault; loading takes rank 0's

    def plain(self) -> dict[str, Any]:
        members = {"rank": self.rank, "parts": list(self.parts), "own": list(self.own)}
        return {**members, "digests": dict(self.digests), "from_rank_0": list(self.from_rank_0)}

    @classmethod
    def from_plain(cls, members: Any) -> RankState | None:
        """Parse `plain`'s output; None without one: of an earlier release, of one rank, or if ranks could not agree."""
        if not isinstance(members, Mapping):
            return None
        paths = tuple(tuple(path) for path in members["own"])
        faulty = tuple(members["from_rank_0"])
        return cls(members["rank"], tuple(members["parts"]), paths, members["digests"], faulty)


def leaves(states: Mapping[Any, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield leaves with their paths. An empty mapping is a leaf."""
    for key, value in states.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def compare_states(states: Mapping[str, Any], group: Group, cache: KnownDigests) -> RankState | None:
    """Compare this rank's states with rank 0's, on every rank. None if they cannot agree."""
    mine = leaf_digests(states, cache)
    parts: dict[str, dict[str, str]] = {}
    for path, digest in mine.items():
        parts.setdefault(str(path[0]), {})[_text(path)] = digest
    try:
        reports = group.poll({name: _hashed(sorted(held.items())) for name, held in parts.items()})
        if len(reports) < group.world_size:
            return None
        names = sorted({name for held in reports.values() for name in held})
        differing = [name for name in names if len({held.get(name) for held in reports.values()}) > 1]
        if not differing:
            return RankState(group.rank, (), (), {})
        of_parts = [parts.get(name, {}) for name in differing]
        first = group.choose(lambda: {text: digest for held in of_parts for text, digest in held.items()})
    except NotAgreed:
        return None
    held = {path: digest for path, digest in mine.items() if str(path[0]) in differing}
    own = tuple(path for path, digest in held.items() if first.get(_text(path)) != digest)
    return RankState(group.rank, tuple(differing), own, {_text(path): digest for path, digest in held.items()})


def own_part(states: Mapping[str, Any], state: RankState | None, rank: int) -> dict[str, Any]:
    """Return this rank's differing leaves (``own``) and ``paths`` of all in ``parts``.

    If ``state`` is None, all leaves differ, except rank 0's.
    """
    held = dict(leaves(states))
    if state is None:
        own = list(held.items()) if rank else []
        return {"parts": list(states), "paths": [_text(path) for path in held], "own": own}
    parts = [part for part in state.parts if part not in state.from_rank_0]
    paths = [_text(path) for path in held if path[0] in parts]
    return {"parts": parts, "paths": paths, "own": [(path, held[path]) for path in state.own if path[0] in parts]}


def merge(states: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Change rank 0's states into those of the rank whose `own_part` is ``own``."""
    present = set(own["paths"])
    for path, _ in [leaf for leaf in leaves(states) if leaf[0][0] in own["parts"]]:
        if _text(path) not in present:
            _remove(states, path)
    put_leaves(states, own["own"])


def put_leaves(states: dict[str, Any], put: Sequence[tuple[Path, Any]]) -> None:
    for path, value in put:
        mapping = states
        for key in path[:-1]:
            mapping = mapping.setdefault(key, {})
        mapping[path[-1]] = value


def unite(owns: Sequence[Mapping[str, Any]], states: Sequence[RankState], part: str) -> dict[str, Any] | None:
    """Return an own part with all ranks' leaves of ``part``, or None."""
    digests = _digests_by_path(states, part)
    if not can_unite(states, part):
        return None
    united = [(path, value) for own in owns for path, value in own["own"] if _text(path) in digests]
    return {"parts": [part], "paths": list(digests), "own": united}


def can_unite(states: Sequence[RankState], part: str) -> bool:
    """Return whether ranks with a leaf agree on it. Communication hooks are ignored: they restart."""
    return all(len(digests) == 1 for digests in _digests_by_path(states, part).values())


def why_not_united(part: str, checkpoint: str, written_by: int) -> str:
    what = "what optimizers keep in attributes" if part == ATTRIBUTES else f"the state of {part}"
    return (
        f"{what} in {checkpoint} belongs to each of its {written_by} ranks, so that another number of ranks cannot "
        f"continue with it: start {written_by} ranks"
    )


def _digests_by_path(states: Sequence[RankState], part: str) -> dict[str, set[str]]:
    digests: dict[str, set[str]] = {}
    in_part = _text((part,)).removesuffix("]")  # paths in ``part`` begin with it, as text
    for state in states:
        for path, digest in state.digests.items():
            if path.startswith(in_part) and HOOK not in path:
                digests.setdefault(path, set()).add(digest)
    return digests


def leaf_digests(states: Mapping[str, Any], cache: KnownDigests) -> dict[Path, str]:
    tensors: list[torch.Tensor] = []
    texts = {path: _described(value, tensors) for path, value in leaves(states)}
    named = earlier_digests_of({str(number): tensor for number, tensor in enumerate(tensors)}, cache)
    digests = {}
    for path, (text, numbers) in texts.items():
        digests[path] = _hashed([text, [named[str(number)] for number in numbers]])
    return digests


def _described(value: Any, tensors: list[torch.Tensor]) -> tuple[str, list[int]]:
    # As text, and the numbers of its tensors in ``tensors``.
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not hasattr(value, "to_local"):
        tensors.append(value.detach())
        return f"tensor {tuple(value.shape)}", [len(tensors) - 1]
    if isinstance(value, Mapping):
        value = [item for pair in value.items() for item in pair]
    if type(value) in (list, tuple):
        reports = [_described(member, tensors) for member in value]
        return f"{[text for text, _ in reports]}", [number for _, numbers in reports for number in numbers]
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value), []
    try:
        return hashlib.sha256(pickle.dumps(value)).hexdigest(), []
    except Exception as error:  # writing pickles too and reports the error
        return f"{type(value).__name__}: {type(error).__name__}", []


def _remove(states: dict[str, Any], path: Path) -> None:
    # Also mappings that become empty.
    within: list[dict[Any, Any]] = [states]
    for key in path[:-1]:
        within.append(within[-1][key])
    for held, key in zip(reversed(within[1:]), reversed(path[1:]), strict=True):
        del held[key]
        if held:
            return


def _text(path: Path) -> str:
    return repr(list(path))


def _hashed(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:_DIGITS]
