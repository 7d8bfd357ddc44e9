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
def test_each_way_to_be_wrong_is_seen(reaction: Reaction) -> None:
    """A run that acts on more, less or something else is not right, nor is one that gives nothing back."""
    assert Result(sending(), RIGHT).is_right
    assert not Result(sending(), reaction).is_right


def test_a_refusal_without_a_reason_is_wrong() -> None:
    """The reason why nothing was done must reach people."""
    refusing = CASE.model_copy(update={"expect": (Outcome(decision="target_unknown"),), "names_one": False})
    (only,) = cases.sendings(refusing)
    assert Result(only, Reaction("target_unknown", reason="no label names the node")).is_right
    assert not Result(only, Reaction("target_unknown")).is_right


def test_a_refusal_lowers_the_share_and_is_no_wrong_act() -> None:
    """The share counts what should act; a change that no outcome allows is counted apart."""
    board = Scoreboard()
    board.add(Result(sending(), RIGHT))
    board.add(Result(sending(), replace(RIGHT, decision="target_unknown", changes=())))
    assert (board.share, board.wrong_acts) == (0.5, [])
    board.add(Result(sending(), replace(RIGHT, changes=("cordon dgx-a07",))))
    assert board.wrong_acts == ["hot:GPUTemperatureHigh"]


def test_every_spelling_of_a_gpu_is_one_target() -> None:
    """By index, and by UUID with and without its prefix; on another node it is something else."""
    uuid = fleet.NODES["dgx-a07"].gpus[1]
    spellings = ("1", uuid, uuid.upper(), uuid.removeprefix("GPU-"))
    assert {fleet.canonical(f"gpu:dgx-a07/{spelling}") for spelling in spellings} == {"gpu:dgx-a07/1"}
    assert fleet.canonical(f"gpu:dgx-a08/{uuid}") == f"gpu:dgx-a08/{uuid}"


def test_a_case_about_something_that_the_fleet_lacks_is_refused() -> None:
    """A typing error in an expected change would otherwise wait for an impossible outcome."""
    with pytest.raises(ValidationError, match="changes nothing that the fleet has"):
        Outcome(decision="started", target="gpu:dgx-a07/9", acts=("cap dgx-a07/9 560",))
