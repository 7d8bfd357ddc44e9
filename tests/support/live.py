"""A server as a real process, and training jobs with the SDK, for tests that take something away from them.

Here: starting, killing and asking a server that keeps its port and state, a job that notes every
effect, Alertmanager's part. Not here: what is taken away. Used by the integration and crash tests.
"""

from __future__ import annotations

import http.client
import itertools
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import trainmedic
from tests.support.programs import PYTHON_PATH, Program, eventually, free_port
from tests.support.releases import Release

OPEN = ("running", "waiting", "awaiting_approval")


@dataclass(frozen=True)
class Answer:
    """A response; status 0 where there was none."""

    status: int
    body: Any = None
    headers: Mapping[str, str] | None = None


class Server:
    """``trainmedic serve`` over one state directory: it can be killed, stopped, and started again."""

    def __init__(
        self,
        directory: Path,
        playbook: str,
        *options: str,
        program: tuple[str | Path, ...] = ("-m", "trainmedic_server"),
        environment: Mapping[str, str] | None = None,
        token: str | None = None,
        release: Release | None = None,
    ) -> None:
        """``environment`` is there at every start; ``token`` is presented with every request; ``release`` is run in
        place of this one."""
        python, python_path = (release.python, release.python_path) if release else (sys.executable, PYTHON_PATH)
        playbooks = directory / "playbooks"
        playbooks.mkdir(parents=True)
        for number, text in enumerate(playbook.split("\n---\n")):
            (playbooks / f"{number}.yaml").write_text(text)
        self.directory = directory
        self.state = directory / "state"
        self.port = free_port()
        self.starts = 0
        self._environment = {"PYTHONPATH": python_path, **(environment or {})}
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self.argv = [
            *(python, *program, "serve", "--port", str(self.port), "--mode", "enforce"),
            *("--state-dir", self.state, "--playbooks", playbooks, *options),
        ]
        self.program: Program | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.program is not None:
            self.program.end()

    def start(self, wait: bool = True, **environment: str) -> None:
        self.starts += 1
        self.program = Program(
            self.argv,
            self.directory / f"server-{self.starts}.log",
            {**self._environment, **environment},
        )
        if wait:
            self.program.wait_for(f"http://127.0.0.1:{self.port}/health")

    def kill(self) -> None:
        assert self.program is not None
        self.program.process.kill()
        self.program.process.wait()

    def stop(self) -> float:
        """SIGTERM; how many seconds it took to end. Fails where it did not end by itself, and well."""
        assert self.program is not None
        began = time.monotonic()
        status = self.program.end(patience=30)
        assert status == 0, self.program.tail()
        return time.monotonic() - began

    def ask(self, path: str, body: Mapping[str, Any] | None = None, timeout: float = 60) -> Answer:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body).encode() if body is not None else None,
            headers=self._headers,
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                return Answer(reply.status, json.load(reply), dict(reply.headers))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, json.loads(error.read() or b"null"), dict(error.headers))
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
            return Answer(0)

    def runs(self) -> list[dict[str, Any]]:
        answer = self.ask("/history?limit=1000")
        items: list[dict[str, Any]] = answer.body["items"] if answer.status == 200 else []
        return items

    def run(self, run_id: str) -> dict[str, Any]:
        whole: dict[str, Any] = self.ask(f"/history/{run_id}").body
        return whole

    def only_run(self) -> dict[str, Any]:
        (run,) = self.runs()
        return self.run(run["run_id"])

    def closed_run(self, within: float = 30) -> dict[str, Any]:
        """The one run, once it has closed."""
        eventually(lambda: [run for run in self.runs() if run["status"] not in OPEN], within, "run closed", 0.05)
        return self.only_run()

    def undone_run(self, within: float = 30) -> dict[str, Any]:
        """The one run, once the undo of its first step has ended."""
        ended = ("done", "failed", "dropped", "closed")
        eventually(lambda: self.only_run()["steps"][0]["undo"]["status"] in ended, within, "undo ended", 0.05)
        return self.only_run()


class Job:
    """A training job that is there while the context lasts, and what was done to it, with the command's id."""

    def __init__(self, name: str, redis_url: str | None = None, signing_key: str | None = None) -> None:
        self.name = name
        self._signing_key = signing_key
        self.effects: list[tuple[str, str]] = []
        self._redis_url = redis_url
        self._over = threading.Event()
        self._stepping = threading.Event()
        self._stepping.set()

    def __enter__(self) -> Self:
        self._medic = trainmedic.connect(job=self.name, redis_url=self._redis_url, signing_key=self._signing_key)
        for action in ("job.scale_lr", "job.checkpoint", "job.accumulate"):
            self._medic.on(action)(self._note)
        self._thread = threading.Thread(daemon=True, target=self._train)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._medic.close()

    @property
    def done(self) -> list[str]:
        """The effects in order, without the ids."""
        return [effect for _, effect in self.effects]

    def hold(self) -> None:
        """A step that takes long: nothing is picked up until `go_on`."""
        self._stepping.clear()

    def go_on(self) -> None:
        self._stepping.set()

    def _note(self, command: Any) -> dict[str, Any]:
        factor = command.params.get("factor")
        self.effects.append((command.id, f"{command.action} {factor:g}" if factor is not None else command.action))
        return {}

    def _train(self) -> None:
        for step in itertools.count():
            if self._stepping.is_set():
                self._medic.commands(step)
            if self._over.wait(0.005):
                return
