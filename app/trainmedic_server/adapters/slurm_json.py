"""Slurm's JSON (data parsers v0.0.42 to v0.0.45), read from slurmrestd or from ``scontrol --json``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from msgspec.structs import replace

from trainmedic_server.domain import host_lists
from trainmedic_server.errors import ClusterRefused, ObjectMissing
from trainmedic_server.ports.slurm import HELD_PRIORITY, SlurmJob, SlurmNode, SlurmReservation

API_VERSIONS = ("v0.0.45", "v0.0.44", "v0.0.43", "v0.0.42")
"""Known data parsers, newest first: Slurm 26.05, 25.11, 25.05 and 24.11."""
_NODE = (
    *("name", "hostname", "address", "state", "reason", "reason_set_by_user", "resume_after", "partitions"),
    *("features", "reservation", "topology"),
)
FIELDS: Mapping[str, tuple[str, ...]] = {
    "nodes": _NODE,
    "node": _NODE,
    "jobs": (
        *("job_id", "name", "user_name", "job_state", "nodes", "hold", "priority", "requeue", "restart_cnt"),
        *("excluded_nodes", "state_reason", "admin_comment", "time_limit", "gres_detail", "array_job_id"),
        *("array_task_id", "array_task_string", "het_job_id", "het_job_offset"),
    ),
    "reservations": ("name", "node_list", "users", "start_time", "end_time"),
    "pings": ("responding", "pinged"),
}
"""What is read of each kind of record. A job has a hundred more."""
_TASK = re.compile(r"[0-9]{1,10}")
_GPU_INDEXES = re.compile(r"(?:^|,)gpu:[^()]*\(IDX:([0-9,-]+)\)")


def node_in(answer: Mapping[str, Any], name: str) -> SlurmNode:
    """Raises ObjectMissing: an unknown node is an empty list."""
    for each in members_of(answer, "nodes"):
        if each.get("name") == name:
            return _node(each)
    raise ObjectMissing(f"Slurm has no node {name}")


def nodes_of(answer: Mapping[str, Any]) -> list[SlurmNode]:
    return [_node(each) for each in members_of(answer, "nodes")]


def job_in(answer: Mapping[str, Any], job_id: str) -> SlurmJob:
    """Raises ObjectMissing, and ClusterRefused for an array of several tasks."""
    parts = members_of(answer, "jobs")
    named = [each for each in parts if job_id in _ids_of(each)]
    components = [each for each in parts if number_of(each.get("het_job_id"))]
    if components:
        if not named:
            raise ObjectMissing(f"Slurm knows no job {job_id}")
        return _whole_job(components) if str(number_of(components[0].get("het_job_id"))) == job_id else _job(named[0])
    count = sum(_count_tasks(each) for each in parts)
    if count > 1 and "_" not in job_id:
        # A change would reach all of them, and reading one back would prove nothing about the others.
        raise ClusterRefused(f"job {job_id} has {count} parts: name one of them, such as {job_id}_0")
    found = (named or [each for each in parts if _is_waiting_task(each, job_id)])[:1]
    if not found:
        raise ObjectMissing(f"Slurm knows no job {job_id}")
    # Keep the given ID: a change by the record's own one may reach other tasks.
    return replace(
        _job(found[0]), job_id=job_id, other_ids=tuple(sorted(_ids_of(found[0]) - {job_id})) if named else ()
    )


def own_id_in(answer: Mapping[str, Any], task: str) -> str:
    """Return the ID of this task alone. Raises ClusterRefused if it has none, ObjectMissing."""
    parts = members_of(answer, "jobs")
    named = [each for each in parts if task in _ids_of(each) or _is_waiting_task(each, task)]
    if not named:
        raise ObjectMissing(f"Slurm knows no job {task}")
    for each in named:
        own = str(each.get("job_id"))
        is_alone = len(parts) == 1 or own != str(number_of(each.get("array_job_id")))
        if is_alone and _count_tasks(each) == 1:
            return own
    raise ClusterRefused(
        f"slurmrestd cannot change task {task} alone, which has no ID of its own yet: connect Slurm through an agent "
        "(--slurm-agent)"
    )


def _count_tasks(answer: Mapping[str, Any]) -> int:
    """Count a record's tasks. Waiting tasks share a record."""
    text = _text(answer.get("array_task_string"))
    if not text:
        return 1
    tasks = _waiting_tasks(text)
    return len(tasks) if tasks else 2  # at least: Slurm cuts only long lists


def _is_waiting_task(answer: Mapping[str, Any], job_id: str) -> bool:
    array, _, task = job_id.partition("_")
    text = _text(answer.get("array_task_string"))
    if not text or not _TASK.fullmatch(task) or str(number_of(answer.get("array_job_id"))) != array:
        return False
    tasks = _waiting_tasks(text)
    return tasks is None or int(task) in tasks


def _waiting_tasks(text: str) -> frozenset[int] | None:
    """Read ``0-3,7%2``. None if Slurm cut it."""
    try:
        return frozenset(int(number) for number in host_lists.expand(f"[{text.partition('%')[0]}]"))
    except (host_lists.UnreadableHostList, ValueError):
        return None


def _whole_job(components: Sequence[Mapping[str, Any]]) -> SlurmJob:
    jobs = [_job(each) for each in sorted(components, key=lambda each: number_of(each.get("het_job_offset")) or 0)]
    return replace(
        jobs[0],
        nodes=",".join(job.nodes for job in jobs if job.nodes),
        is_held=any(job.is_held for job in jobs),
        components=tuple(job.job_id for job in jobs),
    )


def jobs_of(answer: Mapping[str, Any]) -> list[SlurmJob]:
    return [_job(each) for each in members_of(answer, "jobs")]


def reservations_of(answer: Mapping[str, Any]) -> list[SlurmReservation]:
    return [
        SlurmReservation(
            name=_text(each.get("name")),
            nodes=_text(each.get("node_list")),
            users=_texts(each.get("users")),
            starts_at=_time(each.get("start_time")),
            ends_at=_time(each.get("end_time")),
        )
        for each in members_of(answer, "reservations")
    ]


def _node(answer: Mapping[str, Any]) -> SlurmNode:
    return SlurmNode(
        name=_text(answer.get("name")),
        hostname=_text(answer.get("hostname")),
        address=_text(answer.get("address")),
        states=frozenset(_texts(answer.get("state"))),
        reason=_text(answer.get("reason")),
        reason_set_by=_text(answer.get("reason_set_by_user")),
        resume_after=_time(answer.get("resume_after")),
        partitions=_texts(answer.get("partitions")),
        features=_texts(answer.get("features")),
        reservation=_text(answer.get("reservation")),
        topology=_text(answer.get("topology")),
    )


def _ids_of(answer: Mapping[str, Any]) -> set[str]:
    """Return its own ID, ARRAY_TASK for a task, and LEADER+OFFSET for a component."""
    names = {str(answer.get("job_id"))}
    array, task = number_of(answer.get("array_job_id")), number_of(answer.get("array_task_id"))
    if array and task is not None:
        names.add(f"{array}_{task}")
    leader, offset = number_of(answer.get("het_job_id")), number_of(answer.get("het_job_offset"))
    if leader and offset is not None:
        names.add(f"{leader}+{offset}")
    return names


def _job(answer: Mapping[str, Any]) -> SlurmJob:
    return SlurmJob(
        job_id=str(answer.get("job_id")),
        name=_text(answer.get("name")),
        user=_text(answer.get("user_name")),
        states=frozenset(_texts(answer.get("job_state"))),
        nodes=_text(answer.get("nodes")),
        is_held=bool(answer.get("hold")) or number_of(answer.get("priority")) == HELD_PRIORITY,
        may_requeue=bool(answer.get("requeue")),
        restarts=number_of(answer.get("restart_cnt")) or 0,
        excluded_nodes=_texts(answer.get("excluded_nodes")),
        why_pending=_text(answer.get("state_reason")),
        admin_comment=_text(answer.get("admin_comment")),
        priority=number_of(answer.get("priority")),
        time_limit=_minutes(answer.get("time_limit")),
        other_ids=tuple(sorted(_ids_of(answer) - {str(answer.get("job_id"))})),
        leader=str(number_of(answer.get("het_job_id")) or ""),
        gpus_by_node=_gpus_by_node(answer),
    )


def _gpus_by_node(answer: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the indexes of ``gres_detail``, which has an entry such as ``gpu:h100:2(IDX:0-1),nic:1`` for each node."""
    details, nodes = answer.get("gres_detail"), _text(answer.get("nodes"))
    if not (isinstance(details, list) and details and nodes):
        return {}
    try:
        names = host_lists.expand(nodes, host_lists.MOST_OF_JOB)
        indexes = [_indexes(detail) for detail in details if isinstance(detail, str)]
    except host_lists.UnreadableHostList:
        return {}
    return dict(zip(names, indexes, strict=True)) if len(names) == len(indexes) else {}


def _indexes(detail: str) -> tuple[int, ...]:
    listed = ",".join(_GPU_INDEXES.findall(detail))
    return tuple(int(number) for number in host_lists.expand(f"[{listed}]")) if listed else ()


def is_responding(answer: Mapping[str, Any]) -> bool:
    # Data parsers before v0.0.43 have only the text.
    pings = members_of(answer, "pings")
    return any(ping.get("responding") or ping.get("pinged") == "UP" for ping in pings)


def release_of(answer: Mapping[str, Any]) -> str:
    meta = answer.get("meta")
    slurm = meta.get("slurm") or meta.get("Slurm") if isinstance(meta, Mapping) else None
    return _text(slurm.get("release")) if isinstance(slurm, Mapping) else ""


def members_of(answer: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    members = answer.get(name)
    return [each for each in members if isinstance(each, Mapping)] if isinstance(members, list) else []


def number_of(number: object) -> int | None:
    """Return a number; None if it is unset, infinite, or not a number."""
    if isinstance(number, Mapping):
        if not number.get("set") or number.get("infinite"):
            return None
        number = number.get("number")
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def _time(value: object) -> datetime | None:
    seconds = number_of(value)
    try:
        return datetime.fromtimestamp(seconds, UTC) if seconds else None
    except (OverflowError, OSError, ValueError):  # after the year 9999, which is never
        return None


def _minutes(value: object) -> timedelta | None:
    minutes = number_of(value)
    try:
        return timedelta(minutes=minutes) if minutes is not None else None
    except OverflowError:  # longer than any job
        return None


def _texts(value: object) -> tuple[str, ...]:
    """Return a list; older data parsers write it as text with commas."""
    if isinstance(value, str):
        return tuple(part for part in value.split(",") if part)
    return tuple(str(each) for each in value) if isinstance(value, list) else ()


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
