"""What the history says about each fault: who noticed, what was done, and how long each part took.

Pure: the trainer's events and the server's runs come in, the account of each fault goes out. Who calls it:
``__main__``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

PHASES = ("alert", "accept", "decide", "act", "applied", "verified")
"""Until Prometheus fires; until the server has it; until it has decided; until the first command goes out,
which includes waiting whether it heals by itself; until the job has applied it; until the alert has resolved
and the run is closed."""


ABOUT_THE_MACHINE = ("training-throughput-drop",)
"""Playbooks that no fault of the plan is for. Other work on the same machine slows the run down, and is noticed."""


@dataclass(frozen=True)
class Account:
    """One fault. ``seconds`` are those of each phase that came about, in order."""

    number: int
    kind: str
    step: int
    repairs: tuple[str, ...]
    seconds: Mapping[str, float]
    is_repaired: bool
    told_people: bool


def accounts(events: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> list[Account]:
    """A run belongs to the last fault before its first alert began; those `besides` to none."""
    runs = [run for run in runs if run["playbook"] not in ABOUT_THE_MACHINE]
    faults = [event for event in events if event["event"] == "fault"]
    found = []
    for fault, following in zip(faults, [*faults[1:], None], strict=True):
        end = following["time"] if following else float("inf")
        mine = [run for run in runs if fault["time"] <= _began(run) < end]
        found.append(_account(fault, sorted(mine, key=_began)))
    return found


def besides(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was not about any of the faults, and whether people were told."""
    found = [run for run in runs if run["playbook"] in ABOUT_THE_MACHINE]
    return [f"{_deeds(run)}{', told to people' if _told_people(run) else ''}" for run in found]


def _account(fault: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> Account:
    acting = [run for run in runs if _first_command(run)]
    return Account(
        number=fault["number"],
        kind=fault["kind"],
        step=fault["step"],
        repairs=tuple(_deeds(run) for run in runs),
        seconds=_phases(fault["time"], (acting or [*runs])[0]) if runs else {},
        is_repaired=bool(runs) and all(run["status"] == "succeeded" for run in runs),
        told_people=any(_told_people(run) for run in runs),
    )


def _deeds(run: Mapping[str, Any]) -> str:
    return f"{run['playbook']}: {run['action_taken'] or 'nothing was done'}"


def _told_people(run: Mapping[str, Any]) -> bool:
    return any(step["action"] == "notify" and step["attempts"] for step in run["steps"])


def _phases(fault: float, run: Mapping[str, Any]) -> dict[str, float]:
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


def _first_command(run: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The first step that sent something to the job."""
    for step in run["steps"]:
        if (step["action"] or "").startswith("job.") and step["attempts"]:
            found: Mapping[str, Any] = step
            return found
    return None


def _began(run: Mapping[str, Any]) -> float:
    return min(_moment(alert["starts_at"]) for alert in run["alerts"])


def _moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
