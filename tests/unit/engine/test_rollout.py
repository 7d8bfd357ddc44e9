"""The planner of a group's rollout, for any settings and any ends of members, with kills in between."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from trainmedic_server.domain.group import Member
from trainmedic_server.domain.playbook import Rollout
from trainmedic_server.domain.run import Decision, Status
from trainmedic_server.engine import rollout
from trainmedic_server.engine.rollout import GroupProgress, RolloutOver, StartMembers, WaitForMembers

SHARES = st.one_of(st.integers(1, 6), st.sampled_from(("1%", "10%", "33.3%", "100%")))
SETTINGS = st.fixed_dictionaries(
    {
        "max_errors": st.one_of(st.integers(0, 4), st.sampled_from(("0%", "20%", "100%"))),
        "order": st.sampled_from(("name", "random", "idle_first")),
    },
    optional={"serial": st.one_of(SHARES, st.lists(SHARES, min_size=1, max_size=3))},
)
ENDS = st.sampled_from(("succeeded", "succeeded", "succeeded", "failed", "cancelled", "not_started"))


def member(target: str, batch: int, status: str) -> Member:
    status_of = Status(status)
    return Member(target, f"run of {target}", batch, status_of, Decision.STARTED, status_of.is_open)


@given(SETTINGS, st.integers(1, 40), st.lists(ENDS, min_size=40, max_size=40), st.randoms(), st.integers(0, 60))
def test_a_rollout_keeps_its_promises(
    written: dict[str, object], total: int, ends: list[str], chance: random.Random, stopped_after: int
) -> None:
    """At most a batch in flight; the next one only after the one before; nothing starts after too many errors or a
    stop; at most one run for each member; the counts equal the members."""
    settings = Rollout.model_validate(written)
    targets = [f"node:n{number}" for number in range(total)]
    progress, deeds, fates = GroupProgress(targets), 0, dict(zip(targets, ends, strict=False))
    while True:
        may_start = deeds < stopped_after
        then = rollout.next_of(settings, progress, may_start=may_start)
        again = GroupProgress(targets, list(progress.begun.values()))  # as read by the next server
        assert rollout.next_of(settings, again, may_start=may_start) == then
        assert again.counts == progress.counts
        if isinstance(then, RolloutOver):
            break
        deeds += 1
        if isinstance(then, WaitForMembers):
            running = [each for each in progress.begun.values() if each.is_open]
            assert running
            one = chance.choice(running)
            progress.note(member(one.target, one.batch, fates[one.target]))
            continue
        assert may_start
        assert progress.errors <= settings.errors_allowed(total)
        last = progress.last_batch
        if last is not None and then.batch != last:
            assert then.batch == last + 1
            assert not progress.open
        chosen = rollout.chosen(settings, progress.left(), then.count, "run", lambda key: key.endswith("1"))
        assert len(chosen) == then.count > 0
        assert not set(chosen) & progress.begun.keys()
        for target in chosen:
            progress.note(member(target, then.batch, "running"))
        assert progress.open <= settings.batch(then.batch, total)
    counts = progress.counts
    assert not progress.open
    assert bool(then.error) == (progress.errors > settings.errors_allowed(total))
    assert counts.not_begun == len(progress.left())
    parts = (counts.succeeded, counts.failed, counts.skipped, counts.cancelled, counts.not_begun)
    assert sum(parts) == counts.total == total
    if not then.error and deeds < stopped_after:
        assert not counts.not_begun


def test_batches_of_each_form() -> None:
    """A number, a percentage (rounded up, at least 1) or a list whose last entry repeats; by default 1, then double."""
    written = {"serial": [1, "10%", "25%"]}
    assert [Rollout.model_validate(written).batch(index, 24) for index in range(4)] == [1, 3, 6, 6]
    assert [Rollout().batch(index, 10) for index in range(5)] == [1, 2, 4, 8, 10]
    assert Rollout.model_validate({"serial": "1%"}).batch(0, 10) == 1
    assert Rollout.model_validate({"serial": 50}).batch(0, 10) == 10
    assert Rollout.model_validate({"max_errors": "5%"}).errors_allowed(39) == 1
    assert Rollout.model_validate({"max_errors": "30%"}).errors_allowed(10) == 3
    assert Rollout().errors_allowed(1000) == 0


def test_orders_of_members() -> None:
    """By name as listed; idle ones first, otherwise as listed; at random, but the same after a restart."""
    left = [f"node:n{number}" for number in range(1, 30)]

    def chosen(order: str, run_id: str = "a") -> list[str]:
        busy = {"node:n1", "node:n2"}
        return rollout.chosen(Rollout.model_validate({"order": order}), left, 3, run_id, busy.__contains__)

    assert chosen("name") == ["node:n1", "node:n2", "node:n3"]
    assert chosen("idle_first") == ["node:n3", "node:n4", "node:n5"]
    assert chosen("random") == chosen("random")
    assert chosen("random") != chosen("random", "b")


def test_thousands_start_in_portions() -> None:
    """A portion is looked at before the next, or `serial: 100%` could not stop."""
    settings = Rollout.model_validate({"serial": "100%"})
    targets = [f"node:n{number}" for number in range(1000)]
    progress = GroupProgress(targets)
    assert rollout.next_of(settings, progress, may_start=True) == StartMembers(0, rollout.AT_ONCE)
    for target in targets[: rollout.AT_ONCE]:
        progress.note(member(target, 0, "failed"))
    assert isinstance(rollout.next_of(settings, progress, may_start=True), RolloutOver)
