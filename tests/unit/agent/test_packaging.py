"""What is shipped for a node works together: the example policy, the playbooks that name its rules, the unit."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from trainmedic_agent import policy as policies
from trainmedic_agent import privileges
from trainmedic_agent.disk.rules import EntryKind
from trainmedic_agent.settings.agent import SETTINGS

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "packaging" / "systemd" / "trainmedic-agent.service"
EXAMPLE = ROOT / "packaging" / "agent" / "policy.yaml"


@pytest.fixture(scope="module")
def policy() -> policies.Policy:
    return policies.load(EXAMPLE)


@pytest.fixture(scope="module")
def unit() -> dict[str, list[str]]:
    """Every line of the unit's service section; a key may come more than once."""
    told: dict[str, list[str]] = {}
    section = UNIT.read_text().partition("[Service]")[2].partition("\n[")[0]
    for line in section.splitlines():
        if line and not line.startswith("#"):
            key, _, value = line.partition("=")
            told.setdefault(key, []).append(value)
    return told


def test_the_example_policy_has_every_rule_that_a_playbook_names(policy: policies.Policy) -> None:
    """So the shipped playbooks work with it unchanged."""
    named = set()
    for file in (ROOT / "playbooks").glob("*.yaml"):
        for document in yaml.safe_load_all(file.read_text()):
            for step in document.get("steps", []) if isinstance(document, dict) else []:
                if step.get("action") == "disk.clean":
                    named.update(step["with"]["rules"])
    assert {"temporary-files", "old-logs", "superseded-checkpoints"} <= named
    assert named - policy.cleaning.rules.keys() == {"shrink-large-logs"}


def test_commented_parts_of_the_example_policy_can_be_enabled() -> None:
    """The commented parts are valid, and are those that the shipped playbooks name."""
    text = EXAMPLE.read_text()
    for start, end in (("    # shrink-large-logs:", "\n\n"), ("# containers:", "\n\n"), ("# restart:", "\n\n")):
        part = text[text.index(start) :].partition(end)[0]
        text = text.replace(part, re.sub(r"^( *)# ", r"\1", part, flags=re.MULTILINE))
    policy = policies.parse(
        text.replace("disk.clean]", "disk.clean, disk.prune_containers, node.restart_unit, node.restart_container]"),
        "policy.yaml",
    )
    assert policy.cleaning.rules["shrink-large-logs"].keep_tail == 20_000_000
    assert policy.containers is not None


def test_the_example_policy_is_conservative(policy: policies.Policy) -> None:
    """It has a minimum power limit, a lease limit, days of age for all deletions, and kept checkpoints."""
    assert policy.allow == {"gpu.power_limit", "disk.clean"}
    assert policy.power.floor_percent >= 50
    rules = policy.cleaning.rules.values()
    assert all(rule.min_age.days >= 1 for rule in rules if rule.do == "delete")
    assert all(rule.keep_newest >= 2 for rule in rules if rule.kind is EntryKind.CHECKPOINTS)
    assert policy.cleaning.max_bytes is not None


def test_the_unit_may_write_where_the_example_policy_cleans(
    policy: policies.Policy, unit: dict[str, list[str]]
) -> None:
    """A root that is read-only for the service could not be cleaned."""
    writable = {path.removeprefix("-") for path in unit["ReadWritePaths"][0].split()}
    assert {root for rule in policy.cleaning.rules.values() for root in rule.roots} == writable


def test_the_unit_gives_the_capabilities_that_the_check_asks_for(unit: dict[str, list[str]]) -> None:
    """It gives exactly those."""
    needed = {*privileges.POWER, *privileges.FILES_OF_OTHERS, *privileges.PROCESSES_OF_OTHERS}
    assert set(unit["AmbientCapabilities"][0].split()) == needed
    assert unit["CapabilityBoundingSet"] == unit["AmbientCapabilities"]
    page = (ROOT / "docs" / "how-to" / "agent.md").read_text()
    assert all(f"| `{name}` |" in page for name in needed)


def test_the_unit_sets_only_known_settings(unit: dict[str, list[str]]) -> None:
    """Its variables are settings of the agent."""
    known = {setting.source.variable for setting in SETTINGS.values()}
    assert {one.partition("=")[0] for one in unit["Environment"]} <= known
    configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",)).read_string(UNIT.read_text())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit_and_rates_its_exposure_low(tmp_path: Path) -> None:
    """``verify`` prints nothing; the exposure is at most 3.2 of 10, where a plain service has 9.6."""
    here = tmp_path / UNIT.name
    here.write_text(UNIT.read_text().replace("/opt/trainmedic/bin/trainmedic", shutil.which("true") or "/bin/true"))
    verified = subprocess.run(["systemd-analyze", "verify", here], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=32", here],
        capture_output=True,
        text=True,
        check=False,
    )
    assert rated.returncode == 0, rated.stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit_with_the_log_reading_drop_in(tmp_path: Path) -> None:
    """The drop-in's lines behind those of the unit, as systemd reads them."""
    here = tmp_path / UNIT.name
    unit = UNIT.read_text().replace("/opt/trainmedic/bin/trainmedic", shutil.which("true") or "/bin/true")
    more = (UNIT.parent / "logs.conf").read_text().partition("[Service]")[2]
    here.write_text(unit.replace("[Install]", f"{more}\n[Install]"))
    verified = subprocess.run(["systemd-analyze", "verify", here], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")


def test_the_log_reader_has_its_own_unit() -> None:
    """It has the rights to open logs, its memory limit and no secret; the agent's drop-in gives the agent no right."""
    unit = (UNIT.parent / "trainmedic-agent-reader.service").read_text()
    ambient = next(line for line in unit.splitlines() if line.startswith("AmbientCapabilities="))
    opening = {"CAP_SETUID", "CAP_SETGID", "CAP_DAC_READ_SEARCH", "CAP_SYSLOG"}
    assert set(ambient.partition("=")[2].split()) == opening
    assert "ExecStart=/opt/trainmedic/bin/trainmedic agent-reader\n" in unit
    assert "MemoryMax=" in unit
    assert "EnvironmentFile" not in unit
    drop_in = (UNIT.parent / "logs.conf").read_text()
    assert "Environment=TRAINMEDIC_READER=external\n" in drop_in
    assert "Capabilit" not in drop_in.partition("[Service]")[2]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_readers_unit(tmp_path: Path) -> None:
    """The program exists on this machine."""
    unit = (UNIT.parent / "trainmedic-agent-reader.service").read_text()
    here = tmp_path / "trainmedic-agent-reader.service"
    here.write_text(unit.replace("/opt/trainmedic/bin/trainmedic", "/bin/true"))
    verified = subprocess.run(["systemd-analyze", "verify", here], capture_output=True, text=True, check=False)
    assert not [line for line in verified.stderr.splitlines() if here.name in line], verified.stderr
