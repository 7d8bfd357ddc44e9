"""Outcomes of repairs by playbook and by cause, with an estimate of the GPU-hours saved."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from trainmedic_core.target import TargetKind
from trainmedic_server.domain.effect import EffectVerdict
from trainmedic_server.domain.run import Run, Status
from trainmedic_server.ports.tallies import PlaybookTally

PERSON_AFTER = timedelta(minutes=30)
FORMULA = "sum over the runs that helped of GPUs × max(time to a person − time to repair, 0)"
_BAD_ENDS = (Status.FAILED, Status.CANCELLED, Status.REJECTED)
_MEASURED = (EffectVerdict.HELPED, EffectVerdict.NO_CHANGE, EffectVerdict.WORSE)


@dataclass(frozen=True, slots=True)
class RepairTotal:
    playbook: str
    runs: int  # Without decisions not to start.
    started: int  # Those of `runs` that were not only observed.
    succeeded: int
    failed: int  # Also cancelled or rejected.
    observed: int
    open: int
    helped: int
    no_change: int
    worse: int
    not_measured: int
    timed_out: int
    rejected: int
    undone_by_hand: int
    held_back: int  # Not started.
    repeated: int  # Started on the same target within an hour after an earlier run's end.
    median_seconds: float | None  # From admission to the end, of successful runs.
    median_person_seconds: float | None  # From a question to a person's answer.


@dataclass(frozen=True, slots=True)
class CauseRepairs:
    cause: str  # The alert's label ``cause``, otherwise its name.
    runs: int
    succeeded: int
    failed: int
    helped: int
    measured: int  # Runs whose effect was measured.


@dataclass(frozen=True, slots=True)
class GpuHoursKept:
    """Estimate, with its assumptions."""

    gpu_hours: float
    runs: int  # Measured to have helped, ended, and on a known number of GPUs.
    uncounted: int  # Successful runs that are not among them.
    person_after_seconds: float
    median_person_seconds: float | None
    formula: str
    assumptions: tuple[str, ...]


@dataclass(slots=True)
class RepairTally:
    """Counts of runs as they are read. ``effects`` are the measured verdicts by run."""

    effects: Mapping[str, EffectVerdict]
    person_after: timedelta = PERSON_AFTER
    _causes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Counts by name of the field of `CauseRepairs`."""
    _gpu_seconds: float = 0.0
    _counted: int = 0
    _uncounted: int = 0

    def add(self, run: Run) -> None:
        """Exclude decisions not to start and runs in mode observe."""
        if run.status in (Status.NOT_STARTED, Status.OBSERVED):
            return
        has_helped = self.effects.get(run.id) is EffectVerdict.HELPED
        cause = self._causes[run.alert_labels.get("cause") or run.alert_name]
        cause["runs"] += 1
        cause["succeeded"] += run.status is Status.SUCCEEDED
        cause["failed"] += run.status in _BAD_ENDS
        cause["helped"] += has_helped
        cause["measured"] += self.effects.get(run.id) in _MEASURED
        gpus = _gpus_of(run)
        if has_helped and run.ended_at is not None and gpus is not None:
            kept = self.person_after - (run.ended_at - run.created_at)
            self._gpu_seconds += gpus * max(kept.total_seconds(), 0.0)
            self._counted += 1
        elif run.status is Status.SUCCEEDED:
            self._uncounted += 1

    def causes(self) -> list[CauseRepairs]:
        totals = [CauseRepairs(name, **counts) for name, counts in self._causes.items()]
        return sorted(totals, key=lambda total: (-total.runs, total.cause))

    def gpu_hours(self, person_seconds: Counter[float]) -> GpuHoursKept:
        minutes = self.person_after.total_seconds() / 60
        return GpuHoursKept(
            gpu_hours=round(self._gpu_seconds / 3600, 3),
            runs=self._counted,
            uncounted=self._uncounted,
            person_after_seconds=self.person_after.total_seconds(),
            median_person_seconds=median_of(person_seconds),
            formula=FORMULA,
            assumptions=(
                f"a person would have repaired it {minutes:g} min after the alert (person_after)",
                "until then none of the GPUs would have done useful work",
                "the GPUs are the ranks that answered a command to the job, or the one GPU of the target",
                "helped is what was measured; a metric that recovered by itself counts as well",
            ),
        )


def median_of(counts: Counter[float]) -> float | None:
    total = counts.total()
    return (_value_at(counts, (total - 1) // 2) + _value_at(counts, total // 2)) / 2 if total else None


def _value_at(counts: Counter[float], index: int) -> float:
    passed = 0
    for value, count in sorted(counts.items()):
        passed += count
        if index < passed:
            return value
    raise IndexError(index)


def _gpus_of(run: Run) -> int | None:
    if run.target is None:
        return None
    match run.target.kind:
        case TargetKind.GPU:
            return 1
        case TargetKind.NODE | TargetKind.JOB | TargetKind.CLUSTER | TargetKind.GROUP:
            pass
    # The ranks that answered a command; each has a GPU.
    ranks = [step.output.get("ranks") for step in run.steps]
    return max((count for count in ranks if isinstance(count, int)), default=None)


def repair_total(playbook: str, tally: PlaybookTally) -> RepairTotal:
    statuses, effects = tally.statuses, tally.effects
    return RepairTotal(
        playbook=playbook,
        runs=statuses.total() - statuses[Status.NOT_STARTED],
        started=tally.started,
        succeeded=statuses[Status.SUCCEEDED],
        failed=sum(statuses[status] for status in _BAD_ENDS),
        observed=statuses[Status.OBSERVED],
        open=sum(count for status, count in statuses.items() if status.is_open),
        helped=effects[EffectVerdict.HELPED],
        no_change=effects[EffectVerdict.NO_CHANGE],
        worse=effects[EffectVerdict.WORSE],
        not_measured=effects[EffectVerdict.NOT_MEASURED],
        timed_out=tally.timed_out,
        rejected=statuses[Status.REJECTED],
        undone_by_hand=tally.undone_by_hand,
        held_back=statuses[Status.NOT_STARTED],
        repeated=tally.repeated,
        median_seconds=median_of(tally.repair_seconds),
        median_person_seconds=median_of(tally.person_seconds),
    )
