"""Removal of build cache, and of unused containers and images, one by one and never forced.

An image's age counts from its last pull, build or naming (``LastTagTime``): a job may just have pulled an old image.
Without that time (Podman), named images stay.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from msgspec import Struct, field

from trainmedic_agent.containers.engine_api import ContainerEngine, EngineAnswer
from trainmedic_agent.containers.policy import ContainersPolicy, Leftover
from trainmedic_agent.disk.report import printable

_STOPPED = frozenset({"exited", "dead", "created"})
_MAX_EXAMPLES = 3
_MAX_REASONS = 30  # the engine's texts may each name another object, and a larger output would not be kept
_OTHER = "other"
_CONFLICT, _NOT_FOUND = 409, 404
_NO_NAME = "<none>"
_PARTLY_UNTAGGED = "partly_untagged"
_NEVER_YEAR = 1970  # engines write unset times as year 1 or the epoch


class Pruning(Struct):
    """``left``: names by reason."""

    removed: Counter[Leftover] = field(default_factory=Counter)
    cache_bytes: int = 0
    left: dict[str, list[str]] = field(default_factory=dict)

    def leave(self, reason: str, name: str) -> None:
        is_of_engine = " " in reason  # else one of ours
        if is_of_engine and reason not in self.left and len(self.left) >= _MAX_REASONS:
            reason = _OTHER
        self.left.setdefault(reason, []).append(name)

    def output(self) -> Mapping[str, Any]:
        return {
            "removed": {str(kind): count for kind, count in sorted(self.removed.items())},
            "build_cache_bytes": self.cache_bytes,
            "left": {
                reason: {"count": len(names), "examples": [printable(name) for name in names[:_MAX_EXAMPLES]]}
                for reason, names in sorted(self.left.items())
            },
        }


class LeftoverRemover(Struct):
    engine: ContainerEngine
    policy: ContainersPolicy
    now: datetime
    dry_run: bool
    seconds_left: Callable[[], float]
    may_continue: Callable[[], bool]
    pruning: Pruning = field(default_factory=Pruning)

    def remove(self) -> None:
        """Remove what the policy allows. Raises EngineAnswer if a listing is refused, CommandNotExecuted on silence."""
        work: Mapping[Leftover, Callable[[], None]] = {
            Leftover.BUILD_CACHE: self._prune_build_cache,
            Leftover.DANGLING_IMAGES: lambda: self._remove_images(named=False),
            Leftover.STOPPED_CONTAINERS: self._remove_containers,
            Leftover.UNUSED_IMAGES: lambda: self._remove_images(named=True),
        }
        for kind in Leftover:
            if kind in self.policy.remove and self.may_continue():
                work[kind]()

    def _prune_build_cache(self) -> None:
        if self.dry_run:
            self.pruning.leave("not_known_in_advance", "build cache")
            return
        hours = math.ceil(self.policy.min_age / timedelta(hours=1))  # round up, so that nothing younger is removed
        try:
            self.pruning.cache_bytes = self.engine.prune_build_cache(hours, self.seconds_left())
        except EngineAnswer as answer:
            self.pruning.leave("not_supported" if answer.status == _NOT_FOUND else str(answer), "build cache")

    def _remove_containers(self) -> None:
        for listed in self.engine.containers(self.seconds_left()):
            if listed.get("State") not in _STOPPED:
                continue
            if not self.may_continue():
                return
            self._remove_container(str(listed.get("Id")), _container_names(listed))

    def _remove_container(self, ident: str, names: list[str]) -> None:
        name = names[0] if names else ident[:12]
        if self._is_kept(names):
            self.pruning.leave("kept_by_policy", name)
            return
        try:
            full = self.engine.container(ident, self.seconds_left())
            reason = self._reason_to_keep(full)
            if reason is None and not self.dry_run:
                self.engine.remove_container(ident, self.seconds_left())
        except EngineAnswer as answer:
            reason = _why_not_removed(answer)
        self._record(Leftover.STOPPED_CONTAINERS, reason, name)

    def _reason_to_keep(self, container: Mapping[str, Any]) -> str | None:
        state = container.get("State")
        host = container.get("HostConfig")
        restart = host.get("RestartPolicy") if isinstance(host, Mapping) else None
        if not isinstance(state, Mapping) or state.get("Status") not in _STOPPED:
            return "in_use"
        if isinstance(restart, Mapping) and restart.get("Name") not in ("", "no", None):
            return "has_restart_policy"
        never_ran = state.get("Status") == "created"
        return self._why_too_young(container.get("Created") if never_ran else state.get("FinishedAt"))

    def _remove_images(self, *, named: bool) -> None:
        kind = Leftover.UNUSED_IMAGES if named else Leftover.DANGLING_IMAGES
        used = {str(container.get("ImageID")) for container in self.engine.containers(self.seconds_left())}
        for listed in self.engine.images(self.seconds_left()):
            ident, names = str(listed.get("Id")), _image_names(listed)
            if bool(names) is not named or ident in used:
                continue
            if not self.may_continue():
                return
            name = names[-1] if names else ident.removeprefix("sha256:")[:12]
            self._record(kind, self._remove_image(ident, names), name)

    def _remove_image(self, ident: str, names: list[str]) -> str | None:
        """Return why it stays; None if it was removed, or would be."""
        if self._is_kept(names):
            return "kept_by_policy"
        try:
            full = self.engine.image(ident, self.seconds_left())
            metadata = full.get("Metadata")
            since = metadata.get("LastTagTime") if isinstance(metadata, Mapping) else None
            if not names and _parsed_time(since) is None:
                since = full.get("Created")
            if (reason := self._why_too_young(since)) is not None:
                return reason
            if not self.dry_run:
                return self._remove_names(names or [ident])
        except EngineAnswer as answer:
            return _why_not_removed(answer)
        return None

    def _remove_names(self, names: list[str]) -> str | None:
        # An image with several names is removed with the last of them.
        for count, name in enumerate(names):
            try:
                self.engine.remove_image(name, self.seconds_left())
            except EngineAnswer as answer:
                if count == 0:
                    raise
                if answer.status != _NOT_FOUND:
                    return _PARTLY_UNTAGGED
        return None

    def _why_too_young(self, written: object) -> str | None:
        at = _parsed_time(written)
        if at is None:
            return "age_unknown"
        return "young" if self.now - at < self.policy.min_age else None

    def _is_kept(self, names: list[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in self.policy.keep)

    def _record(self, kind: Leftover, reason: str | None, name: str) -> None:
        if reason is None:
            self.pruning.removed[kind] += 1
        else:
            self.pruning.leave(reason, name)


def _why_not_removed(answer: EngineAnswer) -> str:
    return {_CONFLICT: "in_use", _NOT_FOUND: "vanished_meanwhile"}.get(answer.status, str(answer))


def _parsed_time(written: object) -> datetime | None:
    if not isinstance(written, str):
        return None
    try:
        # Drop the fraction of a second: Python parses at most microseconds, and engines write nanoseconds.
        head, _, rest = written.partition(".")
        zone = rest.lstrip("0123456789") or ("Z" if rest else "")
        at = datetime.fromisoformat(head + zone if rest else written)
    except ValueError:
        return None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return at if at.year > _NEVER_YEAR else None


def _container_names(listed: Mapping[str, Any]) -> list[str]:
    names = listed.get("Names")
    return [str(name).lstrip("/") for name in names] if isinstance(names, list) else []


def _image_names(listed: Mapping[str, Any]) -> list[str]:
    """Return tags, otherwise digests."""
    for member in ("RepoTags", "RepoDigests"):
        if names := [str(name) for name in listed.get(member) or () if _NO_NAME not in str(name)]:
            return names
    return []
