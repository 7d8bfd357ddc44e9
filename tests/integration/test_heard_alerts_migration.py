"""What earlier releases knew of alerts is shown as reactions, after the schema was brought up to date."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from tests.contract.run_store_values import at, heard, run
from tests.support.postgres import PostgresServer
from trainmedic_server.adapters.sql_store import database, mapping, postgresql, revision, schema
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.domain.run import Decision, Status
from trainmedic_server.ports.heard_alerts import HeardAlertFilter

BEFORE = "0008"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/trainmedic.db"
    server: PostgresServer = request.getfixturevalue("shared_postgres")
    return server.database()


def filled(connection: sa.Connection) -> None:
    """The schema as it was, with an alert that a run was started for, one without a target, and one that led to
    nothing."""
    config = Config()
    config.set_main_option("script_location", str(revision.MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, BEFORE)
    labels = {"alertname": "Hot: it's", "node": "n1"}
    records = [heard(name, number) for number, name in enumerate(("led", "lost", "none"))]
    there = {each["name"] for each in sa.inspect(connection).get_columns("alerts")}
    names = [column.name for column in schema.alerts.columns if column.name in there]
    alerts = sa.table("alerts", *(sa.column(name, schema.alerts.c[name].type) for name in names))
    rows = [dict(zip(names, mapping.alert_row(record), strict=False)) | {"labels": labels} for record in records]
    connection.execute(sa.insert(alerts), rows)
    closed = {"status": Status.NOT_STARTED, "ended_at": at(1), "message": "no label names the node"}
    for item, record in (
        (run(alert=records[0].identity), records[0]),
        (run(alert=records[1].identity, decision=Decision.TARGET_UNKNOWN, **closed), records[1]),
    ):
        columns = [column.name for column in schema.runs.columns]
        present = {each["name"] for each in sa.inspect(connection).get_columns("runs")}
        values = dict(zip(columns, mapping.run_row(item), strict=True))
        connection.execute(sa.insert(schema.runs), {name: value for name, value in values.items() if name in present})
        tie = {"run_id": item.id, "fingerprint": record.alert.fingerprint, "starts_at": record.alert.starts_at}
        connection.execute(sa.insert(schema.run_alerts), tie)


async def test_alerts_from_before_have_the_runs_that_they_led_to(url: str) -> None:
    """And those that led to none are told from them."""
    with contextlib.ExitStack() as stack:
        if url.startswith("sqlite"):
            engine = database.writer_engine(sa.make_url(url), timedelta(seconds=1))
            stack.callback(engine.dispose)
        else:
            session = postgresql.LockSession.open(url)
            stack.callback(session.close)
            engine = session.engine
        with engine.begin() as connection:
            filled(connection)
    store = SqlStore.open(url)
    try:
        page, _ = await store.alerts_page(HeardAlertFilter(alertname="Hot: it's"), 10, None)
        by_name = {record.alert.fingerprint: record for record in page}
        [led] = by_name["led"].reactions
        assert (led.decision, led.reason, led.run_id is None) == ("started", "", False)
        [lost] = by_name["lost"].reactions
        assert (lost.decision, lost.reason) == ("target_unknown", "no label names the node")
        assert by_name["none"].reactions == ()
        reacted, _ = await store.alerts_page(HeardAlertFilter(reacted=True), 10, None)
        assert [record.alert.fingerprint for record in reacted] == ["led"]
    finally:
        await store.close()
