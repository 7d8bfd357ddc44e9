"""Slack file: channels, and the users who may answer.

It is read for each click, so that removed users can decide nothing. While it is unreadable, no one can.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from trainmedic_core import yaml_text
from trainmedic_core.setting_sources import read_text
from trainmedic_server.errors import ConfigurationError

_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.@+-]{0,127}$"
_RESERVED = frozenset({"anonymous", "trainmedic", "nobody"})


def _name(value: str) -> str:
    if value.lower() in _RESERVED:
        raise ValueError(f"{value!r} is a reserved name")
    return value


def _api(value: str) -> str:
    parts = urlsplit(value)
    is_here = parts.scheme == "http" and parts.hostname in ("127.0.0.1", "localhost", "::1")
    if not parts.hostname or not (parts.scheme == "https" or is_here):
        raise ValueError("must be an https:// URL, such as https://slack.com/api")
    return value


Channel = Annotated[str, Field(pattern=r"^[A-Z0-9]{3,20}$", description="A channel's id, such as C0123ABCDEF.")]
Name = Annotated[str, Field(pattern=_NAME), AfterValidator(_name)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Person(_Part):
    name: Name
    groups: frozenset[Annotated[str, Field(pattern=_NAME)]] = frozenset()


class SlackFile(_Part):
    channel: Channel
    channels: Mapping[str, Channel] = Field({}, description="By the `to` of a playbook's question.")
    people: Mapping[Annotated[str, Field(pattern=r"^[UW][A-Z0-9]{2,20}$")], Person]
    api: Annotated[str, AfterValidator(_api)] = "https://slack.com/api"

    def channel_for(self, to: str | None) -> str:
        return self.channels.get(to or "", self.channel)


def read(path: Path) -> SlackFile:
    documents, problems = yaml_text.read(read_text("--slack", path), str(path))
    if problems:
        raise ConfigurationError(str(problems[0]))
    if len(documents) > 1:
        raise ConfigurationError(f"{path}: must contain one YAML document, not {len(documents)}")
    try:
        return SlackFile.model_validate(documents[0].value if documents else None)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        member = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigurationError(f"{path}: {member}: {first['msg']}") from None
