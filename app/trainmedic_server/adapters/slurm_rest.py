"""Slurm through slurmrestd, by the newest of `API_VERSIONS` that it offers.

A status of 200 proves nothing: slurmrestd answers 200 with ``errors``, and for an unknown node 200 without a node. So
errors and names are checked.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import UNSET, Struct

from trainmedic_server import errors
from trainmedic_server.adapters import slurm_errors
from trainmedic_server.adapters.foreign_answers import UNREADABLE
from trainmedic_server.adapters.httpx_caller import HttpxCaller, read_secret
from trainmedic_server.adapters.slurm_json import (
    API_VERSIONS,
    FIELDS,
    is_responding,
    job_in,
    jobs_of,
    members_of,
    node_in,
    nodes_of,
    number_of,
    own_id_in,
    release_of,
    reservations_of,
)
from trainmedic_server.ports.fence import Fence, no_fence
from trainmedic_server.ports.outside import HttpReply
from trainmedic_server.ports.slurm import (
    UNLIMITED,
    JobChange,
    SlurmJob,
    SlurmNode,
    SlurmRelease,
    SlurmReservation,
)

_CAN_REQUEUE = frozenset({"v0.0.45"})
_CAN_RESERVE = frozenset({"v0.0.45", "v0.0.44", "v0.0.43"})
# slurmrestd 24.11 fails with ``update_time`` if nodes have changed and partitions have not.
_LISTS_CHANGES = frozenset({"v0.0.45"})
TIMEOUT = timedelta(seconds=20)  # slurmctld answers late while it schedules thousands of jobs.
_BODY_LIMIT = 256 * 1024 * 1024  # About 25,000 jobs of 10 kB of JSON.
_MAY_PASS = frozenset({408, 425, 429})  # request timeout, too early, too many requests: nothing was done
_SETTLING = 2.0  # seconds; slurmctld dates changes by whole seconds
_UNCHANGED: Mapping[str, Any] = MappingProxyType({})
"""Stands for status 304: nothing has changed since ``update_time``."""

Record = TypeVar("Record")


class _Listed(Struct, frozen=True):
    as_of: int  # time of its last change, in seconds since 1970 by slurmctld's clock
    read_at: float  # first answer with this `as_of`, by the monotonic clock
    is_settled: bool  # True once read after the second `as_of` was over, within which more may have changed
    records: Sequence[Any]


class SlurmRest:  # a `ports.slurm.Slurm`
    """The token file is read for each call, because a token expires."""

    def __init__(
        self,
        url: str,
        user: str | None = None,
        token_file: Path | None = None,
        ca_file: Path | None = None,
        fence: Fence = no_fence,
    ) -> None:
        """Raises ConfigurationError. `fence` is called before each change and does not return if this server may not
        act.
        """
        self._base, socket = _address(url)
        self._user = user
        self._token_file = token_file
        try:
            self._http = HttpxCaller(body_limit=_BODY_LIMIT, socket=socket, ca_file=ca_file)
        except errors.ConfigurationError as error:
            raise errors.ConfigurationError(f"--slurm-ca-file: {error}") from error
        self._fence = fence
        self._version: str | None = None
        self._lists: dict[str, _Listed] = {}

    async def close(self) -> None:
        await self._http.close()

    async def release(self) -> SlurmRelease:
        answer = await self._ask("GET", "/ping/")
        if not is_responding(answer):
            raise errors.ClusterUnavailable("slurmctld does not respond to slurmrestd")
        version = await self._api_version()
        return SlurmRelease(release_of(answer), version in _CAN_REQUEUE, version in _CAN_RESERVE)

    async def node(self, name: str) -> SlurmNode:
        return node_in(await self._read(f"/node/{quote(name, safe='')}", "node", "nodes"), name)

    async def nodes(self) -> Sequence[SlurmNode]:
        return await self._all("nodes", nodes_of)

    async def job(self, job_id: str) -> SlurmJob:
        # The leader's id lists all components. Not every release knows LEADER+OFFSET.
        asked = job_id.partition("+")[0]
        return job_in(await self._read(f"/job/{quote(asked, safe='')}", "jobs"), job_id)

    async def jobs(self) -> Sequence[SlurmJob]:
        return await self._all("jobs", jobs_of)

    async def drain(self, node: str, reason: str, resume_after: timedelta | None = None) -> None:
        change: dict[str, Any] = {"state": ["DRAIN"], "reason": reason}
        if resume_after == UNLIMITED:
            change["resume_after"] = {"set": True, "infinite": True, "number": 0}
        elif resume_after is not None:
            change["resume_after"] = _number(max(1, round(resume_after.total_seconds())))
        await self._change_node(node, change)

    async def set_reason(self, node: str, reason: str) -> None:
        await self._change_node(node, {"reason": reason})

    async def undrain(self, node: str) -> None:
        await self._change_node(node, {"state": ["UNDRAIN"]})

    async def reboot(self, node: str, reason: str) -> None:
        raise errors.ClusterRefused("slurmrestd cannot reboot a node: connect Slurm through an agent (--slurm-agent)")

    async def return_to_service(self, node: str) -> None:
        await self._change_node(node, {"state": ["RESUME"]})

    async def reservations(self) -> Sequence[SlurmReservation]:
        return reservations_of(await self._read("/reservations/", "reservations"))

    async def reserve(self, name: str, node: str, users: Sequence[str], lasting: timedelta) -> None:
        if await self._api_version() not in _CAN_RESERVE:
            raise errors.ClusterRefused("this slurmrestd cannot make a reservation: it needs Slurm 25.05 or newer")
        reservation = {
            "name": name,
            "node_list": [node],
            "users": list(users),
            "start_time": _number(round(datetime.now(UTC).timestamp())),
            "duration": _number(max(1, round(lasting / timedelta(minutes=1)))),
            "flags": ["IGNORE_JOBS", "OVERLAP"],
        }
        if any(each.name == name for each in await self.reservations()):
            raise errors.ClusterRefused(f"there is a reservation {name} already")  # slurmrestd would change it
        await self._ask("POST", "/reservation", reservation)

    async def end_reservation(self, name: str) -> None:
        await self._ask("DELETE", f"/reservation/{quote(name, safe='')}")

    async def hold(self, job_id: str) -> None:
        await self._change_job(job_id, {"hold": True})

    async def unhold(self, job_id: str) -> None:
        await self._change_job(job_id, {"hold": False})

    async def requeue(self, job_id: str, hold: bool = False) -> None:
        if await self._api_version() not in _CAN_REQUEUE:
            raise errors.ClusterRefused("this slurmrestd cannot requeue a job: it needs Slurm 26.05 or newer")
        change = {"flags": ["HOLD"] if hold else [], "jobs": [await self._own_id(job_id)]}
        _check_status(await self._ask("POST", "/jobs/requeue", change), job_id)

    async def end_delay(self, job_id: str) -> None:
        await self._change_job(job_id, {"begin_time": _number(int(time.time()))})

    async def signal(self, job_id: str, signal: str, with_batch: bool = False) -> None:
        query = f"signal={quote(signal)}&flags={'FULL_JOB' if with_batch else 'FULL_STEPS_ONLY'}"
        _check_status(await self._ask("DELETE", f"/job/{await self._own_id(job_id)}?{query}"), job_id)

    async def cancel(self, job_id: str) -> None:
        _check_status(
            await self._ask("DELETE", f"/job/{await self._own_id(job_id)}"), job_id, accepted_code=slurm_errors.ENDED
        )

    async def update(self, job_id: str, change: JobChange) -> None:
        new: dict[str, Any] = {}
        if change.excluded_nodes is not None:
            # An empty list would leave the nodes as they are, without an error.
            new["excluded_nodes"] = list(change.excluded_nodes) or [""]
        if change.priority is not None:
            new["priority"] = _number(change.priority)
        if change.time_limit is not None:
            is_unlimited = change.time_limit == UNLIMITED
            minutes = 0 if is_unlimited else round(change.time_limit / timedelta(minutes=1))
            new["time_limit"] = {"set": not is_unlimited, "infinite": is_unlimited, "number": minutes}
        await self._change_job(job_id, new)

    async def set_admin_comment(self, job_id: str, text: str) -> None:
        await self._change_job(job_id, {"admin_comment": text})

    async def _change_node(self, node: str, change: Mapping[str, Any]) -> None:
        await self._ask("POST", f"/node/{quote(node, safe='')}", change)

    async def _change_job(self, job_id: str, change: Mapping[str, Any]) -> None:
        own_id = await (self._own_id_of_task(job_id) if "_" in job_id else self._own_id(job_id))
        await self._ask("POST", f"/job/{own_id}", change)

    async def _own_id_of_task(self, task: str) -> str:  # slurmrestd refuses to change ARRAY_TASK
        try:
            answer = await self._read(f"/job/{quote(task, safe='')}", "jobs")
        except errors.ObjectMissing:
            # The task is gone, or hidden from this user. An empty change distinguishes them: Slurm refuses it for a
            # hidden array, and knows no array that is gone.
            array = task.partition("_")[0]
            await self._ask("POST", f"/job/{quote(array, safe='')}", {})
            raise errors.ClusterUnavailable(f"Slurm knows job {array}, but does not show task {task}") from None
        return own_id_in(answer, task)

    async def _own_id(self, job_id: str) -> str:
        """Return the id to put into a path. Changes to LEADER+OFFSET are answered with success and not made."""
        return (await self.job(job_id)).job_id if "+" in job_id else quote(job_id, safe="")

    async def _all(self, kind: str, read: Callable[[Mapping[str, Any]], Sequence[Record]]) -> Sequence[Record]:
        """Slurm 26.05 sends a list only if it has changed."""
        known = self._lists.get(kind) if await self._api_version() in _LISTS_CHANGES else None
        since = f"?update_time={known.as_of}" if known is not None and known.is_settled else ""
        asked_at = time.monotonic()
        answer = await self._read(f"/{kind}/{since}", kind)
        answered_at = time.monotonic()
        if known is not None and answer is _UNCHANGED:
            return known.records
        # A thread, because thousands of jobs take a second.
        records, as_of = await asyncio.to_thread(read, answer), number_of(answer.get("last_update"))
        if as_of:
            read_at = known.read_at if known is not None and known.as_of == as_of else answered_at
            self._lists[kind] = _Listed(as_of, read_at, asked_at - read_at > _SETTLING, records)
        return records

    async def _read(self, path: str, what: str, kind: str | None = None) -> Mapping[str, Any]:
        """Return the fields that `FIELDS` names, or `_UNCHANGED`."""
        answer = await self._ask("GET", path, what=what)
        is_listed = answer is _UNCHANGED or isinstance(answer.get(kind or what), list)
        # For an unknown node, slurmrestd sends only an error without a number.
        if not is_listed and not (what == "node" and members_of(answer, "errors")):
            raise errors.ClusterUnavailable(f"slurmrestd sends no {kind or what}")
        return answer

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, what: str | None = None
    ) -> Mapping[str, Any]:
        version = await self._api_version()
        if method != "GET":
            self._fence()
        reply = await self._call(method, f"/slurm/{version}{path}", body)
        if reply.status == 304 and "?update_time=" in path:
            return _UNCHANGED
        answer = (await asyncio.to_thread(_shortened, reply, what) if what is not None else None) or _document(reply)
        if answer is None:
            if reply.status == 404:
                self._version = None  # an upgrade may have removed this version
            if len(reply.body) >= _BODY_LIMIT:
                raise errors.ClusterUnavailable(f"slurmrestd answers with more than {_BODY_LIMIT >> 20} MiB")
            raise _unavailable(f" and no document of {version}", reply, method != "GET")
        _check_errors(answer, reply, method != "GET")
        return answer

    async def _api_version(self) -> str:
        if self._version is None:
            answer = _document(await self._call("GET", "/openapi/v3", None))
            paths = answer.get("paths") if answer else None
            if not isinstance(paths, Mapping):
                raise errors.ClusterUnavailable("slurmrestd does not list its API (/openapi/v3)")
            offered = {path.split("/")[2] for path in paths if path.startswith("/slurm/")}
            self._version = next((version for version in API_VERSIONS if version in offered), None)
            if self._version is None:
                raise errors.ClusterRefused(
                    f"slurmrestd offers {', '.join(sorted(offered)) or 'no data parser'}; "
                    f"one of {', '.join(API_VERSIONS)} is needed (Slurm 24.11 or newer)"
                )
        return self._version

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> HttpReply:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._user is not None:
            headers["X-SLURM-USER-NAME"] = self._user
        content = None if body is None else json.dumps(body).encode()
        try:
            if self._token_file is not None:
                # `scontrol token` prints it after this name.
                token = (await read_secret(self._token_file, "--slurm-token-file")).removeprefix("SLURM_JWT=")
                if not token:  # A shell empties the file before `scontrol token` writes to it.
                    raise errors.ClusterUnavailable(f"--slurm-token-file: {self._token_file} is empty")
                headers["X-SLURM-USER-TOKEN"] = token
            return await self._http.call(method, f"{self._base}{path}", headers, content, TIMEOUT)
        except errors.OutcomeUnknown as error:
            raise errors.ClusterUnavailable(f"slurmrestd: {error}", may_be_done=method != "GET") from error
        except errors.TemporaryFailure as error:
            raise errors.ClusterUnavailable(f"slurmrestd: {error}") from error


def _address(url: str) -> tuple[str, str | None]:
    """Return the beginning of all URLs, and a UNIX socket's path. Raises ConfigurationError."""
    try:
        parts = urlsplit(url)
        if parts.scheme == "unix" and not parts.netloc and parts.path:
            return "http://localhost", parts.path
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and parts.username is None:
            return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}", None
    except ValueError:
        pass  # such as a port that is out of range
    raise errors.ConfigurationError("the URL of slurmrestd is invalid; use http://HOST:6820 or unix:///PATH")


def _document(reply: HttpReply) -> Mapping[str, Any] | None:
    try:
        document = json.loads(reply.body)
    except UNREADABLE:
        return None
    return document if isinstance(document, Mapping) else None


def _shortened(reply: HttpReply, what: str) -> Mapping[str, Any] | None:
    """Return only the fields of `FIELDS`: others are 95 %. None for an answer of another form."""
    try:
        answer = _decoder(what).decode(reply.body)
    except (msgspec.DecodeError, RecursionError):
        return None
    return msgspec.to_builtins(answer)  # type: ignore[no-any-return]


@cache
def _decoder(what: str) -> msgspec.json.Decoder[Any]:
    record = msgspec.defstruct("Record", [(name, Any, UNSET) for name in FIELDS[what]])
    kind = "nodes" if what == "node" else what
    members: list[Any] = [(kind, list[record]), ("errors", Any, None), ("last_update", Any, None)]  # type: ignore[valid-type]
    return msgspec.json.Decoder(msgspec.defstruct("Answer", members))


def _check_errors(answer: Mapping[str, Any], reply: HttpReply, is_change: bool) -> None:
    """Raise if the answer has errors. Number 0 is none below status 400."""
    status = reply.status
    faults = [each for each in members_of(answer, "errors") if each.get("error_number") or status >= 400]
    if not faults:
        if status >= 400:
            raise _unavailable("", reply, is_change)
        return
    first = faults[0]
    number = first.get("error_number")
    text = f"Slurm: {first.get('error')} ({number}): {first.get('description')}"
    if not number and (status >= 500 or status in _MAY_PASS):
        raise _unavailable(f": {text}", reply, is_change)
    # Releases before 25.05 answer refusals with status 500.
    raise slurm_errors.failure(
        slurm_errors.UNAUTHENTICATED if status == 401 else number, text, is_change, "check the token for slurmrestd"
    )


def _unavailable(about: str, reply: HttpReply, is_change: bool) -> errors.ClusterUnavailable:
    wait = reply.headers.get("retry-after", "")
    return errors.ClusterUnavailable(
        f"slurmrestd answers with status {reply.status}{about}",
        float(wait) if wait.isdecimal() and wait.isascii() else None,
        may_be_done=is_change and reply.status >= 500,
    )


def _check_status(answer: Mapping[str, Any], job_id: str, accepted_code: int | None = None) -> None:
    """Raise if the answer states an error other than `accepted_code`."""
    for each in members_of(answer, "status"):
        error = each.get("error")
        if not isinstance(error, Mapping):
            continue
        code = error.get("code")
        if code and code != accepted_code:
            text = f"Slurm: {error.get('string')} ({code}): job {job_id}"
            raise errors.ObjectMissing(text) if code == slurm_errors.NO_JOB else errors.ClusterRefused(text)


def _number(value: int) -> dict[str, Any]:
    return {"set": True, "infinite": False, "number": value}
