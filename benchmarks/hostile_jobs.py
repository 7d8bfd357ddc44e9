"""A node whose logs two hostile users attack: the cost for other jobs, and what the attackers see of them.

A local user and root of a container know the source and change their tactics at random (``tests.support.hostile``).
Normal jobs of three users fail every few seconds, commands are executed, and logs are searched. A job of a second node
without attackers (``calm``) shows the machine's load.

The figures are seconds from a failing line to its finding in Redis and from a command to its reply, and the memory of
the acting process. It exits with 1 if another user's line took more than 10 s or became no finding, if that memory grew
by more than 10 MiB, if a command was not executed, or if a byte of a private file appeared anywhere.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.alert_storm import redis_server
from tests.support.hostile.scene import OTHERS, Attack, Outcome, remove

MOST_SECONDS = 10.0
MOST_GROWTH = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="repeats the order of tactics. Default: a random one")
    parser.add_argument("--share", type=float, default=1.0, help="of the hostile files: 0.1 makes a tenth of them")
    options = parser.parse_args()
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    top = Path(tempfile.mkdtemp(prefix="hostile-jobs-", dir="/tmp"))
    top.chmod(0o755)
    try:
        redis_place = top / "redis"
        redis_place.mkdir(mode=0o700)
        with redis_server(redis_place) as url, Attack(top / "place", url, seed, options.share) as attack:
            outcome = attack.run(options.minutes * 60)
    finally:
        remove(top)
    return _report(outcome)


def _report(outcome: Outcome) -> int:
    faults = list(outcome.breaches)
    print(f"load average during the attack: {statistics.mean(outcome.load):.1f}, at most {max(outcome.load):.1f}")
    for victim, waits in sorted(outcome.waits.items()):
        high = sorted(waits)[int(len(waits) * 0.99)]
        print(
            f"from line to finding in Redis, {victim}: {statistics.median(waits):.2f} s in the median, 99 % within"
            f" {high:.2f} s, at most {max(waits):.2f} s ({len(waits)} findings)"
        )
        if max(waits) > MOST_SECONDS and victim in OTHERS:
            faults.append(f"{sum(wait > MOST_SECONDS for wait in waits)} lines of {victim} took over {MOST_SECONDS} s")
    print(f"lines that became no finding: {outcome.lost}")
    if outcome.hidden:
        faults.append(f"{outcome.hidden} lines of other users became no finding")
    if outcome.commands:
        print(
            f"from command to reply: {statistics.median(outcome.commands):.3f} s in the median, at most"
            f" {max(outcome.commands):.3f} s ({len(outcome.commands)} commands)"
        )
    if outcome.unanswered or not outcome.commands:
        faults.append(f"{len(outcome.unanswered)} commands were not carried out: {outcome.unanswered[:20]}")
    sizes = [size for _, size in outcome.memory]
    print(
        f"acting process: {outcome.before:.1f} MiB at first, {sizes[-1]:.1f} MiB at last, at most {max(sizes):.1f} MiB;"
        f" reader at most {outcome.reader_memory:.1f} MiB, started again {outcome.restarts:g} times"
    )
    if outcome.growth > MOST_GROWTH:
        faults.append(f"the acting process grew by {outcome.growth:.1f} MiB")
    print(f"slowest answer of the server: {outcome.slowest_answer:.1f} s")
    for name, counts in (("searched", outcome.answers), ("cuts", outcome.cuts), ("loop errors", outcome.loop_errors)):
        print(f"{name}: {dict(counts)}")
    for name, tactics in outcome.tactics.items():
        print(f"tactics of {name}: {tactics}")
    for fault in faults:
        print(f"BREACH: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
