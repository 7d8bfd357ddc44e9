"""The watch of drains, holds and reservations: what counts as lost, and which leased drain is made again."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.clocks import ManualClock
from tests.unit.actions.test_slurm import JOB, NODE, NOW, OneJob, OneNode, do
from trainmedic_server.actions import registry
from trainmedic_server.actions.slurm_watched import LeasedNodeAction, WatchedAction
from trainmedic_server.errors import ActionFailure, ClusterRefused, ClusterUnavailable, ObjectMissing, PermanentFailure
from trainmedic_server.ports.actions import LeasedAction, LeasedEffect, Renewal, Services
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.slurm import SlurmJob, SlurmNode, SlurmReservation


async def renewed(
    slurm: OneNode,
    run_id: str = "a",
    again: bool = False,
    action: LeasedAction | None = None,
    made_at: datetime | None = None,
    **params: Any,
) -> Sequence[Renewal]:
    action = action or drains(slurm)
    effect = LeasedEffect("c-1", run_id, "drain", NODE, params, True, again, made_at)
    return await action.renew([effect], NOW + timedelta(seconds=10))


def drains(slurm: OneNode, clock: Clock | None = None) -> LeasedAction:
    services = Services(clock or ManualClock(NOW), None, None, slurm=slurm, slurm_topology=lambda: slurm.topology)  # type: ignore[arg-type]  # no bus and no HTTP is used
    action = registry.build(services).get("slurm.drain")
    assert isinstance(action, LeasedAction)
    return action


async def test_a_leased_drain_is_renewed_while_its_reason_is_unchanged() -> None:
    """A reason changed by a user ends the lease, and the drain stays."""
    slurm = OneNode()
    output = await do(slurm, "slurm.drain", target=NODE, lease="10m")
    assert (output["lease_seconds"], slurm.known.resume_after) == (600.0, NOW + timedelta(minutes=10))
    slurm.known = replace(slurm.known, resume_after=NOW)
    assert [each.outcome for each in await renewed(slurm, lease="10m")] == ["renewed"]
    assert slurm.known.resume_after == NOW + timedelta(minutes=10)
    slurm.known = replace(slurm.known, reason="Mia: keep it out", resume_after=None)
    (renewal,) = await renewed(slurm, lease="10m")
    assert (renewal.outcome, renewal.has_expired, slurm.known.resume_after) == ("lost", False, None)


FREE = SlurmNode("n1", "n1", "n1", frozenset({"IDLE"}), "")
MINUTE = 60.0


async def leased(clock: ManualClock) -> tuple[OneNode, LeasedAction]:
    """A drain with a lease of ten minutes, just renewed."""
    slurm = OneNode()
    await do(slurm, "slurm.drain", target=NODE, lease="10m")
    action = drains(slurm, clock)
    await renewed(slurm, action=action, lease="10m")
    return slurm, action


async def test_an_expired_drain_is_reapplied_only_where_no_other_user_has_acted() -> None:
    clock = ManualClock(NOW)
    slurm, action = await leased(clock)
    slurm.known = FREE
    clock.sleep(11 * MINUTE)
    (renewal,) = await renewed(slurm, action=action, lease="10m")
    assert (renewal.outcome, renewal.has_expired) == ("lost", True)
    (renewal,) = await renewed(slurm, again=True, action=action, lease="10m")
    assert renewal.outcome == "renewed"
    assert slurm.known.reason.startswith("trainmedic:a ")
    slurm.known = replace(slurm.known, reason="NHC: check_hw")
    (renewal,) = await renewed(slurm, again=True, lease="10m")
    assert (renewal.outcome, slurm.known.reason) == ("lost", "NHC: check_hw")


async def test_a_drain_is_read_once_and_then_only_if_its_node_accepts_jobs() -> None:
    """Another user's drain is no loss, because the node is out of service."""
    slurm = OneNode()
    await do(slurm, "slurm.drain", target=NODE)
    action, slurm.readings = drains(slurm), 0
    assert [each.outcome for each in await renewed(slurm, action=action)] == ["renewed"]
    assert not await renewed(slurm, action=action)
    assert slurm.readings == 1
    slurm.known = replace(slurm.known, reason="NHC: check_hw")
    assert not await renewed(slurm)


async def test_a_leased_drain_is_checked_as_often_as_others_and_renewed_every_third() -> None:
    """A drain that a user ended is noticed at the next check; an active one needs no call in between."""
    clock = ManualClock(NOW)
    slurm, action = await leased(clock)
    readings = slurm.readings
    for _ in range(13):
        clock.sleep(15)
        assert not await renewed(slurm, action=action, lease="10m")
    assert slurm.readings == readings
    slurm.known = replace(slurm.known, resume_after=NOW)
    clock.sleep(15)
    assert [each.outcome for each in await renewed(slurm, action=action, lease="10m")] == ["renewed"]
    assert slurm.known.resume_after == NOW + timedelta(minutes=10)
    slurm.known = FREE
    clock.sleep(15)
    (renewal,) = await renewed(slurm, action=action, lease="10m")
    assert (renewal.outcome, renewal.has_expired) == ("lost", False)


class Counting(OneNode):
    """Counts leases, by the test's clock."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock
        self.count = 0
        self.fails: ActionFailure | None = None

    async def drain(self, node: str, reason: str, resume_after: timedelta | None = None) -> None:
        if self.fails is not None:
            raise self.fails
        self.count += 1
        await super().drain(node, reason, resume_after)
        if resume_after is not None:
            self.known = replace(self.known, resume_after=self.clock.now() + resume_after)


async def shared(clock: ManualClock, first: str, second: str) -> tuple[Counting, LeasedAction, list[LeasedEffect]]:
    """A drain that the runs ``a`` and ``b`` share, with these leases."""
    slurm, leases = Counting(clock), {"a": first, "b": second}
    for run_id, lease in leases.items():
        await do(slurm, "slurm.drain", run_id, NODE, lease=lease)
    slurm.count = 0
    effects = [
        LeasedEffect(f"c-{run_id}", run_id, "drain", NODE, {"lease": lease}, True, False, NOW)
        for run_id, lease in leases.items()
    ]
    return slurm, drains(slurm, clock), effects


async def outage(clock: ManualClock, slurm: Counting, action: LeasedAction, effects: Sequence[LeasedEffect]) -> None:
    """Renew a shared drain, and then not until its lease has ended it."""
    clock.sleep(15)
    await action.renew(effects, clock.now())
    assert slurm.known.resume_after is not None
    clock.sleep((slurm.known.resume_after - clock.now()).total_seconds() + 1)
    slurm.known = FREE
    assert [each.has_expired for each in await action.renew(effects, clock.now())] == [True, True]


@pytest.mark.parametrize(("other", "drains_made"), [("1h", 2), ("10m", 7)])
async def test_a_shared_leased_drain_is_renewed_every_third_of_each_lease(other: str, drains_made: int) -> None:
    """A shorter end set by the other run is replaced before a third of the longer lease is left."""
    clock = ManualClock(NOW)
    slurm, action, effects = await shared(clock, "1h", other)
    for _ in range(40):
        clock.sleep(15)
        assert len(await action.renew(effects, clock.now())) == 2
    assert slurm.count == drains_made


async def test_a_shared_drain_is_reapplied_for_each_run_whose_lease_has_expired() -> None:
    """After an outage, the second run joins the first one's new drain, also in a later round."""
    clock = ManualClock(NOW)
    slurm, action, effects = await shared(clock, "1h", "10m")
    await outage(clock, slurm, action, effects)
    for effect in effects:
        assert [each.has_expired for each in await action.renew([effect], clock.now())] == [True]
        (renewal,) = await action.renew([replace(effect, again=True)], clock.now())
        assert renewal.outcome == "renewed"
        clock.sleep(15)
    assert slurm.known.reason.startswith("trainmedic:a,b ")
    assert {each.outcome for each in await action.renew(effects, clock.now())} == {"renewed"}
    slurm.known = FREE
    assert not any(each.has_expired for each in await action.renew(effects, clock.now())), "a person ended it"


@pytest.mark.parametrize("left", [-1.0, 1.0])
async def test_a_shared_drain_ended_by_a_user_stays_ended(left: float) -> None:
    """The user ended it before its end by any run's last renewal, or after another run's drain."""
    clock = ManualClock(NOW)
    slurm, action, effects = await shared(clock, "10m", "1h")
    clock.sleep(15)
    await action.renew(effects, clock.now())
    assert slurm.known.resume_after is not None
    clock.sleep((slurm.known.resume_after - clock.now()).total_seconds() - left)
    slurm.known = FREE if left > 0 else replace(slurm.known, reason="Mia: fan", resume_after=None)
    assert not any(each.has_expired for each in await action.renew(effects, clock.now()))
    slurm.known = FREE
    clock.sleep(2 * 60 * MINUTE)
    assert not any(each.has_expired for each in await action.renew(effects, clock.now()))


@pytest.mark.parametrize(
    ("rounds", "by_lease"),
    [(8, False), (0, False), (8, True)],
    ids=["seen", "between two readings", "its lease ended again"],
)
async def test_a_blocked_run_does_not_redo_a_drain_ended_by_a_user_after_another_run(
    rounds: int, by_lease: bool
) -> None:
    clock = ManualClock(NOW)
    slurm, action, effects = await shared(clock, "1h", "10m")
    await outage(clock, slurm, action, effects)
    first, second = effects
    await action.renew([replace(first, again=True)], clock.now())
    for _ in range(rounds):
        clock.sleep(15)
        await action.renew(effects, clock.now())
    if by_lease:
        assert slurm.known.resume_after is not None
        clock.sleep((slurm.known.resume_after - clock.now()).total_seconds() + 1)
    slurm.known = FREE
    for _ in range(2):
        clock.sleep(15)
        assert [each.has_expired for each in await action.renew(effects, clock.now())] == [by_lease, by_lease]
    if not by_lease:
        clock.sleep(2 * 60 * MINUTE)
        await action.renew([replace(second, again=True)], clock.now())
        assert slurm.known == FREE


@pytest.mark.parametrize("is_made", [True, False])
async def test_after_another_runs_possible_drain_the_lease_does_not_prove_expiry(is_made: bool) -> None:
    clock = ManualClock(NOW)
    slurm, action, effects = await shared(clock, "1h", "10m")
    await outage(clock, slurm, action, effects)
    slurm.fails = ClusterUnavailable("no answer in 20 s", may_be_done=is_made)
    await action.renew([replace(effects[0], again=True)], clock.now())
    slurm.fails = None
    clock.sleep(15)
    assert [each.has_expired for each in await action.renew(effects, clock.now())] == [not is_made] * 2


async def test_a_leased_drain_ended_by_a_user_stays_ended() -> None:
    """This holds also after the end of its lease, and next to drains without a lease, checked more often."""
    clock = ManualClock(NOW)
    slurm, action = await leased(clock)
    slurm.known = FREE
    for _ in range(20):
        clock.sleep(MINUTE)
        await action.renew([LeasedEffect("c-2", "b", "drain", NODE, {}, True)], clock.now())
        (renewal,) = await renewed(slurm, action=action, made_at=NOW, lease="10m")
        assert (renewal.outcome, renewal.has_expired) == ("lost", False)


@pytest.mark.parametrize("others", ["Mia: fan", "trainmedic:a,b it is broken"], ids=["took it over", "shares it"])
async def test_after_another_runs_drain_the_lease_does_not_prove_expiry(others: str) -> None:
    """A drain shared by two runs has no end if one of them needs none."""
    clock = ManualClock(NOW)
    slurm, action = await leased(clock)
    slurm.known = replace(slurm.known, reason=others, resume_after=None)
    clock.sleep(3 * MINUTE)
    await renewed(slurm, action=action, lease="10m")
    slurm.known = FREE
    clock.sleep(11 * MINUTE)
    (renewal,) = await renewed(slurm, action=action, lease="10m")
    assert (renewal.outcome, renewal.has_expired) == ("lost", False)


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        ({"IDLE", "DRAIN"}, "trainmedic:b it is broken"),
        ({"IDLE", "DRAIN"}, "Mia: fan"),
        ({"DOWN", "NOT_RESPONDING"}, "Not responding"),
    ],
    ids=["another run", "a person", "Slurm"],
)
async def test_an_expired_drain_is_only_recorded_if_the_node_was_out_for_another_reason(
    states: set[str], reason: str
) -> None:
    """A user may have returned the node to service."""
    clock = ManualClock(NOW)
    slurm, action = await leased(clock)
    clock.sleep(11 * MINUTE)
    slurm.known = replace(FREE, states=frozenset(states), reason=reason)
    (renewal,) = await renewed(slurm, action=action, lease="10m")
    assert (renewal.outcome, renewal.has_expired) == ("lost", False)
    slurm.known = FREE
    clock.sleep(15)
    (renewal,) = await renewed(slurm, action=action, lease="10m")
    assert (renewal.outcome, renewal.has_expired) == ("lost", False)


async def test_a_new_server_only_reports_the_end_of_a_leased_drain() -> None:
    """The server knows neither when the lease ended nor who ended the drain."""
    slurm = OneNode()
    (renewal,) = await renewed(slurm, made_at=NOW - timedelta(hours=1), lease="10m")
    assert (renewal.outcome, renewal.has_expired) == ("lost", False)


@pytest.mark.parametrize(
    ("failure", "fails", "again"),
    [
        (ClusterUnavailable("connection refused"), "drain", True),
        (ClusterUnavailable("no answer in 20 s", may_be_done=True), "drain", False),
        (ClusterRefused("no rights"), "drain", True),
        (ClusterUnavailable("connection refused"), "read back", False),
    ],
)
async def test_an_expired_drain_is_reapplied_promptly_after_a_failure_without_effect(
    failure: ActionFailure, fails: str, again: bool
) -> None:
    """After a failure that may have had an effect, a user may have ended the drain."""

    class Failing(OneNode):
        fails = ""
        is_made = False

        async def node(self, name: str) -> SlurmNode:
            if self.fails == "read back" and self.is_made:
                raise failure
            return await super().node(name)

        async def drain(self, node: str, reason: str, resume_after: timedelta | None = None) -> None:
            if self.fails == "drain":
                raise failure
            self.is_made = True
            await super().drain(node, reason, resume_after)

    clock = ManualClock(NOW)
    slurm = Failing()
    await do(slurm, "slurm.drain", target=NODE, lease="10m")
    action = drains(slurm, clock)
    await renewed(slurm, action=action, lease="10m")
    slurm.known, slurm.fails, slurm.is_made = replace(FREE, states=frozenset({"ALLOCATED"})), fails, False
    clock.sleep(11 * MINUTE)
    for is_again in (False, True):
        (renewal,) = await renewed(slurm, again=is_again, action=action, lease="10m")
    assert renewal.outcome in ("unanswered", "refused")
    slurm.known, slurm.fails = replace(FREE, states=frozenset({"ALLOCATED"})), ""
    clock.sleep(15)
    (renewal,) = await renewed(slurm, action=action, lease="10m")
    assert (renewal.outcome, renewal.has_expired) == ("lost", again)
    await renewed(slurm, again=True, action=action, lease="10m")
    assert slurm.known.is_drained is again


async def test_a_drain_stored_by_slurm_is_not_lost_in_an_outage() -> None:
    """The outage may be slurmrestd's, and a user may have ended the drain during it."""
    clock = ManualClock(NOW)
    slurm = OneNode()
    await do(slurm, "slurm.drain", target=NODE)
    action = drains(slurm, clock)
    clock.sleep(3)
    assert await renewed(slurm, action=action, made_at=NOW)
    clock.sleep(9)
    assert await renewed(slurm, action=action, made_at=NOW), "it is read until it must be stored"
    assert not await renewed(slurm, action=action, made_at=NOW)
    slurm.known = FREE
    clock.sleep(3600)
    (renewal,) = await renewed(slurm, action=action, made_at=NOW)
    assert (renewal.outcome, renewal.has_expired) == ("lost", False)


HELD_BY_A = "[trainmedic:hold a]"


async def renewed_hold(
    slurm: OneJob,
    again: bool = False,
    action: LeasedAction | None = None,
    made_at: datetime | None = None,
) -> Sequence[Renewal]:
    services = Services(ManualClock(NOW), None, None, slurm=slurm, slurm_topology=lambda: slurm.topology)  # type: ignore[arg-type]
    action = action or registry.build(services).get("slurm.hold")  # type: ignore[assignment]
    assert isinstance(action, LeasedAction)
    effect = LeasedEffect("c-1", "a", "hold", JOB, {}, True, again, made_at, output={"job_id": "7"})
    return await action.renew([effect], NOW + timedelta(seconds=10))


async def test_a_held_job_is_read_until_the_hold_is_stored_and_then_only_if_not_held() -> None:
    slurm = OneJob()
    await do(slurm, "slurm.hold")
    services = Services(ManualClock(NOW), None, None, slurm=slurm, slurm_topology=lambda: slurm.topology)  # type: ignore[arg-type]
    action, slurm.readings = registry.build(services).get("slurm.hold"), 0
    assert isinstance(action, LeasedAction)
    (renewal,) = await renewed_hold(slurm, action=action)
    assert (renewal.outcome, renewal.node) == ("renewed", "job 7")
    assert not await renewed_hold(slurm, action=action)
    assert slurm.readings == 1
    slurm.known = replace(slurm.known, is_held=False)
    (renewal,) = await renewed_hold(slurm, action=action)
    assert (renewal.outcome, renewal.why) == ("lost", "job 7 is RUNNING and not held")
    (renewal,) = await renewed_hold(slurm, again=True, action=action)
    assert (renewal.outcome, renewal.has_expired, slurm.known.is_held) == ("lost", False, False)


@pytest.mark.parametrize("name", ["slurm.hold", "slurm.reserve"])
def test_an_effect_without_a_lease_cannot_be_reapplied(name: str) -> None:
    watched = registry.specs_only().action_class(name)
    assert issubclass(watched, WatchedAction)
    assert not issubclass(watched, LeasedNodeAction)
    assert not hasattr(watched, "make_again")


async def test_a_hold_of_an_ended_deleted_or_different_job_is_no_loss() -> None:
    slurm = OneJob()
    slurm.known = replace(slurm.known, is_held=True, admin_comment="Mia's")
    output = await do(slurm, "slurm.hold")
    assert registry.build(Services(ManualClock(NOW), None, None)).get("slurm.hold").granted(output) == timedelta(0)  # type: ignore[attr-defined, arg-type]
    assert not await renewed_hold(slurm)
    slurm.known = replace(slurm.known, is_held=False, states=frozenset({"COMPLETED"}))
    assert not await renewed_hold(slurm)

    class Empty(OneJob):
        async def job(self, job_id: str) -> SlurmJob:
            raise ObjectMissing(f"Slurm knows no job {job_id}")

    assert not await renewed_hold(Empty())


class OneReservation(OneNode):
    """Stand-in for a node and its reservations. It does not model their times."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[SlurmReservation] = []
        self.lasting: timedelta | None = None

    async def reservations(self) -> Sequence[SlurmReservation]:
        return self.made

    async def reserve(self, name: str, node: str, users: Sequence[str], lasting: timedelta) -> None:
        self.made.append(SlurmReservation(name, node, tuple(users)))
        self.known, self.lasting = replace(self.known, reservation=name), lasting

    def lose(self) -> None:
        self.made, self.known = [], replace(self.known, reservation="")


async def renewed_reservation(
    slurm: OneReservation,
    again: bool = False,
    made_at: datetime | None = None,
    clock: Clock | None = None,
    **params: Any,
) -> Sequence[Renewal]:
    services = Services(clock or ManualClock(NOW), None, None, slurm=slurm, slurm_topology=lambda: slurm.topology)  # type: ignore[arg-type]
    action = registry.build(services).get("slurm.reserve")
    assert isinstance(action, LeasedAction)
    effect = LeasedEffect("c-1", "a", "reserve", NODE, params or {"duration": "2h"}, True, again, made_at)
    return await action.renew([effect], NOW + timedelta(seconds=10))


@pytest.mark.parametrize("again", [False, True])
async def test_a_reservation_ended_by_a_step_is_neither_lost_nor_reapplied(again: bool) -> None:
    slurm = OneReservation()
    assert not await renewed_reservation(slurm, again, made_at=NOW, restore=True)
    assert not slurm.made


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ("n[1-3]", "it is in the reservation maintenance of another"),
        ("n[1-9999]", "it may be in the reservation maintenance of another, whose list of nodes names more than"),
    ],
)
async def test_a_node_possibly_in_another_users_reservation_is_not_reserved(nodes: str, why: str) -> None:
    slurm = OneReservation()
    slurm.made = [SlurmReservation("maintenance", nodes, ("root",), starts_at=NOW - timedelta(hours=1))]
    with pytest.raises(PermanentFailure, match=why):
        await do(slurm, "slurm.reserve", target=NODE)


async def test_a_reservation_possibly_ended_or_changed_by_a_user_is_only_reported() -> None:
    """A reservation whose time is over is no loss."""
    slurm = OneReservation()
    (renewal,) = await renewed_reservation(slurm, made_at=NOW)
    assert (renewal.outcome, renewal.has_expired) == ("lost", False)
    slurm.made = [SlurmReservation("trainmedic-a", "n2", ("mia",))]
    (renewal,) = await renewed_reservation(slurm, again=True, made_at=NOW)
    assert (renewal.outcome, renewal.why) == ("lost", "trainmedic-a reserves n2")
    clock = ManualClock(NOW + timedelta(hours=2))
    assert not await renewed_reservation(slurm, made_at=NOW, clock=clock)


@pytest.mark.parametrize("lease", [None, "10m"])
async def test_another_users_drain_found_by_a_step_is_not_renewed(lease: str | None) -> None:
    slurm = OneNode()
    slurm.known = replace(slurm.known, states=frozenset({"IDLE", "DRAIN"}), reason="Mia: fan")
    output = await do(slurm, "slurm.drain", target=NODE, lease=lease)
    assert drains(slurm).granted(output) == timedelta(0)
    slurm.known = FREE
    own = await do(slurm, "slurm.drain", target=NODE, lease=lease)
    assert drains(slurm).granted(own) == timedelta(seconds=45)


async def test_a_drain_whose_time_has_ended_is_no_loss() -> None:
    slurm = OneNode()
    assert not await renewed(slurm, made_at=NOW - timedelta(hours=2), resume_after="1h")
    assert [each.outcome for each in await renewed(slurm, made_at=NOW, resume_after="1h")] == ["lost"]


@pytest.mark.parametrize("first", ["leased", "lasting"])
async def test_a_lease_does_not_end_another_runs_drain(first: str) -> None:
    """Once the permanent drain is undone, the leased one has an end again."""
    slurm = OneNode()
    for kind in ("leased", "lasting") if first == "leased" else ("lasting", "leased"):
        given = {"lease": "10m"} if kind == "leased" else {}
        await do(slurm, "slurm.drain", kind, NODE, **given)
    assert slurm.known.resume_after is None
    await renewed(slurm, "leased", lease="10m")
    assert slurm.known.resume_after is None
    await do(slurm, "slurm.resume", "lasting", NODE, restore=True)
    await renewed(slurm, "leased", lease="10m")
    assert slurm.known.resume_after == NOW + timedelta(minutes=10)
