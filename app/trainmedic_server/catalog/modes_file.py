"""Modes file (``--modes``): the server's mode by part of the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trainmedic_core import model_errors, yaml_text
from trainmedic_core.setting_sources import read_text
from trainmedic_server.domain import host_lists, selectors
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.playbook_target import Selected, check_host_lists
from trainmedic_server.domain.target_modes import ModeEntry, TargetModes
from trainmedic_server.errors import ConfigurationError


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    nodes: Selected | None = None
    jobs: Selected | None = None
    mode: Mode

    @model_validator(mode="after")
    def _names_one_group(self) -> _Entry:
        if (self.nodes is None) == (self.jobs is None):
            raise ValueError("name one of nodes and jobs; GPUs follow their nodes")
        if self.jobs is not None and (isinstance(self.jobs, str) or set(self.jobs) != {selectors.NAME}):
            raise ValueError("jobs are selected by name: jobs: {name: [JOB]}; others follow their nodes")
        for name, values in _conditions(self.nodes if self.jobs is None else self.jobs):
            if template := next((value for value in values if "{{" in value or "{%" in value), None):
                raise ValueError(f"{name}: write a name for {template!r}; this file has no templates")
        check_host_lists(tuple(_names(self.nodes)))
        return self

    @property
    def compiled(self) -> ModeEntry:
        plural, written = ("nodes", self.nodes) if self.nodes is not None else ("jobs", self.jobs)
        assert written is not None
        terms = {} if isinstance(written, str) else {name: _listed(values) for name, values in written.items()}
        if plural == "nodes" and selectors.NAME in terms:
            terms[selectors.NAME] = tuple(host for value in _names(written) for host in host_lists.expand(value))
        return ModeEntry(selectors.of_written(plural, terms or selectors.ALL), self.mode)


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    modes: Annotated[tuple[_Entry, ...], Field(min_length=1, max_length=1000)]


def load(path: Path) -> TargetModes:
    """Raises ConfigurationError with file, line and field."""
    documents, problems = yaml_text.read(read_text("--modes", path), str(path))
    if not problems and len(documents) != 1:
        raise ConfigurationError(f"modes file {path}: must be one YAML document, such as {_EXAMPLE}")
    if problems:
        raise ConfigurationError(f"modes file {problems[0]}")
    read = model_errors.validate(_File, documents[0])
    if isinstance(read, list):
        raise ConfigurationError(f"modes file {'; '.join(map(str, read))}")
    return TargetModes(tuple(entry.compiled for entry in read.modes))


_EXAMPLE = "modes: [{nodes: {pool: canary}, mode: enforce}]"


def _listed(values: str | tuple[str, ...]) -> tuple[str, ...]:
    return (values,) if isinstance(values, str) else values


def _conditions(written: Selected | None) -> Iterator[tuple[str, tuple[str, ...]]]:
    if isinstance(written, dict):
        yield from ((name, _listed(values)) for name, values in written.items())


def _names(written: Selected | None) -> Iterator[str]:
    if isinstance(written, dict) and selectors.NAME in written:
        yield from _listed(written[selectors.NAME])
