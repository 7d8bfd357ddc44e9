"""From a process to its pod, by the control groups that kubelets, runtimes and kernels make."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmedic_agent import pods

UID = "1a2b3c4d-0000-4111-8222-0123456789ab"
SLICE = UID.replace("-", "_")
CONTAINER = "d9" * 32


@pytest.mark.parametrize(
    "groups",
    [
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SLICE}.slice/cri-containerd-{CONTAINER}.scope",
        f"0::/kubepods.slice/kubepods-pod{SLICE}.slice/crio-{CONTAINER}.scope",
        f"0::/kubepods.slice/kubepods-pod{SLICE}.slice/crio-{CONTAINER}.scope/container/worker",
        f"0::/kubepods/besteffort/pod{UID}/{CONTAINER}",
        f"0::/kubepods/pod{UID}/crio-{CONTAINER}",
        f"0::/../../kubepods-pod{SLICE}.slice/cri-containerd-{CONTAINER}.scope",
        f"0::/../../../burstable/pod{UID}/{CONTAINER}",
        f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SLICE}.slice/cri-containerd-{CONTAINER}.scope",
        f"0::/system.slice/containerd.service/kubepods-burstable-pod{SLICE}.slice:cri-containerd:{CONTAINER}",
        f"12:pids:/kubepods/burstable/pod{UID}/{CONTAINER}\n1:name=systemd:/kubepods/burstable/pod{UID}/{CONTAINER}",
        f"3:cpu,cpuacct:/\n2:memory:/kubepods.slice/kubepods-pod{SLICE}.slice/docker-{CONTAINER}.scope\n0::/",
        f"0::/kubepods/pod{UID}",
        f"0::/kubepods/pod{UID}/{CONTAINER}/kubepods/podffffffff-0000-4111-8222-0123456789ab/{CONTAINER}",
    ],
)
def test_a_pod_is_found_in_every_spelling_of_its_cgroup(groups: str) -> None:
    """Versions 1 and 2, the drivers systemd and cgroupfs, containerd, CRI-O and Docker, from inside a container too."""
    assert pods.pod_in(f"{groups}\n".encode()) == UID


@pytest.mark.parametrize(
    "groups",
    [
        "",
        "0::/",
        "0::/user.slice/user-1000.slice/session-2.scope",
        f"0::/../cri-containerd-{CONTAINER}.scope",
        f"0::/docker/{CONTAINER}",
        f"0::/user.slice/user-1000.slice/user@1000.service/kubepods-pod{SLICE}.slice/crio-{CONTAINER}.scope",
        f"0::/../../user.slice/user-1000.slice/user@1000.service/app.slice/kubepods/pod{UID}",
        "0::/system.slice/pod-manager.service",
        f"0::/machine.slice/libpod-{CONTAINER}.scope",
        f"0::/kubepods/pod{UID}x/{CONTAINER}",
        "0::/kubepods/pod../../etc",
    ],
)
def test_a_process_outside_pods_has_no_pod(groups: str) -> None:
    """A login, a service, a container that no kubelet started."""
    assert pods.pod_in(f"{groups}\n".encode()) is None


def test_a_static_pod_is_known_by_its_hash() -> None:
    """The kubelet gives it no other UID."""
    assert pods.pod_in(b"0::/kubepods/burstable/pod" + b"ab12" * 8 + b"/x\n") == "ab12" * 8


def test_the_pods_of_many_processes_are_each_listed_once(tmp_path: Path) -> None:
    """Ended processes, and those not visible from here, belong to none."""
    for pid, number in ((10, 1), (11, 1), (12, 0), (13, 7)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cgroup").write_text(f"0::/kubepods/pod{number}{UID[1:]}/{CONTAINER}\n")
    assert pods.pods_of([10, 11, 12, 99, 0], tmp_path) == (f"0{UID[1:]}", UID)
    assert pods.pods_of([], tmp_path) == ()


def test_the_pods_reported_for_a_crowded_gpu_are_bounded(tmp_path: Path) -> None:
    """A presence stays small, whatever runs there."""
    for pid in range(2 * pods.MOST_PROCESSES):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cgroup").write_text(f"0::/kubepods/pod{pid:08x}{UID[8:]}/x\n")
    assert len(pods.pods_of(range(2 * pods.MOST_PROCESSES), tmp_path)) == pods.MOST_PODS
