"""Settings of external programs: receivers of events, annotations and traces, and Slurm."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from trainmedic_core.problems import did_you_mean
from trainmedic_core.setting_sources import SettingSource
from trainmedic_server.domain.event_codec import EVENT_KINDS
from trainmedic_server.settings.values import ExpandedPath, HttpUrl, SettingGroup


def _event_kind(value: str) -> str:
    if value not in EVENT_KINDS:
        hint = did_you_mean(value, EVENT_KINDS)
        raise ValueError(f"{value!r} is no event kind{hint or ';'} use one of {', '.join(sorted(EVENT_KINDS))}")
    return value


EventKind = Annotated[str, AfterValidator(_event_kind)]


class IntegrationSettings(SettingGroup):
    events_to: Annotated[HttpUrl | None, SettingSource("TRAINMEDIC_EVENTS_TO", "--events-to", "URL", secret=True)] = (
        Field(
            None,
            description=("URL that receives each event as a CloudEvent, at least once and in order."),
        )
    )
    events_kinds: Annotated[
        tuple[EventKind, ...],
        SettingSource("TRAINMEDIC_EVENTS_KINDS", "--events-kind", "KIND", repeatable=True, shown_default="all"),
    ] = Field(
        (),
        description=("Kind of event to send, such as closed. Repeatable."),
    )
    events_token: Annotated[
        ExpandedPath | None, SettingSource("TRAINMEDIC_EVENTS_TOKEN_FILE", "--events-token", "FILE")
    ] = Field(None, description="File with the bearer token for that URL, read for each call.")
    grafana: Annotated[HttpUrl | None, SettingSource("TRAINMEDIC_GRAFANA_URL", "--grafana", "URL", secret=True)] = (
        Field(
            None,
            description=("URL of the Grafana in which each run with changes becomes an annotation."),
        )
    )
    grafana_token: Annotated[
        ExpandedPath | None, SettingSource("TRAINMEDIC_GRAFANA_TOKEN_FILE", "--grafana-token", "FILE")
    ] = Field(
        None,
        description=("File with the token of a Grafana service account, read for each call."),
    )
    traces_to: Annotated[HttpUrl | None, SettingSource("TRAINMEDIC_TRACES_TO", "--traces-to", "URL", secret=True)] = (
        Field(
            None,
            description=(
                "URL of an OpenTelemetry collector (OTLP over HTTP, usually port 4318) for traces of closed runs. "
                "/v1/traces is appended."
            ),
        )
    )
    traces_token: Annotated[
        ExpandedPath | None, SettingSource("TRAINMEDIC_TRACES_TOKEN_FILE", "--traces-token", "FILE")
    ] = Field(None, description="File with the bearer token for that collector, read for each call.")
    slurm_url: Annotated[str | None, SettingSource("TRAINMEDIC_SLURM_URL", "--slurm-url", "URL")] = Field(
        None,
        description=(
            "URL of slurmrestd (Slurm 24.11 or newer), for slurm.* actions: http://HOST:6820, https://HOST:6820 or "
            "unix:///PATH."
        ),
    )
    slurm_agent: Annotated[str | None, SettingSource("TRAINMEDIC_SLURM_AGENT", "--slurm-agent", "NODE")] = Field(
        None,
        min_length=1,
        max_length=253,
        description=(
            "Instead of slurmrestd, the node whose agent runs Slurm's commands, if its policy has the part slurm."
        ),
    )
    slurm_user: Annotated[str | None, SettingSource("TRAINMEDIC_SLURM_USER", "--slurm-user", "USER")] = Field(
        None, description="Slurm user of the token. Default: the user in the token."
    )
    slurm_token: Annotated[
        ExpandedPath | None, SettingSource("TRAINMEDIC_SLURM_TOKEN_FILE", "--slurm-token-file", "FILE")
    ] = Field(
        None,
        description="File with the output of scontrol token, read for each call.",
    )
    slurm_ca: Annotated[ExpandedPath | None, SettingSource("TRAINMEDIC_SLURM_CA_FILE", "--slurm-ca-file", "FILE")] = (
        Field(None, description="File with the certificates to trust. Default: those of the system.")
    )

    @model_validator(mode="after")
    def _has_one_way_into_slurm(self) -> Self:
        if self.slurm_url is not None and self.slurm_agent is not None:
            raise ValueError("--slurm-url and --slurm-agent are two ways into the same Slurm: give one of them")
        return self
