"""A real Docker daemon of the tests' own: its storage in a directory of its own, its socket the only way to it.

It has no network and copies layers instead of stacking them, so that it needs root and control groups alone. With
TRAINMEDIC_TEST_CONTAINER_ENGINE the tests use the engine at that socket, which may be Podman's service.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import eventually
from trainmedic_agent.containers.engine_api import _SocketConnection

NAMED_ENGINE = os.environ.get("TRAINMEDIC_TEST_CONTAINER_ENGINE")


class DockerEngine:
    """The engine at a socket, asked as people ask it: images from archives, containers that run a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def ask(self, method: str, path: str, body: bytes | None = None, kind: str = "application/json") -> Any:
        connection = _SocketConnection(str(self.path), 30)
        try:
            connection.request(method, path, body, {"Content-Type": kind} if body is not None else {})
            response = connection.getresponse()
            text = response.read()
            assert response.status < 400, f"{method} {path}: {response.status} {text!r}"
            return json.loads(text) if text.strip().startswith((b"{", b"[")) and b"\n{" not in text else None
        finally:
            connection.close()

    def load(self, repository: str, tag: str = "latest") -> None:
        """Import an image with busybox and some bytes of its own, so that no two images are the same."""
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            tar.add("/usr/bin/busybox" if Path("/usr/bin/busybox").exists() else "/bin/busybox", "busybox")
            unlike = tarfile.TarInfo("unlike")
            unlike.size = 100_000
            tar.addfile(unlike, io.BytesIO(os.urandom(unlike.size)))
        path = f"/images/create?fromSrc=-&repo=localhost/{repository}&tag={tag}"
        self.ask("POST", path, archive.getvalue(), "application/x-tar")

    def create(self, name: str, image: str, *command: str, **host: Any) -> None:
        """Create a container that runs busybox."""
        asked: Mapping[str, Any] = {
            "Image": f"localhost/{image}",
            "Cmd": ["/busybox", *command],
            "HostConfig": {"NetworkMode": "none", **host},
            "Labels": {"trainmedic.test": "yes"},
        }
        self.ask("POST", f"/containers/create?name={name}", json.dumps(asked).encode())

    def start(self, name: str) -> None:
        self.ask("POST", f"/containers/{name}/start")

    def states(self) -> Mapping[str, str]:
        """Return the state of each container, by name."""
        listed = self.ask("GET", "/containers/json?all=true") or []
        return {container["Names"][0].lstrip("/"): container["State"] for container in listed}

    def images(self) -> set[str]:
        """Return the names of all images, and ``<none>`` if one has none."""
        listed = self.ask("GET", "/images/json") or []
        return {name.removeprefix("localhost/") for image in listed for name in image["RepoTags"] or ["<none>:<none>"]}

    def clear(self) -> None:
        """Remove every container and image."""
        for name in self.states():
            self.ask("DELETE", f"/containers/{name}?force=true")
        for image in self.ask("GET", "/images/json") or []:
            self.ask("DELETE", f"/images/{image['Id']}?force=true")


@contextmanager
def docker_engine() -> Iterator[DockerEngine]:
    """Start a daemon and stop it afterwards, or use the engine that the environment names."""
    if NAMED_ENGINE is not None:
        yield DockerEngine(Path(NAMED_ENGINE))
        return
    if shutil.which("dockerd") is None:
        pytest.fail("Docker's daemon is not installed: scripts/system-packages docker.io busybox-static")
    base = Path(tempfile.mkdtemp(prefix="trainmedic-docker-"))
    argv = ["dockerd", "--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver=vfs"]
    argv += ["--host", f"unix://{base}/socket", "--pidfile", f"{base}/pid"]
    argv += ["--data-root", f"{base}/data", "--exec-root", f"{base}/exec"]
    with (base / "log").open("wb") as log, subprocess.Popen(argv, stdout=log, stderr=log) as daemon:
        try:
            engine = DockerEngine(base / "socket")

            def answers() -> bool:
                assert daemon.poll() is None, (base / "log").read_text()[-2000:]
                try:
                    return bool(engine.ask("GET", "/info"))
                except (OSError, AssertionError):
                    return False

            eventually(answers, 60, "Docker's daemon answers")
            yield engine
            engine.clear()
        finally:
            daemon.terminate()
            daemon.wait(30)
    shutil.rmtree(base, ignore_errors=True)
