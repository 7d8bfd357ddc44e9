"""Passwords in the URLs of settings: special characters that are not escaped are refused, and no part is shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.programs import PYTHON_PATH, inherited
from trainmedic_core.command import main
from trainmedic_server.errors import ConfigurationError
from trainmedic_server.settings import server

HTTP = {
    "alertmanager": "--alertmanager",
    "prometheus": "--prometheus-url",
    "events_to": "--events-to",
    "grafana": "--grafana",
    "traces_to": "--traces-to",
    "log_store": "--log-store",
}
TAILS = ("left@tail", "left/tail", "left#tail", "left?tail", "le@ft@tail", "7/tail", "le/ft@tail")


def refusal(name: str, url: str) -> str:
    with pytest.raises(ConfigurationError) as refused:
        server.load({name: url}, {})
    assert refused.value.__cause__ is None
    return str(refused.value)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", HTTP)
def test_every_url_setting_refuses_a_password_that_is_not_escaped(name: str, tail: str) -> None:
    """With the setting's name and how it is written, and nothing of the password."""
    scheme = "loki+http" if name == "log_store" else "http"
    told = refusal(name, f"{scheme}://ann:{tail}@metrics.example:9090/x")
    assert told.startswith(f"{HTTP[name]}: must have")
    assert "@ is written %40" in told
    assert "tail" not in told
    assert "left" not in told


@pytest.mark.parametrize("tail", ["left@tail", "left/tail", "le@ft/tail", "le/ft@tail", "7/tail", "left@tail?x"])
@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg", "postgres", "mysql"])
def test_a_database_url_refuses_it_too(scheme: str, tail: str) -> None:
    """Before a driver is asked, which would look for a host of the password's name."""
    told = refusal("database", f"{scheme}://ann:{tail}@127.0.0.1:5432/runs")
    assert told.startswith("--database: must have one @")
    assert "tail" not in told
    assert "left" not in told


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ann:le%40ft%2Ftail@h/runs",
        "postgresql://ann:left#tail@h/runs",
        "postgresql://ann:left?tail@h/runs",
        "postgresql://ann:x@h1:5432,h2:5433/runs?application_name=a@b",
        "postgresql://h:5432/runs",
        "postgresql:///runs?host=/run/postgresql",
        "sqlite:////var/lib/a@b@c/trainmedic.db",
    ],
)
def test_database_urls_that_work_stay_valid(url: str) -> None:
    """What the driver reads as it is meant."""
    assert server.load({"database": url}, {}).database_url == url


def test_a_setting_that_takes_no_password_does_not_show_one() -> None:
    """The URL in which people reach the server has no user."""
    told = refusal("external_url", "https://ann:left@tail@h")
    assert told.startswith("--external-url: must be")
    assert "tail" not in told


def test_the_server_ends_with_one_line_and_shows_nothing(tmp_path: Path) -> None:
    """As a process: neither on standard error nor in the log."""
    done = subprocess.run(
        [sys.executable, "-m", "trainmedic_server", "serve", "--state-dir", str(tmp_path)],
        env={
            **inherited(),
            "PYTHONPATH": PYTHON_PATH,
            "TRAINMEDIC_DATABASE_URL": "postgresql://ann:left@tail@127.0.0.1/x",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode != 0
    assert "TRAINMEDIC_DATABASE_URL: must have one @" in done.stderr
    assert "tail" not in done.stdout + done.stderr


@pytest.mark.parametrize("url", ["http://ann:left@tail@h:1", "http://ann:tail@127.0.0.1:1", "ann:tail@h"])
def test_the_clients_show_no_password_of_the_servers_url(url: str) -> None:
    """Whether it is refused, or nothing answers there."""
    done = CliRunner().invoke(main, ["status", "--server", url])
    assert done.exit_code != 0
    assert "tail" not in done.output
