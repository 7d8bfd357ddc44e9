"""Commands as the server sends them and as a job sees them, and what Alertmanager posts, for tests to send."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import redis

from trainmedic.job.command import JobCommand
from trainmedic.wire.envelope import Command, new_id
from trainmedic.wire.receiver import ReceivedCommand

KEY = "a signing key of the tests"


class GenuineCommandsOnly:
    """Base of a consumer that is handed genuine commands and nothing else; a test gives it ``receive``."""

    def refuse(self, received: ReceivedCommand, reason: str) -> None:
        raise AssertionError(reason)

    def note_unreadable(self) -> None:
        raise AssertionError("it was a command")

    def connected(self, client: redis.Redis) -> None:
        """Nothing is asked of Redis beforehand."""


def make_command(action: str = "job.scale_lr", seconds: float = 30.0, job: str = "llm-1", **changes: Any) -> Command:
    """A command to a job that expires in so many seconds. ``changes`` are fields of the envelope."""
    now = datetime.now(UTC)
    fields: dict[str, Any] = {
        "id": new_id(),
        "action": action,
        "target": {"kind": "job", "job": job},
        "params": {"factor": 0.5} if action == "job.scale_lr" else {},
        "run_id": "run-1",
        "playbook": "loss-spike",
        "reason": "TrainingLossSpike",
        "issued_at": now,
        "expires_at": now + timedelta(seconds=seconds),
    }
    return Command(**{**fields, **changes})


def make_job_command(
    action: str, answers: list[tuple[str, Mapping[str, Any]]], issued_at: datetime, seconds: float = 0.0
) -> JobCommand:
    """A command that a training loop has been handed; its answer goes into `answers`."""
    expires_at = issued_at + timedelta(seconds=seconds)
    sent = make_command(action, id="c1", params={}, issued_at=issued_at, expires_at=expires_at)
    return JobCommand(sent, None, b"1-0", lambda _, status, output: answers.append((status, output)))


def delivery(name: str, *jobs: str, status: str = "firing", starts_at: str | None = None) -> dict[str, Any]:
    """What Alertmanager posts when the alert `name` fires or resolves for each of `jobs`."""
    now = datetime.now(UTC).isoformat()
    alerts = [
        {
            "status": status,
            "labels": {"alertname": name, "job_name": job},
            "annotations": {},
            "startsAt": starts_at or now,
            "endsAt": now if status == "resolved" else "0001-01-01T00:00:00Z",
            "generatorURL": "",
            "fingerprint": f"{name}-{job}",
        }
        for job in jobs
    ]
    return {
        "version": "4",
        "groupKey": "{}",
        "status": status,
        "receiver": "trainmedic",
        "groupLabels": {},
        "commonLabels": {"alertname": name},
        "commonAnnotations": {},
        "externalURL": "",
        "alerts": alerts,
    }


def resolved(fired: Mapping[str, Any]) -> dict[str, Any]:
    """The delivery that says that the alerts of `fired` have resolved."""
    now = datetime.now(UTC).isoformat()
    alerts = [{**alert, "status": "resolved", "endsAt": now} for alert in fired["alerts"]]
    return {**fired, "status": "resolved", "alerts": alerts}
