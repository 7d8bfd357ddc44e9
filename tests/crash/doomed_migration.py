"""Opens a run store whose schema is of an earlier release, and dies by SIGKILL after a statement: a program for the
crash tests.

    python doomed_migration.py URL FIRST APART

It dies after the statement FIRST, then again, begun anew, APART statements later, and so on, until one that lives has
brought the schema up to date; each is a process of its own. It prints how many have died, and its exit status is that
of the one that lived.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time

import alembic.command  # noqa: F401  # once, for all that die
import sqlalchemy as sa

from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.errors import ConfigurationError


def die_after(last: int) -> None:
    statements = itertools.count(1)

    def count(*_: object) -> None:
        if next(statements) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    sa.event.listen(sa.Engine, "after_cursor_execute", count)


def open_store(url: str) -> None:
    while True:
        try:
            SqlStore.open(url)
            return
        except ConfigurationError as error:
            if "in use" not in str(error):  # PostgreSQL takes a moment to see that the one before has died
                raise
            time.sleep(0.02)


def main(url: str, first: int, apart: int) -> int:
    for died in itertools.count():
        child = os.fork()
        if child == 0:
            die_after(first + died * apart)
            open_store(url)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != -signal.SIGKILL:
            print(died)
            return status
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
