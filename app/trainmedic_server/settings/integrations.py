"""The settings of the programs that the server tells what it did; a part of the server's settings.

Who uses it: ``server``.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from trainmedic_core.problems import did_you_mean
from trainmedic_core.setting_sources import SettingSource
from trainmedic_server.domain.event_codec import EVENT_KINDS
from trainmedic_server.settings.values import ExpandedPath, HttpUrl


def _event_kind(value: str) -> str:
    if value not in EVENT_KINDS:
        hint = did_you_mean(value, EVENT_KINDS)
        raise ValueError(f"there is no event {value!r}{hint or ';'} there are {', '.join(sorted(EVENT_KINDS))}")
    return value


EventKind = Annotated[str, AfterValidator(_event_kind)]


class IntegrationSettings(BaseModel):
    """Where events and traces go, and where annotations are written."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)

    events_to: Annotated[HttpUrl | None, SettingSource("TRAINMEDIC_EVENTS_TO", "--events-to", "URL", secret=True)] = (
        Field(
            None,
            description="URL to which each event of the history is posted as a CloudEvent, at least once and in order. "
            "None by default: GET /events has them too.",
        )
    )
    events_kinds: Annotated[
        tuple[EventKind, ...],
        SettingSource("TRAINMEDIC_EVENTS_KINDS", "--events-kind", "KIND", repeatable=True, shown_default="all"),
    ] = Field(
        (),
        description="Kind of event that is posted there, such as closed; the flag can be repeated, the variable takes "
        "several with a colon between. All by default.",
    )
    events_token: Annotated[
        ExpandedPath | None, SettingSource("TRAINMEDIC_EVENTS_TOKEN_FILE", "--events-token", "FILE")
    ] = Field(
        None, description="File with the bearer token for that URL, read for each call so that it can be renewed."
    )
    grafana: Annotated[HttpUrl | None, SettingSource("TRAINMEDIC_GRAFANA_URL", "--grafana", "URL", secret=True)] = (
        Field(
            None,
            description="URL of the Grafana in which each run that changes something becomes an annotation, from its "
            "first act until it has given everything back. None by default.",
        )
    )
    grafana_token: Annotated[
        ExpandedPath | None, SettingSource("TRAINMEDIC_GRAFANA_TOKEN_FILE", "--grafana-token", "FILE")
    ] = Field(
        None,
        description="File with the token of a Grafana service account that may write annotations, read for each call.",
    )
    traces_to: Annotated[HttpUrl | None, SettingSource("TRAINMEDIC_TRACES_TO", "--traces-to", "URL", secret=True)] = (
        Field(
            None,
            description="URL of an OpenTelemetry collector (OTLP over HTTP, usually port 4318) to which each run is "
            "sent as a trace when it closes; /v1/traces is appended. None by default.",
        )
    )
    traces_token: Annotated[
        ExpandedPath | None, SettingSource("TRAINMEDIC_TRACES_TOKEN_FILE", "--traces-token", "FILE")
    ] = Field(None, description="File with the bearer token for that collector, read for each call.")
