"""What the stand-in for the Kubernetes API server keeps: objects, versions, who manages which field.

Without HTTP; `api_server` puts that in front. What is modelled is what clients see: resourceVersion
and its conflicts, merge patches, uid preconditions, a pod's graceful end, PodDisruptionBudgets
counted at once, a namespace's end with all that is in it, and a log of changes for watches. What is let in
and what is refused stands in `cluster_rules`.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.kubernetes.cluster_rules import (
    BUDGETS,
    CUSTOM_KINDS,
    PODS,
    Object,
    Place,
    Refused,
    admit,
    check_eviction,
    check_kind,
    check_status,
    counted,
    defined,
)

KINDS: dict[Place, tuple[str, bool]] = {
    CUSTOM_KINDS: ("CustomResourceDefinition", False),
    ("v1", "namespaces"): ("Namespace", False),
    ("v1", "nodes"): ("Node", False),
    ("v1", "pods"): ("Pod", True),
    ("v1", "events"): ("Event", True),
    ("v1", "configmaps"): ("ConfigMap", True),
    ("v1", "secrets"): ("Secret", True),
    ("v1", "serviceaccounts"): ("ServiceAccount", True),
    ("apps/v1", "deployments"): ("Deployment", True),
    ("apps/v1", "statefulsets"): ("StatefulSet", True),
    ("apps/v1", "daemonsets"): ("DaemonSet", True),
    ("apps/v1", "replicasets"): ("ReplicaSet", True),
    ("batch/v1", "jobs"): ("Job", True),
    ("policy/v1", "poddisruptionbudgets"): ("PodDisruptionBudget", True),
    ("kubeflow.org/v1", "pytorchjobs"): ("PyTorchJob", True),
    ("kubeflow.org/v1", "mpijobs"): ("MPIJob", True),
    ("kubeflow.org/v1", "tfjobs"): ("TFJob", True),
    ("kubeflow.org/v1", "xgboostjobs"): ("XGBoostJob", True),
    ("kubeflow.org/v1", "paddlejobs"): ("PaddleJob", True),
    ("kubeflow.org/v1", "jaxjobs"): ("JAXJob", True),
    ("jobset.x-k8s.io/v1alpha2", "jobsets"): ("JobSet", True),
    ("trainer.kubeflow.org/v1alpha1", "trainjobs"): ("TrainJob", True),
    ("ray.io/v1", "rayjobs"): ("RayJob", True),
    ("ray.io/v1", "rayclusters"): ("RayCluster", True),
    ("example.com/v1", "trainings"): ("Training", True),
}
"""Kind and whether it is in a namespace. Those after PodDisruptionBudget stand for custom kinds; a
CustomResourceDefinition makes another."""


def _discovery() -> dict[str, Object]:
    """What the API server tells of its kinds, by path."""
    told: dict[str, Object] = {"/api": {"kind": "APIVersions", "versions": ["v1"]}}
    groups: dict[str, Object] = {}
    for (api, plural), (kind, is_namespaced) in KINDS.items():
        path = f"/api/{api}" if "/" not in api else f"/apis/{api}"
        listed = told.setdefault(path, {"kind": "APIResourceList", "groupVersion": api, "resources": []})
        verbs = ["create", "delete", "get", "list", "patch", "watch"]
        listed["resources"].append({"name": plural, "kind": kind, "namespaced": is_namespaced, "verbs": verbs})
        if "/" in api:
            group, _, version = api.partition("/")
            served = {"groupVersion": api, "version": version}
            groups[group] = {"name": group, "versions": [served], "preferredVersion": served}
    return {**told, "/apis": {"kind": "APIGroupList", "groups": list(groups.values())}}


DISCOVERY = _discovery()


@dataclass(frozen=True)
class Change:
    """One entry of the log that watches read."""

    version: int
    type: str
    place: Place
    object: Object


@dataclass
class Objects:
    """All objects of one cluster. Not for several threads."""

    now: Callable[[], datetime] = field(default=lambda: datetime.now(UTC))
    version: int = 1000
    oldest: int = 1000
    """Watches and continuations from before it are too old."""
    log: list[Change] = field(default_factory=list)
    kinds: dict[Place, tuple[str, bool]] = field(default_factory=lambda: dict(KINDS))
    _kept: dict[Place, dict[tuple[str, str], Object]] = field(default_factory=dict)

    def get(self, place: Place, namespace: str, name: str) -> Object:
        found = self._kept.get(place, {}).get((namespace, name))
        if found is None:
            raise Refused(404, "NotFound", f'{place[1]} "{name}" not found')
        return copy.deepcopy(found)

    def list(self, place: Place, namespace: str | None) -> list[Object]:
        kept = self._kept.get(place, {})
        return [copy.deepcopy(found) for key, found in sorted(kept.items()) if namespace is None or key[0] == namespace]

    def create(self, place: Place, namespace: str, body: Object, manager: str) -> Object:
        kind, _ = self.kinds[place]
        body = copy.deepcopy(body)
        if body.get("kind", kind) != kind or body.get("apiVersion", place[0]) != place[0]:
            raise Refused(400, "BadRequest", f"the body is not a {kind} of {place[0]}")
        metadata = body.setdefault("metadata", {})
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
        if not metadata.get("name"):
            raise Refused(422, "Invalid", "metadata.name: Required value: name or generateName is required")
        key = (namespace, metadata["name"])
        if key in self._kept.get(place, {}):
            raise Refused(409, "AlreadyExists", f'{place[1]} "{key[1]}" already exists')
        check_kind(place, body)
        body |= {"apiVersion": place[0], "kind": kind}
        # What admission adds is nobody's, and an object of whose fields none was set is not kept track of later.
        managed = _managed([], manager, dict(_leaves({}, body)))
        admit(place, namespace, body, self._exists)
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": written(self.now()), "generation": 1}
        if namespace:
            metadata["namespace"] = namespace
        if managed:
            metadata["managedFields"] = managed
        if place == CUSTOM_KINDS:
            self.kinds |= defined(body)
            body["status"] = {"conditions": [{"type": "Established", "status": "True"}]}
        self._put(place, key, body, "ADDED")
        return copy.deepcopy(body)

    def patch(self, place: Place, namespace: str, name: str, change: Object, manager: str) -> Object:
        """A merge patch (RFC 7386). One that changes nothing makes no new version."""
        before = self.get(place, namespace, name)
        asked = change.get("metadata", {}).get("resourceVersion")
        if asked is not None and asked != before["metadata"]["resourceVersion"]:
            raise Refused(
                409,
                "Conflict",
                f'Operation cannot be fulfilled on {place[1]} "{name}": the object has been modified; please apply '
                "your changes to the latest version and try again",
            )
        after = merged(before, change)
        for fixed in ("uid", "creationTimestamp", "resourceVersion", "managedFields", "name", "namespace"):
            if fixed in before["metadata"]:
                after["metadata"][fixed] = before["metadata"][fixed]
        if after == before:
            return before
        check_status(place, before, after)
        if after.get("spec") != before.get("spec"):
            after["metadata"]["generation"] = before["metadata"].get("generation", 0) + 1
        changed = dict(_leaves(before, after))
        if "managedFields" in before["metadata"]:
            after["metadata"]["managedFields"] = _managed(before["metadata"]["managedFields"], manager, changed)
        self._put(place, (namespace, name), after, "MODIFIED")
        return copy.deepcopy(after)

    def delete(self, place: Place, namespace: str, name: str, options: Object) -> Object:
        """A pod on a node keeps its name until its kubelet has ended it, unless the grace is 0."""
        found = self.get(place, namespace, name)
        uid = (options.get("preconditions") or {}).get("uid")
        if uid and uid != found["metadata"]["uid"]:
            raise Refused(409, "Conflict", f'{place[1]} "{name}": the UID in the precondition does not match')
        grace = options.get("gracePeriodSeconds")
        if grace is None:
            grace = found.get("spec", {}).get("terminationGracePeriodSeconds", 30) if place[1] == "pods" else 0
        is_running = found.get("status", {}).get("phase") not in ("Succeeded", "Failed")
        if place[1] == "pods" and found.get("spec", {}).get("nodeName") and grace > 0 and is_running:
            if "deletionTimestamp" not in found["metadata"]:
                found["metadata"] |= {
                    "deletionTimestamp": written(self.now()),
                    "deletionGracePeriodSeconds": grace,
                }
                self._put(place, (namespace, name), found, "MODIFIED")
            return found
        self._remove(place, namespace, name)
        if place == ("v1", "namespaces"):
            for other, kept in self._kept.items():
                for key in [key for key in kept if key[0] == name]:
                    self._remove(other, *key)
        return found

    def evict(self, namespace: str, name: str, options: Object) -> None:
        check_eviction(self.get(PODS, namespace, name), self.list(BUDGETS, namespace))
        self.delete(PODS, namespace, name, options)

    def since(self, place: Place, version: int) -> list[Change]:
        return [change for change in self.log if change.version > version and change.place == place]

    def forget_the_past(self) -> None:
        """As after a compaction: what was read before can neither be watched on nor continued."""
        self.log.clear()
        self.version += 1
        self.oldest = self.version

    def _exists(self, place: Place, namespace: str, name: str) -> bool:
        is_default = (place, name) == (("v1", "namespaces"), "default")  # which every cluster has
        return is_default or (namespace, name) in self._kept.get(place, {})

    def _remove(self, place: Place, namespace: str, name: str) -> None:
        found = self._kept[place].pop((namespace, name))
        self.version += 1
        found["metadata"]["resourceVersion"] = str(self.version)
        self.log.append(Change(self.version, "DELETED", place, copy.deepcopy(found)))
        self._count(place, namespace)

    def _put(self, place: Place, key: tuple[str, str], body: Object, type_: str) -> None:
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self._kept.setdefault(place, {})[key] = copy.deepcopy(body)
        self.log.append(Change(self.version, type_, place, copy.deepcopy(body)))
        self._count(place, key[0])

    def _count(self, place: Place, namespace: str) -> None:
        """After a change of pods or budgets: the budgets' statuses."""
        if place not in (PODS, BUDGETS):
            return
        for key, budget in self._kept.get(BUDGETS, {}).items():
            status = counted(budget, self.list(PODS, namespace))
            if key[0] == namespace and budget.get("status") != status:
                self._put(BUDGETS, key, {**copy.deepcopy(budget), "status": status}, "MODIFIED")


def merged(base: Any, change: Any) -> Any:
    """`change` applied to `base` as RFC 7386 says."""
    if not isinstance(change, Mapping):
        return copy.deepcopy(change)
    result = copy.deepcopy(base) if isinstance(base, dict) else {}
    for name, value in change.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def written(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _leaves(before: Any, after: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], None]]:
    """The paths at which `after` differs from `before`; lists count as one value."""
    if isinstance(after, Mapping) and (isinstance(before, Mapping) or not before):
        for name in {*after, *(before or {})}:
            if path == ("metadata",) and name in ("managedFields", "resourceVersion", "generation", "uid"):
                continue
            yield from _leaves((before or {}).get(name), after.get(name), (*path, name))
    elif before != after and path:
        yield path, None


def _managed(entries: list[Object], manager: str, changed: Mapping[tuple[str, ...], None]) -> list[Object]:
    """Who has set which field last: one entry a manager, as ``fieldsV1`` writes it."""
    owners: dict[str, dict[str, Any]] = {entry["manager"]: copy.deepcopy(entry["fieldsV1"]) for entry in entries}
    for path in changed:
        for tree in owners.values():
            _disown(tree, path)
        branch = owners.setdefault(manager, {})
        for part in path:
            branch = branch.setdefault(f"f:{part}", {})
    return [
        {"manager": name, "operation": "Update", "fieldsType": "FieldsV1", "fieldsV1": tree}
        for name, tree in owners.items()
        if tree
    ]


def _disown(tree: dict[str, Any], path: tuple[str, ...]) -> None:
    head = f"f:{path[0]}"
    if head not in tree:
        return
    if len(path) > 1:
        _disown(tree[head], path[1:])
    if len(path) == 1 or not tree[head]:
        del tree[head]
