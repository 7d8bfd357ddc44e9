"""`ports.findings`: what every run store promises of findings."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from tests.contract.run_store_values import at
from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.domain.finding import CLAIMED_JOB, CauseClass, Excerpt, Origin, Role, TimeSource
from trainmedic_logs.domain.known_finding import (
    Episode,
    EpisodeKey,
    FindingAlert,
    FindingEnd,
    JobPlace,
    KeptJob,
    KnownExcerpt,
    KnownFinding,
)
from trainmedic_server import errors
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.ports.findings import FindingFilter, FindingRecord
from trainmedic_server.ports.store import Transaction

Tx = Transaction
EVERYTHING = KnownFinding(
    id="0001",
    rule="gpu-xid",
    role=Role.ROOT,
    cause=CauseClass.GPU,
    target=Target(TargetKind.GPU, node="node-2", gpu="GPU-5f3a"),
    origin=Origin("kernel", "node-2", stream="/dev/kmsg"),
    line="NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus. \u2028",
    first_at=at(0),
    last_at=at(5),
    heard_first_at=at(1),
    heard_at=at(6),
    labels={"xid": "79"},
    fields={"pci": "0000:9b:00"},
    ranks=frozenset({0, 1, 2, 511}),
    nodes=frozenset({"node-2"}),
    count=10**12,
    time_source=TimeSource.LINE,
    clock_error=0.25,
    shape="5f3a",
    ended_at=at(9),
    ended_because=FindingEnd.BOOT,
    is_suspected=True,
    confirmed_by="gpu-lost",
    alert=FindingAlert({"alertname": "GPUXidLogged"}, "0123", at(2), "a GPU", "is gone"),
    no_alert_because="why",
    tell_at=at(3),
)


def finding(finding_id: str = "0001", minutes: float = 0, **members: object) -> KnownFinding:
    """An open finding about a job, first heard of so many minutes after the beginning."""
    when = at(0) + timedelta(minutes=minutes)
    bare = KnownFinding(
        id=finding_id,
        rule="cuda-oom",
        role=Role.ROOT,
        cause=CauseClass.GPU_MEMORY,
        target=Target(TargetKind.JOB, job=f"job-{finding_id}"),
        origin=Origin("training", "node-1", job=f"job-{finding_id}", attempt=1),
        line="CUDA out of memory",
        first_at=when,
        last_at=when,
        heard_first_at=when,
        heard_at=when,
    )
    return replace(bare, **members)  # type: ignore[arg-type]


async def keep(store: SqlStore, *findings: KnownFinding) -> None:
    await store.transact(lambda tx: tx.findings.save(findings))


async def of_page(store: SqlStore, **members: object) -> list[str]:
    page, _ = await store.findings_page(FindingFilter(**members), 100, None)  # type: ignore[arg-type]
    return [known.id for known in page]


@pytest.mark.parametrize("known", [EVERYTHING, finding()], ids=["with everything", "with nothing"])
async def test_a_finding_is_read_as_it_was_saved(store: SqlStore, known: KnownFinding) -> None:
    """All of it is read, in a transaction and in the history."""
    await keep(store, known)
    assert await store.transact(lambda tx: tx.findings.with_ids([known.id, "other"])) == {known.id: known}
    assert await store.finding(known.id) == FindingRecord(known, ())
    assert await store.finding("other") is None


async def test_a_transaction_sees_the_findings_that_it_wrote(store: SqlStore) -> None:
    """Within one unit, every read sees the unit's own writes."""

    def work(tx: Tx) -> None:
        known, key = finding(), EpisodeKey("node-1", "e1")
        tx.findings.save([known])
        assert tx.findings.open_with([known.key, "other"]) == {known.key: known}
        tx.findings.save_episodes([Episode(key, known.id, 3)], at(0))
        assert tx.findings.episodes([key]) == {key: Episode(key, known.id, 3)}
        tx.findings.save_excerpts([KnownExcerpt(known.id, key, "training", "f", 0, at(0), Excerpt(("a",), 0))])
        assert tx.findings.excerpt_counts([known.id]) == {known.id: 1}

    await store.transact(work)


async def test_nothing_is_kept_of_a_unit_that_raises(store: SqlStore) -> None:
    """Its writes to findings are rolled back with the rest."""

    def work(tx: Tx) -> None:
        tx.findings.save([finding()])
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        await store.transact(work)
    assert await of_page(store) == []


async def test_only_one_finding_of_a_key_is_open(store: SqlStore) -> None:
    """A second one is refused until the first is closed, which may happen in the same unit."""
    first, second = finding(), replace(finding(), id="0002")
    await keep(store, first)
    with pytest.raises(errors.Conflict):
        await keep(store, second)
    over = replace(first, ended_at=at(9), ended_because=FindingEnd.SILENCE)
    await keep(store, second, over)
    assert await store.transact(lambda tx: tx.findings.all_open()) == [second]


async def test_due_reports_come_in_the_order_of_their_due_times(store: SqlStore) -> None:
    """At most the requested number, and none that is due later or not at all."""
    due = [finding(f"000{number}", tell_at=at(9 - number)) for number in range(1, 5)]
    await keep(store, *due, finding("0009"), finding("0008", tell_at=at(60)))
    told = await store.transact(lambda tx: tx.findings.to_tell(at(8), 3))
    assert [known.id for known in told] == ["0004", "0003", "0002"]


async def test_an_episode_belongs_to_its_node(store: SqlStore) -> None:
    """Two nodes that use the same id mean two episodes."""
    one, other = EpisodeKey("node-1", "e"), EpisodeKey("node-2", "e")
    saved = {one: Episode(one, "0001", 3, 1), other: Episode(other, "0001", 5, 0, True)}
    await keep(store, finding())
    await store.transact(lambda tx: tx.findings.save_episodes(list(saved.values()), at(0)))
    missing = EpisodeKey("node-3", "e")
    assert await store.transact(lambda tx: tx.findings.episodes([one, other, missing])) == saved


async def test_a_finding_is_open_while_one_of_its_episodes_is(store: SqlStore) -> None:
    """It is closed once all of them are."""
    await keep(store, finding("0001"), finding("0002"))
    episodes = [
        Episode(EpisodeKey("node-1", "a"), "0001", 1, 0, True),
        Episode(EpisodeKey("node-1", "b"), "0001", 1),
        Episode(EpisodeKey("node-1", "c"), "0002", 1, 0, True),
    ]
    await store.transact(lambda tx: tx.findings.save_episodes(episodes, at(0)))
    assert await store.transact(lambda tx: tx.findings.ids_with_open_episodes(["0001", "0002"])) == {"0001"}


async def test_a_finding_shows_its_excerpts(store: SqlStore) -> None:
    """The earliest comes first; saving one again replaces the earlier version."""
    await keep(store, finding())

    def excerpt(node: str, seconds: float, *lines: str) -> KnownExcerpt:
        return KnownExcerpt("0001", EpisodeKey(node, "e"), "training", "/log", 7, at(seconds), Excerpt(lines, 0, 4))

    later, first = excerpt("node-1", 5, "late"), excerpt("node-2", 2, "before", "\x1b[31mline", "after")
    await store.transact(lambda tx: tx.findings.save_excerpts([later, excerpt("node-2", 2, "half")]))
    await store.transact(lambda tx: tx.findings.save_excerpts([first]))
    record = await store.finding("0001")
    assert record is not None
    assert record.excerpts == (first, later)


FILTERS: dict[str, tuple[dict[str, object], list[str]]] = {
    "all": ({}, ["3", "2", "1"]),
    "job": ({"job": "job-2"}, ["2"]),
    "the job in whose log it stands": ({"job": "elsewhere"}, ["3"]),
    "node": ({"node": "node-9"}, ["3"]),
    "a node where a line was read": ({"node": "node-7"}, ["1"]),
    "rule": ({"rule": "gpu-xid"}, ["3"]),
    "role": ({"role": Role.CASCADE}, ["2"]),
    "since": ({"since": at(0) + timedelta(minutes=2)}, ["3", "2"]),
    "suspected": ({"suspected": True}, ["2"]),
    "not suspected": ({"suspected": False}, ["3", "1"]),
    "open": ({"open": True}, ["2", "1"]),
    "over": ({"open": False}, ["3"]),
    "several": ({"rule": "cuda-oom", "suspected": False}, ["1"]),
    "none": ({"job": "no such job"}, []),
}


@pytest.mark.parametrize("name", FILTERS)
async def test_a_page_has_what_the_filter_matches(store: SqlStore, name: str) -> None:
    """The newest comes first."""
    members, ids = FILTERS[name]
    node = Target(TargetKind.NODE, node="node-9")
    await keep(
        store,
        finding("1", 1),
        finding("2", 2, role=Role.CASCADE, is_suspected=True),
        finding("3", 3, rule="gpu-xid", target=node, origin=Origin("kernel", job="elsewhere"), ended_at=at(400)),
    )
    await store.transact(lambda tx: tx.findings.save_episodes([Episode(EpisodeKey("node-7", "e"), "1", 1)], at(0)))
    assert await of_page(store, **members) == ids


async def test_pages_contain_every_finding_once(store: SqlStore) -> None:
    """Also if one arrives between two pages, and if several started at the same moment."""
    await keep(store, *(finding(f"{number:04}", number // 3) for number in range(1, 8)))
    first, cursor = await store.findings_page(FindingFilter(), 3, None)
    await keep(store, finding("0099", 99))
    second, cursor = await store.findings_page(FindingFilter(), 3, cursor)
    third, last = await store.findings_page(FindingFilter(), 3, cursor)
    assert [known.id for known in first + second + third] == [f"{number:04}" for number in range(7, 0, -1)]
    assert last is None
    with pytest.raises(ValueError, match="cursor"):
        await store.findings_page(FindingFilter(), 3, "?")


async def test_findings_are_found_by_their_alerts(store: SqlStore) -> None:
    """The search returns every finding that ever raised the alert, oldest first."""
    alert = FindingAlert({"alertname": "A"}, "f1", at(0))
    await keep(store, finding("1", 1, alert=alert, ended_at=at(70)), finding("2", 2, alert=alert), finding("3"))
    assert [known.id for known in await store.findings_of_alerts(["f1", "f2"])] == ["1", "2"]
    assert await store.findings_of_alerts([]) == []
    assert await store.alerts_raised([*("x" for _ in range(1000)), "f1", "f2"]) == [{"alertname": "A"}]


async def test_a_job_is_retained_and_released(store: SqlStore) -> None:
    """The whole job or one attempt; releasing returns whether it was retained."""
    whole, attempt = KeptJob("llm-1", None, "anna", at(0), "why"), KeptJob("llm-1", 3, "ben", at(1))
    for kept in (whole, replace(whole, note="old"), whole, attempt):
        await store.transact(lambda tx, kept=kept: tx.findings.keep_job(kept))  # type: ignore[misc]
    assert await store.kept_jobs() == [whole, attempt]
    assert await store.transact(lambda tx: tx.findings.release_job("llm-1", None))
    assert not await store.transact(lambda tx: tx.findings.release_job("llm-1", None))
    assert await store.transact(lambda tx: tx.findings.kept_jobs()) == [attempt]


OVER: dict[str, Any] = {"ended_at": at(60), "ended_because": FindingEnd.SILENCE}
NODE = Target(TargetKind.NODE, node="node-1")


def in_log_of(job: str, attempt: int) -> dict[str, Any]:
    return {**OVER, "target": NODE, "origin": Origin("kernel", job=job, attempt=attempt)}


PRUNED: dict[str, tuple[KnownFinding, bool]] = {
    "over": (finding(**OVER), True),
    "open": (finding(), False),
    "with something to tell": (finding(**OVER, tell_at=at(61)), False),
    "heard of lately": (finding(**OVER, heard_at=at(9000)), False),
    "ended lately": (finding(ended_at=at(9000)), False),
    "of a kept job": (finding(**OVER, target=Target(TargetKind.JOB, job="kept")), False),
    "of a kept attempt": (finding(**in_log_of("half", 2)), False),
    "of another attempt": (finding(**in_log_of("half", 1)), True),
    "on a node of a kept job": (finding(**OVER, target=Target(TargetKind.GPU, node="kept-on", gpu="GPU-0")), False),
    "on it after the job": (finding(**{**OVER, "first_at": at(400)}, target=Target(TargetKind.NODE, "kept-on")), True),
}
KEPT = {"of a kept job", "of a kept attempt", "on a node of a kept job"}


@pytest.mark.parametrize("name", PRUNED)
async def test_old_data_are_deleted_unless_retained(store: SqlStore, name: str) -> None:
    """A closed finding goes with its excerpts and episodes; what is still needed or locked stays."""
    known, is_deleted = PRUNED[name]
    key = EpisodeKey("node-1", "e")

    def work(tx: Tx) -> None:
        tx.findings.save([known])
        tx.findings.save_episodes([Episode(key, known.id, 1)], at(0))
        tx.findings.save_excerpts([KnownExcerpt(known.id, key, "training", "", None, at(0), Excerpt(("a",), 0))])
        tx.findings.keep_job(KeptJob("kept", None, "anna", at(0)))
        tx.findings.keep_job(KeptJob("half", 2, "anna", at(0)))
        tx.findings.save_job_places({JobPlace("kept", "kept-on"): at(0)})

    await store.transact(work)
    record = await store.finding(known.id)
    assert record is not None
    assert record.is_kept == (name in KEPT)
    await store.prune(at(3600))
    assert (await store.finding(known.id) is None) == is_deleted
    assert (await store.transact(lambda tx: tx.findings.episodes([key])) == {}) == is_deleted


async def test_job_locations_are_remembered_until_they_are_old(store: SqlStore) -> None:
    """The last time of each is stored."""
    old, young = JobPlace("llm-1", "node-1"), JobPlace("llm-1", "node-2")
    save: Callable[[Tx], None] = lambda tx: tx.findings.save_job_places({old: at(0), young: at(0)})  # noqa: E731
    await store.transact(save)
    await store.transact(lambda tx: tx.findings.save_job_places({young: at(900)}))
    assert await store.transact(lambda tx: tx.findings.job_places()) == {old: at(0), young: at(900)}
    await store.prune(at(600))
    assert await store.transact(lambda tx: tx.findings.job_places()) == {young: at(900)}


async def test_findings_with_a_claimed_job_are_found_by_its_full_name(store: SqlStore) -> None:
    """The match is case-sensitive for any characters; findings known to belong to the job are excluded."""
    names = ("llm-9", "LLM-9", "llm-90", 'odd%_"\\name', "größe")
    claimed = [
        finding(f"c{number}", number, target=Target(TargetKind.NODE, "node-1"), labels={CLAIMED_JOB: name})
        for number, name in enumerate(names)
    ]
    own = [replace(each, origin=replace(each.origin, job=None), is_printed=True) for each in claimed]
    await keep(store, *own, finding("0009", target=Target(TargetKind.JOB, job="llm-9")))
    for number, name in enumerate(names):
        assert await of_page(store, claimed_job=name) == [f"c{number}"]
    assert await of_page(store, claimed_job="llm") == []
    assert await of_page(store, job="llm-9") == ["0009"]
