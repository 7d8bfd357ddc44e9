"""RecordComparison with the node's own record."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from trainmedic_agent.health.baseline import KEPT_SAMPLES, LEAST_SAMPLES, Histories, RecordComparison, compare
from trainmedic_agent.health.checks import HealthCheck, HealthValue, HealthVerdict, ValueKind

BEGIN = datetime(2026, 11, 1, tzinfo=UTC)
BROKEN = HealthCheck("gpus", "", HealthVerdict.FAILED, "7", "8")


class Node:
    """A node that is checked at the given hours."""

    def __init__(self) -> None:
        self.known: Histories = {}
        self.hour = 0.0

    def check(self, value: HealthValue, hours: float = 1.0, others: Sequence[HealthCheck] = ()) -> RecordComparison:
        self.hour += hours
        result = compare([value], self.known, others, BEGIN + timedelta(hours=self.hour))
        self.known = {**self.known, **result.histories}
        return result

    def verdict(self, value: HealthValue, hours: float = 1.0, others: Sequence[HealthCheck] = ()) -> str | None:
        checks = self.check(value, hours, others).checks
        return str(checks[0].verdict) if checks else None


def speed(amount: float) -> HealthValue:
    return HealthValue("all_reduce_speed", "8 ranks of nccl", ValueKind.SPEED, amount, "GB/s")


def rate(amount: float) -> HealthValue:
    return HealthValue("port_rate", "mlx5_0/1", ValueKind.STATE, amount, "Gb/s")


def errors(amount: float) -> HealthValue:
    return HealthValue("link_errors", "mlx5_0/1", ValueKind.COUNTER, amount)


@pytest.fixture
def node() -> Node:
    return Node()


def test_a_value_is_compared_after_enough_samples(node: Node) -> None:
    """Until then it is listed as learning, and no check makes a claim."""
    for _ in range(LEAST_SAMPLES):
        result = node.check(speed(400))
        assert (result.checks, result.learning) == ([], ["all_reduce_speed 8 ranks of nccl"])
    result = node.check(speed(399))
    assert result.learning == []
    assert result.checks == [
        HealthCheck(
            "all_reduce_speed", "8 ranks of nccl", HealthVerdict.OK, "399 GB/s", "320 GB/s or more, usually 400 GB/s"
        )
    ]


def test_a_speed_20_percent_below_its_median_is_degraded(node: Node) -> None:
    """The lower value does not become the baseline, however often it is repeated."""
    for amount in (398, 400, 402, 400, 400):
        node.check(speed(amount))
    assert node.verdict(speed(321)) == "ok"
    for _ in range(20):
        assert node.verdict(speed(310)) == "degraded"
    assert node.verdict(speed(400)) == "ok"
    assert 310 not in node.known["all_reduce_speed 8 ranks of nccl"].samples


def test_a_speed_that_always_varies_has_a_wider_tolerance(node: Node) -> None:
    """The tolerance is three deviations, down to half of the usual value."""
    for amount in (400, 350, 450, 370, 430):
        node.check(speed(amount))
    assert node.verdict(speed(260)) == "degraded"
    assert node.verdict(speed(280)) == "ok"
    wild = Node()
    for amount in (400, 200, 600, 300, 500):
        wild.check(speed(amount))
    assert wild.verdict(speed(199)) == "degraded"
    assert wild.verdict(speed(201)) == "ok"


def test_a_lower_state_is_degraded_at_once_and_failed_at_zero(node: Node) -> None:
    """A link at half its rate is degraded, and one that is down has failed. One that was never up is not judged."""
    for _ in range(LEAST_SAMPLES):
        node.check(rate(400))
    assert node.verdict(rate(200), hours=0.1) == "degraded"
    assert node.verdict(rate(0), hours=0.1) == "failed"
    assert node.verdict(rate(400), hours=0.1) == "ok"
    unused = Node()
    assert [unused.verdict(rate(0)) for _ in range(3 * LEAST_SAMPLES)] == [None] * 3 * LEAST_SAMPLES


def test_a_port_that_vanished_is_unknown(node: Node) -> None:
    """Other parts may appear and disappear, and so may a port that was never up."""
    for _ in range(LEAST_SAMPLES):
        node.check(rate(400))
        node.check(HealthValue("link_rate", "eth0", ValueKind.STATE, 100))
        node.check(HealthValue("port_rate", "mlx5_9/1", ValueKind.STATE, 0))
    result = compare([], node.known, [], BEGIN + timedelta(hours=node.hour))
    assert result.checks == [
        HealthCheck("port_rate", "mlx5_0/1", HealthVerdict.UNKNOWN, "no longer there", "usually 400")
    ]


def test_states_and_counters_have_one_sample_per_hour(node: Node) -> None:
    """A node is checked every few minutes, and a baseline of a few minutes means little."""
    for _ in range(50):
        node.check(rate(400), hours=0.05)
    assert len(node.known["port_rate mlx5_0/1"].samples) == 3


def test_errors_are_compared_by_their_growth(node: Node) -> None:
    """A burst shows at the next check, and the alarm ends two hours after the burst."""
    count = 7000.0
    for _ in range(LEAST_SAMPLES + 2):
        count += 20
        assert node.verdict(errors(count)) in (None, "ok")
    assert node.verdict(errors(count + 90), hours=0.1) == "ok"
    assert node.verdict(errors(count + 500), hours=0.1) == "degraded"
    for _ in range(40):
        last = node.verdict(errors(count + 500), hours=0.1)
    assert last == "ok"
    assert max(node.known["link_errors mlx5_0/1"].samples) < 100


def test_a_reset_counter_starts_again(node: Node) -> None:
    """A counter is reset after a restart of the node, and after the clock was set back."""
    for hour in range(LEAST_SAMPLES + 2):
        node.check(errors(hour * 10))
    assert node.verdict(errors(0)) is None
    assert node.verdict(errors(5)) == "ok"
    assert node.verdict(errors(6), hours=-30) is None
    assert node.verdict(errors(5000), hours=0.2) == "degraded"


@pytest.mark.parametrize("verdict", [HealthVerdict.FAILED, HealthVerdict.UNKNOWN])
def test_nothing_is_learnt_from_a_failed_result(node: Node, verdict: HealthVerdict) -> None:
    """Healthy parts are not learnt either. A degraded check of another part does no harm."""
    for _ in range(2 * LEAST_SAMPLES):
        node.check(speed(100), others=[HealthCheck("gpus", "", verdict, "7", "8")])
    assert node.verdict(speed(400)) is None
    node.check(speed(400), others=[HealthCheck("pcie_width", "eth0", HealthVerdict.DEGRADED, "x8", "x16")])
    assert node.known["all_reduce_speed 8 ranks of nccl"].samples == (400, 400)


def test_the_record_is_bounded(node: Node) -> None:
    for amount in range(KEPT_SAMPLES + 50):
        node.check(speed(1000 + amount))
    assert len(node.known["all_reduce_speed 8 ranks of nccl"].samples) == KEPT_SAMPLES
