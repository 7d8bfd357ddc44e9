"""Names for playbook expressions and templates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any

from trainmedic.wire.envelope import write_time
from trainmedic_core.expressions import sandbox
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain import beginnings, inputs, links
from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.job_verdict import VerdictsOnJob
from trainmedic_server.domain.memory import RunMemory
from trainmedic_server.domain.playbook_target import JOBS
from trainmedic_server.domain.run import Run, StepState
from trainmedic_server.engine import verdict_alert
from trainmedic_server.ports.playbooks import CompiledPlaybook, Scope


class LazyScope(Mapping[str, Any]):
    """Built on first access: most steps have no expression."""

    def __init__(self, make: Callable[[], Scope]) -> None:
        self._make = make

    @cached_property
    def _names(self) -> Scope:
        return self._make()

    def __getitem__(self, name: str) -> Any:
        return self._names[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def of_target(target: Target | None, also: Sequence[Target] = ()) -> dict[str, Any]:
    if target is None:
        return {}
    return {
        "kind": str(target.kind),
        "key": target.key,
        **target.parts,
        JOBS: [] if target.kind is TargetKind.JOB else [each.job for each in also if each.kind is TargetKind.JOB],
    }


def of_step(step: StepState) -> dict[str, Any]:
    return {
        "status": str(step.status),
        "params": dict(step.params),
        "output": dict(step.output),
        "error": step.error,
        "attempts": len(step.attempts),
    }


def of_job(target: Target | None, alert: Alert, verdicts: Mapping[str, VerdictsOnJob]) -> dict[str, Any]:
    """Return the target job's data. A verdict in the alert takes precedence: it is constant during the run."""
    job = target.job if target is not None else None
    verdict = verdict_alert.verdict_of(alert) or verdicts.get(job or "", VerdictsOnJob()).seen_by(alert.name)
    return {"name": job, "verdict": verdict.as_data()}


def _of_memory(memory: RunMemory) -> dict[str, Any]:
    return {"count": sandbox.PlainFunction(memory.counts.__getitem__), "last": memory.last_data()}


def build(
    run: Run,
    playbook: CompiledPlaybook,
    alerts: Sequence[Alert],
    *,
    hindsight: bool = True,
    external_url: str = "",
    verdicts: Mapping[str, VerdictsOnJob] = MappingProxyType({}),
    group: Mapping[str, Any] | None = None,
    now: datetime | None = None,
) -> Scope:
    """Return the scope of a run's steps. The first alert is the run's initial one.

    `hindsight` False omits step results, `now` None the time: expressions that need them fail.
    """
    first = alerts[0]
    steps = {step.id: of_step(step) for step in run.steps if step.status.is_final} if hindsight else {}
    return {
        **({"group": group} if group is not None else {}),
        **({"now": now.timestamp()} if now is not None else {}),
        "alert": first.as_data(),
        "alerts": [alert.as_data() for alert in alerts],
        "labels": dict(first.labels),
        "annotations": dict(first.annotations),
        "target": of_target(run.target, run.also),
        "job": of_job(run.target, first, verdicts),
        "vars": dict(playbook.definition.vars),
        "inputs": inputs.of_annotations(first.annotations) if playbook.definition.on.manual else {},
        "ended_run": beginnings.ended_run_of(first),
        "steps": steps,
        **({"runs": _of_memory(run.memory)} if run.memory is not None else {}),
        "run": {
            "id": run.id,
            "playbook": run.playbook,
            "mode": str(run.mode),
            "message": run.message,
            "created_at": write_time(run.created_at),
            "url": links.run_link(external_url, run.id),
        },
    }
