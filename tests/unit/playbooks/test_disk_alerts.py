"""Each alert on a full file system is either cleaned or told to people, whatever its labels are."""

from __future__ import annotations

from datetime import UTC, datetime

import hypothesis
import pytest
import yaml
from hypothesis import strategies

from tests.unit.playbooks.test_shipped_playbooks import PLAYBOOKS
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.actions import registry
from trainmedic_server.actions.kubernetes.jobs import CreateClusterJob
from trainmedic_server.catalog import loader
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.domain.claim import Claim
from trainmedic_server.engine import claims


def book(name: str) -> YamlPlaybook:
    (loaded,) = loader.load_file(PLAYBOOKS / f"{name}.yaml", registry.specs_only()).playbooks
    return loaded


CLEANS, TELLS = book("disk-space-low"), book("disk-space-not-cleaned")


def takes(playbook: YamlPlaybook, labels: dict[str, str]) -> bool:
    alert = {"alertname": "DiskSpaceLow", "node": "n7", **labels}
    return playbook.match(Alert("f", AlertStatus.FIRING, alert, {}, datetime(2026, 3, 5, tzinfo=UTC))).matched


@pytest.mark.parametrize(
    "labels",
    [
        {},
        {"mountpoint": "/", "device": "/dev/nvme0n1p2", "fstype": "ext4"},
        {"mountpoint": "/scratch", "device": "/dev/md127", "fstype": "xfs"},
        {"mountpoint": "/bootcamp", "device": "rpool/data", "fstype": "zfs"},
        {"mountpoint": "/mnt", "device": "/dev/sdb1", "fstype": "fuseblk"},
        {"mountpoint": "/host/var", "device": "/dev/mapper/vg-var", "fstype": "btrfs"},
        {"volume": "D:"},
        {"volume": "D:", "fstype": "NTFS"},
    ],
)
def test_a_file_system_of_a_node_is_cleaned(labels: dict[str, str]) -> None:
    """And where the alert does not say which one it is, as before."""
    assert (takes(CLEANS, labels), takes(TELLS, labels)) == (True, False)


@pytest.mark.parametrize(
    "labels",
    [
        {"mountpoint": "/boot/efi", "device": "/dev/sda1", "fstype": "vfat"},
        {"mountpoint": "/boot", "device": "/dev/sda2", "fstype": "ext4"},
        {"exported_mountpoint": "/host/boot/efi", "fstype": "vfat"},
        {"mount_point": "/efi"},
        {"mountpoint": "/home", "device": "filer:/home", "fstype": "nfs4"},
        {"mountpoint": "/lustre", "device": "10.1.0.4@o2ib:/fs", "fstype": "lustre"},
        {"mountpoint": "/data", "device": "JuiceFS:pool", "fstype": "fuse.juicefs"},
        {"mountpoint": "/data", "device": "mon1,mon2:/"},
        {"namespace": "research", "persistentvolumeclaim": "checkpoints-0"},
    ],
)
def test_what_no_agent_can_clean_is_told_to_people(labels: dict[str, str]) -> None:
    """And keeps no run on the node that would take in the alert on its own disk."""
    assert (takes(CLEANS, labels), takes(TELLS, labels)) == (False, True)


@pytest.mark.parametrize("name", ["gpu-broken", "hardware-logged", "node-down"])
def test_a_node_is_drained_while_its_disk_is_cleaned(name: str) -> None:
    """And a full disk does not wait until the node is repaired."""
    node, actions = Target(TargetKind.NODE, node="n7"), registry.specs_only()
    cleaning = claims.of_playbook(CLEANS, node, actions)
    assert not claims.of_playbook(book(name), node, actions).overlaps(cleaning)
    assert cleaning.overlaps(cleaning)


@pytest.mark.parametrize("name", registry.specs_only().names())
def test_what_may_change_files_of_a_node_waits_for_the_cleaning(name: str) -> None:
    """Whatever is not known to leave them alone."""
    actions, cleaning = registry.specs_only(), Claim.of_disks("n7")
    (claim,) = claims.of_attempt([Target(TargetKind.NODE, node="n7")], actions.action_class(name), {})
    assert claim.overlaps(cleaning) is not name.startswith(LEAVE_DISKS)


CHECKED = {"hostPID": False, "containers": [{"name": "check"}, "odd"], "volumes": [{"name": "t", "emptyDir": {}}]}


@pytest.mark.parametrize(
    ("pod", "reaches"),
    [
        (CHECKED, False),
        ({"volumes": "{{ odd }}", "containers": [{"securityContext": {"privileged": False}}]}, False),
        ("odd", False),
        ({"volumes": [{"name": "s", "hostPath": {"path": "/scratch"}}]}, True),
        ({"volumes": [{"name": "s", "persistentVolumeClaim": {"claimName": "local"}}]}, True),
        ({"initContainers": [{"securityContext": {"privileged": True}}]}, True),
        ({"hostPID": True}, True),
    ],
)
def test_a_job_that_reaches_the_files_of_its_node_waits_for_the_cleaning(pod: object, reaches: bool) -> None:
    """But not the run that drains the node before."""
    actions, node, cleaning = registry.specs_only(), Target(TargetKind.NODE, node="n7"), Claim.of_disks("n7")
    params = {"manifest": {"spec": {"template": {"spec": pod}}}, "wait": True}
    (claim,) = claims.of_attempt([node], actions.action_class("k8s.create_job"), params)
    assert claim.overlaps(cleaning) is reaches
    assert claim.overlaps(Claim(node))


@pytest.mark.parametrize("template", ["node-health", "node-probe"])
def test_the_shipped_checks_of_a_node_reach_no_files(template: str) -> None:
    """They wait for no cleaning."""
    manifest = yaml.safe_load((PLAYBOOKS / f"{template}_template.yaml").read_text())
    assert not CreateClusterJob.reaches_disks({"manifest": manifest})


LEAVE_DISKS = (
    *("k8s.cordon", "k8s.uncordon", "k8s.drain", "k8s.taint", "k8s.label", "k8s.create_job"),
    *("launcher.exclude_node", "launcher.include_node", "alertmanager."),
    *("slurm.drain", "slurm.resume", "slurm.reserve"),
)
KINDS = "fuse fuse.mountpoint-s3 virtiofs gfs2 ocfs2 9p beegfs wekafs ceph lustre gpfs nfs nfs4 cifs smb3 glusterfs afs"
MORE_KINDS = "orangefs daos vastnfs tmpfs ramfs devtmpfs overlay rootfs squashfs iso9660 a-new-one"


@pytest.mark.parametrize("fstype", f"{KINDS} {MORE_KINDS}".split())
def test_no_file_system_is_cleaned_that_is_not_known_to_be_on_a_disk_of_its_node(fstype: str) -> None:
    """Shared ones, those in memory or without a disk of their own, and unknown ones."""
    labels = {"mountpoint": "/mnt/x", "device": "/dev/mapper/x", "fstype": fstype}
    assert (takes(CLEANS, labels), takes(TELLS, labels)) == (False, True)


@pytest.mark.parametrize("device", ["tmpfs", "overlay"])
def test_the_device_shows_it_if_the_type_is_not_known(device: str) -> None:
    """A rule that sums over types keeps the device."""
    labels = {"mountpoint": "/run/user/1000", "device": device}
    assert (takes(CLEANS, labels), takes(TELLS, labels)) == (False, True)


VALUES = strategies.sampled_from(
    ["", "/", "/boot", "/data", "nfs4", "ext4", "tmpfs", "fuse.sshfs", "a:/b", "//a/b", "/dev/sda"]
)


@hypothesis.given(strategies.dictionaries(strategies.sampled_from(["mountpoint", "fstype", "device", "job"]), VALUES))
def test_exactly_one_of_the_two_takes_each_alert(labels: dict[str, str]) -> None:
    """Their conditions are written twice, once turned round."""
    assert takes(CLEANS, labels) != takes(TELLS, labels)
