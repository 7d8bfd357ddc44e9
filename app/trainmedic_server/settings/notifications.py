"""The settings of how Trainmedic tells people what it does; a part of the server's settings.

Who uses it: ``server``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

from trainmedic_core.setting_sources import SettingSource
from trainmedic_server.domain.message import MessageKind, MessageRule, parse_rules
from trainmedic_server.domain.message_routes import VARIABLE, MessageRoutes, routes_of
from trainmedic_server.errors import ConfigurationError
from trainmedic_server.settings.values import Channels, ExpandedPath, ExternalUrl, MessageRules, RoutesText


class NotificationSettings(BaseModel):
    """Whom the server tells, of what, and how people reach it from there."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)

    notify_urls: Annotated[Channels, SettingSource("TRAINMEDIC_NOTIFY_URLS", secret=True)] = Field(
        {},
        description="Notification channels as name=url pairs with white space between, the URLs in Apprise's form; a "
        "name given again adds a URL to its channel. None by default. No flag, because the URLs hold credentials.",
    )
    messages: Annotated[
        MessageRules, SettingSource("TRAINMEDIC_MESSAGES", "--messages", "RULES", shown_default="none")
    ] = Field(
        "",
        description="What the server tells people by itself, and where: kind=severity@channel,channel pairs with "
        "white space between, such as run_failed=critical@oncall repaired=on. None by default: the kinds that are "
        "on go to all notification channels.",
    )
    message_routes: Annotated[
        RoutesText,
        SettingSource(VARIABLE, "--message-routes", "ROUTES", shown_default="none", has_file=True),
    ] = Field(
        "",
        description="Which messages each channel takes: channel=field:value,value;field:value pairs with white space "
        "between, by component, severity and kind, such as gpu=component:gpu oncall=severity:critical chat=default. "
        "None by default: every channel takes every message.",
    )
    external_url: Annotated[
        ExternalUrl, SettingSource("TRAINMEDIC_EXTERNAL_URL", "--external-url", "URL", shown_default="none")
    ] = Field(
        "",
        description="Where people reach this server, such as https://trainmedic.example.org, with the path under which "
        "a proxy serves it. It begins the links in messages, and its path those of the console, whether the proxy "
        "strips it or not. None by default: a message then names the run alone.",
    )

    @property
    def message_rules(self) -> Mapping[MessageKind, MessageRule]:
        """What is set of each kind of message. Raises ConfigurationError where a channel is named that is not there."""
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
        """The routes of messages. Raises ConfigurationError if a route names a channel that is not set."""
        try:
            return routes_of(self.message_routes, self.notify_urls)
        except ValueError as error:
            raise ConfigurationError(f"{VARIABLE}: {error}") from error


def _begins(value: SecretStr, beginning: str) -> SecretStr:
    if not value.get_secret_value().startswith(beginning):
        raise ValueError(f"must be a token that begins with {beginning}")
    return value


def _bot(value: SecretStr) -> SecretStr:
    return _begins(value, "xoxb-")


def _app(value: SecretStr) -> SecretStr:
    return _begins(value, "xapp-")


class SlackSettings(BaseModel):
    """The app by which people are asked in Slack, and who they are."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)

    slack: Annotated[ExpandedPath | None, SettingSource("TRAINMEDIC_SLACK_FILE", "--slack", "FILE")] = Field(
        None,
        description="YAML file with the channel in which questions are asked with buttons, and which Slack users may "
        "decide, by which name. Needs both tokens, and the extra slack. None by default: nothing is sent to Slack so.",
    )
    slack_bot_token: Annotated[
        Annotated[SecretStr, AfterValidator(_bot)] | None, SettingSource("TRAINMEDIC_SLACK_BOT_TOKEN", secret=True)
    ] = Field(None, description="The Slack app's bot token (xoxb-), by which messages are written. No flag: a secret.")
    slack_app_token: Annotated[
        Annotated[SecretStr, AfterValidator(_app)] | None, SettingSource("TRAINMEDIC_SLACK_APP_TOKEN", secret=True)
    ] = Field(
        None,
        description="The Slack app's app-level token (xapp-, scope connections:write), by which this server hears what "
        "people press, over a connection that it opens itself. No flag: a secret.",
    )

    def slack_tokens(self) -> tuple[str, str]:
        """The bot token and the app token. Raises ConfigurationError where one is missing."""
        if self.slack_bot_token is None or self.slack_app_token is None:
            missing = "TRAINMEDIC_SLACK_BOT_TOKEN" if self.slack_bot_token is None else "TRAINMEDIC_SLACK_APP_TOKEN"
            raise ConfigurationError(f"--slack needs {missing}, or {missing}_FILE")
        return self.slack_bot_token.get_secret_value(), self.slack_app_token.get_secret_value()
