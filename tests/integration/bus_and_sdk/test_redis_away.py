"""Training goes on while Redis is away, and a password and TLS on the way to it."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.bus_and_sdk.training_loop import ask, eventually
from tests.support.messages import KEY, make_command
from trainmedic.wire import envelope
from trainmedic_server import telemetry
from trainmedic_server.adapters.redis_bus import RedisBus
from trainmedic_server.adapters.system_clock import SystemClock

ROOT = Path(__file__).parents[3]


async def test_training_continues_without_redis_and_everything_resumes_after_its_recovery(
    redis_server: Any, bus: RedisBus, start_job: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A command taken before the kill is answered after it, once; a new one waits and arrives; two log lines."""
    job = start_job(redis_server.url, signing_key=KEY)
    await ask(bus, make_command())
    job.hold()
    sent = make_command(seconds=60)
    asked = asyncio.create_task(ask(bus, sent))
    await eventually(lambda: len(job.medic._queue.arrived) == 1)
    with caplog.at_level(logging.INFO, "trainmedic"):
        redis_server.kill()
        job.go_on()
        await eventually(lambda: job.done[-1] == sent.id)
        step = job.medic.step
        await eventually(lambda: job.medic.step > step + 10)
        later = asyncio.create_task(ask(bus, make_command(seconds=60)))
        redis_server.start()
        assert (await asked).status == envelope.APPLIED
        assert (await later).status == envelope.APPLIED
        await eventually(lambda: "connected to Redis again" in caplog.text)
    assert len(job.done) == 3
    assert caplog.text.count("no connection to Redis") == 1


async def test_a_job_may_start_before_its_server(redis_server: Any, bus: RedisBus, tmp_path: Path) -> None:
    """Without a URL it waits for the one that a server writes to its state directory."""
    program = (
        "import sys, time, trainmedic\n"
        "medic = trainmedic.connect()\n"
        "print('ready', flush=True)\n"
        "for step in range(1_000_000):\n"
        "    time.sleep(0.002)\n"
        "    for command in medic.commands(step):\n"
        "        command.applied()\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "sdk"),
        "TRAINMEDIC_JOB": "llm-1",
        "TRAINMEDIC_STATE_DIR": str(tmp_path),
        "TRAINMEDIC_SIGNING_KEY": KEY,
    }
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (tmp_path / "redis.url").write_text(redis_server.url + "\n")
        assert (await ask(bus, make_command(seconds=10))).status == envelope.APPLIED
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_a_password_is_used_and_never_revealed(
    own_redis: Any, tmp_path: Path, start_job: Any, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both sides log in; when Redis dies neither side's log shows the password."""
    server = own_redis(tmp_path, password="correct-horse")
    server.start()
    bus = RedisBus(server.url, SystemClock(), telemetry.Metrics())
    await bus.start()
    with caplog.at_level(logging.DEBUG):
        start_job(server.url)
        assert (await ask(bus, make_command())).status == envelope.APPLIED
        server.kill()
        await bus.request(make_command(seconds=0.1))
    await bus.close()
    captured = capsys.readouterr()
    assert "correct-horse" not in caplog.text + captured.out + captured.err


async def test_tls_is_verified_on_both_sides(own_redis: Any, tmp_path: Path, start_job: Any) -> None:
    """With the CA named in the URL everything works; without it neither side connects."""
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    make += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    make += ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "crt")]
    subprocess.run(make, check=True, capture_output=True)
    probe = own_redis(tmp_path)
    listening = ["--port", "0", "--tls-port", str(probe.port), "--tls-auth-clients", "no"]
    files = ["--tls-cert-file", str(tmp_path / "crt"), "--tls-key-file", str(tmp_path / "key")]
    server = own_redis(tmp_path, *listening, *files)
    server.port = probe.port
    server.start()
    url = f"rediss://127.0.0.1:{server.port}/0"
    trusted = f"{url}?ssl_ca_certs={tmp_path / 'crt'}"
    start_job(trusted)
    for address, answers in ((trusted, 1), (url, 0)):
        bus = RedisBus(address, SystemClock(), telemetry.Metrics())
        await bus.start()
        assert len(await bus.request(make_command(seconds=20.0 if answers else 1.0))) == answers
        await bus.close()
