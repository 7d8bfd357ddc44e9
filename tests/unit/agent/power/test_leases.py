"""A cap is a lease: it ends by itself unless the server says that it is still needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.driver import driver as standin
from tests.driver.driver import SET_LIMIT, cards
from tests.unit.agent.power.conftest import Node
from trainmedic_agent.errors import CommandRejected
from trainmedic_agent.policy import PowerBounds
from trainmedic_agent.power.caps import GpuPowerState
from trainmedic_agent.power.executors import RenewLeaseExecutor

FIRST = cards(1)[0].uuid


def test_a_cap_ends_with_its_lease(node: Node) -> None:
    """It ends to the second; a command without a lease gets five minutes."""
    node.cap("a", percent=80)
    node.passes(299)
    assert node.watts() == 560
    node.passes(2)
    assert node.watts() == 700
    assert node.expiry.due() is None


def test_each_of_several_caps_has_its_own_lease(node: Node) -> None:
    """The next lowest counts when one ends."""
    node.cap("a", percent=80, lease_seconds=300)
    node.cap("b", percent=60, lease_seconds=60)
    node.passes(61)
    assert node.watts() == 560
    node.passes(240)
    assert node.watts() == 700


def test_a_renewed_lease_runs_from_when_the_renewal_was_sent(node: Node) -> None:
    """It does not run from its arrival, so a repeated or late delivery changes nothing."""
    node.cap("a", percent=80)
    node.passes(200)
    assert node.renew("a", "b", ago=100) == {"renewed": ["a"], "unknown": ["b"]}
    node.passes(199)
    assert node.watts() == 560
    node.passes(2)
    assert node.watts() == 700
    assert node.renew("a")["ended"] == {"a": "its lease had run out"}
    assert node.watts() == 700


def test_a_renewal_never_shortens_a_lease(node: Node) -> None:
    """Renewals that arrive out of order do no harm."""
    node.cap("a", percent=80, lease_seconds=600)
    assert node.renew("a", seconds=60)["renewed"] == ["a"]
    node.passes(599)
    assert node.watts() == 560


def test_the_policy_bounds_leases(make_node: Callable[..., Node]) -> None:
    """It bounds those of caps and of renewals, also one from a clock that is ahead."""
    node = make_node(bounds=PowerBounds(max_lease=timedelta(seconds=100)))
    assert node.cap("a", percent=80, lease_seconds=86400)["lease_seconds"] == 100
    node.passes(90)
    node.renew("a", seconds=86400, ago=-86400)
    node.passes(99)
    assert node.watts() == 560
    node.passes(2)
    assert node.watts() == 700


@pytest.mark.parametrize("params", [{}, {"holds": "a"}, {"holds": [1]}, {"holds": ["a"], "lease_seconds": -1}])
def test_an_invalid_renewal_is_rejected(node: Node, params: dict[str, object]) -> None:
    """A signed command can still be wrong."""
    accepted = node.accepted("r", "gpu.renew_lease", {"kind": "node", "node": "node-1"}, params)
    with pytest.raises(CommandRejected):
        RenewLeaseExecutor(node.control).perform(accepted)


def test_a_lease_that_expired_while_the_agent_was_down_ends_at_once(node: Node) -> None:
    """It ends before any command is accepted, because ending leases is due at the start."""
    node.cap("a", percent=80)
    node.close()
    node.clock += timedelta(hours=1)
    node.boottime += 3600
    node._open()
    due = node.expiry.due()
    assert due is not None
    assert due <= 0
    node.expiry.run()
    assert node.watts() == 700


def test_a_clock_set_back_does_not_keep_a_cap(node: Node) -> None:
    """The time since boot counts too."""
    node.cap("a", percent=80)
    node.passes(10)
    node.clock -= timedelta(hours=5)
    node.passes(300)
    assert node.watts() == 700


@pytest.mark.parametrize("away", [False, True])
def test_a_clock_set_forward_ends_no_cap(node: Node, away: bool) -> None:
    """This holds also while the agent is down: leases use the time since boot, and are still renewed."""
    node.cap("a", percent=80)
    node.clock += timedelta(days=100)
    if away:
        node.restart()
    node.passes(290)
    assert node.watts() == 560
    assert node.renew("a", seconds=300)["renewed"] == ["a"]
    node.passes(290)
    assert node.watts() == 560
    node.passes(11)
    assert node.watts() == 700


def test_a_cap_is_renewed_after_the_clock_was_set_back(node: Node) -> None:
    """The renewals' ends lie before that of the lease then, by the clock."""
    node.cap("a", percent=80)
    node.clock -= timedelta(hours=2)
    for _ in range(5):
        node.passes(200)
        assert node.renew("a", seconds=300)["renewed"] == ["a"]
    assert node.watts() == 560
    node.passes(301)
    assert node.watts() == 700


@pytest.mark.parametrize(("away", "left"), [(100, 200), (400, 0)])
def test_after_a_reboot_the_clock_decides_when_a_lease_ends(node: Node, away: float, left: float) -> None:
    """The time since boot has restarted."""
    node.cap("a", percent=80)
    node.reboot(away)
    node.passes(left - 1 if left else 0)
    assert node.watts() == (560 if left else 700)
    node.passes(2)
    assert node.watts() == 700


def test_an_earlier_agent_can_read_this_ones_records(node: Node) -> None:
    """It rejects unknown fields of a cap; its own records can be read here."""
    node.cap("a", percent=80)
    (row,) = node.journal.rows("SELECT state FROM power WHERE state LIKE '%\"a\"%'")
    stored = json.loads(row[0])
    assert set(stored["holds"][0]) == {
        *("id", "limit_mw", "lease_until", "lease_seconds", "previous_mw", "requested_mw", "clamped", "ended_at"),
        "ended_by",
    }
    del stored["ends"]
    (cap,) = GpuPowerState.of_json(stored).caps
    assert (cap.boot, cap.lease_until) == ("", node.clock.timestamp() + 300)


def test_a_clock_set_back_while_the_agent_is_down_does_not_keep_a_cap(node: Node) -> None:
    """A new process does not know the time before its start; the policy's maximum still holds."""
    node.cap("a", percent=80)
    node.close()
    node.clock -= timedelta(hours=5)
    node._open()
    node.passes(15 * 60 + 1)
    assert node.watts() == 700


def test_a_full_disk_does_not_keep_a_cap(node: Node) -> None:
    """It ends although nothing can be written; the record is corrected when the agent starts again."""
    node.driver.set_watts(0, 650)
    node.cap("a", percent=80)
    node.journal.close()
    node.passes(301)
    assert node.watts() == 650
    node.restart()
    node.passes(60)
    assert node.watts() == 650
    assert len(node.driver.sets()) == 2


def test_a_failing_driver_is_retried_until_the_cap_has_ended(node: Node) -> None:
    """Retries are neither as fast as possible nor rare."""
    node.cap("a", percent=80)
    node.driver.fail(SET_LIMIT, standin.UNKNOWN)
    node.passes(420)
    attempts = len(node.driver.attempts()) - 1
    assert 5 <= attempts <= 15
    node.driver.heal()
    node.passes(31)
    assert node.watts() == 700


def test_the_end_of_a_lease_on_one_gpu_is_not_delayed_by_another(node: Node) -> None:
    """One of them is lost."""
    node.cap("a", [card.uuid for card in cards(2)], percent=80)
    node.driver.lose(0)
    node.passes(301)
    assert node.watts(1) == 700
    node.driver.lose(0, lost=False)
    node.passes(100)
    assert node.watts(0) == 700


def test_without_a_cap_nothing_is_ever_due(node: Node) -> None:
    """No timer runs without a cap."""
    assert node.expiry.due() is None
    node.cap("a", percent=80)
    node.expiry.run()
    due = node.expiry.due()
    assert due is not None
    assert 0 < due <= 1  # until the look whether the driver was reopened


# --- set again -----------------------------------------------------------------------------------------


def test_a_lapsed_cap_is_reapplied_on_request(node: Node) -> None:
    """It gets its former limit and id; its undo restores the limit from before."""
    node.driver.set_watts(0, 650)
    node.cap("a", percent=80)
    node.passes(301)
    assert node.watts() == 650
    told = node.renew("a")
    assert (told["renewed"], told["unknown"], told["lapsed"]) == ([], ["a"], ["a"])
    assert node.watts() == 650
    told = node.renew("a", again=["a"])
    assert (told["renewed"], told["unknown"]) == (["a"], [])
    assert told["again"]["a"][0]["limit_watts"] == 560
    assert node.watts() == 560
    node.passes(299)
    assert node.watts() == 560
    assert node.undo("a")["limit_watts"] == 650
    assert node.watts() == 650


def test_two_requests_reapply_it_once(node: Node) -> None:
    """The second request finds it active, also if the agent was killed after the first."""
    node.cap("a", percent=80)
    node.passes(301)
    node.renew("a", again=["a"])
    node.restart()
    assert node.renew("a", again=["a"]) == {"renewed": ["a"], "unknown": []}
    assert len(node.driver.sets()) == 3  # the cap, its end, the cap


def test_an_agent_killed_while_reapplying_a_cap_ends_it_with_its_lease(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next agent completes an unfinished start at the driver, and the lease runs as granted."""
    node.cap("a", percent=80)
    node.passes(301)

    def die(uuid: str, milliwatts: int) -> None:
        raise SystemExit

    monkeypatch.setattr(node.gpus, "set_power_limit", die)
    with pytest.raises(SystemExit):
        node.renew("a", again=["a"])
    assert node.watts() == 700
    node.restart()
    node.passes(1)
    assert node.watts() == 560
    node.passes(300)
    assert node.watts() == 700


@pytest.mark.parametrize("how", ["undo", "restore", "override"])
def test_a_cap_ended_for_another_reason_stays_ended(node: Node, how: str) -> None:
    """Its lease had run out before; a renewal that is late brings nothing back."""
    node.cap("a", percent=80)
    if how == "override":
        node.cap("b", percent=60, lease_seconds=600)
    node.passes(301)
    match how:
        case "undo":
            assert node.undo("a")["nothing_to_undo"] is True
        case "restore":
            node.cap("c", restore=True)
        case "override":
            node.driver.set_watts(0, 500)
            node.passes(60)
    before = node.watts()
    told = node.renew("a", again=["a"])
    assert (told["renewed"], told["unknown"]) == ([], ["a"])
    assert "lapsed" not in told
    assert node.watts() == before


def test_a_cap_is_reapplied_next_to_others(node: Node) -> None:
    """The lowest counts, and each ends alone, as ever."""
    node.cap("a", percent=60)
    node.cap("b", percent=80, lease_seconds=900)
    node.passes(301)
    assert node.watts() == 560
    node.renew("a", again=["a"])
    assert node.watts() == 420
    node.undo("a")
    assert node.watts() == 560


def test_a_cap_is_reapplied_within_the_current_policy(make_node: Callable[..., Node]) -> None:
    """The policy may have become stricter since the cap was set."""
    node = make_node()
    node.cap("a", percent=60)
    node.passes(301)
    node.control.bounds = PowerBounds(floor_percent=90)
    assert node.renew("a", again=["a"])["again"]["a"][0]["clamped"] == "floor"
    assert node.watts() == 630


def test_the_gpus_of_a_command_are_reapplied_together_or_not_at_all(node: Node) -> None:
    """One that does not answer leaves the cap lapsed, with the reason, and it can be asked for again."""
    node.cap("a", ["0", "1"], percent=80)
    node.passes(301)
    node.driver.fail(SET_LIMIT, standin.UNKNOWN, gpu=1, times=1)
    told = node.renew("a", again=["a"])
    assert (told["renewed"], told["lapsed"]) == ([], ["a"])
    assert "could not be reapplied" in told["ended"]["a"]
    node.passes(30)
    assert (node.watts(0), node.watts(1)) == (700, 700)
    assert node.renew("a", again=["a"])["renewed"] == ["a"]
    assert (node.watts(0), node.watts(1)) == (560, 560)


def test_only_a_hold_of_the_command_can_be_reapplied(node: Node) -> None:
    """A cap that never existed here is not created."""
    assert node.renew("a", again=["a", "b"]) == {"renewed": [], "unknown": ["a"]}
    accepted = node.accepted("r", "gpu.renew_lease", {"kind": "node", "node": "node-1"}, {"holds": [], "again": "a"})
    with pytest.raises(CommandRejected, match="again must be a list"):
        RenewLeaseExecutor(node.control).perform(accepted)
