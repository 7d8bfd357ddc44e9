"""Whether a node trains: then a probe would slow the training down, and measure the training.

What is asked is the memory of the GPUs that the probe would use, and, where one is named, Trainmedic's server.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any, Iterable

import torch

_OWN_BYTES = 2 * 10**9
"""More memory in use than this is somebody else's; a context of CUDA takes about half a gigabyte."""
_TIMEOUT = 10.0


def gpu_in_use(device: torch.device) -> str | None:
    """Why this device is held to be in use by somebody else; None where it is not, or is no GPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    return f"{used / 1e9:.1f} GB of the memory of GPU {device.index} are in use" if used > _OWN_BYTES else None


def jobs_on(nodes: Iterable[str], server: str, token: str | None) -> list[str]:
    """Why these nodes are held to train, by what the server knows of its jobs; also where it cannot be asked."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = server.rstrip("/") + "/jobs?cluster=true"
    try:
        if not url.startswith(("http://", "https://")):
            raise ValueError("not an http or https URL")
        request = urllib.request.Request(url, headers=headers)  # noqa: S310
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as reply:  # noqa: S310
            jobs = json.load(reply)["items"]
        return [reason for job in jobs if (reason := _reason(job, set(nodes))) is not None]
    except (urllib.error.URLError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"the server could not be asked which jobs there are: {error}"]


def _reason(job: Any, nodes: set[str]) -> str | None:
    shared = sorted(nodes & set(job.get("nodes") or ()))
    return f"the job {job.get('name')} is on {', '.join(shared)}" if shared else None
