"""Proof that an alert must give before a harmful playbook reacts (``on.proof``).

An alertname proves nothing: other rule sets use it for other conditions. ``api.own_alerts`` ensures that only the
server's own alerts have ``source``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

from trainmedic_logs.domain import xids
from trainmedic_server.domain.alert import SHIPPED_RULE, SHIPPED_RULE_LABEL, Alert
from trainmedic_server.domain.own_source import DIAGNOSIS, LOG, SOURCE

XID_LABELS = frozenset({"xid", "xid_code", "xid_error", "err_code", "error_code"})
_XID = re.compile(r"(?:xid)?[\s:=_-]*(\d{1,4})(?:\.0+)?", re.IGNORECASE)
_OUR_RUNBOOKS = "docs/how-to/monitoring.md#"
# by an XID's action
_PHRASES: Mapping[str, str] = {
    "none": "asks for no repair",
    "restart_program": "is an error of the program",
    "driver_says": "does not say which repair it asks for",
    "ask": "needs a person to judge it",
}
_LONGEST_VALUE = 60  # characters
_MOST_CODES = 4  # in a reason


class AlertProof(StrEnum):
    SHIPPED_RULE = "shipped_rule"
    """The alert has `SHIPPED_RULE_LABEL`, or the server raised it."""
    HARDWARE_XID = "hardware_xid"
    """The alert names an XID that requires a repair (``xids``)."""


def lacking(accepted: Sequence[AlertProof], alert: Alert) -> str:
    """Return why the alert has no `accepted` proof; empty if it has one or none is required."""
    if not accepted or (AlertProof.SHIPPED_RULE in accepted and _is_shipped(alert.labels)):
        return ""
    codes = list(_codes(alert.labels))
    if AlertProof.HARDWARE_XID in accepted and codes and all(_means_hardware(code) for _, _, code in codes):
        return ""
    lacks = []
    if AlertProof.SHIPPED_RULE in accepted:
        lacks.append(f'does not carry {SHIPPED_RULE_LABEL}="{SHIPPED_RULE}"')
    if AlertProof.HARDWARE_XID in accepted:
        lacks.append(f"names no XID that means hardware{_shown(codes)}")
    return f"it {' and '.join(lacks)}; {_advice(accepted, alert)}"


def _is_shipped(labels: Mapping[str, str]) -> bool:
    return labels.get(SHIPPED_RULE_LABEL) == SHIPPED_RULE or labels.get(SOURCE) in (LOG, DIAGNOSIS)


def _codes(labels: Mapping[str, str]) -> Iterator[tuple[str, str, int | None]]:
    """Yield label, value and code, None if it is no single number."""
    for name, value in sorted(labels.items()):
        if name.lower().removeprefix("exported_") in XID_LABELS and value:
            stripped = value.strip()
            # Do not truncate: a second code may follow.
            match = _XID.fullmatch(stripped) if len(stripped) <= _LONGEST_VALUE else None
            yield name, value, int(match[1]) if match else None


def _means_hardware(code: int | None) -> bool:
    return code is not None and xids.means_hardware(code)


def _shown(codes: Sequence[tuple[str, str, int | None]]) -> str:
    refusals = [
        f'{name}="{value[:_LONGEST_VALUE]}" {_meaning(code)}'
        for name, value, code in codes
        if not _means_hardware(code)
    ]
    return f" ({'; '.join(refusals[:_MOST_CODES])})" if refusals else ""


def _meaning(code: int | None) -> str:
    if code is None:
        return "is no XID"
    return _PHRASES[xids.xid(code).action] if xids.is_listed(code) else "is not in the catalogue of XIDs"


def _advice(accepted: Sequence[AlertProof], alert: Alert) -> str:
    if AlertProof.SHIPPED_RULE not in accepted:
        return "no repair begins without it"
    if alert.annotations.get("runbook_url", "").startswith(_OUR_RUNBOOKS):
        return "its rule is of an earlier release of Trainmedic: deploy the rules of this release (monitoring/rules)"
    if alert.original_name not in (None, alert.name):
        return (
            "an alert map's rename removes that label: if the rule means what this playbook repairs, call its alert "
            f"{alert.name} and add the label to the rule"
        )
    return "if its rule means what this playbook repairs, add this label to the rule"
