"""``trainmedic`` on a disk that takes its time: each commit waits first. A program for the saturation tests.

    python slow_disk_server.py SECONDS serve …

The hook sits in SQLAlchemy, so that all of our code runs unchanged.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from sqlalchemy.engine.default import DefaultDialect

from trainmedic_core.command import main


def wait_before_commits(seconds: float) -> None:
    commit = DefaultDialect.do_commit

    def slow(self: Any, connection: Any) -> None:
        time.sleep(seconds)
        commit(self, connection)

    DefaultDialect.do_commit = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    wait_before_commits(float(sys.argv[1]))
    main(sys.argv[2:], prog_name="trainmedic")
