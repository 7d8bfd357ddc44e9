from __future__ import annotations

import os
import time
from collections import deque

# 80 bits each, because a system call per ID would yield the GIL; cleared in forks.
_random: deque[int] = deque()
os.register_at_fork(after_in_child=_random.clear)


def _random_bits() -> int:
    while True:
        try:
            return _random.popleft()
        except IndexError:  # another thread may take the last one
            many = os.urandom(10 * 256)
            _random.extend(int.from_bytes(many[start : start + 10], "big") for start in range(0, len(many), 10))


def new_id(now_ms: int | None = None, counter: int | None = None) -> str:
    """Return a UUIDv7 (RFC 9562, section 5.7): 48 bits of Unix milliseconds, then random bits.

    `counter`, 0 to 4095, replaces the first 12 random bits (section 6.2, method 1), to sort IDs of one millisecond.
    """
    stamp = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    value = (stamp & ((1 << 48) - 1)) << 80 | _random_bits()
    if counter is not None:
        value = value & ~(0xFFF << 64) | (counter & 0xFFF) << 64
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def first_id(ms: int) -> str:
    """Return the lower bound of IDs from this Unix millisecond on."""
    text = f"{min(max(ms, 0), (1 << 48) - 1):012x}"
    return f"{text[:8]}-{text[8:]}"
