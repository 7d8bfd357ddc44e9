"""Function calls of the server for each alert, by thread: a measure of its work that load hardly disturbs.

The server runs under cProfile, once with few alerts and once with many; the difference excludes its start. Calls differ
in cost, so processor time decides.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import sys
import tempfile
import threading
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import redis
import uvloop

from benchmarks import alert_storm, webhook_throughput
from benchmarks.sender import send_all
from tests.support.programs import PYTHON_PATH, Program, free_port
from trainmedic_core import command

_WRITER = "run-store-writer"


def serve(counts: Path, arguments: Sequence[str]) -> None:
    """Run ``trainmedic serve`` in this process, and write each thread's calls to `counts`."""
    profiles = {"main": cProfile.Profile(), _WRITER: cProfile.Profile()}
    run = threading.Thread.run

    def profiled(thread: threading.Thread) -> None:
        if thread.name == _WRITER:
            profiles[_WRITER].enable()
        run(thread)
        if thread.name == _WRITER:
            profiles[_WRITER].disable()

    threading.Thread.run = profiled  # type: ignore[method-assign]
    profiles["main"].enable()
    try:
        command.main(["serve", *arguments], standalone_mode=False)
    finally:
        profiles["main"].disable()
        made = {name: sum(entry.callcount for entry in profile.getstats()) for name, profile in profiles.items()}
        counts.write_text(json.dumps(made))


def calls(alerts: int, *, storm: bool) -> dict[str, int]:
    """Return the calls of each thread of a server from start to end, with so many alerts."""
    with tempfile.TemporaryDirectory() as name, alert_storm.redis_server(Path(name)) as redis_url:
        directory, port = Path(name), free_port()
        (directory / "playbooks").mkdir()
        text = alert_storm.PLAYBOOK if storm else webhook_throughput.PLAYBOOK
        (directory / "playbooks" / "playbook.yaml").write_text(text)
        settings = ["--port", str(port), "--state-dir", str(directory / "state"), "--mode", "enforce"]
        settings += ["--playbooks", str(directory / "playbooks"), "--redis", redis_url]
        argv = [sys.executable, "-m", "benchmarks.function_calls", "--serve", str(directory / "counts"), *settings]
        server, url = Program(argv, directory / "server.log", {"PYTHONPATH": PYTHON_PATH}), f"http://127.0.0.1:{port}"
        with server.wait_for(f"{url}/ready"):
            if storm:
                uvloop.run(send_all(url, alert_storm.deliveries(alerts, alerts // 100), 10))
                with redis.Redis.from_url(redis_url) as client:
                    alert_storm.command_times(client, alerts, 300)
            else:
                uvloop.run(webhook_throughput.rate(url, list(islice(webhook_throughput.requests(True), alerts)), 64))
            server.end(60)
        made: dict[str, int] = json.loads((directory / "counts").read_text())
        return made


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--storm", action="store_true", help="100 alerts a webhook, in mode enforce, with a command each"
    )
    options = parser.parse_args()
    few, many = (calls(alerts, storm=options.storm) for alerts in (1000, 3000))
    main_thread, writer = ((many[name] - few[name]) / 2000 for name in ("main", _WRITER))
    kind = "alert of a storm, with its command" if options.storm else "webhook that starts a run in mode observe"
    print(f"function calls: {main_thread:.0f} in the main thread and {writer:.0f} in the run store's for each {kind}")


if __name__ == "__main__":
    main()
