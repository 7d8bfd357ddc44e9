"""Log part of the test format: job, printed lines, and expected findings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Self

from msgspec import Struct
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from trainmedic_core import duration, model_errors, yaml_files, yaml_text
from trainmedic_core.fields import Duration
from trainmedic_core.problems import DocumentPath, FileProblem
from trainmedic_core.yaml_text import YamlDocument
from trainmedic_logs.diagnosis.verdict import Advice, Confidence
from trainmedic_logs.domain.finding import CauseClass, Role
from trainmedic_logs.domain.log_sources import fault_of_source

LONGEST = timedelta(days=7)
"""Virtual time; longer tests are slow."""
MOST_RANKS = 1024
_SPAN = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?\Z")


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


def _read_ranks(value: Any) -> Any:
    """Parse ``3``, ``"0-7"`` and ``[0-3, 8]``."""
    ranks: list[int] = []
    for each in value if isinstance(value, list) else [value]:
        span = _SPAN.match(str(each)) if isinstance(each, (int, str)) and not isinstance(each, bool) else None
        first, last = (int(span[1]), int(span[2] or span[1])) if span is not None else (0, -1)
        if last < first:
            raise ValueError(f"{each!r} is not a rank; write one as 3, several as 0-7")
        ranks.extend(range(first, last + 1))
        if len(ranks) > MOST_RANKS:
            raise ValueError(f"a test has at most {MOST_RANKS} ranks")
    return tuple(ranks)


def _known_source(name: str) -> str:
    if fault := fault_of_source(name):
        raise ValueError(fault)
    return name


Ranks = Annotated[tuple[int, ...], BeforeValidator(_read_ranks)]


class VerdictGiven(_Model):
    """Existing verdict on the job, for playbooks that use `job.verdict`."""

    cause: CauseClass
    confidence: Confidence = Confidence.HIGH
    advice: Advice = Advice.RESTART
    node: str | None = None
    ranks: Ranks = ()


class JobEntry(_Model):
    """Job of a test: ranks by node, and GPU UUIDs by PCI address and node."""

    name: str = "job-1"
    attempt: int = 1
    ranks: int | None = Field(None, description="Number of ranks, for readers.")
    nodes: dict[str, Ranks] = {"node-1": (0,)}
    gpus: dict[str, dict[str, str]] = {}
    fails: Duration | None = Field(None, description="Time of its failure; 10 s later its verdict becomes an alert.")
    verdict: VerdictGiven | None = Field(None, description="Newest verdict of the last hour.")

    @property
    def first_node(self) -> str:
        return next(iter(self.nodes), "node-1")

    def node_of(self, rank: int) -> str:
        return next((node for node, ranks in self.nodes.items() if rank in ranks), self.first_node)


class LineEntry(_Model):
    """Printed lines. `fixture` names a line of the fixtures file, with replacements in `with`."""

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
        text = self.text if self.fixture is None else fixtures[self.fixture]
        assert text is not None
        for old, new in self.replaced.items():
            text = text.replace(old, new)
        return text

    @property
    def until(self) -> timedelta:
        return self.at + self.every * (self.times - 1)


class VerdictExpected(_Model):
    """Expected verdict on all lines so far. `node: null` expects no node."""

    cause: CauseClass | None = None
    node: str | None = None
    gpu: str | None = None
    ranks: Ranks | None = None
    confidence: Confidence | None = None
    advice: Advice | None = None


class FindingExpected(_Model):
    """Expected finding, merged over streams."""

    rule: str
    target: str | None = None
    role: Role | None = None
    cause: CauseClass | None = None
    count: int | None = None
    ranks: Ranks | None = None
    fields: dict[str, str] = {}
    over: bool | None = None


class LogAlertExpected(_Model):
    """Expected alert; `labels` may be a subset."""

    name: str
    labels: dict[str, str] = {}
    summary: str | None = Field(None, description="Substring of it.")
    over: bool | None = None


def as_list(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else [value]


class LogCheck(_Model):  # `extra="ignore"`: the server reads further keys
    """Log expectations at one time, or at the end without `at`. Lists are complete and ordered."""

    model_config = ConfigDict(extra="ignore")

    at: Duration | None = None
    findings: tuple[FindingExpected, ...] | None = None
    log_alerts: tuple[LogAlertExpected, ...] | None = Field(None, alias="alerts")
    verdict: VerdictExpected | None = None


class LogTest(_Model):
    model_config = ConfigDict(extra="ignore")

    name: str
    job: JobEntry = JobEntry()
    lines: tuple[LineEntry, ...] = ()
    end: Duration | None = None
    expect: Annotated[tuple[LogCheck, ...], BeforeValidator(as_list), Field(min_length=1)]

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        latest = self.last_moment
        if self.end is not None and self.end < latest:
            raise ValueError(f"an entry at {duration.write(latest)} is after the test's end")
        if max(latest, self.end or latest) > LONGEST:
            raise ValueError(f"a test lasts at most {duration.write(LONGEST)}")
        return self

    @property
    def last_line(self) -> timedelta:
        """Time of the last line or failure."""
        return max((*(line.until for line in self.lines), self.job.fails or timedelta(0)))

    @property
    def last_moment(self) -> timedelta:
        return max((self.last_line, *(check.at for check in self.expect if check.at is not None)))


class LogSuiteEntry(_Model):
    """Log part of a test document. `rules` are files next to it, by default of the same name; `fixtures` is a file of
    lines.
    """

    playbooks: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    rules: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    fixtures: str | None = None
    tests: Annotated[tuple[LogTest, ...], Field(min_length=1)]


class LogSuite(Struct, frozen=True):
    path: Path
    document: YamlDocument
    spec: LogSuiteEntry

    @property
    def rules(self) -> tuple[Path, ...]:
        return self._files_beside_test(self.spec.rules) if self.spec.rules or not self.spec.playbooks else ()

    def _files_beside_test(self, names: tuple[str, ...] | None) -> tuple[Path, ...]:
        if names is not None:
            return tuple(self.path.parent / name for name in names)
        name = self.path.stem.removesuffix(yaml_files.TEST_SUFFIX)
        beside = [self.path.with_name(f"{name}{ending}") for ending in (".yaml", ".yml")]
        return (next((path for path in beside if path.exists()), beside[0]),)

    def problem(self, path: DocumentPath, message: str, *, at_key: bool = False) -> FileProblem:
        """Return a problem at `path`, in which lists may be single values."""
        value = self.document.value
        written: list[str | int] = []
        for part in path:
            if isinstance(part, int) and not isinstance(value, list):
                continue
            written.append(part)
            inside = (isinstance(value, dict) and part in value) or isinstance(value, list)
            value = value[part] if inside else None
        return self.document.problem(tuple(written), message, at_key=at_key)

    def server_parts(self) -> Iterator[tuple[DocumentPath, str]]:
        """Yield path and key of what only the server can check."""
        tests = self.document.value["tests"]
        for index, test in enumerate(tests):
            for key in test:
                if key not in _keys(LogTest):
                    yield ("tests", index, key), key
            for number, check in enumerate(as_list(test["expect"])):
                for key in check:
                    if key not in _keys(LogCheck):
                        yield ("tests", index, "expect", number, key), key


def _keys(model: type[BaseModel]) -> set[str]:
    return {info.alias or name for name, info in model.model_fields.items()}


def documents(path: Path) -> tuple[list[YamlDocument], list[FileProblem]]:
    text = yaml_files.read_text(path)
    if isinstance(text, FileProblem):
        return [], [text]
    return yaml_text.read(text, str(path))


def read(path: Path) -> tuple[list[LogSuite], list[FileProblem]]:
    read_documents, problems = documents(path)
    suites: list[LogSuite] = []
    for document in read_documents:
        spec = model_errors.validate(LogSuiteEntry, document)
        if isinstance(spec, list):
            problems.extend(spec)
        else:
            suites.append(LogSuite(path, document, spec))
    return suites, sorted(set(problems))
