"""What was before the lab's night: an agent and a job that were lost, and a GPU that was cooled yesterday and, half an
hour ago, again; with a real Prometheus that remembers its temperature and has its alert's rule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

from tests.contract.run_store_values import alert, gpu, run, step
from tests.support.past_prometheus import Past
from tests.support.programs import start_prometheus
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.domain.agent_life import AgentLife
from trainmedic_server.domain.alert import AlertRecord, AlertStatus, Identity
from trainmedic_server.domain.effect import Effect
from trainmedic_server.domain.job_life import JobLife, LifeState
from trainmedic_server.domain.reaction import Reaction
from trainmedic_server.domain.run import Event, Run, Status, StepStatus

HOT_NODE = "node-3"
TOOK = timedelta(minutes=6)
"""The repair half an hour ago."""
_RULES = """
groups:
  - name: gpu
    rules: [{alert: LabHot, expr: temp > 85}]
"""
_LABELS = {"alertname": "LabHot", "node": HOT_NODE, "gpu": "0"}


async def remember(url: str, now: datetime) -> None:
    """Write it into the run store at `url`."""
    store = SqlStore.open(url)
    gone = now - timedelta(hours=1)
    life = JobLife("llm-lost", LifeState.GONE, gone, reason="nothing has been heard of it")
    runs = [_cooled(now - timedelta(hours=20)), _cooled(_acted(now))]
    effect = Effect(runs[-1].id, "cool", _acted(now), now)
    events = [Event("started", each.created_at, each.id) for each in runs]
    await store.transact(lambda tx: (tx.agents.save([AgentLife("node-lost", gone, gone)]), tx.save_job_lives([life])))
    await store.transact(lambda tx: tx.save_alerts([_heard(each) for each in runs]))
    await store.transact(lambda tx: tx.add_runs(runs))
    await store.transact(lambda tx: (tx.append(events), tx.effects.save([effect])))
    await store.close()


@contextmanager
def thermometer(directory: Path, now: datetime) -> Iterator[str]:
    """The URL of a Prometheus that has the alert's rule, and remembers that the GPU was at 70 °C, at 91 when it was
    cooled, and at 68 after."""
    act = 20 * 60
    past = Past(_acted(now) - timedelta(seconds=act), 2 * act)
    past.add("temp", lambda at: 70 if at < act - 300 else 91 if at <= act else 68, node=HOT_NODE, gpu="0")
    (directory / "rules.yml").write_text(_RULES)
    config = directory / "prometheus.yml"
    config.write_text("global: {scrape_interval: 1h, evaluation_interval: 1h}\nrule_files: [rules.yml]\n")
    past.into(directory / "prometheus" / "data", directory)
    program, url = start_prometheus(config, directory / "prometheus")
    with program:
        yield url


def _acted(now: datetime) -> datetime:
    return now.replace(microsecond=0) - timedelta(minutes=30)


def _cooled(at: datetime) -> Run:
    done = step(status=StepStatus.SUCCEEDED, started_at=at, ended_at=at)
    return run(
        target=gpu(0, HOT_NODE),
        status=Status.SUCCEEDED,
        alert=Identity("lab-hot", at),
        alert_name=_LABELS["alertname"],
        alert_labels=_LABELS,
        created_at=at,
        acted_at=at,
        ended_at=at + TOOK,
        steps=(done,),
    )


def _heard(of: Run) -> AlertRecord:
    over = of.created_at + TOOK
    fired = alert("lab-hot", labels=_LABELS, starts_at=of.created_at, status=AlertStatus.RESOLVED)
    reactions = (Reaction("cool", "started", run_id=of.id),)
    return AlertRecord(fired, of.created_at, over, 2, over, "alertmanager", reactions)
