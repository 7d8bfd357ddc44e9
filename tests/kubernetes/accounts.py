"""The accounts by which actions work: each has what the chart grants for it, and no more.

So every test of an action also tests that its permissions suffice. On the stand-in an account is a token with
rules; on a real API server it is a ServiceAccount with the chart's rules bound to it, and a token that the
server has issued. Used by ``conftest`` and by the tests of the chart.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.kubernetes.api_server import ApiServer, Rule
from tests.kubernetes.world import SERVICE_ACCOUNTS, World
from trainmedic_server.adapters.kubernetes_cluster import KubernetesCluster
from trainmedic_server.ports.cluster import Resource

RBAC = "rbac.authorization.k8s.io/v1"
CLUSTER_ROLES = Resource(RBAC, "clusterroles", "ClusterRole", is_namespaced=False)
CLUSTER_ROLE_BINDINGS = Resource(RBAC, "clusterrolebindings", "ClusterRoleBinding", is_namespaced=False)
ROLES = Resource(RBAC, "roles", "Role")
ROLE_BINDINGS = Resource(RBAC, "rolebindings", "RoleBinding")

Issue = Callable[[str, Sequence[Rule]], Awaitable[Path]]
"""Makes an account of that name that may do what the rules say; the kubeconfig of it."""


@contextlib.asynccontextmanager
async def client(
    server: ApiServer, name: str, rules: Sequence[Rule], directory: Path
) -> AsyncIterator[KubernetesCluster]:
    """The stand-in, by an account of that name that may do what `rules` say."""
    opened = await KubernetesCluster.opened(await of_the_stand_in(server, directory)(name, rules))
    try:
        yield opened
    finally:
        await opened.close()


def of_the_stand_in(server: ApiServer, directory: Path) -> Issue:
    async def issue(name: str, rules: Sequence[Rule]) -> Path:
        server.accounts[name] = rules
        path = directory / f"kubeconfig-of-{name}.json"
        path.write_text(json.dumps(server.kubeconfig(name)))
        return path

    return issue


def of_a_real_server(world: World, admin: Path, directory: Path) -> Issue:
    """Who runs the suite must be allowed to grant what the chart grants: a cluster's administrator is."""

    async def issue(name: str, rules: Sequence[Rule]) -> Path:
        account = name.replace("_", "-")
        await world.make(SERVICE_ACCOUNTS, world.namespace, {"metadata": {"name": account}})
        for namespace in sorted({rule.namespace for rule in rules}, key=str):
            await _grant(world, account, namespace, [rule for rule in rules if rule.namespace == namespace])
        answer = await world.cluster._call(
            "POST",
            f"/api/v1/namespaces/{world.namespace}/serviceaccounts/{account}/token",
            None,
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}},
        )
        path = directory / f"kubeconfig-of-{account}.json"
        path.write_text(json.dumps(_by_token(yaml.safe_load(admin.read_text()), answer["status"]["token"], admin)))
        await _until_in_force(path, rules)
        return path

    return issue


async def _grant(world: World, account: str, namespace: str | None, rules: Sequence[Rule]) -> None:
    name = f"tm-{world.tag}-{account}"
    role, binding = (ROLES, ROLE_BINDINGS) if namespace else (CLUSTER_ROLES, CLUSTER_ROLE_BINDINGS)
    shown = [{"apiGroups": [one.group], "resources": [one.resource], "verbs": sorted(one.verbs)} for one in rules]
    await world.make(role, namespace, {"metadata": {"name": name}, "rules": shown})
    subject = {"kind": "ServiceAccount", "name": account, "namespace": world.namespace}
    to = {"apiGroup": RBAC.partition("/")[0], "kind": role.kind, "name": name}
    await world.make(binding, namespace, {"metadata": {"name": name}, "roleRef": to, "subjects": [subject]})


async def _until_in_force(kubeconfig: Path, rules: Sequence[Rule]) -> None:
    """The API server takes up roles and bindings from a watch, a moment after they were made."""
    opened = await KubernetesCluster.opened(kubeconfig)
    try:
        async with asyncio.timeout(60):
            for rule in rules:
                while not all([await _may(opened, rule, verb) for verb in sorted(rule.verbs)]):
                    await asyncio.sleep(0.05)
    finally:
        await opened.close()


async def _may(cluster: KubernetesCluster, rule: Rule, verb: str) -> bool:
    resource, _, subresource = rule.resource.partition("/")
    asked = {"group": rule.group, "resource": resource, "subresource": subresource, "verb": verb}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {**asked, "namespace": rule.namespace or ""}},
    }
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    answer = await cluster._call("POST", path, None, review)
    return bool(answer["status"]["allowed"])


def _by_token(kubeconfig: dict[str, Any], token: str, path: Path) -> dict[str, Any]:
    """The kubeconfig's current cluster, with a token for a user."""
    context = next(one for one in kubeconfig["contexts"] if one["name"] == kubeconfig["current-context"])["context"]
    cluster = next(one for one in kubeconfig["clusters"] if one["name"] == context["cluster"])["cluster"]
    if "certificate-authority" in cluster:
        cluster = {**cluster, "certificate-authority": str(path.parent / cluster["certificate-authority"])}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "real", "cluster": cluster}],
        "users": [{"name": "account", "user": {"token": token}}],
        "contexts": [{"name": "real", "context": {"cluster": "real", "user": "account"}}],
        "current-context": "real",
    }


class Accounts:
    """One account for each action."""

    def __init__(self, issue: Issue, granted: Callable[[str], Sequence[Rule]]) -> None:
        self._issue = issue
        self._granted = granted
        self._opened: dict[str, KubernetesCluster] = {}

    async def of(self, action: type[Any]) -> KubernetesCluster:
        if action.name not in self._opened:
            kubeconfig = await self._issue(action.name, self._granted(action.name))
            self._opened[action.name] = await KubernetesCluster.opened(kubeconfig)
        return self._opened[action.name]

    async def close(self) -> None:
        for opened in self._opened.values():
            await opened.close()
