from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from trainmedic_agent.log_reading.budgets import BudgetOwner
from trainmedic_agent.log_reading.scan_units import FileKey, FoundFile


class FileShares(Struct, frozen=True):
    opened: Sequence[FoundFile]  # wanted files to open
    closed: Sequence[FileKey]  # followed files to close
    left_out: Mapping[BudgetOwner, int]  # number of files neither opened nor kept open


def shares(
    followed: Mapping[FileKey, BudgetOwner], wanted: Iterable[FoundFile], most: int, most_of_job: int
) -> FileShares:
    """Choose at most `most` files, and `most_of_job` per job, from users and their jobs in turn.

    A job's followed files precede its `wanted` ones, which are in order of importance.
    """
    queues: dict[BudgetOwner, deque[FoundFile | FileKey]] = {}
    for key, owner in followed.items():
        queues.setdefault(owner, deque()).append(key)
    for file in wanted:
        queues.setdefault(file.owner, deque()).append(file)
    left_out: Counter[BudgetOwner] = Counter()
    closed: list[FileKey] = []
    for owner, queue in queues.items():
        if owner.job is not None and len(queue) > most_of_job:
            _leave_out([queue.pop() for _ in range(len(queue) - most_of_job)], owner, closed, left_out)
    opened: list[FoundFile] = []
    room = most
    users: dict[int | None, deque[BudgetOwner]] = {}
    for owner in queues:
        users.setdefault(owner.uid, deque()).append(owner)
    waiting = deque(users.values())
    while waiting and room > 0:
        jobs = waiting.popleft()
        owner = jobs.popleft()
        queue = queues[owner]
        if not queue:
            if jobs:
                waiting.appendleft(jobs)
            continue
        chosen = queue.popleft()
        room -= 1
        if isinstance(chosen, FoundFile):
            opened.append(chosen)
        jobs.append(owner)
        waiting.append(jobs)
    for owner, queue in queues.items():
        _leave_out(queue, owner, closed, left_out)
    return FileShares(opened, closed, left_out)


def _leave_out(
    files: Collection[FoundFile | FileKey], owner: BudgetOwner, closed: list[FileKey], left_out: Counter[BudgetOwner]
) -> None:
    if files:
        left_out[owner] += len(files)
        closed.extend(file for file in files if not isinstance(file, FoundFile))
