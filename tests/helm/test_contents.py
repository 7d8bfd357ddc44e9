"""What the chart hands to Trainmedic, Redis, Prometheus and Grafana is what each of them takes."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import yaml
from click.testing import CliRunner
from prometheus_client.metrics_core import Metric

from tests.driver.driver import Driver
from tests.helm import charts
from tests.helm.charts import COMBINATIONS
from tests.helm.test_rendering import KUBERNETES, validators
from trainmedic.job.metrics import HELP
from trainmedic.probe.__main__ import parser
from trainmedic_agent import policy
from trainmedic_agent.adapters.nvml_gpus import NvmlGpus
from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.exporter import AgentCollector
from trainmedic_agent.gpu_record import GpuRecord
from trainmedic_agent.settings import agent as agent_settings
from trainmedic_core.command import main
from trainmedic_server import telemetry
from trainmedic_server.actions import registry
from trainmedic_server.actions.kubernetes.jobs import CreateJobParams
from trainmedic_server.auth import tokens
from trainmedic_server.catalog import loader
from trainmedic_server.settings import server as server_settings

with_agent = pytest.mark.parametrize("combination", [name for name in COMBINATIONS if name != "server-only"])


def environment(combination: str, kind: str) -> dict[str, str]:
    container = charts.one(charts.objects(combination), kind)["spec"]["template"]["spec"]["containers"][0]
    values = {
        "TRAINMEDIC_REDIS_URL": "redis://r:6379/0",
        "TRAINMEDIC_DATABASE_URL": "postgresql://p/t",
        "TRAINMEDIC_NODE": "n1",
        "POD_IP": "10.1.2.3",
    }
    found = {one["name"]: one.get("value", values.get(one["name"], "")) for one in container["env"]}
    found = {
        name: re.sub(r"\$\((\w+)\)", lambda name: values.get(name[1], name[0]), value) for name, value in found.items()
    }
    return {
        name: value for name, value in found.items() if name.startswith("TRAINMEDIC_") and not name.endswith("_FILE")
    }


_ROUTES = {
    "gpu-team": ["component:gpu,network"],
    "on-call": ["severity:critical;kind:run_failed,notify", "kind:approval"],
    "log": ["all"],
    "people": ["default"],
}
"""Of the combination ``everything``, as the server says them."""


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_the_servers_variables_are_valid_settings(combination: str) -> None:
    """Each is known, and has a value with which the server starts."""
    given = environment(combination, "Deployment")
    messages = COMBINATIONS[combination].get("server", {}).get("messages", {})
    names = [*messages.get("routes", {}), *messages.get("defaults", [])]
    given |= {"TRAINMEDIC_NOTIFY_URLS": " ".join(f"{name}=json://h" for name in names)} if names else {}
    made = server_settings.load({}, given)
    assert server_settings.misspelt(given) == []
    known = {source.variable for source in server_settings.SOURCES.values()}
    assert given.keys() <= known
    assert (made.host, made.port) == ("0.0.0.0", 8080)
    assert {name: made.routes.described(name) for name in names} == (_ROUTES if names else {})
    assert made.kubernetes == ("in-cluster" if COMBINATIONS[combination].get("kubernetes") else "off")


@with_agent
def test_the_agents_variables_are_valid_settings(combination: str) -> None:
    """Each is known, and has a value with which the agent starts."""
    given = environment(combination, "DaemonSet")
    made = agent_settings.load({}, given)
    assert given.keys() <= {setting.source.variable for setting in agent_settings.SETTINGS.values()}
    assert (made.exporter_host, made.node) == ("0.0.0.0", "n1")


@with_agent
def test_the_agents_policy_is_valid(combination: str) -> None:
    """It allows what the values say, and nothing without them."""
    text = charts.one(charts.objects(combination), "ConfigMap", "-agent-policy")["data"]["policy.yaml"]
    made = policy.parse(text, "policy.yaml")
    asked = COMBINATIONS[combination].get("agent", {})
    power, cleaning = asked.get("powerControl", {}), asked.get("cleaning", {})
    wanted = {name for name, given in (("gpu.power_limit", power), ("disk.clean", cleaning)) if given}
    assert made.allow == wanted
    if power:
        assert made.power.floor_percent == power.get("floorPercent", 50)
    assert (made.logs is not None) == bool(asked.get("logs"))
    assert made.cleaning.rules.keys() == cleaning.get("policy", {}).get("rules", {}).keys()


@pytest.mark.parametrize("combination", [name for name in COMBINATIONS if name != "own-secrets"])
def test_the_tokens_match_the_tokens_file(combination: str) -> None:
    """The server reads the file; each token has exactly its own role."""
    made = charts.secret(charts.one(charts.objects(combination), "Secret", "-tokens"))
    entries = {token.name: token for token in tokens.parse(made["tokens.yaml"], "tokens.yaml")}
    assert entries.keys() == {"webhook", "viewer", "operator"}
    for name, token in entries.items():
        assert token.roles == {name}
        assert token.digest == hashlib.sha256(made[f"{name}-token"].encode()).digest()


def test_all_shipped_playbooks_are_present_and_can_be_loaded(tmp_path: Path) -> None:
    """They are those of the repository, without tests, laid out as Kubernetes mounts a ConfigMap."""
    files = charts.one(charts.objects("everything"), "ConfigMap", "-playbooks")["data"]
    data = tmp_path / "..2026_01_01"
    data.mkdir()
    (tmp_path / "..data").symlink_to(data.name)
    for name, text in files.items():
        (data / name).write_text(text)
        (tmp_path / name).symlink_to(f"..data/{name}")
    shipped = {path.name for path in (charts.ROOT / "playbooks").glob("*.yaml") if not path.stem.endswith("_test")}
    assert files.keys() == {*shipped, "page.yaml"}
    checked = CliRunner().invoke(main, ["playbook", "check", str(tmp_path)])
    assert checked.exit_code == 0, checked.output
    templates = [name for name in files if name.endswith("_template.yaml")]
    assert f"{len(files) - len(templates)} playbooks, no mistake" in checked.output


@pytest.mark.parametrize(
    ("combination", "image"),
    [("everything", "registry.example.com/trainmedic:0.1.0"), ("no-registry", "registry.internal/trainmedic-agent:1")],
)
def test_the_agent_has_its_own_image_only_if_the_values_name_one(combination: str, image: str) -> None:
    """Otherwise agent and log reader use the server's image."""
    containers = charts.one(charts.objects(combination), "DaemonSet")["spec"]["template"]["spec"]["containers"]
    assert {container["image"] for container in containers} == {image}
    assert {container["imagePullPolicy"] for container in containers} == {
        "Never" if combination == "no-registry" else "IfNotPresent"
    }


@pytest.mark.parametrize("combination", ["default", "everything", "no-registry"])
def test_the_health_check_of_a_node_is_the_releases_own(combination: str, tmp_path: Path) -> None:
    """The shipped playbooks run it in the release's namespace, with its image and pull secrets, and the agents'
    runtime; and the server may create it there."""
    found = charts.objects(combination)
    files = charts.one(found, "ConfigMap", "-playbooks")["data"]
    image = charts.one(found, "Deployment")["spec"]["template"]["spec"]["containers"][0]["image"]
    agent = charts.one(found, "DaemonSet")["spec"]["template"]["spec"]
    for name in ("node-down.yaml", "gpu-broken.yaml"):
        made = yaml.safe_load(files[name])["vars"]
        assert made == {
            "namespace": charts.NAMESPACE,
            "image": image,
            "pull_secrets": agent.get("imagePullSecrets", []),
            "runtime_class": agent.get("runtimeClassName", ""),
            "gpus": 1,
            "probe_image": "",
            "probe_least_bandwidth": 1,
        }
    held = charts.rules({"kubernetes": {"actions": ["k8s.create_job"], "namespaces": ["team-a"]}})
    assert {rule.namespace for rule in held if rule.resource == "jobs"} == {"team-a", charts.NAMESPACE}


@pytest.mark.parametrize("combination", ["default", "everything", "no-registry"])
@pytest.mark.parametrize("kubernetes", KUBERNETES, ids=lambda path: path.stem)
def test_the_health_checks_pod_is_valid(combination: str, kubernetes: Path, tmp_path: Path) -> None:
    """Also without a runtime class and pull secrets, and at the restricted Pod Security level. It requests as
    many GPUs as the node had, where its agent has told that."""
    for name, text in charts.one(charts.objects(combination), "ConfigMap", "-playbooks")["data"].items():
        (tmp_path / name).write_text(text)
    (book,) = loader.load_file(tmp_path / "node-down.yaml", registry.specs_only()).playbooks
    step = next(at for at, one in enumerate(book.definition.steps) if one.id == "healthy")
    known = {"gpus_known": 8} if combination == "everything" else {}
    steps = {"had": {"output": known}}
    scope = {"target": {"node": "node-7"}, "vars": book.definition.vars, "steps": steps, "labels": {}, "run": {}}
    made = cast(CreateJobParams, book.params("steps", step, scope)).manifest
    assert made is not None
    pod = made["spec"]["template"]
    assert validators(kubernetes).faults("io.k8s.api.core.v1.PodTemplateSpec", pod) == []
    assert pod["spec"]["nodeName"] == "node-7"
    assert pod["spec"].get("runtimeClassName") == (None if combination == "no-registry" else "nvidia")
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["spec"]["containers"]
    assert container["args"] == ["agent", "health", f"--gpus={8 if known else 1}"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "volumes" not in pod["spec"]


@pytest.mark.parametrize("kubernetes", KUBERNETES, ids=lambda path: path.stem)
@pytest.mark.parametrize("playbook", ["node-down.yaml", "gpu-broken.yaml"])
def test_the_probes_pod_is_valid_and_follows_the_values(playbook: str, kubernetes: Path, tmp_path: Path) -> None:
    """It has the image and bandwidth of the values, on the node itself, without privileges; the program accepts its
    options. Without an image it is not run."""
    values = {"playbooks": {"healthCheck": {"gpus": 8, "probeImage": "registry/torch:1", "probeLeastBandwidth": 100}}}
    found = charts.parsed(charts.rendered(values))
    for name, text in charts.one(found, "ConfigMap", "-playbooks")["data"].items():
        (tmp_path / name).write_text(text)
    (book,) = loader.load_file(tmp_path / playbook, registry.specs_only()).playbooks
    step = next(at for at, one in enumerate(book.definition.steps) if one.id == "probed")
    scope = {"target": {"node": "node-7"}, "vars": book.definition.vars, "steps": {}, "labels": {}, "run": {}}
    assert book.definition.steps[step].when == "vars.probe_image"
    made = cast(CreateJobParams, book.params("steps", step, scope)).manifest
    assert made is not None
    pod = made["spec"]["template"]
    assert validators(kubernetes).faults("io.k8s.api.core.v1.PodTemplateSpec", pod) == []
    assert pod["spec"]["nodeName"] == "node-7"
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["spec"]["containers"]
    assert container["image"] == "registry/torch:1"
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    options = parser().parse_args(container["args"])
    assert (options.backend, options.least_bandwidth, options.even_if_training) == ("nccl", 100, False)


def test_the_shipped_rules_are_accepted_by_prometheus(tmp_path: Path) -> None:
    """promtool reports no error, and every rule file of the repository is included."""
    made = [each for each in charts.objects("everything") if each["kind"] == "PrometheusRule"]
    assert len(made) == len(list((charts.ROOT / "monitoring" / "rules").glob("*.yaml")))
    for each in made:
        path = tmp_path / f"{each['metadata']['name']}.yaml"
        path.write_text(yaml.safe_dump(each["spec"]))
        subprocess.run(["promtool", "check", "rules", path], check=True, capture_output=True)


def test_a_value_changes_the_links_of_the_alerts() -> None:
    """Every alert links to its section of the given page; the default is an absolute URL too."""
    for base in (None, "https://git.example.org/manual/on-call.md"):
        rule = {"enabled": True} | ({"runbookBaseUrl": base} if base else {})
        found = charts.parsed(charts.rendered({"monitoring": {"prometheusRule": rule}}))
        groups = [g for one in found if one["kind"] == "PrometheusRule" for g in one["spec"]["groups"]]
        alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
        assert len(alerts) > 50
        for alert in alerts:
            url = f"{base or 'https://trainmedic.example/docs/on-call.md'}#{alert['alert'].lower()}"
            assert alert["annotations"]["runbook_url"] == url


def test_the_receiver_inhibits_like_the_shipped_configuration() -> None:
    """Each inhibition rule of monitoring/alertmanager.yml is present in the operator's form."""

    def plain(matchers: list[dict[str, str]]) -> list[str]:
        return [f"{one['name']}{one['matchType']}{one['value']}" for one in matchers]

    wanted = yaml.safe_load((charts.ROOT / "monitoring" / "alertmanager.yml").read_text())["inhibit_rules"]
    made = charts.one(charts.objects("everything"), "AlertmanagerConfig")["spec"]["inhibitRules"]
    assert [(plain(one["sourceMatch"]), plain(one["targetMatch"]), one["equal"]) for one in made] == [
        (
            [re.sub(r"[ \"]", "", matcher) for matcher in one["source_matchers"]],
            [re.sub(r"[ \"]", "", matcher) for matcher in one["target_matchers"]],
            one["equal"],
        )
        for one in wanted
    ]


def test_the_receiver_posts_to_the_service_with_the_webhooks_token() -> None:
    """The address is the Service's, and the token is a key of the Secret."""
    found = charts.objects("everything")
    (receiver,) = charts.one(found, "AlertmanagerConfig")["spec"]["receivers"][0]["webhookConfigs"]
    service = charts.one(found, "Service", "trainmedic")
    port = service["spec"]["ports"][0]["port"]
    assert receiver["url"] == f"http://{service['metadata']['name']}.{charts.NAMESPACE}.svc:{port}/webhook"
    credentials = receiver["httpConfig"]["authorization"]["credentials"]
    assert credentials["key"] in charts.one(found, "Secret", credentials["name"])["data"]
    assert receiver["sendResolved"] is True


@pytest.mark.parametrize("file", ["trainmedic.json", "trainmedic-jobs.json"])
def test_a_dashboard_names_only_existing_metrics(
    make_driver: Callable[..., Driver], gpu_record: GpuRecord, file: str
) -> None:
    """The server, the agent or the SDK provides every metric in a panel."""
    make_driver(1)
    gpus = NvmlGpus()
    offered = {
        name
        for collector in (
            telemetry.Metrics().registry,
            AgentCollector(gpus, dict, AgentCounters(), {"node": "n1"}, gpu_record),
        )
        for metric in collector.collect()
        for name in names(metric)
    }
    gpus.close()
    dashboard = json.loads(charts.one(charts.objects("everything"), "ConfigMap", "-dashboard")["data"][file])
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    named = {name for query in queries for name in re.findall(r"\b(?:trainmedic|gpu|gradient|training)_[a-z_]+", query)}
    assert len(queries) > 10
    assert named - {"gpu_id"} <= offered | HELP.keys()


@pytest.mark.parametrize("file", ["dashboards/server.json", "dashboards/jobs.json"])
def test_every_dashboard_panel_is_a_query_that_prometheus_accepts(tmp_path: Path, file: str) -> None:
    """promtool parses each, with Grafana's variables filled in; panels do not overlap."""
    dashboard = json.loads((charts.CHART / "files" / file).read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    filled = [re.sub(r"\$__rate_interval", "5m", re.sub(r"\$(node|playbook|job)\b", ".*", query)) for query in queries]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(filled)]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    subprocess.run(["promtool", "check", "rules", path], check=True, capture_output=True)
    cells = [
        (x, y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def names(metric: Metric) -> list[str]:
    """The names under which a metric's samples are stored."""
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"], "info": ["_info"]}
    return [metric.name + suffix for suffix in suffixes.get(metric.type, [""])]


def test_custom_alert_maps_come_before_the_shipped_ones() -> None:
    """First the values' files, then the user's own ConfigMap, then shipped maps by name; none by
    default."""
    own = "rename: [{alert: HotCard, as: GPUTemperatureHigh}]"
    values = {
        "alertMap": {"extra": {"site.yaml": own}, "existingConfigMap": "team-map", "shipped": ["kube-prometheus"]}
    }
    found = charts.parsed(charts.rendered(values))
    assert charts.one(found, "ConfigMap", "-alert-map")["data"] == {"site.yaml": own}
    pod = charts.one(found, "Deployment")["spec"]["template"]["spec"]
    (server,) = (each for each in pod["containers"] if each["name"] == "server")
    variables = {each["name"]: each.get("value") for each in server["env"]}
    assert variables["TRAINMEDIC_ALERT_MAP"] == ":".join(
        ["/etc/trainmedic/alert-map", "/etc/trainmedic/own-alert-map", "kube-prometheus"]
    )
    mounted = {each["name"]: each["mountPath"] for each in server["volumeMounts"]}
    assert (mounted["alert-map"], mounted["own-alert-map"]) == (
        "/etc/trainmedic/alert-map", "/etc/trainmedic/own-alert-map"
    )  # fmt: skip
    volumes = {each["name"]: each.get("configMap", {}).get("name") for each in pod["volumes"]}
    assert volumes["own-alert-map"] == "team-map"
    plain = charts.one(charts.objects("default"), "Deployment")["spec"]["template"]["spec"]["containers"]
    assert not any(each["name"] == "TRAINMEDIC_ALERT_MAP" for container in plain for each in container["env"])


def test_the_chart_offers_every_shipped_alert_map() -> None:
    """They have the names under which the server finds them."""
    schema = json.loads((charts.ROOT / "helm" / "trainmedic" / "values.schema.json").read_text())
    offered = schema["properties"]["alertMap"]["properties"]["shipped"]["items"]["enum"]
    files = (charts.ROOT / "alert-maps").glob("*.yaml")
    assert set(offered) == {"shipped", *(path.stem for path in files if not path.stem.endswith("_test"))}
