"""The report of a job whose past a real Prometheus remembers, sample by sample, and a run store knows the rest of."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.support.past_prometheus import Course, Past, prometheus_of
from tests.support.programs import PYTHON_PATH, ROOT, inherited, start_server
from trainmedic_logs.domain.known_verdict import KnownVerdict
from trainmedic_server.adapters.prometheus_api import PrometheusApi
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.domain.run import Event
from trainmedic_server.errors import MetricsUnavailable, NotFound
from trainmedic_server.reports.compiling import ReportCompiler
from trainmedic_server.reports.curves import NO_PROMETHEUS
from trainmedic_server.reports.error_events import NOTHING_READ
from trainmedic_server.reports.evaluations import NONE_REPORTED
from trainmedic_server.reports.job_report import JobReport
from trainmedic_server.reports.points import Spread

HOUR = 3600.0
BEGIN = (datetime.now(UTC) - timedelta(hours=9)).replace(minute=0, second=0, microsecond=0)
FAILED_AT, BACK_AT = 3 * HOUR, 3 * HOUR + 600
STARTING = 300.0
STALL = (4 * HOUR, 4 * HOUR + 900)
SLOW_FROM = 5 * HOUR
END = 6 * HOUR
GPUS = {"GPU-a": "node-1", "GPU-b": "node-1", "GPU-c": "node-2"}


def at(seconds: float) -> datetime:
    return BEGIN + timedelta(seconds=seconds)


def is_there(after: float) -> bool:
    return not FAILED_AT < after < BACK_AT


def since_start(after: float) -> float:
    return after - BACK_AT if after >= BACK_AT else after


def steps(after: float) -> float | None:
    """A step a second, once the process has started; none during the stall."""
    if not is_there(after):
        return None
    done = max(since_start(after) - STARTING, 0.0)
    return done - min(max(after - STALL[0], 0.0), STALL[1] - STALL[0])


def step(after: float) -> float | None:
    """After the failure it goes on from a checkpoint 600 steps before."""
    done = steps(after)
    reached = FAILED_AT - STARTING
    return done if done is None or after < BACK_AT else reached - 600 + done


def checkpointing(after: float) -> float | None:
    """A minute of it at each full half hour since the process began."""
    return 60.0 * math.floor(since_start(after) / 1800) if is_there(after) else None


def there(value: float) -> Course:
    return lambda after: value if is_there(after) else None


def throughput(after: float) -> float | None:
    return (50.0 if after >= SLOW_FROM else 100.0) if is_there(after) and steps(after) else None


def stall(after: float) -> float | None:
    if not is_there(after):
        return None
    return after - STALL[0] if STALL[0] <= after < STALL[1] else 1.0


@pytest.fixture(scope="module")
def past() -> Past:
    past = Past(BEGIN, END)
    job = {"job_name": "llm-1", "instance": "10.0.0.1:9100"}
    past.add("up", 1.0, job="trainmedic")
    past.add("training_steps_total", steps, **job)
    past.add("training_step", step, **job)
    past.add("training_step_median_seconds", there(1.0), **job)
    past.add("training_stall_seconds", stall, **job)
    past.add("training_hang_limit_seconds", there(60.0), **job)
    past.add("training_window_seconds_total", checkpointing, window="checkpoint", **job)
    past.add("training_throughput_samples_per_second", throughput, **job)
    past.add("training_data_seconds", there(0.6), **job)
    past.add("training_compute_seconds", there(0.35), **job)
    past.add("training_wait_seconds", there(0.05), **job)
    past.add("gradient_norm", lambda after: 240.0 if 2 * HOUR <= after < 2 * HOUR + 60 else 1.0, **job)
    past.add("training_loss", lambda after: math.nan if after == HOUR else 2.0, **job)
    for number, (uuid, node) in enumerate(GPUS.items()):
        past.add("trainmedic_job_gpu", 1.0, job_name="llm-1", gpu_node=node, uuid=uuid)
        past.add("gpu_utilization_percent", 90.0 - 30 * number, uuid=uuid, node=node)
        past.add("gpu_memory_used_bytes", 40e9 + 20e9 * number, uuid=uuid, node=node)
        past.add("gpu_memory_total_bytes", 80e9, uuid=uuid, node=node)
    # A GPU of somebody else, which must not count.
    past.add("gpu_utilization_percent", 1.0, uuid="GPU-other", node="node-1")
    past.add("trainmedic_job_gpu", 1.0, job_name="other", gpu_node="node-1", uuid="GPU-other")
    past.add("training_steps_total", lambda after: after, job_name="cpu-only")
    # A job beside it, on the GPU of somebody else and on a node where only dcgm-exporter is scraped.
    past.add("training_steps_total", lambda after: after, job_name="beside")
    past.add("trainmedic_job_gpu", 1.0, job_name="beside", gpu_node="node-1", uuid="GPU-other")
    past.add("trainmedic_job_gpu", 1.0, job_name="beside", gpu_node="node-3", uuid="GPU-d")
    dcgm = {"UUID": "GPU-d", "node": "node-3", "gpu": "0"}
    past.add("DCGM_FI_DEV_GPU_UTIL", 51.0, **dcgm)
    past.add("DCGM_FI_DEV_FB_USED", 20_000.0, **dcgm)
    past.add("DCGM_FI_DEV_FB_FREE", 60_000.0, **dcgm)
    _add_phased(past)
    # On a node with an agent, dcgm-exporter's figures of the same GPU do not count again.
    past.add("DCGM_FI_DEV_GPU_UTIL", 0.0, UUID="GPU-a", node="node-1", gpu="0")
    return past


EVALUATION, IDLE = (2 * HOUR, 2.5 * HOUR), (4 * HOUR, 4.5 * HOUR)


def _add_phased(past: Past) -> None:
    """A job whose GPU is idle while it starts and evaluates, and once while it trains."""

    def evaluating(after: float) -> float:
        return min(max(after - EVALUATION[0], 0.0), EVALUATION[1] - EVALUATION[0])

    def busy(after: float) -> float:
        is_idle = after < 1200 or any(begin <= after < end for begin, end in (EVALUATION, IDLE))
        return 8.0 if is_idle else 96.0

    past.add("training_steps_total", lambda after: max(after - 1200, 0.0) - evaluating(after), job_name="phased")
    past.add("training_window_seconds_total", evaluating, job_name="phased", window="evaluation")
    past.add("training_throughput_samples_per_second", 36.0, job_name="phased")
    past.add("training_target_samples_per_second", 100.0, job_name="phased")
    past.add("training_cpu_cores", 2.0, job_name="phased")
    for rank, cores in enumerate((2.0, 2.1, 7.5, 0.2)):
        past.add("training_rank_cpu_cores", cores, job_name="phased", rank=str(rank), rank_node=f"node-{rank}")
    past.add("trainmedic_job_gpu", 1.0, job_name="phased", gpu_node="node-7", uuid="GPU-p")
    past.add("gpu_utilization_percent", busy, uuid="GPU-p", node="node-7")
    past.add("gpu_memory_used_bytes", 40e9, uuid="GPU-p", node="node-7")
    past.add("gpu_memory_total_bytes", 80e9, uuid="GPU-p", node="node-7")


@pytest.fixture(scope="module")
def prometheus(past: Past, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with prometheus_of(past, tmp_path_factory.mktemp("past")) as url:
        yield url


@pytest.fixture
async def metrics(prometheus: str) -> AsyncIterator[PrometheusApi]:
    api = PrometheusApi(prometheus)
    yield api
    await api.close()


@pytest.fixture
async def store() -> AsyncIterator[InMemoryStore]:
    store = InMemoryStore()
    events = [
        Event("job_failed", at(FAILED_AT), data={"job": "llm-1", "reason": "its process ended by RuntimeError"}),
        Event("job_gone", at(FAILED_AT + 90), data={"job": "llm-1", "reason": "its process ended by RuntimeError"}),
        Event("job_returned", at(BACK_AT), data={"job": "llm-1"}),
        Event("job_failed", at(FAILED_AT), data={"job": "another"}),
    ]
    heard = at(FAILED_AT + 20)
    plain = {"gpu": "GPU-c", "summary": "a GPU fell off the bus", "advice": "isolate_node"}
    verdict = KnownVerdict("v1", "llm-1", 1, heard, heard, "gpu", "high", "node-2", "gpu:xid", plain)
    await store.transact(lambda tx: (tx.append(events), tx.verdicts.save([verdict])))
    yield store
    await store.close()


@pytest.fixture
async def report(metrics: PrometheusApi, store: InMemoryStore) -> JobReport:
    return await ReportCompiler(store, metrics, store).job("llm-1", at(0), at(END))


async def test_only_the_gpus_of_the_job_are_counted(report: JobReport) -> None:
    """The report has the average over all, the highest and the lowest; the neighbour's GPU does not count."""
    assert report.gpus == 3
    assert report.gpu_utilization is not None
    assert report.gpu_utilization.average == pytest.approx(60, abs=0.1)
    assert (report.gpu_utilization.max, report.gpu_utilization.min) == (90, 30)
    assert report.gpu_memory is not None
    assert report.gpu_memory.average == pytest.approx(75, abs=0.1)
    assert (report.gpu_memory.max, report.gpu_memory.min) == (100, 50)


async def test_gpus_known_only_from_dcgm_exporter_count_too(metrics, store) -> None:
    """They match by the UUID under its own label; a GPU that two jobs share belongs to both."""
    report = await ReportCompiler(store, metrics).job("beside", at(0), at(END))
    assert report.gpus == 2
    assert report.gpu_utilization == Spread(26, 51, 1)
    assert report.gpu_memory == Spread(25, 25, 25)


async def test_throughput_is_compared_with_the_jobs_first_stable_hour(report: JobReport) -> None:
    """The baseline stays fixed when the job becomes slow; the score follows from both."""
    assert report.baseline is not None
    assert (report.baseline.value, report.baseline.of) == (100, "first_stable_hour")
    assert at(STARTING) <= report.baseline.since <= at(STARTING + 120)
    assert report.throughput is not None
    assert report.throughput_unit == "samples/s"
    training = END - STARTING - (STARTING + BACK_AT - FAILED_AT)
    expected = (100 * (training - HOUR) + 50 * HOUR) / training
    assert report.throughput.average == pytest.approx(expected, rel=0.02)
    assert report.efficiency is not None
    assert report.efficiency.score == pytest.approx(100 * (0.6 * 0.6 + 0.4 * expected / 100), abs=1)
    assert report.efficiency.rating == "good"


async def test_an_old_baseline_is_found_if_only_the_last_hour_is_requested(metrics, store) -> None:
    """The job was slow for all of that hour, and is not its own baseline."""
    report = await ReportCompiler(store, metrics).job("llm-1", at(SLOW_FROM + 60), at(END))
    assert report.baseline is not None
    assert report.baseline.value == 100
    assert report.throughput is not None
    assert report.throughput.average == pytest.approx(50)


async def test_lost_time_is_reported_by_its_cause(report: JobReport) -> None:
    """Causes are downtime, starts, repeated steps, checkpoints and stalls; nothing counts twice."""
    goodput = report.goodput
    assert goodput is not None
    lost = goodput.lost
    every = goodput.resolution_seconds
    assert lost.failures == pytest.approx(BACK_AT - FAILED_AT, abs=every)
    assert lost.restarts == pytest.approx(2 * STARTING, abs=2.5 * every)
    assert lost.redone == pytest.approx(600, abs=every)
    assert lost.checkpoints == 60 * (6 + 5)  # in 3 hours until the failure, then in 2 hours and 50 minutes
    assert lost.stalls == pytest.approx(STALL[1] - STALL[0], abs=every)
    assert lost.evaluations == lost.repairs == lost.other == 0
    assert goodput.wall_seconds == pytest.approx(END, abs=every)
    assert goodput.ratio == pytest.approx(1 - lost.total / END, abs=0.01)


async def test_late_data_is_the_bottleneck(report: JobReport) -> None:
    """Three fifths of each step wait for it; the report has reasons and advice."""
    assert report.bottleneck is not None
    assert (report.bottleneck.kind, report.bottleneck.severity) == ("data", "high")
    assert "60% of a step is waiting for batches" in report.bottleneck.reasons[0]
    assert report.bottleneck.advice


async def test_anomalies_are_reported_with_their_time_and_worst_value(report: JobReport) -> None:
    """A gradient exploded for a minute, a loss was no number, and the last hour's throughput is low."""
    kinds = {anomaly.kind: anomaly for anomaly in report.anomalies}
    of_gpus = {"gpu_utilization_low", "gpu_memory_full"}
    assert set(kinds) == {"gradient_explosion", "loss_not_finite", "throughput_drop", *of_gpus}
    assert kinds["gradient_explosion"].worst == 240
    assert abs(kinds["gradient_explosion"].since - at(2 * HOUR)) <= timedelta(seconds=72)  # an interval
    assert kinds["loss_not_finite"].worst is None
    assert kinds["throughput_drop"].worst == 50
    assert [(kinds[kind].worst, [gpu.uuid for gpu in kinds[kind].gpus]) for kind in sorted(of_gpus)] == [
        (100, ["GPU-c"]),
        (30, ["GPU-c"]),
    ]


async def test_a_gpu_idle_during_start_or_evaluation_is_not_an_anomaly(metrics, store) -> None:
    """The one idle time during training is, with its GPU, its length and the bound."""
    report = await ReportCompiler(store, metrics).job("phased", at(0), at(END))
    (idle,) = [anomaly for anomaly in report.anomalies if anomaly.kind == "gpu_utilization_low"]
    every = timedelta(minutes=8)  # the mean is over 10 minutes, so it is under the bound a little later, and longer
    assert abs(idle.since - at(IDLE[0])) <= every
    assert abs(idle.until - at(IDLE[1])) <= every
    assert (idle.limit, idle.gpu_count, [(gpu.uuid, gpu.node) for gpu in idle.gpus]) == (50, 1, [("GPU-p", "node-7")])
    assert idle.worst == pytest.approx(8)
    assert "GPU-p on node-7" in idle.summary
    assert "gpu_anomalies" not in report.unknown


async def test_a_job_far_below_its_target_is_poor_however_busy_its_gpus_are(metrics, store) -> None:
    """It has little over a third of the target at 75 % utilisation; the score alone would be good."""
    report = await ReportCompiler(store, metrics).job("phased", at(0), at(END))
    assert report.baseline is not None
    assert (report.baseline.of, report.baseline.value) == ("target", 100)
    assert report.efficiency is not None
    assert report.efficiency.score > 60
    assert (report.efficiency.rating, report.efficiency.limited_by) == ("poor", "throughput")
    assert report.efficiency.throughput_share == pytest.approx(0.36)


async def test_the_cpus_of_a_rank_are_reported_with_the_outliers(metrics, store) -> None:
    """The outliers by rank and node have the most and the fewest."""
    report = await ReportCompiler(store, metrics).job("phased", at(0), at(END))
    assert report.cpu is not None
    assert report.cpu.median_cores == 2
    outliers = {each.rank: each.node for each in (*report.cpu.highest, *report.cpu.lowest) if each.is_outlier}
    assert outliers == {"2": "node-2", "3": "node-3"}


async def test_a_failure_is_reported_once_with_its_verdict(report: JobReport) -> None:
    """The loss of the job follows from its failure; another job's failure is not reported."""
    (failure,) = report.failures
    assert (failure.kind, failure.at, failure.down_seconds) == ("job_failed", at(FAILED_AT), 600)
    assert failure.verdict is not None
    assert (failure.verdict.cause, failure.verdict.node, failure.verdict.gpu) == ("gpu", "node-2", "GPU-c")
    assert failure.verdict.summary == "a GPU fell off the bus"


async def test_unknown_figures_are_null_with_a_reason(metrics, store) -> None:
    """A job without GPUs, throughput or step parts gets no invented number."""
    report = await ReportCompiler(store, metrics).job("cpu-only", at(0), at(END))
    nothing = (report.gpus, report.gpu_utilization, report.efficiency, report.baseline, report.bottleneck)
    assert nothing == (None,) * 5
    assert "trainmedic_job_gpu" in report.unknown["gpu_utilization"]
    assert report.unknown["efficiency"].startswith("it is computed from gpu_utilization, throughput, baseline")
    assert report.goodput is not None
    assert report.goodput.ratio == 1


async def test_without_prometheus_the_report_has_the_data_of_the_store(store) -> None:
    """Each other figure has the reason."""
    report = await ReportCompiler(store).job("llm-1", at(0), at(END))
    assert len(report.failures) == 1
    assert report.goodput is None
    of_the_store = {"oom_events": NOTHING_READ, "network_errors": NOTHING_READ, "evaluations": NONE_REPORTED}
    assert {name: why for name, why in report.unknown.items() if why != NO_PROMETHEUS} == of_the_store
    assert report.anomaly_count is None


async def test_an_unavailable_prometheus_costs_only_its_part(store) -> None:
    """The reason names it, without the secrets of its address."""
    away = PrometheusApi("http://user:secret@127.0.0.1:9/prefix")
    report = await ReportCompiler(store, away).job("llm-1", at(0), at(END))
    await away.close()
    assert len(report.failures) == 1
    assert "Prometheus does not answer" in report.unknown["goodput"]
    assert "secret" not in report.unknown["goodput"]


async def test_an_unknown_job_is_not_found(metrics, store) -> None:
    """There is no empty report. A name is text, whatever it contains."""
    for name in ("nobody", 'x"} or vector(1) #', "a\\"):
        with pytest.raises(NotFound):
            await ReportCompiler(store, metrics).job(name, at(0), at(END))


PANELS = json.loads((ROOT / "monitoring" / "dashboards" / "jobs.json").read_text())["panels"]


@pytest.mark.parametrize("panel", [each for each in PANELS if each.get("targets")], ids=lambda panel: panel["title"])
async def test_every_panel_of_the_dashboard_can_be_queried(metrics, panel) -> None:
    """Joins must bear two jobs that share a GPU. Panels for what this job measured have data."""
    for target in panel["targets"]:
        query = target["expr"].replace("$__rate_interval", "5m").replace("$job", ".*")
        answer = await metrics.read(query, at(0), at(END), timedelta(minutes=10))
        if panel["title"] in ("Utilisation", "GPUs", "Step", "Throughput", "A step", "Steps per second"):
            assert answer or "tokens" in query, query


async def test_a_refused_query_keeps_the_message_of_prometheus(prometheus: str) -> None:
    """It is counted. A query for too many points is rejected here."""
    failures: list[str] = []
    metrics = PrometheusApi(prometheus, on_error=lambda: failures.append("failed"))
    with pytest.raises(MetricsUnavailable, match=r"status 400: .*parse error"):
        await metrics.read("sum(", at(0), at(60), timedelta(seconds=60))
    with pytest.raises(ValueError, match="more than 11000 points"):
        await metrics.read("up", at(0), at(END), timedelta(seconds=1))
    assert await metrics.read("no_such_metric", at(0), at(60), timedelta(seconds=60)) == []
    assert len(failures) == 1
    await metrics.close()


def test_the_command_prints_the_data_of_a_server_with_prometheus(prometheus: str, tmp_path: Path) -> None:
    """The test covers setting to terminal; an unknown figure is a dash with its reason."""
    program, url = start_server(tmp_path, "--prometheus-url", prometheus)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "trainmedic_server", "report", *arguments, "--server", url],
            env={**inherited(), "PYTHONPATH": PYTHON_PATH},
            capture_output=True,
            text=True,
            check=False,
        )

    times = ("--since", at(0).isoformat(), "--until", at(END).isoformat())
    with program:
        shown = run("llm-1", *times)
        assert shown.returncode == 0, shown.stderr
        for line in (
            "GPUs:            3",
            "GPU utilisation: 60 % on average, 30 to 90",
            "baseline:        100 samples/s, the median of its first stable hour, from",
            "bottleneck:      data (high)",
        ):
            assert line in shown.stdout
        assert "gradient_explosion: the gradient norm was 240, over 100" in shown.stdout
        assert json.loads(run("llm-1", *times, "--output", "json").stdout)["efficiency"]["rating"] == "good"
        cpu_only = run("cpu-only", *times).stdout
        assert (
            "efficiency:      - (it is computed from gpu_utilization, throughput, baseline, also unknown)" in cpu_only
        )
        assert "failures: 0" in run("--fleet").stdout
        assert run("nobody", *times).returncode == 5
        assert run("llm-1", "--fleet").returncode == 2
        assert "failures: 0" in run().stdout
