"""Every shipped playbook, at every moment of its run: the alert resolves, a person ends it, a step fails.

The moments are found by running the playbook, and its alerts are those of its own tests, so a playbook that is added
later is covered too. The real engine and the real actions run in virtual time on a model of a site (``site``), which
is compared afterwards with what the server says that it has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.examples import some
from tests.unit.playbooks.site import Site, SiteBus, SiteCluster, SiteMetrics, SiteNotifier
from trainmedic_core import yaml_files
from trainmedic_core.fingerprint import fingerprint
from trainmedic_core.target import TargetKind
from trainmedic_server import telemetry
from trainmedic_server.actions import registry
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.catalog import loader
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook
from trainmedic_server.catalog.library import StaticCatalog
from trainmedic_server.domain import changes, inventory
from trainmedic_server.domain.alert import Alert, AlertStatus, Delivery
from trainmedic_server.domain.job_verdict import JobVerdict, VerdictsOnJob
from trainmedic_server.domain.playbook import ActionStep, Mode, WaitStep
from trainmedic_server.domain.run import OrderKind, Run, Status, StepStatus
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine import after_resolve
from trainmedic_server.engine.service import Engine
from trainmedic_server.ports.actions import Services
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.ports.store import HistoryFilter
from trainmedic_server.simulation import suite_format, virtual_time
from trainmedic_server.simulation.suite_format import AlertContent, TestEntry
from trainmedic_server.simulation.virtual_time import BEGINNING, VirtualClock

PLAYBOOKS = Path(__file__).parents[3] / "playbooks"
SUITES = sorted(PLAYBOOKS.glob(f"*{yaml_files.TEST_SUFFIX}.yaml"))
HORIZON = timedelta(hours=1)
"""How long a run is watched. What waits longer than that is not seen to time out."""
GIVES_BACK = {"uncordon", "job.resume", "launcher.include_node"}
ALWAYS = GIVES_BACK | {"job.checkpoint", "node.facts"}
SILENCING = {"job.stop", "job.pause"}
ON_JOBS = {"launcher.exclude_node", "launcher.include_node"}
"""These silence the alerts of a job too, if that is what they work on."""
SPECS, _ = registry.combine(registry.BUILT_IN, ())
"""The actions of this package. To look for those of other packages would take longer than a run does."""
CHECKED_ACTIONS = registry.Registry(SPECS, None, [])
LATEST = timedelta(seconds=1.5)
"""How long after the resolution something may still be done: a drain looks each second."""


@dataclass(frozen=True)
class Case:
    """A playbook with an alert that starts it, and what happens to its run and when."""

    book: YamlPlaybook
    alert: AlertContent
    test: TestEntry
    resolved: float | None = None
    """Seconds after the alert's beginning; None: at the end of the time that is watched."""
    orders: tuple[tuple[float, OrderKind], ...] = ()
    undo: bool = False
    faults: Mapping[str, str] = field(default_factory=dict)
    workers: int = 4
    mode: Mode = Mode.ENFORCE

    def __str__(self) -> str:
        told = f"{self.alert.labels} resolved={self.resolved} orders={self.orders} undo={self.undo}"
        return f"{self.book.definition.name}: {told} faults={dict(self.faults)} mode={self.mode}"


@dataclass
class Played:
    """What there is to see after a case."""

    case: Case
    run: Run | None
    site: Site
    cluster: SiteCluster
    resolved_at: datetime
    actions: registry.Registry

    def moments(self) -> list[float]:
        """Seconds at which something is about to begin, is in the middle, or ends: of each step, and each deed."""
        assert self.run is not None
        points = {0.5}
        for step in self.run.steps:
            if step.started_at and step.ended_at and step.status is not StepStatus.SKIPPED:
                begun, ended = _seconds(step.started_at), _seconds(step.ended_at)
                points |= {begun - 0.3, begun + 0.3, (begun + ended) / 2, ended - 0.3}
        for earlier, later in pairwise(self.site.deeds):
            points.add(_seconds(earlier.at + (later.at - earlier.at) / 2))
        rounded = sorted({round(point, 1) for point in points if 0 < point < HORIZON.total_seconds()})
        return [point for index, point in enumerate(rounded) if index == 0 or point - rounded[index - 1] > 0.15]


def play(case: Case) -> Played:
    return virtual_time.run(_play(case))


async def _play(case: Case) -> Played:
    store, clock = InMemoryStore(), VirtualClock()
    is_elastic = any(getattr(step, "action", None) == "launcher.nodes" for step in case.book.definition.steps)
    site = Site(clock, *await _target_of(case), faults=case.faults, workers=case.workers, is_elastic=is_elastic)
    cluster = SiteCluster(site)
    services = Services(
        clock,
        SiteBus(site),
        None,
        SiteNotifier(site),
        None,
        cluster,
        metrics=SiteMetrics(),  # type: ignore[arg-type]
    )
    actions = registry.Registry(SPECS, services, [])
    engine = _engine(case, store, actions, clock, case.mode)
    await engine.start()
    alert = _alert(case, clock)
    await engine.admit(Delivery("d1", clock.now(), "trainmedic", "{}", "", (alert,)))
    happens: list[tuple[float, OrderKind | None]] = [*case.orders]
    if case.resolved is not None:
        happens.append((case.resolved, None))
    resolved_at = None
    for at, order in sorted(happens, key=lambda each: each[0]):
        await clock.sleep_until(BEGINNING + timedelta(seconds=at))
        if order is None:
            resolved_at = await _resolve(engine, clock, alert)
            continue
        run = await _run(store)
        is_last = case.resolved is None and case.book.definition.guards.again is None
        if run is not None and not run.is_open and is_last:
            break  # no order can come to it any more
        if run is not None and run.is_open and (order is not OrderKind.REJECT or run.waiting_on == "approval"):
            await engine.order(run.id, order, "ann", undo=case.undo)
    if resolved_at is None:
        await _pass_until(store, clock, _is_idle)
        resolved_at = await _resolve(engine, clock, alert)
    await _pass_until(store, clock, lambda run, now: not run.is_open and not run.owes_undo)
    await engine.stop()
    return Played(case, await _run(store), site, cluster, resolved_at, actions)


async def _resolve(engine: Engine, clock: VirtualClock, alert: Alert) -> datetime:
    now = clock.now()
    over = Alert(alert.fingerprint, AlertStatus.RESOLVED, alert.labels, alert.annotations, alert.starts_at, now)
    await engine.admit(Delivery("d2", now, "trainmedic", "{}", "", (over,)))
    return now


async def _pass_until(store: InMemoryStore, clock: VirtualClock, is_over: Callable[[Run, datetime], bool]) -> None:
    """Let time pass until there is no run, or this is so of it; for `HORIZON` at most."""
    latest = clock.now() + HORIZON
    begun = await _run(store)
    while begun is not None and clock.now() < latest:
        # As the engine reads it: a page of the history costs several times as much.
        (run,) = await store.transact(lambda tx: tx.runs([begun.id]))
        if is_over(run, clock.now()):
            return
        await clock.sleep_until(clock.now() + timedelta(seconds=20))


def _is_idle(run: Run, now: datetime) -> bool:
    """Whether the run has ended, or waits for longer than is watched."""
    waits = [step for step in run.steps if step.status is StepStatus.WAITING and step.started_at and not step.attempts]
    waited = [step for step in waits if now - step.started_at > timedelta(minutes=1)]
    return not run.is_open or any(step.deadline is None or step.deadline > now + HORIZON for step in waited)


def _engine(case: Case, store: InMemoryStore, actions: registry.Registry, clock: VirtualClock, mode: Mode) -> Engine:
    given = JobVerdict.of(case.test.job.verdict.model_dump()) if case.test.job.verdict else None
    verdicts = {case.test.job.name: VerdictsOnJob(given, given)} if given else {}
    topology = Topology(inventory.parse(case.test.inventory), verdicts=verdicts)
    catalog = StaticCatalog([case.book], actions)
    return Engine(store, catalog, actions, clock, EngineLimits(mode=mode), telemetry.Metrics(), lambda: topology)


_TARGETS: dict[tuple[str, str], tuple[str, str]] = {}
"""By playbook and labels, which the cases of one playbook share."""


async def _target_of(case: Case) -> tuple[str, str]:
    """The names of the node and the job that the alert is about."""
    key = (case.book.definition.name, str(case.alert.labels))
    if key not in _TARGETS:
        _TARGETS[key] = await _looked_up(case)
    return _TARGETS[key]


async def _looked_up(case: Case) -> tuple[str, str]:
    store, clock = InMemoryStore(), VirtualClock()
    engine = _engine(case, store, CHECKED_ACTIONS, clock, Mode.OBSERVE)
    alert = _alert(case, clock)
    await engine.admit(Delivery("d0", clock.now(), "trainmedic", "{}", "", (alert,)))
    run = await _run(store)
    target = run.target if run is not None else None
    return (target and target.node) or "node-a7", (target and target.job) or "olmo-3"


def _alert(case: Case, clock: VirtualClock) -> Alert:
    labels = dict(case.alert.labels)
    return Alert(fingerprint(labels), AlertStatus.FIRING, labels, dict(case.alert.annotations), clock.now(), None)


async def _run(store: InMemoryStore) -> Run | None:
    page, _ = await store.page(HistoryFilter(), 10, None)
    return page[0] if page else None


# --- what must hold -----------------------------------------------------------------------------------------------


def wrongs(played: Played) -> list[str]:
    """What is not as it must be once everything has ended."""
    return [f"{played.case}: {wrong}" for wrong in _wrongs(played)]


def _wrongs(played: Played) -> Iterator[str]:
    run, site = played.run, played.site
    if run is None or not run.steps:
        if site.deeds:
            yield f"{[deed.action for deed in site.deeds]} without a run"
        return
    if run.is_open:
        yield f"the run is {run.status} for ever, waiting for {run.waiting_on}"
    yield from _after_resolve(played)
    said = {change.action for change in changes.of_run(run)} | {
        change.action for change in changes.never_given_back(run, _leaves_change(played))
    }
    if site.caps and "gpu.power_limit" not in said:
        yield "a power limit stands that is neither owed nor declared"
    for action, scale in site.scales.items():
        if abs(scale - 1) > 1e-9 and action not in said:
            yield f"{action} stands at {scale} and is neither owed nor declared"
    if site.workers != played.case.workers and "job.dataloader_workers" not in said:
        yield "the number of loaders is another, and that is neither owed nor declared"
    if site.is_paused:
        yield "the job is paused"
    if played.cluster.is_cordoned and not said & {"k8s.cordon", "k8s.drain"}:
        yield "the node is cordoned, and that is neither owed nor declared"
    if site.excluded and "launcher.exclude_node" not in said:
        yield "the job does without the node, and that is neither owed nor declared"
    is_told = site.told or played.case.orders or run.status is Status.FAILED  # the server tells of failures
    if (played.cluster.is_cordoned or site.excluded) and not is_told:
        yield "a node is out of use, and nobody was told"
    if site.failed_checks and any(deed.action in GIVES_BACK for deed in site.deeds):
        yield "a node is back whose check has failed"
    if run.owes_undo:
        yield "an undo is owed for ever"


def _after_resolve(played: Played) -> Iterator[str]:
    """What was begun although the alert had resolved, and stands before the playbook's last wait for that."""
    latest = played.resolved_at + LATEST
    silencing = SILENCING | (ON_JOBS if played.case.book.definition.target_kind is TargetKind.JOB else set())
    if any(deed.action in silencing and deed.at <= played.resolved_at for deed in played.site.deeds):
        return
    allowed = ALWAYS | _behind_waits(played.case.book)
    for deed in played.site.deeds:
        if deed.at > latest and not deed.is_undo and deed.action not in allowed:
            resolved = _seconds(played.resolved_at)
            yield f"{deed.action} at {_seconds(deed.at)} s, though the alert had resolved at {resolved} s"


def _behind_waits(book: YamlPlaybook) -> set[str]:
    """The actions that stand behind the last ``wait_for: resolved`` of their list of steps."""
    found: set[str] = set()
    for steps in (book.definition.steps, book.definition.on_success, book.definition.on_failure):
        waits = [place for place, step in enumerate(steps) if isinstance(step, WaitStep)]
        behind = steps[waits[-1] :] if waits else ()
        found |= {step.action for step in behind if isinstance(step, ActionStep)}
    return found


def _leaves_change(played: Played) -> Callable[[str], bool]:
    def leaves(action: str) -> bool:
        spec: Any = played.actions.action_class(action)
        return bool(spec.harmful and not spec.gives_back)

    return leaves


def _seconds(moment: datetime) -> float:
    return round((moment - BEGINNING).total_seconds(), 2)


# --- the cases ----------------------------------------------------------------------------------------------------


@cache
def beginnings(path: Path) -> Sequence[Played]:
    """A run for each way of an alert through the playbook: the alert never resolves in it."""
    found: dict[tuple[Any, ...], Played] = {}
    begun: set[str] = set()
    suites, problems = suite_format.read(path)
    assert problems == []
    for suite in suites:
        books = [_enforced(book) for file in suite.playbooks for book in _load(file)]
        for test in suite.spec.tests:
            for entry in test.alerts[:1]:
                for book in books:
                    # Tests of a suite mostly differ in what else happens, or in what they expect.
                    alike = repr((book.definition.name, entry.alert, test.job, test.inventory))
                    if alike in begun:
                        continue
                    begun.add(alike)
                    played = play(Case(book, entry.alert, test))
                    if played.run is not None and played.run.steps:
                        ways = tuple((step.id, step.status) for step in played.run.steps)
                        found.setdefault((book.definition.name, ways), played)
    return list(found.values())


def _load(path: Path) -> Sequence[YamlPlaybook]:
    loaded = loader.load_file(path, CHECKED_ACTIONS)
    assert loaded.problems == ()
    return loaded.playbooks


def _enforced(book: YamlPlaybook) -> YamlPlaybook:
    """The playbook, which also acts where it is shipped to observe only."""
    if book.definition.mode is Mode.ENFORCE:
        return book
    (acting,) = _parsed({**_document(book), "mode": Mode.ENFORCE.value})
    return acting


def _with(case: Case, **changed: Any) -> Case:
    return Case(**{**{name: getattr(case, name) for name in Case.__dataclass_fields__}, **changed})


def _last_wait(played: Played) -> float | None:
    """The middle of the run's last wait for the resolution."""
    assert played.run is not None
    waits = [step for step in played.run.steps if step.kind == "wait_for" and step.started_at]
    if not waits or waits[-1].started_at is None:
        return None
    begun = _seconds(waits[-1].started_at)
    ended = _seconds(waits[-1].ended_at or played.resolved_at)
    return (begun + ended) / 2


each_playbook = pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem.removesuffix(yaml_files.TEST_SUFFIX))


@each_playbook
def test_its_alert_resolves_at_any_moment(path: Path) -> None:
    """Before each step, at each wait and during each action: nothing harmful begins after that, and what is changed is
    given back, owed or declared."""
    found = []
    for first in beginnings(path):
        found += wrongs(first)
        for moment in some(first.moments()):
            found += wrongs(play(_with(first.case, resolved=moment)))
    assert found == []


def test_a_drain_that_went_on_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above looks for is found where the engine does not look whether the alert still fires."""
    monkeypatch.setattr(after_resolve, "is_unwanted", lambda draft, state: False)
    first = beginnings(PLAYBOOKS / f"gpu-broken{yaml_files.TEST_SUFFIX}.yaml")[0]
    assert any("k8s.drain" in wrong for wrong in wrongs(play(_with(first.case, resolved=30.0))))


@each_playbook
def test_a_person_cancels_it_at_any_moment(path: Path) -> None:
    """While the alert fires, and in what is done after it has resolved."""
    found = []
    for first in beginnings(path):
        over = _last_wait(first)
        runs = [first, *([play(_with(first.case, resolved=over))] if over is not None else [])]
        for run in runs:
            for number, moment in some(enumerate(run.moments()[::2])):
                case = _with(run.case, orders=((moment, OrderKind.CANCEL),), undo=number % 2 == 1)
                found += wrongs(play(case))
    assert found == []


@each_playbook
@pytest.mark.parametrize("fault", ["rejected", "failed", "silent", "lost"])
def test_any_of_its_steps_fails(path: Path, fault: str) -> None:
    """Each action alone, for good, with an alert that resolves in the last wait, or never."""
    found = []
    for first in beginnings(path):
        assert first.run is not None
        names = {step.action for step in first.run.steps if step.action and step.phase == "steps"}
        names |= {"check"} if "k8s.create_job" in names else set()
        # As a dictionary: both are None where the run has no wait.
        resolutions = dict.fromkeys((_last_wait(first), 5.0 if fault in ("failed", "lost") else None))
        for name, resolved in some(product(sorted(names), resolutions)):
            found += wrongs(play(_with(first.case, faults={name: fault}, resolved=resolved)))
    assert found == []


@each_playbook
def test_people_reject_it_or_do_not_answer(path: Path) -> None:
    """With a question before each of its steps: what it has changed until then is given back, owed or declared."""
    found = []
    for first in beginnings(path):
        text = _document(first.case.book)
        for place in some(range(len(text["steps"]) + 1)):
            steps = [*text["steps"][:place], {"approve": "go on?", "timeout": "5m"}, *text["steps"][place:]]
            (book,) = _parsed({**text, "steps": steps})
            for orders in ((), tuple((at, OrderKind.REJECT) for at in range(1, 3600, 240))):
                played = play(_with(first.case, book=book, orders=orders, undo=place % 2 == 1))
                found += wrongs(played)
    assert found == []


@each_playbook
def test_its_numbers_are_at_their_edges(path: Path) -> None:
    """Each number that it gives an action is the least and the most that the action takes; where the playbook loads,
    its run ends and declares what it changed."""
    found = []
    for first in beginnings(path)[:1]:
        for changed in some(_edges_of(first)):
            books = _parsed(changed, may_fail=True)
            found += [wrong for book in books for wrong in wrongs(play(_with(first.case, book=book)))]
    assert found == []


def test_most_edges_are_played() -> None:
    """A playbook with a number at its edge loads, so that the test above sees it run."""
    found = [(first, changed) for path in SUITES for first in beginnings(path)[:1] for changed in _edges_of(first)]
    loaded = [changed for _, changed in found if _parsed(changed, may_fail=True)]
    assert len(loaded) > 0.8 * len(found) > 10


def _document(book: YamlPlaybook) -> dict[str, Any]:
    """The playbook as plain data. YAML 1.1, which this reader speaks, takes its key ``on`` for a truth value."""
    read = yaml.load((PLAYBOOKS / f"{book.definition.name}.yaml").read_bytes(), yaml.CSafeLoader)
    return {"on" if key is True else key: value for key, value in read.items()}


def _parsed(text: Mapping[str, Any], *, may_fail: bool = False) -> Sequence[YamlPlaybook]:
    source = str(PLAYBOOKS / f"{text['playbook']}.yaml")
    written, actions = yaml.dump(dict(text), Dumper=yaml.CSafeDumper, sort_keys=False), CHECKED_ACTIONS
    attached = loader._attached(written, source, ())
    books, problems = loader.load(written, source, actions, attached)
    assert may_fail or problems == []
    return books


def _edges_of(first: Played) -> Iterator[Mapping[str, Any]]:
    """The playbook with one number of one step at an edge of what the action takes."""
    text = _document(first.case.book)
    for place, step in enumerate(text["steps"]):
        spec: Any = CHECKED_ACTIONS.action_class(step.get("action", ""))
        properties = spec.Params.model_json_schema()["properties"] if spec is not None else {}
        for name, value in (step.get("with") or {}).items():
            if not isinstance(value, int | float) and "vars." not in str(value):
                continue
            options = [properties.get(name, {}), *properties.get(name, {}).get("anyOf", ())]
            for option in options:
                bounds = {option[key] for key in ("minimum", "maximum") if key in option}
                bounds |= {option["exclusiveMinimum"] + 1 for _ in [0] if "exclusiveMinimum" in option}
                for bound in sorted(bounds):
                    number = int(bound) if float(bound).is_integer() else bound
                    changed = {**step, "with": {**step["with"], name: number}}
                    yield {**text, "steps": [*text["steps"][:place], changed, *text["steps"][place + 1 :]]}
