"""Check whether a node trains, by the GPUs' memory and Trainmedic's server."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any, Iterable
from urllib.parse import quote

import torch

# Bytes that the probe itself may use; a CUDA context takes about 0.5 GB.
_OWN_BYTES = 2 * 10**9
_TIMEOUT = 10.0  # seconds
_LARGEST_ANSWER = 64 << 20  # bytes
_MOST_PAGES = 1000


_REQUEST_ERRORS = (
    *(urllib.error.URLError, OSError, http.client.HTTPException),
    *(ValueError, LookupError, TypeError, AttributeError, RecursionError),
)


def gpu_in_use(device: torch.device) -> str | None:
    """Return how much memory is in use; None if it is little."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    return f"{used / 1e9:.1f} GB of the memory of GPU {device.index} are in use" if used > _OWN_BYTES else None


def jobs_on(nodes: Iterable[str], server: str, token: str | None) -> list[str]:
    """Return why these nodes may train, such as a job, or a server that does not answer."""
    wanted, url = set(nodes), server.rstrip("/") + "/jobs?cluster=true"
    reasons: list[str] = []
    cursor = None
    try:
        for _ in range(_MOST_PAGES):
            page = _page(url if cursor is None else f"{url}&cursor={quote(cursor, safe='')}", token)
            reasons += [reason for job in page["items"] if (reason := _reason(job, wanted)) is not None]
            cursor = page.get("next")
            if cursor is None:
                return reasons
        raise ValueError(f"the job list has more than {_MOST_PAGES} pages")
    except _REQUEST_ERRORS as error:
        return [f"cannot list the server's jobs: {error}"]


def _page(url: str, token: str | None) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise ValueError("not an http or https URL")
    if "@" in url.split("/", 3)[2]:  # urllib sends neither, and its error would show the password
        raise ValueError("the URL has a user or a password; give a token instead")
    request = urllib.request.Request(url)  # noqa: S310
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")  # a redirect can lead to another host
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as reply:  # noqa: S310
        raw = reply.read(_LARGEST_ANSWER + 1)
    if len(raw) > _LARGEST_ANSWER:
        raise ValueError("the answer is larger than 64 MiB")
    page: dict[str, Any] = json.loads(raw)
    return page


def _reason(job: Any, nodes: set[str]) -> str | None:
    shared = sorted(nodes & set(job.get("nodes") or ()))
    return f"the job {job.get('name')} is on {', '.join(shared)}" if shared else None
