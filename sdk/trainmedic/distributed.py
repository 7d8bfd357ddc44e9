"""Jobs of several ranks. Needs PyTorch.

::

    torch.distributed.init_process_group()
    medic = trainmedic.connect(job="llm-1")        # rank and world size from torchrun
    trainmedic.distributed.share(medic)            # on every rank, before the loop
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from trainmedic.client import Medic
from trainmedic.errors import ConfigurationError
from trainmedic.job import devices
from trainmedic.ranks.share import CALL_PATIENCE, PATIENCE, Share

_STORE_TIMEOUT = 30.0  # seconds
_LONGEST_PATIENCE = 365 * 86400.0  # seconds; Python cannot wait for an infinite time


def share(
    medic: Medic,
    every: int | None = None,
    store: Any = None,
    patience: float = PATIENCE,
    call_patience: float = CALL_PATIENCE,
) -> Share:
    """Let the ranks agree. Every rank calls it once, after the same number of calls of `Medic.commands`.

    Afterwards every rank must call `commands` at the same steps. ``every`` is the number of calls between sync points,
    by default about a second's. ``store`` is a ``torch.distributed.Store`` of all ranks, by default the process group's
    or torchrun's. ``patience`` is the wait for a late decision, ``call_patience`` for ranks at a command, in seconds.
    Raises ConfigurationError.
    """
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise ConfigurationError(f"share: every is {every!r}; it counts calls of commands(), and is at least 1")
    for name, seconds in {"patience": patience, "call_patience": call_patience}.items():
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not (is_number and 0 <= seconds <= _LONGEST_PATIENCE):
            raise ConfigurationError(f"share: {name} is {seconds!r}; it is a number of seconds, at most a year")
    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if (rank, world_size) != (medic.rank, medic.world_size):
            raise ConfigurationError(
                f"this is rank {rank} of {world_size} for torch.distributed, and rank {medic.rank} of "
                f"{medic.world_size} for trainmedic: give connect() rank and world_size"
            )
    prefixed = PrefixStore(f"trainmedic/{medic.job}", store if store is not None else _find_store())
    return medic.join_ranks(prefixed, _Device().uuid, every, patience, call_patience)


def is_needed() -> bool:
    return is_started() and dist.get_world_size() > 1


def is_started() -> bool:
    return dist.is_available() and dist.is_initialized()


def _find_store() -> Any:
    if not dist.is_available():
        raise ConfigurationError("share: this PyTorch was built without torch.distributed")
    if dist.is_initialized():
        return _separate_connection(dist.distributed_c10d._get_default_store())
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=_STORE_TIMEOUT),
        )
    raise ConfigurationError(
        "share: the ranks have no store to agree through: call torch.distributed.init_process_group() before, "
        "start the job with torchrun, or give store="
    )


def _separate_connection(store: Any) -> Any:
    """Return a clone for concurrent calls, if possible."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store


class _Device:
    """CUDA device of this rank. Creates no CUDA context."""

    def __init__(self) -> None:
        self._uuid: str | None = None

    def uuid(self) -> str | None:
        """Return the device's NVML name. Training thread only."""
        if self._uuid is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            try:
                self._uuid = devices.nvml_name(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
            except (AttributeError, RuntimeError, AssertionError):
                return None
        return self._uuid
