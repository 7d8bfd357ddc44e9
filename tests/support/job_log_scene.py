"""A job with a hostile log, a finding, a verdict and losses by rank, for tests of the pages that show them."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import Any

from msgspec.structs import replace

from tests.contract.test_findings import finding
from tests.contract.test_verdicts import made
from tests.support.api_world import World
from tests.support.clocks import START
from tests.support.filed_logs import FiledLogs
from trainmedic.job.loss_spread import loss_spread
from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.diagnosis.verdict import Advice, Confidence, Evidence, Verdict
from trainmedic_logs.domain.finding import CauseClass, Origin
from trainmedic_logs.domain.known_finding import FindingAlert
from trainmedic_logs.domain.log_search import FoundLine, LogLevel
from trainmedic_server.ports.outside import Presence

JOB = "vision-7b"
FAILED_AT = START - timedelta(minutes=4)
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB."
SCRIPT = (
    "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\"> \u202eevil\u2066 \x00end"
)
ANSI = "\x1b[31mERROR\x1b[0m: the colour is gone \x1b]0;title\x07and the text is here"
LONG = "A" * 700 + " needle " + "B" * 1_000_000


def line(seconds: float, text: str, rank: int | None = 0, level: LogLevel = LogLevel.INFO, **others: Any) -> FoundLine:
    """A line that was printed so long before `START`."""
    node = others.pop("node", f"gpu-{(rank or 0) // 2:02d}")
    source = others.pop("source", "training")
    return FoundLine(START - timedelta(seconds=seconds), text, node, source, level, JOB, 1, rank, **others)


def log_lines(steps: int = 560) -> list[FoundLine]:
    """Steps of four ranks, one each second until `START`, among them what breaks a careless page."""
    lines = [
        line(
            steps - number,
            f"[rank{number % 4}] step {number} | loss {2.5 - number / 1000:.4f} | lr 3.0e-04",
            number % 4,
        )
        for number in range(steps)
    ]
    lines += [
        line(240, OOM, 3, LogLevel.ERROR),
        line(239, '  File "train.py", line 310, in step\n    loss.backward()'.replace("\n", " "), 3, LogLevel.ERROR),
        line(200, SCRIPT, 1),
        line(199, ANSI, 1, LogLevel.WARNING),
        line(198, LONG, 2, LogLevel.WARNING),
        FoundLine.of_json({**line(197, "a line without a time of its own", 2).to_json(), "clock": "guessed"}),
        line(196, "NVRM: Xid (PCI:0000:9b:00): 79", None, LogLevel.ERROR, node="gpu-01", source="kernel"),
    ]
    return lines


def presence(losses: dict[str, Any] | None = None) -> Presence:
    """The job's, with four ranks of which one has another loss than the others and one has none."""
    placement = [{"rank": rank, "node": f"gpu-{rank // 2:02d}", "gpu": None} for rank in range(8)]
    figures = {
        rank: {"loss": 2.31 + rank / 1000, "loss_step": 560, "node": f"gpu-{rank // 2:02d}"} for rank in range(8)
    }
    figures[3]["loss"], figures[5]["loss"] = math.nan, 7.25
    said = loss_spread(figures) if losses is None else losses
    details = {"job": JOB, "world_size": 8, "ranks": list(range(8)), "placement": placement, "step": 560}
    return Presence(JOB, START, {**details, "losses": said, "capabilities": {"job.rollback": "live"}})


async def arrange(world: World, logs: FiledLogs | None = None) -> None:
    """Put the scene into a world; into its logs too, where those are given."""
    if logs is not None:
        logs.lines += log_lines()
    if world.bus.present_jobs is None:
        world.bus.present = [*world.bus.present, presence()]
    else:
        world.bus.present_jobs = [*world.bus.present_jobs, presence()]
    oom = finding(
        "01f0",
        target=Target(TargetKind.JOB, job=JOB),
        origin=Origin("training", "gpu-01", job=JOB, attempt=1, stream="/var/log/vision-7b/rank-3.log"),
        line=OOM,
        first_at=FAILED_AT,
        last_at=FAILED_AT + timedelta(seconds=20),
        heard_first_at=FAILED_AT,
        heard_at=FAILED_AT,
        nodes=frozenset({"gpu-01"}),
        ranks=frozenset({3}),
        alert=FindingAlert(
            {"alertname": "CUDAOutOfMemory", "severity": "critical"}, "0a", FAILED_AT, "oom", "<b>oom</b>"
        ),
    )
    verdict = Verdict(
        cause=CauseClass.GPU_MEMORY,
        confidence=Confidence.HIGH,
        summary="Rank 3 (gpu-01) ran out of GPU memory.",
        advice=Advice.ASK,
        ranks=(3,),
        evidence=(Evidence("rank 3 said it first", OOM, "training", "gpu-01", 3, FAILED_AT, "cuda-oom"),),
    )
    known = replace(made(1, job=JOB, plain=verdict.plain()), began_at=FAILED_AT, made_at=FAILED_AT, node=None)

    def work(tx: Any) -> None:
        tx.findings.save([oom])
        tx.verdicts.save([known])

    await world.findings.transact(work)


def moment(at: datetime) -> str:
    """A time as the page's addresses have it."""
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")
