"""How flags and environment variables become settings."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from trainmedic_agent.settings import agent
from trainmedic_server.cli.serve import serve
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.errors import ConfigurationError
from trainmedic_server.settings import server as settings
from trainmedic_server.settings import server_defaults

ROOT = Path(__file__).parents[2]


def test_nothing_given_makes_the_documented_defaults() -> None:
    """A server that is told nothing observes, on loopback, with its files in the home directory."""
    loaded = settings.load({}, {})
    assert (loaded.host, loaded.port, loaded.mode) == ("127.0.0.1", 8080, Mode.OBSERVE)
    assert loaded.state_dir == Path("~/.local/state/trainmedic").expanduser()
    assert loaded.database_url == f"sqlite:///{loaded.state_dir.resolve()}/trainmedic.db"


def test_a_flag_wins_over_the_environment() -> None:
    """Where both are given the flag counts."""
    loaded = settings.load({"max_age": "20m"}, {"TRAINMEDIC_MAX_AGE": "5m", "TRAINMEDIC_PORT": "9000"})
    assert loaded.limits.max_age == timedelta(minutes=20)
    assert loaded.port == 9000


def test_an_empty_variable_counts_as_not_given() -> None:
    """Charts and compose files write an unset value as an empty one."""
    assert settings.load({}, {"TRAINMEDIC_MODE": "", "TRAINMEDIC_SIGNING_KEY": ""}) == settings.load({}, {})


def test_the_port_that_kubernetes_injects_is_ignored() -> None:
    """A Service called trainmedic makes Kubernetes set TRAINMEDIC_PORT to a URL in every pod beside it."""
    assert settings.load({}, {"TRAINMEDIC_PORT": "tcp://10.96.0.12:8080"}).port == 8080


def test_several_playbook_directories_stand_in_one_variable() -> None:
    """With a colon between, as in PATH."""
    loaded = settings.load({}, {"TRAINMEDIC_PLAYBOOKS": "/etc/trainmedic:/srv/more"})
    assert loaded.playbooks == (Path("/etc/trainmedic"), Path("/srv/more"))


def test_a_secret_can_be_read_from_a_file(tmp_path: Path) -> None:
    """The file that <variable>_FILE names holds it; white space at the ends is dropped."""
    file = tmp_path / "key"
    file.write_text("0123456789abcdef\n")
    loaded = settings.load({}, {"TRAINMEDIC_SIGNING_KEY_FILE": str(file)})
    assert loaded.signing_key is not None
    assert loaded.signing_key.get_secret_value() == "0123456789abcdef"


def test_the_help_names_the_variable_of_a_file() -> None:
    shown = CliRunner().invoke(serve, ["--help"], env={"COLUMNS": "200"}).output
    assert "TRAINMEDIC_MESSAGE_ROUTES, _FILE;" in " ".join(shown.split())


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
        ({"retention": "7001y"}, {}, "--retention: '7001y': '7001y' is too long; write at most 2555000d"),
        ({"max_age": "9999999d"}, {}, "--max-age: '9999999d': '9999999d' is too long; write at most 2555000d"),
        ({"archive": ""}, {}, "--archive: '': must name a file or directory"),
        ({"state_dir": ""}, {}, "--state-dir: '': must name a file or directory"),
        ({"playbooks": ("",)}, {}, "--playbooks: '': must name a file or directory"),
        ({}, {"TRAINMEDIC_PLAYBOOKS": ":"}, "TRAINMEDIC_PLAYBOOKS: '': must name a file or directory"),
        ({"breaker_share": "1.5"}, {}, "--breaker-share: '1.5': must be less than or equal to 1"),
        ({"events_kinds": ("closed", "undone")}, {}, "'undone' is no event kind; did you mean 'undo_done'?"),
        ({}, {"TRAINMEDIC_EVENTS_KINDS": "closed:run_paused"}, "'run_paused' is no event kind"),
        ({"log_level": "loud"}, {}, "--log-level: 'loud': must be 'debug', 'info', 'warning' or 'error'"),
        ({}, {"TRAINMEDIC_ALLOW_ANONYMOUS": "perhaps"}, "TRAINMEDIC_ALLOW_ANONYMOUS: 'perhaps': must be a valid bool"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(
    flags: dict[str, Any], environ: dict[str, str], message: str
) -> None:
    """The message names the flag or variable, the value, and what it may be."""
    with pytest.raises(ConfigurationError) as caught:
        settings.load(flags, environ)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


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


NOWHERE = [
    ("ftp://x", "begins with"),
    ("http://", "must name a host"),
    ("http://127.0.0.1:99999", "must have a port from 1 to 65535"),
]


@pytest.mark.parametrize(("url", "why"), NOWHERE)
@pytest.mark.parametrize("name", ["traces_to", "events_to", "grafana", "alertmanager", "prometheus", "log_store"])
def test_a_url_that_leads_nowhere_is_refused_at_the_start(name: str, url: str, why: str) -> None:
    """What is sent there would be thrown away for good. The flag or variable is named, and not what may be a secret."""
    given = ("loki+" if name == "log_store" else "") + url.replace("//", "//u:hunter2@")
    source = settings.SOURCES[name]
    for flags, environ, origin in (({name: given}, {}, source.flag), ({}, {source.variable: given}, source.variable)):
        with pytest.raises(ConfigurationError, match=why) as caught:
            settings.load(flags, environ)
        assert str(caught.value).startswith(f"{origin}: ")
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("address", ["10.1.2.3:99999", "10.1.2.3:0", "h:²"])
def test_an_address_that_other_servers_cannot_reach_is_refused(address: str) -> None:
    """Ports go from 1 to 65535."""
    with pytest.raises(ConfigurationError, match=r"--advertise.*must be an address and a port"):
        settings.load({"advertise": address}, {})


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
    loaded = settings.load(
        {}, {"TRAINMEDIC_NOTIFY_URLS": "oncall=json://h/a?x=1\n team=mailto://u:p@h oncall=json://i "}
    )
    shown = {name: [url.get_secret_value() for url in urls] for name, urls in loaded.notify_urls.items()}
    assert shown == {"oncall": ["json://h/a?x=1", "json://i"], "team": ["mailto://u:p@h"]}


def test_secrets_of_http_calls_are_a_family_of_variables() -> None:
    """A playbook names the variable; any name that begins so is one, and none is taken for a slip."""
    environ = {"TRAINMEDIC_HTTP_TICKETS": "hunter2", "TRAINMEDIC_HTTP_WIKI_FILE": "/run/wiki", "HTTP_PROXY": "p"}
    loaded = settings.load({}, environ)
    assert set(loaded.http_secrets) == {"TRAINMEDIC_HTTP_TICKETS", "TRAINMEDIC_HTTP_WIKI_FILE"}
    assert "hunter2" not in repr(loaded)
    assert settings.misspelt(environ) == []


def test_a_misspelt_variable_is_noticed() -> None:
    """A slip in a variable's name would otherwise leave the default in force without a word."""
    environ = {"TRAINMEDIC_MAXAGE": "1h", "TRAINMEDIC_SERVICE_HOST": "10.0.0.1", "TRAINMEDIC_TOKEN": "t", "HOME": "/"}
    assert settings.misspelt(environ) == [("TRAINMEDIC_MAXAGE", "TRAINMEDIC_MAX_AGE")]


def _row(name: str) -> str:
    source = settings.SOURCES[name]
    flag = f"`{source.flag} {source.value}`" if source.flag else ""
    variable = f"`{source.variable}{'…' if source.family else ''}`" + (", `_FILE`" if source.can_be_a_file else "")
    description = settings.ServerSettings.model_fields[name].description
    return f"| {flag} | {variable} | `{server_defaults.default_of(name)}` | {description} |"


@pytest.mark.parametrize("blank", [" ", "\n", "\t \n"])
@pytest.mark.parametrize("variable", ["TRAINMEDIC_SIGNING_KEY", "TRAINMEDIC_PREVIOUS_SIGNING_KEY"])
def test_a_blank_key_is_none(variable: str, blank: str) -> None:
    """Everybody has an empty key, so one that came of an emptied Secret is refused by server and agent."""
    environ = {"TRAINMEDIC_SIGNING_KEY": "0123456789abcdef", variable: blank}
    for load in (settings.load, agent.load):
        with pytest.raises(ConfigurationError, match=f"{variable}.*blank"):
            load({}, environ)


def test_server_and_agent_read_keys_in_files_again(tmp_path: Path) -> None:
    """So a key is exchanged, and the previous one withdrawn, without a restart."""
    key, previous = tmp_path / "key", tmp_path / "previous"
    key.write_text("0123456789abcdef\n")
    files = {"TRAINMEDIC_SIGNING_KEY_FILE": str(key), "TRAINMEDIC_PREVIOUS_SIGNING_KEY_FILE": str(previous)}
    for load in (settings.load, agent.load):
        previous.unlink(missing_ok=True)
        signer = load({}, files).signer
        assert signer is not None
        previous.write_text("fedcba9876543210")
        signer._read_again()
        assert [len(signer.sign(b"x"))] == [2]
        previous.write_text("")
        signer._read_again()
        assert len(signer.sign(b"x")) == 1


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("https://trainmedic.example.org/", "https://trainmedic.example.org"),
        ("http://10.1.2.3:8080/ops/trainmedic", "http://10.1.2.3:8080/ops/trainmedic"),
        ("http://[2001:db8::1]:8080", "http://[2001:db8::1]:8080"),
    ],
)
def test_links_begin_with_the_external_url(given: str, kept: str) -> None:
    """A slash at its end makes no double one in a link."""
    assert settings.load({"external_url": given}, {}).limits.external_url == kept


@pytest.mark.parametrize(
    "given",
    ["trainmedic.example.org", "ftp://a.example", "https://", "https://ann:pw@a.example", "https://a.example/?x=1",
     "https://a.example/#runs", "https://a example", "https://a.example:99999", "https://[::1"],
)  # fmt: skip
def test_an_external_url_that_makes_no_links_is_refused(given: str) -> None:
    """What people would click on is checked at the start, and credentials are not to be in it."""
    with pytest.raises(ConfigurationError, match=r"--external-url.*must be an http:// or https:// URL"):
        settings.load({"external_url": given}, {})


def test_the_documentation_lists_every_setting_with_its_default() -> None:
    """docs/reference/settings.md has exactly one row for each setting, in the order of the tree."""
    text = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    server = text.partition("<!-- settings -->")[2].partition("<!-- /settings -->")[0]
    rows = [line for line in server.splitlines() if line.startswith("| ") and "TRAINMEDIC_" in line]
    assert rows == [_row(name) for name in settings.SOURCES]


def _agent_row(setting: agent.AgentSetting) -> str:
    source = setting.source
    flag = f"`{source.flag} {source.value}`" if source.flag else ""
    variable = f"`{source.variable}`" + (", `_FILE`" if source.can_be_a_file else "")
    return f"| {flag} | {variable} | `{source.shown_default}` | {setting.description} |"


def test_the_documentation_lists_every_setting_of_the_agent() -> None:
    """The same for ``trainmedic agent``."""
    text = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    part = text.partition("<!-- agent settings -->")[2].partition("<!-- /agent settings -->")[0]
    rows = [line for line in part.splitlines() if line.startswith("| ") and "TRAINMEDIC_" in line]
    assert rows == [_agent_row(setting) for setting in agent.SETTINGS.values()]


def test_an_agent_needs_no_settings() -> None:
    """Defaults are safe: the host's name, no policy, loopback."""
    loaded = agent.load({}, {"HOME": "/home/x"})
    assert (loaded.policy, loaded.redis, loaded.signing_key) == (None, None, None)
    assert (loaded.exporter_host, loaded.exporter_port, loaded.log_level) == ("127.0.0.1", 9445, "info")
    assert loaded.node


def test_an_agents_flags_win_over_variables() -> None:
    """And what is given reaches its field in its type; a secret is not in the settings' text."""
    environ = {"TRAINMEDIC_NODE": "n2", "TRAINMEDIC_EXPORTER_PORT": "9999", "TRAINMEDIC_SIGNING_KEY": " hunter2\n"}
    loaded = agent.load({"node": "n1", "policy": "/etc/p.yaml", "redis": "redis://:hunter2@h"}, environ)
    assert (loaded.node, loaded.policy, loaded.exporter_port) == ("n1", Path("/etc/p.yaml"), 9999)
    assert loaded.signing_key == b"hunter2"
    assert loaded.has_short_key
    assert "hunter2" not in repr(loaded)


def test_every_wrong_setting_of_an_agent_is_told_at_once() -> None:
    """With the flag or variable and what is allowed; a secret's value is not shown."""
    with pytest.raises(ConfigurationError) as caught:
        agent.load(
            {"node": "a b", "log_level": "loud"},
            {"TRAINMEDIC_EXPORTER_PORT": "70000", "TRAINMEDIC_REDIS_URL": "http://u:hunter2@h"},
        )
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "--node",
        "TRAINMEDIC_REDIS_URL",
        "TRAINMEDIC_EXPORTER_PORT",
        "--log-level",
    ]
    assert "hunter2" not in str(caught.value)


def test_an_agent_finds_the_embedded_redis_of_its_user(tmp_path: Path) -> None:
    """The URL that a server leaves in the state directory, read each time because it may come later."""
    loaded = agent.load({"state_dir": str(tmp_path)}, {})
    assert loaded.find_redis() is None
    (tmp_path / "redis.url").write_text("redis://h\n")
    assert loaded.find_redis() == "redis://h"


def test_a_misspelt_variable_of_an_agent_is_noticed() -> None:
    """Without a word the agent would only read."""
    assert agent.misspelt({"TRAINMEDIC_POLCY": "p", "TRAINMEDIC_JOB": "j"}) == [
        ("TRAINMEDIC_POLCY", "TRAINMEDIC_POLICY")
    ]


def test_message_routes_come_from_a_file_too(tmp_path: Path) -> None:
    """One route to a line; they are no secret, so the message of a wrong one shows them."""
    file = tmp_path / "routes"
    file.write_text("gpu=component:gpu\nchat=default\n")
    environ = {"TRAINMEDIC_NOTIFY_URLS": "gpu=json://h chat=json://h", "TRAINMEDIC_MESSAGE_ROUTES_FILE": str(file)}
    assert settings.load({}, environ).routes.described("gpu") == ["component:gpu"]
    file.write_text("gpu=component:gpus")
    with pytest.raises(
        ConfigurationError, match=r"TRAINMEDIC_MESSAGE_ROUTES_FILE.*channel 'gpu', field component: 'gpus'"
    ):
        settings.load({}, environ)
    assert not settings.load({}, {"TRAINMEDIC_NOTIFY_URLS": "gpu=json://h"}).routes.are_set


def test_a_route_of_a_channel_that_is_not_set_is_refused() -> None:
    """Both come from settings of their own, so it is seen when both are known."""
    loaded = settings.load({"message_routes": "ops=all"}, {"TRAINMEDIC_NOTIFY_URLS": "gpu=json://h"})
    with pytest.raises(ConfigurationError, match=r"TRAINMEDIC_MESSAGE_ROUTES: channel 'ops' is not set; .* set: gpu"):
        _ = loaded.routes


def test_a_previous_key_may_be_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As all files of settings, and then it is not withdrawn."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "previous").write_text("fedcba9876543210")
    environ = {"TRAINMEDIC_SIGNING_KEY": "0123456789abcdef", "TRAINMEDIC_PREVIOUS_SIGNING_KEY_FILE": "~/previous"}
    for load in (settings.load, agent.load):
        signer = load({}, environ).signer
        assert signer is not None
        assert len(signer.sign(b"x")) == 2
