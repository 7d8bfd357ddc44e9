"""The part of a test that is about logs: a job, the lines that its ranks and nodes print, and what is found in them.

Not here: the rest of a test (``suite_format``), and playing it (``log_scenario``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from trainmedic_server.diagnosis.verdict import Advice, Confidence
from trainmedic_server.domain.fields import Duration
from trainmedic_server.domain.finding import CauseClass, Role
from trainmedic_server.domain.log_sources import fault_of_source

MOST_RANKS = 1024
_SPAN = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?\Z")


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


def _read_ranks(value: Any) -> Any:
    """The ranks of ``3``, ``"0-7"`` and ``[0-3, 8]``."""
    ranks: list[int] = []
    for each in value if isinstance(value, list) else [value]:
        span = _SPAN.match(str(each)) if isinstance(each, (int, str)) and not isinstance(each, bool) else None
        if span is None:
            raise ValueError(f"{each!r} is no rank; write one as 3, and several as 0-7")
        ranks.extend(range(int(span[1]), int(span[2] or span[1]) + 1))
        if len(ranks) > MOST_RANKS:
            raise ValueError(f"a test has at most {MOST_RANKS} ranks")
    return tuple(ranks)


def _known_source(name: str) -> str:
    if fault := fault_of_source(name):
        raise ValueError(fault)
    return name


Ranks = Annotated[tuple[int, ...], BeforeValidator(_read_ranks)]


class VerdictGiven(_Model):
    """The verdict that the server has on the job, for playbooks that ask for `job.verdict`."""

    cause: CauseClass
    confidence: Confidence = Confidence.HIGH
    advice: Advice = Advice.RESTART
    node: str | None = None
    ranks: Ranks = ()


class JobEntry(_Model):
    """The job of a test: which ranks are on which node, and the UUIDs of nodes' GPUs by their PCI address."""

    name: str = "job-1"
    attempt: int = 1
    ranks: int | None = Field(None, description="How many there are; for the reader.")
    nodes: dict[str, Ranks] = {"node-1": (0,)}
    gpus: dict[str, dict[str, str]] = {}
    fails: Duration | None = Field(None, description="When it fails: ten seconds later its verdict is an alert.")
    verdict: VerdictGiven | None = Field(None, description="The newest verdict on it, of within the last hour.")

    def node_of(self, rank: int) -> str:
        """The rank's node; the first where none is given it."""
        return next((node for node, ranks in self.nodes.items() if rank in ranks), next(iter(self.nodes), "node-1"))


class LineEntry(_Model):
    """A line, or several, that a source prints. `fixture` is one of the file of fixtures, in which `replaced` is put in
    the place of what stands there."""

    at: Duration = timedelta(0)
    source: Annotated[str, AfterValidator(_known_source)]
    node: str | None = None
    rank: Ranks = ()
    text: str | None = None
    fixture: str | None = None
    replaced: dict[str, str] = Field({}, alias="with")
    times: int = Field(1, ge=1, le=10_000)
    every: Duration = timedelta(seconds=1)

    @model_validator(mode="after")
    def _has_one_text(self) -> LineEntry:
        if (self.text is None) == (self.fixture is None):
            raise ValueError("a line has either `text` or `fixture`")
        return self

    def written(self, fixtures: Mapping[str, str]) -> str:
        """The text that is printed; of a fixture that there is."""
        text = self.text if self.fixture is None else fixtures[self.fixture]
        assert text is not None
        for old, new in self.replaced.items():
            text = text.replace(old, new)
        return text

    @property
    def until(self) -> timedelta:
        """When the last of its repeats is printed."""
        return self.at + self.every * (self.times - 1)


class VerdictExpected(_Model):
    """What is expected of the verdict on all lines so far. `node: null` says that none may be named."""

    cause: CauseClass | None = None
    node: str | None = None
    gpu: str | None = None
    ranks: Ranks | None = None
    confidence: Confidence | None = None
    advice: Advice | None = None


class FindingExpected(_Model):
    """What is expected of a finding, all streams taken together."""

    rule: str
    target: str | None = None
    role: Role | None = None
    cause: CauseClass | None = None
    count: int | None = None
    ranks: Ranks | None = None
    fields: dict[str, str] = {}
    over: bool | None = None


class LogAlertExpected(_Model):
    """What is expected of the alert of a finding. `labels` may be some of its labels only."""

    name: str
    labels: dict[str, str] = {}
    summary: str | None = Field(None, description="A part of it.")
    over: bool | None = None
