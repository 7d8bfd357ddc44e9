"""The policy's part ``containers``."""

from __future__ import annotations

import posixpath
from datetime import timedelta
from enum import StrEnum

from msgspec import Struct

from trainmedic_agent import mapping_reader
from trainmedic_agent.mapping_reader import FieldFault, MappingReader
from trainmedic_core import duration

DEFAULT_SOCKET = "/run/docker.sock"
_LEAST_AGE = timedelta(hours=1)
_MAX_PATTERNS = 100


class Leftover(StrEnum):
    """Kinds of leftovers, least valuable first."""

    BUILD_CACHE = "build_cache"
    DANGLING_IMAGES = "dangling_images"
    STOPPED_CONTAINERS = "stopped_containers"
    UNUSED_IMAGES = "unused_images"


class ContainersPolicy(Struct, frozen=True):
    """- ``min_age``: since a container stopped, or an image was pulled, built or named
    - ``keep``: shell patterns of names that stay
    """

    remove: frozenset[Leftover]
    min_age: timedelta
    socket: str = DEFAULT_SOCKET
    keep: tuple[str, ...] = ()


def read_containers(raw: object, faults: list[FieldFault]) -> ContainersPolicy:
    """After a fault, appended to `faults`, the result must not be used."""
    reader = MappingReader(("containers",), raw, ContainersPolicy.__struct_fields__, faults)
    keep = reader.each("keep", mapping_reader.text)
    if len(keep) > _MAX_PATTERNS:
        reader.fault(("keep",), f"has {len(keep)} patterns; at most {_MAX_PATTERNS} are read")
    return ContainersPolicy(
        remove=frozenset(reader.each("remove", mapping_reader.one_of(Leftover), required=True)),
        min_age=reader.required("min_age", _age, _LEAST_AGE),
        socket=reader.optional("socket", socket_path, DEFAULT_SOCKET),
        keep=keep,
    )


def _age(raw: object) -> timedelta:
    age = mapping_reader.age(raw)
    if age < _LEAST_AGE:
        raise ValueError(f"must be at least {duration.write(_LEAST_AGE)}, not {raw}")
    return age


def socket_path(raw: object) -> str:
    path = mapping_reader.text(raw)
    if not path.startswith("/") or posixpath.normpath(path) != path or "\0" in path:
        raise ValueError(f"{path!r} must be the absolute path of the engine's socket, such as {DEFAULT_SOCKET}")
    return path
