"""Pictures of the README: a real repair's loss curve, and the console during repairs.

    python packaging/pictures.py

Runs the demo for three minutes, and writes docs/loss.svg, docs/console.png and docs/console-dark.png. Needs Chromium
and requirements/test.txt.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import httpx
from playwright.sync_api import sync_playwright
from prometheus_client.parser import text_string_to_metric_families

from trainmedic_server.demo.faults import FAULTS, FaultKind
from trainmedic_server.demo.stage import DemoStage

DOCS = Path(__file__).parents[1] / "docs"
JOB = FAULTS[FaultKind.DATA].target
CALM_SECONDS = 25.0
LONGEST = 240.0
SAMPLED_EVERY = 0.1
LARGEST = 150 * 1024
WIDE, TALL, LEFT, TOP, BOTTOM = 760, 260, 44, 58, 30
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #4d5956; }
.card { fill: #fff; stroke: #d5dcda; }
.grid { stroke: #e7ecea; }
.curve { fill: none; stroke: #0b6b58; stroke-width: 1.6; }
.mark { stroke: #8a4f00; stroke-dasharray: 3 3; }
.title { font-weight: 600; font-size: 13px; fill: #16201e; }
@media (prefers-color-scheme: dark) {
  text { fill: #a9b5b2; } .card { fill: #151b1a; stroke: #35403e; } .grid { stroke: #26302e; }
  .curve { stroke: #4cc2a4; } .mark { stroke: #e0a458; } .title { fill: #e6eceb; }
}
"""
Point = tuple[float, float]


class LossRecord:
    """Losses of a job, read in a thread, as (seconds since 1970, loss)."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self.points: list[Point] = []
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> LossRecord:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _read(self) -> None:
        with httpx.Client(trust_env=False, timeout=5) as client:
            while not self._over.wait(SAMPLED_EVERY):
                with contextlib.suppress(httpx.HTTPError):  # the job is just starting
                    self.points += [(time.time(), value) for value in losses_in(client.get(self._url).text)]


def losses_in(exposition: str) -> Iterator[float]:
    for family in text_string_to_metric_families(exposition):
        if family.name == "training_loss":
            yield from (sample.value for sample in family.samples)


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="trainmedic-pictures-") as directory,
        DemoStage(Path(directory), only_own=True) as stage,
        LossRecord(stage.metrics_of[JOB]) as losses,
    ):
        stage.wait_until_learned()
        pass_time(stage, CALM_SECONDS)
        caused = time.time()
        stage.cause(FaultKind.DATA)
        wait(stage, lambda: any(run["status"] == "succeeded" for run in stage.runs()), "the repair of the job")
        pass_time(stage, CALM_SECONDS)
        (run,) = stage.runs()
        events = httpx.get(f"{stage.url}/history/{run['run_id']}", trust_env=False).json()["events"]
        points = [point for point in losses.points if point[0] >= caused - CALM_SECONDS]
        write(DOCS / "loss.svg", loss_curve(points, caused, events).encode())
        for kind in (FaultKind.GRADIENTS, FaultKind.HEAT, FaultKind.ASK):
            stage.cause(kind)
        wait(stage, lambda: is_busy(stage), "a question and two changes")
        for scheme, name in (("light", "console.png"), ("dark", "console-dark.png")):
            write(DOCS / name, screenshot(stage.url, scheme))


def is_busy(stage: DemoStage) -> bool:
    now = httpx.get(f"{stage.url}/now", trust_env=False).json()
    return bool(now["approvals"]) and sum(each["is_reversible"] for each in now["changed"]) == 2


def wait(stage: DemoStage, is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LONGEST
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} did not come within {LONGEST:g} s; the history: {stage.runs()}")
        pass_time(stage, 0.5)


def pass_time(stage: DemoStage, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        stage.check()
        time.sleep(0.2)


def screenshot(url: str, scheme: Any) -> bytes:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1180, "height": 720}, color_scheme=scheme)
        page.goto(url)
        page.locator(".live-word", has_text="live").wait_for(state="attached")
        picture = page.screenshot()
        browser.close()
    return picture


def loss_curve(points: Sequence[Point], caused: float, events: Sequence[Mapping[str, Any]]) -> str:
    begin, end = points[0][0], points[-1][0]
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)

    def across(at: float) -> float:
        return LEFT + (WIDE - LEFT - 16) * (at - begin) / (end - begin)

    def down(loss: float) -> float:
        return TALL - BOTTOM - (TALL - TOP - BOTTOM) * (loss - low) / (high - low)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {TALL}" role="img" aria-labelledby="title">',
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDE - 1}" height="{TALL - 1}" rx="7"/>',
        f'<text class="title" id="title" x="16" y="24">Loss of {JOB}: it jumps on bad data, goes back and recovers'
        "</text>",
    ]
    for loss in (low, (low + high) / 2, high):
        height = down(loss)
        lines.append(f'<line class="grid" x1="{LEFT}" x2="{WIDE - 16}" y1="{height:.1f}" y2="{height:.1f}"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{loss:.1f}</text>')
    for second in range(-20, int(end - caused) + 1, 10):
        place = across(caused + second)
        lines.append(f'<text x="{place:.1f}" y="{TALL - 10}" text-anchor="middle">{second} s</text>')
    for number, (at, text) in enumerate(marks(caused, events)):
        place, height = across(at), TOP - 14 + 14 * number
        lines.append(f'<line class="mark" x1="{place:.1f}" x2="{place:.1f}" y1="{height}" y2="{TALL - BOTTOM}"/>')
        lines.append(f'<text x="{place + 5:.1f}" y="{height + 5}">{escape(text)}</text>')
    drawn = " ".join(f"{across(at):.1f},{down(loss):.1f}" for at, loss in points)
    return "\n".join([*lines, f'<polyline class="curve" points="{drawn}"/>', "</svg>", ""])


def marks(caused: float, events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, str]]:
    yield caused, "the data goes bad"
    texts = {
        ("step_started", "go_back"): "rolled back, past the bad batches",
        ("step_succeeded", "slow_down"): "half the learning rate, until the alert resolves",
    }
    for event in events:
        if (text := texts.get((event["kind"], event["data"].get("step")))) is not None:
            yield datetime.fromisoformat(event["at"]).timestamp(), text


def write(path: Path, content: bytes) -> None:
    if len(content) > LARGEST:
        raise SystemExit(f"{path.name} has {len(content)} bytes; at most {LARGEST} are allowed")
    path.write_bytes(content)
    print(f"{path}: {len(content)} bytes")


if __name__ == "__main__":
    main()
