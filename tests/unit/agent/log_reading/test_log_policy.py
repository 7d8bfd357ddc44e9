"""The ``logs`` part of a policy."""

from __future__ import annotations

import pytest

from trainmedic_agent.log_reading.log_policy import KernelLog, KernelReading
from trainmedic_agent.policy import parse
from trainmedic_server.errors import ConfigurationError

WHOLE = """\
logs:
  roots: [/data/logs]
  paths: [/scratch/runs]
  files:
    - /srv/train/{job}/rank-{rank}.log
    - {path: /var/log/fabricmanager.log, source: fabric-manager}
  slurm: ["/home/*/slurm/{job}-[0-9]*.out"]
  pods: [training, "team-*"]
  kernel: true
  max_files: 200
  max_lines: 500
"""


def told(text: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        parse(text, "p")
    return str(caught.value).splitlines()


def test_a_complete_log_policy_is_read() -> None:
    """The policy has paths, patterns with placeholders, namespaces, and limits."""
    logs = parse(WHOLE, "p").logs
    assert logs is not None
    assert (logs.roots, logs.paths) == (("/data/logs",), ("/scratch/runs",))
    assert [(files.path.text, files.source) for files in logs.files] == [
        ("/srv/train/{job}/rank-{rank}.log", "training"),
        ("/var/log/fabricmanager.log", "fabric-manager"),
    ]
    assert [pattern.base for pattern in logs.slurm] == ["/home"]
    assert [name for name in ("training", "team-a", "kube-system") if logs.reads_pods_of(name)] == [
        "training",
        "team-a",
    ]
    assert logs.kernel == KernelLog(KernelReading.ANY)
    assert (logs.max_files, logs.max_lines) == (200, 500)


def test_without_a_log_policy_no_log_is_read() -> None:
    """An empty one reads none either, but shows that logs are meant to be read."""
    assert parse("allow: []", "p").logs is None
    assert parse("logs: {}", "p").logs is not None


@pytest.mark.parametrize(
    ("value", "kernel"),
    [
        ("true", KernelLog(KernelReading.ANY)),
        ("false", None),
        ("kmsg", KernelLog(KernelReading.KMSG)),
        ("journal", KernelLog(KernelReading.JOURNAL)),
        ("/var/log/messages", KernelLog(KernelReading.FILE, "/var/log/messages")),
    ],
)
def test_the_kernel_log_is_read_in_one_of_several_ways(value: str, kernel: KernelLog | None) -> None:
    """The first working one is used, or the one named."""
    logs = parse(f"logs: {{kernel: {value}}}", "p").logs
    assert logs is not None
    assert logs.kernel == kernel


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("roots: data", "p:1:15: logs.roots: 'data' must be an absolute path without '.', '..', double or closing '/'"),
        ("roots: [/a/../b]", "must be an absolute path"),
        ("ship: {url: 'http://'}", "logs.ship.url: must name a host"),
        ("ship: {url: 'http://loki:0'}", "must have a port from 1 to 65535"),
        ("ship: {url: 'http://loki:3100?a=b'}", "must be the store's URL alone"),
        ("roots: [/]", "must name a directory or file"),
        ("paths: [/proc/1]", "/proc/1 cannot be read as a log: it belongs to the kernel"),
        ("files: [/dev/kmsg]", "it belongs to the kernel"),
        ("files: ['/*.log']", "must begin with a directory's name"),
        ("files: ['/a/**/b.log']", "'**' has no meaning here"),
        ("files: ['/a/{jub}.log']", "{jub} is not a placeholder; use job"),
        ("files: ['/a/{rank}/{rank}.log']", "has {rank} twice"),
        ("files: [{source: x}]", "path is missing"),
        ("files: [{path: /a/b, source: kernel}]", "with the key kernel"),
        ("files: [{path: /a/b, source: trainng}]", "there is no 'trainng'; did you mean 'training'?"),
        (
            "files: [{path: /a/b, source: fabric_manager}]",
            "did you mean 'fabric-manager'?",
        ),
        ("files: [{path: /a/b, source: Own}]", "'Own' is not a valid source"),
        ("pods: ['../x']", "is not a namespace"),
        ("kernel: maybe", "must be true, any, kmsg, journal, file, or the path of a file, not 'maybe'"),
        ("max_files: 0", "must be a whole number from 1 to 20000"),
        ("pod: [x]", "is not known here; did you mean 'pods'?"),
    ],
)
def test_mistakes_are_reported_with_their_place(section: str, message: str) -> None:
    """The message states the correction."""
    (problem,) = told(f"logs: {{{section}}}")
    assert message in problem
