"""Queue of findings to send: ordered within a job, with users and jobs in turn."""

from __future__ import annotations

import sqlite3
from collections import Counter, deque
from collections.abc import Callable, Mapping

from trainmedic_agent.log_reading.budgets import BudgetOwner

TABLES = (
    """CREATE TABLE log_waiting (
        id INTEGER PRIMARY KEY, finding TEXT NOT NULL, uid INTEGER, job TEXT,
        size INTEGER NOT NULL, body BLOB NOT NULL
    )""",
    "CREATE INDEX log_waiting_finding ON log_waiting (finding)",
    "CREATE INDEX log_waiting_owner ON log_waiting (uid, job, id)",
)


class FindingQueue:
    """Table ``log_waiting``, within the caller's transactions."""

    def __init__(self) -> None:
        self._turns = 0
        self._served: dict[BudgetOwner, int] = {}  # number of each owner's last turn

    def body(self, connection: sqlite3.Connection, finding: str) -> bytes | None:
        row = connection.execute("SELECT body FROM log_waiting WHERE finding = ?", (finding,)).fetchone()
        return bytes(row[0]) if row is not None else None

    def put(self, connection: sqlite3.Connection, finding: str, owner: BudgetOwner, body: bytes) -> None:
        row = (len(body), body, finding)
        if connection.execute("UPDATE log_waiting SET size = ?, body = ? WHERE finding = ?", row).rowcount == 0:
            values = (finding, owner.uid, owner.job, len(body), body)
            connection.execute("INSERT INTO log_waiting (finding, uid, job, size, body) VALUES (?, ?, ?, ?, ?)", values)

    @staticmethod
    def _skip_numbers(connection: sqlite3.Connection, count: int) -> None:
        """Leave numbers unused, so that the receiver notices the loss."""
        begun = connection.execute("UPDATE sqlite_sequence SET seq = seq + ? WHERE name = 'log_findings'", (count,))
        if begun.rowcount == 0:
            connection.execute("INSERT INTO sqlite_sequence VALUES ('log_findings', ?)", (count,))

    def take(self, connection: sqlite3.Connection, most: int, numbered: Callable[[bytes, int], bytes | None]) -> int:
        """Move the next findings to ``log_findings``, numbered.

        `numbered` adds the number to a body, or returns None for an unreadable one. Returns how many were unreadable.
        """
        unreadable = 0
        counts = {
            BudgetOwner(uid, job): count
            for uid, job, count in connection.execute("SELECT uid, job, COUNT(*) FROM log_waiting GROUP BY uid, job")
        }
        for owner, count in self.shares(counts, most).items():
            rows = connection.execute(
                "SELECT id, finding, body FROM log_waiting WHERE uid IS ? AND job IS ? ORDER BY id LIMIT ?",
                (owner.uid, owner.job, count),
            ).fetchall()
            for waiting, finding, body in rows:
                number = connection.execute(
                    "INSERT INTO log_findings (finding, size, body) VALUES (?, 0, x'')", (finding,)
                ).lastrowid
                assert number is not None
                connection.execute("DELETE FROM log_waiting WHERE id = ?", (waiting,))
                with_number = numbered(bytes(body), number)
                if with_number is None:
                    connection.execute("DELETE FROM log_findings WHERE number = ?", (number,))
                    unreadable += 1
                else:
                    values = (len(with_number), with_number, number)
                    connection.execute("UPDATE log_findings SET size = ?, body = ? WHERE number = ?", values)
        return unreadable

    @staticmethod
    def make_room(connection: sqlite3.Connection, most_bytes: int) -> int:
        """Delete the oldest findings of the largest user's largest job until `most_bytes` are left.

        Return their number.
        """
        ((total,),) = connection.execute("SELECT COALESCE(SUM(size), 0) FROM log_waiting")
        if total <= most_bytes:
            return 0
        sizes = {
            BudgetOwner(uid, job): size
            for uid, job, size in connection.execute("SELECT uid, job, SUM(size) FROM log_waiting GROUP BY uid, job")
        }
        lost = 0
        while total > most_bytes:
            users: Counter[int | None] = Counter()
            for owner, size in sizes.items():
                users[owner.uid] += size
            user = max(users, key=users.__getitem__)
            largest = max((owner for owner in sizes if owner.uid == user), key=sizes.__getitem__)
            oldest = "SELECT id, size FROM log_waiting WHERE uid IS ? AND job IS ? ORDER BY id LIMIT 100"
            for waiting, size in connection.execute(oldest, (largest.uid, largest.job)).fetchall():
                connection.execute("DELETE FROM log_waiting WHERE id = ?", (waiting,))
                sizes[largest] -= size
                total -= size
                lost += 1
                if total <= most_bytes:
                    break
        FindingQueue._skip_numbers(connection, lost)
        return lost

    def shares(self, counts: Mapping[BudgetOwner, int], most: int) -> Mapping[BudgetOwner, int]:
        """Return how many findings of each owner are sent next.

        Users take turns, and their jobs, the least recently served first.
        """
        jobs: dict[int | None, list[BudgetOwner]] = {}
        for owner in counts:
            jobs.setdefault(owner.uid, []).append(owner)
        users = deque(sorted((BudgetOwner(uid) for uid in jobs), key=self._turn))
        queues = {uid: deque(sorted(of_user, key=self._turn)) for uid, of_user in jobs.items()}
        chosen: Counter[BudgetOwner] = Counter()
        present = {*counts, *users}
        served = {owner: at for owner, at in self._served.items() if owner in present}
        while users and chosen.total() < most:
            user = users.popleft()
            queue = queues[user.uid]
            owner = queue.popleft()
            chosen[owner] += 1
            self._turns += 1
            served[user] = served[owner] = self._turns
            if chosen[owner] < counts[owner]:
                queue.append(owner)
            if queue:
                users.append(user)
        self._served = served
        return chosen

    def _turn(self, owner: BudgetOwner) -> int:
        return self._served.get(owner, 0)
