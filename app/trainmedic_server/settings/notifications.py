"""Settings of notifications and of approvals in Slack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr

from trainmedic_core.setting_sources import SettingSource
from trainmedic_server.domain.message import MessageKind, MessageRule, parse_rules
from trainmedic_server.domain.message_routes import VARIABLE, MessageRoutes, routes_of
from trainmedic_server.errors import ConfigurationError
from trainmedic_server.settings.values import (
    Channels,
    ExpandedPath,
    ExternalUrl,
    MessageRules,
    RoutesText,
    SettingGroup,
)


class NotificationSettings(SettingGroup):
    notify_urls: Annotated[Channels, SettingSource("TRAINMEDIC_NOTIFY_URLS", secret=True)] = Field(
        {},
        description=(
            "Notification channels as name=url pairs, separated by white space, with Apprise URLs. A repeated name "
            "adds a URL."
        ),
    )
    messages: Annotated[
        MessageRules, SettingSource("TRAINMEDIC_MESSAGES", "--messages", "RULES", shown_default="none")
    ] = Field(
        "",
        description=(
            "Messages and their channels: kind=severity@channel,channel pairs, such as run_failed=critical@oncall "
            "repaired=on. Default: enabled kinds to all channels."
        ),
    )
    message_routes: Annotated[
        RoutesText,
        SettingSource(VARIABLE, "--message-routes", "ROUTES", shown_default="none", has_file=True),
    ] = Field(
        "",
        description=(
            "Messages for each channel: channel=field:value,value;field:value pairs, such as gpu=component:gpu "
            "oncall=severity:critical chat=default. Default: all."
        ),
    )
    external_url: Annotated[
        ExternalUrl, SettingSource("TRAINMEDIC_EXTERNAL_URL", "--external-url", "URL", shown_default="none")
    ] = Field(
        "",
        description=(
            "URL at which users reach this server, such as https://trainmedic.example.org, with a proxy's path. "
            "Links in messages begin with it."
        ),
    )

    @property
    def message_rules(self) -> Mapping[MessageKind, MessageRule]:
        """The rule of each kind of message. Raises ConfigurationError for an unknown channel."""
        rules = parse_rules(self.messages)
        unknown = {name for rule in rules.values() for name in rule.channels} - set(self.notify_urls)
        if unknown:
            there = ", ".join(sorted(self.notify_urls)) or "none"
            wrong = ", ".join(map(repr, sorted(unknown)))
            raise ConfigurationError(
                f"TRAINMEDIC_MESSAGES names {wrong}; the channels of TRAINMEDIC_NOTIFY_URLS: {there}"
            )
        return rules

    @property
    def routes(self) -> MessageRoutes:
        """The routes of messages. Raises ConfigurationError for an unknown channel."""
        try:
            return routes_of(self.message_routes, self.notify_urls)
        except ValueError as error:
            raise ConfigurationError(f"{VARIABLE}: {error}") from error


def _begins_with(beginning: str) -> AfterValidator:
    def check(value: SecretStr) -> SecretStr:
        if not value.get_secret_value().startswith(beginning):
            raise ValueError(f"must be a token that begins with {beginning}")
        return value

    return AfterValidator(check)


class SlackSettings(SettingGroup):
    slack: Annotated[ExpandedPath | None, SettingSource("TRAINMEDIC_SLACK_FILE", "--slack", "FILE")] = Field(
        None,
        description=(
            "YAML file with the Slack channel for questions and the users who may decide. Needs both tokens and the "
            "extra slack."
        ),
    )
    slack_bot_token: Annotated[
        Annotated[SecretStr, _begins_with("xoxb-")] | None, SettingSource("TRAINMEDIC_SLACK_BOT_TOKEN", secret=True)
    ] = Field(None, description="The Slack app's bot token (xoxb-).")
    slack_app_token: Annotated[
        Annotated[SecretStr, _begins_with("xapp-")] | None, SettingSource("TRAINMEDIC_SLACK_APP_TOKEN", secret=True)
    ] = Field(
        None,
        description=("The Slack app's app-level token (xapp-, scope connections:write)."),
    )

    def slack_tokens(self) -> tuple[str, str]:
        """Return the bot token and the app token. Raises ConfigurationError if one is missing."""
        if self.slack_bot_token is None or self.slack_app_token is None:
            missing = "TRAINMEDIC_SLACK_BOT_TOKEN" if self.slack_bot_token is None else "TRAINMEDIC_SLACK_APP_TOKEN"
            raise ConfigurationError(f"--slack needs {missing}, or {missing}_FILE")
        return self.slack_bot_token.get_secret_value(), self.slack_app_token.get_secret_value()
