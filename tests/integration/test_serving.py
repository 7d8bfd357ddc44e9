"""The server as a process: starting, stopping, and refusing to start."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import httpx
import pytest

from tests.support.programs import PYTHON_PATH, ROOT, Program, free_port, inherited, start_server
from trainmedic_server.settings import server as settings
from trainmedic_server.wiring.server import TrainmedicServer

ENVIRONMENT = {"PYTHONPATH": PYTHON_PATH}


def serve(directory: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``serve`` where it is to refuse."""
    return subprocess.run(
        [sys.executable, "-m", "trainmedic_server", "serve", "--state-dir", str(directory / "state"), *options],
        env={**inherited(), **ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_signal_stops_the_server_cleanly(tmp_path: Path) -> None:
    """SIGTERM and SIGINT end it with 0, within a few seconds, and the next start finds everything."""
    for number in (signal.SIGTERM, signal.SIGINT):
        program, _ = start_server(tmp_path)
        with program:
            program.process.send_signal(number)
            assert program.process.wait(60) == 0, program.tail()
            assert '"stopped"' in program.tail()


def test_an_event_listener_does_not_delay_the_stop(tmp_path: Path) -> None:
    """Streams end when the server does."""
    program, url = start_server(tmp_path)
    with program, httpx.stream("GET", f"{url}/events") as stream:
        assert stream.status_code == 200
        program.process.terminate()
        assert program.process.wait(60) == 0


def test_a_wrong_setting_ends_with_2_and_is_named(tmp_path: Path) -> None:
    """This happens before anything is started."""
    refused = serve(tmp_path, "--max-age", "15")
    assert refused.returncode == 2
    assert "--max-age: '15'" in refused.stderr
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("flag", ["--playbooks", "--log-rules", "--alert-map"])
def test_a_missing_named_path_ends_with_2(tmp_path: Path, flag: str) -> None:
    """It ends at once instead of without playbooks; a working directory without ``playbooks`` is no error."""
    refused = serve(tmp_path, flag, str(tmp_path / "misspelt"))
    assert refused.returncode == 2
    assert f"{flag}: '{tmp_path}/misspelt': there is no such file or directory" in refused.stderr
    assert not (tmp_path / "state").exists()


def test_a_misspelt_shipped_alert_map_is_rejected_with_the_nearest(tmp_path: Path) -> None:
    refused = serve(tmp_path, "--alert-map", "kube-promtheus")
    assert refused.returncode == 2
    assert "'kube-promtheus': there is no such file or directory; did you mean 'kube-prometheus'?" in refused.stderr


@pytest.mark.parametrize("archive", ["", "/proc/trainmedic", __file__])
def test_an_invalid_archive_path_ends_with_2(tmp_path: Path, archive: str) -> None:
    """This happens before anything is started, not when runs are to be deleted."""
    refused = serve(tmp_path, "--archive", archive)
    assert refused.returncode == 2
    assert f"--archive: '{archive}'" in refused.stderr
    assert not (tmp_path / "state").exists()


def test_a_refusal_after_some_parts_have_started_prints_only_its_reason(tmp_path: Path) -> None:
    named = {"TRAINMEDIC_SLACK_BOT_TOKEN": "xoxb-a", "TRAINMEDIC_SLACK_APP_TOKEN": "xapp-a"}
    named["TRAINMEDIC_NOTIFY_URLS"] = "oncall=json://127.0.0.1:1/"
    file = tmp_path / "slack.yaml"
    refused = serve(tmp_path, "--port", str(free_port()), "--slack", str(file), **named)
    assert refused.returncode == 2
    assert f"--slack: cannot read {file}" in refused.stderr
    assert "never awaited" not in refused.stderr


def test_without_tokens_it_does_not_listen_beyond_loopback(tmp_path: Path) -> None:
    """The message names what to set."""
    refused = serve(tmp_path, "--host", "0.0.0.0")
    assert refused.returncode == 2
    assert "--tokens" in refused.stderr


def test_a_second_server_does_not_use_the_same_state(tmp_path: Path) -> None:
    """Both would execute the same runs."""
    program, _ = start_server(tmp_path)
    with program:
        refused = serve(tmp_path, "--port", str(free_port()))
    assert refused.returncode == 2
    assert "in use" in refused.stderr


def test_an_occupied_port_is_named(tmp_path: Path) -> None:
    """The message contains the address."""
    program, url = start_server(tmp_path / "one")
    with program:
        port = url.rpartition(":")[2]
        refused = serve(tmp_path, "--port", port)
    assert refused.returncode == 2
    assert f"127.0.0.1:{port}" in refused.stderr


def test_a_misspelt_variable_is_reported(tmp_path: Path) -> None:
    """The server starts, and a line of its log names the variable and the nearest right one."""
    program, _ = start_server(tmp_path, environment={"TRAINMEDIC_MAXAGE": "1h"})
    with program:
        assert "TRAINMEDIC_MAX_AGE" in program.tail()


def test_secrets_are_not_in_the_log(tmp_path: Path) -> None:
    """These are the signing key, the password of the embedded Redis and the URL of a channel."""
    program, _ = start_server(
        tmp_path,
        "--log-level",
        "debug",
        environment={
            "TRAINMEDIC_SIGNING_KEY": "hunter2-hunter2-hunter2",
            "TRAINMEDIC_NOTIFY_URLS": "oncall=json://user:hunter2@127.0.0.1:1/",
        },
    )
    with program:
        program.end()
    assert "hunter2" not in program.log.read_text()


def test_the_server_restarts_after_a_kill(tmp_path: Path) -> None:
    """The lock, the database and the embedded Redis of a killed server do not block the next one."""
    program, _ = start_server(tmp_path)
    with program:
        program.process.kill()
        program.process.wait()
    again, url = start_server(tmp_path)
    with again, urllib.request.urlopen(f"{url}/ready", timeout=60) as reply:
        assert reply.status == 200


async def test_a_whole_server_runs_inside_a_test(tmp_path: Path) -> None:
    """Tests of other parts build on it: no process, no signals, a free port."""
    made = settings.load({"port": "0", "state_dir": str(tmp_path), "playbooks": (str(ROOT / "playbooks"),)}, {})
    stop = asyncio.Event()
    address: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(TrainmedicServer(made).run(stop, lambda *where: address.set_result(where)))
    done, _ = await asyncio.wait({running, address}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
    if running in done:
        running.result()
    host, port = address.result()
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"http://{host}:{port}/health")).json()["status"] == "healthy"
    stop.set()
    await asyncio.wait_for(running, 60)


def test_child_programs_are_ended(tmp_path: Path) -> None:
    """Nothing of a server outlives it: its embedded Redis ends with it."""
    program, _ = start_server(tmp_path)
    with program:
        children = Path(f"/proc/{program.process.pid}/task/{program.process.pid}/children").read_text().split()
        program.end()
    assert [child for child in children if Path(f"/proc/{child}").exists()] == []
    assert isinstance(program, Program)
