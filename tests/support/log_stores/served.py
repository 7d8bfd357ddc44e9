"""Stand-ins for stores, served over HTTP on this machine, for programs that speak with them; with TLS where asked."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Self

import uvicorn
from starlette.applications import Starlette

from tests.support.programs import eventually, free_port


def certificate(directory: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that has signed itself, and its key."""
    certificate, key = directory / "store.pem", directory / "store.key"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=store"]
    made += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate), "-keyout", str(key)]
    subprocess.run(made, check=True, capture_output=True, timeout=60)
    return certificate, key


class Served:
    """An application behind a port of its own, which it keeps; it can be away for a while."""

    def __init__(self, app: Starlette, signed: tuple[Path, Path] | None = None) -> None:
        self._app = app
        self._signed = signed
        self._port = free_port()
        self.url = f"{'https' if signed else 'http'}://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        certificate, key = map(str, self._signed) if self._signed else (None, None)
        config = uvicorn.Config(
            self._app, port=self._port, log_level="critical", ssl_certfile=certificate, ssl_keyfile=key
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        eventually(lambda: self._server.started, 60, "the stand-in", every=0.02)

    def stop(self) -> None:
        """Nobody answers any more."""
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(20)
