"""Suggested renames: by the words of a name, the metric of its rule, and its labels."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest
import yaml

from trainmedic_server.domain.alert_suggestions import snippet, suggest

NAMES = (
    "DiskSpaceLow", "GPUMemoryUsageHigh", "GPUTemperatureHigh", "GPUThermalThrottling", "GPUUtilizationLow",
    "GPUXidError", "MemoryUsageHigh", "NodeDown", "TrainingCrashing",
)  # fmt: skip


def suggested(name: str, expression: str = "", *texts: str, **labels: str) -> str | None:
    url = "http://prom:9090/graph?" + urlencode({"g0.expr": expression, "g0.tab": 1}) if expression else ""
    found = suggest({"alertname": name, **labels}, url, texts, NAMES)
    return found.name if found else None


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("AcceleratorGpuTooHotPage", "GPUTemperatureHigh"),
        ("gpu_temp_crit", "GPUTemperatureHigh"),
        ("H100-GPU-Overheat", "GPUTemperatureHigh"),
        ("GPUThermalSlowdownActive", "GPUThermalThrottling"),
        ("GpuFramebufferNearlyFull", "GPUMemoryUsageHigh"),
        ("VRAMUsageCritical", "GPUMemoryUsageHigh"),
        ("GpuSittingIdle2h", "GPUUtilizationLow"),
        ("RootFilesystemFull", "DiskSpaceLow"),
        ("DiskUsage90Percent", "DiskSpaceLow"),
        ("ServerRamExhausted", "MemoryUsageHigh"),
        ("WorkerNodeUnreachable", "NodeDown"),
        ("K8sNodeNotready", "NodeDown"),
        ("PodCrashlooping", "TrainingCrashing"),
        ("显卡温度告警", "GPUTemperatureHigh"),
        ("磁盘空间不足", "DiskSpaceLow"),
        ("노드 다운", "NodeDown"),
    ],
)
def test_words_of_a_name_are_understood(name: str, meant: str) -> None:
    """In any spelling, and the usual ones of some other languages."""
    assert suggested(name) == meant


@pytest.mark.parametrize(
    "name",
    [
        "APILatencyHigh", "GpuEccDoubleBit", "GPUHighUtilization", "GPUPowerHigh", "GPUClockLow", "NodeNetworkDown",
        "DcgmExporterDown", "NodeExporterDown", "DiskReadLatencyHigh", "InodesLowOnDisk", "PersistentVolumeDiskFull",
        "ContainerMemoryHigh", "PodMemoryLimit", "KubeletDown", "CpuTemperatureHigh", "DiskTempHigh", "InstanceDown",
        "NFSDiskFull", "DeploymentCrashLoop", "",
    ],
)  # fmt: skip
def test_what_means_something_else_is_not_suggested(name: str) -> None:
    """Neither what a playbook would do the wrong thing about, nor what names no node or GPU."""
    assert suggested(name) is None


def test_the_metric_of_the_rule_says_what_a_name_does_not() -> None:
    """It stands in ``generatorURL``. Quoted strings are values of labels and no metrics."""
    assert suggested("Alarm 17", 'DCGM_FI_DEV_GPU_TEMP{pool="a"} > 84', gpu="1") == "GPUTemperatureHigh"
    assert suggested("Härtefall", "nvidia_smi_memory_used_bytes / 2 > 1", uuid="u") == "GPUMemoryUsageHigh"
    assert suggested("P2", "node_filesystem_avail_bytes / node_filesystem_size_bytes < 0.1") == "DiskSpaceLow"
    assert suggested("P2", 'node_filesystem_avail_bytes{fstype=~"nfs4?"} < 1') is None
    for fstype in ("lustre", "virtiofs", "gfs2", "fuse", "tmpfs", "overlay"):
        assert suggested("P2", "node_filesystem_avail_bytes < 1", fstype=fstype) is None
    assert suggested("P3", 'http_requests{path="DCGM_FI_DEV_GPU_TEMP"} > 1') is None
    assert suggested("InstanceDown", "up == 0", job="node-exporter") == "NodeDown"


def test_labels_say_what_is_wrong_with_a_node() -> None:
    """As kube-state-metrics has conditions."""
    assert suggested("Condition", node="n1", condition="DiskPressure") == "DiskSpaceLow"
    assert suggested("Condition", node="n1", condition="FrequentKubeletRestart") is None


def test_an_xid_is_renamed_only_with_its_code() -> None:
    """Most XIDs are faults of a program: without the code a rename would say more than is known."""
    assert suggested("GpuXid", gpu="1") is None
    found = suggest({"alertname": "GpuXid", "gpu": "1", "XID": "79"}, "", (), NAMES)
    assert found is not None
    assert yaml.safe_load(snippet("GpuXid", found)) == {
        "rename": [
            {
                "alert": "GpuXid",
                "matchers": ['XID=~".+"'],
                "as": "GPUXidError",
            }
        ]
    }


def test_a_snippet_is_yaml_for_any_name() -> None:
    """Of quotes and colons too."""
    for name in ("it's: hot", "null", "- a", "温度", "two\nlines", "tab\there"):
        found = suggest({"alertname": name, "gpu": "0"}, "DCGM_FI_DEV_GPU_TEMP > 9", (), NAMES)
        assert found is not None
        assert yaml.safe_load(snippet(name, found))["rename"] == [{"alert": name, "as": "GPUTemperatureHigh"}]


def test_only_what_a_playbook_reacts_to_is_suggested() -> None:
    """And nothing for an alert that has the name already."""
    assert suggest({"alertname": "GpuTempHigh"}, "", (), ("NodeDown",)) is None
    assert suggested("GPUTemperatureHigh") is None


@pytest.mark.parametrize(
    ("name", "expression"),
    [
        ("AcceleratorCold", "DCGM_FI_DEV_GPU_TEMP < 8"),
        ("FramebufferRoomy", "nvidia_smi_memory_free_bytes > 7e10"),
        ("VramIdle", "DCGM_FI_DEV_FB_USED < 3"),
        ("RootfsShrinkable", 'node_filesystem_avail_bytes{mountpoint="/"} > 9e11'),
    ],
)
def test_a_rule_that_fires_while_the_value_is_good_is_not_suggested(name: str, expression: str) -> None:
    """The playbook would repair what is well."""
    assert suggested(name, expression) is None


@pytest.mark.parametrize(
    ("name", "expression", "meant"),
    [
        ("CardRoasting", "DCGM_FI_DEV_GPU_TEMP > 91", "GPUTemperatureHigh"),
        ("CardNearSlowdown", "slowdown_temp - DCGM_FI_DEV_GPU_TEMP < 4", "GPUTemperatureHigh"),
        ("VramTight", "DCGM_FI_DEV_FB_FREE < 300", "GPUMemoryUsageHigh"),
        ("VramTight", "1 - DCGM_FI_DEV_FB_FREE / DCGM_FI_DEV_FB_TOTAL > 0.97", "GPUMemoryUsageHigh"),
        ("VramTight", "DCGM_FI_DEV_FB_USED / (DCGM_FI_DEV_FB_USED + DCGM_FI_DEV_FB_FREE) > 0.97", "GPUMemoryUsageHigh"),
        ("RootTight", 'node_filesystem_avail_bytes{x="<"} / node_filesystem_size_bytes < 0.04', "DiskSpaceLow"),
    ],
)
def test_either_way_to_write_a_bound_is_understood(name: str, expression: str, meant: str) -> None:
    """By what is used, by what is left, and by the share of either."""
    assert suggested(name, expression) == meant


@pytest.mark.parametrize(
    ("name", "expression"),
    [
        ("GpuTempGone", "absent(DCGM_FI_DEV_GPU_TEMP)"),
        ("DiskSpaceUnknown", 'absent_over_time(node_filesystem_avail_bytes{mountpoint="/"}[9m])'),
        ("GpuTempSensorMissing", ""),
        ("GpuMemoryReadingStale", ""),
    ],
)
def test_a_value_that_is_not_reported_is_neither_high_nor_low(name: str, expression: str) -> None:
    """An exporter that has stopped says nothing of what it reads."""
    assert suggested(name, expression) is None


def test_a_node_that_is_missing_is_down() -> None:
    """Here the absence is the fault."""
    assert suggested("WorkerNodeMissing") == "NodeDown"
