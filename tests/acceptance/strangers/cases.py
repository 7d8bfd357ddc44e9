"""Cases of alerts from strangers' rule sets, each with its expected outcome. The files are in ``cases/``.

A case has labels as a public rule set or exporter makes them. It is sent under the published alert name, under the name
of our own rule with the same labels, or both. The second form tests which target the labels name, whatever a map knows.

An outcome is a decision, a target and changes (``effects``). Several outcomes of a case are alternatives, and each is
right. ``names_one`` says that the labels name exactly one known subject on which an act is right. Such a case counts
for the share that must act. ``doubted`` is a reason for which it does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tests.acceptance.strangers.fleet import JOBS, NODES, PODS

FOLDER = Path(__file__).with_name("cases")
SAME = "same"
Decision = Literal["started", "not_matched", "not_accepted", "target_unknown", "target_ambiguous"]
_PARTS_OF_CHANGE = {"cap": 2, "cordon": 1, "evict": 1, "clean": 1, "command": 2}
_SUBJECTS = frozenset(
    {
        *NODES,
        *(job.name for job in JOBS),
        *(f"{pod.namespace}/{pod.name}" for pod in PODS),
        *(f"{node.name}/{index}" for node in NODES.values() for index in range(len(node.gpus))),
    }
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Outcome(_Strict):
    """One right outcome."""

    decision: Decision
    target: str | None = None
    """The key of the run's target, a GPU as ``gpu:<node>/<index>`` (`fleet.canonical`); None for any or none."""
    acts: tuple[str, ...] = ()
    """All changes, and no others (`effects`)."""
    told: str | None = None
    """Text in a message to people; None where it does not matter."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Outcome:
        if self.acts and self.decision != "started":
            raise ValueError("what was not started changes nothing")
        if self.decision == "started" and self.target is None:
            raise ValueError("a run has a target")
        for change in self.acts:
            verb, *words = change.split()
            if len(words) != _PARTS_OF_CHANGE[verb] or words[0] not in _SUBJECTS:
                raise ValueError(f"{change!r} changes nothing that the fleet has")
        return self

    def __str__(self) -> str:
        parts = (self.decision, self.target or "", "; ".join(self.acts))
        return " ".join(part for part in parts if part)


def _as_list(value: object) -> object:
    return [value] if isinstance(value, Mapping) else value


Outcomes = Annotated[tuple[Outcome, ...], BeforeValidator(_as_list), Field(min_length=1)]


class Case(_Strict):
    """One set of labels and their source."""

    id: str = Field(pattern=r"^[a-z0-9-]+$")
    source: str = Field(min_length=8)
    """Repository and path, or the page of a manual."""
    alert: str
    """The published alert name."""
    ours: str | None = None
    """The name of our own rule under which the same labels are sent; None: only as published."""
    labels: dict[str, str]
    annotations: dict[str, str] = {}
    expect: Outcomes
    """Expected outcomes of the alert under our own name, or under the published one if there is no other."""
    published: Outcomes | Literal["same"] | None = None
    """Expected outcomes of the alert under the published name. None: it is not sent under it, because no shipped map
    need know it."""
    names_one: bool = False
    not_ready: str | None = None
    """A node whose kubelet does not report while the alert fires."""
    doubted: str | None = None
    """Reason why the expectation is open to argument."""
    note: str | None = None

    @model_validator(mode="after")
    def _makes_sense(self) -> Case:
        if "alertname" in self.labels:
            raise ValueError("the alert's name stands in `alert`")
        if self.not_ready is not None and self.not_ready not in NODES:
            raise ValueError(f"there is no node {self.not_ready}")
        if self.names_one and self.expect[0].decision != "started":
            raise ValueError("labels that name one subject lead to an act")
        if self.ours is None and self.published is None:
            raise ValueError("it is sent under no name")
        return self


class Sending(_Strict):
    """One alert that is sent: a case under one of its names."""

    case: Case
    name: str
    outcomes: tuple[Outcome, ...]
    is_published: bool

    def __str__(self) -> str:
        return f"{self.case.id}:{self.name}"

    @property
    def labels(self) -> Mapping[str, str]:
        return {"alertname": self.name, **self.case.labels}


def load(name: str) -> tuple[Case, ...]:
    """The cases of one file. Raises pydantic's ValidationError, or ValueError where two have one id."""
    written = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    cases = tuple(Case.model_validate(entry) for entry in written)
    ids = [case.id for case in cases]
    if len(set(ids)) < len(ids):
        raise ValueError(f"{name}.yaml: an id stands twice")
    return cases


def sendings(case: Case) -> Iterator[Sending]:
    """The case under each of its names."""
    if case.ours != case.alert and case.published is not None:
        outcomes = case.expect if case.published == SAME else case.published
        assert not isinstance(outcomes, str)
        yield Sending(case=case, name=case.alert, outcomes=outcomes, is_published=True)
    if case.ours is not None:
        yield Sending(case=case, name=case.ours, outcomes=case.expect, is_published=False)
