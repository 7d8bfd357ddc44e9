"""First plans of runs, recorded at admission if the target is free.

The target is locked before the transaction, because only its holder may plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from trainmedic_core.target import Target
from trainmedic_server import telemetry
from trainmedic_server.domain.alert import AlertStatus
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.engine import claims, plan
from trainmedic_server.engine.admission_changes import AdmissionChanges, StartedRun
from trainmedic_server.engine.engine_services import EngineServices
from trainmedic_server.engine.matching import Candidate, Key, PreparedDelivery, also_of
from trainmedic_server.engine.plan_values import OutsideState, RunDraft, RunPlan

log = telemetry.logger(__name__)


class KeptTargets:
    """Targets locked during the admission of their runs."""

    def __init__(self, services: EngineServices, prepared: Iterable[PreparedDelivery]) -> None:
        self._services = services
        self._keepers: dict[Key, str] = {}  # names of the locks that it holds (`TargetLocks.try_keep`)
        self._refused: dict[Key, str] = {}  # until released, they keep later admissions from overtaking
        self._further_targets: dict[Key, tuple[Target, ...]] = {}
        self._topology = services.topology()
        for entry in prepared:
            for alert, matched in zip(entry.delivery.alerts, entry.matched, strict=True):
                if alert.status is AlertStatus.FIRING:
                    for candidate in matched.candidates:
                        self._reserve(candidate)

    def _reserve(self, candidate: Candidate) -> None:
        key, target, definition = candidate.key, candidate.target, candidate.playbook.definition
        if definition.mode is Mode.OBSERVE or not isinstance(target, Target):
            return  # its run locks nothing
        if key in self._keepers or key in self._refused:
            return
        if definition.guards.queue is not None:
            return  # its turn comes first
        if also_of(candidate.playbook, target, self._topology) != candidate.also:
            return  # the jobs on its node have changed since the matching
        allowed, _ = self._services.limits.mode_for(target, self._topology, candidate.also)
        mode = Mode.stricter(definition.mode, allowed)
        if mode is Mode.OBSERVE:
            return
        keeper = f"admission {id(self)} of {key[0]} for {key[1]}"  # unique among current transactions
        asks = mode is Mode.APPROVE
        claim = claims.of_playbook(candidate.playbook, target, self._services.actions, candidate.also, asks=asks)
        self._further_targets[key] = candidate.also
        is_kept = self._services.locks.try_keep(keeper, claim)
        (self._keepers if is_kept else self._refused)[key] = keeper

    def __enter__(self) -> KeptTargets:
        return self

    def __exit__(self, *error: object) -> None:
        for keeper in (*self._keepers.values(), *self._refused.values()):
            self._services.locks.release(keeper)

    def first_plan(self, started: StartedRun, now: datetime) -> RunPlan | None:
        """Return the run's first plan; None to leave it to the driver. Called in the transaction."""
        key = started.run.playbook, started.run.target_key
        if key not in self._keepers or started.run.also != self._further_targets[key]:
            return None
        if started.run.is_limited:
            return None  # it locks nothing
        if started.run.is_group:
            return None  # its members are planned from the durable list
        context = self._services.planning_context(started.playbook)
        try:
            has_target = not claims.is_unlocked(started.run)
            draft = RunDraft(started.run, OutsideState((started.alert,)), context, now, has_target=has_target)
            first = plan.advance(draft)
        except Exception:  # a bug must stay limited to this run; its driver meets it again
            log.exception("cannot plan run at admission", run_id=started.run.id)
            return None
        return first if first.run.is_open else None  # its driver closes it, and counts that

    def pass_on(self, changes: AdmissionChanges) -> None:
        """Give planned runs their locks, after the commit. `__exit__` releases the others."""
        for started in changes.started:
            if started.then is not None:
                keeper = self._keepers.pop((started.run.playbook, started.run.target_key))
                self._services.locks.pass_on(keeper, started.run.id)
