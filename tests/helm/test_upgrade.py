"""An upgrade keeps what was generated, and does not hand out what somebody else keeps.

Helm runs as in ``helm upgrade`` as far as rendering, and asks the stand-in for what it looks up. What it sends
to a cluster afterwards is server-side apply, which the stand-in does not know.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from tests.helm import charts
from tests.helm.charts import Object
from tests.kubernetes.api_server import ApiServer, Rule


@pytest.fixture
def helm(stand_in: ApiServer) -> Iterator[helm_python.Config]:
    # Without TLS Helm sends no token.
    stand_in.accounts[""] = [Rule("", "secrets", frozenset({"get"}))]
    with helm_python.Config(
        kubeconfig_content=json.dumps(stand_in.kubeconfig()), namespace=charts.NAMESPACE, storage_driver="memory"
    ) as config:
        yield config


def rendered(helm: helm_python.Config, is_upgrade: bool, **values: Any) -> list[Object]:
    files = helm.render(charts.chart(), values, name=charts.RELEASE, namespace=charts.NAMESPACE, is_upgrade=is_upgrade)
    return charts.parsed(files)


def secrets(found: list[Object]) -> dict[str, dict[str, str]]:
    return {each["metadata"]["name"]: charts.secret(each) for each in found if each["kind"] == "Secret"}


def install(server: ApiServer, found: list[Object]) -> None:
    server.objects.create(("v1", "namespaces"), "", {"metadata": {"name": charts.NAMESPACE}}, "helm")
    for each in found:
        if each["kind"] == "Secret":
            server.objects.create(("v1", "secrets"), charts.NAMESPACE, each, "helm")


def test_an_upgrade_keeps_every_generated_secret(stand_in: ApiServer, helm: helm_python.Config) -> None:
    """Tokens, signing key and passwords stay as they are, in the Secrets, in the tokens file and in the jobs' URLs; a
    job that is added gets a Secret of its own."""
    first = rendered(helm, is_upgrade=False, redis={"users": {"jobs": ["llm-1"]}})
    install(stand_in, first)
    after = secrets(rendered(helm, is_upgrade=True, mode="enforce", redis={"users": {"jobs": ["llm-0", "llm-1"]}}))
    added = after.pop("tm-trainmedic-redis-job-llm-0")
    assert after == secrets(first)
    assert added["redis-url"] == f"redis://job-llm-0:{added['password']}@tm-trainmedic-redis.ops.svc:6379/0"


def test_a_new_key_is_added_and_the_others_stay(stand_in: ApiServer, helm: helm_python.Config) -> None:
    """This is for a Secret of an earlier release that lacks a key."""
    first = rendered(helm, is_upgrade=False)
    install(stand_in, first)
    stand_in.objects.patch(
        ("v1", "secrets"), charts.NAMESPACE, "tm-trainmedic-tokens", {"data": {"viewer-token": None}}, "t"
    )
    after = secrets(rendered(helm, is_upgrade=True))["tm-trainmedic-tokens"]
    before = secrets(first)["tm-trainmedic-tokens"]
    assert len(after["viewer-token"]) == 40
    assert {name for name in after if after[name] != before[name]} == {"viewer-token", "tokens.yaml"}


def test_generated_secrets_and_the_history_outlive_an_uninstall() -> None:
    """They are kept for a new install under the same name."""
    kept = [each for each in charts.objects("default") if each["kind"] in ("Secret", "PersistentVolumeClaim")]
    assert len(kept) == 5
    assert all(each["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for each in kept)


def test_another_release_in_the_same_namespace_shares_nothing() -> None:
    """No two objects of the releases have the same name."""

    def names(release: str) -> set[tuple[str, str]]:
        found = charts.parsed(charts.rendered(charts.COMBINATIONS["everything"], name=release))
        return {(each["kind"], each["metadata"]["name"]) for each in found}

    assert not names("one") & names("two")


def test_long_names_are_cut_to_the_limit_of_kubernetes() -> None:
    """A Service's name has 63 characters at most."""
    found = charts.parsed(charts.rendered(charts.COMBINATIONS["everything"], name="a" * 53))
    assert max(len(each["metadata"]["name"]) for each in found if each["kind"] != "ClusterRole") <= 63


IMMUTABLE = Path(__file__).parent / "golden" / "immutable.yaml"


def immutable(found: list[Object]) -> dict[str, Any]:
    """What Kubernetes refuses to change in objects that are there already, by kind and name."""
    fields: dict[str, Any] = {}
    for each in found:
        spec = each.get("spec", {})
        match each["kind"]:
            case "Deployment" | "DaemonSet":
                kept = {"selector": spec["selector"]}
            case "StatefulSet":
                names = ("selector", "serviceName", "volumeClaimTemplates", "podManagementPolicy")
                kept = {name: spec[name] for name in names if name in spec}
            case "PersistentVolumeClaim":
                kept = spec
            case "ClusterRoleBinding" | "RoleBinding":
                kept = {"roleRef": each["roleRef"]}
            case "Secret":
                kept = {"type": each["type"], "immutable": each.get("immutable", False)}
            case "Service":
                kept = {"selector": spec["selector"]}
            case _:
                continue
        place = each["metadata"].get("namespace", "")
        fields[f"{each['kind']} {place}/{each['metadata']['name']}"] = kept
    return fields


def test_an_upgrade_from_the_first_chart_changes_no_immutable_field() -> None:
    """The file has them as the first chart rendered them, for every combination of values of that time. So it is not
    written anew: an object that differs could not be upgraded."""
    before: dict[str, dict[str, Any]] = yaml.safe_load(IMMUTABLE.read_text())
    assert len(before) >= 13
    for combination, fields in before.items():
        now = immutable(charts.objects(combination))
        assert {name: now.get(name) for name in fields} == fields, combination


def test_values_of_an_earlier_chart_are_rejected_with_instructions(tmp_path: Path) -> None:
    """They come from `helm upgrade --reuse-values`, which would lack all new values."""
    earlier = tmp_path / "trainmedic"
    shutil.copytree(charts.CHART, earlier)
    values = yaml.safe_load((earlier / "values.yaml").read_text())
    for name in ("imagePullSecrets", "global"):
        del values[name]
    (earlier / "values.yaml").write_text(yaml.safe_dump(values))
    with (
        helm_python.Chart.load(earlier) as chart,
        pytest.raises(helm_python.HelmError, match="--reset-then-reuse-values"),
    ):
        chart.render({}, name=charts.RELEASE, namespace=charts.NAMESPACE)
