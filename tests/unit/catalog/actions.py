"""Small actions for the catalog's tests, and playbooks that use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trainmedic_core.fields import Duration
from trainmedic_core.target import TargetKind
from trainmedic_server import errors
from trainmedic_server.catalog import loader
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook
from trainmedic_server.catalog.library import Library
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.ports.actions import Action, Call, Inverse, Services

PLAYBOOK = """\
playbook: spike
on:
  alert: TrainingLossSpike
target: job
steps:
  - id: back
    action: test.rollback
    with: {steps_back: 100}
"""


class RollbackParams(BaseModel):
    model_config = ConfigDict(extra="forbid")
    before: str | None = None
    steps_back: int | None = Field(None, ge=1)
    skip: list[int] = []
    wait: Duration = timedelta(seconds=1)
    how: Literal["fast", "safe"] = "safe"

    @model_validator(mode="after")
    def _one(self) -> RollbackParams:
        if self.before is not None and self.steps_back is not None:
            raise ValueError("give before or steps_back, not both")
        return self


class TellParams(BaseModel):
    model_config = ConfigDict(extra="forbid")
    message: str


class _Base:
    summary: ClassVar[str] = "For tests."
    targets: ClassVar[frozenset[TargetKind]] = frozenset(TargetKind)
    harmful: ClassVar[bool] = True
    default_timeout: ClassVar[timedelta] = timedelta(seconds=30)

    def __init__(self, services: Services) -> None: ...

    async def perform(self, call: Call) -> Mapping[str, Any]:
        return {}

    def outcome_saved(self, command_id: str) -> None: ...


class Rollback(_Base):
    name: ClassVar[str] = "test.rollback"
    targets: ClassVar[frozenset[TargetKind]] = frozenset({TargetKind.JOB})
    Params: ClassVar[type[BaseModel]] = RollbackParams

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        return Inverse("test.rollback", {}) if output else None


class Tell(_Base):
    name: ClassVar[str] = "test.tell"
    harmful: ClassVar[bool] = False
    Params: ClassVar[type[BaseModel]] = TellParams

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> None:
        return None

    @classmethod
    def check_template(cls, raw: Mapping[str, Any]) -> None:
        if "secret" in str(raw.get("message")):
            raise ValueError("a message holds no secret")


class NoParams(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Read(_Base):
    """It says which keys its output can have."""

    name: ClassVar[str] = "test.read"
    harmful: ClassVar[bool] = False
    Params: ClassVar[type[BaseModel]] = NoParams
    outputs: ClassVar[frozenset[str]] = frozenset({"limit_watts", "draw_watts"})

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> None:
        return None


class TestActions:
    """`ports.Actions` for checking only."""

    __test__ = False

    def names(self) -> Sequence[str]:
        return ["test.read", "test.rollback", "test.tell"]

    def action_class(self, name: str) -> type[Action] | None:
        kinds: dict[str, type[Action]] = {"test.read": Read, "test.rollback": Rollback, "test.tell": Tell}
        return kinds.get(name)

    def get(self, name: str) -> Action:
        raise errors.PermanentFailure(f"no action {name}")


def problems_of(text: str) -> list[str]:
    """What the checks say of `text`, as ``line:column: message``."""
    _, problems = loader.load(text, "p.yaml", TestActions())
    return [str(problem).removeprefix("p.yaml:").strip() for problem in problems]


def playbook_of(text: str) -> YamlPlaybook:
    playbooks, problems = loader.load(text, "p.yaml", TestActions())
    assert problems == []
    assert len(playbooks) == 1
    return playbooks[0]


def library(*roots: Path) -> Library:
    made = Library(roots, TestActions())
    made.reload()
    return made


def alert(name: str = "TrainingLossSpike", **labels: str) -> Alert:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    return Alert("f1", AlertStatus.FIRING, {"alertname": name, **labels}, {"summary": "s"}, moment)


def config_map(root: Path, generation: str, files: dict[str, str]) -> None:
    """Write files as the kubelet does: a new directory, then `..data` swapped to it by one rename."""
    (root / f"..{generation}").mkdir(parents=True)
    for name, text in files.items():
        (root / f"..{generation}" / name).write_text(text)
    (root / "..data_tmp").symlink_to(f"..{generation}")
    (root / "..data_tmp").rename(root / "..data")
    for name in files:
        if not (root / name).is_symlink():
            (root / name).symlink_to(f"..data/{name}")
