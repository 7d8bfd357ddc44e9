"""The policy's part ``health``."""

from __future__ import annotations

from msgspec import Struct

from trainmedic_agent import mapping_reader
from trainmedic_agent.mapping_reader import FieldFault, MappingReader


class HealthPolicy(Struct, frozen=True):
    """- ``probe``: command of ``trainmedic-probe``. Empty: no load test is allowed
    - ``gpus``: minimum number of responding GPUs
    """

    probe: tuple[str, ...] = ()
    gpus: int = 0


def read_health(raw: object, faults: list[FieldFault]) -> HealthPolicy:
    """Append what is wrong to `faults`."""
    reader = MappingReader(("health",), raw, HealthPolicy.__struct_fields__, faults)
    probe = reader.each("probe", mapping_reader.text)
    if probe and not probe[0].startswith("/"):
        reader.fault(("probe",), f"{probe[0]!r} must be an absolute path, such as /opt/train/bin/trainmedic-probe")
    return HealthPolicy(probe, reader.optional("gpus", mapping_reader.whole(0, 1024), 0))
