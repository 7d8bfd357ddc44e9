"""The comparison of what came with what was expected: it must see each kind of wrong outcome."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from tests.acceptance.strangers import cases, fleet
from tests.acceptance.strangers.cases import Case, Outcome, Sending
from tests.acceptance.strangers.scoreboard import Result, Scoreboard
from tests.acceptance.strangers.site import Reaction

CAP = "cap dgx-a07/0 560"
CASE = Case(
    id="hot",
    source="a test of the comparison",
    alert="GPUTemperatureHigh",
    ours="GPUTemperatureHigh",
    labels={"node": "dgx-a07", "gpu": "0"},
    expect=(Outcome(decision="started", target="gpu:dgx-a07/0", acts=(CAP,)),),
    names_one=True,
)
RIGHT = Reaction("started", target="gpu:dgx-a07/0", changes=(CAP,))


def sending() -> Sending:
    """The case under its only name."""
    (only,) = cases.sendings(CASE)
    return only


@pytest.mark.parametrize(
    "reaction",
    [
        replace(RIGHT, decision="target_ambiguous", changes=()),
        replace(RIGHT, target="gpu:dgx-a08/0"),
        replace(RIGHT, changes=()),
        replace(RIGHT, changes=(CAP, "cap dgx-a08/0 560")),
        replace(RIGHT, left_over=(CAP,)),
    ],
    ids=["refused", "another target", "no act", "one act too many", "not given back"],
)
def test_every_kind_of_wrong_reaction_is_detected(reaction: Reaction) -> None:
    """A run that acts on more, less or a different target is wrong, and so is one that reverts nothing."""
    assert Result(sending(), RIGHT).is_right
    assert not Result(sending(), reaction).is_right


def test_a_refusal_without_a_reason_is_wrong() -> None:
    """The reason for doing nothing must reach the users."""
    refusing = CASE.model_copy(update={"expect": (Outcome(decision="target_unknown"),), "names_one": False})
    (only,) = cases.sendings(refusing)
    assert Result(only, Reaction("target_unknown", reason="no label names the node")).is_right
    assert not Result(only, Reaction("target_unknown")).is_right


def test_a_refusal_lowers_the_share_and_is_not_a_wrong_act() -> None:
    """The share counts cases that should act; a change that no outcome allows is counted separately."""
    board = Scoreboard()
    board.add(Result(sending(), RIGHT))
    board.add(Result(sending(), replace(RIGHT, decision="target_unknown", changes=())))
    assert (board.share, board.wrong_acts) == (0.5, [])
    board.add(Result(sending(), replace(RIGHT, changes=("cordon dgx-a07",))))
    assert board.wrong_acts == ["hot:GPUTemperatureHigh"]


def test_every_spelling_of_a_gpu_is_the_same_target() -> None:
    """The spellings are the index and the UUID with or without its prefix; another node is another target."""
    uuid = fleet.NODES["dgx-a07"].gpus[1]
    spellings = ("1", uuid, uuid.upper(), uuid.removeprefix("GPU-"))
    assert {fleet.canonical(f"gpu:dgx-a07/{spelling}") for spelling in spellings} == {"gpu:dgx-a07/1"}
    assert fleet.canonical(f"gpu:dgx-a08/{uuid}") == f"gpu:dgx-a08/{uuid}"


def test_a_case_about_a_target_missing_from_the_fleet_is_rejected() -> None:
    """A typo in an expected change would otherwise wait for an impossible outcome."""
    with pytest.raises(ValidationError, match="changes nothing that the fleet has"):
        Outcome(decision="started", target="gpu:dgx-a07/9", acts=("cap dgx-a07/9 560",))
