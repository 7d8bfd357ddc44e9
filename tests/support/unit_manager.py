"""A real systemd of the tests' own: a user manager in a mount namespace in which the machine counts as booted by
systemd. It needs root. ``TRAINMEDIC_TEST_SYSTEMCTL`` (such as ``systemctl --user``) names a running one instead.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.programs import Program, eventually

NAMED = os.environ.get("TRAINMEDIC_TEST_SYSTEMCTL")
_SYSTEMD = ("/usr/lib/systemd/systemd", "/lib/systemd/systemd")


class UnitManager:
    """``systemctl`` is the command that speaks with it, ``folder`` takes units."""

    def __init__(self, systemctl: tuple[str, ...], folder: Path) -> None:
        self.systemctl = systemctl
        self._folder = folder
        self._made: list[Path] = []

    def add(self, name: str, service: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._made.append(self._folder / name)
        self._made[-1].write_text(f"[Unit]\nStartLimitIntervalSec=0\n[Service]\n{service}\n")
        self.ask("daemon-reload")

    def ask(self, *words: str, check: bool = True) -> str:
        done = subprocess.run([*self.systemctl, *words], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0 or not check, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def shown(self, name: str, of: str) -> str:
        return self.ask("show", "--value", f"--property={of}", "--", name)

    def clear(self) -> None:
        """Stop and forget the units that were added."""
        for path in self._made:
            self.ask("stop", path.name, check=False)
            self.ask("reset-failed", path.name, check=False)
            path.unlink(missing_ok=True)
        self._made.clear()
        self.ask("daemon-reload")


@contextmanager
def unit_manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[UnitManager]:
    if NAMED is not None:
        folder = Path(os.environ.get("XDG_CONFIG_HOME", str(Path.home() / ".config"))) / "systemd" / "user"
        yield UnitManager(tuple(shlex.split(NAMED)), folder)
        return
    systemd = next((path for path in _SYSTEMD if Path(path).exists()), None)
    if os.geteuid() != 0 or systemd is None or shutil.which("systemctl") is None:
        pytest.skip("needs root and systemd (apt package systemd), or TRAINMEDIC_TEST_SYSTEMCTL")
    base = Path(tempfile.mkdtemp(prefix="trainmedic-systemd-"))
    runtime = base / "run"
    runtime.mkdir(mode=0o700)
    environment = {"XDG_RUNTIME_DIR": str(runtime), "XDG_CONFIG_HOME": str(base / "config"), "HOME": str(base)}
    booted = "mount -t tmpfs none /run && mkdir -p /run/systemd/system && exec"
    argv = ["unshare", "--mount", "sh", "-c", f"{booted} {systemd} --user --unit=basic.target"]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with Program(argv, base / "log", environment) as manager:
        made = UnitManager(("systemctl", "--user"), base / "config" / "systemd" / "user")

        def answers() -> bool:
            assert manager.process.poll() is None, manager.tail()
            return made.ask("show", "--value", "--property=Version", check=False) != ""

        eventually(answers, 60, "systemd answers")
        yield made
    shutil.rmtree(base, ignore_errors=True)
