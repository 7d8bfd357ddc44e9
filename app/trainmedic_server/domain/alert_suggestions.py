"""Suggestion of the shipped alert that means the same as another rule set's alert.

Evidence, in this order: the label ``condition``, the name, the rule's metrics (from ``generatorURL``), and annotations
if the name is not ASCII.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Collection, Iterable, Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_server.domain.proof import XID_LABELS

_LONGEST = 4_000  # characters of a text that are read
_WORD = re.compile(r"[A-Z]{2,}(?![a-z])|[A-Z]?[a-z]+|[A-Z]+")  # of CamelCase or snake_case
_METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_ASCII_NAME = re.compile(r"[A-Za-z0-9_.:/ -]+")  # for other names, annotations count too
_SHARED_TYPES = (  # file systems whose free space is not that of a node's disks: shared, in memory, layers, read-only
    r"nfs|lustre|ceph|gpfs|beegfs|fuse|cifs|smb|wekafs|glusterfs|virtiofs|gfs2|ocfs2|orangefs|9p|afs|daos|vastnfs|"
    r"tmpfs|ramfs|devtmpfs|overlay|squashfs"
)
_SHARED_TYPE = re.compile(_SHARED_TYPES)
_SHARED = re.compile(rf'fstype=~?"[^"]*(?:{_SHARED_TYPES})')
_QUOTED = re.compile(r'"[^"]*"')
_ABSENCE = re.compile(r"\babsent(?:_over_time)?\s*\(")
_MISSING_DATA_WORDS = ("absent", "missing", "stale", "nodata", "scrape")
# parts of metric names
_GROWS_WITH_THE_FAULT = ("used", "temp", "usage")
_SHRINKS_WITH_THE_FAULT = ("free", "avail")
_TRANSLATED = {  # parts of words in other scripts
    "温度": "temp",
    "高温": "hot",
    "过热": "hot",
    "온도": "temp",
    "temperatur": "temp",
    "температур": "temp",
    "显存": "vram",
    "ビデオメモリ": "vram",
    "磁盘": "disk",
    "硬盘": "disk",
    "ディスク": "disk",
    "디스크": "disk",
    "диск": "disk",
    "空间": "space",
    "空き容量": "space",
    "内存": "memory",
    "メモリ": "memory",
    "메모리": "memory",
    "памят": "memory",
    "使用率": "usage",
    "사용": "usage",
    "降频": "throttle",
    "节点": "node",
    "ノード": "node",
    "노드": "node",
    "узел": "node",
    "宕机": "down",
    "ダウン": "down",
    "다운": "down",
    "недоступ": "down",
    "显卡": "gpu",
    "空闲": "idle",
}
_COMPOUNDS = {  # words that `_WORD` cannot split
    "notready": "not ready",
    "crashloop": "crash loop",
    "crashlooping": "crash loop",
    "diskspace": "disk space",
}
_GPU = frozenset({"gpu", "gpus", "dcgm", "nvidia", "vram", "cuda", "nvml", "xid"})
_GPU_LABELS = frozenset({"uuid", "gpu_uuid", "gpu", "gpu_id"})


class Suggestion(Struct, frozen=True):
    name: str
    because: str
    matchers: tuple[str, ...] = ()


class _Topic(Struct, frozen=True):
    name: str
    words: tuple[tuple[str, ...], ...]
    """Groups of word prefixes; each group must occur. Those of up to 3 letters or after ``=`` must match whole."""
    metrics: tuple[str, ...]  # parts of metric names; one suffices
    not_words: tuple[str, ...]  # prefixes that exclude the topic
    needs_gpu: bool


def _topic(
    name: str, words: Iterable[str], metrics: str = "", not_words: str = "", *, needs_gpu: bool = False
) -> _Topic:
    groups = tuple(tuple(group.split()) for group in words)
    return _Topic(name, groups, tuple(metrics.split()), tuple(not_words.split()), needs_gpu)


_TOPICS = (
    _topic("GPUXidError", ["xid"], "xid_error", needs_gpu=True),
    _topic(
        "GPUThermalThrottling",
        ["throttl slowdown", "thermal heat temp hot"],
        "thermal_violation",
        "power cpu",
        needs_gpu=True,
    ),
    _topic(
        "GPUTemperatureHigh",
        ["temp hot overheat thermal heat"],
        "gpu_temp memory_temp temperature_gpu gpu_temperature temperature_celsius",
        "throttl low multiple cool",
        needs_gpu=True,
    ),
    _topic(
        "GPUMemoryUsageHigh",
        ["memory mem vram fb framebuffer"],
        "fb_used fb_free memory_used memory_free fb_total",
        "ecc error temp clock remap retired bandwidth copy spike leak broken page",
        needs_gpu=True,
    ),
    _topic(
        "GPUUtilizationLow",
        ["idle underutil unused low under", "util idle underutil unused usage"],
        not_words="high memory mem clock temp power spike",
        needs_gpu=True,
    ),
    _topic(
        "DiskSpaceLow",
        [
            "disk filesystem fs rootfs partition",
            "space full usage low fill almost pressure out high utilization capacity",
        ],
        "filesystem_avail_bytes filesystem_free_bytes logical_disk_free",
        "inode =files io latency read write persistent pvc volume smart temp zfs shared nfs lustre",
    ),
    _topic(
        "MemoryUsageHigh",
        ["memory mem ram", "usage high pressure full out utilization low exhaust almost"],
        "node_memory_memavailable memory_available_bytes node_memory_memfree",
        "container pod quota overcommit gpu leak fault underutil swap limit api slurm partition exporter",
    ),
    _topic(
        "NodeDown",
        ["node host machine", "down ready unreachable unavailable offline dead missing"],
        "kube_node_status_condition",
        "exporter flap network disk memory pressure filesystem interface kubelet api scheduler controller deployment "
        "driver gpu slurm pods pod schedul temp clock",
    ),
    _topic("TrainingCrashing", ["crash", "loop"], not_words="deployment service"),
)
_CONDITIONS = {"Ready": "NodeDown", "DiskPressure": "DiskSpaceLow", "MemoryPressure": "MemoryUsageHigh"}


def suggest(
    labels: Mapping[str, str],
    generator_url: str,
    texts: Iterable[str],
    names: Collection[str],
    *,
    is_complete: bool = True,
) -> Suggestion | None:
    """Return the best rename to one of `names`; None if none fits. `texts` are the annotations.

    For a rule without an alert, `generator_url` is its expression, and `is_complete` False: alerts have more labels.
    """
    name = labels.get("alertname", "")
    words = _words(name)
    if "instance" in words and "node" in labels.get("job", ""):
        words = (*words, "node")  # Every target is an instance. Only the node exporter's is a node.
    expression = _expression(generator_url)
    if _SHARED.search(expression) or _SHARED_TYPE.match(labels.get("fstype", "")):
        words = (*words, "shared")
    if labels.get("container") and "node" not in labels.get("job", ""):
        words = (*words, "container")  # A container's memory and disk are not the node's.
    metrics = [metric.lower() for metric in _METRIC.findall(_QUOTED.sub("", expression))]
    is_gpu = _is_about_gpu(words, metrics, labels)
    suggestion = (
        _by_condition(labels, metrics)
        or _by_words(words, is_gpu, f"the name {name!r}")
        or _by_metrics(metrics, words, is_gpu)
        or (_by_texts(texts, is_gpu, words) if not _ASCII_NAME.fullmatch(name) else None)
    )
    if suggestion is None or suggestion.name not in names or suggestion.name == name:
        return None
    if suggestion.name != "NodeDown" and (_ABSENCE.search(expression) or _has_any(words, _MISSING_DATA_WORDS)):
        return None
    if _fires_on_good_values(_QUOTED.sub("", expression), metrics):
        return None
    return suggestion if suggestion.name != "GPUXidError" else _with_code(suggestion, labels, is_complete)


def _with_code(suggestion: Suggestion, labels: Mapping[str, str], is_complete: bool) -> Suggestion | None:
    """Require an XID code, which alone states whether the GPU is at fault."""
    if not is_complete:
        return replace(suggestion, matchers=('err_code=~".+"',))
    code = next((label for label, value in labels.items() if value and label.lower() in XID_LABELS), None)
    return None if code is None else replace(suggestion, matchers=(f'{code}=~".+"',))


def snippet(alertname: str, suggestion: Suggestion) -> str:
    """Return the alert map's entry."""
    lines = ["rename:", f"  - alert: {_yaml_scalar(alertname)}", f"    as: {suggestion.name}"]
    if suggestion.matchers:
        lines.insert(2, f"    matchers: [{', '.join(map(_yaml_scalar, suggestion.matchers))}]")
    return "\n".join(lines) + "\n"


def _yaml_scalar(text: str) -> str:
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text) and text.lower() not in ("null", "true", "false"):
        return text
    if not text.isprintable():
        return json.dumps(text)  # JSON strings are valid YAML; single quotes would fold line feeds
    return "'" + text.replace("'", "''") + "'"


def _by_condition(labels: Mapping[str, str], metrics: Collection[str]) -> Suggestion | None:
    name = _CONDITIONS.get(labels.get("condition", ""))
    is_of_node = labels.get("node") and (not metrics or "kube_node_status_condition" in metrics)
    return Suggestion(name, f"the label condition={labels['condition']!r}") if name and is_of_node else None


def _by_words(words: Collection[str], is_gpu: bool, because: str) -> Suggestion | None:
    for topic in _TOPICS:
        if (is_gpu or not topic.needs_gpu) and _has_all(words, topic.words) and not _has_any(words, topic.not_words):
            return Suggestion(topic.name, because)
    return None


def _by_metrics(metrics: Collection[str], words: Collection[str], is_gpu: bool) -> Suggestion | None:
    for topic in _TOPICS:
        if (topic.needs_gpu and not is_gpu) or _has_any(words, topic.not_words) or topic.name == "NodeDown":
            continue  # NodeDown's metric has all conditions of nodes: see `_by_condition`
        for metric in metrics:
            if any(part in metric for part in topic.metrics):
                return Suggestion(topic.name, f"its rule reads {metric}")
    return None


def _fires_on_good_values(expression: str, metrics: Iterable[str]) -> bool:
    """Return whether the rule certainly fires on good values. Only single comparisons are judged."""
    is_below, is_above = "<" in expression, ">" in expression
    if is_below == is_above or "-" in expression:  # a difference, as ``1 - free``, reverses the meaning
        return False
    grows = shrinks = False
    for metric in metrics:
        grows = grows or any(part in metric for part in _GROWS_WITH_THE_FAULT)
        shrinks = shrinks or any(part in metric for part in _SHRINKS_WITH_THE_FAULT)
    return grows != shrinks and is_below == grows


def _by_texts(texts: Iterable[str], is_gpu: bool, words: Collection[str]) -> Suggestion | None:
    for text in texts:
        # The first words name the fault. A long text mentions much else.
        suggestion = _by_words({*words, *_words(text[:200])}, is_gpu, "its annotations")
        if suggestion is not None:
            return suggestion
    return None


def _is_about_gpu(words: Collection[str], metrics: Iterable[str], labels: Mapping[str, str]) -> bool:
    names = {label.lower() for label, value in labels.items() if value}
    return bool(
        _GPU & set(words)
        or any(metric.startswith(("dcgm_", "nvidia_", "gpu_", "gpu:")) for metric in metrics)
        or _GPU_LABELS & names
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(_each_word(text[:_LONGEST]))


def _each_word(text: str) -> Iterator[str]:
    for word in _WORD.findall(text.replace("GPUs", "Gpus").replace("PCIe", "Pcie")):
        small = word.lower()
        if small.startswith("gpu") and small not in _GPU:
            yield "gpu"
            small = small[3:]
        yield from _COMPOUNDS.get(small, small).split()
    if not text.isascii():
        yield from (word for foreign, word in _TRANSLATED.items() if foreign in text.lower())


def _has_all(words: Collection[str], groups: Iterable[tuple[str, ...]]) -> bool:
    return all(_has_any(words, group) for group in groups)


def _has_any(words: Collection[str], beginnings: tuple[str, ...]) -> bool:
    return any(_begins_with(word, begin) for begin in beginnings for word in words)


def _begins_with(word: str, begin: str) -> bool:
    must_be_equal = len(begin) <= 3 or begin.startswith("=")
    return word == begin.removeprefix("=") if must_be_equal else word.startswith(begin)


def _expression(generator_url: str) -> str:
    """Return the rule's PromQL from a Prometheus URL; other texts are PromQL themselves."""
    text = generator_url[:_LONGEST]
    if "://" not in text and not text.startswith("/"):
        return text
    try:
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(text).query)
    except ValueError:
        return ""
    return next(iter(query.get("g0.expr", query.get("expr", []))), "")
