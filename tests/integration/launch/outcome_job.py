"""A job that comes to one end: ``outcome_job.py END``, in plain Python or as each of torchrun's ranks.

The last rank has the accident. Only ``gloo-*`` needs PyTorch: the other ranks then lose it in a collective. Only what
``hang`` and ``nan`` need the SDK for uses it. ``cascade`` goes on for a while after it has printed whatever a job
prints that loses its peers.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
IS_LAST = RANK == WORLD - 1
CASCADE = """\
[rank3]:[E1127 09:15:02.118 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(\
SeqNum=771, OpType=ALLREDUCE, NumelIn=1024, NumelOut=1024, Timeout(ms)=600000) ran for 600012 milliseconds before \
timing out.
[rank3]:[E1127 09:15:02.119 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0 Rank 3] Exception (either an error or \
timeout) detected by watchdog at work: 771, last enqueued NCCL work: 772, last completed NCCL work: 770.
[rank3]:[E1127 09:15:02.120 ProcessGroupNCCL.cpp:630] [Rank 3] Some NCCL operations have failed or timed out. Due to \
the asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data.
[rank3]:[E1127 09:15:02.121 ProcessGroupNCCL.cpp:636] [Rank 3] To avoid data inconsistency, we are taking the entire \
process down.
[rank5]:[W1127 09:15:03.004 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=41): Connection reset by peer
RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.3.0.8]:41822
torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited or there was a \
network error, NCCL version 2.21.5
NCCL timeout: unhandled system error
possible deadlock: rank 2 is stuck in all_reduce
training hang detected
RuntimeError: DataLoader worker (pid 80211) is killed by signal: Killed.
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
E1127 09:15:04.000000 611 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -6) local_rank: 3 \
(pid: 640) of binary: /usr/bin/python3
"""


def main(end: str) -> None:
    """Have the end."""
    attempt = int(os.environ.get("TRAINMEDIC_ATTEMPT", "1"))
    match end:
        case "gloo-exit" | "gloo-segv" | "gloo-raise":
            collective(end.partition("-")[2])
        case "hang" | "nan":
            observed(end)
        case "cascade" | "cascade-sdk":
            cascade(uses_sdk=end == "cascade-sdk")
        case "other":  # each attempt ends otherwise, and the last one well
            print(f"epoch 1 step {attempt} loss 2.{attempt}", flush=True)
            if attempt < 3:
                accident({1: "memory", 2: "kill"}[attempt])
        case _:
            print("epoch 1 step 1 loss 2.5", flush=True)
            if IS_LAST:
                accident(end)
            elif end != "well":
                time.sleep(60)  # until the launcher ends it


def accident(kind: str) -> None:
    """Fail, or go on."""
    match kind:
        case "memory":
            raise MemoryError("Unable to allocate 731. GiB for an array with shape (98112000000,)")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            sys.exit(7)
        case "raise":
            raise KeyError("attention_mask")


def collective(kind: str) -> None:
    """Lose the others, or be lost."""
    import torch
    import torch.distributed as dist

    import trainmedic

    dist.init_process_group("gloo")
    medic = trainmedic.connect()
    for step in range(1, 4):
        dist.all_reduce(torch.ones(1))
        medic.report(step=step, loss=1.0 / step)
    if IS_LAST and kind == "exit":
        # At once: as Python takes a live process group down, gloo can abort, and the rank's own end is then SIGABRT.
        os._exit(7)
    if IS_LAST:
        accident(kind)
    dist.all_reduce(torch.ones(1))
    time.sleep(60)


def observed(end: str) -> None:
    """Report steps to the SDK; hang after them, or have a loss that is no number and go on."""
    import trainmedic

    medic = trainmedic.connect(hang_floor=1.0)
    for step in range(1, 30):
        medic.report(step=step, loss=float("nan") if end == "nan" and step > 20 else 1.0 / step)
        medic.commands(step)
        time.sleep(0.1)
    if end == "hang":
        time.sleep(3600)
    medic.close()


def cascade(*, uses_sdk: bool) -> None:
    """Print all of it in the first steps, and go on."""
    medic = None
    if uses_sdk:
        import trainmedic

        medic = trainmedic.connect()
    until = time.monotonic() + float(os.environ["CASCADE_SECONDS"])
    step = 0
    while time.monotonic() < until:
        step += 1
        print(f"step: {step} loss: {3.0 / step:.4f}", flush=True)
        if medic is not None:
            medic.report(step=step, loss=3.0 / step)
            medic.commands(step)
        if step == 10:
            print(CASCADE, file=sys.stderr, flush=True)
            for error in (
                RuntimeError("CUDA error: an illegal memory access was encountered"),
                ConnectionError("lost"),
            ):
                try:
                    raise error
                except (RuntimeError, ConnectionError):
                    traceback.print_exc()
        time.sleep(0.2)
    if medic is not None:
        medic.close()


if __name__ == "__main__":
    main(sys.argv[1])
