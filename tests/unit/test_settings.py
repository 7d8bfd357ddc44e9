"""How flags and environment variables become settings."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from app import settings
from app.domain.playbook import Mode
from app.errors import ConfigurationError

ROOT = Path(__file__).parents[2]


def test_nothing_given_makes_the_documented_defaults() -> None:
    """A server that is told nothing observes, on loopback, with its files in the home directory."""
    made = settings.load({}, {})
    assert (made.host, made.port, made.mode) == ("127.0.0.1", 8080, Mode.OBSERVE)
    assert made.state_dir == Path("~/.local/state/trainmedic").expanduser()
    assert made.database_url == f"sqlite:///{made.state_dir.resolve()}/trainmedic.db"


def test_a_flag_wins_over_the_environment() -> None:
    """Where both are given the flag counts."""
    made = settings.load({"max_age": "20m"}, {"TRAINMEDIC_MAX_AGE": "5m", "TRAINMEDIC_PORT": "9000"})
    assert made.limits.max_age == timedelta(minutes=20)
    assert made.port == 9000


def test_an_empty_variable_counts_as_not_given() -> None:
    """Charts and compose files write an unset value as an empty one."""
    assert settings.load({}, {"TRAINMEDIC_MODE": "", "TRAINMEDIC_SIGNING_KEY": ""}) == settings.load({}, {})


def test_the_port_that_kubernetes_injects_is_ignored() -> None:
    """A Service called trainmedic makes Kubernetes set TRAINMEDIC_PORT to a URL in every pod beside it."""
    assert settings.load({}, {"TRAINMEDIC_PORT": "tcp://10.96.0.12:8080"}).port == 8080


def test_several_playbook_directories_stand_in_one_variable() -> None:
    """With a colon between, as in PATH."""
    made = settings.load({}, {"TRAINMEDIC_PLAYBOOKS": "/etc/trainmedic:/srv/more"})
    assert made.playbooks == (Path("/etc/trainmedic"), Path("/srv/more"))


def test_a_secret_can_be_read_from_a_file(tmp_path: Path) -> None:
    """The file that <variable>_FILE names holds it; white space at the ends is dropped."""
    file = tmp_path / "key"
    file.write_text("0123456789abcdef\n")
    made = settings.load({}, {"TRAINMEDIC_SIGNING_KEY_FILE": str(file)})
    assert made.signing_key is not None
    assert made.signing_key.get_secret_value() == "0123456789abcdef"


def test_a_secret_given_twice_is_refused(tmp_path: Path) -> None:
    """Nobody can tell which of the two was meant."""
    environ = {"TRAINMEDIC_REDIS_URL": "redis://a", "TRAINMEDIC_REDIS_URL_FILE": str(tmp_path / "url")}
    with pytest.raises(ConfigurationError, match="both set"):
        settings.load({}, environ)


def test_a_missing_secret_file_is_named() -> None:
    """The message says which variable and which file."""
    with pytest.raises(ConfigurationError, match=r"TRAINMEDIC_DATABASE_URL_FILE: cannot read /nowhere: No such file"):
        settings.load({}, {"TRAINMEDIC_DATABASE_URL_FILE": "/nowhere"})


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ({"port": "99999"}, {}, "--port: '99999': must be less than or equal to 65535"),
        ({}, {"TRAINMEDIC_PORT": "http"}, "TRAINMEDIC_PORT: 'http': must be a valid integer"),
        ({"mode": "Enforced"}, {}, "--mode: 'Enforced': must be 'observe', 'approve' or 'enforce'"),
        ({"max_age": "15"}, {}, "--max-age: '15': '15' is not a duration"),
        ({"retention": "0s"}, {}, "--retention: '0s': must be longer than 0s"),
        ({"breaker_share": "1.5"}, {}, "--breaker-share: '1.5': must be less than or equal to 1"),
        ({"log_level": "loud"}, {}, "--log-level: 'loud': must be 'debug', 'info', 'warning' or 'error'"),
        ({}, {"TRAINMEDIC_ALLOW_ANONYMOUS": "perhaps"}, "TRAINMEDIC_ALLOW_ANONYMOUS: 'perhaps': must be a valid bool"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(
    flags: dict[str, str], environ: dict[str, str], message: str
) -> None:
    """The message names the flag or variable, the value, and what it may be."""
    with pytest.raises(ConfigurationError) as caught:
        settings.load(flags, environ)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "environ",
    [
        {"TRAINMEDIC_REDIS_URL": "http://hunter2@example"},
        {"TRAINMEDIC_DATABASE_URL": "hunter2"},
        {"TRAINMEDIC_ALERTMANAGER_URL": "hunter2"},
        {"TRAINMEDIC_NOTIFY_URLS": "oncall=hunter2"},
    ],
)
def test_a_wrong_secret_is_never_shown(environ: dict[str, str]) -> None:
    """The message names the variable, not its value."""
    with pytest.raises(ConfigurationError) as caught:
        settings.load({}, environ)
    assert "hunter2" not in str(caught.value)
    assert next(iter(environ)) in str(caught.value)


def test_secrets_are_not_in_the_settings_text() -> None:
    """Settings that end up in a log line or a traceback give nothing away."""
    environ = {"TRAINMEDIC_REDIS_URL": "redis://:hunter2@h", "TRAINMEDIC_NOTIFY_URLS": "oncall=json://u:hunter2@h"}
    assert "hunter2" not in repr(settings.load({}, environ))


def test_every_wrong_value_is_reported_at_once() -> None:
    """One start shows all that has to be mended."""
    with pytest.raises(ConfigurationError) as caught:
        settings.load({"port": "x", "mode": "y"}, {})
    assert len(str(caught.value).splitlines()) == 2


def test_notification_channels_are_named() -> None:
    """name=url pairs with white space between; a URL may hold an equals sign, a channel several URLs."""
    made = settings.load({}, {"TRAINMEDIC_NOTIFY_URLS": "oncall=json://h/a?x=1\n team=mailto://u:p@h oncall=json://i "})
    shown = {name: [url.get_secret_value() for url in urls] for name, urls in made.notify_urls.items()}
    assert shown == {"oncall": ["json://h/a?x=1", "json://i"], "team": ["mailto://u:p@h"]}


def test_secrets_of_http_calls_are_a_family_of_variables() -> None:
    """A playbook names the variable; any name that begins so is one, and none is taken for a slip."""
    environ = {"TRAINMEDIC_HTTP_TICKETS": "hunter2", "TRAINMEDIC_HTTP_WIKI_FILE": "/run/wiki", "HTTP_PROXY": "p"}
    made = settings.load({}, environ)
    assert set(made.http_secrets) == {"TRAINMEDIC_HTTP_TICKETS", "TRAINMEDIC_HTTP_WIKI_FILE"}
    assert "hunter2" not in repr(made)
    assert settings.misspelt(environ) == []


def test_a_misspelt_variable_is_noticed() -> None:
    """A slip in a variable's name would otherwise leave the default in force without a word."""
    environ = {"TRAINMEDIC_MAXAGE": "1h", "TRAINMEDIC_SERVICE_HOST": "10.0.0.1", "TRAINMEDIC_TOKEN": "t", "HOME": "/"}
    assert settings.misspelt(environ) == [("TRAINMEDIC_MAXAGE", "TRAINMEDIC_MAX_AGE")]


def _row(name: str) -> str:
    option = settings.OPTIONS[name]
    flag = f"`{option.flag} {option.value}`" if option.flag else ""
    variable = f"`{option.variable}{'…' if option.family else ''}`" + (", `_FILE`" if option.secret else "")
    what = settings.Settings.model_fields[name].description
    return f"| {flag} | {variable} | `{settings.default_of(name)}` | {what} |"


def test_the_documentation_lists_every_setting_with_its_default() -> None:
    """docs/reference/settings.md has exactly one row for each setting, in the order of the tree."""
    text = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    server = text.partition("<!-- settings -->")[2].partition("<!-- /settings -->")[0]
    rows = [line for line in server.splitlines() if line.startswith("| ") and "TRAINMEDIC_" in line]
    assert rows == [_row(name) for name in settings.OPTIONS]
