"""Verification of Trainmedic's own alerts that Alertmanager sends back.

Playbooks trust ``log`` and ``diagnosis`` in the label ``source``, which anyone who posts alerts can write. So these
alerts must have the labels that stored findings or verdicts give. Otherwise the label becomes ``exported_source``, as
in Prometheus. Annotations of a verdict come from the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from msgspec.structs import replace

from trainmedic_core.fingerprint import fingerprint
from trainmedic_logs.domain.known_verdict import KnownVerdict
from trainmedic_server.domain.alert import Alert, Delivery
from trainmedic_server.domain.own_source import DIAGNOSIS, LOG, NODE_SUSPECT, SOURCE
from trainmedic_server.engine import verdict_alert
from trainmedic_server.engine.runbooks import Runbooks
from trainmedic_server.ports.findings import FindingHistory
from trainmedic_server.ports.verdicts import VerdictHistory

_Labels = frozenset[tuple[str, str]]

NOT_OWN = f"exported_{SOURCE}"
_VERDICTS_OF_JOB = 50  # more than a job's failures in the 15 minutes of a verdict's alert


class OwnAlerts:
    def __init__(self, findings: FindingHistory, verdicts: VerdictHistory, runbooks: Runbooks = Runbooks()) -> None:
        self._findings = findings
        self._verdicts = verdicts
        self._runbooks = runbooks

    async def checked(self, delivery: Delivery) -> Delivery:
        """Rename the label of unverified alerts. Raises StoreUnavailable."""
        claims = [alert for alert in delivery.alerts if alert.labels.get(SOURCE) in (LOG, DIAGNOSIS)]
        if not claims:
            return delivery
        stored_labels = await self._findings.alerts_raised({fingerprint(alert.labels) for alert in claims})
        raised = set(map(_compared, stored_labels))
        diagnosed = {alert.labels.get("job_name", "") for alert in claims if alert.labels[SOURCE] == DIAGNOSIS}
        verdicts: dict[_Labels, KnownVerdict] = {}
        for job in diagnosed - {""}:
            for known in await self._verdicts.verdicts_of(job, _VERDICTS_OF_JOB):  # newest first
                if known.labels is not None:
                    verdicts.setdefault(_compared(known.labels), known)
        alerts = []
        for alert in delivery.alerts:
            match alert.labels.get(SOURCE):
                case "log":
                    alerts.append(alert if _compared(alert.labels) in raised else _not_own(alert))
                case "diagnosis" if alert.name == NODE_SUSPECT:
                    is_own = await self._is_suspect(alert, delivery.received_at)
                    alerts.append(alert if is_own else _not_own(alert))
                case "diagnosis":
                    verdict = verdicts.get(_compared(alert.labels))
                    alerts.append(self._runbooks.linked(_stated(alert, verdict)) if verdict else _not_own(alert))
                case _:
                    alerts.append(alert)
        return replace(delivery, alerts=tuple(alerts))

    async def _is_suspect(self, alert: Alert, now: datetime) -> bool:
        node = alert.labels.get("node", "")
        named = await self._verdicts.verdicts_on(node, now - verdict_alert.SUSPECT_WITHIN)
        is_suspect = len({verdict.job for verdict in named}) >= verdict_alert.SUSPECT_JOBS
        return is_suspect and _compared(alert.labels) == _compared(verdict_alert.labels_of_suspect(node))


def _stated(alert: Alert, verdict: KnownVerdict) -> Alert:
    return replace(alert, annotations={**verdict_alert.annotations_of(verdict.plain), "verdict": verdict.id})


def _compared(labels: Mapping[str, str]) -> _Labels:
    # All labels: others can be made with the same fingerprint. Alertmanager drops empty ones.
    return frozenset(pair for pair in labels.items() if pair[1])


def _not_own(alert: Alert) -> Alert:
    """Rename the label. Alertmanager identifies the alert by the fingerprint, which stays."""
    labels = {name: value for name, value in alert.labels.items() if name != SOURCE}
    return replace(alert, labels={**labels, NOT_OWN: alert.labels[SOURCE]})
