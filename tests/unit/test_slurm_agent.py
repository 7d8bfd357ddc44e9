"""The way into Slurm through an agent: what each of its answers means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from trainmedic.wire import envelope
from trainmedic.wire.envelope import Command, Reply
from trainmedic_logs.domain import log_pages
from trainmedic_server.adapters.slurm_agent import SlurmAgent
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.errors import ActionFailure, ClusterRefused, ClusterUnavailable, ObjectMissing


class Bus:
    """Stand-in for the bus and an agent, which gives one answer. It does not model delays, signatures or Slurm."""

    def __init__(self, status: str | None, output: Mapping[str, Any]) -> None:
        self.status = status
        self.output = output
        self.sent: list[Command] = []

    async def request(self, command: Command, unheard: Any) -> tuple[Reply, ...]:
        self.sent.append(command)
        return () if self.status is None else (Reply(command.id, "login", self.status, output=self.output),)

    def acknowledge(self, command_id: str) -> None:
        """Forget nothing."""


def slurm_with(status: str | None, **output: Any) -> SlurmAgent:
    return SlurmAgent(Bus(status, output), SystemClock(), "login")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "output", "failure", "may_be_done"),
    [
        (None, {}, ClusterUnavailable, True),
        (envelope.FAILED, {"reason": "the agent was restarted", "may_be_done": True}, ClusterUnavailable, True),
        (envelope.FAILED, {"reason": "RuntimeError: a bug of the agent"}, ClusterUnavailable, True),
        (
            envelope.FAILED,
            {"reason": "Invalid node name specified", "may_be_done": True},
            *(ClusterUnavailable, True),
        ),
        (envelope.FAILED, {"reason": "Invalid node name specified", "may_be_done": False}, ObjectMissing, None),
        (
            envelope.FAILED,
            {"reason": "slurm_update error: Socket timed out on send/recv operation", "may_be_done": False},
            *(ClusterUnavailable, True),
        ),
        (
            envelope.FAILED,
            {"reason": "scontrol did not end in time; nothing was changed", "may_be_done": False},
            *(ClusterUnavailable, False),
        ),
        (
            envelope.FAILED,
            {"reason": "Unable to contact slurm controller; nothing was changed", "may_be_done": False},
            *(ClusterUnavailable, False),
        ),
        (envelope.FAILED, {"reason": "Invalid user id", "may_be_done": False}, ClusterRefused, None),
        (envelope.EXPIRED, {"reason": "the agent did not reach it in time"}, ClusterUnavailable, False),
        (
            envelope.EXPIRED,
            {"reason": "an earlier process may have begun it", "may_be_done": True},
            *(ClusterUnavailable, True),
        ),
        (envelope.REJECTED, {"reason": "it is not under allow"}, ClusterRefused, None),
        (envelope.UNSUPPORTED, {"reason": "this agent does not know slurm.drain"}, ClusterRefused, None),
    ],
)
async def test_a_change_that_failed_says_whether_it_may_be_done(
    status: str | None, output: dict[str, Any], failure: type[ActionFailure], may_be_done: bool | None
) -> None:
    """Only an end that Slurm gave a reason for proves that nothing was done."""
    with pytest.raises(failure) as caught:
        await slurm_with(status, **output).drain("n1", "hot")
    assert type(caught.value) is failure
    assert getattr(caught.value, "may_be_done", None) is may_be_done


@pytest.mark.parametrize(
    ("status", "output"),
    [
        (None, {}),
        (envelope.FAILED, {"reason": "scontrol wrote no JSON"}),
        (envelope.FAILED, {"reason": "Unable to contact slurm controller (connect failure)"}),
        (envelope.APPLIED, {}),
        (envelope.APPLIED, {"digest": "1", "pages": 1, "page": ["no page"]}),
        (envelope.APPLIED, {"digest": "1", "pages": 1, "page": log_pages.packed({"jobs": []})}),
        (envelope.APPLIED, {"digest": "1", "unchanged": True}),
    ],
)
async def test_an_answer_without_the_list_is_no_empty_list(status: str | None, output: dict[str, Any]) -> None:
    """An outage never means that no node is drained, or that all are gone."""
    with pytest.raises(ClusterUnavailable):
        await slurm_with(status, **output).nodes()


@pytest.mark.parametrize("page", [["no page"], log_pages.packed([])])  # type: ignore[arg-type]
async def test_an_unreadable_document_is_called_no_page_of_lines(page: list[str]) -> None:
    with pytest.raises(ClusterUnavailable, match=r"a document that cannot be read: not .*compressed JSON"):
        await slurm_with(envelope.APPLIED, digest="1", pages=1, page=page).nodes()


async def test_errors_in_the_document_count() -> None:
    page = log_pages.packed({"jobs": [], "errors": [{"error_number": 2017, "error": "Invalid job id specified"}]})
    with pytest.raises(ObjectMissing):
        await slurm_with(envelope.APPLIED, digest="1", pages=1, page=page).job("7")


async def test_a_server_that_may_not_act_sends_no_change() -> None:
    """It may read."""

    def fence() -> None:
        raise RuntimeError("not the leader")

    bus = Bus(envelope.APPLIED, {"digest": "1", "pages": 1, "page": log_pages.packed({"nodes": []})})
    slurm = SlurmAgent(bus, SystemClock(), "login", fence)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        await slurm.drain("n1", "hot")
    assert not bus.sent
    assert await slurm.nodes() == []


@pytest.mark.parametrize("name", ["2001:db8::1", "-w", "n[1-2]", "n1;id", ""])
async def test_what_is_no_node_name_is_missing(name: str) -> None:
    """So the node is looked for by its address, as by slurmrestd."""
    with pytest.raises(ObjectMissing, match="is no NodeName"):
        await slurm_with(envelope.REJECTED, reason="node is not one name").node(name)
