"""Result of a replay: decisions then and now by playbook, and where they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from msgspec import Struct, field

from trainmedic.wire.envelope import write_time
from trainmedic_core.target import Target
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.run import Decision
from trainmedic_server.engine.replayed_runs import FAR, ReplayedRun
from trainmedic_server.simulation.recorded import RecordedAlert, RecordedReaction
from trainmedic_server.simulation.replay_spool import SpooledAlert

NONE = "none"  # decision of a playbook that did not exist then, or did not match
NOT_KNOWN = "not_known"
_MOST_DIFFERENCES = 10_000  # kinds of differences; others are only counted
_ORDER = [*map(str, Decision), "not_matched"]


class Unknown(StrEnum):
    """Reason why a decision is unknown."""

    TARGET = "target"
    """A source of the server, such as Kubernetes, knew the target."""
    EARLIER_RUN = "earlier_run"
    """Start or end of an earlier run."""
    BREAKER = "breaker"
    """Whether the breaker opened."""
    PLAYBOOK = "playbook"
    """It uses what a replay does not judge, such as a group."""
    REPORTS = "reports"
    """A guard refused the first report, and would have allowed a later one."""


class ReplayOutcome(Struct, frozen=True):
    decisions: frozenset[str]
    """One if known, otherwise the possible ones; empty if nothing is known."""
    why: str = ""
    unknown: Unknown | None = None

    @property
    def text(self) -> str:
        """``started``, ``joined or cooldown``, ``not_known``."""
        return " or ".join(sorted(self.decisions, key=_ORDER.index)) or NOT_KNOWN


class GpuTime(Struct):
    """GPUs of the runs' targets, each multiplied by the time that the run was open."""

    at_least: timedelta = timedelta()
    at_most: timedelta | None = timedelta()  # None without a limit
    uncounted_runs: int = 0  # runs on an unknown number of GPUs

    def add(self, gpus: int | None, run: ReplayedRun) -> None:
        if run.is_observed:
            return
        has_least = run.is_certain and run.ends_from < FAR
        least = max(run.ends_from - run.latest, timedelta()) if has_least else timedelta()
        self._add(gpus, least, run.ends_by - run.earliest if run.ends_by < FAR else None)

    def add_ended(self, gpus: int | None, began: datetime, ended: tuple[datetime, datetime] | None) -> None:
        if ended is None:
            self._add(gpus, timedelta(), None)
        else:
            self._add(gpus, ended[0] - began, ended[1] - began)

    def _add(self, gpus: int | None, least: timedelta, most: timedelta | None) -> None:
        if gpus is None:
            self.uncounted_runs += 1
            return
        self.at_least += gpus * least
        self.at_most = None if self.at_most is None or most is None else self.at_most + gpus * most

    def as_data(self) -> dict[str, Any]:
        return {
            "at_least": _hours(self.at_least),
            "at_most": None if self.at_most is None else _hours(self.at_most),
            "runs_of_unknown_size": self.uncounted_runs,
        }


class PlaybookComparison(Struct):
    then: Counter[str] = field(default_factory=Counter)  # by recorded decision
    now: Counter[str] = field(default_factory=Counter)  # by `ReplayOutcome.text`
    same: int = 0
    different: int = 0
    not_known: int = 0  # the decision then is among the possible ones now, or nothing is known about now
    then_time: GpuTime = field(default_factory=GpuTime)
    now_time: GpuTime = field(default_factory=GpuTime)


class ReplayDifference(Struct):
    """Alerts with the same difference, or whose decision is not known. The example is the first."""

    playbook: str
    alert: str
    then: str
    now: str
    unknown: Unknown | None
    is_certain: bool
    why: str
    fingerprint: str
    first_heard: datetime
    target: str | None
    run_id: str | None
    count: int = 0

    def as_data(self) -> dict[str, Any]:
        return {
            "playbook": self.playbook,
            "alert": self.alert,
            "then": self.then,
            "now": self.now,
            "certain": self.is_certain,
            "depends_on": self.unknown,
            "why": self.why,
            "count": self.count,
            "example": {
                "fingerprint": self.fingerprint,
                "first_heard": write_time(self.first_heard),
                "target": self.target,
                "run_id": self.run_id,
            },
        }


class ReplayResult(Struct):
    mode: Mode
    first: datetime | None = None
    last: datetime | None = None
    alerts: int = 0
    without_playbook: int = 0  # alerts to which no playbook reacts now, and none reacted then
    ended_at_first: int = 0  # alerts whose first report was their end
    by_hand: int = 0  # stand-in alerts: of people, schedules, events and ends of runs
    given_runs: int = 0  # taken as they were: manual runs, and those before the first alert
    playbooks: dict[str, PlaybookComparison] = field(default_factory=dict)
    breaker_opened: list[tuple[datetime, str]] = field(default_factory=list)  # possible openings, and why
    uncounted_differences: int = 0  # alerts whose kind of difference is beyond `_MOST_DIFFERENCES`
    _differences: dict[tuple[str, ...], ReplayDifference] = field(default_factory=dict)

    def take_alert(self, item: RecordedAlert) -> None:
        self.alerts += 1
        if self.first is None or item.first_heard < self.first:
            self.first = item.first_heard
        if self.last is None or item.last_heard > self.last:
            self.last = item.last_heard

    def of(self, playbook: str) -> PlaybookComparison:
        found = self.playbooks.get(playbook)
        if found is None:
            found = self.playbooks[playbook] = PlaybookComparison()
        return found

    def compare(
        self,
        playbook: str,
        alert: SpooledAlert,
        reaction: RecordedReaction | None,
        target: Target | None,
        outcome: ReplayOutcome,
    ) -> None:
        then, now, of_playbook = reaction.decision if reaction else NONE, outcome.text, self.of(playbook)
        of_playbook.then[then] += 1
        of_playbook.now[now] += 1
        if outcome.decisions == {then}:
            of_playbook.same += 1
            return
        is_certain = bool(outcome.decisions) and then not in outcome.decisions
        if is_certain:
            of_playbook.different += 1
        else:
            of_playbook.not_known += 1
        key = playbook, alert.name, then, now, outcome.unknown or ""
        difference = self._differences.get(key)
        if difference is None:
            if len(self._differences) >= _MOST_DIFFERENCES:
                self.uncounted_differences += 1
                return
            difference = self._differences[key] = ReplayDifference(
                playbook, alert.name, then, now, outcome.unknown, is_certain, outcome.why, alert.fingerprint,
                alert.first_heard, target.key if target else None, reaction.run_id if reaction else None,
            )  # fmt: skip
        difference.count += 1

    def differences(self) -> list[ReplayDifference]:
        """Return the certain ones first, then by number of alerts."""
        ordered = sorted(self._differences.values(), key=lambda each: (each.playbook, each.alert, each.then, each.now))
        return sorted(ordered, key=lambda each: (not each.is_certain, -each.count))

    def as_data(self, most: int) -> dict[str, Any]:
        """Return the JSON document with the first `most` differences."""
        differences = self.differences()
        return {
            "mode": str(self.mode),
            "from": write_time(self.first) if self.first else None,
            "until": write_time(self.last) if self.last else None,
            "alerts": self.alerts,
            "without_playbook": self.without_playbook,
            "resolved_at_first_report": self.ended_at_first,
            "manual_starts": self.by_hand,
            "given_runs": self.given_runs,
            "playbooks": [_of_playbook(name, self.playbooks[name]) for name in sorted(self.playbooks)],
            "breaker_may_have_opened": [{"at": write_time(at), "why": why} for at, why in self.breaker_opened],
            "differences": [each.as_data() for each in differences[:most]],
            "more_differences": max(len(differences) - most, 0) + self.uncounted_differences,
        }


def _of_playbook(name: str, compared: PlaybookComparison) -> dict[str, Any]:
    return {
        "playbook": name,
        "then": _counts(compared.then),
        "now": _counts(compared.now),
        "same": compared.same,
        "different": compared.different,
        "not_known": compared.not_known,
        "gpu_hours_then": compared.then_time.as_data(),
        "gpu_hours_now": compared.now_time.as_data(),
    }


def _counts(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))


def _hours(time: timedelta) -> float:
    return round(time / timedelta(hours=1), 2)
