"""A playbook that is checked and compiled, and those that are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from msgspec import Struct

from trainmedic_core.target import Target
from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.run import Run
from trainmedic_server.domain.topology import Topology

if TYPE_CHECKING:
    from pydantic import BaseModel

    from trainmedic_server.domain.playbook import ActionStep, ApproveStep, Playbook, WaitStep

Step: TypeAlias = "ActionStep | WaitStep | ApproveStep"
Scope = Mapping[str, Any]


class Match(Struct, frozen=True):
    """Whether a playbook reacts to an alert."""

    matched: bool
    why: str = ""
    """Why it does not react; empty where it does."""
    failed: bool = False
    """Whether a condition could not be evaluated, which counts as not matching."""
    unproven: bool = False
    """True if all conditions hold and only the proof that ``on.proof`` asks for is missing."""


class Shortlist(Struct, frozen=True):
    """The playbooks that name an alert's alertname, divided by whether they can react to it."""

    playbooks: Sequence[CompiledPlaybook]
    """Those that can, and are to be asked; in the order of their names."""
    ruled_out: Iterable[CompiledPlaybook] = ()
    """Those that certainly do not match, in the order of their names; read once, as far as they are needed."""
    count_ruled_out: int = 0


class CompiledPlaybook(Protocol):
    """A playbook that is checked and compiled. Immutable."""

    @property
    def definition(self) -> Playbook: ...
    @property
    def version(self) -> str:
        """Hash of its text."""
        ...

    @property
    def text(self) -> str: ...
    @property
    def source(self) -> str:
        """The file it came from."""
        ...

    def match(self, alert: Alert) -> Match:
        """Return whether the playbook reacts to this alert: alertname, matchers, ``when``, ``proof``. All matchers
        without a regular expression are checked before a matcher can fail to be evaluated."""
        ...

    def target_of(self, alert: Alert, topology: Topology) -> Target | Unresolved:
        """Return the target that the alert names, or why it names none."""
        ...

    def effect_query(self, run: Run) -> str | None:
        """Return what is asked to measure the run's effect; None where the alert's rule says it. Raises
        ExpressionError."""
        ...

    def when(self, phase: str, index: int, scope: Scope) -> bool:
        """Return whether the step is to run. Raises ExpressionError."""
        ...

    def params(self, phase: str, index: int, scope: Scope) -> BaseModel:
        """Return the action step's rendered and checked parameters. Raises ExpressionError."""
        ...

    def message(self, phase: str, index: int, scope: Scope) -> str:
        """Return what an approve step asks. Raises ExpressionError."""
        ...


class Catalog(Protocol):
    """The playbooks that are loaded."""

    def for_alert(self, alertname: str) -> Sequence[CompiledPlaybook]:
        """Return the playbooks that name this alertname, in the order of their names."""
        ...

    def shortlist(self, alert: Alert) -> Shortlist:
        """Return the same, with those set apart that this alert's labels rule out without asking each."""
        ...

    def get(self, name: str) -> CompiledPlaybook | None: ...
    def all(self) -> Sequence[CompiledPlaybook]: ...
    def compile(self, text: str, source: str) -> CompiledPlaybook:
        """Compile the text of an earlier version. Raises PlaybookError."""
        ...
