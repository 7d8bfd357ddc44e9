"""What must hold when the chaos is over, whatever happened: the checker of all promises.

Each check returns its breaches as sentences. The judges are what the processes left behind: the answers to the
deliveries, the store, each job's changes on its disk, the GPU driver's log, and every log file.
"""

from __future__ import annotations

import itertools
import json
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.attack.chaos.cluster import FORGETFUL, GPUS, Cluster
from tests.attack.chaos.load import Accepted
from tests.driver.driver import SetCall
from tests.support.live import OPEN
from tests.support.process_use import MIB, process_use
from trainmedic_server.domain.run import Decision

DEFAULT_WATTS = 700.0
_MOST_MEMORY = {"server": 400 * MIB, "agent": 150 * MIB}
_MOST_DESCRIPTORS = 200

Run = Mapping[str, Any]


class Promises:
    """The state at the end, and what is wrong with it."""

    def __init__(self, cluster: Cluster, accepted: Sequence[Accepted]) -> None:
        self.cluster, self.accepted = cluster, accepted
        self.items = [json.loads(line) for line in self._read("/history", "application/x-ndjson").splitlines()]
        self.runs: dict[str, Run] = {item["run_id"]: cluster.server.run(item["run_id"]) for item in self.items}
        self.counts: Counter[str] = Counter()
        """What happened that a promise allows for, by name."""

    def _read(self, path: str, kind: str) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.cluster.server.port}{path}",
            headers={"Accept": kind, "Authorization": f"Bearer {self.cluster.secret.token}"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            text: str = reply.read().decode()
            return text

    def breaches(self) -> list[str]:
        return [
            *self._accepted_is_kept(),
            *self._runs_have_ended(),
            *self._decisions_have_names(),
            *self._changes_are_made_once(),
            *self._changes_are_undone(),
            *self._limits_are_set_once(),
            *self._limits_are_back(),
            *self._logs_are_json(),
            *self._secrets_are_kept(),
            *self._processes_are_bounded(),
        ]

    # --- alerts and runs ----------------------------------------------------------------------------------

    def _accepted_is_kept(self) -> Iterator[str]:
        """Every alert of every 200 is in a run of the history, and with it that it resolved."""
        for alert in self.accepted:
            if not alert.run_ids and not alert.is_resolved:
                yield f"{alert} was accepted and led to nothing"
            for run_id in alert.run_ids:
                if run_id not in self.runs:
                    yield f"{alert} was accepted, and its run is lost"
                elif not any(_is_of(kept, alert) for kept in self.runs[run_id]["alerts"]):
                    yield f"{alert} was accepted, and is not in its run"
        of_alert: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        for alert in self.accepted:
            of_alert[alert.fingerprint, alert.starts_at].update(alert.run_ids)
        for identity, run_ids in of_alert.items():
            if len(run_ids) > 1:
                yield f"the alert {identity} led to several runs: {run_ids}"

    def _runs_have_ended(self) -> Iterator[str]:
        """Everything has resolved and all is well, so nothing is left to wait for, and no undo is owed."""
        for run in self.runs.values():
            if run["status"] in OPEN:
                yield f"a run is open at the end: {_told(run)}"
            if run["owes_undo"] and not is_owed_for_good(run):
                yield f"an undo is owed at the end: {_told(run)}"
            self.counts[f"{run['playbook']} {run['status']}"] += 1

    def _decisions_have_names(self) -> Iterator[str]:
        for run in self.runs.values():
            if run["decision"] not in set(Decision):
                yield f"a decision without a name: {_told(run)}"
            if run["status"] == "failed" and not any(step["error"] for step in run["steps"]):
                yield f"a failure without a reason: {_told(run)}"

    # --- what was done to the jobs ------------------------------------------------------------------------

    def _changes_are_made_once(self) -> Iterator[str]:
        """No command took effect twice. A job that was started again after Redis had been emptied cannot know."""
        for job in self.cluster.jobs:
            by_command: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
            for change in job.changes():
                by_command[change["id"]].append(change)
            for changes in by_command.values():
                for first, second in itertools.pairwise(changes):
                    flushed = any(first["at"] <= at <= second["at"] for at in self.cluster.flushed_at)
                    if flushed and first["pid"] != second["pid"]:
                        self.counts["repeated, for Redis was emptied and the job started again"] += 1
                    else:
                        yield f"{job.name} carried out a command twice: {first}, {second}"
            self.counts["changes to jobs"] += len(by_command)

    def _changes_are_undone(self) -> Iterator[str]:
        """What a step with an undo has changed is taken back, once, or the history says why it is not."""
        changes = [change for job in self.cluster.jobs for change in job.changes()]
        made = {change["id"] for change in changes}
        taken_back = Counter(change["undo_of"] for change in changes if change["undo_of"])
        for run in self.runs.values():
            for step in run["steps"]:
                if step["undo"] is None or step["action"] == "gpu.power_limit":
                    continue
                for attempt in step["attempts"]:
                    if attempt["command_id"] in made and not taken_back[attempt["command_id"]]:
                        yield from self._not_undone(run, step, attempt)

    def _not_undone(self, run: Run, step: Mapping[str, Any], attempt: Mapping[str, Any]) -> Iterator[str]:
        if is_owed_for_good(run):
            self.counts["not undone, for the job has forgotten, and the history says so"] += 1
        elif "interrupted" in (attempt["error"] or "") or attempt["status"] == "unknown":
            self.counts[f"not undone, for its outcome was lost: {attempt['status']}"] += 1
        else:
            yield f"a change was not undone, and the history does not say so: {attempt}, {_told(run)}"

    # --- what was done to the GPUs ------------------------------------------------------------------------

    def _limits_are_set_once(self) -> Iterator[str]:
        """No limit was set that no command asked for, and each as often as commands did, or leases were lost."""
        lowered = Counter((call.gpu, call.watts) for before, call in self._successive_calls() if call.watts < before)
        allowed: Counter[tuple[int, float]] = Counter()
        for run in self.runs.values():
            if run["playbook"] != "hot":
                continue
            labels = run["alerts"][0]["labels"]
            for step in run["steps"]:
                if step["id"] in ("cap", "cap_harder"):
                    watts = float(labels["watts" if step["id"] == "cap" else "harder"])
                    allowed[int(labels["gpu"]), watts] += len(step["attempts"]) + 2 * _set_again(run, step)
        for (gpu, watts), times in lowered.items():
            if times > allowed[gpu, watts]:
                yield f"GPU {gpu} was lowered to {watts} W {times} times, and {allowed[gpu, watts]} can be told"
        self.counts["limits lowered"] += lowered.total()

    def _successive_calls(self) -> Iterator[tuple[float, SetCall]]:
        """Each call that took effect, with the limit from before it."""
        limits = dict.fromkeys(range(GPUS), DEFAULT_WATTS)
        for call in self.cluster.driver.sets():
            yield limits[call.gpu], call
            limits[call.gpu] = call.watts

    def _limits_are_back(self) -> Iterator[str]:
        for gpu in range(GPUS):
            watts = self.cluster.driver.watts(gpu)
            if watts != DEFAULT_WATTS:
                yield f"GPU {gpu} is left at {watts} W"

    # --- what can be read ---------------------------------------------------------------------------------

    def logs(self) -> list[Path]:
        directory = self.cluster.directory
        return sorted([*directory.glob("server/*.log"), *directory.glob("node/*.log"), *directory.glob("*.log")])

    def _logs_are_json(self) -> Iterator[str]:
        """Every line of server and agent is a JSON object, and nothing has failed that nobody expected."""
        for path in self.logs():
            text = path.read_text(errors="replace")
            if "Traceback" in text:
                yield f"a traceback in {path.name}: {text[text.index('Traceback') :][:2000]}"
            if path.parent == self.cluster.directory:
                continue  # the SDK logs as its user's script does
            for line in text.splitlines(keepends=True):
                # A kill cuts the last one; and who calls a command that cannot start is told in words.
                if line.endswith("\n") and not line.startswith("Error: ") and not _is_json(line):
                    yield f"a line in {path.name} is not JSON: {line[:200]!r}"

    def _secrets_are_kept(self) -> Iterator[str]:
        shown = {path.name: path.read_text(errors="replace") for path in self.logs()}
        shown |= {
            path: self._read(path, kind)
            for path, kind in (
                ("/history", "application/x-ndjson"),
                ("/history", "text/csv"),
                ("/agents", "application/json"),
                ("/jobs", "application/json"),
                ("/playbooks", "application/json"),
                ("/ready", "application/json"),
                ("/metrics", "text/plain"),
            )
        }
        shown["the runs"] = json.dumps(list(self.runs.values()))
        for where, text in shown.items():
            for name, secret in vars(self.cluster.secret).items():
                if secret in text:
                    yield f"the {name} is in {where}"

    def _processes_are_bounded(self) -> Iterator[str]:
        for name, most in _MOST_MEMORY.items():
            use = process_use(self.cluster.program(name).process.pid)
            if use.resident > most or use.descriptors > _MOST_DESCRIPTORS:
                yield f"the {name} has grown: {use}"


def is_owed_for_good(run: Mapping[str, Any]) -> bool:
    """Whether an undo is owed to a job that has forgotten, and says so: only a person can end it."""
    return bool(run["owes_undo"] and run["undo_error"] and run["job"] == FORGETFUL)


def _is_of(kept: Mapping[str, Any], alert: Accepted) -> bool:
    return (
        kept["fingerprint"] == alert.fingerprint
        and datetime.fromisoformat(kept["starts_at"]) == datetime.fromisoformat(alert.starts_at)
        and (kept["resolved_at"] is not None or not alert.is_resolved)
    )


def _set_again(run: Run, step: Mapping[str, Any]) -> int:
    """How often a cap was set again because its lease was lost."""
    return sum(
        event["kind"] == "set_again_started" and event["data"].get("step") == step["id"] for event in run["events"]
    )


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _told(run: Run) -> str:
    """A run in short, and its events."""
    events: Iterable[Mapping[str, Any]] = run["events"]
    story = [f"{event['at'][11:23]} {event['kind']} {event['data']}" for event in events]
    return f"{run['run_id']} {run['playbook']} on {run['target']}, {run['status']}: {run['message']}\n  " + "\n  ".join(
        story
    )
