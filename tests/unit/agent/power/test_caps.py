"""What a power cap does to a GPU, and what it says of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pynvml
import pytest

from tests.driver import driver as standin
from tests.driver.driver import SET_LIMIT, Card, cards
from tests.unit.agent.power.conftest import Node
from trainmedic_agent.errors import (
    CommandFailed,
    CommandRejected,
    CommandUnsupported,
    GpuError,
    GpuLost,
    GpuStuck,
    JournalUnavailable,
    NoPermission,
)
from trainmedic_agent.policy import PowerBounds

FIRST, SECOND = (card.uuid for card in cards(2))


def test_a_cap_reports_everything_about_the_card_and_the_limit(node: Node) -> None:
    """The reply has the requested, enforced and previous limits, the bounds, and the end of the lease."""
    node.driver.load(0, 1.0)
    assert node.cap("a", percent=80) == {
        "gpu": FIRST,
        "requested_watts": 560,
        "limit_watts": 560,
        "previous_watts": 700,
        "default_watts": 700,
        "min_watts": 200,
        "max_watts": 700,
        "draw_watts": 560,
        "lease_seconds": 300,
        "lease_until": "2026-01-31T12:05:00.000000Z",
    }
    assert node.watts() == 560


def test_every_output_is_plain_json(node: Node) -> None:
    """The output travels in a reply and is kept in the history."""
    for output in (
        node.cap("a", percent=80),
        node.cap("b", [FIRST, SECOND], watts=400),
        node.undo("b"),
        node.renew("a"),
    ):
        assert json.loads(json.dumps(output)) == output


@pytest.mark.parametrize(
    ("params", "limit", "clamped"),
    [
        ({"watts": 350}, 350, None),
        ({"watts": 349}, 350, "floor"),
        ({"percent": 10}, 350, "floor"),
        ({"watts": 9000}, 700, "card"),
        ({"percent": 100}, 700, None),
        ({"watts": 412.5}, 412.5, None),
    ],
)
def test_a_cap_is_clamped_to_the_card_and_to_the_policys_floor(
    node: Node, params: dict[str, float], limit: float, clamped: str | None
) -> None:
    """The reply states which of them applied; the policy's floor is half of the default here."""
    output = node.cap("a", **params)
    assert (output["limit_watts"], output.get("clamped"), node.watts()) == (limit, clamped, limit)


def test_a_floor_below_the_cards_minimum_is_raised_to_it(make_node: Callable[..., Node]) -> None:
    """The driver would refuse anything lower."""
    node = make_node(bounds=PowerBounds(floor_percent=5))
    output = node.cap("a", watts=50)
    assert (output["limit_watts"], output["clamped"], node.watts()) == (200, "card", 200)


def test_a_cap_above_the_present_draw_reports_that_it_cools_nothing(node: Node) -> None:
    """The cap is still set, because the draw may rise."""
    node.driver.load(0, 0.3)
    output = node.cap("a", percent=80)
    assert re.search("draws 259 W, less than this limit", output["note"])
    assert node.watts() == 560


def test_a_cap_never_raises_a_limit(node: Node) -> None:
    """A lower active limit stays, and the reply reports it."""
    node.driver.set_watts(0, 400)
    output = node.cap("a", percent=80)
    assert (output["limit_watts"], output["previous_watts"], node.watts()) == (400, 400, 400)
    assert "a lower limit of 400 W is already active" in output["note"]
    assert node.driver.sets() == []
    node.undo("a")
    assert node.watts() == 400


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"watts": 300, "percent": 80},
        {"watts": "300"},
        {"watts": True},
        {"watts": 0},
        {"watts": -5},
        {"watts": float("nan")},
        {"watts": float("inf")},
        {"percent": 101},
        {"restore": False},
        {"restore": "yes"},
        {"watts": 300, "lease_seconds": 0},
        {"watts": 300, "lease_seconds": None},
        {"watts": 300, "lease_seconds": "5m"},
        {"watts": [300]},
    ],
)
def test_invalid_parameters_are_rejected(node: Node, params: dict[str, object]) -> None:
    """A signed command can still be wrong; nothing is set."""
    with pytest.raises(CommandRejected):
        node.cap("a", **params)
    assert node.driver.attempts() == []
    assert node.control.ledger.all() == {}


@pytest.mark.parametrize("gpu", ["", "7", "GPU-nobody", [], [FIRST, ""], [1], ["0", "9"]])
def test_a_gpu_that_is_not_on_this_node_is_rejected(node: Node, gpu: str | list[str]) -> None:
    """An alert without a GPU never means GPU 0; all of several GPUs must be on the node."""
    with pytest.raises(CommandRejected):
        node.cap("a", gpu, percent=80)
    assert node.driver.attempts() == []


def test_a_gpu_is_capped_under_any_name_in_the_alert(node: Node) -> None:
    """The name is an index, a PCI address, or a UUID in capitals."""
    for number, name in enumerate(("1", "00000000:20:00.0", SECOND.upper())):
        assert node.cap(f"cap-{number}", name, percent=90)["gpu"] == SECOND
    assert (node.watts(0), node.watts(1)) == (700, 630)


@pytest.mark.parametrize(
    ("code", "error", "says"),
    [
        (standin.NOT_SUPPORTED, CommandUnsupported, "does not support"),
        (standin.NO_PERMISSION, CommandUnsupported, "driver denies the agent this call on .*root"),
        (standin.GPU_IS_LOST, CommandFailed, "no longer responds"),
        (standin.DRIVER_NOT_LOADED, CommandFailed, "not loaded"),
        (standin.UNKNOWN, CommandFailed, "999"),
    ],
)
@pytest.mark.parametrize("function", [SET_LIMIT, "nvmlDeviceGetPowerManagementLimit"])
def test_a_cap_refused_by_the_driver_is_reported_and_leaves_nothing_behind(
    node: Node, function: str, code: int, error: type[Exception], says: str
) -> None:
    """The outcome is ``unsupported`` if another attempt is useless, ``failed`` otherwise."""
    node.driver.fail(function, code, gpu=0, times=2)
    with pytest.raises(error, match=says):
        node.cap("a", percent=80)
    node.driver.heal()
    node.passes(60)
    assert node.watts() == 700
    assert node.control.ledger.of(FIRST).baseline is None
    assert node.cap("b", percent=80)["limit_watts"] == 560


def test_a_failed_cap_that_took_effect_is_reverted(node: Node) -> None:
    """A driver may answer with an error after it has set the limit."""
    node.driver.fail(SET_LIMIT, standin.TIMEOUT, times=1, after=True)
    with pytest.raises(CommandFailed):
        node.cap("a", percent=80)
    assert node.watts() == 700


def test_without_a_default_limit_a_percentage_is_unsupported(node: Node) -> None:
    """Watts are supported; the floor is then a share of the card's maximum."""
    node.driver.fail("nvmlDeviceGetPowerManagementDefaultLimit", standin.NOT_SUPPORTED)
    with pytest.raises(CommandUnsupported, match="use watts"):
        node.cap("a", percent=80)
    assert node.cap("b", watts=100)["limit_watts"] == 350


def test_a_cap_that_cannot_be_persisted_is_not_set(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full: a cap that would never be reverted is worse than none."""
    node.journal.close()
    with pytest.raises(JournalUnavailable):
        node.cap("a", percent=80)
    assert node.driver.attempts() == []


def test_an_unjournaled_confirmation_is_logged_and_the_cap_stays(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The cap is set and stays."""
    write, full = node.journal.write, JournalUnavailable("no space")
    answers = iter([write])

    def written_once(work: Any) -> Any:
        for answer in answers:
            return answer(work)
        raise full

    monkeypatch.setattr(node.journal, "write", written_once)
    assert node.cap("a", percent=80)["limit_watts"] == node.watts() == 560
    assert "cannot journal a change of power caps; it takes effect anyway" in caplog.messages


# --- several on one GPU --------------------------------------------------------------------------------------


def test_the_lowest_of_several_caps_counts(node: Node) -> None:
    """They start and end in any order, and the last one restores the limit from before the first."""
    node.driver.set_watts(0, 650)
    node.cap("a", percent=80)
    node.cap("b", percent=60)
    assert node.watts() == 420
    output = node.cap("c", percent=70)
    assert (output["limit_watts"], output["requested_watts"], node.watts()) == (420, 490, 420)
    node.undo("b")
    assert node.watts() == 490
    assert node.undo("a")["note"] == "1 other cap(s) on this GPU are still active"
    assert node.watts() == 490
    assert node.undo("c")["limit_watts"] == 650
    assert node.watts() == 650


def test_an_undo_in_any_order_restores_the_limit_from_before(node: Node) -> None:
    """The outer cap may be undone first."""
    node.cap("a", percent=80)
    node.cap("b", percent=60)
    assert node.undo("a")["limit_watts"] == 420
    assert node.undo("b")["limit_watts"] == 700


def test_an_undo_of_an_inactive_cap_states_the_reason(node: Node) -> None:
    """The cap was reverted, expired, or never existed."""
    node.cap("a", percent=80)
    node.undo("a")
    assert node.undo("a", "again") == {
        "nothing_to_undo": True,
        "known": "not_in_force",
        "note": "it was reverted before",
    }
    node.cap("b", percent=80, lease_seconds=60)
    node.passes(61)
    assert node.undo("b") == {"nothing_to_undo": True, "known": "not_in_force", "note": "its lease had run out"}
    assert node.undo("never") == {
        "nothing_to_undo": True,
        "known": "not_in_force",
        "note": "no such cap is active here",
    }


def test_a_restore_ends_every_cap_on_the_gpu(node: Node) -> None:
    """A playbook's step or an operator's command restores, whoever created the caps."""
    node.cap("a", percent=80)
    node.cap("b", percent=60)
    node.cap("c", "1", percent=60)
    assert node.cap("r", restore=True)["limit_watts"] == 700
    assert (node.watts(0), node.watts(1)) == (700, 420)
    assert node.undo("a")["nothing_to_undo"]


# --- several GPUs in one command -------------------------------------------------------------------------------


def test_all_gpus_of_a_command_are_capped_alike(node: Node) -> None:
    """One slow GPU slows its whole job; the output is by GPU, and the undo restores all."""
    output = node.cap("a", [FIRST, SECOND, "1"], percent=80)
    assert [(one["gpu"], one["limit_watts"]) for one in output["gpus"]] == [(FIRST, 560), (SECOND, 560)]
    output = node.undo("a")
    assert [(one["gpu"], one["limit_watts"]) for one in output["gpus"]] == [(FIRST, 700), (SECOND, 700)]


@pytest.mark.parametrize("function", [SET_LIMIT, "nvmlDeviceGetEnforcedPowerLimit"])
def test_if_one_gpu_of_a_command_cannot_be_capped_none_is(node: Node, function: str) -> None:
    """The reply names the GPU and the reason."""
    node.driver.fail(function, standin.UNKNOWN, gpu=1)
    with pytest.raises(CommandFailed, match="none of the 2 GPUs is capped") as failed:
        node.cap("a", [FIRST, SECOND], percent=80)
    assert failed.value.output["gpus"].keys() == {SECOND}
    node.driver.heal()
    node.passes(60)
    assert (node.watts(0), node.watts(1)) == (700, 700)


def test_a_limit_that_may_still_be_set_is_not_a_refusal(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's call does not return, so the card cannot be read; the agent restores it later."""

    def stuck(*_: object) -> None:
        monkeypatch.setattr(node.gpus, "power", stuck)
        raise GpuStuck("GPU 0 is stuck")

    with monkeypatch.context() as patch:
        patch.setattr(node.gpus, "set_power_limit", stuck)
        with pytest.raises(
            CommandFailed, match="may have been capped, and the agent keeps restoring: GPU 0 is stuck"
        ) as failed:
            node.cap("a", [FIRST, SECOND], percent=80)
        with pytest.raises(CommandFailed, match="not restored yet"):
            node.undo("a")
    assert failed.value.output["may_be_done"] is True
    monkeypatch.undo()
    node.driver.set_watts(0, 560)
    node.passes(60)
    assert (node.watts(0), node.watts(1)) == (700, 700)


def test_an_unstarted_cap_reports_nothing_about_an_earlier_one(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier cap's GPU still has to be restored."""
    node.cap("a", percent=80)

    def fails(error: type[GpuError]) -> None:
        def power(*_: object) -> None:
            raise error("as the test says")

        monkeypatch.setattr(node.gpus, "power", power)

    fails(GpuLost)
    with pytest.raises(CommandFailed, match="not restored yet"):
        node.undo("a")
    with pytest.raises(CommandFailed, match=r"^as the test says$") as failed:
        node.cap("b", percent=50)
    assert "may_be_done" not in failed.value.output
    fails(NoPermission)
    with pytest.raises(CommandUnsupported):
        node.cap("c", percent=50)


# --- resumed and given up ------------------------------------------------------------------------------------


def test_a_resumed_cap_is_set_once(node: Node) -> None:
    """The process ended after the driver call; the lease is unchanged."""
    node.cap("a", percent=80)
    node.restart()
    node.passes(0)
    output = node.cap("a", resumed=True, percent=80)
    assert (output["previous_watts"], output["limit_watts"]) == (700, 560)
    assert output["lease_until"] == "2026-01-31T12:05:00.000000Z"
    assert len(node.driver.sets()) == 1


def test_a_cap_that_expired_before_it_was_resumed_is_reverted(node: Node) -> None:
    """Nothing of it stays active. The same command can be sent again, with more time."""
    node.cap("a", percent=80)
    node.restart()
    node.abandon("a")
    assert node.watts() == 700
    assert node.cap("a", percent=80)["limit_watts"] == 560
    node.undo("a")
    assert node.watts() == 700


def test_a_cap_whose_lease_ended_before_it_was_resumed_has_failed(node: Node) -> None:
    """The agent was down for longer than the cap was to last."""
    node.cap("a", percent=80, lease_seconds=5)
    node.restart()
    node.passes(6)
    with pytest.raises(CommandFailed, match="has ended since: its lease had run out"):
        node.cap("a", resumed=True, percent=80, lease_seconds=5)
    assert node.watts() == 700


# --- somebody else -----------------------------------------------------------------------------------------------


def test_another_users_limit_is_respected(node: Node) -> None:
    """The undo leaves it, and reports what it found."""
    node.cap("a", percent=80)
    node.driver.set_watts(0, 600)
    output = node.undo("a")
    assert (output["limit_watts"], node.watts()) == (600, 600)
    assert "another process set it after this agent set 560 W" in output["note"]
    assert len(node.driver.sets()) == 1


def test_caps_end_when_another_user_sets_a_limit(node: Node) -> None:
    """The agent notices it without a command, and sets nothing against the user, by leases neither."""
    node.cap("a", percent=80)
    node.driver.set_watts(0, 300)
    node.passes(31)
    assert node.renew("a") == {
        "renewed": [],
        "unknown": ["a"],
        "ended": {"a": "another process had changed the limit"},
    }
    node.passes(3600)
    assert node.watts() == 300
    assert node.undo("a")["note"] == "another process had changed the limit"


def test_a_cap_after_another_users_limit_is_reverted_to_that_limit(node: Node) -> None:
    """The other user's limit is now the one from before the first cap."""
    node.cap("a", percent=60)
    node.driver.set_watts(0, 650)
    assert node.cap("b", percent=80)["previous_watts"] == 650
    assert node.watts() == 560
    assert node.undo("b")["limit_watts"] == 650
    assert node.undo("a")["nothing_to_undo"]


def test_a_default_set_by_another_user_while_the_agent_watches_is_respected(node: Node) -> None:
    """The driver cannot have forgotten the cap: it was never unavailable."""
    node.cap("a", percent=80)
    node.driver.set_watts(0, 700)
    node.passes(31)
    assert node.watts() == 700
    assert node.renew("a")["unknown"] == ["a"]


# --- the driver forgets, GPUs come and go -------------------------------------------------------------------------


def test_a_cap_forgotten_by_the_driver_is_reapplied(node: Node) -> None:
    """The driver was reloaded: while its lease runs, the server still needs the cap."""
    node.driver.set_watts(0, 650)
    node.cap("a", percent=80)
    node.driver.reload()
    assert node.watts() == 700
    node.passes(31)
    assert node.watts() == 560
    assert node.undo("a")["limit_watts"] == 650


def test_a_cap_forgotten_by_the_driver_is_reapplied_once_nvml_is_reopened(node: Node) -> None:
    """A scrape of the GPUs' metrics, for example, reopens it."""
    node.cap("a", percent=80)
    node.passes(5)
    node.driver.reload()
    node.gpus.inventory()
    node.passes(1)
    assert node.watts() == 560


def without_persistence() -> tuple[Card, ...]:
    return tuple(replace(card, persistence=False) for card in cards(2))


@pytest.mark.parametrize(("gpus", "left"), [(without_persistence(), 560), (cards(2), 700)], ids=["off", "persistence"])
def test_a_limit_changed_during_another_gpus_reset(make_node: Callable[..., Node], gpus: Any, left: float) -> None:
    """NVML is closed then. A driver without persistence mode and clients keeps no limit; with it, it was a person."""
    node = make_node(gpus)
    node.cap("a", percent=80)
    node.gpus.while_closed(["GPU-other"], lambda: node.driver.set_watts(0, 700))
    node.passes(31)
    assert node.watts() == left


def looking_for_another_gpu(node: Node, monkeypatch: pytest.MonkeyPatch, forgets: bool) -> list[float]:
    """NVML is closed and opened for that each minute. A driver without persistence mode and clients, which the
    stand-in does not model, keeps no limit meanwhile. Return the times of the closings."""
    close, closings = pynvml.nvmlShutdown, []

    def close_and_forget() -> None:
        close()
        closings.append(node.boottime)
        if forgets:
            node.driver.set_watts(0, 700)

    monkeypatch.setattr(pynvml, "nvmlShutdown", close_and_forget)
    node.gpus.power(SECOND)
    node.driver.lose(1)
    with pytest.raises(GpuLost):
        node.gpus.power(SECOND)
    return closings


def test_a_cap_forgotten_during_the_search_for_another_gpu_is_reapplied(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node(without_persistence())
    node.cap("a", percent=80)
    closings = looking_for_another_gpu(node, monkeypatch, forgets=True)
    node.passes(150)
    assert len(closings) == 2
    node.passes(31)
    assert node.watts() == 560
    assert node.undo("a")["limit_watts"] == 700


@pytest.mark.parametrize("watts", [700, 650])
@pytest.mark.parametrize("forgets", [True, False])
def test_another_users_limit_is_respected_during_the_search_for_another_gpu(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, forgets: bool, watts: float
) -> None:
    """This holds whether or not NVML was closed between that decision and the agent's next check."""
    node = make_node(without_persistence())
    looking_for_another_gpu(node, monkeypatch, forgets)
    for seconds in range(60, 120, 5):
        node.driver.set_watts(0, 700)
        cap = f"a{seconds}"
        node.cap(cap, percent=80)
        node.passes(seconds)
        node.driver.set_watts(0, watts)
        node.passes(31)
        assert node.watts() in ({watts, 700} if forgets else {watts})
        assert node.renew(cap)["unknown"] == [cap]


def test_a_forgotten_limit_that_was_reapplied_is_no_later_excuse(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node(without_persistence())
    node.cap("a", percent=80)
    looking_for_another_gpu(node, monkeypatch, forgets=True)
    node.passes(92)
    assert node.watts() == 560
    node.driver.lose(1, lost=False)
    node.passes(92)
    node.driver.set_watts(0, 700)
    node.passes(31)
    assert node.watts() == 700


@pytest.mark.parametrize("is_reopened", [False, True])
def test_a_forgotten_limit_that_a_user_reapplied_is_no_later_excuse(
    make_node: Callable[..., Node], is_reopened: bool
) -> None:
    """The agent has nothing to set then. It sees the user's limit at its next check, or when it closes NVML."""
    node = make_node(without_persistence())
    node.cap("a", percent=80)
    node.gpus.while_closed(["GPU-other"], lambda: node.driver.set_watts(0, 700))
    node.gpus.inventory()
    node.driver.set_watts(0, 560)
    if is_reopened:
        node.gpus.while_closed(["GPU-other"], lambda: None)
        node.gpus.inventory()
    else:
        node.passes(31)
    node.driver.set_watts(0, 700)
    node.passes(31)
    assert node.watts() == 700
    assert node.renew("a")["unknown"] == ["a"]


def test_a_cap_forgotten_while_the_agent_was_down_is_reapplied(node: Node) -> None:
    """For example, after a restart of the machine; it is reapplied when the agent starts."""
    node.cap("a", percent=80)
    node.driver.reload()
    node.restart()
    assert node.expiry.due() is not None
    assert node.expiry.due() <= 0
    node.expiry.run()
    assert node.watts() == 560


def test_a_missing_gpu_keeps_its_pending_undo(node: Node) -> None:
    """The undo fails for now, and the agent reverts by itself when the GPU answers again."""
    node.driver.set_watts(0, 650)
    node.cap("a", percent=80)
    node.driver.lose(0)
    with pytest.raises(CommandFailed, match="keeps trying"):
        node.undo("a")
    node.restart()
    node.passes(600)
    assert node.control.ledger.of(FIRST).needs_reconciling
    node.driver.lose(0, lost=False)
    node.passes(60)
    assert node.watts() == 650
    assert node.expiry.due() is None


def test_a_missing_gpu_that_returns_with_its_default_gets_the_previous_limit(node: Node) -> None:
    """It came back with its default, and had had less."""
    node.driver.set_watts(0, 650)
    node.cap("a", percent=80)
    node.driver.lose(0)
    with pytest.raises(CommandFailed):
        node.undo("a")
    node.driver.lose(0, lost=False)
    node.driver.reload()
    node.passes(60)
    assert node.watts() == 650


def test_a_card_in_mig_mode_is_capped_as_a_whole(make_node: Callable[..., Node]) -> None:
    """The driver has to allow it."""
    node = make_node((Card(uuid=FIRST, mig=True),))
    assert node.cap("a", percent=80)["limit_watts"] == 560


@pytest.mark.parametrize("name", ["watt", "nodes", "Percent"])
def test_an_unknown_parameter_is_rejected_by_its_name(node: Node, name: str) -> None:
    """A typing error must not change the cap into another one."""
    with pytest.raises(CommandRejected, match=f"does not know '{name}'; it takes 'watts', 'percent'"):
        node.cap("a", percent=80, **{name: 200})
    assert node.watts() == 700
