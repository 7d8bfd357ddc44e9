"""A stand-in for ``nvidia-smi --gpu-reset [-i UUID]``, on the GPUs of the stand-in for the driver (``NVML_STANDIN``).

It models: the refusal while another process has NVML open or computes on a GPU, and the reset of
`driver.reset_gpu`, of all GPUs without ``-i``. A word in ``<file>.next`` makes the next reset fail: ``refused``,
``useless`` (the driver still asks for a reset), ``fatal`` (the GPU is lost). Each reset GPU is a line of
``<file>.resets``.

It does not model: root, the seconds that a reset takes, NVLink and NVSwitch, MIG, and its other options and texts.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.driver import driver


def clients(path: Path) -> list[int]:
    """Processes that have NVML open: the library keeps the log of limits open."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and any(
                entry.readlink() == path.with_name(f"{path.name}.log") for entry in (process / "fd").iterdir()
            ):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def main(arguments: list[str]) -> str | None:
    """Return why it failed."""
    option, *selection = arguments
    assert option == "--gpu-reset"
    assert not selection or (selection[0] == "-i" and len(selection) == 2)
    path = Path(os.environ[driver.VARIABLE])
    following = path.with_name(f"{path.name}.next")
    how = following.read_text() if following.exists() else ""
    following.unlink(missing_ok=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        fcntl.flock(file, fcntl.LOCK_EX)
        state = driver.State.from_buffer(memory)
        try:
            wanted = [one for one in state.gpus[: state.count] if not selection or one.uuid.decode() == selection[1]]
            for gpu in wanted:
                if gpu.process_count or clients(path):
                    return f"GPU {gpu.uuid.decode()} is currently in use by another client."
                if how == "refused":
                    return f"Unable to reset GPU {gpu.uuid.decode()}: Insufficient Permissions"
            for gpu in wanted:
                asked = gpu.recovery_action
                driver.reset_gpu(gpu)
                gpu.recovery_action = asked if how == "useless" else gpu.recovery_action
                gpu.lost = how == "fatal"
                with path.with_name(f"{path.name}.resets").open("a") as log:
                    log.write(f"{gpu.uuid.decode()}\n")
        finally:
            gpu = wanted = None
            del state
    return None


if __name__ == "__main__":
    if (problem := main(sys.argv[1:])) is not None:
        print(problem)
        sys.exit(1)
    print("GPU was successfully reset.")
