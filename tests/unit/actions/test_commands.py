"""Actions that a job or an agent carries out: what is sent, and how the answers are judged."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.clocks import ManualClock
from trainmedic.job import parameters
from trainmedic.wire import envelope
from trainmedic.wire.envelope import Command, Reply
from trainmedic_agent.disk import executor
from trainmedic_agent.errors import CommandRejected
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.actions import jobs, nodes
from trainmedic_server.actions.base import RESOLVED, STOPPED
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.errors import (
    ActionFailure,
    BusUnavailable,
    EffectDisproved,
    NoLongerWanted,
    OutcomeUnknown,
    PermanentFailure,
    TemporaryFailure,
)
from trainmedic_server.ports.actions import ON_RECORD, Action, Call, Clearance, LeasedEffect, Services
from trainmedic_server.ports.outside import HttpReply, Presence

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
STARTED = NOW - timedelta(minutes=3)
JOB = Target(TargetKind.JOB, job="llm-1")
GPU = Target(TargetKind.GPU, node="n1", gpu="GPU-5f3a")


class ScriptedBus:
    """A command bus whose receivers answer what the test says; silence lasts until a second after the expiry."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.answers: tuple[Reply, ...] = ()
        self.in_time = True
        self.present: list[Presence] = []
        self.is_away = False
        self.sent: list[Command] = []
        self.settled: list[str] = []
        self.is_unheard = False

    async def request(
        self, command: Command, unheard: Callable[[], Awaitable[bool]] | None = None
    ) -> tuple[Reply, ...]:
        self.sent.append(command)
        if self.is_unheard and unheard is not None and await unheard():
            return self.answers
        if not self.answers or not self.in_time:
            self.clock.time = command.expires_at + timedelta(seconds=1)
        return self.answers

    def tell(self, command: Command) -> None:
        self.sent.append(command)

    def acknowledge(self, command_id: str) -> None:
        self.settled.append(command_id)

    async def jobs(self) -> list[Presence]:
        if self.is_away:
            raise BusUnavailable("away")
        return self.present

    agents = launchers = jobs

    async def check(self) -> None:
        """It answers."""


class NoHttp:
    async def call(self, *_: Any, **__: Any) -> HttpReply:
        raise AssertionError("no command makes an HTTP call")


def answers(clearance: Clearance) -> Callable[[], Awaitable[Clearance]]:
    async def answer() -> Clearance:
        return clearance

    return answer


@pytest.fixture
def bus() -> ScriptedBus:
    return ScriptedBus(ManualClock())


async def perform(
    bus: ScriptedBus, kind: type[Any], params: Mapping[str, Any] | None = None, target: Target = JOB, **changes: Any
) -> Mapping[str, Any]:
    action: Action = kind(Services(clock=bus.clock, bus=bus, http=NoHttp()))
    alert = Alert("f1", AlertStatus.FIRING, {"alertname": "TrainingLossSpike"}, {}, STARTED)
    fields: dict[str, Any] = {
        "command_id": "c1",
        "run_id": "r1",
        "playbook": "loss-spike",
        "target": target,
        "params": action.Params.model_validate(params or {}),
        "reason": "TrainingLossSpike",
        "issued_at": NOW,
        "deadline": NOW + timedelta(seconds=60),
        "alert": alert,
    }
    return await action.perform(Call(**{**fields, **changes}))


def replies(*statuses: str, reason: str | None = None, **output: Any) -> tuple[Reply, ...]:
    said = {**output, "reason": reason} if reason else output
    return tuple(Reply("c1", "test", status, rank, said, NOW) for rank, status in enumerate(statuses))


def presence(name: str, ranks: Sequence[int] | None = None) -> list[Presence]:
    return [Presence(name, NOW, {} if ranks is None else {"ranks": list(ranks)})]


async def test_the_command_contains_all_that_a_receiver_needs(bus: ScriptedBus) -> None:
    """ID, action, target, parameters, run, reason and times are those of the call."""
    bus.answers = replies("applied")
    await perform(bus, jobs.JobScaleLr, {"factor": 0.5}, undo_of="c0")
    (sent,) = bus.sent
    assert sent == Command(
        id="c1",
        action="job.scale_lr",
        target={"kind": "job", "job": "llm-1"},
        params={"factor": 0.5},
        run_id="r1",
        playbook="loss-spike",
        reason="TrainingLossSpike",
        issued_at=NOW,
        expires_at=NOW + timedelta(seconds=60),
        undo_of="c0",
    )


async def test_a_slurm_job_receives_commands_under_its_own_name(bus: ScriptedBus) -> None:
    """It must report its Slurm ID. Of several in one allocation, none is chosen."""
    ids = {"llm-1": "4711", "llm-2": "4712", "llm-3": "4712", "llm-4": None}
    bus.present = [Presence(name, NOW, {"slurm": {"job_id": slurm_id}}) for name, slurm_id in ids.items()]
    bus.answers = replies("applied")
    await perform(bus, jobs.JobCheckpoint, target=Target(TargetKind.JOB, job="slurm:4711"))
    assert bus.sent[0].target == {"kind": "job", "job": "llm-1"}
    with pytest.raises(PermanentFailure, match="several connected jobs run in slurm:4712: llm-2, llm-3; name one"):
        await perform(bus, jobs.JobCheckpoint, target=Target(TargetKind.JOB, job="slurm:4712"))


async def test_a_command_waits_for_a_slurm_job_that_has_not_connected(bus: ScriptedBus) -> None:
    """It waits until its deadline; then it is certain that nothing was sent."""
    target = Target(TargetKind.JOB, job="slurm:4713")
    with pytest.raises(TemporaryFailure, match="no connected job reports that it is slurm:4713"):
        await perform(bus, jobs.JobCheckpoint, target=target)
    assert NOW + timedelta(seconds=50) < bus.clock.now() < NOW + timedelta(seconds=60)
    bus.is_away = True
    with pytest.raises(TemporaryFailure, match="Redis is unavailable"):
        await perform(bus, jobs.JobCheckpoint, target=target)
    assert bus.sent == []


@pytest.mark.parametrize(
    ("clearance", "failure", "reason"),
    [("stop", TemporaryFailure, STOPPED), ("resolved", NoLongerWanted, RESOLVED)],
)
async def test_a_wait_for_a_slurm_job_states_why_it_ended(
    bus: ScriptedBus, clearance: Clearance, failure: type[ActionFailure], reason: str
) -> None:
    """The reasons are a cancelled run and a resolved alert, not a timeout."""
    target = Target(TargetKind.JOB, job="slurm:4713")
    with pytest.raises(failure, match=f"^{reason}: no connected job reports that it is slurm:4713$"):
        await perform(bus, jobs.JobCheckpoint, target=target, clearance=answers(clearance))
    assert bus.sent == []
    assert bus.clock.now() < NOW + timedelta(seconds=10)


async def test_a_wait_for_a_slurm_job_outlasts_a_pause(bus: ScriptedBus) -> None:
    """A paused server sends nothing, even to a job that connects; afterwards the command continues."""
    target = Target(TargetKind.JOB, job="slurm:4711")
    bus.answers = replies("applied")

    async def paused_at_first() -> Clearance:
        bus.present = [Presence("llm-1", NOW, {"slurm": {"job_id": "4711"}})]
        return "hold" if bus.clock.now() < NOW + timedelta(seconds=20) else "go_on"

    await perform(bus, jobs.JobCheckpoint, target=target, clearance=paused_at_first)
    assert NOW + timedelta(seconds=20) <= bus.clock.now() < NOW + timedelta(seconds=30)
    bus.sent.clear()
    bus.present = []
    bus.clock.time = NOW

    async def paused() -> Clearance:
        bus.present = [Presence("llm-1", NOW, {"slurm": {"job_id": "4711"}})]
        return "hold"

    with pytest.raises(TemporaryFailure, match="the server is paused"):
        await perform(bus, jobs.JobCheckpoint, target=target, clearance=paused)
    assert bus.sent == []


async def test_one_rank_that_applied_is_a_success(bus: ScriptedBus) -> None:
    """Its output is the step's output."""
    bus.answers = replies("applied", learning_rate=0.1)
    assert await perform(bus, jobs.JobScaleLr, {"factor": 0.5}) == {"ranks": 1, "learning_rate": 0.1}


async def test_all_ranks_that_applied_are_a_success(bus: ScriptedBus) -> None:
    """The output is the first rank's, with every rank's next to it, in whatever order they came."""
    bus.answers = replies("applied", "applied", step=7)[::-1]
    output = await perform(bus, jobs.JobScaleLr, {"factor": 0.5})
    own = {"step": 7, "status": "applied", "at": envelope.write_time(NOW)}
    assert output == {"ranks": 2, "step": 7, "by_rank": {"0": own, "1": own}}


async def test_an_agent_answers_without_ranks(bus: ScriptedBus) -> None:
    """Its output is used unchanged."""
    bus.answers = (Reply("c1", "n1", "applied", None, {"watts": 400}, NOW),)
    assert await perform(bus, nodes.GpuPowerLimit, {"percent": 80}, GPU) == {"watts": 400}
    assert bus.sent[0].target == {"kind": "gpu", "node": "n1", "gpu": "GPU-5f3a"}


@pytest.mark.parametrize(
    ("status", "failure", "said"),
    [
        ("rejected", PermanentFailure, "rank 0 of job 'llm-1' rejected the command: no"),
        ("unsupported", PermanentFailure, "rank 0 of job 'llm-1' does not support the command: no"),
        ("failed", TemporaryFailure, "rank 0 of job 'llm-1' failed: no"),
        ("expired", TemporaryFailure, "rank 0 of job 'llm-1' got the command too late: no"),
    ],
)
async def test_a_refusal_is_permanent_and_a_failure_temporary(
    bus: ScriptedBus, status: str, failure: type[Exception], said: str
) -> None:
    """The message names the rank, its action and the reason."""
    bus.answers = replies(status, reason="no")
    with pytest.raises(failure, match=said):
        await perform(bus, jobs.JobCheckpoint)


async def test_a_command_applied_by_only_some_ranks_is_unknown(bus: ScriptedBus) -> None:
    """Its undo stays pending, and a retry must not apply it again on those ranks."""
    bus.answers = replies("applied", "failed", reason="out of memory")
    with pytest.raises(OutcomeUnknown, match=r"rank 0 applied it, but rank 1 of job 'llm-1' failed: out of memory"):
        await perform(bus, jobs.JobScaleLr, {"factor": 0.5})


@pytest.mark.parametrize("first", ["applied", "failed"])
async def test_a_rollback_that_did_happen_is_not_repeated(bus: ScriptedBus, first: str) -> None:
    """The batches were compared and differ: a retry would roll back once more. The replies of all ranks are
    certain, also where only some of them saw other batches."""
    amiss = {"reason": "other batches come", "verified": {"batches": {"compared": 16, "agreed": 0}}}
    bus.answers = (Reply("c1", "t", first, 0, amiss, NOW), Reply("c1", "t", "failed", 1, amiss, NOW))
    with pytest.raises(EffectDisproved, match="rank 1 of job 'llm-1' failed: other batches come") as raised:
        await perform(bus, jobs.JobRollback)
    assert raised.value.is_begun
    assert raised.value.output["by_rank"]["1"] == {**amiss, "status": "failed", "at": envelope.write_time(NOW)}


async def test_a_rollback_that_one_rank_has_not_answered_stays_unknown(bus: ScriptedBus) -> None:
    """A retry asks for the missing answer under the same ID, and no rank rolls back again."""
    bus.answers, bus.present = replies("failed", verified={}), presence("llm-1", [0, 1])
    bus.in_time = False
    with pytest.raises(OutcomeUnknown, match="rank 1 of job 'llm-1' did not answer in time"):
        await perform(bus, jobs.JobRollback)


async def test_silent_ranks_are_named(bus: ScriptedBus) -> None:
    """The job stated that three ranks answer; two did not."""
    bus.answers, bus.in_time, bus.present = replies("applied"), False, presence("llm-1", [0, 1, 2])
    with pytest.raises(OutcomeUnknown, match=r"ranks 1, 2 of job 'llm-1' did not answer in time"):
        await perform(bus, jobs.JobCheckpoint)


async def test_a_rank_that_accepted_the_command_is_distinguished_from_a_silent_one(bus: ScriptedBus) -> None:
    """It may still finish."""
    bus.answers, bus.in_time, bus.present = replies("accepted"), False, presence("llm-1", [0])
    with pytest.raises(OutcomeUnknown, match=r"rank 0 of .* did not answer in time, but has accepted the command"):
        await perform(bus, jobs.JobCheckpoint)


async def test_ranks_of_a_disconnected_job_may_be_missing(bus: ScriptedBus) -> None:
    """Some answered, the wait timed out, and the number of ranks can no longer be determined."""
    bus.answers, bus.in_time = replies("applied"), False
    with pytest.raises(OutcomeUnknown, match=r"not every rank .*; no job named 'llm-1' is connected"):
        await perform(bus, jobs.JobCheckpoint)


async def test_replies_within_the_grace_period_are_complete(bus: ScriptedBus) -> None:
    """The bus returned early, so all ranks had answered."""
    bus.answers = replies("applied")
    bus.clock.time = NOW + timedelta(seconds=60.5)
    assert await perform(bus, jobs.JobCheckpoint) == {"ranks": 1}


async def test_a_missing_receiver_is_reported(bus: ScriptedBus) -> None:
    """The message says what is missing, and what to start."""
    with pytest.raises(OutcomeUnknown, match=r"^no job named 'llm-1' is connected$"):
        await perform(bus, jobs.JobCheckpoint)
    told = "no agent on node 'n1' is connected: start `trainmedic agent --node n1` there"
    with pytest.raises(OutcomeUnknown, match=told):
        await perform(bus, nodes.NodeFacts, target=GPU)


async def test_a_node_name_is_quoted_in_the_command_shown_to_users(bus: ScriptedBus) -> None:
    """It is an alert's label: a user who pastes the command must run nothing else."""
    hostile = Target(TargetKind.NODE, node="n1; rm -rf ~ #")
    with pytest.raises(OutcomeUnknown, match=r"start `trainmedic agent --node 'n1; rm -rf ~ #'` there$"):
        await perform(bus, nodes.NodeFacts, target=hostile)


async def test_a_connected_silent_receiver_is_reported_as_connected(bus: ScriptedBus) -> None:
    """A receiver that is not connected is a different fault."""
    bus.present = presence("n1")
    with pytest.raises(OutcomeUnknown, match=r"^the agent on node 'n1' did not answer in time$"):
        await perform(bus, nodes.NodeFacts, target=GPU)


async def test_silence_during_a_redis_outage_is_reported_as_such(bus: ScriptedBus) -> None:
    """It is not blamed on the receiver."""
    bus.is_away = True
    with pytest.raises(OutcomeUnknown, match="no one answered, and Redis is unavailable"):
        await perform(bus, jobs.JobCheckpoint)


@pytest.mark.parametrize("action", jobs.ACTIONS[:-1], ids=lambda action: action.name)
def test_omitted_parameters_mean_the_same_to_server_and_job(action: type[Action]) -> None:
    """Names, defaults and wire forms are defined twice, and agree."""
    required = {
        name: {"factor": 0.5}[name] for name, field in action.Params.model_fields.items() if field.is_required()
    }
    if action is jobs.JobDataloaderWorkers:  # exactly one of its two
        required = {"at_most": 2}
    sent = action.Params(**required).model_dump(mode="json", by_alias=True, exclude_none=True)
    assert parameters.parse(action.name, sent) == parameters.ACTIONS[action.name](**required)


def test_a_factor_beyond_any_float_is_a_normal_error() -> None:
    """An integer of 400 digits is one."""
    with pytest.raises(ValidationError, match="not a far larger number"):
        jobs.ScaleLrParams(factor=10**400)


async def test_a_durable_outcome_settles_the_replies(bus: ScriptedBus) -> None:
    """From then on they need not be delivered again."""
    jobs.JobCheckpoint(Services(clock=bus.clock, bus=bus, http=NoHttp())).outcome_saved("c1")
    assert bus.settled == ["c1"]


@pytest.mark.parametrize(
    ("params", "sent"),
    [
        ({}, {"before": envelope.write_time(STARTED), "skip_batches": 0}),
        ({"before": "2026-01-31T11:00:00+01:00"}, {"before": "2026-01-31T10:00:00.000000Z", "skip_batches": 0}),
        ({"step": 0, "skip_batches": 200}, {"step": 0, "skip_batches": 200}),
        ({"steps_back": 100}, {"steps_back": 100, "skip_batches": 0}),
    ],
)
async def test_a_rollback_targets_the_time_before_the_alert_by_default(
    bus: ScriptedBus, params: dict[str, Any], sent: dict[str, Any]
) -> None:
    """Without a target, the alert's start is sent; with one, only that target."""
    bus.answers = replies("applied")
    await perform(bus, jobs.JobRollback, params)
    assert bus.sent[0].params == sent


async def test_a_custom_job_command_is_sent_under_its_own_name(bus: ScriptedBus) -> None:
    """Its parameters are unchanged."""
    bus.answers = replies("applied")
    await perform(bus, jobs.JobOwnCommand, {"name": "acme.skip_shard", "with": {"shard": 7, "deep": {"a": [1]}}})
    assert (bus.sent[0].action, bus.sent[0].params) == ("acme.skip_shard", {"shard": 7, "deep": {"a": [1]}})


@pytest.mark.parametrize("name", ["node.cordon", "node.frobnicate"])
def test_a_custom_job_command_has_no_action_name(name: str) -> None:
    expected = f"{name}: only actions begin with node.; write action: NAME, or give the command another name"
    with pytest.raises(ValidationError, match=re.escape(expected)):
        jobs.JobCommandParams(name=name)


ROOT_DISK = {"mountpoint": "/", "device": "/dev/sda2", "fstype": "ext4", "alertname": "DiskSpaceLow"}


@pytest.mark.parametrize(
    ("named", "sent"),
    [
        ([ROOT_DISK, {**ROOT_DISK, "severity": "page"}], [{"mountpoint": "/", "device": "/dev/sda2"}]),
        ([{"exported_mountpoint": "/data"}], [{"mountpoint": "/data", "device": ""}]),
        ([ROOT_DISK, {"alertname": "DiskSpaceLow"}], None),
        ([], None),
    ],
)
async def test_a_cleanup_names_the_file_systems_from_the_alert_labels(
    bus: ScriptedBus, named: list[dict[str, str]], sent: list[dict[str, str]] | None
) -> None:
    """Each appears once. If an alert does not name its own, none is ruled out, and an agent of an earlier
    release is sent what it knows."""
    bus.answers = replies("applied")
    await perform(bus, nodes.DiskClean, {"rules": ["tmp"], "filesystems": named})
    rest = {"rules": ["tmp"], "dry_run": False}
    assert bus.sent[0].params == (rest if sent is None else {**rest, "filesystems": sent})


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (jobs.JobRollback, {"step": 1, "steps_back": 1}),
        (jobs.JobRollback, {"before": "2026-01-31T11:00:00"}),
        (jobs.JobRollback, {"step": -1}),
        (jobs.JobScaleLr, {}),
        (jobs.JobScaleLr, {"factor": 0}),
        (jobs.JobScaleLr, {"factor": float("nan")}),
        (jobs.JobScaleLr, {"factor": float("inf")}),
        (jobs.JobScaleLr, {"factor": 50}),
        (jobs.JobScaleLr, {"factor": 1e300}),
        (jobs.JobScaleLr, {"factor": 0.0001}),
        (jobs.JobAccumulate, {"factor": 1001}),
        (jobs.JobScaleBatch, {"factor": 0.0001}),
        (jobs.JobDataloaderWorkers, {"count": -1}),
        (jobs.JobDataloaderWorkers, {"at_most": -1}),
        (jobs.JobDataloaderWorkers, {"at_most": 1025}),
        (jobs.JobDataloaderWorkers, {"count": 2, "at_most": 2}),
        (jobs.JobDataloaderWorkers, {}),
        (jobs.JobPause, {"max": "0s"}),
        (jobs.JobPause, {"max": 5}),
        (jobs.JobEmptyCache, {"all": True}),
        (jobs.JobOwnCommand, {}),
        (jobs.JobOwnCommand, {"name": "job.rollback"}),
        (jobs.JobOwnCommand, {"name": "gpu.power_limit"}),
        (jobs.JobOwnCommand, {"name": "Skip Shard"}),
        (jobs.JobOwnCommand, {"name": "skip"}),
        (nodes.GpuPowerLimit, {}),
        (nodes.GpuPowerLimit, {"watts": 300, "percent": 80}),
        (nodes.GpuPowerLimit, {"percent": 120}),
        (nodes.GpuPowerLimit, {"restore": False}),
        (nodes.DiskClean, {"rules": []}),
        (nodes.DiskClean, {"rules": ["tmp"], "until_free_percent": 100}),
    ],
)
def test_bad_parameters_are_rejected_when_a_playbook_is_loaded(kind: type[Any], params: dict[str, Any]) -> None:
    """They never become a command."""
    with pytest.raises(ValidationError):
        kind.Params.model_validate(params)


@pytest.mark.parametrize(
    ("kind", "params", "output", "inverse"),
    [
        (jobs.JobScaleLr, {"factor": 0.5}, None, ("job.scale_lr", {"factor": 2.0})),
        (jobs.JobScaleLr, {"factor": 0.0625}, None, ("job.scale_lr", {"factor": 16.0})),
        (jobs.JobAccumulate, {"factor": 4}, None, ("job.accumulate", {"factor": 0.25})),
        (
            jobs.JobScaleBatch,
            {"factor": 0.5, "keep_global_batch": False},
            None,
            ("job.scale_batch", {"factor": 2.0, "keep_global_batch": False}),
        ),
        (jobs.JobDataloaderWorkers, {"count": 2}, None, None),
        (jobs.JobDataloaderWorkers, {"count": 2}, {"previous": 8}, ("job.dataloader_workers", {"count": 8})),
        (jobs.JobDataloaderWorkers, {"count": 2}, {"previous": "8"}, None),
        (jobs.JobDataloaderWorkers, {"at_most": 2}, None, None),
        (jobs.JobDataloaderWorkers, {"at_most": 2}, {"previous": 5}, ("job.dataloader_workers", {"count": 5})),
        (jobs.JobPause, {}, None, ("job.resume", {})),
        (jobs.JobRollback, {}, {"step": 900}, None),
        (jobs.JobStop, {}, {}, None),
        (jobs.JobOwnCommand, {"name": "acme.skip", "with": {"shard": 1}}, {}, None),
        (nodes.GpuPowerLimit, {"watts": 300}, None, ("gpu.power_limit", {"restore": True})),
        (nodes.DiskClean, {"rules": ["tmp"]}, {}, None),
    ],
)
def test_the_inverse_undoes_the_command(
    kind: type[Any], params: dict[str, Any], output: dict[str, Any] | None, inverse: tuple[str, dict[str, Any]] | None
) -> None:
    """It is known before the command if the parameters determine it, and its own parameters are valid."""
    known = kind.inverse(kind.Params.model_validate(params), output)
    assert (None if known is None else (known.action, dict(known.params))) == inverse
    if known is not None:
        actions = {one.name: one for one in (*jobs.ACTIONS, *nodes.ACTIONS)}
        actions[known.action].Params.model_validate(known.params, context=ON_RECORD)


@pytest.mark.parametrize("kind", [jobs.JobScaleLr, jobs.JobScaleBatch, jobs.JobAccumulate])
@pytest.mark.parametrize("factor", [1e-5, 0.05, 50, 5000])
def test_recorded_changes_are_undone_whatever_a_playbook_may_request(kind: type[Any], factor: float) -> None:
    """Examples are a run of an older release, and the reciprocal of a small factor."""
    inverse = kind.inverse(kind.Params.model_validate({"factor": factor}, context=ON_RECORD), None)
    assert kind.Params.model_validate(inverse.params, context=ON_RECORD).factor == 1 / factor


@pytest.mark.parametrize("kind", [*jobs.ACTIONS, *nodes.ACTIONS], ids=lambda kind: kind.name)
def test_every_action_works_on_its_own_kind_of_target(kind: type[Action]) -> None:
    """Job commands act on jobs, node commands on nodes and their GPUs, and some on all those of a job."""
    allowed = {TargetKind.JOB} if kind.name.startswith("job.") else {TargetKind.NODE, TargetKind.GPU, TargetKind.JOB}
    assert kind.targets
    assert kind.targets <= allowed
    assert kind.summary


async def test_without_a_connected_agent_the_attempt_ends_soon_and_reports_it(bus: ScriptedBus) -> None:
    """Users do not wait for the whole timeout to learn that an agent must be started."""
    told: list[str] = []

    async def tell(what: str) -> None:
        told.append(what)

    bus.is_unheard = True
    with pytest.raises(OutcomeUnknown, match="no agent on node 'n1' is connected"):
        await perform(bus, nodes.GpuPowerLimit, {"percent": 80}, GPU, report_wait=tell)
    assert told == ["no agent on node 'n1' is connected: start `trainmedic agent --node n1` there"]
    assert bus.clock.now() < NOW + timedelta(seconds=60)


async def test_the_wait_for_an_unavailable_job_is_reported(bus: ScriptedBus) -> None:
    """It may be restarting; until its command expires it can still receive it."""
    told: list[str] = []

    async def tell(what: str) -> None:
        told.append(what)

    bus.is_unheard = True
    with pytest.raises(OutcomeUnknown):
        await perform(bus, jobs.JobScaleLr, {"factor": 0.5}, report_wait=tell)
    assert told == ["no job named 'llm-1' is connected"]
    assert bus.clock.now() > NOW + timedelta(seconds=60)


async def test_the_wait_for_an_unknown_job_names_the_nearest(bus: ScriptedBus) -> None:
    """A user who misspelt it need not wait for the end of the attempt."""
    told: list[str] = []

    async def tell(what: str) -> None:
        told.append(what)

    bus.is_unheard, bus.present = True, [Presence("llm-12", NOW)]
    for may_connect in (lambda job: False, lambda job: True):
        services = Services(clock=bus.clock, bus=bus, http=NoHttp(), may_connect=may_connect)
        with pytest.raises(OutcomeUnknown):
            await perform(bus, lambda _, services=services: jobs.JobCheckpoint(services), report_wait=tell)
    assert told == ["no job named 'llm-1' is connected; did you mean 'llm-12'?", "no job named 'llm-1' is connected"]


async def test_no_more_file_systems_are_sent_than_an_agent_accepts(bus: ScriptedBus) -> None:
    """A node may have hundreds of mounts that fill up with one disk; a rejected command would clean nothing."""
    bus.answers = replies("applied")
    named = [{"mountpoint": f"/pods/{number}"} for number in range(140)]
    await perform(bus, nodes.DiskClean, {"rules": ["tmp"], "filesystems": named})
    sent = bus.sent[0].params["filesystems"]
    assert [each["mountpoint"] for each in sent] == [f"/pods/{number}" for number in range(len(sent))]
    assert len(executor.named_filesystems(sent)) == len(sent) == nodes.MOST_FILESYSTEMS
    with pytest.raises(CommandRejected):
        executor.named_filesystems([*sent, sent[0]])


PAUSE = LeasedEffect("c1", "r1", "hold", JOB, {"max": "30m"}, is_certain=True)


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        (replies("applied", "applied"), "renewed"),
        (replies("applied", "rejected", reason="no pause of command c1 lasts"), "refused"),
        (replies("accepted"), "unanswered"),
        ((), "unanswered"),
    ],
)
async def test_a_pause_is_extended_by_its_id(bus: ScriptedBus, answers: tuple[Reply, ...], outcome: str) -> None:
    """It is extended up to `max`, and only if it is still active."""
    bus.answers = answers
    pause = jobs.JobPause(Services(clock=bus.clock, bus=bus, http=NoHttp()))
    [renewal] = await pause.renew([PAUSE], NOW + timedelta(minutes=10))
    [sent] = bus.sent
    assert (renewal.outcome, sent.action, sent.params) == (outcome, "job.pause", {"max": "30m", "extends": "c1"})
    assert (sent.target, bus.settled) == ({"kind": "job", "job": JOB.job}, [sent.id])


def test_the_job_reports_how_long_a_pause_lasts() -> None:
    """A job that reports nothing is asked often."""
    assert jobs.JobPause.granted({"max_seconds": 1800.0}) == timedelta(minutes=30)
    assert jobs.JobPause.granted({}) == timedelta(minutes=3)


@pytest.mark.parametrize("seconds", [1e300, 10**30, float("inf")])
def test_an_impossible_pause_reported_by_a_job_fails_no_renewal(seconds: float) -> None:
    """Renewals of all leases are selected together."""
    assert jobs.JobPause.granted({"max_seconds": seconds}) == jobs.JobPause.lease


def test_a_playbook_cannot_extend_a_pause() -> None:
    """Only the server does."""
    with pytest.raises(ValueError, match="set by the server"):
        jobs.JobPause.check_template({"extends": "c1"})


@pytest.mark.parametrize("status", ["failed", "expired", "rejected"])
async def test_a_failure_with_a_possible_effect_is_an_unknown_outcome(bus: ScriptedBus, status: str) -> None:
    """A retry with another ID could repeat the effect. An undo is retried."""
    bus.answers = (Reply("c1", "test", status, None, {"reason": "KeyError", "may_be_done": True}, NOW),)
    params = {"watts": 300}
    with pytest.raises(OutcomeUnknown, match="KeyError"):
        await perform(bus, nodes.GpuPowerLimit, params, GPU)
    with pytest.raises(PermanentFailure if status == "rejected" else TemporaryFailure):
        await perform(bus, nodes.GpuPowerLimit, params, GPU, undo_of="c0")
