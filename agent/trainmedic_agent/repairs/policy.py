"""The policy's part ``restart``: units and containers that may be restarted."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping

from msgspec import Struct

from trainmedic_agent import mapping_reader
from trainmedic_agent.containers.policy import DEFAULT_SOCKET, socket_path
from trainmedic_agent.mapping_reader import FieldFault, MappingReader

UNIT = re.compile(r"[A-Za-z0-9:_.\\@][A-Za-z0-9:_.\\@-]{0,200}\.service")
_UNIT_PATTERN = re.compile(r"[A-Za-z0-9:_.\\@*?\[\]!-]{1,200}\.service")
_MAX_PATTERNS = 100


class RestartPolicy(Struct, frozen=True):
    """- ``units``, ``containers``: names or shell patterns
    - ``container_labels``: ``NAME=VALUE``; one of them permits a container
    - ``socket``: serves Docker's API
    """

    units: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    container_labels: tuple[str, ...] = ()
    socket: str = DEFAULT_SOCKET

    def allows_unit(self, unit: str) -> bool:
        return _matches_any(unit, self.units)

    def allows_container(self, name: str, labels: Mapping[str, str]) -> bool:
        has_label = any(f"{key}={value}" in self.container_labels for key, value in labels.items())
        return has_label or _matches_any(name, self.containers)


def read_restart(raw: object, faults: list[FieldFault]) -> RestartPolicy:
    """After a fault, appended to `faults`, the result must not be used."""
    reader = MappingReader(("restart",), raw, RestartPolicy.__struct_fields__, faults)
    policy = RestartPolicy(
        units=reader.each("units", _unit_pattern),
        containers=reader.each("containers", _container_pattern),
        container_labels=reader.each("container_labels", _label),
        socket=reader.optional("socket", socket_path, DEFAULT_SOCKET),
    )
    for key in ("units", "containers", "container_labels"):
        if (count := len(getattr(policy, key))) > _MAX_PATTERNS:
            reader.fault((key,), f"has {count} entries; at most {_MAX_PATTERNS} are read")
    return policy


def _matches_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _unit_pattern(raw: object) -> str:
    pattern = mapping_reader.text(raw)
    if not _UNIT_PATTERN.fullmatch(pattern):
        raise ValueError(f"{pattern!r} must be the name or pattern of a service, such as nvidia-persistenced.service")
    return _refuse_unbounded(pattern, pattern.removesuffix(".service"))


def _container_pattern(raw: object) -> str:
    pattern = mapping_reader.text(raw)
    return _refuse_unbounded(pattern, pattern)


def _refuse_unbounded(pattern: str, name: str) -> str:
    if not any(char.isalnum() for char in name):
        raise ValueError(f"{pattern!r} permits every name; write a part of the names that may be restarted")
    return pattern


def _label(raw: object) -> str:
    label = mapping_reader.text(raw)
    if not label.partition("=")[0] or "=" not in label:
        raise ValueError(f"{label!r} must be a label with its value, such as trainmedic.restart=yes")
    return label
