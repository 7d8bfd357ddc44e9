"""``trainmedic demo``."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import tempfile
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import httpx

from trainmedic_core import duration
from trainmedic_core.cli import exits
from trainmedic_core.cli.choice import NearestChoice
from trainmedic_core.target import Target
from trainmedic_core.words import plain
from trainmedic_server.demo.faults import FAULTS, FaultKind
from trainmedic_server.demo.stage import DemoStage
from trainmedic_server.domain.run import Status
from trainmedic_server.errors import DemoFailed
from trainmedic_server.presentation import runs, targets

_SHORTEST, _LONGEST = timedelta(seconds=1), timedelta(hours=2)
_USUAL = "30m"
_LOOK_SECONDS = 0.5
_QUIT = ("q", "\x04")  # Ctrl-D
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _length(ctx: click.Context, param: click.Parameter, value: str) -> timedelta:
    try:
        length = duration.parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if not _SHORTEST <= length <= _LONGEST:
        raise click.BadParameter(f"{value} is not between {duration.write(_SHORTEST)} and {duration.write(_LONGEST)}")
    return length


@click.command()
@click.option(
    "--fault",
    "faults",
    type=NearestChoice([kind.value for kind in FaultKind]),
    multiple=True,
    help="Cause this fault once the jobs have learned. Repeatable.",
)
@click.option(
    "--for",
    "length",
    metavar="DURATION",
    default=_USUAL,
    show_default=True,
    callback=_length,
    help="Longest time to run. Without a terminal it ends once each --fault is repaired.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of the console. Default: a free one.")
@click.option("--plain", is_flag=True, help="Train without PyTorch.")
@click.option("--only-own", is_flag=True, help="Use neither Prometheus nor Alertmanager.")
def demo(faults: Sequence[str], length: timedelta, port: int, plain: bool, only_own: bool) -> None:
    """Show repairs on this machine, without a GPU: press a key for a fault, and watch the console.

    Runs a server, three small trainings, two nodes with simulated GPUs, and Prometheus and Alertmanager if they are
    installed. Everything listens on 127.0.0.1 and ends with the demo. Nothing is left on the disk.

    \b
    trainmedic demo
    trainmedic demo --fault data --for 60s
    """
    for number in _ENDING:
        signal.signal(number, _interrupt)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="trainmedic-demo-") as directory,
            contextlib.suppress(KeyboardInterrupt),
            DemoStage(Path(directory), port, only_own=only_own, plain=plain) as stage,
        ):
            _DemoSession(stage).play([FaultKind(fault) for fault in faults], length)
    except DemoFailed as error:
        raise exits.Failure(str(error)) from error


def _interrupt(number: int, frame: object) -> None:
    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN)  # the programs are being ended
    raise KeyboardInterrupt


class _DemoSession:
    def __init__(self, stage: DemoStage) -> None:
        self._stage = stage
        self._shown: dict[str, str] = {}  # text last shown, by run ID
        self._repaired: set[str] = set()  # jobs and nodes
        self._newest: dict[str, str] = {}
        """Text of the newest run by job or node."""

    def play(self, faults: Sequence[FaultKind], length: timedelta) -> None:
        """Raise Failure if one of `faults` was not repaired in time."""
        alerts = _source_of_alerts(self._stage)
        click.echo(f"Console: {self._stage.url}   (alerts: {alerts}; for {duration.write(length)})")
        click.echo("The jobs llm-1, llm-2 and llm-3 learn for some seconds.")
        self._stage.wait_until_learned()
        with _keys() as read_key:
            if read_key is not None:
                _show_keys()
            for kind in faults:
                self._cause(kind)
            self._loop(faults, read_key, time.monotonic() + length.total_seconds())
        if missing := self._unrepaired(faults):
            raise exits.Failure(f"not repaired: {'; '.join(map(self._why_missing, missing))}")

    def _why_missing(self, kind: FaultKind) -> str:
        return f"{kind} ({self._newest.get(FAULTS[kind].target, 'its alert has not started a run')})"

    def _unrepaired(self, faults: Sequence[FaultKind]) -> list[FaultKind]:
        return [kind for kind in faults if FAULTS[kind].target not in self._repaired]

    def _loop(self, faults: Sequence[FaultKind], read_key: Any, until: float) -> None:
        while time.monotonic() < until:
            self._stage.check()
            with contextlib.suppress(httpx.HTTPError):  # the next look repeats it
                self._show_changes()
            if read_key is None and faults and not self._unrepaired(faults):
                return
            if read_key is None:
                time.sleep(_LOOK_SECONDS)
                continue
            key = read_key(_LOOK_SECONDS)
            if key in _QUIT:
                return
            for kind, fault in FAULTS.items():
                if key == fault.key:
                    self._cause(kind)

    def _cause(self, kind: FaultKind) -> None:
        _print_timed(f"FAULT {kind}: {FAULTS[kind].text}")
        if kind is FaultKind.ASK:
            url = self._stage.url
            _print_timed(
                f"A person decides: on the console, or by 'trainmedic approvals --server {url}' and 'runs approve'"
            )
        self._stage.cause(kind)

    def _show_changes(self) -> None:
        for item in self._stage.runs():
            place, target = _job_or_node(item), targets.words(str(item["target"]), self._stage.index_of)
            parts = (
                runs.title(item["playbook"], str(target)),
                runs.status_text(item),
                runs.outcome_text(item).strip("-"),
            )
            text = plain(targets.shortened(": ".join(filter(None, parts)), self._stage.index_of))
            self._newest[place] = text
            if self._shown.get(item["run_id"]) != text:
                self._shown[item["run_id"]] = text
                _print_timed(text)
            if item["status"] == Status.SUCCEEDED and not item.get("owes_undo"):
                self._repaired.add(place)


def _job_or_node(run: Mapping[str, Any]) -> str:
    target = Target.of_key(run["target"]) if run["target"] else None
    return (target.job or target.node or "") if target is not None else ""


def _source_of_alerts(stage: DemoStage) -> str:
    if stage.prometheus is None:
        return "the demo's own rules, as Prometheus is not used"
    return "Prometheus and Alertmanager" if stage.alertmanager else "Prometheus, sent by the demo without Alertmanager"


def _show_keys() -> None:
    click.echo("Keys:")
    for fault in FAULTS.values():
        click.echo(f"  {fault.key}  {fault.text}")
    click.echo("  q  end")


def _print_timed(text: str) -> None:
    click.echo(f"{datetime.now(UTC):%H:%M:%SZ}  {text}")


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Yield a function that waits some seconds for a key, "" if none came. None without a terminal."""
    if not sys.stdin.isatty():
        yield None
        return
    before = termios.tcgetattr(sys.stdin)

    def read_key(seconds: float) -> str:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        # Not sys.stdin.read: it takes all keys that wait, and select() does not see what it buffers.
        return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else ""

    try:
        tty.setcbreak(sys.stdin)
        yield read_key
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
