"""What real Helm makes of the chart, for every combination of values: sound, and valid for the API server."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import jsonschema_rs
import pytest
import yaml

from tests.helm import charts
from tests.helm.charts import COMBINATIONS, Object

SCHEMAS = sorted((Path(__file__).parent / "schemas").glob("*.json"))
KUBERNETES = [path for path in SCHEMAS if path.name.startswith("kubernetes-")]
(OPERATOR,) = [path for path in SCHEMAS if path.name.startswith("prometheus-operator-")]
GOLDEN = Path(__file__).parent / "golden"
WITH_GOLDEN_FILE = ("default", "everything", "postgresql", "workloads-of-two-namespaces")
META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"


class Validators:
    """The schemas of one origin, compiled where they are needed."""

    def __init__(self, path: Path) -> None:
        self._file = json.loads(path.read_text())
        self.kinds: dict[str, str] = self._file["kinds"]

    @functools.cache  # noqa: B019 - as many as there are schema files
    def of(self, definition: str) -> jsonschema_rs.Draft7Validator:
        schema = {"$ref": f"#/definitions/{definition}", "definitions": self._file["definitions"]}
        return jsonschema_rs.Draft7Validator(schema)

    def faults(self, definition: str, value: Any) -> list[str]:
        return [
            f"{'.'.join(map(str, error.instance_path))}: {error.message}"
            for error in self.of(definition).iter_errors(value)
        ]

    def fields(self, definition: str) -> set[str]:
        return set(self._file["definitions"][definition]["properties"])


@functools.cache
def validators(path: Path) -> Validators:
    return Validators(path)


def faults(found: Object, kubernetes: Path) -> list[str]:
    """What the API server would refuse, with the operator's kinds installed."""
    kind = f"{found['apiVersion']} {found['kind']}"
    own, operators = validators(kubernetes), validators(OPERATOR)
    if kind in own.kinds:
        wrong = own.faults(own.kinds[kind], found)
    elif kind in operators.kinds:
        wrong = [*operators.faults(operators.kinds[kind], found), *own.faults(META, found["metadata"])]
    else:
        wrong = ["no schema of this kind is kept: add it to scripts/reduce-schemas"]
    return [f"{found['kind']} {found['metadata']['name']}: {one}" for one in wrong]


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_the_chart_lints_without_warnings(combination: str) -> None:
    """`helm lint --strict` reports none."""
    report = helm_python.lint(charts.CHART, dict(COMBINATIONS[combination]), strict=True, namespace=charts.NAMESPACE)
    assert report["errors"] == []
    assert [one for one in report["messages"] if one["severity"] > 1] == []


@pytest.mark.parametrize("kubernetes", KUBERNETES, ids=lambda path: path.stem)
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_every_object_is_valid(combination: str, kubernetes: Path) -> None:
    """The version's OpenAPI schemas and the operator's kinds accept it; an unknown field is an error."""
    assert [fault for found in charts.objects(combination) for fault in faults(found, kubernetes)] == []


def test_the_schemas_reject_invalid_objects() -> None:
    """An unknown field, a wrong type and a missing field are reported, at any depth and in custom kinds too."""
    (newest,) = KUBERNETES[-1:]
    deployment = charts.one(charts.objects("everything"), "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["readOnlyRootFilesystem"] = True
    deployment["spec"]["replicas"] = "two"
    del deployment["spec"]["selector"]
    told = "\n".join(faults(deployment, newest))
    assert all(word in told for word in ("readOnlyRootFilesystem", "spec.replicas", "selector")), told
    receiver = charts.one(charts.objects("everything"), "AlertmanagerConfig")
    receiver["spec"]["receivers"][0]["webhookConfigs"][0]["sendResolve"] = True
    assert "sendResolve" in "\n".join(faults(receiver, newest))


def test_at_least_three_supported_versions_are_known() -> None:
    """They include the oldest that the chart accepts."""
    versions = [path.stem.removeprefix("kubernetes-") for path in KUBERNETES]
    oldest = re.fullmatch(r">=(\d+\.\d+)\.0-0", charts.chart().metadata["kubeVersion"])
    assert oldest
    assert oldest[1] in versions
    assert len(versions) > 3


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_objects_are_consistent(combination: str) -> None:
    """Names are unique per kind; a selector selects pods of one component; every reference exists."""
    found = charts.objects(combination)
    names = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in found]
    assert len(names) == len(set(names))
    templates = {
        each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"]
        for each in found
        if each["kind"] in ("Deployment", "DaemonSet", "StatefulSet")
    }
    for name, selector in selectors(found):
        matched = [one for one, labels in templates.items() if selector.items() <= labels.items()]
        assert len(matched) == 1, f"{name} selects {matched}"
    made = {(each["kind"], each["metadata"]["name"]) for each in found}
    named = set(references(COMBINATIONS[combination]))
    for pod, spec in charts.pods(found):
        for kind, name in used(spec):
            assert (kind, name) in made or name in named, f"{pod} needs the {kind} {name}, which nobody makes"


def selectors(found: list[Object]) -> Iterator[tuple[str, dict[str, str]]]:
    """Of everything that selects pods of this release."""
    for each in found:
        name, spec = f"{each['kind']} {each['metadata']['name']}", each.get("spec") or {}
        match each["kind"]:
            case "Service":
                yield name, spec["selector"]
            case "PodMonitor" if "namespaceSelector" in spec:
                pass  # the training jobs', which are the users'
            case "Deployment" | "DaemonSet" | "StatefulSet" | "PodMonitor" | "PodDisruptionBudget":
                yield name, spec["selector"]["matchLabels"]
            case "NetworkPolicy":
                yield name, spec["podSelector"]["matchLabels"]


def used(spec: Object) -> Iterator[tuple[str, str]]:
    """The objects that a pod cannot start without."""
    if "serviceAccountName" in spec:
        yield "ServiceAccount", spec["serviceAccountName"]
    for volume in spec.get("volumes", ()):
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"]
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
    for container in spec["containers"]:
        for variable in container.get("env", ()):
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference:
                yield "Secret", reference["name"]


def references(values: Any) -> Iterator[str]:
    """Every text among the values."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from references(value)
    elif isinstance(values, list):
        for value in values:
            yield from references(value)


def masked(found: list[Object]) -> str:
    """The objects as text; what is generated or comes from elsewhere is replaced by what it is."""
    for each in found:
        if each["kind"] == "Secret":
            each["data"] = dict.fromkeys(each["data"], "generated")
        if each["metadata"]["name"].endswith(("-playbooks", "-dashboard")):
            each["data"] = "the files"
        if each["kind"] == "PrometheusRule":
            each["spec"] = "the file's"
    found.sort(key=lambda each: (each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]))
    return "".join(f"---\n{yaml.dump(each, sort_keys=True, width=110)}" for each in found)


@pytest.mark.parametrize("combination", WITH_GOLDEN_FILE)
def test_the_rendered_chart_matches_the_golden_file(combination: str) -> None:
    """The file shows every template change in review. WRITE_GOLDEN=1 writes it again."""
    path = GOLDEN / f"{combination}.yaml"
    text = masked(charts.objects(combination))
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_the_notes_say_what_to_do_next(combination: str) -> None:
    """They name the release's own objects, and leave no placeholder."""
    notes = charts.rendered(COMBINATIONS[combination])["trainmedic/templates/NOTES.txt"]
    values = COMBINATIONS[combination]
    assert f"helm test {charts.RELEASE}" in notes
    assert ("alertmanagerConfigMatcherStrategy" in notes) == bool(
        values.get("monitoring", {}).get("alertmanagerConfig", {}).get("enabled")
    )
    assert ("changes nothing" in notes) == ("mode" not in values)
    assert "<no value>" not in notes
    assert "map[" not in notes
    assert "\n\n\n" not in notes
