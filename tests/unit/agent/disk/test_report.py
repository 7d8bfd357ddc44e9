"""What comes back of a cleaning."""

from __future__ import annotations

from trainmedic.wire.output import fitting
from trainmedic_agent.disk.report import Reason, RuleCounters, outputs

FOUND = (
    Reason.YOUNG,
    Reason.SIZE,
    Reason.HARD_LINK,
    Reason.OPEN,
    Reason.READ,
    Reason.CHANGED,
    Reason.NOT_PERMITTED,
    Reason.BUSY,
)


class Place:
    def path(self, name: str = "") -> str:
        return f"/scratch/{'d' * 180}/{name}"


def counters(rules: int) -> dict[str, RuleCounters]:
    every = {f"rule-{number}": RuleCounters() for number in range(rules)}
    for part in every.values():
        for reason in FOUND:
            for name in "abcde":
                part.leave(reason, Place(), name)
    return every


def test_the_output_of_many_rules_has_fewer_examples() -> None:
    """The counts stay: an oversized reply would lose them all."""
    few, many = outputs(counters(2)), outputs(counters(20))
    assert fitting(many) is many
    for output, examples in ((few, 3), (many, 1)):
        for rule in output.values():
            assert rule["left"].keys() == set(FOUND)
            assert all(left["count"] == 5 and len(left["examples"]) == examples for left in rule["left"].values())


def test_the_output_of_very_many_rules_has_no_examples() -> None:
    every = outputs(counters(100))
    assert fitting(every) is every
    assert every["rule-99"]["left"]["open"] == {"count": 5}


def test_the_output_of_rules_with_very_many_roots_names_some_of_them() -> None:
    """Rules may have any number of roots, and each is rejected with a message."""
    every = counters(20)
    for part in every.values():
        part.refused_roots = {f"/scratch/{number}": "it belongs to another user" for number in range(200)}
        part.access_times = dict.fromkeys(part.refused_roots, "kept")
    output = outputs(every)
    assert fitting(output) is output
    for rule in output.values():
        assert len(rule["refused_roots"]) == len(rule["access_times"]) == 10
        assert rule["roots_left_out"] == 2 * 190
