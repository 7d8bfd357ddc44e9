"""Account of each fault: who noticed, what was done, how long each part took, and the cost.

Pure: made of the trainer's record and the server's runs. Everything up to the next fault belongs to a fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from benchmarks.unattended import faults, launches
from benchmarks.unattended.journal import Execution

Event = Mapping[str, Any]
PHASES = ("alert", "accept", "decide", "act", "applied", "verified")
"""Until Prometheus fires; until the server has it; until it has decided; until the first command, after waiting for
healing; until the job has applied it; until the alert has resolved and the run is closed.
"""
RESTART_PHASES = ("notice", "end", "wait", "launch", "imports", "join", "build", "load", "step")
"""For a fault that ends the processes. Until torchrun or a launcher reports it; until the last launcher reports its
attempt's end, with attempts that ended before training; until the last launcher begins the next attempt; until the last
rank's process exists; until the last one has imported its modules; until the process group stands; until model and data
exist and Trainmedic is attached; until the checkpoint is loaded; until the first step after that has ended.
"""

BESIDES = ("training-throughput-drop", "training-crashing")
"""Playbooks for no single fault of the plan: about other work on the machine, and about so many faults."""


@dataclass(frozen=True)
class Account:
    """One fault. ``seconds``: of each phase that occurred, in order."""

    number: int
    kind: str
    step: int
    repairs: tuple[str, ...]
    """Acts of the playbooks and the launcher."""
    seconds: Mapping[str, float]
    is_repaired: bool
    told_people: bool
    steps_lost: int
    """Repeated steps: from before the fault, and spoiled ones."""
    good_steps_lost: int
    """Those from before the fault."""
    seconds_lost: float
    """From this fault to the next, less the time of the final steps between them."""
    seconds_to_good: float | None
    """From the fault to the end of the first step that stays. None if training did not go back."""


@dataclass(frozen=True)
class Interval:
    """Time from a fault to the next, or to the end: its events, runs whose alerts began in it, and steps."""

    fault: Event
    end: Event
    events: Sequence[Event]
    runs: Sequence[Event]

    def first(self, event: str) -> Event | None:
        return next((one for one in self.events if one["event"] == event), None)

    def last(self, event: str, until: float = float("inf")) -> Event | None:
        return next((one for one in reversed(self.events) if one["event"] == event and one["time"] <= until), None)


def accounts(events: Sequence[Event], executions: Sequence[Execution], runs: Sequence[Event]) -> list[Account]:
    """Return the account of each fault, in order. An unfinished one ends with its last step, unrepaired."""
    mine = [run for run in runs if run["playbook"] not in BESIDES]
    starts = [event for event in events if event["event"] == "fault"]
    counting = {one.step: one for one in executions}
    finished = [event for event in events if event["event"] == "finished"]
    last = executions[-1]
    ends = [*starts[1:], *finished, {"event": "ended", "time": last.ended, "step": last.step, "agree": False}]
    found = []
    for fault, end in zip(starts, ends, strict=False):
        within = [event for event in events if fault["time"] <= event["time"] < end["time"]]
        own = sorted((run for run in mine if fault["time"] <= _began(run) < end["time"]), key=_began)
        found.append(_account(Interval(fault, end, within, own), executions, counting))
    return found


def besides(runs: Sequence[Event]) -> list[str]:
    """Return runs about none of the faults, and whether they notified people."""
    found = [run for run in runs if run["playbook"] in BESIDES]
    return [f"{_deeds(run)}{', told to people' if _told_people(run) else ''}" for run in found]


def effective(executions: Sequence[Execution]) -> float:
    """Return the effective training time ratio: the time of each step's last execution, divided by the time from the
    first execution's begin to the last one's end.
    """
    useful = sum(one.ended - one.began for one in {one.step: one for one in executions}.values())
    return useful / (executions[-1].ended - executions[0].began)


def _account(interval: Interval, executions: Sequence[Execution], counting: Mapping[int, Execution]) -> Account:
    fault, end = interval.fault, interval.end
    acting = [run for run in interval.runs if _first_command(run)]
    resumed = interval.first("resumed")
    deeds = [_deeds(run) for run in interval.runs]
    deeds += ["the job: wrote checkpoints again"] if interval.first("written") is not None else []
    deeds += [f"launcher: resumed at step {resumed['step']}"] if resumed is not None else []
    returns = _returns(executions, fault["time"], end["time"])
    last = end["step"] if end["event"] == "fault" else end["step"] + 1
    useful = sum(one.ended - one.began for step, one in counting.items() if fault["step"] <= step < last)
    good = _first_good(interval, executions)
    if fault["kind"] in faults.ENDING:
        seconds = _restart_phases(interval, good)
    else:
        seconds = _phases(fault["time"], (acting or [*interval.runs])[0]) if interval.runs else {}
    return Account(
        number=fault["number"],
        kind=fault["kind"],
        step=fault["step"],
        repairs=tuple(deeds),
        seconds=seconds,
        is_repaired=_is_repaired(interval),
        told_people=any(_told_people(run) for run in interval.runs),
        steps_lost=sum(one.step - then.step + 1 for one, then in returns),
        good_steps_lost=max([fault["step"] - then.step for _, then in returns if then.step < fault["step"]] or [0]),
        seconds_lost=end["time"] - fault["time"] - useful,
        seconds_to_good=None if good is None else good.ended - fault["time"],
    )


def _first_good(interval: Interval, executions: Sequence[Execution]) -> Execution | None:
    """Return the first step after training last went back or was resumed."""
    returns = [event for event in (interval.last("back"), interval.last("resumed")) if event is not None]
    if not returns:
        return None
    since = max(event["time"] for event in returns)
    return next((one for one in executions if one.began >= since), None)


def _restart_phases(interval: Interval, good: Execution | None) -> dict[str, float]:
    """Return the recorded seconds of each of `RESTART_PHASES`."""
    marks: dict[str, float] = {}

    def mark(phase: str, event: Event | None, name: str = "time") -> float:
        if event is not None:
            marks[phase] = event[name]
        return marks.get(phase, float("inf"))

    resumed = mark("load", interval.last("resumed"))
    attached = mark("build", interval.last("attached", resumed))
    joined = mark("join", interval.last("joined", attached))
    processes = {one["rank"]: one for one in interval.events if one["event"] == "process" and one["time"] <= joined}
    if processes:
        mark("imports", max(processes.values(), key=lambda one: float(one["time"])))
        mark("launch", max(processes.values(), key=lambda one: float(one["began"])), "began")
    began = mark("wait", interval.last(launches.BEGAN, marks.get("launch", float("inf"))))
    mark("end", interval.last(launches.ENDED, began))
    mark("notice", interval.first(launches.NOTICED))
    if good is not None and good.began >= marks.get("load", float("inf")):
        marks["step"] = good.ended
    seconds, before = {}, interval.fault["time"]
    for phase in RESTART_PHASES:
        if phase in marks:
            # What was seen from outside was seen some milliseconds late.
            seconds[phase] = max(marks[phase] - before, 0.0)
            before = max(marks[phase], before)
    return seconds


def _is_repaired(interval: Interval) -> bool:
    """Return whether this kind's repair was seen, and the ranks' weights are equal.

    Within the training: a playbook acted, and all ended well. After ended processes: they continued from a checkpoint
    other than the spoiled one. After a killed server or Redis: the interrupted repair ended well. After a full disk:
    training continued, and checkpoints fitted.
    """
    kind, resumed = interval.fault["kind"], interval.first("resumed")
    acted = any(_first_command(run) for run in interval.runs)
    ended_well = acted and all(run["status"] == "succeeded" for run in interval.runs)
    if kind in faults.ENDING:
        spoiled = interval.fault.get("checkpoint")
        # The disk can hold a checkpoint of the same step as the one in memory that was spoiled.
        is_done = resumed is not None and (spoiled is None or resumed["checkpoint"] != spoiled)
    elif kind == faults.FULL_DISK:
        is_done = interval.first("written") is not None and resumed is None and interval.first("back") is None
    elif kind in faults.COMES_AS:
        is_done = interval.first("struck") is not None and ended_well
    else:
        is_done = ended_well
    return is_done and bool(interval.end["agree"])


def _returns(executions: Sequence[Execution], began: float, ended: float) -> list[tuple[Execution, Execution]]:
    """Return pairs in which an earlier or the same step followed a later one."""
    pairs = pairwise(executions)
    return [(one, then) for one, then in pairs if then.step <= one.step and began <= then.began < ended]


def _deeds(run: Event) -> str:
    return f"{run['playbook']}: {run['action_taken'] or 'nothing was done'}"


def _told_people(run: Event) -> bool:
    return any(step["action"] == "notify" and step["attempts"] for step in run["steps"])


def _phases(fault: float, run: Event) -> dict[str, float]:
    alert = min(run["alerts"], key=lambda alert: _moment(alert["starts_at"]))
    command = _first_command(run)
    marks = {
        "alert": _moment(alert["starts_at"]),
        "accept": _moment(alert["first_heard_at"]),
        "decide": _moment(run["timestamp"]),
        "act": _moment(command["started_at"]) if command else None,
        "applied": _moment(command["ended_at"]) if command and command["ended_at"] else None,
        "verified": _moment(run["ended_at"]) if run["ended_at"] else None,
    }
    seconds, before = {}, fault
    for phase in PHASES:
        mark = marks[phase]
        if mark is not None:
            seconds[phase] = mark - before
            before = mark
    return seconds


def _first_command(run: Event) -> Event | None:
    """Return the first step that sent something to the job."""
    for step in run["steps"]:
        if (step["action"] or "").startswith(("job.", "launcher.")) and step["attempts"]:
            found: Event = step
            return found
    return None


def _began(run: Event) -> float:
    return min(_moment(alert["starts_at"]) for alert in run["alerts"])


def _moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
