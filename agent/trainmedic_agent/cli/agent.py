from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from trainmedic.errors import ConfigurationError, TrainmedicError
from trainmedic_agent import own_log
from trainmedic_agent.errors import GpuError, JournalUnavailable
from trainmedic_agent.health.checks import HealthVerdict, Level
from trainmedic_agent.settings import agent as settings
from trainmedic_agent.settings.agent import AgentSettings
from trainmedic_agent.wiring import agent as wiring
from trainmedic_agent.wiring import agent_check, node_health, stopped_agent
from trainmedic_core.cli import exits, groups
from trainmedic_core.cli.choice import NearestChoice
from trainmedic_core.cli.setting_flags import setting_flag
from trainmedic_core.plain_text import json_text
from trainmedic_core.words import plain

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _flags(command: Callable[..., None]) -> Callable[..., None]:
    for name, setting in reversed(list(settings.SETTINGS.items())):
        command = setting_flag(name, setting.source, setting.description, str(setting.source.shown_default))(command)
    return command


@click.group(invoke_without_command=True)
@_flags
@click.pass_context
def agent(ctx: click.Context, /, **flags: Any) -> None:
    """Run the agent of this node, check its setup, or revert its changes.

    Each flag has an environment variable, which the flag overrides. JSON log lines go to standard error. SIGTERM and
    SIGINT stop the agent cleanly: running commands have some seconds to end, and are otherwise resumed at the next
    start. A second signal ends it at once, without loss.
    """
    if ctx.invoked_subcommand is not None:
        ctx.obj = flags
        return
    try:
        loaded = settings.load(flags, os.environ)
        own_log.configure(loaded.log_level)
        for variable, nearest in settings.misspelt(os.environ):
            log.warning("an environment variable is unknown", extra={"variable": variable, "nearest": nearest})
        # Wait for signals instead of handling them: a handler could need a lock that the interrupted code holds.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        wiring.run(loaded, _wait_for_a_signal)
    except ConfigurationError as error:
        raise exits.InvalidInput(str(error)) from error
    except TrainmedicError as error:
        raise exits.Unreachable(f"The agent cannot start: {error}") from error


def _wait_for_a_signal() -> None:
    signal.sigwait(_SIGNALS)
    log.info("stopping")
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


@agent.command()
@_flags
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
@click.pass_context
def check(ctx: click.Context, /, as_json: bool, **flags: Any) -> None:
    """Check the policy, and show what this node offers.

    Changes nothing and does not disturb a running agent. Run it as the agent's user. Exits with 1 if something prevents
    an allowed action, with 3 if only Redis is unreachable.
    """
    report = agent_check.check(_settings(ctx, flags))
    if as_json:
        click.echo(json_text(report.values, indent=2))
    else:
        for line in _report_lines(report.values):
            click.echo(plain(line))
        for warning in report.warnings:
            click.echo(f"Warning: {plain(warning)}")
    for error in report.errors:
        click.echo(f"Wrong: {plain(error)}", err=True)
    if report.is_cut_off and len(report.errors) == 1:
        raise exits.Unreachable("Redis cannot be reached")
    if report.errors:
        raise exits.Failure(f"{len(report.errors)} thing{'s' * (len(report.errors) > 1)} to fix")


@agent.command()
@click.option(
    "--gpus",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    metavar="NUMBER",
    help="Minimum number of responding GPUs.",
)
@click.option(
    "--level",
    type=NearestChoice([str(level) for level in Level]),
    default=str(Level.QUICK),
    show_default=True,
    help="quick takes seconds. burn also loads GPUs, or CPUs, for minutes: only without a training.",
)
@click.option(
    "--probe",
    metavar="PROGRAM",
    help="trainmedic-probe of an environment with PyTorch, for burn. Default: of this environment.",
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="State directory of this node's agent, to compare with its record. Default: no comparison.",
)
@click.option("--output", type=NearestChoice(["text", "json"]), default="text", show_default=True)
def health(gpus: int, level: str, probe: str | None, state_dir: Path | None, output: str) -> None:
    """Check GPUs, links, network, disks and file systems of this node.

    Needs no Redis and no policy, and changes nothing. Exits with 1 if a check failed or could not be made, also if
    fewer than --gpus respond. Playbooks run it before a node accepts pods again.
    """
    own_log.configure("error")
    before = groups.typed_before(click.get_current_context(), "state_dir")
    state_dir = state_dir or (Path(before) if before else None)
    try:
        result = node_health.check(gpus, Level(level), [probe] if probe else None, state_dir)
    except JournalUnavailable as error:
        raise exits.InvalidInput(f"--state-dir: {error}") from error
    report = result.report
    if state_dir is not None and not (state_dir / "agent.db").exists():
        click.echo(plain(f"Not compared: {state_dir} has no record of an agent"), err=True)
    if output == "json":
        click.echo(json_text({**report.as_output(), "gpus": list(result.gpus)}, indent=2))
    else:
        for line in (*result.gpus, *(f"{each.verdict:<9} {each}" for each in report.checks)):
            click.echo(plain(line))
    for check in report.checks:
        if check.verdict is not HealthVerdict.OK:
            word = "Degraded" if check.verdict is HealthVerdict.DEGRADED else "Fault"
            click.echo(f"{word}: {plain(str(check))}", err=True)
    if report.verdict in (HealthVerdict.FAILED, HealthVerdict.UNKNOWN):
        raise exits.Failure("this node is not healthy")


@agent.command()
@click.argument("uuid")
@_flags
@click.pass_context
def forget(ctx: click.Context, /, uuid: str, **flags: Any) -> None:
    """Forget the GPU with this UUID and its errors, or the health values of this part.

    Use it for a GPU that was removed permanently, for errors fixed without a reset that the agent can see, or for a
    part that was changed. Stop the agent first. Exits with 2 if no such part is on record.
    """
    try:
        forgotten = stopped_agent.forget(_settings(ctx, flags), uuid)
    except ConfigurationError as error:
        raise exits.InvalidInput(str(error)) from error
    except TrainmedicError as error:
        raise exits.Failure(str(error)) from error
    click.echo(plain(f"forgotten: {forgotten}"))


@agent.command()
@_flags
@click.pass_context
def release(ctx: click.Context, /, **flags: Any) -> None:
    """End all power caps of this node now.

    Run this before you remove the agent: caps outlive it until an agent starts again. Stop the agent first. Exits with
    1 if a GPU's power could not be restored.
    """
    try:
        results = stopped_agent.release(_settings(ctx, flags))
    except ConfigurationError as error:
        raise exits.InvalidInput(str(error)) from error
    except TrainmedicError as error:
        raise exits.Unreachable(str(error)) from error
    for uuid, result in results.items():
        click.echo(plain(f"{uuid}: {result}"))
    if not results:
        click.echo("No GPU of this node is capped.")
    failed = sum(isinstance(result, GpuError) for result in results.values())
    if failed:
        raise exits.Failure(f"{failed} of {len(results)} GPUs not restored; run this again")


def _settings(ctx: click.Context, flags: Mapping[str, Any]) -> AgentSettings:
    own_log.configure("error")
    outer: Mapping[str, Any] = ctx.obj or {}
    try:
        return settings.load(
            {**outer, **{name: value for name, value in flags.items() if value is not None}}, os.environ
        )
    except ConfigurationError as error:
        raise exits.InvalidInput(str(error)) from error


def _report_lines(values: Mapping[str, Any]) -> Iterator[str]:
    policy, power, redis = values["policy"], values["power"], values["redis"]
    yield f"Node          {values['node']}, trainmedic {values['version']}, user {values['user']}"
    yield f"Policy        {policy['file'] or 'none'}{' (' + policy['digest'] + ')' if policy['digest'] else ''}"
    yield f"Actions       {', '.join(values['actions'])}"
    yield f"Capabilities  {', '.join(values['capabilities']) or 'none'}"
    yield f"State         {values['state_dir']}"
    running = redis["agent"]
    agent_text = (
        f"an agent runs here: process {running['pid']}, {running['version']}" if running else "no agent runs here"
    )
    yield f"Redis         {'reachable; ' + agent_text if redis['is_reachable'] else 'not reachable'}"
    yield f"Signing key   {'set' if values['signing_key'] else 'none'}"
    yield f"Driver        {values['driver'] or 'none'}"
    for gpu in values["gpus"]:
        yield f"GPU {gpu['index']:<9} {gpu['uuid']}  {gpu['name']}  {_gpu_limits(gpu)}"
    if power["is_allowed"]:
        yield f"Power         {power['floor_percent']:g} % of the default or more; leases up to {power['max_lease']}"
    if values["logs"] is not None:
        yield _logs_line(values["logs"])
    for name, rule in values["rules"].items():
        yield f"Rule          {name}: {rule['do']} {rule['kind']} unused for {rule['min_age']}"
        for path, refusal in rule["roots"].items():
            yield f"              {path}: {'usable' if refusal is None else 'not usable'}"


def _logs_line(logs: Mapping[str, Any]) -> str:
    usable = [path for path, refusal in logs["directories"].items() if refusal is None]
    parts = [f"{', '.join(usable) or 'no directory'}: {logs['files']} files now"]
    if logs["kernel"] is not None:
        parts.append(f"the kernel's by {logs['kernel']}")
    return f"Logs          {'; '.join(parts)}"


def _gpu_limits(gpu: Mapping[str, Any]) -> str:
    if "power_limit_watts" not in gpu:
        return "no power limit"
    least, most, default = (gpu.get(f"{name}_limit_watts", "?") for name in ("min", "max", "default"))
    return f"{gpu['power_limit_watts']:g} W of {least} to {most} W, default {default} W"
