"""Registry of the built-in actions and those of entry points (``extending``).

An unusable entry point, or one that would replace an action, is excluded and reported in `Registry.problems` and the
log.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from importlib import metadata
from typing import cast

from pydantic import BaseModel

from trainmedic.errors import described
from trainmedic_core.target import TargetKind
from trainmedic_server import telemetry
from trainmedic_server.actions import (
    alertmanager,
    http,
    job_load,
    jobs,
    launchers,
    messages,
    node_repairs,
    nodes,
    prometheus,
    redfish,
    slurm,
    slurm_drain,
    slurm_hold,
    slurm_reserve,
    slurm_update,
)
from trainmedic_server.actions.kubernetes import drain, workloads
from trainmedic_server.actions.kubernetes import jobs as cluster_jobs
from trainmedic_server.actions.kubernetes import nodes as cluster_nodes
from trainmedic_server.errors import PermanentFailure
from trainmedic_server.ports.actions import Action, Services

GROUP = "trainmedic.actions"  # of entry points
NAME = re.compile(r"^[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*$")

BUILT_IN: tuple[type[Action], ...] = (
    *jobs.ACTIONS,
    *job_load.ACTIONS,
    *launchers.ACTIONS,
    *nodes.ACTIONS,
    *node_repairs.ACTIONS,
    *redfish.ACTIONS,
    *messages.ACTIONS,
    *http.ACTIONS,
    *alertmanager.ACTIONS,
    *prometheus.ACTIONS,
    *cluster_nodes.ACTIONS,
    *drain.ACTIONS,
    *workloads.ACTIONS,
    *cluster_jobs.ACTIONS,
    *slurm.ACTIONS,
    *slurm_drain.ACTIONS,
    *slurm_hold.ACTIONS,
    *slurm_reserve.ACTIONS,
    *slurm_update.ACTIONS,
)

log = telemetry.logger(__name__)


class Registry:
    def __init__(
        self,
        specs: Mapping[str, type[Action]],
        services: Services | None = None,  # None: actions can be checked, not performed
        problems: Sequence[str] = (),
    ) -> None:
        self._specs = dict(specs)
        self._instances: dict[str, Action] = {}
        self._has_services = services is not None
        self.problems = list(problems)
        if services is not None:
            self._create_instances(services)
        for problem in self.problems:
            log.warning("skipping action", problem=problem)

    def _create_instances(self, services: Services) -> None:
        for name, spec in self._specs.items():
            try:
                self._instances[name] = spec(services)
            except Exception as error:  # A faulty action, also of another package, must not stop the server.
                log.exception("cannot create action", action=name)
                self.problems.append(f"action {name} cannot be created: {described(error)}")

    def names(self) -> Sequence[str]:
        return sorted(self._specs)

    def action_class(self, name: str) -> type[Action] | None:
        return self._specs.get(name)

    def get(self, name: str) -> Action:
        instance = self._instances.get(name)
        if instance is not None:
            return instance
        if name in self._specs:
            why = "could not be created; see the log" if self._has_services else "can be checked here, not performed"
            raise PermanentFailure(f"action {name} {why}")
        raise PermanentFailure(f"there is no action {name}")


def specs_only() -> Registry:
    specs, problems = _collect()
    return Registry(specs, None, problems)


def build(services: Services) -> Registry:
    specs, problems = _collect()
    return Registry(specs, services, problems)


def _collect() -> tuple[dict[str, type[Action]], list[str]]:
    points = sorted(metadata.entry_points(group=GROUP), key=lambda point: (point.name, point.value))
    return combine(BUILT_IN, points)


def combine(
    built_in: Iterable[type[Action]], points: Iterable[metadata.EntryPoint]
) -> tuple[dict[str, type[Action]], list[str]]:
    """Return the classes, and a sentence for each excluded entry point."""
    specs = {spec.name: spec for spec in built_in}
    problems: list[str] = []
    for point in points:
        try:
            loaded = point.load()
        except Exception as error:  # Another package can raise anything on import.
            log.exception("cannot load action", entry_point=_named(point))
            problems.append(f"entry point {_named(point)} cannot be loaded: {described(error)}")
            continue
        fault = _why_invalid(loaded)
        if fault is not None:
            problems.append(f"entry point {_named(point)} is not an action: {fault}")
            continue
        spec = cast(type[Action], loaded)
        if spec.name in specs:
            problems.append(f"entry point {_named(point)} is refused: there is an action {spec.name} already")
            continue
        specs[spec.name] = spec
    return specs, problems


def _why_invalid(loaded: object) -> str | None:
    if not isinstance(loaded, type):
        return "it is not a class"
    name = getattr(loaded, "name", None)
    if not isinstance(name, str) or not NAME.match(name):
        return f"its name is {name!r}; a name is lower-case words with dots between them"
    if not isinstance(getattr(loaded, "summary", None), str):
        return "it has no summary"
    targets = getattr(loaded, "targets", None)
    if not isinstance(targets, frozenset) or not targets or not all(isinstance(kind, TargetKind) for kind in targets):
        return "its targets are not a frozenset of TargetKind"
    if not isinstance(getattr(loaded, "harmful", None), bool):
        return "it does not state whether it is harmful"
    if not isinstance(getattr(loaded, "default_timeout", None), timedelta):
        return "its default_timeout is not a timedelta"
    params = getattr(loaded, "Params", None)
    if not (isinstance(params, type) and issubclass(params, BaseModel)):
        return "its Params is not a pydantic model"
    for method in ("perform", "outcome_saved", "inverse"):
        if not callable(getattr(loaded, method, None)):
            return f"it has no method {method}"
    if not inspect.iscoroutinefunction(getattr(loaded, "perform", None)):
        return "its method perform is not async"
    return None


def _named(point: metadata.EntryPoint) -> str:
    owner = point.dist.name if point.dist is not None else "an unknown package"
    return f"{point.name} = {point.value} (of {owner})"
