from __future__ import annotations

from trainmedic.errors import Rejected
from trainmedic.job.command import JobCommand
from trainmedic.job.parameters import DataloaderWorkers
from trainmedic.recovery.changes import check_workers


def agreed_workers(command: JobCommand, present: int) -> int:
    """Return each data loader's workers, agreed by all ranks; ``present`` is this rank's number.

    Raises Rejected on all ranks. With ``at_most`` all must have the same number.
    """
    parameters = command.parameters
    assert isinstance(parameters, DataloaderWorkers)
    if parameters.at_most is not None:
        counts = sorted(set(command.group.poll(present).values()))
        if len(counts) > 1:
            raise Rejected(f"the ranks have different numbers of workers ({', '.join(map(str, counts))}); set a count")
    count = parameters.wanted(present)
    check_workers(count)
    return count
