"""The contract of reading alerts, `ports.received_alerts.ReceivedAlerts`, on each store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from tests.contract.run_store_values import at, heard, run
from trainmedic_server.adapters.sql_store import prune
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.domain.alert import AlertRecord, AlertStatus
from trainmedic_server.domain.reaction import Reaction
from trainmedic_server.ports.received_alerts import ReceivedAlertFilter
from trainmedic_server.ports.store import Transaction

STARTED = Reaction("cool", "started", run_id="run-1")
MISSED = Reaction("cool", "not_matched", "'severity' is '' and must match warning|critical")
NO_TARGET = Reaction("cool", "target_unknown", "no label names a node", "run-2")


def alert(number: int, labels: dict[str, str] | None = None, *reactions: Reaction, **changes: Any) -> AlertRecord:
    """An alert first heard of `number` minutes after the beginning of time, as `at` counts it."""
    record = heard(f"f{number}", number, **changes)
    names = {"alertname": f"A{number}", **(labels or {})}
    return replace(record, alert=replace(record.alert, labels=names), reactions=reactions)


async def filled(store: SqlStore, *records: AlertRecord) -> SqlStore:
    await store.transact(lambda tx: tx.save_alerts(records))
    return store


async def names(store: SqlStore, **conditions: Any) -> list[str]:
    page, cursor = await store.alerts_page(ReceivedAlertFilter(**conditions), 100, None)
    assert cursor is None
    return [record.alert.name for record in page]


async def test_pages_go_from_newest_to_oldest_without_gaps(store: SqlStore) -> None:
    """The order is that of the first report: a further report and new alerts shift no page."""
    records = [alert(number) for number in range(5)]
    await filled(store, *records)
    first, cursor = await store.alerts_page(ReceivedAlertFilter(), 2, None)
    again = replace(records[0], last_heard_at=at(60), count=2)
    await filled(store, alert(9), again)
    second, cursor = await store.alerts_page(ReceivedAlertFilter(), 2, cursor)
    third, end = await store.alerts_page(ReceivedAlertFilter(), 2, cursor)
    assert [record.alert.name for record in (*first, *second, *third)] == ["A4", "A3", "A2", "A1", "A0"]
    assert (third[0].count, end) == (2, None)


async def test_alerts_of_the_same_moment_are_distinguished(store: SqlStore) -> None:
    """A delivery's alerts are first received at the same time."""
    records = [replace(alert(number), first_heard_at=at(0)) for number in range(4)]
    await filled(store, *records)
    seen: list[str] = []
    cursor: str | None = None
    for _ in records:
        page, cursor = await store.alerts_page(ReceivedAlertFilter(), 1, cursor)
        seen += [record.alert.name for record in page]
    assert (sorted(seen), cursor) == (["A0", "A1", "A2", "A3"], None)


@pytest.mark.parametrize("cursor", ["", "x", "MTIz", "MTIzLmFiYw", "MTIzLmEuYg"])
async def test_an_invalid_cursor_is_rejected(store: SqlStore, cursor: str) -> None:
    """It is a cursor of the history, or of nothing."""
    with pytest.raises(ValueError, match="cursor"):
        await store.alerts_page(ReceivedAlertFilter(), 1, cursor)


async def test_each_filter_finds_what_it_names(store: SqlStore) -> None:
    """Times are those of reports; a label must match exactly, including case and special characters."""
    await filled(
        store,
        alert(0, {"node": "n%1"}, STARTED, last_heard_at=at(30)),
        alert(1, {"node": "N%1", "quote": 'a"b'}, MISSED),
        alert(2, {"node": "n12"}, NO_TARGET, resolved_at=at(3), last_heard_at=at(3)),
        alert(3),
    )
    assert await names(store, alertname="A1") == ["A1"]
    assert await names(store, labels={"node": "n%1"}) == ["A0"]
    assert await names(store, labels={"node": "N%1", "quote": 'a"b'}) == ["A1"]
    assert await names(store, labels={"node": "n"}) == []
    assert await names(store, status=AlertStatus.RESOLVED) == ["A2"]
    assert await names(store, status=AlertStatus.FIRING) == ["A3", "A1", "A0"]
    assert await names(store, since=at(3)) == ["A3", "A2", "A0"]
    assert await names(store, until=at(1)) == ["A0"]
    assert await names(store, reacted=True) == ["A0"]
    assert await names(store, reacted=False) == ["A3", "A2", "A1"]


async def test_reactions_are_read_as_they_were_written(store: SqlStore) -> None:
    """They have reason and run, in order; those of the last report replace earlier ones."""
    record = alert(0, None, MISSED)
    await filled(store, record)
    await filled(store, replace(record, reactions=(STARTED, NO_TARGET), count=2))
    [read], _ = await store.alerts_page(ReceivedAlertFilter(), 1, None)
    assert (read.reactions, read.has_reaction) == ((STARTED, NO_TARGET), True)
    assert await names(store, reacted=True) == ["A0"]


async def test_the_alerts_received_first_are_deleted_if_there_are_too_many(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However young they are, so that a flood of alerts does not fill the disk; but none that a run is tied to, also
    where that run found no target."""
    monkeypatch.setattr(prune, "MOST_ALERTS", 3)
    monkeypatch.setattr(prune, "BATCH", 2)
    await filled(store, alert(0, None, STARTED), *(alert(number) for number in range(1, 7)), alert(-1, None, NO_TARGET))

    def tie(tx: Transaction) -> None:
        tx.add_runs([one := run()])
        tx.link([(one.id, alert(-1).identity)])

    await store.transact(tie)
    assert await store.prune(at(0) - timedelta(days=1)) == 0
    assert await names(store) == ["A6", "A5", "A4", "A0", "A-1"]


async def test_a_mapped_alert_is_found_by_both_names_and_labels(store: SqlStore) -> None:
    """It is found once, in order and page by page, and read as it was written."""
    sent = {"alertname": "CardHot", "instance": "10.0.0.9:1"}
    mapped = [alert(number, {"alertname": "GPUHot", "node": "n1"}) for number in range(3)]
    mapped = [replace(each, alert=replace(each.alert, original=sent)) for each in mapped]
    same = alert(3, {"alertname": "CardHot", "node": "n1"})
    same = replace(same, alert=replace(same.alert, original=sent))  # only its labels were mapped
    await filled(store, *mapped, same, alert(4, {"alertname": "CardHot"}), alert(5))
    assert await names(store, alertname="CardHot") == ["CardHot", "CardHot", "GPUHot", "GPUHot", "GPUHot"]
    assert await names(store, alertname="GPUHot") == ["GPUHot"] * 3
    assert await names(store, labels={"instance": "10.0.0.9:1"}) == ["CardHot", *["GPUHot"] * 3]
    assert await names(store, labels={"alertname": "CardHot", "node": "n1"}, reacted=False) == [
        "CardHot",
        *["GPUHot"] * 3,
    ]
    assert await names(store, alertname="CardHot", labels={"node": "n1"}) == ["CardHot", *["GPUHot"] * 3]
    first, cursor = await store.alerts_page(ReceivedAlertFilter(alertname="CardHot"), 3, None)
    second, end = await store.alerts_page(ReceivedAlertFilter(alertname="CardHot"), 3, cursor)
    assert ([each.alert.name for each in (*first, *second)], end) == (["CardHot"] * 2 + ["GPUHot"] * 3, None)
    assert second[-1].alert == mapped[0].alert
