"""Texts that quote what others wrote are bounded where the value is made, and where a copy of it is."""

from __future__ import annotations

from msgspec.structs import replace

from tests.support.findings import RULES
from trainmedic_core.problems import FileProblem
from trainmedic_server.domain.reaction import Reaction

LONG = "x" * 10_000


def test_a_reason_is_cut_in_a_copy_too() -> None:
    """What msgspec does since 0.21: before that a copy was not checked."""
    made, copied = Reaction("cool", "not_matched", LONG), replace(Reaction("cool", "not_matched"), reason=LONG)
    assert made == copied
    assert len(made.reason) == 500


def test_a_message_is_cut_in_a_copy_too() -> None:
    """A key or name that is wrong may have as many characters as a file."""
    made, copied = FileProblem("a.yaml", 1, 1, LONG), replace(FileProblem("a.yaml", 1, 1, ""), message=LONG)
    assert made == copied
    assert len(made.message) == 1_000


def test_rules_are_in_the_order_of_their_names_in_a_copy_too() -> None:
    """By that order agents and server know the same set by the same version."""
    backwards = tuple(reversed(RULES.rules))
    assert len(backwards) > 1
    assert replace(RULES, rules=backwards) == RULES
