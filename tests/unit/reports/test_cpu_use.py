"""The processors that ranks use: the median, both ends, and who is far off."""

from __future__ import annotations

from trainmedic_server.ports.metric_history import MetricSeries
from trainmedic_server.reports.cpu_use import cpu_use

MINUTES = [60.0 * number for number in range(1, 11)]


def rank(number: int, cores: float, points: int = 10) -> MetricSeries:
    labels = {"rank": str(number), "rank_node": f"node-{number}"}
    return MetricSeries(labels, [(at, cores) for at in MINUTES[:points]])


def test_those_with_the_most_and_the_fewest_are_told_apart() -> None:
    """An outlier has over twice the median's, or under half of it."""
    made = cpu_use([(at, 4.0) for at in MINUTES], [rank(0, 4.2), rank(1, 9.0), rank(2, 1.0), rank(3, 3.5)])
    assert made is not None
    assert made.median_cores == 4
    assert [(each.rank, each.is_outlier) for each in made.highest] == [("1", True), ("0", False)]
    assert [(each.rank, each.is_outlier) for each in made.lowest] == [("2", True), ("3", False)]


def test_small_differences_and_short_times_make_no_outlier() -> None:
    """A twentieth of a core is a fifth of a quarter; a rank that was an extreme once says nothing of its average."""
    made = cpu_use([(at, 0.25) for at in MINUTES], [rank(0, 0.05), rank(1, 8.0, points=2)])
    assert made is not None
    assert [(each.rank, each.is_outlier) for each in (*made.highest, *made.lowest)] == [("0", False)]


def test_what_was_not_measured_is_not_nothing() -> None:
    """Without a median there is no figure at all."""
    assert cpu_use([], [rank(0, 4.0)]) is None
