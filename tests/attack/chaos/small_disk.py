"""A disk of a few megabytes that can be filled, for the chaos: a filesystem in a mount namespace of its own.

The namespace lasts as long as its keeper, a process that does nothing, so that what is on the disk outlives the
programs that are killed there. Neither root nor any trace on the machine is needed.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Self

from tests.support.programs import eventually

_MOUNT = 'mount -t tmpfs -o size="$1" tmpfs "$0" && exec sleep infinity'


class SmallDisk:
    """A filesystem of `megabytes` at `path`, seen only by programs that are started with `launcher`."""

    def __init__(self, path: Path, megabytes: int) -> None:
        self.path = path
        self._megabytes = megabytes
        self._keeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True)
        self._keeper = subprocess.Popen(["unshare", "-rm", "sh", "-c", _MOUNT, self.path, f"{self._megabytes}m"])
        eventually(self._is_mounted, 60, "the small disk", 0.02)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._keeper is not None
        self._keeper.kill()
        self._keeper.wait()

    @property
    def launcher(self) -> tuple[str, ...]:
        """What starts a program that sees the disk, and becomes its process."""
        assert self._keeper is not None
        return "nsenter", "--target", str(self._keeper.pid), "--user", "--preserve-credentials", "--mount"

    def fill(self) -> None:
        """Until nothing more fits."""
        with (self._seen_from_outside / "filled").open("wb", buffering=0) as file:
            for size in (1 << 16, 1):
                try:
                    while file.write(bytes(size)):
                        pass
                except OSError:
                    continue

    def free(self) -> None:
        """Take away what fills it."""
        (self._seen_from_outside / "filled").unlink(missing_ok=True)

    @property
    def _seen_from_outside(self) -> Path:
        assert self._keeper is not None
        return Path(f"/proc/{self._keeper.pid}/root{self.path}")

    def _is_mounted(self) -> bool:
        assert self._keeper is not None
        if self._keeper.poll() is not None:
            raise AssertionError("no filesystem can be mounted in a user namespace here")
        mounts = Path(f"/proc/{self._keeper.pid}/mounts").read_text()
        return f" {self.path} tmpfs " in mounts
