"""What shows that Kubernetes runs a node, so that its leftovers are the kubelet's."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmedic_agent.containers.kubelet import is_of_kubelet, sign_of_kubelet


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


def processes(directory: Path, *names: str) -> Path:
    for number, name in enumerate(names, 1):
        (directory / str(number)).mkdir(parents=True)
        (directory / str(number) / "comm").write_text(f"{name}\n")
    (directory / "self").mkdir()
    return directory


@pytest.mark.parametrize("name", ["kubelet", "k3s-server", "k3s-agent", "rke2", "kubelite", "k0s"])
def test_a_kubernetes_process_indicates_a_kubelet(tmp_path: Path, name: str) -> None:
    """Some distributions build the kubelet into a program of their own."""
    proc = processes(tmp_path / "proc", "systemd", name)
    assert sign_of_kubelet(proc, tmp_path / "pods") == f"the process {name} runs here"


def test_pods_on_disk_and_an_agent_in_a_pod_indicate_a_kubelet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubelet that restarts expects the images that it has pulled."""
    proc = processes(tmp_path / "proc", "systemd", "dockerd")
    (tmp_path / "pods" / "5b1c").mkdir(parents=True)
    assert sign_of_kubelet(proc, tmp_path / "pods") == f"{tmp_path / 'pods'} has pods"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert sign_of_kubelet(proc, tmp_path / "none") == "this agent runs in a pod"


def test_a_node_with_docker_alone_shows_no_kubelet(tmp_path: Path) -> None:
    """An empty directory of pods or a process with a similar name is no sign either."""
    proc = processes(tmp_path / "proc", "systemd", "dockerd", "kubelet-logs.sh")
    (tmp_path / "pods").mkdir()
    assert sign_of_kubelet(proc, tmp_path / "pods") is None


def test_a_kubelets_container_is_identified_by_its_labels() -> None:
    """Labels of Kubernetes and of the container runtime interface count; those of Docker Compose do not."""
    assert is_of_kubelet({"Labels": {"io.kubernetes.pod.name": "web-0"}})
    assert is_of_kubelet({"Labels": {"io.cri-containerd.kind": "sandbox"}})
    assert not is_of_kubelet({"Labels": {"com.docker.compose.project": "train"}})
    assert not is_of_kubelet({"Labels": None})
