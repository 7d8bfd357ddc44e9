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
    """To the second; a command that says no lease gets five minutes."""
    node.cap("a", percent=80)
    node.passes(299)
    assert node.watts() == 560
    node.passes(2)
    assert node.watts() == 700
    assert node.expiry.due() is None


def test_of_several_caps_each_has_its_own_lease(node: Node) -> None:
    """The next lowest counts when one ends."""
    node.cap("a", percent=80, lease_seconds=300)
    node.cap("b", percent=60, lease_seconds=60)
    node.passes(61)
    assert node.watts() == 560
    node.passes(240)
    assert node.watts() == 700


def test_a_renewed_lease_runs_from_when_that_was_said(node: Node) -> None:
    """Not from when it arrived, so that one that is delivered twice or late changes nothing."""
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
    """Those that arrive out of order do no harm."""
    node.cap("a", percent=80, lease_seconds=600)
    assert node.renew("a", seconds=60)["renewed"] == ["a"]
    node.passes(599)
    assert node.watts() == 560


def test_the_policy_bounds_leases(make_node: Callable[..., Node]) -> None:
    """Those of a cap and those of a renewal, also one from a clock that is ahead."""
    node = make_node(bounds=PowerBounds(max_lease=timedelta(seconds=100)))
    assert node.cap("a", percent=80, lease_seconds=86400)["lease_seconds"] == 100
    node.passes(90)
    node.renew("a", seconds=86400, ago=-86400)
    node.passes(99)
    assert node.watts() == 560
    node.passes(2)
    assert node.watts() == 700


@pytest.mark.parametrize("params", [{}, {"holds": "a"}, {"holds": [1]}, {"holds": ["a"], "lease_seconds": -1}])
def test_a_renewal_that_makes_no_sense_is_rejected(node: Node, params: dict[str, object]) -> None:
    """A signed command can still be wrong."""
    accepted = node.accepted("r", "gpu.renew_lease", {"kind": "node", "node": "node-1"}, params)
    with pytest.raises(CommandRejected):
        RenewLeaseExecutor(node.control).perform(accepted)


def test_a_lease_that_ran_out_while_the_agent_was_away_ends_at_once(node: Node) -> None:
    """Before any command is taken, because the end of leases is due when it starts."""
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


def test_a_clock_that_is_set_back_does_not_keep_a_cap(node: Node) -> None:
    """The time since boot counts too."""
    node.cap("a", percent=80)
    node.passes(10)
    node.clock -= timedelta(hours=5)
    node.passes(300)
    assert node.watts() == 700


@pytest.mark.parametrize("away", [False, True])
def test_a_clock_that_is_set_forward_ends_no_cap(node: Node, away: bool) -> None:
    """Nor while the agent is away: a lease is measured by the time since boot, and goes on being renewed."""
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
def test_after_a_reboot_the_clock_says_when_a_lease_ends(node: Node, away: float, left: float) -> None:
    """The time since boot has begun anew."""
    node.cap("a", percent=80)
    node.reboot(away)
    node.passes(left - 1 if left else 0)
    assert node.watts() == (560 if left else 700)
    node.passes(2)
    assert node.watts() == 700


def test_an_earlier_agent_reads_what_this_one_has_written(node: Node) -> None:
    """It refuses a field of a cap that it does not know; and what it writes is read here."""
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


def test_a_clock_that_is_set_back_while_the_agent_is_away_does_not_keep_a_cap(node: Node) -> None:
    """A new process knows nothing of the time before it; what the policy grants at most still holds."""
    node.cap("a", percent=80)
    node.close()
    node.clock -= timedelta(hours=5)
    node._open()
    node.passes(15 * 60 + 1)
    assert node.watts() == 700


def test_a_full_disk_does_not_keep_a_cap(node: Node) -> None:
    """It ends although nothing can be written; what the disk then says is mended when the agent starts again."""
    node.driver.set_watts(0, 650)
    node.cap("a", percent=80)
    node.journal.close()
    node.passes(301)
    assert node.watts() == 650
    node.restart()
    node.passes(60)
    assert node.watts() == 650
    assert len(node.driver.sets()) == 2


def test_a_driver_that_fails_is_tried_again_until_the_cap_has_ended(node: Node) -> None:
    """Not as fast as it can, and not only now and then."""
    node.cap("a", percent=80)
    node.driver.fail(SET_LIMIT, standin.UNKNOWN)
    node.passes(420)
    attempts = len(node.driver.attempts()) - 1
    assert 5 <= attempts <= 15
    node.driver.heal()
    node.passes(31)
    assert node.watts() == 700


def test_a_lease_that_ends_on_one_gpu_is_not_held_up_by_another(node: Node) -> None:
    """One of them is lost."""
    node.cap("a", [card.uuid for card in cards(2)], percent=80)
    node.driver.lose(0)
    node.passes(301)
    assert node.watts(1) == 700
    node.driver.lose(0, lost=False)
    node.passes(100)
    assert node.watts(0) == 700


def test_without_a_cap_nothing_is_ever_due(node: Node) -> None:
    """Without a cap it costs nothing."""
    assert node.expiry.due() is None
    node.cap("a", percent=80)
    node.expiry.run()
    due = node.expiry.due()
    assert due is not None
    assert 0 < due <= 1  # until the look whether the driver was reopened


# --- set again -----------------------------------------------------------------------------------------


def test_a_cap_that_has_lapsed_is_set_again_when_it_is_asked_for(node: Node) -> None:
    """With the limit and the id that it had; its undo gives back what was there before."""
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


def test_to_ask_twice_sets_it_once(node: Node) -> None:
    """The second finds it standing; also where the agent was killed after the first."""
    node.cap("a", percent=80)
    node.passes(301)
    node.renew("a", again=["a"])
    node.restart()
    assert node.renew("a", again=["a"]) == {"renewed": ["a"], "unknown": []}
    assert len(node.driver.sets()) == 3  # the cap, its end, the cap


def test_an_agent_that_dies_while_it_sets_a_cap_again_ends_it_with_its_lease(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun and not seen to end: the next one brings it to the driver, and the lease runs as it was said."""
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
def test_what_else_has_ended_a_cap_ends_it_for_good(node: Node, how: str) -> None:
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


def test_a_cap_is_set_again_beside_others(node: Node) -> None:
    """The lowest counts, and each ends alone, as ever."""
    node.cap("a", percent=60)
    node.cap("b", percent=80, lease_seconds=900)
    node.passes(301)
    assert node.watts() == 560
    node.renew("a", again=["a"])
    assert node.watts() == 420
    node.undo("a")
    assert node.watts() == 560


def test_a_cap_is_set_again_within_todays_policy(make_node: Callable[..., Node]) -> None:
    """It may have become stricter since."""
    node = make_node()
    node.cap("a", percent=60)
    node.passes(301)
    node.control.bounds = PowerBounds(floor_percent=90)
    assert node.renew("a", again=["a"])["again"]["a"][0]["clamped"] == "floor"
    assert node.watts() == 630


def test_the_gpus_of_a_command_are_set_again_together_or_not_at_all(node: Node) -> None:
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


def test_what_is_asked_for_again_must_be_a_hold_of_the_command(node: Node) -> None:
    """And what was never here is not invented."""
    assert node.renew("a", again=["a", "b"]) == {"renewed": [], "unknown": ["a"]}
    accepted = node.accepted("r", "gpu.renew_lease", {"kind": "node", "node": "node-1"}, {"holds": [], "again": "a"})
    with pytest.raises(CommandRejected, match="again must be a list"):
        RenewLeaseExecutor(node.control).perform(accepted)
