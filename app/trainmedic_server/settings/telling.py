"""The settings of how Trainmedic tells people what it does; a part of the server's settings.

Who uses it: ``server``.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from trainmedic_server.settings.sources import SettingSource
from trainmedic_server.settings.values import Channels, ExternalUrl


class TellingSettings(BaseModel):
    """Whom the server tells, of what, and how people reach it from there."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)

    notify_urls: Annotated[Channels, SettingSource("TRAINMEDIC_NOTIFY_URLS", secret=True)] = Field(
        {},
        description="Notification channels as name=url pairs with white space between, the URLs in Apprise's form; a "
        "name given again adds a URL to its channel. None by default. No flag, because the URLs hold credentials.",
    )
    external_url: Annotated[
        ExternalUrl, SettingSource("TRAINMEDIC_EXTERNAL_URL", "--external-url", "URL", shown_default="none")
    ] = Field(
        "",
        description="Where people reach this server, such as https://trainmedic.example.org, with the path under which "
        "a proxy serves it. It begins the links in messages. None by default: a message then names the run alone.",
    )
