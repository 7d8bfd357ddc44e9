"""What is told where Redis refuses: a real Redis with users and TLS, asked by the server, an agent and a job."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.live import Server
from tests.support.programs import PYTHON_PATH, Program, eventually, free_port, inherited, system_path
from trainmedic.wire.connection import OutageLog, RedisConnection, open_client
from trainmedic_server import errors, telemetry
from trainmedic_server.adapters.redis_bus import RedisBus
from trainmedic_server.adapters.system_clock import SystemClock

PASSWORD = "pw-Zq7-hidden"
USERS = f"""
user default on >{PASSWORD} ~* &* +@all
user nocommand on >{PASSWORD} ~trainmedic:* &* +@all -xreadgroup
user noscan on >{PASSWORD} ~trainmedic:* &* +@all -scan
user nokeys on >{PASSWORD} ~other:* &* +@all
user off off >{PASSWORD} ~* +@all
"""
PLAYBOOK = "playbook: look\non: {alert: Odd}\ntarget: node\nsteps:\n  - {action: node.facts}\n"


class Places:
    """The ports of several Redis servers, by what is special about them, and the certificates."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ports: dict[str, int] = {}

    def url(self, text: str) -> str:
        """Fill in the ports and the directory."""
        return text.format(dir=self.directory, **self.ports)


def openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)


def certificates(directory: Path) -> None:
    """Two authorities; of the first one certificates for this host, for another, and one that has expired."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "strange"):
        openssl(
            directory, "req", "-x509", *key, "-subj", f"/CN={name}", "-out", f"{name}.crt", "-keyout", f"{name}.key"
        )
    for name, names, days in (
        ("good", "IP:127.0.0.1,DNS:localhost", "2"),
        ("other", "DNS:redis.example.org", "2"),
        ("old", "IP:127.0.0.1", "-1"),
    ):
        asked = ("-addext", f"subjectAltName={names}", "-out", f"{name}.csr", "-keyout", f"{name}.key")
        openssl(directory, "req", *key, "-subj", f"/CN={name}", *asked)
        signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-copy_extensions", "copy", "-days", days)
        openssl(directory, "x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.crt")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    directory = tmp_path_factory.mktemp("refusals")
    certificates(directory)
    (directory / "users.acl").write_text(USERS)
    made = Places(directory)
    tls = ("--port", "0", "--tls-ca-cert-file", "ca.crt")
    kinds: dict[str, tuple[str, ...]] = {
        "users": ("--aclfile", "users.acl"),
        "open": (),
        "tls": (*tls, "--tls-cert-file", "good.crt", "--tls-key-file", "good.key", "--tls-auth-clients", "no"),
        "other": (*tls, "--tls-cert-file", "other.crt", "--tls-key-file", "other.key", "--tls-auth-clients", "no"),
        "old": (*tls, "--tls-cert-file", "old.crt", "--tls-key-file", "old.key", "--tls-auth-clients", "no"),
        "asking": (*tls, "--tls-cert-file", "good.crt", "--tls-key-file", "good.key", "--tls-auth-clients", "yes"),
    }
    with ExitStack() as programs:
        for name, options in kinds.items():
            made.ports[name] = free_port()
            listening = "--tls-port" if "--port" in options else "--port"
            argv = ["redis-server", "--save", "", "--bind", "127.0.0.1", *options, listening, str(made.ports[name])]
            programs.enter_context(Program(argv, directory / f"{name}.log", {"PATH": system_path()}))
        for name in kinds:
            eventually(lambda name=name: "Ready to accept" in (directory / f"{name}.log").read_text(), 60, name)  # type: ignore[misc]
        yield made


REFUSALS = [
    (f"redis://:bad-{PASSWORD}@127.0.0.1:{{users}}", "does not accept the user and password"),
    (f"redis://nobody:{PASSWORD}@127.0.0.1:{{users}}", "does not accept the user and password"),
    (f"redis://off:{PASSWORD}@127.0.0.1:{{users}}", "does not accept the user and password"),
    ("redis://127.0.0.1:{users}", "asks for a password, and the URL has none"),
    (f"redis://:{PASSWORD}@127.0.0.1:{{open}}", "this Redis has none for its default user"),
    (
        f"redis://nocommand:{PASSWORD}@127.0.0.1:{{users}}",
        "the command XREADGROUP; grant it with ACL SETUSER <user> .xreadgroup",
    ),
    (f"redis://nokeys:{PASSWORD}@127.0.0.1:{{users}}", "a key that is needed.*~trainmedic:"),
    ("rediss://127.0.0.1:{tls}?ssl_ca_certs={dir}/strange.crt", "TLS failed.*not signed by an authority.*ssl_ca_certs"),
    ("rediss://127.0.0.1:{tls}", "TLS failed.*not signed by an authority"),
    ("rediss://127.0.0.1:{other}?ssl_ca_certs={dir}/ca.crt", "TLS failed.*for another name than the host"),
    ("rediss://localhost:{other}?ssl_ca_certs={dir}/ca.crt", "TLS failed.*for another name than the host"),
    ("rediss://127.0.0.1:{old}?ssl_ca_certs={dir}/ca.crt", "TLS failed.*has expired"),
    ("rediss://127.0.0.1:{tls}?ssl_ca_certs={dir}/none.crt", "TLS failed: a file that the URL names"),
    ("rediss://127.0.0.1:{asking}?ssl_ca_certs={dir}/ca.crt", "TLS failed.*asks for a client certificate"),
    ("rediss://127.0.0.1:{open}", "speaks no TLS.*redis:// instead of rediss://"),
    ("redis://127.0.0.1:{tls}", "if this port speaks TLS, write rediss://"),
    ("redis://127.0.0.1:1", "connection refused"),
    ("redis://nowhere.invalid", "host name of the URL cannot be resolved"),
]


@pytest.mark.parametrize(("text", "expected"), REFUSALS)
async def test_the_server_reports_what_redis_refuses(places: Places, text: str, expected: str) -> None:
    """The message in `/ready` contains nothing of the URL."""
    bus = RedisBus(places.url(text), SystemClock(), telemetry.Metrics())
    await bus.start()
    try:
        told = await explanation(bus)
    finally:
        await bus.close()
    assert matches(expected, told), told
    assert PASSWORD not in told
    assert "127.0.0.1" not in told


async def explanation(bus: RedisBus) -> str:
    for _ in range(100):
        try:
            await bus.check()
        except errors.BusExplained as error:
            return str(error)
        except errors.BusUnavailable:
            pass
        await asyncio.sleep(0.1)
    return "nothing"


def matches(expected: str, told: str) -> bool:
    return re.search(expected, told) is not None


@pytest.mark.parametrize(("text", "expected"), REFUSALS)
def test_agents_and_jobs_log_the_same_refusals(
    places: Places, text: str, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They log one line with the reason, without the password."""
    url = places.url(text)
    connection = RedisConnection(lambda: url, OutageLog("job llm"))
    caplog.set_level(logging.WARNING, "trainmedic")
    try:
        with connection.turn() as client:
            client.xreadgroup("g", "c", {"trainmedic:x": ">"})
    except Exception as error:
        connection.failed(error)
    (message,) = caplog.messages
    assert matches(expected, message), message
    assert PASSWORD not in message


async def test_the_refusal_of_one_command_is_reported_although_redis_answers(places: Places) -> None:
    """Agents and jobs cannot be listed; the rest works. A grant of the right fixes it."""
    bus = RedisBus(places.url(f"redis://noscan:{PASSWORD}@127.0.0.1:{{users}}"), SystemClock(), telemetry.Metrics())
    await bus.start()
    try:
        await bus.check()
        with pytest.raises(errors.BusExplained, match=r"the command SCAN; grant it with ACL SETUSER <user> \+scan"):
            await bus.agents()
        with pytest.raises(errors.BusExplained, match="the command SCAN"):
            await bus.check()
        with open_client(places.url(f"redis://:{PASSWORD}@127.0.0.1:{{users}}")) as admin:
            admin.acl_setuser("noscan", enabled=True, commands=["+scan"])
        await bus.agents()
        await bus.check()
    finally:
        await bus.close()


async def test_a_password_with_special_characters_works_where_possible(places: Places) -> None:
    """It is escaped, or contains an @ as it is; neither is shown anywhere."""
    with open_client(places.url(f"redis://:{PASSWORD}@127.0.0.1:{{users}}")) as admin:
        admin.acl_setuser("odd", enabled=True, passwords=["+a@b/c#d?e%f"], keys=["*"], commands=["+@all"])
        admin.acl_setuser("at", enabled=True, passwords=["+a@b"], keys=["*"], commands=["+@all"])
    for text in ("redis://odd:a%40b%2Fc%23d%3Fe%25f@127.0.0.1:{users}", "redis://at:a@b@127.0.0.1:{users}"):
        with open_client(places.url(text)) as client:
            assert client.ping()


def test_ready_and_the_server_log_report_it(places: Places, tmp_path: Path) -> None:
    """The server starts and reports the fault; the log contains no password."""
    cases = [*REFUSALS[:1], *REFUSALS[5:6], *REFUSALS[7:8]]
    for number, (text, expected) in enumerate(cases):
        with Server(tmp_path / str(number), PLAYBOOK, "--redis", places.url(text)) as server:

            def told(server: Server = server, expected: str = expected) -> bool:
                answer = server.ask("/ready")
                return answer.status == 503 and matches(expected, answer.body["redis"]["detail"])

            eventually(told, 60, expected)
            log = server.directory / "server-1.log"
            eventually(lambda log=log, expected=expected: matches(expected, log.read_text()), 60, expected)  # type: ignore[misc]
            assert PASSWORD not in log.read_text()
            assert PASSWORD not in str(server.ask("/ready").body)


def test_agent_check_reports_it(places: Places, tmp_path: Path) -> None:
    """Its message replaces that of redis-py, which names only the host."""
    for text, expected in (REFUSALS[0], REFUSALS[9], REFUSALS[14]):
        done = subprocess.run(
            [sys.executable, "-m", "trainmedic_server", "agent", "check", "--redis", places.url(text)],
            env={**inherited(), "PYTHONPATH": PYTHON_PATH, "TRAINMEDIC_STATE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode != 0
        assert matches(expected, " ".join((done.stdout + done.stderr).split())), done.stdout + done.stderr
        assert PASSWORD not in done.stdout + done.stderr
