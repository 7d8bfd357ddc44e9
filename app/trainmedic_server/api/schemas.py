"""OpenAPI models of the webhook's body and reply."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, ConfigDict, Field

from trainmedic_server.api.cut_texts import TEXT_LENGTH
from trainmedic_server.api.payload import FINGERPRINT_LENGTH, LABELS_PER_ALERT
from trainmedic_server.api.view import ApiModel
from trainmedic_server.domain.run import Decision

# Tools read JSON Schema patterns that exclude NUL differently, so a description states it.
Text = Annotated[str, Field(max_length=TEXT_LENGTH)]
Strings = Annotated[dict[Text, Text], Field(max_length=LABELS_PER_ALERT)]


class PayloadAlert(ApiModel):
    model_config = ConfigDict(extra="allow")

    status: Literal["firing", "resolved"]
    labels: Strings = Field(description="Without NUL characters, as all text here.")
    annotations: dict[str, str] | None = Field(
        None,
        description=(
            "At most 1,000, with 131,072 characters in total. Longer ones are truncated and marked, not refused."
        ),
    )
    startsAt: AwareDatetime = Field(description="RFC 3339, with a time zone.")
    endsAt: AwareDatetime | Literal[""] | None = Field(None, description="The year 0001 while the alert fires.")
    generatorURL: Text | None = None
    fingerprint: Annotated[str, Field(max_length=FINGERPRINT_LENGTH)] | None = Field(
        None, description="By default computed from the labels, like Alertmanager."
    )


class AlertmanagerPayload(ApiModel):
    """Alertmanager's webhook payload, version "4". Unknown members are ignored.

    A malformed alert does not refuse the others: the reply lists it as rejected. Malformed members that nothing depends
    on count as absent.
    """

    model_config = ConfigDict(extra="allow")

    version: Literal["4"]
    alerts: list[PayloadAlert]
    status: Literal["firing", "resolved"] | None = None
    receiver: Text | None = None
    groupKey: Text | None = None
    truncatedAlerts: Annotated[int, Field(ge=0, lt=1 << 31)] | None = Field(
        None, description="Number of alerts dropped by ``max_alerts``."
    )
    externalURL: Text | None = None


class AdmittedRun(ApiModel):
    run_id: str
    playbook: str
    target: str | None = Field(description="null if the labels name none.")
    decision: Decision


class RejectedAlertView(ApiModel):
    """A malformed alert. No decision was made, and the history has an event `alert_rejected`."""

    index: int = Field(description="Its position in `alerts`, from 0.")
    alert_name: str = Field(description="Empty if unreadable.")
    fingerprint: str | None = Field(description="null if unreadable.")
    reason: str
    end_taken: bool = Field(description="True if it reports the end of its alert, which was accepted all the same.")


class IgnoredMember(ApiModel):
    field: str
    message: str


class WebhookReply(ApiModel):
    """Everything in the delivery is committed."""

    delivery_id: str
    alerts: int = Field(description="Number of alerts in the delivery.")
    runs: list[AdmittedRun]
    duplicates: int = Field(description="Firing alerts received before, also if they have ended, and repeated ends.")
    unmatched: int = Field(description="Alerts, firing or resolved, that no playbook matches.")
    truncated: int = Field(description="Alerts that Alertmanager dropped.")
    rejected: list[RejectedAlertView] = Field(description="Malformed alerts, the first 20.")
    rejected_total: int = Field(description="Number of malformed alerts.")
    ignored: list[IgnoredMember] = Field(description="Malformed members that count as absent.")


PAYLOAD_EXAMPLE: dict[str, Any] = {
    "version": "4",
    "groupKey": '{}:{alertname="GPUTemperatureHigh"}',
    "truncatedAlerts": 0,
    "status": "firing",
    "receiver": "trainmedic",
    "groupLabels": {"alertname": "GPUTemperatureHigh"},
    "commonLabels": {"alertname": "GPUTemperatureHigh", "severity": "warning"},
    "commonAnnotations": {},
    "externalURL": "http://alertmanager:9093",
    "alerts": [
        {
            "status": "firing",
            "labels": {
                "alertname": "GPUTemperatureHigh",
                "severity": "warning",
                "node": "node-1",
                "gpu": "3",
                "UUID": "GPU-5f3a2c1e-0d6b-4a52-9d6e-0f2b8d1c7a90",
            },
            "annotations": {"summary": "GPU 3 of node-1 is at 88 °C"},
            "startsAt": "2026-01-31T12:00:00.000Z",
            "endsAt": "0001-01-01T00:00:00Z",
            "generatorURL": "http://prometheus:9090/graph?g0.expr=gpu_temperature_celsius+%3E+85",
            "fingerprint": "c6eadffa33fcdf37",
        }
    ],
}
REPLY_EXAMPLE: dict[str, Any] = {
    "delivery_id": "019c1415-6c00-7a3e-8f4e-2b8f6d0a1c55",
    "alerts": 1,
    "runs": [
        {
            "run_id": "019c1415-6c05-7c11-9a0d-6f1d2e3c4b5a",
            "playbook": "gpu-temperature-high",
            "target": "gpu:node-1/GPU-5f3a2c1e-0d6b-4a52-9d6e-0f2b8d1c7a90",
            "decision": "started",
        }
    ],
    "duplicates": 0,
    "unmatched": 0,
    "truncated": 0,
    "rejected": [],
    "rejected_total": 0,
    "ignored": [],
}
