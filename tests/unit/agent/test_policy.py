"""A node's policy: what it allows, and how its mistakes are told."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from tests.unit.agent.test_journal import cap_command
from trainmedic_agent.containers.policy import Leftover
from trainmedic_agent.policy import Policy, load, parse
from trainmedic_server.errors import ConfigurationError

WHOLE = """\
allow: [gpu.power_limit, disk.clean]
power:
  floor_percent: 60
  max_lease: 10m
cleaning:
  max_files: 500
  rules:
    old-logs: {roots: [/var/log/training], globs: ["*.log"], min_age: 7d}
"""


def told(text: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        parse(text, "policy.yaml")
    return str(caught.value).splitlines()


def test_a_complete_policy_is_read() -> None:
    """It has three parts, and a digest by which a presence identifies the active policy."""
    policy = parse(WHOLE, "policy.yaml")
    assert policy.allow == {"gpu.power_limit", "disk.clean"}
    assert (policy.power.floor_percent, policy.power.max_lease) == (60.0, timedelta(minutes=10))
    assert list(policy.cleaning.rules) == ["old-logs"]
    assert policy.cleaning.max_files == 500
    assert policy.digest is not None
    assert policy.digest != parse(WHOLE + "\n", "policy.yaml").digest


def test_container_cleanup_rules_are_read() -> None:
    """They are the kinds, the minimum age, the socket, and the protected names."""
    text = "allow: [disk.prune_containers]\ncontainers: {remove: [unused_images], min_age: 30d, keep: ['*/base:*']}"
    containers = parse(text, "p").containers
    assert containers is not None
    assert containers.remove == {Leftover.UNUSED_IMAGES}
    assert (containers.min_age, containers.socket) == (timedelta(days=30), "/run/docker.sock")
    assert containers.keep == ("*/base:*",)


def test_restart_permissions_are_read() -> None:
    """They are full names, name patterns, and labels."""
    text = "allow: [node.restart_unit]\nrestart: {units: ['a@*.service', b.service], container_labels: [restart=yes]}"
    restart = parse(text, "p").restart
    assert restart is not None
    assert all(map(restart.allows_unit, ("a@1.service", "b.service")))
    assert not any(map(restart.allows_unit, ("a.service", "ab.service")))
    assert restart.allows_container("exporter", {"restart": "yes"})
    assert not restart.allows_container("exporter", {"restart": "no"})


def test_slurm_commands_need_their_policy_part() -> None:
    """The part permits reading; permission for a drain includes its end."""
    policy = parse("allow: [slurm.drain, slurm.hold]\nslurm: {commands: /opt/slurm/bin}", "p")
    assert policy.slurm is not None
    assert (policy.slurm.commands, policy.slurm.conf) == ("/opt/slurm/bin", None)
    allowed = (
        "slurm.read",
        "slurm.list",
        "slurm.drain",
        "slurm.resume",
        "slurm.hold",
        "slurm.release",
        "slurm.comment",
    )
    assert all(map(policy.allows, allowed))
    assert not any(map(policy.allows, ("slurm.cancel", "slurm.requeue", "slurm.reboot", "slurm.update")))
    reading = parse("slurm: {}", "p")
    assert reading.allows("slurm.read")
    assert not reading.allows("slurm.comment")
    assert not Policy().allows("slurm.read")
    assert told("allow: [slurm.drain]") == [
        "policy.yaml:1:8: allow: slurm.drain needs the part slurm, which states how Slurm's commands are run"
    ]
    assert "must be an absolute path" in told("slurm: {commands: bin}")[0]
    assert "allowed by the part slurm" in told("allow: [slurm.read]\nslurm: {}")[0]


def test_reading_needs_no_permission() -> None:
    """This holds with a policy and without."""
    assert Policy().allows("node.facts")
    assert not Policy().allows("gpu.power_limit")
    assert parse("allow: [disk.clean]", "p").allows("node.facts")


def test_renewing_a_lease_is_allowed_with_the_limit() -> None:
    """A command that may cap may also renew the cap."""
    assert parse("allow: [gpu.power_limit]", "p").allows("gpu.renew_lease")
    assert not parse("allow: [disk.clean]", "p").allows("gpu.renew_lease")


def test_reverting_is_always_allowed() -> None:
    """A policy limits harm, never an undo."""
    policy = parse("allow: [disk.clean]", "/etc/policy.yaml")
    undo = cap_command("c2")
    cap = replace(undo, undo_of=None)
    assert policy.refusal(undo) is None
    assert policy.refusal(cap) == (
        "gpu.power_limit is not allowed by this node's policy /etc/policy.yaml: it is not under allow"
    )


@pytest.mark.parametrize("action", ["disk.clean", "gpu.renew_lease", "gpu.unheard_of"])
def test_an_alleged_undo_gains_no_permission(action: str) -> None:
    """Only a power limit is restored; any other command claiming to be an undo is limited as usual."""
    policy = parse("allow: []", "/etc/policy.yaml")
    refusal = policy.refusal(replace(cap_command("c2"), action=action))
    assert refusal is not None
    assert f"{action} is not allowed" in refusal


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alow: []", "policy.yaml:1:1: alow: is not known here; did you mean 'allow'?"),
        (
            "allow:\n  - gpu.powerlimit",
            "policy.yaml:2:5: allow.0: 'gpu.powerlimit' is not one of gpu.power_limit, disk.clean, "
            "disk.prune_containers, node.restart_unit, node.restart_container, gpu.reset, node.reboot, slurm.drain, ",
        ),
        (
            "allow: [node.facts]",
            "policy.yaml:1:9: allow.0: node.facts needs no permission: it only reads; leave it out",
        ),
        (
            "allow: [gpu.renew_lease]",
            "policy.yaml:1:9: allow.0: gpu.renew_lease belongs to gpu.power_limit; allow that",
        ),
        (
            "power: {floor_percent: 0}",
            "policy.yaml:1:24: power.floor_percent: must be a number above 0 and up to 100, in percent of the default "
            "limit, not 0",
        ),
        ("power: {max_lease: 2d}", "policy.yaml:1:20: power.max_lease: must be from 1m to 1d, not '2d'"),
        (
            "allow: [disk.prune_containers]",
            "policy.yaml:1:8: allow: disk.prune_containers needs the part containers, which states what may be removed",
        ),
        (
            "allow: [node.restart_unit]\nrestart: {containers: [exporter]}",
            "policy.yaml:1:8: allow: node.restart_unit needs restart.units, which names the units",
        ),
        (
            "allow: [node.restart_container]",
            "policy.yaml:1:8: allow: node.restart_container needs restart.containers or restart.container_labels",
        ),
        (
            "restart: {units: [sshd]}",
            "policy.yaml:1:19: restart.units.0: 'sshd' must be the name or pattern of a service, such as "
            "nvidia-persistenced.service",
        ),
        (
            "restart: {units: ['*.service']}",
            "policy.yaml:1:19: restart.units.0: '*.service' permits every name",
        ),
        (
            "restart: {containers: ['*']}",
            "policy.yaml:1:24: restart.containers.0: '*' permits every name",
        ),
        (
            "restart: {container_labels: [restart]}",
            "policy.yaml:1:30: restart.container_labels.0: 'restart' must be a label with its value",
        ),
        ("containers: {min_age: 7d}", "policy.yaml:1:13: containers: remove is missing"),
        (
            "containers: {remove: [volumes], min_age: 7d}",
            "policy.yaml:1:23: containers.remove.0: must be build_cache or dangling_images or stopped_containers or "
            "unused_images, not 'volumes'",
        ),
        (
            "containers: {remove: [build_cache], min_age: 5m}",
            "policy.yaml:1:46: containers.min_age: must be at least 1h, not 5m",
        ),
        (
            "containers: {remove: [build_cache], min_age: 7d, socket: docker.sock}",
            "policy.yaml:1:58: containers.socket: 'docker.sock' must be the absolute path of the engine's socket",
        ),
        ("power: 3", "policy.yaml:1:8: power: must be a mapping (name: value), not 3"),
        ("cleaning: {rules: {tmp: {roots: [/]}}}", "policy.yaml:1:34: cleaning.rules.tmp.roots.0: / cannot be a root"),
        ("- allow", "policy.yaml:1:1: must be a mapping (name: value), not ['allow']"),
        ("allow: [", "policy.yaml:1:9: "),
        ("allow: []\n---\nallow: []", "policy.yaml: a policy is one YAML document, but the file has 2"),
    ],
)
def test_a_mistake_is_reported_at_its_place(text: str, message: str) -> None:
    """The message has file, line, column, the fault, and the nearest valid name."""
    assert any(line.startswith(message) for line in told(text)), told(text)


def test_all_mistakes_are_reported_at_once() -> None:
    """One reading shows all that has to be fixed."""
    assert len(told("alow: 1\npower: {floor: 2, max_lease: x}\ncleaning: {rulez: {}}")) == 4


def test_a_world_writable_policy_is_rejected(tmp_path: Path) -> None:
    """A policy limits commands, so it is worthless if any user can change it."""
    file = tmp_path / "policy.yaml"
    file.write_text(WHOLE)
    file.chmod(0o666)
    with pytest.raises(ConfigurationError, match="chmod o-w"):
        load(file)
    file.chmod(0o644)
    assert load(file).source == str(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The agent does not start with less than its configuration."""
    with pytest.raises(ConfigurationError, match=r"--policy: cannot read .*none\.yaml: No such file"):
        load(tmp_path / "none.yaml")
