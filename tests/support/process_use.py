"""How much of the machine a process uses, for tests that watch whether it grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

MIB = 1 << 20


@dataclass(frozen=True)
class ProcessUse:
    """A moment of a process."""

    resident: int
    """Bytes of memory that are its own or shared."""
    descriptors: int
    threads: int


def process_use(pid: int) -> ProcessUse:
    """What the process uses now. Raises OSError where there is none."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = int(status.partition("VmRSS:")[2].split()[0]) * 1024
    threads = int(status.partition("Threads:")[2].split()[0])
    return ProcessUse(resident, len(list(Path(f"/proc/{pid}/fd").iterdir())), threads)


def growth(uses: Sequence[ProcessUse]) -> tuple[ProcessUse, ProcessUse]:
    """The medians of the second quarter and of the last. The first quarter is the time to warm up."""
    quarter = len(uses) // 4
    assert quarter > 0, "too few samples to compare"

    def middle(part: Sequence[ProcessUse]) -> ProcessUse:
        return ProcessUse(
            int(median(use.resident for use in part)),
            int(median(use.descriptors for use in part)),
            int(median(use.threads for use in part)),
        )

    return middle(uses[quarter : 2 * quarter]), middle(uses[-quarter:])


def assert_flat(uses: Sequence[ProcessUse], name: str) -> None:
    """Memory within a tenth and 8 MiB, descriptors and threads within a few: less than what a leak adds in an hour."""
    before, after = growth(uses)
    told = f"{name}: {before} in the second quarter, {after} in the last"
    print(told)
    assert after.resident <= before.resident * 1.1 + 8 * MIB, told
    assert after.descriptors <= before.descriptors + 8, told
    assert after.threads <= before.threads + 4, told
