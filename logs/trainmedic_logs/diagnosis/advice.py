from __future__ import annotations

from trainmedic_logs.diagnosis.verdict import Advice, Confidence
from trainmedic_logs.domain.finding import CauseClass

# Earlier failures of the same fingerprint from which on a person has to act.
_RETRIES = 2

_ADVICE = {
    # A restart on a lost GPU fails again, so a person checks the node first.
    CauseClass.GPU: Advice.ASK,
    CauseClass.NODE: Advice.ASK,
    CauseClass.GPU_MEMORY: Advice.ASK,
    CauseClass.HOST_MEMORY: Advice.RESTART,
    CauseClass.STORAGE: Advice.ASK,
    CauseClass.DATA: Advice.RESTART,
    CauseClass.CODE: Advice.RESTART,
    CauseClass.NUMERICS: Advice.ROLLBACK,
}

MEANS = {
    Advice.RESTART: "restart it, from its newest checkpoint if there is one",
    Advice.ISOLATE_NODE: "cordon the node until a person has checked it",
    Advice.STOP: "do not restart it unchanged, because it would fail the same way",
    Advice.ROLLBACK: "return to a checkpoint from before the fault",
    Advice.ASK: "a person has to check first; for a GPU or a node, check the node",
}


def what_to_do(
    cause: CauseClass, confidence: Confidence, before: int, *, names_node: bool, has_started: bool = True
) -> Advice:
    """Return the advice. `before`: earlier attempts with the same fingerprint."""
    if names_node:
        return Advice.ISOLATE_NODE
    if not has_started:
        return Advice.ASK
    # A certain program error recurs by itself, so one repeat is enough.
    if before >= _RETRIES or (before and cause is CauseClass.CODE and confidence is Confidence.HIGH):
        is_sure = confidence is Confidence.HIGH and cause in (CauseClass.CODE, CauseClass.GPU_MEMORY)
        return Advice.STOP if is_sure else Advice.ASK
    return _ADVICE.get(cause, Advice.RESTART)
