"""The stand-in for NVIDIA's driver, from the tests' side: build it, make GPUs, heat, fail and lose them.

``nvml.c`` beside this says what it models and what not. Real programs use it through the real pynvml: a
subprocess with `Driver.environment`, or this process after `Driver.enter`. Here is also the log of every
attempt to set a power limit, from whatever process, which outlives them.

Watts, degrees Celsius and seconds; time in the driver may run faster than the clock (``speed``).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import math
import mmap
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Self

from tests.support.programs import CACHE

SOURCE = Path(__file__).with_name("nvml.c")
VARIABLE = "NVML_STANDIN"
MOST_GPUS = MOST_FAULTS = MOST_XIDS = MOST_PROCESSES = 16
GIB = 1 << 30

NOT_SUPPORTED = 3
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
GPU_IS_LOST = 15
UNKNOWN = 999
_UNKNOWN_FIELD = 0xFFFFFFFF

SET_LIMIT = "nvmlDeviceSetPowerManagementLimit"


class _Fault(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_char * 64),
        ("gpu", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("left", ctypes.c_int32),
        ("after", ctypes.c_int32),
        ("kill", ctypes.c_int32),
        ("hang", ctypes.c_int32),
        ("delay_ms", ctypes.c_uint32),
        ("tripped", ctypes.c_uint32),
    )


class _Gpu(ctypes.Structure):
    _fields_ = (
        ("uuid", ctypes.c_char * 96),
        ("name", ctypes.c_char * 96),
        *((name, ctypes.c_uint32) for name in ("domain", "bus", "device")),
        *((name, ctypes.c_uint32) for name in ("min_mw", "max_mw", "default_mw", "limit_mw", "idle_mw", "peak_mw")),
        *((name, ctypes.c_int32) for name in ("slowdown_celsius", "mig", "lost", "absent")),
        *(
            (name, ctypes.c_uint32)
            for name in ("recovery_action", "sm_mhz", "memory_mhz", "xid_count", "process_count")
        ),
        ("processes", ctypes.c_uint32 * MOST_PROCESSES),
        ("remapped", ctypes.c_uint32 * 4),
        ("pcie", ctypes.c_uint32 * 4),
        *((name, ctypes.c_uint32) for name in ("pcie_replays", "nvlinks", "nvlinks_up", "nvlink_errors")),
        *((name, ctypes.c_uint32) for name in ("performance_state", "persistence")),
        *((name, ctypes.c_double) for name in ("load", "ambient", "kelvin_per_watt", "inertia")),
        *((name, ctypes.c_double) for name in ("temperature", "energy_mj")),
        ("at_ns", ctypes.c_int64),
        *((name, ctypes.c_uint64) for name in ("memory_total", "memory_reserved", "memory_used")),
        ("ecc", (ctypes.c_uint64 * 2) * 2),
        ("more_reasons", ctypes.c_uint64),
        ("xids", ctypes.c_uint64 * MOST_XIDS),
    )


class State(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint64),
        ("generation", ctypes.c_uint64),
        ("speed", ctypes.c_double),
        ("count", ctypes.c_uint32),
        ("loaded", ctypes.c_uint32),
        ("driver", ctypes.c_char * 80),
        ("faults", _Fault * MOST_FAULTS),
        ("gpus", _Gpu * MOST_GPUS),
    )


@dataclass(frozen=True)
class Card:
    """A GPU to begin with: an H100 SXM in a warm rack. At full load it comes to ``ambient + resistance * 700``:
    94 °C, at 80 % of that power to 82 °C, at 60 % to 69 °C. ``mig``: None is a card that cannot."""

    uuid: str
    pci: str = "0000:18:00.0"
    name: str = "NVIDIA H100 80GB HBM3"
    min_watts: float = 200
    max_watts: float = 700
    default_watts: float = 700
    idle_watts: float = 70
    peak_watts: float = 700
    ambient: float = 32
    kelvin_per_watt: float = 0.088
    inertia: float = 20
    load: float = 0
    slowdown: int = 89
    memory_bytes: int = 80 * GIB
    memory_reserved: int = GIB
    memory_used: int = 0
    mig: bool | None = False
    counts_energy: bool = True
    nvlinks: int = 18
    persistence: bool = True


def cards(count: int) -> tuple[Card, ...]:
    """So many GPUs with UUIDs and PCI addresses as real ones have."""
    return tuple(
        Card(uuid=f"GPU-{index:08x}-5a3c-4e1b-9f00-{0xAB00 + index:012x}", pci=f"0000:{0x18 + 8 * index:02x}:00.0")
        for index in range(count)
    )


@dataclass(frozen=True)
class SetCall:
    """One attempt to set a limit: when (Unix seconds), by which process, on the GPU at which place in the
    stand-in's file, and what the driver answered (0: it was set)."""

    at: float
    pid: int
    gpu: int
    watts: float
    code: int


@cache
def library() -> Path:
    """``libnvidia-ml.so.1``, in a directory of its own. Built once for each version of its source."""
    source = SOURCE.read_bytes()
    directory = CACHE / f"nvml-{hashlib.sha256(source).hexdigest()[:12]}"
    built = directory / "libnvidia-ml.so.1"
    if not built.exists():
        directory.mkdir(parents=True, exist_ok=True)
        fresh = directory / f"{os.getpid()}.so"
        strict = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
        subprocess.run(
            ["cc", *strict, "-Wl,-soname,libnvidia-ml.so.1", "-o", fresh, SOURCE, "-lm", "-lpthread"], check=True
        )
        fresh.rename(built)
    return built


def reset_gpu(gpu: _Gpu) -> None:
    """Errors that had to be cleared are, the limit is forgotten, and what was drawn counts anew."""
    gpu.ecc[0][0] = gpu.ecc[0][1] = gpu.remapped[2] = gpu.lost = 0
    gpu.limit_mw = gpu.default_mw
    if gpu.recovery_action != _UNKNOWN_FIELD:
        gpu.recovery_action = 0
    gpu.energy_mj = min(gpu.energy_mj, 0)


@dataclass
class Driver:
    """GPUs in a file. Every method may be used while other processes use them; ``gpu`` is the place in `cards`."""

    path: Path
    cards: Sequence[Card]
    speed: float = 1.0
    _memory: mmap.mmap = field(init=False, repr=False)
    _state: State = field(init=False, repr=False)
    _previous: str | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.truncate(self._file, ctypes.sizeof(State))
        self._memory = mmap.mmap(self._file, ctypes.sizeof(State))
        self._state = State.from_buffer(self._memory)
        self.log = self.path.with_name(f"{self.path.name}.log")
        self.log.write_bytes(b"")
        state = self._state
        state.size, state.generation, state.speed = ctypes.sizeof(State), 1, self.speed
        state.count, state.loaded, state.driver = len(self.cards), 1, b"570.86.15"
        for place, card in enumerate(self.cards):
            _fill(state.gpus[place], card)

    @property
    def environment(self) -> dict[str, str]:
        """With these variables a subprocess that uses pynvml finds this driver."""
        return {"LD_LIBRARY_PATH": str(library().parent), VARIABLE: str(self.path)}

    def enter(self) -> Self:
        """Let pynvml in this process find this driver from its next initialisation on."""
        ctypes.CDLL(str(library()))  # the loader knows it by its soname from now on
        self._previous = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = str(self.path)
        return self

    def leave(self) -> None:
        """The end of it, as far as this process is concerned."""
        os.close(self._file)
        if os.environ.get(VARIABLE) != str(self.path):
            return
        if self._previous is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = self._previous

    # --- what happens to the hardware -------------------------------------------------------------------

    def load(self, gpu: int, share: float) -> None:
        """How busy it is, from 0 to 1."""
        with self._gpu(gpu) as one:
            one.load = share

    def heat(self, gpu: int, celsius: float) -> None:
        """It has this temperature now, and goes on from there."""
        with self._gpu(gpu) as one:
            one.temperature = celsius

    def fill(self, gpu: int, used: int) -> None:
        """So many bytes of its memory are in use."""
        with self._gpu(gpu) as one:
            one.memory_used = used

    def occupy(self, gpu: int, *pids: int) -> None:
        """These processes compute on it, and no others."""
        with self._gpu(gpu) as one:
            one.process_count = len(pids)
            one.processes[: len(pids)] = pids

    def throttle(self, gpu: int, bits: int) -> None:
        """It reports these reasons too, beside those that its power and heat give."""
        with self._gpu(gpu) as one:
            one.more_reasons = bits

    def remap(self, gpu: int, *, pending: bool = False, failed: bool = False) -> None:
        """Rows of its memory wait for a reset to be replaced, or could not be."""
        with self._gpu(gpu) as one:
            one.remapped[2], one.remapped[3] = pending, failed

    def ecc(self, gpu: int, corrected: int, uncorrected: int) -> None:
        """So many errors since the driver was loaded, and in all."""
        with self._gpu(gpu) as one:
            for counter in (0, 1):
                one.ecc[counter][0], one.ecc[counter][1] = corrected, uncorrected

    def pcie(
        self, gpu: int, width: int = 16, generation: int = 5, replays: int = 0, performance_state: int = 0
    ) -> None:
        """Its link has this width and generation, and has repeated so many packets."""
        with self._gpu(gpu) as one:
            one.pcie[0], one.pcie[2], one.pcie_replays = width, generation, replays
            one.performance_state = performance_state

    def nvlink(self, gpu: int, up: int = 18, errors: int = 0) -> None:
        """So many of its NVLinks are up, and have had so many errors."""
        with self._gpu(gpu) as one:
            one.nvlinks_up, one.nvlink_errors = up, errors

    def xid(self, gpu: int, code: int) -> None:
        """The driver reports an XID."""
        with self._gpu(gpu) as one:
            one.xids[one.xid_count % MOST_XIDS] = code
            one.xid_count += 1

    def ask_for(self, gpu: int, action: int | None) -> None:
        """The driver asks for this recovery action (nvml.h); None is a driver that does not know of any."""
        with self._gpu(gpu) as one:
            one.recovery_action = _UNKNOWN_FIELD if action is None else action

    def reset(self, gpu: int) -> None:
        """As ``nvidia-smi --gpu-reset`` does."""
        with self._gpu(gpu) as one:
            reset_gpu(one)

    def next_reset(self, how: str) -> None:
        """The next reset by the stand-in for nvidia-smi fails, as that one describes."""
        self.path.with_name(f"{self.path.name}.next").write_text(how)

    def resets(self) -> list[str]:
        """The UUIDs of the GPUs that the stand-in for nvidia-smi has reset, in order."""
        log = self.path.with_name(f"{self.path.name}.resets")
        return log.read_text().split() if log.exists() else []

    def lose(self, gpu: int, lost: bool = True) -> None:
        """It has fallen off the bus, or is back."""
        with self._gpu(gpu) as one:
            one.lost = lost

    def remove(self, gpu: int, absent: bool = True) -> None:
        """It is not there any more, or is again. The GPUs after it move up by one index."""
        with self._gpu(gpu) as one:
            one.absent = absent

    def unload(self) -> None:
        """The driver is not loaded."""
        with self._locked():
            self._state.loaded = 0

    def reload(self) -> None:
        """The driver is loaded anew: limits are back at their defaults, and every process has to initialise again."""
        with self._locked():
            self._state.generation += 1
            self._state.loaded = 1
        for place in range(len(self.cards)):
            with self._gpu(place) as one:
                one.limit_mw = one.default_mw
                one.energy_mj = min(one.energy_mj, 0)

    def set_watts(self, gpu: int, watts: float) -> None:
        """Somebody else sets the limit. Not in the log."""
        with self._gpu(gpu) as one:
            one.limit_mw = round(watts * 1000)

    def watts(self, gpu: int) -> float:
        """The limit."""
        with self._gpu(gpu) as one:
            return float(one.limit_mw) / 1000

    def celsius(self, gpu: int) -> float:
        with self._gpu(gpu) as one:
            return float(one.temperature)

    # --- faults -----------------------------------------------------------------------------------------

    def fail(
        self,
        function: str,
        code: int = 0,
        gpu: int = -1,
        times: int = -1,
        *,
        after: bool = False,
        kill: bool = False,
        hang: bool = False,
        delay: float = 0.0,
    ) -> None:
        """From now on calls of `function` (of this GPU) return `code`, so many times (-1: for ever).

        ``after``: once they have taken their effect. ``kill``: the caller gets SIGKILL instead. ``hang``: they do not
        come back before `heal`. ``delay``: they take that many seconds more. Where `code` is 0 that is all.
        """
        with self._locked():
            free = next(one for one in self._state.faults if one.left == 0 and not one.hang)
            free.function, free.gpu, free.code, free.left = function.encode(), gpu, code, times
            free.after, free.kill, free.hang, free.tripped = after, kill, hang, 0
            free.delay_ms = round(delay * 1000)

    def is_tripped(self, function: str) -> bool:
        """Whether a fault of this function has struck."""
        return any(one.function == function.encode() and one.tripped for one in self._state.faults)

    def heal(self) -> None:
        """No more faults; no GPU is lost."""
        with self._locked():
            for fault in self._state.faults:
                fault.left = fault.hang = 0
            for gpu in self._state.gpus:
                gpu.lost = 0

    # --- what was done ----------------------------------------------------------------------------------

    def attempts(self) -> list[SetCall]:
        """Every attempt to set a limit, in order."""
        calls = []
        for line in self.log.read_text().splitlines():
            at, pid, gpu, milliwatts, code = line.split()
            calls.append(SetCall(float(at), int(pid), int(gpu), int(milliwatts) / 1000, int(code)))
        return calls

    def sets(self, gpu: int | None = None) -> list[SetCall]:
        """Those that took effect."""
        return [call for call in self.attempts() if call.code == 0 and gpu in (None, call.gpu)]

    # --- the file ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def _gpu(self, place: int) -> Iterator[_Gpu]:
        """A GPU whose temperature is that of now, as `warm` in nvml.c has it."""
        with self._locked():
            gpu = self._state.gpus[place]
            now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            wanted = gpu.idle_mw + gpu.load * (gpu.peak_mw - gpu.idle_mw)
            power = min(wanted, gpu.limit_mw) if gpu.min_mw else wanted
            target = gpu.ambient + gpu.kelvin_per_watt * power / 1000
            passed = max(0.0, (now - gpu.at_ns) / 1e9 * self._state.speed)
            gpu.temperature = target + (gpu.temperature - target) * math.exp(-passed / gpu.inertia)
            if gpu.energy_mj >= 0:
                gpu.energy_mj += power * passed
            gpu.at_ns = now
            yield gpu


def _fill(gpu: _Gpu, card: Card) -> None:
    domain, bus, device = card.pci.partition(".")[0].split(":")
    gpu.uuid, gpu.name = card.uuid.encode(), card.name.encode()
    gpu.domain, gpu.bus, gpu.device = int(domain, 16), int(bus, 16), int(device, 16)
    for name in ("min", "max", "default", "idle", "peak"):
        setattr(gpu, f"{name}_mw", round(getattr(card, f"{name}_watts") * 1000))
    gpu.limit_mw = gpu.default_mw
    gpu.slowdown_celsius, gpu.mig = card.slowdown, -1 if card.mig is None else int(card.mig)
    gpu.sm_mhz, gpu.memory_mhz = 1980, 2619
    gpu.pcie[:] = (16, 16, 5, 5)
    gpu.nvlinks = gpu.nvlinks_up = card.nvlinks
    gpu.persistence = card.persistence
    gpu.load, gpu.ambient, gpu.kelvin_per_watt, gpu.inertia = (
        card.load,
        card.ambient,
        card.kelvin_per_watt,
        card.inertia,
    )
    gpu.memory_total, gpu.memory_reserved, gpu.memory_used = card.memory_bytes, card.memory_reserved, card.memory_used
    gpu.temperature = card.ambient + card.kelvin_per_watt * card.idle_watts
    gpu.energy_mj = 5e9 if card.counts_energy else -1
    gpu.at_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
