"""Values: wrong ones are refused with a message that names them, and all of them are documented."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import helm_python
import pytest
import yaml

from tests.helm import charts, value_schemas
from tests.helm.test_rendering import KUBERNETES, validators
from trainmedic_server.settings import server as settings

REFERENCE = charts.CHART / "README.md"
SCHEMA_FILE = charts.CHART / "values.schema.json"
SCHEMA = json.loads(SCHEMA_FILE.read_text())

NO_SERVER = {
    "server": {"enabled": False},
    "redis": {"enabled": False, "external": {"existingSecret": "url"}},
    "signing": {"existingSecret": "key"},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown mode": ({"mode": "enforced"}, "'/mode': value must be one of 'observe', 'approve', 'enforce'"),
    "an unknown value": ({"modes": "observe"}, "additional properties 'modes' not allowed"),
    "an unknown value inside": ({"server": {"replica": 2}}, "'/server': additional properties 'replica' not allowed"),
    "a word for a number": ({"server": {"replicas": "two"}}, "'/server/replicas': got string, want integer"),
    "a digest that is none": ({"image": {"digest": "latest"}}, "'/image/digest': 'latest' does not match"),
    "a URL that is none": ({"server": {"alertmanagerUrl": "am:9093"}}, "'/server/alertmanagerUrl': 'am:9093'"),
    "a setting that is none": (
        {"server": {"settings": {"max_age": "1h"}}},
        "additional properties 'max_age' not allowed",
    ),
    "an interval without unit": (
        {"monitoring": {"podMonitor": {"interval": "15"}}},
        "'/monitoring/podMonitor/interval': '15' does not match",
    ),
    "a relative path": (
        {"agent": {"cleaning": {"hostPaths": ["var/log"]}}},
        "'/agent/cleaning/hostPaths/0': 'var/log'",
    ),
    "a path with dots": ({"agent": {"statePath": "/data/../etc"}}, "'/agent/statePath'"),
    "a floor of nothing": ({"agent": {"powerControl": {"floorPercent": 0}}}, "'/agent/powerControl/floorPercent'"),
    "a playbook that is no file": ({"playbooks": {"extra": {"mine": "x"}}}, "invalid propertyName 'mine'"),
    "several servers on SQLite": (
        {"server": {"replicas": 2}},
        "server.replicas: more than one server needs PostgreSQL",
    ),
    "no Redis": (
        {"redis": {"enabled": False}},
        "redis: either redis.enabled is true, or redis.external.existingSecret",
    ),
    "two Redis": ({"redis": {"external": {"existingSecret": "mine"}}}, "redis.external.existingSecret: is of no use"),
    "a URL of the agents beside our Redis": (
        {"redis": {"external": {"agentKey": "agents"}}},
        "redis.external.agentKey: is of no use",
    ),
    "users in a Redis of another's": (
        {"redis": {"enabled": False, "external": {"existingSecret": "mine"}, "users": {"jobs": ["llm-1"]}}},
        "redis.users: the chart makes users in its own Redis only",
    ),
    "a job whose password nobody makes": (
        {"redis": {"existingSecret": "mine", "users": {"jobs": ["llm-1"]}}},
        "redis.users.jobs: no password is generated where redis.existingSecret is set",
    ),
    "a job twice": (
        {"redis": {"users": {"jobs": ["llm-1", "llm-1"]}}},
        "'/redis/users/jobs': items at 0 and 1 are equal",
    ),
    "a component that there is not": (
        {"server": {"messages": {"routes": {"gpu": [{"component": ["gpus"]}]}}}},
        "'/server/messages/routes/gpu/0/component/0': value must be one of 'gpu', 'network'",
    ),
    "a field that no route has": (
        {"server": {"messages": {"routes": {"gpu": [{"team": ["gpu"]}]}}}},
        "'/server/messages/routes/gpu/0': additional properties 'team' not allowed",
    ),
    "routes twice": (
        {"server": {"settings": {"TRAINMEDIC_MESSAGE_ROUTES": "a=all"}, "messages": {"defaults": ["a"]}}},
        "server.messages.routes: TRAINMEDIC_MESSAGE_ROUTES is set in server.settings",
    ),
    "channels twice": (
        {"server": {"extraEnv": [{"name": "TRAINMEDIC_NOTIFY_URLS"}], "messages": {"existingSecret": "channels"}}},
        "server.messages.existingSecret: TRAINMEDIC_NOTIFY_URLS is set in server.settings or server.extraEnv",
    ),
    "no playbooks": ({"playbooks": {"shipped": False}}, "playbooks: there are none"),
    "a setting of the chart's own": (
        {"server": {"settings": {"TRAINMEDIC_MODE": "enforce"}}},
        "server.settings: TRAINMEDIC_MODE is set by the chart, from the value mode",
    ),
    "a claim beside PostgreSQL": (
        {"server": {"database": {"existingSecret": "pg"}, "persistence": {"existingClaim": "mine"}}},
        "server.persistence.existingClaim: with PostgreSQL",
    ),
    "a root that is not mounted": (
        {"agent": {"cleaning": {"hostPaths": ["/scratch"], "policy": {"rules": {"logs": {"roots": ["/var/log/a"]}}}}}},
        "the rule logs cleans /var/log/a, which lies in none of these directories",
    ),
    "a whole system directory": (
        {"agent": {"cleaning": {"hostPaths": ["/var/lib"], "policy": {"rules": {"a": {"roots": ["/var/lib/a"]}}}}}},
        "agent.cleaning.hostPaths: /var/lib holds more than what is to be cleaned",
    ),
    "paths without rules": (
        {"agent": {"cleaning": {"hostPaths": ["/scratch"]}}},
        "agent.cleaning.policy: has no rules",
    ),
    "logs that are not mounted": (
        {"agent": {"logs": {"policy": {"roots": ["/data/logs"]}, "hostPaths": ["/data/log"]}}},
        "agent.logs.hostPaths: the policy reads /data/logs, which lies in none",
    ),
    "a file of logs that is not mounted": (
        {"agent": {"logs": {"policy": {"files": ["/a/b.log", {"path": "/c/d.log"}]}, "hostPaths": ["/a"]}}},
        "agent.logs.hostPaths: the policy reads /c/d.log",
    ),
    "the kernel's log without its device": (
        {"agent": {"logs": {"policy": {"kernel": True}}}},
        "agent.logs.policy: kernel: true needs agent.logs.kmsg",
    ),
    "mounts for logs that nobody reads": (
        {"agent": {"logs": {"hostPaths": ["/data/logs"]}}},
        "agent.logs.policy: names no logs",
    ),
    "a store's secret for nobody": (
        {"agent": {"logs": {"policy": {"files": ["/a.log"]}, "storeSecret": "loki-push"}}},
        "agent.logs.storeSecret: the agents push no lines",
    ),
    "more than logs": (
        {"agent": {"logs": {"policy": {"files": ["/etc/a.log"]}, "hostPaths": ["/etc"]}}},
        "agent.logs.hostPaths: /etc holds more than logs",
    ),
    "a rule without roots": (
        {"agent": {"cleaning": {"policy": {"rules": {"logs": {"root": ["/scratch"]}}}}}},
        "'/agent/cleaning/policy/rules/logs': missing property 'roots'",
    ),
    "an amount that is none": (
        {"agent": {"resources": {"requests": {"cpu": {"cores": 1}}}}},
        "'/agent/resources/requests/cpu': got object",
    ),
    "a strategy that there is not": (
        {"agent": {"updateStrategy": {"type": "Recreate"}}},
        "'/agent/updateStrategy/type': value must be one of 'RollingUpdate', 'OnDelete'",
    ),
    "a variable of the chart's own": (
        {"server": {"extraEnv": [{"name": "TRAINMEDIC_MODE", "value": "enforce"}]}},
        "server.extraEnv: TRAINMEDIC_MODE is set by the chart, from the value mode",
    ),
    "a label of the chart's own": (
        {"commonLabels": {"app.kubernetes.io/name": "mine"}},
        "commonLabels: app.kubernetes.io/name is set by the chart",
    ),
    "a label twice": (
        {"commonLabels": {"team": "a"}, "agent": {"podLabels": {"team": "b"}}},
        "agent.podLabels: team is in commonLabels already",
    ),
    "a kind without an action": (
        {"kubernetes": {"customKinds": [{"apiGroup": "example.com", "resource": "trainings"}]}},
        "kubernetes.customKinds: no action could use them",
    ),
    "an Ingress without a name": ({"server": {"ingress": {"enabled": True}}}, "server.ingress.host: the name by which"),
    "more Redis than memory": ({"redis": {"maxMemory": "350mb"}}, "redis.maxMemory: 350mb is too near to the memory"),
    "power control without an agent": (
        {"agent": {"enabled": False, "powerControl": {"enabled": True}}},
        "agent.enabled: is false",
    ),
    "a misspelt setting": (
        {"server": {"settings": {"TRAINMEDIC_MAX_AEG": "30m"}}},
        "'/server/settings': additional properties 'TRAINMEDIC_MAX_AEG' not allowed",
    ),
    "a setting's duration without unit": (
        {"server": {"settings": {"TRAINMEDIC_MAX_AGE": "30"}}},
        "'/server/settings/TRAINMEDIC_MAX_AGE': '30' does not match",
    ),
    "a setting's duration in words": (
        {"server": {"settings": {"TRAINMEDIC_RETENTION": "90 days"}}},
        "'/server/settings/TRAINMEDIC_RETENTION': '90 days' does not match",
    ),
    "a setting's number that is too large": (
        {"server": {"settings": {"TRAINMEDIC_BREAKER_SHARE": 20}}},
        "'/server/settings/TRAINMEDIC_BREAKER_SHARE': maximum: got 20, want 1",
    ),
    "a level that there is not": (
        {"agent": {"settings": {"TRAINMEDIC_LOG_LEVEL": "trace"}}},
        "'/agent/settings/TRAINMEDIC_LOG_LEVEL': value must be one of",
    ),
    "a setting of the server given to agents": (
        {"agent": {"settings": {"TRAINMEDIC_MAX_AGE": "30m"}}},
        "'/agent/settings': additional properties 'TRAINMEDIC_MAX_AGE' not allowed",
    ),
    "a setting of the agent given to its reader": (
        {"agent": {"logs": {"readerSettings": {"TRAINMEDIC_NODE": "n1"}}}},
        "'/agent/logs/readerSettings': additional properties 'TRAINMEDIC_NODE' not allowed",
    ),
    "a misspelt variable": (
        {"server": {"extraEnv": [{"name": "TRAINMEDIC_NOTIFY_URL"}]}},
        "'/server/extraEnv/0/name'",
    ),
    "an age without unit in a rule": (
        {"agent": {"cleaning": {"policy": {"rules": {"logs": {"roots": ["/a"], "min_age": "14 days"}}}}}},
        "'/agent/cleaning/policy/rules/logs/min_age': '14 days' does not match",
    ),
    "a misspelt field of a rule": (
        {"agent": {"cleaning": {"policy": {"rules": {"logs": {"roots": ["/a"], "minage": "14d"}}}}}},
        "'/agent/cleaning/policy/rules/logs': additional properties 'minage' not allowed",
    ),
    "a misspelt field of the logs": (
        {"agent": {"logs": {"policy": {"root": ["/a"]}}}},
        "'/agent/logs/policy': additional properties 'root' not allowed",
    ),
    "a misspelt security context": (
        {"server": {"podSecurityContext": {"runAsUsr": 1}}},
        "'/server/podSecurityContext': additional properties 'runAsUsr' not allowed",
    ),
    "a pod's field in a container": (
        {"redis": {"securityContext": {"fsGroup": 1}}},
        "'/redis/securityContext': additional properties 'fsGroup' not allowed",
    ),
    "a misspelt probe": (
        {"agent": {"livenessProbe": {"timeout": 1}}},
        "'/agent/livenessProbe': additional properties 'timeout' not allowed",
    ),
    "a misspelt toleration": (
        {"server": {"tolerations": [{"kye": "gpu"}]}},
        "'/server/tolerations/0': additional properties 'kye' not allowed",
    ),
    "a container without an image": (
        {"agent": {"extraContainers": [{"name": "a"}]}},
        "'/agent/extraContainers/0': missing property 'image'",
    ),
    "a mount without a path": (
        {"redis": {"extraVolumeMounts": [{"name": "a"}]}},
        "'/redis/extraVolumeMounts/0': missing property 'mountPath'",
    ),
    "an account that nobody makes": (
        {"server": {"serviceAccount": {"create": False}}},
        "server.serviceAccount.name: name the account that there is",
    ),
    "a port of nodes that nobody opens": (
        {"server": {"service": {"nodePort": 30080}}},
        "server.service.nodePort: is of no use with the type ClusterIP",
    ),
    "networks without a load balancer": (
        {"server": {"service": {"type": "NodePort", "loadBalancerSourceRanges": ["10.0.0.0/8"]}}},
        "server.service.loadBalancerSourceRanges: is of no use with the type NodePort",
    ),
    "a network that is none": (
        {"server": {"service": {"type": "LoadBalancer", "loadBalancerSourceRanges": ["10.0.0.0"]}}},
        "'/server/service/loadBalancerSourceRanges/0': '10.0.0.0' does not match",
    ),
    "a host name twice": (
        {"server": {"ingress": {"enabled": True, "host": "a.example", "extraHosts": [{"host": "a.example"}]}}},
        "server.ingress.extraHosts: a.example is there twice",
    ),
    "further host names without an Ingress": (
        {"server": {"ingress": {"extraHosts": [{"host": "a.example"}]}}},
        "server.ingress.extraHosts: is of no use without server.ingress.enabled",
    ),
    "a budget that blocks drains": (
        {"server": {"replicas": 2, "database": {"existingSecret": "pg"}}, "podDisruptionBudget": {"minAvailable": 2}},
        "podDisruptionBudget.minAvailable: 2 of 2 servers would block every drain",
    ),
    "a share that blocks drains": (
        {
            "server": {"replicas": 2, "database": {"existingSecret": "pg"}},
            "podDisruptionBudget": {"minAvailable": "51%"},
        },
        "podDisruptionBudget.minAvailable: 51% of 2 servers would block every drain",
    ),
    "two budgets": (
        {"podDisruptionBudget": {"minAvailable": 1, "maxUnavailable": 1}},
        "podDisruptionBudget: a budget has minAvailable or maxUnavailable",
    ),
    "a kind of message that there is not": (
        {"server": {"messages": {"kinds": {"failed": {"severity": "critical"}}}}},
        "'/server/messages/kinds': additional properties 'failed' not allowed",
    ),
    "messages twice": (
        {"server": {"settings": {"TRAINMEDIC_MESSAGES": "all=on"}, "messages": {"kinds": {"all": {"severity": "on"}}}}},
        "server.messages.kinds: TRAINMEDIC_MESSAGES is set in server.settings",
    ),
    "Slack twice": (
        {"server": {"settings": {"TRAINMEDIC_SLACK_FILE": "/a"}, "slack": {"existingSecret": "slack"}}},
        "server.slack.existingSecret: TRAINMEDIC_SLACK_FILE is set in server.settings",
    ),
    "a kubeconfig for nobody": (
        {"kubernetes": {"kubeconfig": {"existingSecret": "other"}}},
        "kubernetes.kubeconfig: nothing uses it",
    ),
    "nothing to install": ({**NO_SERVER, "agent": {"enabled": False}}, "server.enabled: is false, and so is agent"),
    "agents with a Redis of their own": (
        {"server": {"enabled": False}},
        "server.enabled: is false, so agents need the Redis of their server",
    ),
    "agents with a key of their own": (
        {**NO_SERVER, "signing": {}},
        "signing.existingSecret: without a server (server.enabled) name a Secret with the signing-key",
    ),
    "a receiver without a server": (
        {**NO_SERVER, "monitoring": {"alertmanagerConfig": {"enabled": True}}},
        "monitoring.alertmanagerConfig: its receiver is the server of this release",
    ),
    "a kubeconfig without a server": (
        {**NO_SERVER, "kubernetes": {"identity": True, "kubeconfig": {"existingSecret": "other"}}},
        "kubernetes.kubeconfig: is for the server of this release",
    ),
    "a shipped playbook's name": (
        {"playbooks": {"extra": {"disk-space-low.yaml": "playbook: mine"}}},
        "playbooks.extra: disk-space-low.yaml is the name of a shipped playbook's file",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_invalid_value_is_rejected_by_name(case: str) -> None:
    """The message has the value's path and the allowed values."""
    values, told = REFUSED[case]
    with pytest.raises(helm_python.HelmError) as caught:
        charts.rendered(values)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "name", ["*", "llm-?", "llm-[12]", "llm\\\\1", "a:b", "a b", "a/b", "LLM", "-a", "a.", "", "a" * 64]
)
def test_a_job_that_could_match_others_or_no_secret_is_rejected(name: str) -> None:
    """Its name becomes part of a rule, in which some characters are wildcards, and of a Secret's name."""
    with pytest.raises(helm_python.HelmError, match=r"'/redis/users/jobs/0': .* does not match pattern"):
        charts.rendered({"redis": {"users": {"jobs": [name]}}})


def leaves(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}".lstrip("."))
    else:
        yield path


def resolved(schema: Any) -> Any:
    while "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    return schema


def declared(schema: Any, default: Any, path: str = "") -> Iterator[str]:
    """The paths that the schema knows; those of an object that is Kubernetes' or empty end where it begins."""
    schema = resolved(schema)
    if schema.get("additionalProperties") is False and default:
        for name, inner in schema["properties"].items():
            yield from declared(inner, default.get(name), f"{path}.{name}".lstrip("."))
    else:
        yield path


def test_values_and_schemas_match() -> None:
    """values.yaml and values.schema.json name the same values."""
    defaults = yaml.safe_load((charts.CHART / "values.yaml").read_text())
    known = set(declared(SCHEMA, defaults))
    # Those that only some clusters need have no default, and stand under one that has.
    optional = {f"{one}.resources.claims" for one in ("server", "redis", "agent", "agent.logs")}
    given = set(leaves(defaults))
    free = {path for path in given for one in known if path.startswith(f"{one}.")}
    assert known - optional == {path for path in given if path not in free} | {
        one for one in known for path in free if path.startswith(f"{one}.")
    }


def described() -> list[tuple[str, str, str]]:
    """Path, default and comment of each value in values.yaml, where the comment is nearest."""
    found: list[tuple[str, str, str]] = []
    parents: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in (charts.CHART / "values.yaml").read_text().splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.lstrip("# "))
        elif not stripped:
            comment = []
        elif match := re.fullmatch(r"( *)([A-Za-z]+):(?: (.*))?", line):
            depth, name, value = len(match[1]), match[2], match[3]
            parents = [one for one in parents if one[0] < depth]
            path = ".".join([*(one for _, one in parents), name])
            if value is None:
                parents.append((depth, name))
                value = ""
            found.append((path, value, " ".join(comment)))
            comment = []
    return found


def written() -> str:
    """The reference's table."""
    lines = ["| value | default | meaning |", "|---|---|---|"]
    for path, default, comment in described():
        if default or comment:
            shown = f"`{default}`" if default else ""
            lines.append(f"| `{path}` | {shown} | {comment} |".replace("  ", " "))
    return "\n".join(lines)


def test_the_readme_is_generated_from_the_values() -> None:
    """The chart's README has every value with its default and comment. WRITE_GOLDEN=1 writes it again."""
    page = REFERENCE.read_text()
    before, rest = page.split("| value | default | meaning |", 1)
    after = rest.split("\n\n", 1)[1] if "\n\n" in rest else ""
    wanted = f"{before}{written()}\n" + (f"\n{after}" if after else "")
    if os.environ.get("WRITE_GOLDEN"):
        REFERENCE.write_text(wanted)
    assert REFERENCE.read_text() == wanted


def test_the_schema_matches_the_code() -> None:
    """The definitions of settings, of the policy and of messages are those that the code gives. WRITE_GOLDEN=1 writes
    them anew; they stand first."""
    text = SCHEMA_FILE.read_text()
    generated = value_schemas.definitions()
    if os.environ.get("WRITE_GOLDEN"):
        start = '  "definitions": {\n'
        before, rest = text.split(start)
        by_hand = rest[rest.index('\n    "name": {"type": "string"') + 1 :]
        text = before + start + value_schemas.written() + by_hand
        SCHEMA_FILE.write_text(text)
    assert {name: json.loads(text)["definitions"][name] for name in generated} == generated


@pytest.mark.parametrize(
    ("definition", "kind"),
    [
        ("podSecurityContext", "PodSecurityContext"),
        ("securityContext", "SecurityContext"),
        ("probe", "Probe"),
        ("toleration", "Toleration"),
        ("spread", "TopologySpreadConstraint"),
        ("affinity", "Affinity"),
        ("envFrom", "EnvFromSource"),
        ("mounts", "VolumeMount"),
    ],
)
def test_the_schema_knows_the_fields_of_the_newest_kubernetes(definition: str, kind: str) -> None:
    """None is missing, and none is invented."""
    schema = SCHEMA["definitions"][definition]
    names = schema.get("items", schema)["properties"]
    assert set(names) == validators(KUBERNETES[-1]).fields(f"io.k8s.api.core.v1.{kind}")


def test_every_setting_and_duration_that_the_server_takes_is_accepted() -> None:
    """The schema is as lenient as the server: integers as text, capitals, and durations in several units."""
    given = {
        "TRAINMEDIC_MAX_AGE": "1h30m",
        "TRAINMEDIC_RETENTION": "1y2w",
        "TRAINMEDIC_QUEUE": "500",
        "TRAINMEDIC_BREAKER_SHARE": 1,
        "TRAINMEDIC_LOG_LEVEL": "DEBUG",
        "TRAINMEDIC_LOG_FORMAT": "text",
        "TRAINMEDIC_KUBERNETES_WATCH": False,
        "TRAINMEDIC_ARCHIVE": "",
        "TRAINMEDIC_HTTP_TICKETS_FILE": "/etc/tickets/token",
        "TRAINMEDIC_MAX_BODY_BYTES": 16777216,
    }
    server = charts.one(charts.parsed(charts.rendered({"server": {"settings": given}})), "Deployment")
    environment = {
        each["name"]: each.get("value") for each in server["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert environment["TRAINMEDIC_MAX_BODY_BYTES"] == "16777216", "a large number of a file has no exponent"
    settings.load({}, {name: str(environment[name]) for name in given})


def test_the_chart_has_the_consoles_icon() -> None:
    """It is embedded in the chart: no website hosts it."""
    icon = charts.chart().metadata["icon"].removeprefix("data:image/svg+xml;base64,")
    console = charts.ROOT / "app" / "trainmedic_server" / "console" / "static" / "icon.svg"
    assert base64.b64decode(icon) == console.read_bytes()
