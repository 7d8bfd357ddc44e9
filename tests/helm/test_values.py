"""Values: wrong ones are refused with a message that names them, and all of them are documented."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import helm_python
import pytest
import yaml

from tests.helm import charts

REFERENCE = charts.ROOT / "docs" / "reference" / "helm-values.md"
SCHEMA = json.loads((charts.CHART / "values.schema.json").read_text())

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown mode": ({"mode": "enforced"}, "'/mode': value must be one of 'observe', 'approve', 'enforce'"),
    "an unknown value": ({"modes": "observe"}, "additional properties 'modes' not allowed"),
    "an unknown value inside": ({"server": {"replica": 2}}, "'/server': additional properties 'replica' not allowed"),
    "a word for a number": ({"server": {"replicas": "two"}}, "'/server/replicas': got string, want integer"),
    "a digest that is none": ({"image": {"digest": "latest"}}, "'/image/digest': 'latest' does not match"),
    "a URL that is none": ({"server": {"alertmanagerUrl": "am:9093"}}, "'/server/alertmanagerUrl': 'am:9093'"),
    "a setting that is none": ({"server": {"settings": {"max_age": "1h"}}}, "invalid propertyName 'max_age'"),
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
    "a shipped playbook's name": (
        {"playbooks": {"extra": {"disk-space-low.yaml": "playbook: mine"}}},
        "playbooks.extra: disk-space-low.yaml is the name of a shipped playbook's file",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_value_is_refused_and_named(case: str) -> None:
    """The message has the path of the value, and what is allowed."""
    values, told = REFUSED[case]
    with pytest.raises(helm_python.HelmError) as caught:
        charts.rendered(values)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "name", ["*", "llm-?", "llm-[12]", "llm\\\\1", "a:b", "a b", "a/b", "LLM", "-a", "a.", "", "a" * 64]
)
def test_a_job_that_could_name_others_or_no_secret_is_refused(name: str) -> None:
    """Its name becomes part of a rule, in which some characters stand for many, and of a Secret's name."""
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


def declared(schema: Any, path: str = "") -> Iterator[str]:
    """The paths that the schema knows; those of free form end where it begins."""
    schema = resolved(schema)
    if schema.get("additionalProperties") is False:
        for name, inner in schema["properties"].items():
            yield from declared(inner, f"{path}.{name}".lstrip("."))
    else:
        yield path


def test_every_value_has_its_schema_and_every_schema_its_value() -> None:
    """values.yaml and values.schema.json name the same."""
    defaults = yaml.safe_load((charts.CHART / "values.yaml").read_text())
    known = set(declared(SCHEMA)) - {"global"}
    # Those that only some clusters need have no default, and stand under one that has.
    optional = {f"{one}.resources.claims" for one in ("server", "redis", "agent")}
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


def test_the_reference_is_made_from_the_values() -> None:
    """docs/reference/helm-values.md has every value with its default and comment. WRITE_GOLDEN=1 writes it anew."""
    page = REFERENCE.read_text()
    before, rest = page.split("| value | default | meaning |", 1)
    after = rest.split("\n\n", 1)[1] if "\n\n" in rest else ""
    wanted = f"{before}{written()}\n" + (f"\n{after}" if after else "")
    if os.environ.get("WRITE_GOLDEN"):
        REFERENCE.write_text(wanted)
    assert REFERENCE.read_text() == wanted
