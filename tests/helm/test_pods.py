"""Values that add to the pods, to the way in and to images do what other charts' values of that name do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm import charts
from tests.helm.charts import Object

COMPONENTS = {"server": "Deployment", "agent": "DaemonSet", "redis": "StatefulSet"}
every_component = pytest.mark.parametrize("component", COMPONENTS)


def found(values: charts.Values) -> list[Object]:
    return charts.parsed(charts.rendered(values))


def pod_of(component: str, values: dict[str, Any]) -> Object:
    """The pod of a component with these values of its own."""
    spec: Object = charts.one(found({component: values}), COMPONENTS[component])["spec"]["template"]["spec"]
    return spec


@every_component
def test_a_security_context_is_merged_into_the_charts(component: str) -> None:
    """Named fields change, null removes one, the others stay. A false is a value, and a large user ID stays
    whole."""
    before = pod_of(component, {})
    after = pod_of(
        component,
        {
            "podSecurityContext": {"runAsUser": 1000650000, "fsGroup": None, "supplementalGroups": [5]},
            "securityContext": {"readOnlyRootFilesystem": False, "capabilities": {"add": ["NET_RAW"]}},
        },
    )
    wanted = {**before["securityContext"], "runAsUser": 1000650000, "supplementalGroups": [5]}
    del wanted["fsGroup"]
    assert after["securityContext"] == wanted
    container, own = after["containers"][0]["securityContext"], before["containers"][0]["securityContext"]
    assert container == {
        **own,
        "readOnlyRootFilesystem": False,
        "capabilities": {"drop": ["ALL"], "add": ["NET_RAW"]},
    }


@every_component
def test_a_probe_is_merged_into_the_charts(component: str) -> None:
    """A number changes alone; another probe type replaces the chart's."""
    before = pod_of(component, {})["containers"][0]
    after = pod_of(
        component, {"startupProbe": {"failureThreshold": 9}, "livenessProbe": {"exec": {"command": ["/bin/true"]}}}
    )["containers"][0]
    assert after["startupProbe"] == {**before["startupProbe"], "failureThreshold": 9}
    numbers = {
        name: value for name, value in before["livenessProbe"].items() if name.endswith(("Seconds", "Threshold"))
    }
    assert after["livenessProbe"] == {**numbers, "exec": {"command": ["/bin/true"]}}


def test_a_readiness_probe_can_be_set_where_the_chart_has_none() -> None:
    """The agent serves no client, so it has none by default."""
    assert "readinessProbe" not in pod_of("agent", {})["containers"][0]
    probe = {"tcpSocket": {"port": "metrics"}}
    assert pod_of("agent", {"readinessProbe": probe})["containers"][0]["readinessProbe"] == probe


@every_component
def test_containers_and_volumes_are_added_after_the_charts(component: str) -> None:
    """The chart's container stays first, and only it gets the mounts."""
    more = {"name": "more", "image": "example.org/more:1"}
    first = {"name": "first", "image": "example.org/first:1"}
    volume, mount = {"name": "own", "emptyDir": {}}, {"name": "own", "mountPath": "/own"}
    before = pod_of(component, {})
    after = pod_of(
        component,
        {
            "initContainers": [first],
            "extraContainers": [more],
            "extraVolumes": [volume],
            "extraVolumeMounts": [mount],
        },
    )
    assert after["initContainers"] == [first]
    assert [each["name"] for each in after["containers"]] == [*(each["name"] for each in before["containers"]), "more"]
    assert after["containers"][-1] == more
    assert after["volumes"] == [*before["volumes"], volume]
    assert after["containers"][0]["volumeMounts"] == [*before["containers"][0]["volumeMounts"], mount]


def test_the_log_reader_gets_none_of_the_agents_mounts() -> None:
    """It opens users' files; it shares only the state directory."""
    logs = {"policy": {"roots": ["/data/logs"]}, "hostPaths": ["/data/logs"]}
    more = {"extraVolumes": [{"name": "own", "emptyDir": {}}], "extraContainers": [{"name": "a", "image": "a"}]}
    pod = pod_of("agent", {"logs": logs, "extraVolumeMounts": [{"name": "own", "mountPath": "/own"}], **more})
    agent, reader, added = pod["containers"]
    assert "own" in {each["name"] for each in agent["volumeMounts"]}
    assert "own" not in {each["name"] for each in reader["volumeMounts"]}
    assert (reader["name"], added["name"]) == ("log-reader", "a")


@pytest.mark.parametrize("component", ["server", "agent"])
def test_variables_come_from_whole_secrets_and_configmaps(component: str) -> None:
    """They use Kubernetes' envFrom."""
    sources = [{"secretRef": {"name": "environment"}}, {"prefix": "A_", "configMapRef": {"name": "more"}}]
    assert pod_of(component, {"extraEnvFrom": sources})["containers"][0]["envFrom"] == sources


@every_component
def test_a_custom_account_replaces_the_charts(component: str) -> None:
    """It is named and not created. If only the name differs, it is created with its annotations."""
    given = {"serviceAccount": {"create": False, "name": "mine"}}
    objects = found({component: given, "kubernetes": {"actions": ["k8s.cordon"]}})
    assert pod_of(component, given)["serviceAccountName"] == "mine"
    accounts = {each["metadata"]["name"] for each in objects if each["kind"] == "ServiceAccount"}
    assert accounts == {"tm-trainmedic-server", "tm-trainmedic-agent", "tm-trainmedic-redis"} - {
        f"tm-trainmedic-{component}"
    }
    subjects = [each["subjects"][0]["name"] for each in objects if each["kind"].endswith("Binding")]
    assert set(subjects) == {"mine" if component == "server" else "tm-trainmedic-server"}
    named = found({component: {"serviceAccount": {"name": "mine", "annotations": {"a": "b"}}}})
    assert charts.one(named, "ServiceAccount", "mine")["metadata"]["annotations"] == {"a": "b"}


def test_the_former_name_of_the_accounts_annotations_still_works() -> None:
    """Both count; the new name wins."""
    server = {"serviceAccountAnnotations": {"a": "1", "b": "1"}, "serviceAccount": {"annotations": {"b": "2"}}}
    account = charts.one(found({"server": server}), "ServiceAccount", "-server")
    assert account["metadata"]["annotations"] == {"a": "1", "b": "2"}


def test_redis_is_scheduled_like_the_server() -> None:
    """It uses constraints and a priority class; labels and annotations apply only to its pod."""
    spread = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    redis = {"topologySpreadConstraints": [spread], "priorityClassName": "high", "podLabels": {"a": "b"}}
    made = charts.one(found({"redis": {**redis, "podAnnotations": {"c": "d"}}}), "StatefulSet")
    template = made["spec"]["template"]
    assert template["spec"]["topologySpreadConstraints"] == [spread]
    assert template["spec"]["priorityClassName"] == "high"
    assert template["metadata"]["labels"]["a"] == "b"
    assert template["metadata"]["annotations"]["c"] == "d"
    assert "a" not in made["spec"]["selector"]["matchLabels"]


@every_component
def test_a_network_policy_can_have_further_rules(component: str) -> None:
    """They follow the chart's, for the port of an extra container."""
    rule = {"ports": [{"port": 9121, "protocol": "TCP"}], "from": [{"podSelector": {}}]}
    (first,) = charts.one(found({}), "NetworkPolicy", f"-{component}")["spec"]["ingress"]
    policy = charts.one(
        found({"networkPolicy": {"extraIngress": {component: [rule]}}}), "NetworkPolicy", f"-{component}"
    )
    assert policy["spec"]["ingress"] == [first, rule]


def images(objects: list[Object]) -> set[str]:
    return {
        container["image"]
        for _, pod in charts.pods(objects)
        for container in (*pod["containers"], *pod.get("initContainers", ()))
    }


@pytest.mark.parametrize(
    ("reference", "wanted"),
    [
        ("trainmedic", "mirror.example/a/trainmedic"),
        ("team/trainmedic", "mirror.example/a/team/trainmedic"),
        ("quay.io/team/trainmedic", "mirror.example/a/team/trainmedic"),
        ("registry:5000/trainmedic", "mirror.example/a/trainmedic"),
        ("localhost/trainmedic", "mirror.example/a/trainmedic"),
    ],
)
def test_a_global_registry_replaces_the_one_in_an_image_name(reference: str, wanted: str) -> None:
    """For server, agent, tests, Redis and the node health check; digests stay."""
    digest = f"sha256:{'a' * 64}"
    values = {
        "global": {"imageRegistry": "mirror.example/a"},
        "image": {"repository": reference, "digest": digest},
        "playbooks": {"healthCheck": {"probeImage": "nvcr.io/torch:1"}},
    }
    objects = found(values)
    assert images(objects) == {f"{wanted}@{digest}", "mirror.example/a/valkey/valkey:8.1"}
    book = charts.one(objects, "ConfigMap", "-playbooks")["data"]["node-down.yaml"]
    assert f'  image: "{wanted}@{digest}"' in book
    assert '  probe_image: "mirror.example/a/torch:1"' in book


def test_image_names_stay_unchanged_without_a_global_registry() -> None:
    assert images(found({})) == {"trainmedic:0.1.0", "valkey/valkey:8.1"}


def test_registry_secrets_from_three_places_are_each_named_once() -> None:
    """Every pod has them, also the node health check. A parent chart gives names or mappings."""
    values = {
        "image": {"pullSecrets": [{"name": "a"}]},
        "imagePullSecrets": [{"name": "b"}, {"name": "a"}],
        "global": {"imagePullSecrets": ["c", {"name": "b"}]},
    }
    objects = found(values)
    for pod, spec in charts.pods(objects):
        assert spec["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}, {"name": "c"}], pod
    book = charts.one(objects, "ConfigMap", "-playbooks")["data"]["node-down.yaml"]
    assert '  pull_secrets: [{"name":"a"},{"name":"b"},{"name":"c"}]' in book


def test_the_service_can_have_a_node_port_for_named_networks() -> None:
    """Neither is set by default."""
    service = {"type": "LoadBalancer", "nodePort": 30080, "loadBalancerSourceRanges": ["10.0.0.0/8", "2001:db8::/32"]}
    spec = charts.one(found({"server": {"service": service}}), "Service", "trainmedic")["spec"]
    assert spec["ports"] == [{"name": "http", "port": 8080, "targetPort": "http", "protocol": "TCP", "nodePort": 30080}]
    assert spec["loadBalancerSourceRanges"] == ["10.0.0.0/8", "2001:db8::/32"]
    assert charts.one(found({}), "Service", "trainmedic")["spec"].keys() == {"type", "ports", "selector"}


def test_the_console_can_have_several_names() -> None:
    """Each has a certificate or none; links use the first."""
    hosts = [{"host": "medic.internal", "tlsSecret": "internal"}, {"host": "*.plain.example"}]
    ingress = {"enabled": True, "host": "medic.example.org", "tlsSecret": "public", "extraHosts": hosts}
    objects = found({"server": {"ingress": ingress}})
    spec = charts.one(objects, "Ingress")["spec"]
    assert [rule["host"] for rule in spec["rules"]] == ["medic.example.org", "medic.internal", "*.plain.example"]
    assert spec["tls"] == [
        {"hosts": ["medic.example.org"], "secretName": "public"},
        {"hosts": ["medic.internal"], "secretName": "internal"},
    ]
    server = charts.one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "TRAINMEDIC_EXTERNAL_URL", "value": "https://medic.example.org"} in server["env"]


@pytest.mark.parametrize(
    ("budget", "wanted"),
    [
        ({}, {"maxUnavailable": 1}),
        ({"maxUnavailable": "50%"}, {"maxUnavailable": "50%"}),
        ({"minAvailable": 2}, {"minAvailable": 2}),
        ({"minAvailable": "60%"}, {"minAvailable": "60%"}),
    ],
)
def test_a_disruption_budget_states_how_many_servers_stay(budget: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Or how many may be unavailable: one by default."""
    server = {"replicas": 3, "database": {"existingSecret": "pg"}}
    spec = charts.one(found({"server": server, "podDisruptionBudget": budget}), "PodDisruptionBudget")["spec"]
    del spec["selector"]
    assert spec == wanted


def test_messages_and_slack_are_set_by_values() -> None:
    """They have the form of TRAINMEDIC_MESSAGES, `all` first; an unquoted off of YAML is a boolean."""
    kinds = {
        "run_failed": {"severity": "critical", "channels": ["on-call", "chat"]},
        "all": {"severity": False, "channels": ["chat"]},
        "approval": {"channels": ["chat"]},
    }
    pod = pod_of("server", {"messages": {"kinds": kinds}, "slack": {"existingSecret": "slack"}})
    server = pod["containers"][0]
    environment = {each["name"]: each.get("value") for each in server["env"]}
    wanted = "all=off@chat approval=on@chat run_failed=critical@on-call,chat"
    assert environment["TRAINMEDIC_MESSAGES"] == wanted
    files = [environment[f"TRAINMEDIC_SLACK_{name}"] for name in ("FILE", "BOT_TOKEN_FILE", "APP_TOKEN_FILE")]
    assert files == [f"/etc/trainmedic/slack/{name}" for name in ("slack.yaml", "bot-token", "app-token")]
    assert {"name": "slack", "mountPath": "/etc/trainmedic/slack", "readOnly": True} in server["volumeMounts"]
    assert {"name": "slack", "secret": {"secretName": "slack", "defaultMode": 0o440}} in pod["volumes"]


def test_the_servers_alerts_link_to_the_same_page_as_the_rules() -> None:
    """The same value sets both; its default is no link, so the server gets none."""
    for base, wanted in ((None, None), ("https://git.example.org/on-call.md", "https://git.example.org/on-call.md")):
        rule = {"runbookBaseUrl": base} if base else {}
        server = charts.one(found({"monitoring": {"prometheusRule": rule}}), "Deployment")["spec"]["template"]["spec"]
        environment = {each["name"]: each.get("value") for each in server["containers"][0]["env"]}
        assert environment.get("TRAINMEDIC_RUNBOOK_URL") == wanted


def test_a_server_acts_on_another_cluster_through_a_kubeconfig() -> None:
    """It has no rights and no token in its own cluster."""
    kubernetes = {"actions": ["k8s.drain"], "identity": True, "kubeconfig": {"existingSecret": "other", "key": "c"}}
    objects = found({"kubernetes": kubernetes})
    assert not [
        each for each in objects if each["kind"] in ("ClusterRole", "Role", "ClusterRoleBinding", "RoleBinding")
    ]
    pod = charts.one(objects, "Deployment")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    environment = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    path = environment["TRAINMEDIC_KUBERNETES"]
    (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if path.startswith(each["mountPath"])]
    (volume,) = [each for each in pod["volumes"] if each["name"] == mount["name"]]
    assert volume["secret"]["items"] == [{"key": "c", "path": path.rpartition("/")[2]}]


def test_agents_alone_can_belong_to_a_server_elsewhere() -> None:
    """Of the server only its account for acting here is installed; the agents use its Redis and its key."""
    values: dict[str, Any] = {
        "server": {"enabled": False, "ingress": {"enabled": True, "host": "a.example"}},
        "redis": {"enabled": False, "external": {"existingSecret": "url"}},
        "signing": {"existingSecret": "key"},
        "monitoring": {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}},
        "alertMap": {"extra": {"a.yaml": "rename: []"}},
    }
    plain = sorted(each["kind"] for each in found(values))
    assert plain == ["ConfigMap", "DaemonSet", "NetworkPolicy", "PodMonitor", "ServiceAccount"]
    acting = found({**values, "kubernetes": {"actions": ["k8s.cordon"]}})
    account = charts.one(acting, "ServiceAccount", "-server")["metadata"]["name"]
    (subject,) = charts.one(acting, "ClusterRoleBinding")["subjects"]
    assert (subject["name"], subject["namespace"]) == (account, charts.NAMESPACE)
    notes = charts.rendered(values)["trainmedic/templates/NOTES.txt"]
    assert "The agents of Trainmedic" in notes
    assert "helm test" not in notes
