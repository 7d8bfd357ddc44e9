"""Playbook tests: the real engine on an in-memory store, in virtual time, with scripted actions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from msgspec import Struct

from trainmedic_core import duration
from trainmedic_core.fingerprint import fingerprint
from trainmedic_core.problems import DocumentPath, FileProblem, did_you_mean, path_text
from trainmedic_core.target import Target
from trainmedic_logs.lines.rule import RuleSet
from trainmedic_logs.rules.log_rule_library import LogRuleLibrary
from trainmedic_logs.simulation import log_expectations, log_fixtures, log_playback
from trainmedic_logs.simulation.log_test_format import LineEntry
from trainmedic_logs.simulation.test_results import FileResult, TestResult
from trainmedic_server import errors, telemetry
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.catalog import chains, loader
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook
from trainmedic_server.catalog.fragments import FragmentFolders
from trainmedic_server.catalog.library import StaticCatalog
from trainmedic_server.domain import beginnings, inventory
from trainmedic_server.domain.admission import PlaybookDecision
from trainmedic_server.domain.alert import Alert, AlertStatus, Delivery
from trainmedic_server.domain.job_verdict import JobVerdict, VerdictsOnJob
from trainmedic_server.domain.playbook import APPROVAL
from trainmedic_server.domain.run import OrderKind, Run
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine import step_sequence
from trainmedic_server.engine.admission_changes import ByHand
from trainmedic_server.engine.event_dispatch import EventDispatcher
from trainmedic_server.engine.finding_alert_sender import IntakeAlertSender
from trainmedic_server.engine.manual_runs import StartOrder
from trainmedic_server.engine.run_ends import RunEnds
from trainmedic_server.engine.service import Engine
from trainmedic_server.ports.actions import Actions
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.ports.playbooks import CompiledPlaybook
from trainmedic_server.ports.store import HistoryFilter
from trainmedic_server.simulation import (
    expectations,
    suite_format,
    virtual_time,
)
from trainmedic_server.simulation.expectations import Observations
from trainmedic_server.simulation.log_scenario import LogScenario
from trainmedic_server.simulation.scripted import Script, ScriptedActions
from trainmedic_server.simulation.suite_format import (
    AlertEntry,
    Check,
    OrderEntry,
    RunExpected,
    SimulatedOperation,
    Suite,
    TestEntry,
)
from trainmedic_server.simulation.virtual_time import BEGINNING, VirtualClock

_SETTLE = timedelta(microseconds=1)  # a timer with this delay fires after everything that is due now
_POLL_EVERY = log_playback.LAZY_TICK  # of ends of runs, of settled logs, and of whether the test is over
_PATIENCE = timedelta(hours=2)  # for runs to end after the last entry, without `end`


def run_file(path: Path, actions: Actions) -> FileResult:
    suites, problems = suite_format.read(path)
    ready: list[tuple[Suite, list[YamlPlaybook], _LogParts]] = []
    folders = FragmentFolders()
    for suite in suites:
        files = [loader.load_file(playbook, actions, folders=folders) for playbook in suite.playbooks]
        problems.extend(problem for file in files for problem in file.problems)
        playbooks = [playbook for file in files for playbook in file.playbooks]
        problems.extend(problem for _, problem in chains.cycles({each.definition.name: each for each in playbooks}))
        problems.extend(unknown_names(suite, playbooks, actions))
        rules = LogRuleLibrary(suite.rules)
        rules.reload()
        fixtures, wrong = log_fixtures.read_fixtures(suite)
        problems.extend([*rules.problems, *wrong, *log_fixtures.unknown_rules(suite, rules.rule_set)])
        ready.append((suite, playbooks, _LogParts(rules.rule_set, fixtures)))
    if problems:
        return FileResult(path, (), tuple(sorted(set(problems))))
    metrics = telemetry.Metrics()
    results = [
        _run_test(suite, index, StaticCatalog(playbooks, actions), parts, actions, metrics)
        for suite, playbooks, parts in ready
        for index in range(len(suite.spec.tests))
    ]
    return FileResult(path, tuple(results))


def played(test: TestEntry, playbooks: Sequence[YamlPlaybook], actions: Actions) -> Observations:
    """Return the observations at the end. Raises `virtual_time.Stalled`."""
    catalog = StaticCatalog(playbooks, actions)
    scenario = _Scenario(test, catalog, _LogParts(RuleSet(), {}), actions, telemetry.Metrics())

    async def play() -> Observations:
        await scenario.play()
        return await scenario.observe()

    return virtual_time.run(play())


class _LogParts(Struct, frozen=True):
    rules: RuleSet
    fixtures: Mapping[str, str]  # texts of files of lines


def _run_test(
    suite: Suite,
    index: int,
    catalog: StaticCatalog,
    parts: _LogParts,
    actions: Actions,
    metrics: telemetry.Metrics,
) -> TestResult:
    test = suite.spec.tests[index]
    began = time.perf_counter()
    scenario = _Scenario(test, catalog, parts, actions, metrics)
    try:
        virtual_time.run(scenario.play())
    except virtual_time.Stalled as error:
        scenario.fail((), str(error))
    failures = tuple(
        suite.problem(("tests", index, *path), f"{test.name}: {message}") for path, message in scenario.failures
    )
    line = suite.document.problem(("tests", index), "").line
    return TestResult(test.name, line, failures, time.perf_counter() - began)


@dataclass
class _Scenario:
    test: TestEntry
    catalog: StaticCatalog
    parts: _LogParts
    actions: Actions
    metrics: telemetry.Metrics
    failures: list[tuple[DocumentPath, str]] = field(default_factory=list)
    decisions: list[tuple[datetime, PlaybookDecision]] = field(default_factory=list)
    began: dict[str, datetime] = field(default_factory=dict)  # starts of firing alerts, by fingerprint
    unmatched: list[str] = field(default_factory=list)  # why playbooks did not react
    ends: EventDispatcher | None = None
    """None if no playbook begins with the end of a run."""

    def fail(self, path: DocumentPath, message: str) -> None:
        self.failures.append((path, message))

    async def play(self) -> None:
        self.store = InMemoryStore()
        self.clock = VirtualClock()
        self.script = Script(self.test.replies)
        self.scripted = ScriptedActions(self.actions, self.script, self.store, self.clock)
        self.engine = await self._start()
        sender = IntakeAlertSender(self._admit, self.clock)
        rules, fixtures = self.parts.rules, self.parts.fixtures
        self.logs = LogScenario(self.test.job, rules, fixtures, self.store, self.clock, sender, self.metrics)
        for moment, path, entry in _timeline(self.test):
            await self._pass_until(BEGINNING + moment)
            match entry:
                case LineEntry():
                    await self.logs.print(entry)
                case AlertEntry():
                    await self._deliver(entry, int(path[-1]))
                case OrderEntry():
                    await self._order(entry, path)
                case Check():
                    await self._check(entry, path)
            await self._run_until_idle()
        await self._run_to_end()
        for index, check in enumerate(self.test.expect):
            if check.at is None:
                await self._check(check, ("expect", index))
        await self.engine.stop()

    async def _pass_until(self, moment: datetime) -> None:
        while (self.test.lines or self.ends is not None) and self.clock.now() < moment:
            has_lines = self.test.lines and self.clock.now() < BEGINNING + self.test.last_line + log_playback.SETTLE
            tick = log_playback.TICK if has_lines else _POLL_EVERY
            await self.clock.sleep_until(min(self.clock.now() + tick, moment))
            if self.test.lines:
                await self.logs.tick()
            if self.ends is not None:
                await self.ends.tell()
        await self.clock.sleep_until(moment)

    async def _start(self) -> Engine:
        job = self.test.job
        given = JobVerdict.of(job.verdict.model_dump()) if job.verdict else None
        # As failure and slowness, so that every alert sees it (`VerdictsOnJob.seen_by`).
        verdicts = {job.name: VerdictsOnJob(given, given)} if given else {}
        topology = Topology(inventory.parse(self.test.inventory), verdicts=verdicts)
        limits = EngineLimits(mode=self.test.mode, max_age=self.test.max_age)
        engine = Engine(self.store, self.catalog, self.scripted, self.clock, limits, self.metrics, lambda: topology)
        await engine.start()
        self.ends = None
        if any(playbook.definition.on.run for playbook in self.catalog.all()):
            ends = RunEnds(self.store, self.catalog, self._admit, self.clock)
            self.ends = EventDispatcher(self.store, self.store, ends, self.metrics)
            await self.ends.begin()
        return engine

    async def _deliver(self, entry: AlertEntry, number: int) -> None:
        labels = dict(entry.alert.labels)
        identity = fingerprint(labels)
        now = self.clock.now()
        began = self.began.get(identity, now) if entry.starts_at is None else BEGINNING + entry.starts_at
        resolved = entry.status is AlertStatus.RESOLVED
        alert = Alert(identity, entry.status, labels, dict(entry.alert.annotations), began, now if resolved else None)
        if resolved:
            self.began.pop(identity, None)
        else:
            self.began[identity] = began
        await self._admit(Delivery(f"delivery-{number}", now, "trainmedic", "{}", "", (alert,)))

    async def _admit(self, delivery: Delivery) -> None:
        now = self.clock.now()
        admission = await self.engine.admit(delivery)
        self.decisions.extend((now, decision) for decision in admission.runs)
        if admission.unmatched:
            reasons = (
                f"{playbook.definition.name} did not react to {alert.name}: {playbook.match(alert).why}"
                for alert in delivery.alerts
                for playbook in self.catalog.all()
            )
            self.unmatched.extend(reason for reason in reasons if reason not in self.unmatched)

    async def _order(self, entry: OrderEntry, path: DocumentPath) -> None:
        try:
            await self._carry_out(entry)
        except (errors.Conflict, errors.NotEntitled, errors.NotFound, errors.PayloadError) as error:
            if not entry.refused:
                self.fail(path, f"at {duration.write(entry.at)} the order {entry.do} was refused: {error}")
            return
        if entry.refused:
            self.fail(path, f"at {duration.write(entry.at)} the order {entry.do} was accepted; expected a refusal")

    async def _carry_out(self, entry: OrderEntry) -> None:
        match entry.do:
            case SimulatedOperation.START:
                await self._start_run(entry)
            case SimulatedOperation.SCHEDULE:
                await self._admit_stand_in(beginnings.of_schedule(self._scheduled(entry), self.clock.now()))
            case SimulatedOperation.EVENT:
                assert entry.event is not None
                body = json.dumps(entry.labels, sort_keys=True).encode()
                stand_in = beginnings.of_event(entry.event, entry.labels, None, body, self.clock.now())
                await self._admit_stand_in(stand_in)
            case SimulatedOperation.PAUSE:
                await self.engine.pause(entry.by)
            case SimulatedOperation.RESUME:
                await self.engine.resume(entry.by)
            case SimulatedOperation.CLOSE_BREAKER:
                await self.engine.close_breaker(entry.by)
            case SimulatedOperation.RESTART:
                await self.engine.stop()
                await self.clock.sleep_until(self.clock.now() + entry.down)
                self.engine = await self._start()
            case _:
                run = await self._newest(entry)
                await self.engine.order(run.id, OrderKind(entry.do), entry.by, entry.note, frozenset(entry.groups))

    async def _start_run(self, entry: OrderEntry) -> None:
        assert entry.playbook is not None
        try:
            target = Target.of_key(entry.target) if entry.target is not None else None
        except ValueError as error:
            raise errors.Conflict(f"target: {error}") from error
        order = StartOrder(entry.playbook, target, inputs=entry.inputs)
        run = (await self.engine.start_run(order, ByHand(entry.by, entry.note, groups=frozenset(entry.groups)))).run
        self.decisions.append((run.created_at, _decision(run)))

    def _scheduled(self, entry: OrderEntry) -> str:
        playbook = self.catalog.get(entry.playbook or "")
        if playbook is None or playbook.definition.on.schedule is None:
            raise errors.NotFound(f"there is no playbook {entry.playbook} with a schedule")
        return playbook.definition.name

    async def _admit_stand_in(self, stand_in: Alert) -> None:
        await self._admit(Delivery(f"delivery-{stand_in.name}", self.clock.now(), "trainmedic", "{}", "", (stand_in,)))

    async def _newest(self, entry: OrderEntry) -> Run:
        for run in await self._runs():
            target = run.target.key if run.target else ""
            if entry.playbook in (None, run.playbook) and entry.target in (None, target):
                return run
        raise errors.NotFound("there is no such run yet")

    async def _runs(self) -> Sequence[Run]:
        """Newest first."""
        page, _ = await self.store.page(HistoryFilter(), 1000, None)
        return page

    async def _unfinished(self) -> Sequence[Run]:
        """Cheaper than `_runs`."""
        return await self.store.transact(lambda tx: tx.unfinished())

    async def _run_until_idle(self) -> None:
        await self.clock.sleep_until(self.clock.now() + _SETTLE)
        while self.ends is not None and await self.ends.tell():
            await self.clock.sleep_until(self.clock.now() + _SETTLE)

    async def _run_to_end(self) -> None:
        await self._run_until_idle()
        if self.test.lines:
            await self._pass_until(BEGINNING + self.test.last_line + log_playback.SETTLE)
        if self.test.end is not None:
            await self._pass_until(BEGINNING + self.test.end)
            await self._run_until_idle()
            return
        latest = self.clock.now() + _PATIENCE
        while self.clock.now() < latest and any(_is_busy(run) for run in await self._unfinished()):
            await self._pass_until(self.clock.now() + _POLL_EVERY)
            await self._run_until_idle()

    async def _check(self, check: Check, path: DocumentPath) -> None:
        await self._run_until_idle()
        observed = await self.observe()
        when = "at the end" if check.at is None else f"at {duration.write(check.at)}"
        in_logs = log_expectations.finding_differences(check, await self.logs.findings())
        on_job = log_expectations.verdict_differences(check.verdict, self.logs.verdict()) if check.verdict else ()
        for difference in (*expectations.differences(check, observed), *in_logs, *on_job):
            message = f"{when}, {path_text(difference.path)}: expected {difference.expected}, got {difference.got}"
            failed = "".join(f"\n      {text}" for text in expectations.failed_runs(observed, message))
            self.fail((*path, *difference.path), message + failed)

    async def observe(self) -> Observations:
        stored = [await self.store.record(run.id) for run in await self._runs()]
        records = [record for record in reversed(stored) if record is not None]
        known = {decision.run_id for _, decision in self.decisions}
        # Runs that the engine started later, without a delivery.
        again = [(record.run.created_at, _decision(record.run)) for record in records if record.run.id not in known]
        decided = [decision for _, decision in sorted([*self.decisions, *again], key=lambda made: made[0])]
        return Observations(decided, records, self.script.calls, self.engine.controls, self.unmatched)


def _decision(run: Run) -> PlaybookDecision:
    return PlaybookDecision(run.id, run.playbook, run.target_key, run.decision, run.message)


def _is_busy(run: Run) -> bool:
    """Return whether the run can change without a person or new alert."""
    if run.is_open:
        needs_input = run.waiting_on in ("approval", "resume", "resolved")
        return not needs_input or any(step.deadline and not step.status.is_final for step in run.steps)
    return any(step.undo and step.undo.status == "running" for step in run.steps)


_Entry = LineEntry | AlertEntry | OrderEntry | Check


def _timeline(test: TestEntry) -> list[tuple[timedelta, DocumentPath, _Entry]]:
    entries: list[tuple[timedelta, DocumentPath, _Entry]] = []
    for index, line in enumerate(test.lines):
        entries.extend((line.at + line.every * number, ("lines", index), line) for number in range(line.times))
    entries.extend((alert.at, ("alerts", index), alert) for index, alert in enumerate(test.alerts))
    entries.extend((order.at, ("orders", index), order) for index, order in enumerate(test.orders))
    checks = enumerate(test.expect)
    entries.extend((check.at, ("expect", index), check) for index, check in checks if check.at is not None)
    return sorted(entries, key=lambda entry: entry[0])


def unknown_names(suite: Suite, playbooks: Sequence[CompiledPlaybook], actions: Actions) -> Iterator[FileProblem]:
    """Yield a problem for each named step, action or playbook that does not exist."""
    if not playbooks:
        return
    playbook_names = {playbook.definition.name for playbook in playbooks}
    states = [state for playbook in playbooks for state in step_sequence.initial_steps(playbook, ask_first=False)]
    step_ids = {state.id for state in states}
    undos = {f"{step_id}.undo" for step_id in step_ids}
    reply_keys = {*step_ids, *undos, *(state.action for state in states if state.action), *actions.names()}
    for index, test in enumerate(suite.spec.tests):
        path: DocumentPath = ("tests", index)
        for key in test.replies:
            if key not in reply_keys:
                yield _no_such(suite, (*path, "replies", key), "step or action", key, reply_keys)
        for number, check in enumerate(test.expect):
            for run_number, run in enumerate(check.runs or ()):
                run_path = (*path, "expect", number, "runs", run_number)
                yield from _unknown_in_run(suite, run_path, run, step_ids, playbook_names)


def _unknown_in_run(
    suite: Suite, path: DocumentPath, run: RunExpected, step_ids: set[str], playbook_names: set[str]
) -> Iterator[FileProblem]:
    for step_id in run.steps:
        if step_id not in {*step_ids, APPROVAL}:
            yield _no_such(suite, (*path, "steps", step_id), "step", step_id, step_ids)
    if run.playbook is not None and run.playbook not in playbook_names:
        yield _no_such(suite, (*path, "playbook"), "playbook", run.playbook, playbook_names)


def _no_such(suite: Suite, path: DocumentPath, kind: str, name: str, existing: Iterable[str]) -> FileProblem:
    message = f"there is no {kind} {name!r} in the playbooks under test{did_you_mean(name, existing)}"
    return suite.problem(path, message, at_key=kind != "playbook")
