"""Slurm's JSON: tasks of arrays, and states of nodes that no release of today has."""

from __future__ import annotations

from typing import Any

import pytest

from trainmedic_server.adapters.slurm_json import job_in, jobs_of, nodes_of, own_id_in, reservations_of
from trainmedic_server.errors import ClusterRefused, ObjectMissing


def number(value: int) -> dict[str, object]:
    return {"set": True, "infinite": False, "number": value}


def record(job_id: int, task: int | None = None, waiting: str = "") -> dict[str, Any]:
    """One of array 4711: of a task, or of those that wait."""
    of_task = {"array_task_id": number(task)} if task is not None else {}
    return {"job_id": job_id, "array_job_id": number(4711), "array_task_string": waiting, **of_task}


STARTED, LAST = record(4712, 0), record(4711, 3)
"""The last task to start has the array's ID."""


@pytest.mark.parametrize(
    ("records", "task", "own_id"),
    [
        ([STARTED, LAST], "4711_0", "4712"),
        ([STARTED, LAST], "4711_3", None),
        ([LAST], "4711_3", "4711"),
        ([STARTED, record(4711, waiting="1-2,5%2")], "4711_5", None),
        ([record(4711, waiting="5")], "4711_5", "4711"),
        ([STARTED, record(4711, waiting="5")], "4711_5", None),
    ],
)
def test_a_task_is_named_by_itself_and_by_its_own_id_only_if_no_other_has_it(
    records: list[dict[str, Any]], task: str, own_id: str | None
) -> None:
    answer = {"jobs": records}
    job = job_in(answer, task)
    assert (job.job_id, job.parts) == (task, (task,))
    if own_id is not None:
        assert own_id_in(answer, task) == own_id
        return
    with pytest.raises(ClusterRefused, match="cannot change task"):
        own_id_in(answer, task)


@pytest.mark.parametrize("records", [[STARTED, LAST], [record(4711, waiting="5-7")], [STARTED]])
def test_a_task_that_its_array_no_longer_has_is_gone(records: list[dict[str, Any]]) -> None:
    with pytest.raises(ObjectMissing, match="no job 4711_2"):
        own_id_in({"jobs": records}, "4711_2")


@pytest.mark.parametrize("task", ["²", "7" * 5000, ""])
def test_what_is_no_number_is_no_task(task: str) -> None:
    with pytest.raises(ObjectMissing):
        job_in({"jobs": [record(4711, waiting="0-9,20-...")]}, f"4711_{task}")


@pytest.mark.parametrize("text", ["1-2", "1,3", "0-10:2", "0-9,20-..."])
def test_an_array_whose_tasks_all_wait_is_refused(text: str) -> None:
    with pytest.raises(ClusterRefused, match="parts: name one of them, such as 4711_0"):
        job_in({"jobs": [record(4711, waiting=text)]}, "4711")


@pytest.mark.parametrize(("text", "task", "is_there"), [("1-2", 2, True), ("1-2", 7, False), ("0-9,20-...", 99, True)])
def test_a_waiting_task_is_one_of_the_listed_numbers(text: str, task: int, is_there: bool) -> None:
    """Unless Slurm has cut the list."""
    answer = {"jobs": [record(4711, waiting=text)]}
    if is_there:
        assert job_in(answer, f"4711_{task}").job_id == f"4711_{task}"
        return
    with pytest.raises(ObjectMissing):
        job_in(answer, f"4711_{task}")


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (["IDLE", "POWERED_DOWN", "NEW_FLAG"], ""),
        (["MIXED", "PLANNED"], ""),
        (["IDLE", "DRAIN"], "DRAIN"),
        (["BURNING"], "BURNING"),
        (["ERROR", "CLOUD"], "CLOUD+ERROR"),
        ([], "no state"),
    ],
)
def test_a_node_without_a_known_base_state_takes_no_jobs(state: list[str], why: str) -> None:
    """Otherwise it would count as capacity."""
    (node,) = nodes_of({"nodes": [{"name": "n1", "state": state}]})
    assert node.why_unavailable == why


def test_a_number_that_is_no_time_spoils_no_other_record() -> None:
    """An end that no clock reaches is none."""
    nodes = nodes_of({"nodes": [{"name": "n1", "resume_after": number(1 << 62)}, {"name": "n2"}]})
    assert [(node.name, node.resume_after) for node in nodes] == [("n1", None), ("n2", None)]
    (job,) = jobs_of({"jobs": [{"job_id": 7, "time_limit": number(1 << 62)}]})
    assert job.time_limit is None
    (reservation,) = reservations_of({"reservations": [{"name": "r", "end_time": number(1 << 40)}]})
    assert reservation.ends_at is None
