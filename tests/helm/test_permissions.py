"""What the chart lets the server do in the cluster: exactly what the enabled actions need, and use."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helm import charts
from tests.kubernetes.accounts import client
from tests.kubernetes.api_server import ApiServer, Rule
from tests.kubernetes.world import IMAGE, Kubelet, World
from trainmedic_server import telemetry
from trainmedic_server.actions import registry
from trainmedic_server.actions.kubernetes.base import ClusterAction
from trainmedic_server.actions.kubernetes.kinds import KNOWN, field_at
from trainmedic_server.adapters.kubernetes_cluster import KubernetesCluster
from trainmedic_server.adapters.kubernetes_pods import KubernetesPods
from trainmedic_server.adapters.kubernetes_topology import KubernetesTopology
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.errors import ClusterRefused
from trainmedic_server.ports.cluster import JOBS, Ref, Resource

TABLE = charts.CHART / "files" / "permissions.yaml"
GUIDE = charts.ROOT / "docs" / "how-to" / "install.md"
ACTIONS = {one.name: one for one in registry.BUILT_IN if isinstance(one, type) and issubclass(one, ClusterAction)}
IDENTITY = [("", "nodes", ("list", "watch")), ("", "pods", ("list", "watch"))]
"""What `KubernetesTopology` needs."""
POD_EVENTS = [("", "events", ("list",))]
"""What `KubernetesPods` needs."""


def written() -> str:
    """The table of permissions, from what the actions declare."""
    lines = [
        "# What each action needs of the Kubernetes API, and what `identity` does, with the events of pods "
        "(`pod_events`).",
        "# Written from what the actions declare: WRITE_GOLDEN=1 pytest tests/helm. Actions of scope cluster work on",
        "# nodes, the others on what is in a namespace.",
    ]
    needs = {name: [(p.group, p.resource, p.verbs) for p in ACTIONS[name].permissions] for name in sorted(ACTIONS)}
    for name, permissions in {**needs, "identity": IDENTITY, "pod_events": POD_EVENTS}.items():
        is_cluster = any(resource == "nodes" for _, resource, _ in permissions)
        lines += [f"{name}:", f"  scope: {'cluster' if is_cluster else 'namespace'}", "  rules:"]
        for group, resource, verbs in permissions:
            shown = group or '""'
            lines.append(f"    - {{apiGroup: {shown}, resource: {resource}, verbs: [{', '.join(sorted(verbs))}]}}")
    return "\n".join(lines) + "\n"


def test_the_table_contains_what_the_actions_declare() -> None:
    """It has exactly each action's permissions."""
    if os.environ.get("WRITE_GOLDEN"):
        TABLE.write_text(written())
    assert TABLE.read_text() == written()


def test_nothing_is_granted_by_default() -> None:
    """There is no Role, no ClusterRole, and no service account token in the pod."""
    found = charts.objects("default")
    assert not [each for each in found if "Role" in each["kind"]]
    assert charts.one(found, "Deployment")["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_an_unknown_action_is_rejected_by_name() -> None:
    """The message lists the known ones."""
    with pytest.raises(Exception, match=r"there is no action k8s\.drian; there are .*k8s\.drain"):
        charts.rendered({"kubernetes": {"actions": ["k8s.drian"]}})


def test_workloads_can_be_restricted_to_namespaces() -> None:
    """With named namespaces, rights on pods and workloads exist only there, and rights on nodes cluster-wide."""
    values = charts.COMBINATIONS["workloads-of-two-namespaces"]
    for rule in charts.rules(values):
        if rule.resource == "nodes":
            assert rule.namespace is None
        elif rule.namespace == "default":
            assert (rule.resource, rule.verbs) == ("events", {"create"})
        else:
            assert rule.namespace in values["kubernetes"]["namespaces"]


def test_a_role_is_bound_only_to_the_servers_account() -> None:
    """Each Role has one binding, in its own namespace, to the server's account."""
    for combination in charts.COMBINATIONS:
        found = charts.objects(combination)
        roles = {
            (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"])
            for each in found
            if each["kind"] in ("Role", "ClusterRole")
        }
        bindings = [each for each in found if each["kind"].endswith("RoleBinding")]
        assert roles == {
            (each["roleRef"]["kind"], each["metadata"].get("namespace"), each["roleRef"]["name"]) for each in bindings
        }
        account = charts.one(found, "ServiceAccount", "-server")["metadata"]["name"]
        subject = {"kind": "ServiceAccount", "name": account, "namespace": charts.NAMESPACE}
        assert all(each["subjects"] == [subject] for each in bindings)


# --- the proof ------------------------------------------------------------------------------------

Act = Callable[[World, type[Any]], Awaitable[None]]


def _on_a_node(is_cordoned: bool = False, **params: Any) -> Act:
    async def act(world: World, action: type[Any]) -> None:
        node = await world.node(**({"unschedulable": True} if is_cordoned else {}))
        call = world.call(action, node, **params)
        undo = action.inverse(call.params, await world.perform(action, call))
        if undo is not None:
            await world.act(ACTIONS[undo.action], node, call.run_id, **undo.params)

    return act


async def _drain(world: World, action: type[Any]) -> None:
    node = await world.node()
    await world.pod("worker", node)
    async with Kubelet(world, node):
        await world.act(action, node, timeout=60)


def _on_workloads(needs: str, before: Any = None, **params: Any) -> Act:
    async def act(world: World, action: type[Any]) -> None:
        for kind, workload in KNOWN.items():
            if (path := getattr(workload, needs)) is not None:
                made = {"metadata": {"name": "one"}, "spec": {}}
                if before is not None:
                    made |= field_at(needs, path).write(made, before)
                await world.make(workload.resource, world.namespace, made)
                await world.act(action, kind=kind, namespace=world.namespace, name="one", **params)

    return act


async def _delete_pod(world: World, action: type[Any]) -> None:
    await world.pod("worker", await world.node())
    await world.act(action, namespace=world.namespace, pod="worker", grace_period="0s")


async def _create_job(world: World, action: type[Any]) -> None:
    container = {"name": "check", "image": IMAGE}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    manifest = {"metadata": {"name": "health"}, "spec": {"template": template}}
    call = world.call(action, manifest=manifest, namespace=world.namespace, wait=False)
    await world.perform(action, call)
    made = (await world.cluster.list(JOBS, world.namespace))[0]["metadata"]["name"]
    world.made.append(Ref(JOBS, made, world.namespace))
    await world.perform(action, world.again(call))


PROOFS: Mapping[str, Act] = {
    "k8s.cordon": _on_a_node(),
    "k8s.uncordon": _on_a_node(is_cordoned=True, force=True),
    "k8s.taint": _on_a_node(key="example.com/ill"),
    "k8s.label": _on_a_node(key="example.com/ill", value="yes"),
    "k8s.drain": _drain,
    "k8s.restart": _on_workloads("template"),
    "k8s.scale": _on_workloads("replicas", replicas=3),
    "k8s.suspend": _on_workloads("suspend"),
    "k8s.resume": _on_workloads("suspend", before=True),
    "k8s.delete_pod": _delete_pod,
    "k8s.create_job": _create_job,
}


def used(server: ApiServer, token: str) -> set[tuple[str, str, str]]:
    return {(one.group, one.resource, one.verb) for one in server.requests if one.token == token}


def granted(rules: Sequence[Rule]) -> set[tuple[str, str, str]]:
    return {(rule.group, rule.resource, verb) for rule in rules for verb in rule.verbs}


def always(cluster: KubernetesCluster) -> Callable[[type[Any]], Awaitable[KubernetesCluster]]:
    async def by(_: type[Any]) -> KubernetesCluster:
        return cluster

    return by


def test_every_action_has_its_proof() -> None:
    """A new action needs one."""
    assert PROOFS.keys() == ACTIONS.keys(), "edit PROOFS; WRITE_GOLDEN=1 pytest tests/helm writes the permissions"


@pytest.mark.parametrize("name", sorted(PROOFS))
async def test_an_action_uses_exactly_its_permissions(name: str, world: World, stand_in: ApiServer) -> None:
    """The action works with only the chart's rules for it, and its requests use every one of them."""
    action, account = ACTIONS[name], world.by
    assert account is not None
    # The undo is another action at times, and has to do with what was granted for this one.
    world.by = lambda _: account(action)
    await PROOFS[name](world, action)
    assert used(stand_in, name) == granted(charts.rules_of(name))


async def test_identity_uses_exactly_its_permissions(world: World, stand_in: ApiServer, tmp_path: Path) -> None:
    """Nodes and pods are listed and watched, and events of pods are listed."""
    rules = charts.rules({"kubernetes": {"identity": True}})
    node = await world.node()
    await world.pod("rank-0", node, labels={"jobset.sigs.k8s.io/jobset-name": "llm-1"})
    async with client(stand_in, "identity", rules, tmp_path) as cluster:
        pods = KubernetesPods(cluster, SystemClock(), telemetry.Metrics())
        cluster_watch = KubernetesTopology(cluster, SystemClock(), telemetry.Metrics(), pods)
        watching = asyncio.create_task(cluster_watch.watch())
        async with asyncio.timeout(60):
            while used(stand_in, "identity") != granted(rules):
                await pods.reading("llm-1", lambda *_: True)
                await asyncio.sleep(0.02)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    assert node.name


def test_events_are_read_only_in_the_named_namespaces() -> None:
    """Without names, in the whole cluster. Other event permissions that an action needs stay granted."""

    def verbs(**values: Any) -> dict[str | None, set[str]]:
        rules = charts.rules({"kubernetes": {"identity": True, **values}})
        return {rule.namespace: set(rule.verbs) for rule in rules if rule.resource == "events"}

    assert verbs() == {None: {"list"}}
    assert verbs(namespaces=["team-a"]) == {"team-a": {"list"}}
    assert verbs(actions=["k8s.cordon"]) == {None: {"list"}, "default": {"create"}}
    assert verbs(actions=["k8s.cordon", "k8s.delete_pod"]) == {None: {"create", "list"}}


async def test_other_namespaces_are_out_of_reach(world: World, stand_in: ApiServer, tmp_path: Path) -> None:
    """An account restricted to one namespace deletes pods there, and none elsewhere."""
    action = ACTIONS["k8s.delete_pod"]
    pod = await world.pod("worker", await world.node())
    for namespace, is_allowed in (("elsewhere", False), (world.namespace, True)):
        rules = charts.rules({"kubernetes": {"actions": [action.name], "namespaces": [namespace]}})
        async with client(stand_in, f"of-{namespace}", rules, tmp_path) as cluster:
            world.by = always(cluster)
            with contextlib.nullcontext() if is_allowed else pytest.raises(ClusterRefused):
                await world.act(action, namespace=world.namespace, pod="worker", grace_period="0s")
    assert not await world.exists(pod)


async def test_a_custom_kind_is_named_in_the_values(world: World, stand_in: ApiServer, tmp_path: Path) -> None:
    """With customKinds k8s.suspend works on it; without, the API server refuses."""
    kind = {"api_version": "example.com/v1", "plural": "trainings", "kind": "Training", "suspend": "spec.paused"}
    await world.make(
        Resource("example.com/v1", "trainings", "Training"), world.namespace, {"metadata": {"name": "one"}}
    )
    action = ACTIONS["k8s.suspend"]
    given = {"kind": kind, "namespace": world.namespace, "name": "one"}
    with pytest.raises(ClusterRefused, match="trainings"):
        await world.act(action, **given)
    values = {"actions": [action.name], "customKinds": [{"apiGroup": "example.com", "resource": "trainings"}]}
    async with client(stand_in, "custom", charts.rules({"kubernetes": values}), tmp_path) as cluster:
        world.by = always(cluster)
        await world.act(action, **given)


def rows(page: str) -> Iterator[tuple[str, str, str]]:
    """Action, resource and verbs, of the table in the guide."""
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith(("`k8s.", "`identity`", "`pod_events`")):
            named = cells[0].replace("`", "").split(", ")
            for action in ACTIONS if named == ["k8s.* (each)"] else named:
                for resource in cells[1].replace("`", "").split(", "):
                    yield action, resource, cells[2]


def test_the_guide_shows_what_the_chart_grants() -> None:
    """The documentation shows every permission of every action, and no other."""
    shown = {(action, resource, verbs) for action, resource, verbs in rows(GUIDE.read_text())}
    assert shown == {
        (name, f"{rule['resource']}.{rule['apiGroup']}".rstrip("."), ", ".join(rule["verbs"]))
        for name, entry in charts.PERMISSIONS.items()
        for rule in entry["rules"]
    }
