"""The argument lists of Slurm's commands: what is run, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from trainmedic_agent.errors import CommandRejected
from trainmedic_agent.slurm.arguments import ACTIONS, for_change
from trainmedic_server.actions.slurm_reserve import SlurmReserveParams

REASON = "trainmedic:a-1 GPU 3 is too hot; $(reboot)"


@pytest.mark.parametrize(
    ("action", "params", "line"),
    [
        ("slurm.drain", {"node": "n1", "reason": "hot"}, "scontrol update nodename=n1 state=DRAIN reason=hot"),
        (
            *("slurm.drain", {"node": "n1", "reason": "hot", "resume_after": 600}),
            "scontrol update nodename=n1 state=DRAIN reason=hot resumeafter=600",
        ),
        ("slurm.resume", {"node": "n1"}, "scontrol update nodename=n1 state=UNDRAIN"),
        ("slurm.resume", {"node": "n1", "is_down": True}, "scontrol update nodename=n1 state=RESUME"),
        ("slurm.resume", {"node": "n1", "reason": "hot"}, "scontrol update nodename=n1 reason=hot"),
        ("slurm.reboot", {"node": "n1", "reason": "hot"}, "scontrol reboot ASAP nextstate=DOWN reason=hot n1"),
        ("slurm.hold", {"job": "7"}, "scontrol hold 7"),
        ("slurm.release", {"job": "7_2"}, "scontrol release 7_2"),
        ("slurm.requeue", {"job": "7", "hold": False}, "scontrol requeue 7"),
        ("slurm.requeue", {"job": "7", "hold": True}, "scontrol requeuehold 7"),
        ("slurm.requeue", {"job": "7", "ends_delay": True}, "scontrol update jobid=7 starttime=now"),
        ("slurm.signal", {"job": "7", "signal": "USR1"}, "scancel --signal=USR1 7"),
        ("slurm.signal", {"job": "7", "signal": "USR1", "with_batch": True}, "scancel --full --signal=USR1 7"),
        ("slurm.cancel", {"job": "7"}, "scancel 7"),
        ("slurm.comment", {"job": "7", "text": ""}, "scontrol update jobid=7 admincomment="),
        ("slurm.comment", {"job": "7", "only_asks": True}, "scontrol update jobid=7 partition=trainmedic:none"),
        (
            *("slurm.update", {"job": "7", "excluded_nodes": ["n1", "n2"], "priority": 5, "time_limit": 90}),
            "scontrol update jobid=7 excnodelist=n1,n2 priority=5 timelimit=90",
        ),
        (
            *("slurm.update", {"job": "7", "excluded_nodes": [], "time_limit": "unlimited"}),
            "scontrol update jobid=7 excnodelist= timelimit=UNLIMITED",
        ),
        (
            *("slurm.reserve", {"reservation": "trainmedic-a", "node": "n1", "users": ["root"], "minutes": 60}),
            "scontrol create reservation reservationname=trainmedic-a nodes=n1 users=root starttime=now "
            "flags=IGNORE_JOBS,OVERLAP duration=60",
        ),
        (
            *("slurm.reserve", {"reservation": "trainmedic-a", "is_end": True}),
            "scontrol delete reservationname=trainmedic-a",
        ),
    ],
)
def test_each_change_is_one_command(action: str, params: dict[str, Any], line: str) -> None:
    assert " ".join(for_change(action, params)) == line


@pytest.mark.parametrize("user", ["root", "Mia.Berg", "mia@example.org", r"CORP\\mia", "1000", "m-b_1"])
def test_a_reservation_accepts_the_users_that_slurm_accepts(user: str) -> None:
    given = {"reservation": "trainmedic-a", "node": "n1", "minutes": 1}
    assert f"users={user}" in for_change("slurm.reserve", {**given, "users": [user]})
    SlurmReserveParams(users=(user,))


@pytest.mark.parametrize("user", ["", "-root", "+root", "a,b", "a b", "a=b", "a\n", "@x"])
def test_a_reservation_rejects_text_that_means_other_users(user: str) -> None:
    """Slurm reads a leading minus as all users but this one."""
    given = {"reservation": "trainmedic-a", "node": "n1", "minutes": 1}
    with pytest.raises(CommandRejected, match="users is"):
        for_change("slurm.reserve", {**given, "users": [user]})
    with pytest.raises(ValidationError):
        SlurmReserveParams(users=(user,))


def test_a_reason_is_one_argument() -> None:
    """There is no shell to read it."""
    assert for_change("slurm.drain", {"node": "n1", "reason": REASON})[-1] == f"reason={REASON}"


@pytest.mark.parametrize(
    "node", ["", "ALL", "all", "Default", "n[1-3]", "n1,n2", "-n1", "n1 n2", "n1\n", "NodeSet=x", "n1;id", None, 3]
)
def test_a_node_is_one_name(node: object) -> None:
    """``ALL`` and host lists would drain others too."""
    for action in ("slurm.drain", "slurm.resume", "slurm.reboot"):
        with pytest.raises(CommandRejected, match="node is"):
            for_change(action, {"node": node, "reason": "hot"})


@pytest.mark.parametrize(
    "job",
    ["", "0", "7,8", "7_[1-3]", "-u", "llm", "7_*", "7 8", "+7", "7\n", 7, None, str(7 + 2**32), f"7_{1 + 2**32}"],
)
def test_a_job_is_one_id(job: object) -> None:
    """scancel takes a number modulo 2**32, so a larger one would name another job."""
    for action in ("slurm.hold", "slurm.requeue", "slurm.cancel", "slurm.comment"):
        given = {"text": ""} if action == "slurm.comment" else {}
        with pytest.raises(CommandRejected, match="job is"):
            for_change(action, {"job": job, **given})


@pytest.mark.parametrize(
    ("action", "params"),
    [
        ("slurm.drain", {"node": "n1", "reason": ""}),
        ("slurm.drain", {"node": "n1", "reason": "two\nlines"}),
        ("slurm.drain", {"node": "n1", "reason": "hot", "resume_after": -1}),
        ("slurm.drain", {"node": "n1", "reason": "hot", "state": "DOWN"}),
        ("slurm.signal", {"job": "7", "signal": "KILL"}),
        ("slurm.update", {"job": "7"}),
        ("slurm.update", {"job": "7", "priority": 0}),
        ("slurm.update", {"job": "7", "excluded_nodes": "n1"}),
        ("slurm.reserve", {"reservation": "maintenance", "is_end": True}),
        ("slurm.reserve", {"reservation": "trainmedic-a", "node": "--cluster=b", "is_end": True}),
        ("slurm.reserve", {"reservation": "trainmedic-a", "node": "n1", "users": ["ALL"], "minutes": 1}),
        ("slurm.reserve", {"reservation": "trainmedic-a", "node": "n1", "users": [], "minutes": 1}),
        ("slurm.comment", {"job": "7", "text": "a\0b"}),
    ],
)
def test_arguments_that_could_reach_further_are_rejected(action: str, params: dict[str, Any]) -> None:
    with pytest.raises(CommandRejected):
        for_change(action, params)


def test_no_action_accepts_a_state_to_return_to_after_a_reboot() -> None:
    """A node whose GPUs no one has checked would get jobs."""
    with pytest.raises(CommandRejected, match="does not know 'nextstate'"):
        for_change("slurm.reboot", {"node": "n1", "reason": "hot", "nextstate": "RESUME"})
    assert "slurm.reboot" in ACTIONS
