"""The chart as real Helm renders it, and the combinations of values that it is rendered with.

Here: rendering, what came out as objects, and reading permissions out of them. Not here: what has to
hold of them. Used by the tests of this folder, and by those of the actions on Kubernetes, which work by the
permissions that the chart gives.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import helm_python
import yaml

from tests.kubernetes.api_server import Rule

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "trainmedic"
RELEASE, NAMESPACE = "tm", "ops"
Object = dict[str, Any]
Values = Mapping[str, Any]

# The chart's playbooks and rules are links to those of the repository, which Helm would tell each time.
helm_python.disable_logging()

PERMISSIONS: dict[str, Any] = yaml.safe_load((CHART / "files" / "permissions.yaml").read_text())
ACTIONS = sorted(PERMISSIONS.keys() - {"identity", "pod_events"})

_CLEANING = {
    "rules": {
        "old-logs": {
            "roots": ["/var/log/training"],
            "globs": ["**/*.log"],
            "min_age": "14d",
        },
        "old-checkpoints": {
            "roots": ["/scratch/checkpoints"],
            "globs": ["*/step-*"],
            "kind": "checkpoints",
            "min_age": "7d",
            "keep_newest": 3,
        },
    }
}
_SHIP = {"url": "https://loki.example.org", "token_file": "/etc/trainmedic/log-store/token"}
_LOGS = {"roots": ["/data/logs"], "files": ["/var/log/dcgm/{node}.log"], "pods": ["team-*"]}
_PLAYBOOK = """playbook: page
on: {alert: Trial}
target: cluster
steps:
  - {action: notify, with: {message: hello}}
"""
_MONITORING = {
    "prometheusRule": {"enabled": True, "labels": {"release": "kps"}},
    "serviceMonitor": {"enabled": True, "labels": {"release": "kps"}},
    "podMonitor": {"enabled": True, "labels": {"release": "kps"}},
    "jobPodMonitor": {"enabled": True, "labels": {"release": "kps"}, "namespaces": ["team-a", "team-b"]},
    "alertmanagerConfig": {
        "enabled": True,
        "matchers": [{"name": "severity", "matchType": "=~", "value": "warning|critical"}],
    },
    "dashboard": {"enabled": True, "annotations": {"k8s-sidecar-target-directory": "Training"}},
}

COMBINATIONS: Mapping[str, Values] = {
    "default": {},
    "everything": {
        "mode": "enforce",
        "commonLabels": {"team": "training"},
        "image": {"repository": "registry.example.com/trainmedic", "pullSecrets": [{"name": "registry"}]},
        "server": {
            "settings": {"TRAINMEDIC_MAX_AGE": "30m", "TRAINMEDIC_BREAKER_SHARE": 0.2},
            "extraEnv": [
                {
                    "name": "TRAINMEDIC_NOTIFY_URLS",
                    "valueFrom": {"secretKeyRef": {"name": "notify", "key": "urls"}},
                }
            ],
            "extraVolumes": [{"name": "inventory", "configMap": {"name": "inventory"}}],
            "extraVolumeMounts": [{"name": "inventory", "mountPath": "/etc/trainmedic/inventory", "readOnly": True}],
            "prometheusUrl": "http://prometheus-operated.monitoring.svc:9090",
            "events": {
                "url": "https://siem.example.org/in",
                "kinds": ["closed", "undo_done"],
                "existingSecret": "siem",
            },
            "grafana": {"url": "http://grafana.monitoring.svc", "existingSecret": "grafana", "key": "writer"},
            "logStore": "loki+http://loki-gateway.logs?tenant=training",
            "messages": {
                "routes": {
                    "gpu-team": [{"component": ["gpu", "network"]}],
                    "on-call": [{"severity": ["critical"], "kind": ["run_failed", "notify"]}, {"kind": ["approval"]}],
                    "log": [{}],
                },
                "defaults": ["people"],
            },
            "alertmanagerUrl": "http://alertmanager-operated.monitoring.svc:9093",
            "persistence": {"storageClass": "ssd", "size": "20Gi"},
            "service": {"type": "LoadBalancer", "annotations": {"example.com/internal": "true"}},
            "ingress": {
                "enabled": True,
                "className": "nginx",
                "host": "trainmedic.example.org",
                "tlsSecret": "trainmedic-tls",
                "annotations": {"cert-manager.io/cluster-issuer": "letsencrypt"},
            },
            "nodeSelector": {"node-role.kubernetes.io/infra": ""},
            "tolerations": [{"key": "infra", "operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
            "priorityClassName": "system-cluster-critical",
            "podLabels": {"cost": "ops"},
            "podAnnotations": {"example.com/note": "one"},
            "serviceAccountAnnotations": {"example.com/role": "trainmedic"},
        },
        "signing": {"previousSecret": "signing-before"},
        "redis": {
            "persistence": {"storageClass": "ssd"},
            "nodeSelector": {"disk": "ssd"},
            "users": {"jobs": ["llm-1", "llm-2"]},
        },
        "agent": {
            "powerControl": {"enabled": True, "floorPercent": 60, "maxLease": "10m"},
            "cleaning": {"hostPaths": ["/var/log/training", "/scratch"], "hostPID": True, "policy": _CLEANING},
            "logs": {
                "policy": {**_LOGS, "kernel": "/var/log/kern.log"},
                "hostPaths": ["/data/logs", "/var/log", "/scratch"],
            },
            "settings": {"TRAINMEDIC_LOG_LEVEL": "debug"},
            "priorityClassName": "system-node-critical",
            "podAnnotations": {"example.com/note": "two"},
        },
        "kubernetes": {
            "actions": ACTIONS,
            "identity": True,
            "customKinds": [{"apiGroup": "example.com", "resource": "trainings"}],
        },
        "playbooks": {
            "extra": {"page.yaml": _PLAYBOOK},
            "existingConfigMap": "team-playbooks",
        },
        "monitoring": _MONITORING,
        "networkPolicy": {
            "serverFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
            "exporterFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        },
    },
    "postgresql": {
        "server": {
            "replicas": 3,
            "database": {"existingSecret": "trainmedic-database"},
            "messages": {"existingSecret": "trainmedic-channels"},
        },
        "redis": {"enabled": False, "external": {"existingSecret": "trainmedic-redis-url", "agentKey": "agent-url"}},
    },
    "own-secrets": {
        "auth": {"existingSecret": "tokens"},
        "signing": {"existingSecret": "signing"},
        "redis": {"existingSecret": "redis", "users": {"existingSecret": "redis-users", "jobs": ["llm-1"]}},
        "monitoring": {"alertmanagerConfig": {"enabled": True, "inhibitRules": False}},
    },
    "power-control": {"mode": "enforce", "agent": {"powerControl": {"enabled": True}}},
    "cleaning": {
        "mode": "enforce",
        "agent": {"cleaning": {"hostPaths": ["/var/log/training", "/scratch"], "policy": _CLEANING}},
    },
    "logs": {
        "agent": {
            "logs": {
                "policy": {**_LOGS, "ship": _SHIP},
                "hostPaths": ["/data/logs", "/var/log/dcgm"],
                "storeSecret": "loki-push",
            }
        }
    },
    "kernel-log": {"agent": {"logs": {"policy": {"kernel": True}, "kmsg": True}}},
    "identity": {"agent": {"seePods": True}, "kubernetes": {"identity": True}},
    "nodes-only": {"mode": "approve", "kubernetes": {"actions": ["k8s.cordon", "k8s.uncordon", "k8s.drain"]}},
    "workloads-of-two-namespaces": {
        "kubernetes": {
            "actions": ["k8s.delete_pod", "k8s.suspend", "k8s.resume", "k8s.cordon"],
            "namespaces": ["team-a", "team-b"],
            "customKinds": [{"apiGroup": "example.com", "resource": "trainings"}],
        }
    },
    "server-only": {
        "agent": {"enabled": False},
        "monitoring": {"podMonitor": {"enabled": True}},
        "server": {"persistence": {"enabled": False}},
        "redis": {"persistence": {"enabled": False}},
        "networkPolicy": {"enabled": False},
        "playbooks": {"shipped": False, "existingConfigMap": "team-playbooks"},
    },
    "no-registry": {
        "fullnameOverride": "medic",
        "image": {"repository": "registry.internal/trainmedic", "digest": f"sha256:{'a' * 64}", "pullPolicy": "Never"},
        "redis": {"image": {"repository": "registry.internal/valkey", "digest": f"sha256:{'b' * 64}"}},
        "server": {"persistence": {"existingClaim": "kept"}},
        "agent": {
            "image": {"repository": "registry.internal/trainmedic-agent", "tag": "1"},
            "runtimeClassName": "",
            "nodeSelector": {"gpu": "yes"},
        },
    },
}


@functools.cache
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def rendered(values: Values, name: str = RELEASE, **more: Any) -> dict[str, str]:
    """What each template became."""
    return chart().render(dict(values), name=name, namespace=NAMESPACE, **more)


def parsed(files: Mapping[str, str]) -> list[Object]:
    """The objects in rendered templates, the notes left out."""
    return [
        found
        for path, text in sorted(files.items())
        if not path.endswith(".txt")
        for found in yaml.load_all(text, yaml.CSafeLoader)
        if found is not None
    ]


@functools.cache
def _combination(name: str) -> str:
    return json.dumps(parsed(rendered(COMBINATIONS[name])))


def objects(combination: str) -> list[Object]:
    """The objects of one of `COMBINATIONS`."""
    found: list[Object] = json.loads(_combination(combination))
    return found


def one(found: Sequence[Object], kind: str, ends: str = "") -> Object:
    """The object of that kind whose name ends so."""
    (only,) = [each for each in found if each["kind"] == kind and each["metadata"]["name"].endswith(ends)]
    return only


def pods(found: Sequence[Object]) -> Iterator[tuple[str, Object]]:
    """Each pod or pod template, by kind and name."""
    for each in found:
        spec = each["spec"] if each["kind"] == "Pod" else (each.get("spec") or {}).get("template", {}).get("spec")
        if spec:
            yield f"{each['kind']}/{each['metadata']['name']}", spec


def secret(found: Object) -> dict[str, str]:
    """The values of a Secret."""
    return {key: base64.b64decode(value).decode() for key, value in found["data"].items()}


def rules(values: Values) -> list[Rule]:
    """What the server's account may do with these values."""
    return [
        Rule(group, resource, frozenset(rule["verbs"]), each["metadata"].get("namespace"))
        for each in parsed(rendered(values))
        if each["kind"] in ("Role", "ClusterRole")
        for rule in each["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    ]


@functools.cache
def rules_of(action: str) -> Sequence[Rule]:
    """What the server's account may do where this action alone is enabled."""
    return tuple(rules({"kubernetes": {"actions": [action]}}))
