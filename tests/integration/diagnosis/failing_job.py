"""A training of several gloo ranks in which one rank has an accident: ``failing_job.py ACCIDENT [PLACE]``.

It prints a record of each step, as the SDK writes them. Rank 2 has the accident at step 5.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_RANK, _STEP, _STEPS = 2, 5, 12


def main() -> None:
    """Trains for some steps."""
    accident, place = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    rank = dist.get_rank()
    if accident == "recorded":
        threading.Thread(target=_write_recorder, args=(rank,), daemon=True).start()
    for step in range(1, _STEPS + 1):
        loss = 1.0 / step
        if step >= _STEP and rank == _RANK:
            loss = _have(accident, place, loss)
        total = torch.tensor([loss])
        dist.all_reduce(total)
        own = loss if accident == "nan" else float(total[0])
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        written = own if own == own else "NaN"
        print(json.dumps({"ts": now, "event": "step", "step": step, "rank": rank, "loss": written}), flush=True)
        time.sleep(0.05)
    dist.destroy_process_group()


def _write_recorder(rank: int) -> None:
    """Write what the rank has recorded, while the others wait: NCCL does it by itself, gloo has to be told."""
    time.sleep(6)
    raw = torch._C._distributed_c10d._dump_fr_trace_json()
    Path(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{rank}").write_bytes(raw if isinstance(raw, bytes) else raw.encode())


def _have(accident: str, place: str, loss: float) -> float:
    match accident:
        case "raise":
            raise KeyError("labels")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "leave" | "recorded":
            time.sleep(3600)
        case "disk":
            # A device on which writing ends as on a full disk.
            with Path("/dev/full").open("w") as full:
                full.write("a checkpoint" * 10_000)
        case "memory":
            torch.ones(10**15)
        case "full":
            Path(place, "checkpoint").write_bytes(b"x" * 2**24)
        case "cgroup":
            Path(place, "cgroup.procs").write_text(str(os.getpid()))
            kept = [bytearray(b"x" * 2**24) for _ in range(64)]
            print(len(kept))
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "nan":
            return float("nan")
    return loss


if __name__ == "__main__":
    main()
