"""The value files that come with the chart render, are valid for the API server, and start what they configure."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from typing import Any

import helm_python
import pytest
import yaml

from tests.helm import charts
from tests.helm.charts import Object
from tests.helm.test_rendering import KUBERNETES, faults, references, selectors, used
from tests.kubernetes.conftest import REAL
from trainmedic_agent import policy
from trainmedic_agent.settings import agent as agent_settings
from trainmedic_server.settings import server as server_settings

FILES = {path.name: path for path in sorted((charts.CHART / "examples").glob("*-values.yaml"))}
every_example = pytest.mark.parametrize("name", FILES)
RELEASE, NAMESPACE = "trainmedic", "trainmedic"


def values(name: str) -> dict[str, Any]:
    """The values in a file, without what YAML alone knows, such as aliases."""
    found: dict[str, Any] = json.loads(json.dumps(yaml.safe_load(FILES[name].read_text())))
    return found


def objects(name: str) -> list[Object]:
    return charts.parsed(charts.chart().render(values(name), name=RELEASE, namespace=NAMESPACE))


@every_example
def test_an_example_renders_and_passes_strict_linting(name: str) -> None:
    """There is no warning, and its notes leave no placeholder."""
    report = helm_python.lint(charts.CHART, values(name), strict=True, namespace=NAMESPACE)
    assert [one for one in report["messages"] if one["severity"] > 1] == []
    assert report["errors"] == []
    notes = charts.chart().render(values(name), name=RELEASE, namespace=NAMESPACE)["trainmedic/templates/NOTES.txt"]
    assert "<no value>" not in notes
    assert "map[" not in notes


@every_example
def test_an_examples_objects_are_valid_and_consistent(name: str) -> None:
    """The schemas of all known versions accept them; mounted and selected objects are rendered or named in the file."""
    found = objects(name)
    assert [fault for each in found for version in KUBERNETES for fault in faults(each, version)] == []
    templates = [
        each["spec"]["template"]["metadata"]["labels"]
        for each in found
        if each["kind"] in ("Deployment", "DaemonSet", "StatefulSet")
    ]
    for selecting, selector in selectors(found):
        assert sum(selector.items() <= labels.items() for labels in templates) == 1, selecting
    made = {(each["kind"], each["metadata"]["name"]) for each in found}
    named = set(references(values(name)))
    for pod, spec in charts.pods(found):
        for kind, needed in used(spec):
            assert (kind, needed) in made or needed in named, f"{pod} needs the {kind} {needed}"


@every_example
def test_an_examples_settings_start_server_and_agent(name: str) -> None:
    """Server and agent read their variables, and the agent its policy."""
    for each in objects(name):
        if each["kind"] == "Deployment":
            given = environment(each)
            channels = set(re.findall(r"[\w-]+(?==)|(?<=@)[\w-]+", given.get("TRAINMEDIC_MESSAGE_ROUTES", "")))
            channels |= set(re.findall(r"(?<=@)[\w-]+", given.get("TRAINMEDIC_MESSAGES", "")))
            given |= {"TRAINMEDIC_NOTIFY_URLS": " ".join(f"{channel}=json://h" for channel in channels)}
            made = server_settings.load({}, given)
            assert server_settings.misspelt(given) == []
            assert made.routes is not None
            assert made.message_rules
        elif each["kind"] == "DaemonSet":
            assert agent_settings.load({}, environment(each)).node == "n1"
        elif each["kind"] == "ConfigMap" and each["metadata"]["name"].endswith("-agent-policy"):
            policy.parse(each["data"]["policy.yaml"], "policy.yaml")


def environment(workload: Object) -> Mapping[str, str]:
    """The variables of its first container, without files; references get a value that is right."""
    given = {
        "TRAINMEDIC_REDIS_URL": "redis://r:6379/0",
        "TRAINMEDIC_DATABASE_URL": "postgresql://p/t",
        "TRAINMEDIC_NODE": "n1",
    }
    found = workload["spec"]["template"]["spec"]["containers"][0]["env"]
    plain = {each["name"]: str(each.get("value", given.get(each["name"], ""))) for each in found}
    plain = {key: re.sub(r"\$\(\w+\)", "10.1.2.3", value) for key, value in plain.items()}
    return {key: value for key, value in plain.items() if key.startswith("TRAINMEDIC_") and not key.endswith("_FILE")}


def test_the_readme_names_every_example() -> None:
    """It names no other."""
    readme = (charts.CHART / "README.md").read_text()
    assert set(re.findall(r"`([a-z-]+-values\.yaml)`", readme)) == FILES.keys()


@pytest.mark.skipif(not REAL, reason="TRAINMEDIC_TEST_KUBECONFIG names no API server")
@every_example
def test_a_real_api_server_accepts_an_example(name: str) -> None:
    """By a server-side dry run with strict validation. The Prometheus operator's kinds are not installed there."""
    found = charts.parsed(charts.chart().render(values(name), name=RELEASE, namespace="default"))
    own = [each for each in found if not each["apiVersion"].startswith("monitoring.coreos.com/")]
    kubectl = ["kubectl", "--kubeconfig", str(REAL), "apply", "--dry-run=server", "--validate=strict", "--filename=-"]
    made = subprocess.run(kubectl, input=yaml.safe_dump_all(own), text=True, capture_output=True, check=False)
    assert made.returncode == 0, made.stderr
    assert len(made.stdout.splitlines()) == len(own)
