"""``trainmedic agent check``: what an agent with these settings could do here, and what prevents it."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import redis
from msgspec import Struct, field

from trainmedic.errors import ConfigurationError, described
from trainmedic.wire import envelope
from trainmedic.wire.connection import NO_MORE_CLIENTS, open_client, takes_no_clients
from trainmedic.wire.reading import read_object
from trainmedic.wire.redis_faults import explained
from trainmedic.wire.signing import unseal
from trainmedic_agent import __version__, privileges
from trainmedic_agent import policy as policies
from trainmedic_agent.containers.engine_api import ContainerEngine, EngineAnswer
from trainmedic_agent.containers.kubelet import sign_of_kubelet
from trainmedic_agent.disk.access_times import access_times
from trainmedic_agent.disk.filesystems import Root, inode_at, opened_roots
from trainmedic_agent.disk.open_files import FileUsage
from trainmedic_agent.disk.rules import AgeBy
from trainmedic_agent.disk.throttle import Clocks, Throttle
from trainmedic_agent.errors import CommandNotExecuted
from trainmedic_agent.exclusive_gpus import agents_of, taken_by
from trainmedic_agent.facts.gpu import presence
from trainmedic_agent.policy import CHANGING, READING, Policy
from trainmedic_agent.privileges import Privileges
from trainmedic_agent.settings.agent import AgentSettings
from trainmedic_agent.slurm import policy as slurm
from trainmedic_agent.slurm.programs import SlurmPrograms
from trainmedic_agent.wiring.node_gpus import node_gpus
from trainmedic_core import duration

_ENGINE_SECONDS = 5.0  # for an answer of the container engine
_SLURM_SECONDS = 15.0  # for an answer of Slurm
_RIGHTS_HINT = "run the check as the agent's user, or give the agent's service what is missing"


class CheckReport(Struct):
    values: dict[str, Any]  # with the names documented for ``--json``
    errors: list[str] = field(default_factory=list)  # obstacles to something that the policy allows
    warnings: list[str] = field(default_factory=list)  # possible oversights
    is_cut_off: bool = False  # True if Redis cannot be used
    agents: Mapping[str, int] = field(default_factory=dict)  # process IDs of agents that hold GPUs, by UUID


def check(settings: AgentSettings) -> CheckReport:
    """Check this node. Changes nothing."""
    report = CheckReport({"node": settings.node, "version": __version__})
    policy = _load_policy(settings, report)
    own = privileges.current_privileges()
    report.values["user"] = own.user
    report.values["capabilities"] = sorted(own.capabilities)
    _check_power(policy, own, report)
    _check_cleaning(policy, settings.state_dir, own, report)
    _check_containers(policy, report)
    _check_repairs(policy, own, report)
    _check_logs(policy, settings, report)
    _check_slurm(policy, report)
    _check_state(settings.state_dir, report)
    _check_redis(settings, policy, report)
    _check_other_agents(report)
    report.values |= {"errors": report.errors, "warnings": report.warnings}
    return report


def _load_policy(settings: AgentSettings, report: CheckReport) -> Policy:
    policy = Policy()
    if settings.policy is None:
        report.warnings.append("no policy is set, so this agent only reads; name one with --policy")
    else:
        try:
            policy = policies.load(settings.policy)
        except ConfigurationError as error:
            report.errors.extend(str(error).splitlines())
    report.values["policy"] = {"file": policy.source, "digest": policy.digest}
    report.values["actions"] = policies.allowed(policy, [*READING, *CHANGING])
    return policy


def _check_power(policy: Policy, own: Privileges, report: CheckReport) -> None:
    with contextlib.closing(node_gpus()) as gpus:
        inventory = presence(gpus)
        report.agents = agents_of([gpu["uuid"] for gpu in inventory["gpus"]])
    problems = inventory.pop("gpu_problems", [])
    report.values |= {"driver": None, **inventory}
    report.values["power"] = {
        "is_allowed": policy.allows("gpu.power_limit"),
        "floor_percent": policy.power.floor_percent,
        "max_lease": duration.write(policy.power.max_lease),
        "may_set": not own.lacks(privileges.POWER),
    }
    report.warnings.extend(problems)
    report.warnings.extend(gpu["problem"] for gpu in inventory["gpus"] if "problem" in gpu)
    if policy.allows("gpu.power_limit") and inventory["gpus"] and own.lacks(privileges.POWER):
        report.errors.append(
            f"the policy allows gpu.power_limit, and the user {own.user} may not set one: it needs "
            f"{', '.join(privileges.POWER)}; {_RIGHTS_HINT}"
        )


def _check_cleaning(policy: Policy, state_dir: Path, own: Privileges, report: CheckReport) -> None:
    cleaning = policy.cleaning
    clocks = Clocks()
    sees_every_process = FileUsage(clocks, Throttle(clocks, math.inf, lambda: False)).sees_every_process()
    rules: dict[str, Any] = {}
    for name, rule in cleaning.rules.items():
        with opened_roots(rule.roots, cleaning.owners, inode_at(state_dir)) as opened:
            usable = {root.path: None for root in opened.roots}
            states = {path: usable.get(path, opened.refused.get(path)) for path in rule.roots}
            if rule.age_by is AgeBy.USED:
                _check_access_times(name, opened.roots, sees_every_process, report)
        rules[name] = {"kind": rule.kind, "do": rule.do, "min_age": duration.write(rule.min_age), "roots": states}
        for path, refusal in states.items():
            if refusal is not None:
                sentences = report.errors if os.path.lexists(path) else report.warnings
                sentences.append(f"the rule {name} cannot clean {path}: {refusal}")
    report.values["rules"] = rules
    report.values["is_cleaning_allowed"] = policy.allows("disk.clean")
    if cleaning.rules and not policy.allows("disk.clean"):
        report.warnings.append("the policy has cleaning rules, and disk.clean is not under allow")
    if not policy.allows("disk.clean"):
        return
    if not cleaning.rules:
        report.warnings.append("the policy allows disk.clean, and has no cleaning rule")
    missing = own.lacks(privileges.FILES_OF_OTHERS)
    if missing:
        report.warnings.append(
            f"files of other users than {own.user} will be left where they are: that needs {', '.join(missing)}"
        )
    if not sees_every_process or own.lacks(privileges.PROCESSES_OF_OTHERS):
        report.warnings.append(
            "not all processes of this machine can be seen (CAP_SYS_PTRACE, the first PID namespace, no hidepid): "
            "where the kernel does not say whether a file is open, it is left"
        )


def _check_containers(policy: Policy, report: CheckReport) -> None:
    containers = policy.containers
    if containers is None:
        return
    report.values["containers"] = {"socket": containers.socket, "remove": sorted(containers.remove)}
    if not policy.allows("disk.prune_containers"):
        report.warnings.append("the policy has a part containers, and disk.prune_containers is not under allow")
        return
    if (sign := sign_of_kubelet()) is not None:
        report.warnings.append(f"no containers or images will be removed: {sign}, so the kubelet does that")
        return
    try:
        ContainerEngine(containers.socket).info(_ENGINE_SECONDS)
    except (CommandNotExecuted, EngineAnswer) as error:
        report.errors.append(str(error))


def _check_repairs(policy: Policy, own: Privileges, report: CheckReport) -> None:
    needed = {"node.restart_unit": "systemctl", "gpu.reset": "nvidia-smi", "node.reboot": "shutdown"}
    for action, program in needed.items():
        if policy.allows(action) and shutil.which(program) is None:
            report.errors.append(f"the policy allows {action}, and there is no program {program} in PATH")
    if policy.allows("gpu.reset") and own.user != "root":
        report.errors.append(f"the policy allows gpu.reset, which needs root, not the user {own.user}; {_RIGHTS_HINT}")
    restart = policy.restart
    if restart is not None and policy.allows("node.restart_container"):
        try:
            ContainerEngine(restart.socket).info(_ENGINE_SECONDS)
        except (CommandNotExecuted, EngineAnswer) as error:
            report.errors.append(str(error))


def _check_logs(policy: Policy, settings: AgentSettings, report: CheckReport) -> None:
    report.values["logs"] = None
    if policy.logs is None:
        return
    from trainmedic_agent.wiring.agent_check_logs import check_logs

    found = check_logs(policy.logs, settings)
    report.values["logs"] = found.values
    report.errors.extend(found.errors)
    report.warnings.extend(found.warnings)


def _check_slurm(policy: Policy, report: CheckReport) -> None:
    report.values["slurm"] = None
    if policy.slurm is None:
        return
    programs = SlurmPrograms(policy.slurm)
    try:
        if not policy.allow.isdisjoint(("slurm.signal", "slurm.cancel")):
            programs.run(("scancel", "--version"), _SLURM_SECONDS)
        done = programs.run(("scontrol", "ping"), _SLURM_SECONDS)
    except CommandNotExecuted as error:
        report.errors.append(str(error))
        return
    report.values["slurm"] = {"commands": policy.slurm.commands, "answers": done.code == 0}
    if done.code != 0:
        said = done.text or done.output[:200].decode(errors="replace").strip() or "it does not end"
        report.errors.append(f"Slurm cannot be used: scontrol ping: {said}")
    if policy.allow.isdisjoint(slurm.CHANGING):
        report.warnings.append("the policy has a part slurm, and no action of Slurm under allow: the agent only reads")


def _check_access_times(rule: str, roots: tuple[Root, ...], sees_every_process: bool, report: CheckReport) -> None:
    for root in roots:
        times = access_times(root.mount, Path("/proc"), sees_every_process=sees_every_process)
        if times.untraced:
            report.warnings.append(
                f"the rule {rule} counts ages from the last use, and reads below {root.path} may leave no trace "
                f"({', '.join(times.untraced)}): there ages count from the last change, and who reads is seen only "
                "while files are open, and for a minute before they go"
            )


def _check_state(directory: Path, report: CheckReport) -> None:
    report.values["state_dir"] = str(directory)
    nearest = directory
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        report.errors.append(
            f"the state directory {directory} cannot be used: the agent may not write in {nearest}; make it writable "
            "for the agent's user, or name another with --state-dir"
        )


def _check_redis(settings: AgentSettings, policy: Policy, report: CheckReport) -> None:
    report.values["signing_key"] = settings.signing_key is not None
    if settings.signing_key is None:
        report.warnings.append("no signing key is set: whoever can write to Redis can command this agent")
    elif settings.has_short_key:
        report.warnings.append("the signing key is short enough to be guessed; use 16 random characters or more")
    url = settings.find_redis()
    running: Mapping[str, Any] | None = None
    reason = "no URL is set, and no server of this user runs on this machine; name one with --redis"
    if url is not None:
        try:
            with contextlib.closing(open_client(url)) as client:
                running = _presence(client, settings)
                reason = ""
        except (redis.RedisError, OSError, ValueError, TypeError) as error:
            known = NO_MORE_CLIENTS if takes_no_clients(error) else explained(error, url)
            reason = known or described(error)
    report.values["redis"] = {"is_reachable": not reason, "agent": running}
    if reason:
        report.is_cut_off = True
        report.errors.append(f"Redis cannot be used: {reason}")
    elif running is not None and running.get("policy") != (policy.digest or "none"):
        report.warnings.append(
            f"the agent of {settings.node} that is running (process {running.get('pid')} on {running.get('host')}) was "
            "started with another policy: restart it"
        )


def _check_other_agents(report: CheckReport) -> None:
    if report.is_cut_off:
        return  # the holder may be this node's own agent, whose presence gives its process ID
    running = (report.values["redis"]["agent"] or {}).get("pid")
    report.warnings.extend(taken_by(uuid, pid) for uuid, pid in report.agents.items() if pid != running)


def _presence(client: redis.Redis, settings: AgentSettings) -> Mapping[str, Any] | None:
    key = envelope.agent_presence(settings.node)
    value: Any = client.get(key)
    if value is None:
        return None
    try:
        sealed = unseal(value)
        if settings.signer is not None:
            settings.signer.verify_sealed(sealed, key)
        values = read_object(sealed.raw)
    except ValueError:
        return None
    return {name: values.get(name) for name in ("host", "pid", "version", "policy")}
