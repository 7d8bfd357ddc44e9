"""The client of slurmrestd: invalid settings, and answers that no real slurmrestd gives on request."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainmedic_server.adapters import slurm_rest
from trainmedic_server.adapters.slurm_rest import SlurmRest
from trainmedic_server.errors import (
    ActionFailure,
    ClusterRefused,
    ClusterUnavailable,
    ConfigurationError,
    ObjectMissing,
)
from trainmedic_server.ports.slurm import JobChange


@pytest.mark.parametrize(
    "url",
    ["unix://run/slurmrestd.sock", "unix://", "http://h:99999", "http://[::1", "http://", "ftp://h", "http://u:pw@h"],
)
def test_an_invalid_address_is_refused_at_the_start(url: str) -> None:
    """The message does not contain it, because a URL may hold a password."""
    with pytest.raises(ConfigurationError, match="http://HOST:6820 or unix:///PATH") as refused:
        SlurmRest(url)
    assert "pw" not in str(refused.value)


@pytest.mark.parametrize("text", [None, "no certificate"])
def test_a_file_without_certificates_is_refused_at_the_start(tmp_path: Path, text: str | None) -> None:
    """A step would otherwise end with an unknown outcome, although nothing was sent."""
    file = tmp_path / "ca.pem"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigurationError, match=r"ca\.pem"):
        SlurmRest("https://h:6820", ca_file=file)


@pytest.mark.parametrize("text", [None, ""])
async def test_a_token_that_is_being_renewed_counts_as_an_outage(tmp_path: Path, text: str | None) -> None:
    """`scontrol token > FILE` empties the file first. Actions retry this error until their deadline."""
    file = tmp_path / "token"
    if text is not None:
        file.write_text(text)
    slurm = SlurmRest("http://127.0.0.1:9", token_file=file)
    with pytest.raises(ClusterUnavailable, match="token"):
        await slurm.node("n1")
    await slurm.close()


class Gateway:
    """Stand-in for slurmrestd and a gateway before it, which gives one answer. It does not model Slurm."""

    def __init__(self) -> None:
        self.status, self.body = 200, "{}"
        self.change: object = None
        """Answer to changes, if it is another, with status 500 for an error."""
        self.changed: list[str] = []
        self.asked: list[str] = []
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Print nothing."""

            def _answer(self, status: int, body: str) -> None:
                self.send_response(status)
                self.send_header("Retry-After", "7")
                self.end_headers()
                self.wfile.write(body.encode())

            def do_GET(self) -> None:
                if self.path == "/openapi/v3":
                    self._answer(200, json.dumps({"paths": {"/slurm/v0.0.45/nodes/": {}}}))
                    return
                gateway.asked.append(self.path)
                self._answer(304 if "update_time" in self.path else gateway.status, gateway.body)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                gateway.changed.append(self.path)
                if gateway.change is not None:
                    self._answer(500 if "errors" in json.dumps(gateway.change) else 200, json.dumps(gateway.change))
                    return
                self._answer(gateway.status, gateway.body)

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    started = Gateway()
    yield started
    started.close()


UNNAMED: Any = {"errors": [{"error_number": 0, "error": "No error", "description": "no cause is stated"}]}
NUMBERED: Any = {"errors": [{"error_number": 2018, "error": "Invalid node name specified"}]}


@pytest.mark.parametrize(
    ("status", "body", "failure", "may_be_done"),
    [
        (500, UNNAMED, ClusterUnavailable, True),
        (503, UNNAMED, ClusterUnavailable, True),
        (504, "<html>Gateway Time-out</html>", ClusterUnavailable, True),
        (502, {"message": "upstream error"}, ClusterUnavailable, True),
        (429, UNNAMED, ClusterUnavailable, False),
        (429, {"message": "API rate limit exceeded"}, ClusterUnavailable, False),
        (408, UNNAMED, ClusterUnavailable, False),
        (400, UNNAMED, ClusterRefused, None),
        (422, UNNAMED, ClusterRefused, None),
        (401, UNNAMED, ClusterRefused, None),
        (500, NUMBERED, ObjectMissing, None),
    ],
)
async def test_an_answer_without_a_cause_is_refused_only_if_the_request_is_at_fault(
    gateway: Gateway, status: int, body: object, failure: type[ActionFailure], may_be_done: bool | None
) -> None:
    """A failing server may have made the change; one that has no time for it has not."""
    gateway.status, gateway.body = status, body if isinstance(body, str) else json.dumps(body)
    slurm = SlurmRest(gateway.url)
    with pytest.raises(failure) as caught:
        await slurm.drain("n1", "hot")
    assert type(caught.value) is failure
    assert getattr(caught.value, "may_be_done", None) is may_be_done
    if failure is ClusterUnavailable:
        assert getattr(caught.value, "retry_after", None) == 7.0
        with pytest.raises(ClusterUnavailable) as reading:
            await slurm.node("n1")
        assert not reading.value.may_be_done
    await slurm.close()


DENIED: Any = {"errors": [{"error_number": 2002, "error": "Access/permission denied"}]}
NO_JOB: Any = {"errors": [{"error_number": 2017, "error": "Invalid job id specified"}]}
OTHER_TASK: Any = {"jobs": [{"job_id": 4712, "array_job_id": 4711, "array_task_id": 0, "job_state": ["RUNNING"]}]}


@pytest.mark.parametrize(
    ("shown", "change", "failure", "asked"),
    [
        (NO_JOB, DENIED, ClusterRefused, ["/slurm/v0.0.45/job/4711"]),
        (NO_JOB, {}, ClusterUnavailable, ["/slurm/v0.0.45/job/4711"]),
        (NO_JOB, NO_JOB, ObjectMissing, ["/slurm/v0.0.45/job/4711"]),
        (OTHER_TASK, DENIED, ObjectMissing, []),
    ],
    ids=["hidden", "not shown", "array is gone", "task is gone"],
)
async def test_a_task_that_is_not_shown_is_gone_only_if_slurm_forgot_its_array(
    gateway: Gateway, shown: object, change: object, failure: type[ActionFailure], asked: list[str]
) -> None:
    """slurmrestd changes no task by its name, so the array is asked about."""
    gateway.body, gateway.change = json.dumps(shown), change
    slurm = SlurmRest(gateway.url)
    with pytest.raises(failure) as caught:
        await slurm.update("4711_3", JobChange())
    assert type(caught.value) is failure
    assert gateway.changed == asked
    await slurm.close()


async def test_an_error_number_in_another_form_leaves_a_change_unknown(gateway: Gateway) -> None:
    """As any error whose number is not known."""
    gateway.status, gateway.body = 500, json.dumps({"errors": [{"error_number": {"number": 2018}}]})
    slurm = SlurmRest(gateway.url)
    with pytest.raises(ClusterUnavailable) as caught:
        await slurm.drain("n1", "hot")
    assert caught.value.may_be_done
    await slurm.close()


@pytest.mark.parametrize("body", ["{}", '{"errors": [], "nodes": null}', '{"message": "ok"}', '{"jobs": {}}', "[]"])
async def test_an_answer_without_the_list_is_no_empty_list(gateway: Gateway, body: str) -> None:
    """Such as a gateway's: otherwise all nodes and jobs would be gone."""
    gateway.body = body
    slurm = SlurmRest(gateway.url)
    for ask in (slurm.nodes, slurm.jobs, slurm.reservations, partial(slurm.job, "7"), partial(slurm.node, "n1")):
        with pytest.raises(ClusterUnavailable):
            await ask()
    gateway.status = 304
    for ask in (slurm.nodes, partial(slurm.node, "n1")):
        with pytest.raises(ClusterUnavailable):
            await ask()
    gateway.status, gateway.body = 200, json.dumps(UNNAMED)
    with pytest.raises(ClusterUnavailable):
        await slurm.nodes()
    with pytest.raises(ObjectMissing):  # as slurmrestd answers
        await slurm.node("n1")
    gateway.body = '{"nodes": [], "errors": null, "last_update": {"set": true, "number": 7}}'
    assert await slurm.nodes() == []
    await slurm.close()


async def test_of_a_list_only_the_needed_fields_are_read(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are 95 % of it. A list that is too long is named as such."""
    gateway.body = json.dumps(
        {"jobs": [{"job_id": 7, "job_state": ["RUNNING"], "comment": {"set": "x"}}], "errors": []}
    )
    slurm = SlurmRest(gateway.url)
    assert await slurm._read("/jobs/", "jobs") == {
        "jobs": [{"job_id": 7, "job_state": ["RUNNING"]}],
        "errors": [],
        "last_update": None,
    }
    assert [job.job_id for job in await slurm.jobs()] == ["7"]
    monkeypatch.setattr(slurm_rest, "_BODY_LIMIT", 1 << 20)
    gateway.body = json.dumps({"jobs": [{"name": "x" * (2 << 20)}]})
    short = SlurmRest(gateway.url)
    with pytest.raises(ClusterUnavailable, match="more than 1 MiB"):
        await short.jobs()
    await slurm.close()
    await short.close()


async def test_a_second_change_is_not_missed_after_a_slow_reading(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of the last change begins when slurmctld answers, not with the request."""
    times = iter([0.0, 9.0, 9.2, 9.3, 14.0, 14.1, 19.0, 19.1])
    monkeypatch.setattr(slurm_rest, "time", SimpleNamespace(monotonic=lambda: next(times)))
    gateway.body = json.dumps({"jobs": [], "last_update": {"set": True, "number": 9}})
    slurm = SlurmRest(gateway.url)
    for _ in range(4):
        await slurm.jobs()
    assert gateway.asked == ["/slurm/v0.0.45/jobs/"] * 3 + ["/slurm/v0.0.45/jobs/?update_time=9"]
    await slurm.close()


async def test_a_second_change_in_the_second_of_the_first_is_not_missed(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slurmctld would answer that nothing has changed since. Once that second is over, its answer counts."""

    def lists(state: str) -> None:
        job = {"job_id": 7, "job_state": [state]}
        gateway.body = json.dumps({"jobs": [job], "last_update": {"set": True, "number": 9}})

    slurm = SlurmRest(gateway.url)
    monkeypatch.setattr(slurm_rest, "_SETTLING", 600.0)
    for state in ("PENDING", "RUNNING"):
        lists(state)
        assert [job.states for job in await slurm.jobs()] == [{state}]
    monkeypatch.setattr(slurm_rest, "_SETTLING", 0.0)
    assert [job.states for job in await slurm.jobs()] == [{"RUNNING"}]
    assert [job.states for job in await slurm.jobs()] == [{"RUNNING"}]
    assert gateway.asked == ["/slurm/v0.0.45/jobs/"] * 3 + ["/slurm/v0.0.45/jobs/?update_time=9"]
    await slurm.close()
