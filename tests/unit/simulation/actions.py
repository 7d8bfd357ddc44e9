"""The actions of the simulation's tests: names, parameters and inverses; nothing acts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from trainmedic_core.target import TargetKind
from trainmedic_server import errors
from trainmedic_server.ports.actions import Action, Call, Inverse, Services

PLAYBOOK = """\
playbook: cap
on: {alert: Hot}
target: node
guards: {cooldown: 10m}
steps:
  - id: cap
    action: test.cap
    with: {amount: 80}
    timeout: 30s
    retry: {attempts: 3}
    undo: on_resolve
  - id: cooled
    wait_for: resolved
    timeout: 5m
    on_timeout: continue
  - id: harder
    when: steps.cooled.status == "timed_out"
    action: test.cap
    with: {amount: "{{ steps.cap.params.amount - 20 }}"}
    undo: on_resolve
on_failure:
  - action: test.tell
    with: {text: "{{ target.node }} is still hot, see {{ labels.runbook }}"}
"""


class _Params(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Amount(_Params):
    amount: float


class Text(_Params):
    text: str


class _Base:
    summary: ClassVar[str] = "For tests."
    targets: ClassVar[frozenset[TargetKind]] = frozenset(TargetKind)
    harmful: ClassVar[bool] = True
    default_timeout: ClassVar[timedelta] = timedelta(seconds=30)

    def __init__(self, services: Services) -> None: ...

    async def perform(self, call: Call) -> Mapping[str, Any]:
        raise errors.PermanentFailure("a test must never reach the real action")

    def outcome_saved(self, command_id: str) -> None: ...

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        return None


class Cap(_Base):
    name: ClassVar[str] = "test.cap"
    Params: ClassVar[type[BaseModel]] = Amount

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        return Inverse("test.uncap", {"amount": (output or {}).get("was", 100)})


class Uncap(_Base):
    name: ClassVar[str] = "test.uncap"
    Params: ClassVar[type[BaseModel]] = Amount


class Tell(_Base):
    name: ClassVar[str] = "test.tell"
    harmful: ClassVar[bool] = False
    Params: ClassVar[type[BaseModel]] = Text


class SimulatedActions:
    """`ports.Actions` over the classes above."""

    _KINDS: ClassVar[Mapping[str, type[Action]]] = {kind.name: kind for kind in (Cap, Uncap, Tell)}

    def names(self) -> Sequence[str]:
        return sorted(self._KINDS)

    def action_class(self, name: str) -> type[Action] | None:
        return self._KINDS.get(name)

    def get(self, name: str) -> Action:
        raise errors.PermanentFailure("a test must never reach the real action")
