"""What is rendered is secure by default, and every exception is one that is named here."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.helm import charts
from tests.helm.charts import COMBINATIONS, Object

POWER = frozenset({"SYS_ADMIN"})
"""Without it NVIDIA's driver sets no power limit."""
CLEANING = frozenset({"DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "LEASE"})
"""To look at and delete what others made, and to ask the kernel whether it is in use."""
READING = frozenset({"SETUID", "SETGID", "DAC_READ_SEARCH"})
"""To open logs with the rights of those who placed or named them, in the container that reads logs."""
READER = "log-reader"
PROCESSES = frozenset({"SYS_PTRACE"})
"""To see which files the node's processes hold open."""

ALLOWED: Mapping[str, frozenset[str]] = {
    "everything": POWER | CLEANING | PROCESSES,
    "power-control": POWER,
    "cleaning": CLEANING,
}
"""By combination, what the agent is given; by default nothing."""
ROOT = ALLOWED.keys() | {"logs", "kernel-log"}
"""Combinations in which the agent's pod runs as root."""
HOST_PATHS: Mapping[str, set[str]] = {
    "everything": {
        *("/var/lib/trainmedic", "/var/log/training", "/scratch", "/data/logs", "/var/log", "/var/log/pods"),
    },
    "power-control": {"/var/lib/trainmedic"},
    "cleaning": {"/var/lib/trainmedic", "/var/log/training", "/scratch"},
    "logs": {"/var/lib/trainmedic", "/data/logs", "/var/log/dcgm", "/var/log/pods"},
    "kernel-log": {"/var/lib/trainmedic", "/dev/kmsg"},
}

every_combination = pytest.mark.parametrize("combination", COMBINATIONS)


def is_agent(pod: str) -> bool:
    return pod.startswith("DaemonSet/")


@every_combination
def test_no_container_is_privileged(combination: str) -> None:
    """Capabilities are dropped, and only the agent regains those that its functions need."""
    for pod, spec in charts.pods(charts.objects(combination)):
        for container in spec["containers"]:
            context = container["securityContext"]
            added = frozenset(context["capabilities"].get("add", ()))
            assert context["capabilities"]["drop"] == ["ALL"]
            # Nothing less gives a container a device of the node.
            is_reader = container["name"] == READER
            is_privileged = is_reader and combination == "kernel-log"
            assert bool(context.get("privileged")) == is_privileged
            of_agent = ALLOWED.get(combination, frozenset()) if is_agent(pod) else frozenset()
            assert added == (READING if is_reader else of_agent)
            assert context["allowPrivilegeEscalation"] == ("SYS_ADMIN" in added or is_privileged)
            assert ("appArmorProfile" in context) == ("SYS_PTRACE" in added)


@every_combination
def test_running_as_root_is_the_exception(combination: str) -> None:
    """Every pod has its own user, except the agent that sets power limits, cleans or reads logs."""
    for pod, spec in charts.pods(charts.objects(combination)):
        context = spec["securityContext"]
        is_root = is_agent(pod) and combination in ROOT
        assert context["runAsNonRoot"] is not is_root
        assert (context["runAsUser"] == 0) == is_root
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}


@every_combination
def test_nothing_of_the_node_is_shared(combination: str) -> None:
    """No host network or IPC, no host path except those named, and processes only on request."""
    for pod, spec in charts.pods(charts.objects(combination)):
        assert not spec.get("hostNetwork")
        assert not spec.get("hostIPC")
        assert bool(spec.get("hostPID")) == (is_agent(pod) and combination in ("everything", "identity"))
        paths = {volume["hostPath"]["path"] for volume in spec.get("volumes", ()) if "hostPath" in volume}
        assert paths == (HOST_PATHS.get(combination, set()) if is_agent(pod) else set())
        for container in spec["containers"]:
            assert not any("hostPort" in port for port in container.get("ports", ()))


@every_combination
def test_the_root_filesystem_is_read_only(combination: str) -> None:
    """Writes go to volumes with a size limit, or the pod's own."""
    for _, spec in charts.pods(charts.objects(combination)):
        for container in spec["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
        for volume in spec.get("volumes", ()):
            if "emptyDir" in volume:
                assert volume["emptyDir"]["sizeLimit"]


@every_combination
def test_a_cluster_token_is_mounted_only_where_it_is_used(combination: str) -> None:
    """That is the server if an action, or identity, is enabled; no account mounts its token by default."""
    kubernetes = COMBINATIONS[combination].get("kubernetes", {})
    uses = bool(kubernetes.get("actions") or kubernetes.get("identity"))
    found = charts.objects(combination)
    for pod, spec in charts.pods(found):
        assert spec["automountServiceAccountToken"] is (uses and pod.startswith("Deployment/"))
        assert spec["enableServiceLinks"] is False
    accounts = [each for each in found if each["kind"] == "ServiceAccount"]
    assert all(each["automountServiceAccountToken"] is False for each in accounts)
    used = [spec["serviceAccountName"] for pod, spec in charts.pods(found) if not pod.startswith("Pod/")]
    assert len(set(used)) == len(used) == len(accounts), "one account for each component"


@every_combination
def test_generated_secrets_are_never_the_same(combination: str) -> None:
    """There is no default: a secret that is not given is random, long, and different in each release."""
    again = [each for each in charts.parsed(charts.rendered(COMBINATIONS[combination])) if each["kind"] == "Secret"]
    seen: set[str] = set()
    for found in [*(each for each in charts.objects(combination) if each["kind"] == "Secret"), *again]:
        values = charts.secret(found)
        values.pop("tokens.yaml", None)
        if "redis-url" in values:
            user, _, rest = values.pop("redis-url").removeprefix("redis://").partition(":")
            assert found["metadata"]["name"].endswith(f"-redis-{user}")
            assert rest.partition("@")[0] == values["password"]
        for value in values.values():
            assert len(value) >= 40
            assert value.isalnum()
            assert value not in seen
            seen.add(value)


@every_combination
def test_no_secret_appears_outside_a_secret_object(combination: str) -> None:
    """Neither in a variable, nor in an argument, nor in a ConfigMap."""
    found = charts.objects(combination)
    hidden = {
        value
        for each in found
        if each["kind"] == "Secret"
        for key, value in charts.secret(each).items()
        if key != "tokens.yaml"
    }
    shown = str([each for each in found if each["kind"] != "Secret"])
    assert not [value for value in hidden if value in shown]


@every_combination
def test_every_container_has_limits_and_probes(combination: str) -> None:
    """Requests, a memory limit, and probes for long-running ones. The agent watches the log reader itself."""
    for pod, spec in charts.pods(charts.objects(combination)):
        for container in spec["containers"]:
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]
            if not pod.startswith("Pod/") and container["name"] != READER:
                assert {"startupProbe", "livenessProbe"} <= container.keys()


@every_combination
def test_network_policies_cover_every_component(combination: str) -> None:
    """Each component has one, unless disabled; Redis admits the release's own pods and named clients."""
    found = charts.objects(combination)
    policies = [each for each in found if each["kind"] == "NetworkPolicy"]
    components = {
        each["metadata"]["labels"]["app.kubernetes.io/component"]
        for each in found
        if each["kind"] in ("Deployment", "DaemonSet", "StatefulSet")
    }
    covered = {each["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for each in policies}
    assert covered == (set() if combination == "server-only" else components)
    for each in policies:
        for rule in each["spec"]["ingress"]:
            assert rule["ports"]
            assert rule["from"]
    if "redis" in covered:
        (rule,) = charts.one(policies, "NetworkPolicy", "-redis")["spec"]["ingress"]
        assert {"namespaceSelector": {}} not in rule["from"]


def test_the_default_observes_and_requires_tokens() -> None:
    """Nothing is changed, and no client is admitted without a token."""
    server = charts.one(charts.objects("default"), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    environment = variables(server)
    assert environment["TRAINMEDIC_MODE"] == "observe"
    assert environment["TRAINMEDIC_TOKENS_FILE"]
    assert environment["TRAINMEDIC_SIGNING_KEY_FILE"]
    assert "TRAINMEDIC_ALLOW_ANONYMOUS" not in environment


def variables(container: Object) -> dict[str, str]:
    return {one["name"]: one.get("value", "from elsewhere") for one in container["env"]}


def test_no_taint_evicts_the_agent() -> None:
    """It is needed most when something is wrong: a playbook's taint must not end it."""
    agent = charts.one(charts.objects("default"), "DaemonSet")["spec"]["template"]["spec"]
    assert agent["tolerations"] == [{"operator": "Exists"}]


KEPT_ON_A_VOLUME = [
    name
    for name, values in COMBINATIONS.items()
    if "database" not in values.get("server", {})
    and values.get("server", {}).get("persistence", {}).get("enabled", True)
]


@pytest.mark.parametrize("combination", KEPT_ON_A_VOLUME)
def test_no_chart_pod_blocks_a_drain_of_its_node(combination: str) -> None:
    """Provided that its data are on a volume: to a drain, an emptyDir on disk is data."""
    for name, spec in charts.pods(charts.objects(combination)):
        if name.startswith("DaemonSet"):
            continue
        on_disk = [
            one for one in spec.get("volumes", ()) if "emptyDir" in one and one["emptyDir"].get("medium") != "Memory"
        ]
        assert on_disk == [], name


def test_external_clients_are_admitted_on_request() -> None:
    """A network policy names pods, and a load balancer's clients are not pods. serverFrom stays exclusive."""
    peer = {"ipBlock": {"cidr": "10.0.0.0/8"}}
    for values, sources in (
        ({}, [{"namespaceSelector": {}}]),
        ({"server": {"service": {"type": "LoadBalancer"}}}, None),
        ({"server": {"service": {"type": "NodePort"}}, "networkPolicy": {"serverFrom": [peer]}}, "named"),
    ):
        policy = charts.one(charts.parsed(charts.rendered(values)), "NetworkPolicy", "-server")
        (rule,) = policy["spec"]["ingress"]
        assert rule.get("from", [])[1:] == [peer] if sources == "named" else rule.get("from") == sources


@pytest.mark.parametrize("combination", ["logs", "kernel-log", "everything"])
def test_the_log_reading_container_has_no_secret(combination: str) -> None:
    """It has no key, no Redis and no policy; the agent next to it sees only the logs that it cleans."""
    spec = charts.one(charts.objects(combination), "DaemonSet")["spec"]["template"]["spec"]
    agent, reader = spec["containers"]
    assert reader["name"] == READER
    assert {each["name"] for each in reader["env"]} == {"TRAINMEDIC_STATE_DIR", "TRAINMEDIC_READER_USER"}
    mounted = {each["name"].partition("-")[0] for each in reader["volumeMounts"]}
    assert mounted <= {"state", "reader", "logs", "clean", "kmsg"}
    assert not any(each["name"].startswith(("logs-", "kmsg")) for each in agent["volumeMounts"])
    assert all(each.get("readOnly") for each in reader["volumeMounts"] if each["name"] not in ("state", "reader-tmp"))
    environment = {each["name"]: each.get("value") for each in agent["env"]}
    assert (environment["TRAINMEDIC_READER"], environment["TRAINMEDIC_READER_USER"]) == ("external", "10001")
    assert spec["securityContext"]["supplementalGroups"] == [10001]


@pytest.mark.parametrize("combination", ["logs", "kernel-log", "everything"])
def test_the_log_reading_container_shares_only_the_state_directory_and_has_its_own_limits(
    combination: str,
) -> None:
    """The agent awaits it there at a socket. In a shared /tmp its user could put links where root opens files."""
    agent, reader = charts.one(charts.objects(combination), "DaemonSet")["spec"]["template"]["spec"]["containers"]
    writable = [{each["name"] for each in one["volumeMounts"] if not each.get("readOnly")} for one in (agent, reader)]
    assert writable[0] & writable[1] == {"state"}
    assert reader["securityContext"]["readOnlyRootFilesystem"] is True
    assert reader["resources"]["limits"]["memory"]
    environment = {each["name"]: each["value"] for each in reader["env"] if "value" in each}
    assert environment["TRAINMEDIC_READER_USER"] not in ("0", "root")
