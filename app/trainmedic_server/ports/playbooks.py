"""Loaded playbooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from msgspec import Struct

from trainmedic_core.target import Target
from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.run import Run
from trainmedic_server.domain.topology import Topology

if TYPE_CHECKING:
    from pydantic import BaseModel

    from trainmedic_server.domain.playbook import (
        ActionStep,
        ApproveStep,
        DelayStep,
        Playbook,
        PollStep,
        UntilStep,
        WaitStep,
    )

Step: TypeAlias = "ActionStep | WaitStep | PollStep | DelayStep | UntilStep | ApproveStep"
Scope = Mapping[str, Any]


class Match(Struct, frozen=True):
    matched: bool
    why: str = ""  # Empty if it matches.
    failed: bool = False  # True if a condition could not be evaluated, which counts as no match.
    unproven: bool = False  # True if only the playbook's ``proof`` is missing in the alert.


class Shortlist(Struct, frozen=True):
    """Playbooks of an alertname: those that can match, and those that the alert's labels rule out."""

    playbooks: Sequence[CompiledPlaybook]
    ruled_out: Iterable[CompiledPlaybook] = ()  # Sorted by name; can be iterated only once.
    count_ruled_out: int = 0


class CompiledPlaybook(Protocol):
    """Immutable. `phase` (such as ``steps``) and `index` identify a step, `scope` has the names of expressions.

    All methods except `match` and `target_of` raise ExpressionError.
    """

    @property
    def definition(self) -> Playbook: ...
    @property
    def version(self) -> str: ...

    @property
    def remembers(self) -> Mapping[str, timedelta] | None:
        """Windows of ``runs.count``, as written. None if ``runs`` is not used."""
        ...

    @property
    def text(self) -> str: ...
    @property
    def source(self) -> str: ...

    def match(self, alert: Alert) -> Match: ...

    def target_of(self, alert: Alert, topology: Topology) -> Target | Unresolved: ...

    def effect_query(self, run: Run) -> str | None:
        """Return None to use the alert rule's expression."""
        ...

    def when(self, phase: str, index: int, scope: Scope) -> bool: ...

    def params(self, phase: str, index: int, scope: Scope) -> BaseModel:
        """Render and check the parameters of an action step or polled wait."""
        ...

    def until(self, phase: str, index: int, scope: Scope, output: Mapping[str, Any]) -> bool | None:
        """Return whether a polled wait's condition holds for the action's `output`; None without a condition."""
        ...

    def undo_params(self, phase: str, index: int, scope: Scope, output: Mapping[str, Any] | None) -> BaseModel | None:
        """Return None if the undo needs the step's `output`, which is not known yet."""
        ...

    def message(self, phase: str, index: int, scope: Scope) -> str:
        """Return the question of an approve step, or the written time of a wait."""
        ...


class Catalog(Protocol):
    def for_alert(self, alertname: str) -> Sequence[CompiledPlaybook]: ...

    def shortlist(self, alert: Alert) -> Shortlist: ...

    def get(self, name: str) -> CompiledPlaybook | None: ...
    def all(self) -> Sequence[CompiledPlaybook]: ...
    def compile(self, text: str, source: str) -> CompiledPlaybook:
        """Compile the text of an earlier version. Raises PlaybookError."""
        ...
