"""The node's policy: the upper bound of what any command may do here (``docs/reference/agent-policy.md``).

Undos of `_REVERTIBLE` are always allowed, so that a stricter policy leaves none in effect.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from msgspec import Struct, field

from trainmedic.errors import ConfigurationError
from trainmedic.wire import envelope
from trainmedic_agent import mapping_reader
from trainmedic_agent.containers.policy import ContainersPolicy, read_containers
from trainmedic_agent.disk.rules import CleaningPolicy, read_cleaning
from trainmedic_agent.health.health_policy import HealthPolicy, read_health
from trainmedic_agent.log_reading.log_policy import LogsPolicy, read_logs
from trainmedic_agent.mapping_reader import FieldFault, MappingReader
from trainmedic_agent.repairs.policy import RestartPolicy, read_restart
from trainmedic_agent.slurm import policy as slurm
from trainmedic_agent.slurm.policy import SlurmPolicy, read_slurm
from trainmedic_core import duration, yaml_text
from trainmedic_core.problems import did_you_mean, shown
from trainmedic_core.setting_sources import unreadable_file

T = TypeVar("T")

READING = frozenset({"node.facts", "node.health", "logs.read"})  # always allowed
CHANGING = (  # allowed by name under ``allow``
    *("gpu.power_limit", "disk.clean", "disk.prune_containers"),
    *("node.restart_unit", "node.restart_container", "gpu.reset", "node.reboot"),
    *slurm.CHANGING,
)
_PART_OF = {"gpu.renew_lease": "gpu.power_limit"}  # allowed with the other action
_REVERTIBLE = frozenset({"gpu.power_limit"})  # with undos that are always allowed
_KEYS = ("allow", "power", "cleaning", "containers", "restart", "logs", "health", "slurm")
_LONGEST_LEASE = timedelta(days=1)


class PowerBounds(Struct, frozen=True):
    floor_percent: float = 50.0  # of the card's default
    max_lease: timedelta = timedelta(minutes=15)  # of an unrenewed cap


class Policy(Struct, frozen=True):
    allow: frozenset[str] = frozenset()  # of `CHANGING`
    power: PowerBounds = field(default_factory=PowerBounds)
    cleaning: CleaningPolicy = field(default_factory=CleaningPolicy)
    containers: ContainersPolicy | None = None  # None: nothing may be removed
    restart: RestartPolicy | None = None  # None: no unit or container may be restarted
    logs: LogsPolicy | None = None  # None: the log reader is not loaded
    health: HealthPolicy = field(default_factory=HealthPolicy)  # empty: no load test
    slurm: SlurmPolicy | None = None  # None: no command of Slurm is run
    source: str | None = None  # the file, if any
    digest: str | None = None  # first 12 hexadecimal digits of its text's SHA-256, without a byte order mark

    def allows(self, action: str) -> bool:
        if action in slurm.READING:
            return self.slurm is not None
        also_by = slurm.ALSO_BY.get(action, frozenset())
        return action in READING or _PART_OF.get(action, action) in self.allow or not also_by.isdisjoint(self.allow)

    def refusal(self, command: envelope.Command) -> str | None:
        """Return why the command is not allowed, if so."""
        is_undo = command.undo_of is not None and command.action in _REVERTIBLE
        if is_undo or self.allows(command.action):
            return None
        if self.source is None:
            return f"{command.action} is not allowed: this agent has no policy file, so it only reads"
        return f"{command.action} is not allowed by this node's policy {self.source}: it is not under allow"


def load(path: Path) -> Policy:
    """Raises ConfigurationError with all errors, by line and column."""
    try:
        raw = path.read_bytes()
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigurationError(unreadable_file("--policy", path, error)) from error
    if mode & stat.S_IWOTH:
        raise ConfigurationError(f"the policy {path} can be written by every user of this node; run chmod o-w on it")
    text = yaml_text.decode(raw, str(path))
    if not isinstance(text, str):
        raise ConfigurationError(str(text))
    return parse(text, str(path))


def parse(text: str, source: str) -> Policy:
    """Raises ConfigurationError, naming the file `source`."""
    documents, problems = yaml_text.read(text, source)
    if problems:
        raise ConfigurationError("\n".join(map(str, problems)))
    if len(documents) != 1:
        raise ConfigurationError(f"{source}: a policy is one YAML document, but the file has {len(documents)}")
    document = documents[0]
    reader = MappingReader((), document.value, _KEYS)

    def part(name: str, read: Callable[[object, list[FieldFault]], T], otherwise: T) -> T:
        return reader.optional(name, lambda raw: read(raw, reader.faults), otherwise)

    policy = Policy(
        allow=frozenset(reader.each("allow", _action)),
        power=part("power", _power, PowerBounds()),
        cleaning=part("cleaning", read_cleaning, CleaningPolicy()),
        containers=part("containers", read_containers, None),
        restart=part("restart", read_restart, None),
        logs=part("logs", read_logs, None),
        health=part("health", read_health, HealthPolicy()),
        slurm=part("slurm", read_slurm, None),
        source=source,
        digest=hashlib.sha256(text.encode()).hexdigest()[:12],
    )
    if not reader.faults:
        for missing in _missing_parts(policy):
            reader.fault(("allow",), missing)
    if reader.faults:
        raise ConfigurationError("\n".join(_with_position(document, fault) for fault in reader.faults))
    return policy


def _missing_parts(policy: Policy) -> Iterator[str]:
    restart = policy.restart or RestartPolicy()
    if "disk.prune_containers" in policy.allow and policy.containers is None:
        yield "disk.prune_containers needs the part containers, which states what may be removed"
    if "node.restart_unit" in policy.allow and not restart.units:
        yield "node.restart_unit needs restart.units, which names the units"
    if "node.restart_container" in policy.allow and not (restart.containers or restart.container_labels):
        yield "node.restart_container needs restart.containers or restart.container_labels"
    if policy.slurm is None and (named := sorted(policy.allow.intersection(slurm.CHANGING))):
        yield f"{named[0]} needs the part slurm, which states how Slurm's commands are run"


def _action(raw: object) -> str:
    name = mapping_reader.text(raw)
    if name in READING:
        raise ValueError(f"{name} needs no permission: it only reads; leave it out")
    if name in slurm.READING:
        raise ValueError(f"{name} is allowed by the part slurm; leave it out")
    if name in _PART_OF:
        raise ValueError(f"{name} belongs to {_PART_OF[name]}; allow that")
    if name not in CHANGING:
        raise ValueError(f"{shown(name)} is not one of {', '.join(CHANGING)}{did_you_mean(name, CHANGING)}")
    return name


def _power(raw: object, faults: list[FieldFault]) -> PowerBounds:
    reader = MappingReader(("power",), raw, PowerBounds.__struct_fields__, faults)
    return PowerBounds(
        floor_percent=reader.optional("floor_percent", _floor, PowerBounds().floor_percent),
        max_lease=reader.optional("max_lease", _lease, PowerBounds().max_lease),
    )


def _floor(raw: object) -> float:
    if isinstance(raw, int | float) and not isinstance(raw, bool) and 0 < raw <= 100:
        return float(raw)
    raise ValueError(f"must be a number above 0 and up to 100, in percent of the default limit, not {shown(raw)}")


def _lease(raw: object) -> timedelta:
    lease = mapping_reader.age(raw)
    if not timedelta(minutes=1) <= lease <= _LONGEST_LEASE:
        raise ValueError(f"must be from 1m to {duration.write(_LONGEST_LEASE)}, not {shown(raw)}")
    return lease


def _with_position(document: yaml_text.YamlDocument, fault: FieldFault) -> str:
    is_about_a_key = fault.message.startswith("is not known")
    return str(document.problem(fault.path, str(fault), at_key=is_about_a_key))


def allowed(policy: Policy, actions: Collection[str]) -> list[str]:
    return sorted(action for action in actions if policy.allows(action))
