"""What is said where a command names a job of which nothing is known. Who uses it: ``logs`` and ``keep``."""

from __future__ import annotations

from trainmedic_core.plain_text import visible
from trainmedic_core.problems import did_you_mean
from trainmedic_server.cli.client import Client


def doubt(client: Client, job: str) -> str:
    """That nothing is known of the job, and which of those that are connected was perhaps meant; empty where something
    is known."""
    connected = [str(item["name"]) for item in client.get("jobs")["items"]]
    if job in connected or any(client.get(path, {"job": job, "limit": 1})["items"] for path in ("history", "findings")):
        return ""
    return visible(f"no job {job!r} is connected, and no run and no finding is of one{did_you_mean(job, connected)}")
