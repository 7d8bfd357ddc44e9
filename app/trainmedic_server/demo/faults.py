from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct


class FaultKind(StrEnum):
    DATA = "data"
    GRADIENTS = "gradients"
    HEAT = "heat"
    ASK = "ask"


class DemoFault(Struct, frozen=True):
    key: str
    target: str
    """Job or node."""
    text: str


FAULTS: Mapping[FaultKind, DemoFault] = {
    FaultKind.DATA: DemoFault("d", "llm-1", "the next batches of llm-1 have random labels"),
    FaultKind.GRADIENTS: DemoFault("g", "llm-2", "the gradients of llm-2 are 500 times too large for 15 s"),
    FaultKind.HEAT: DemoFault("h", "node-1", "the fan of GPU 0 on node-1 stops for 20 s"),
    FaultKind.ASK: DemoFault("a", "node-2", "the fan of GPU 0 on node-2 stops for 60 s; its playbook asks you"),
}
