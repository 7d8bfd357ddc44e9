"""What the stand-in does with objects besides keeping them, as the API server and its controllers do.

Each rule was seen on a real API server. Pure functions over objects; `object_store` calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Object = dict[str, Any]
Place = tuple[str, str]
BUDGETS: Place = ("policy/v1", "poddisruptionbudgets")
CUSTOM_KINDS: Place = ("apiextensions.k8s.io/v1", "customresourcedefinitions")
NODES: Place = ("v1", "nodes")
PODS: Place = ("v1", "pods")
JOBS: Place = ("batch/v1", "jobs")
EVENTS: Place = ("v1", "events")
_NOT_READY = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}


class Refused(Exception):
    """An answer that is no success: the HTTP status and the ``reason`` of the Status object."""

    def __init__(self, status: int, reason: str, message: str, causes: tuple[Mapping[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.causes = causes


def check_kind(place: Place, body: Object) -> None:
    """An object of a custom kind says what it is; of a built-in kind the path does."""
    group = place[0].rpartition("/")[0]
    is_custom = "." in group and (not group.endswith(".k8s.io") or group.endswith(".x-k8s.io"))
    if is_custom and not {"apiVersion", "kind"} <= body.keys():
        raise Refused(400, "BadRequest", f"the object provided is unrecognized: Object 'Kind' is missing in '{body}'")


def admit(place: Place, namespace: str, body: Object, exists: Callable[[Place, str, str], bool]) -> None:
    """Before an object is made: what is added to it, and what refuses it."""
    if namespace and not exists(("v1", "namespaces"), "", namespace):
        raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
    if place == NODES:
        spec = body.setdefault("spec", {})
        if _NOT_READY not in (spec.get("taints") or ()):
            spec["taints"] = [*(spec.get("taints") or ()), dict(_NOT_READY)]
    if place == PODS:
        account = body.get("spec", {}).get("serviceAccountName") or "default"
        is_mirror = "kubernetes.io/config.mirror" in (body["metadata"].get("annotations") or {})
        if not is_mirror and not exists(("v1", "serviceaccounts"), namespace, account):
            told = f'error looking up service account {namespace}/{account}: serviceaccount "{account}" not found'
            raise Refused(403, "Forbidden", f'pods "{body["metadata"]["name"]}" is forbidden: {told}')
    if place == JOBS:
        body["spec"].setdefault("suspend", False)
    if place == EVENTS and (body["involvedObject"].get("namespace") or "default") != namespace:
        told = "involvedObject.namespace: Invalid value: does not match event.namespace"
        raise Refused(422, "Invalid", f"Event is invalid: {told}")


def defined(definition: Object) -> dict[Place, tuple[str, bool]]:
    """What a CustomResourceDefinition adds to the kinds."""
    spec = definition["spec"]
    kind = (spec["names"]["kind"], spec["scope"] == "Namespaced")
    return {(f"{spec['group']}/{one['name']}", spec["names"]["plural"]): kind for one in spec["versions"]}


def check_status(place: Place, before: Object, after: Object) -> None:
    """Before a status is changed: a Job ends in the steps that its controller takes."""
    if place != JOBS:
        return
    status, was = after.get("status") or {}, _true(before)
    for ended, first in (("Complete", "SuccessCriteriaMet"), ("Failed", "FailureTarget")):
        if ended in _true(after) and ended not in was:
            if first not in _true(after):
                told = f"cannot set {ended}=True condition without the {first}=true condition"
                raise Refused(422, "Invalid", f"Job is invalid: status.conditions: Invalid value: {told}")
            if "startTime" not in status or (ended == "Complete") != ("completionTime" in status):
                told = "completionTime: set for those that are Complete, and those alone"
                raise Refused(422, "Invalid", f"Job is invalid: status.{told}")


def _true(job: Object) -> set[str]:
    conditions = (job.get("status") or {}).get("conditions") or ()
    return {one["type"] for one in conditions if one["status"] == "True"}


def is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)


def selects(budget: Object, pod: Object) -> bool:
    labels = pod["metadata"].get("labels") or {}
    wanted = (budget["spec"].get("selector") or {}).get("matchLabels") or {}
    return bool(wanted) and all(labels.get(name) == value for name, value in wanted.items())


def counted(budget: Object, pods: Sequence[Object]) -> Object:
    """A PodDisruptionBudget's status."""
    mine = [pod for pod in pods if selects(budget, pod)]
    healthy = sum(is_ready(pod) and "deletionTimestamp" not in pod["metadata"] for pod in mine)
    spec = budget["spec"]
    least = int(spec["minAvailable"]) if "minAvailable" in spec else len(mine) - int(spec.get("maxUnavailable", 0))
    return {
        "observedGeneration": budget["metadata"]["generation"],
        "currentHealthy": healthy,
        "desiredHealthy": least,
        "expectedPods": len(mine),
        "disruptionsAllowed": max(0, healthy - least) if mine else 0,
    }


def check_eviction(pod: Object, budgets: Sequence[Object]) -> None:
    """Raises Refused where the Eviction API would: `budgets` are those of the pod's namespace."""
    is_ending = "deletionTimestamp" in pod["metadata"]
    if is_ending or pod.get("status", {}).get("phase") in ("Succeeded", "Failed", "Pending"):
        return
    mine = [budget for budget in budgets if selects(budget, pod)]
    if len(mine) > 1:
        told = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
        raise Refused(500, "InternalError", told)
    for budget in mine:
        status = budget["status"]
        if not is_ready(pod) and status["currentHealthy"] >= status["desiredHealthy"] > 0:
            continue
        if status["disruptionsAllowed"] < 1:
            need, has = status["desiredHealthy"], status["currentHealthy"]
            told = (
                f"The disruption budget {budget['metadata']['name']} needs {need} healthy pods and has {has} currently"
            )
            raise Refused(
                429,
                "TooManyRequests",
                "Cannot evict pod as it would violate the pod's disruption budget.",
                ({"reason": "DisruptionBudget", "message": told},),
            )
