"""The settings of questions in Slack; a part of the server's settings. Who uses it: ``server``."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

from trainmedic_core.setting_sources import SettingSource
from trainmedic_server.errors import ConfigurationError
from trainmedic_server.settings.values import ExpandedPath


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
