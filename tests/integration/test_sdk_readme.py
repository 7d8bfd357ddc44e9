"""The first example of the SDK's README works as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from trainmedic.wire import envelope
from trainmedic_server import telemetry
from trainmedic_server.adapters.redis_bus import RedisBus
from trainmedic_server.adapters.system_clock import SystemClock

ROOT = Path(__file__).parents[2]


async def test_the_first_example_is_repaired(redis_url: str, tmp_path: Path) -> None:
    """It is commanded to halve its learning rate and to do the impossible, and ends well."""
    (first, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "sdk" / "README.md").read_text(), re.DOTALL)
    (tmp_path / "example.py").write_text(first)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "sdk"), "TRAINMEDIC_REDIS_URL": redis_url}
    job = subprocess.Popen([sys.executable, tmp_path / "example.py"], env=environment)
    bus = RedisBus(redis_url, SystemClock(), telemetry.Metrics())
    await bus.start()
    try:
        told = []
        for action, params in (("job.scale_lr", {"factor": 0.5}), ("job.stop", {"checkpoint": True})):
            now = datetime.now(UTC)
            later = now + timedelta(seconds=20)
            target = {"kind": "job", "job": "llm-1"}
            (reply,) = await bus.request(
                envelope.Command(envelope.new_id(), action, target, params, "r1", "p", "Alert", now, later)
            )
            told.append((reply.status, reply.output.get("before"), reply.output.get("after")))
        assert told == [("applied", 0.1, 0.05), ("unsupported", None, None)]
        assert job.wait(timeout=30) == 0
        assert await bus.jobs() == []
    finally:
        job.kill()
        job.wait()
        await bus.close()
