"""The job that a playbook's target names by what it uses: ``node:<node>``, ``gpu:<GPU>``, ``pod:<namespace>/<name>``.

Three sources know who uses a GPU, and they are asked in this order: the jobs themselves, which say where
their ranks are; the labels of the alert, which name the job or its pod; the agent of the node, which sees
whose processes are on it. The first that knows has the word, for names differ: a pod's label has the name of
its resource, and only a job knows by which name it takes commands. But where a source knows of several, no
other can say which one is meant: then only a job that the labels name is taken, and that no source denies.

Pure. Who calls it: ``catalog.book``, for a target that is written as a mapping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainmedic_server.domain import gpu_names, target
from trainmedic_server.domain.target import IdentityLabels, Unresolved
from trainmedic_server.domain.topology import Known

OF_THE_ALERT = "alert"
"""``gpu:alert`` is the GPU that the labels of the alert name."""


def find(reference: str, labels: Mapping[str, str], known: Known, identity: IdentityLabels) -> str | Unresolved:
    """The job; a reference of no known form is a job's name."""
    form, colon, name = reference.partition(":")
    name = name.strip()
    if not colon or form not in ("node", "gpu", "pod"):
        return reference
    if not name:
        return Unresolved("target_unknown", f"{reference!r} names no {form} for this alert")
    match form:
        case "node":
            return _on_node(name, known)
        case "gpu":
            return _on_gpu(name, labels, known, identity)
        case _:
            return _of_pod(name, known)


def _on_node(name: str, known: Known) -> str | Unresolved:
    node = target.named_node(name, known)
    if isinstance(node, Unresolved):
        return node
    sources = [_jobs(known, f"told:node:{node}"), _jobs(known, f"node:{node}")]
    return _agreed(sources, f"node {node!r}")


def _of_pod(name: str, known: Known) -> str | Unresolved:
    if "/" not in name:
        return Unresolved("target_unknown", f"pod {name!r} is not written as <namespace>/<name>")
    return _agreed([_jobs(known, f"pod:{name}")], f"pod {name!r}")


def _on_gpu(name: str, labels: Mapping[str, str], known: Known, identity: IdentityLabels) -> str | Unresolved:
    told = target.job_told_by(labels, known, identity)
    if isinstance(told, Unresolved) and told.reason == "target_ambiguous":
        return told
    keys = _keys_of_alert(labels, known, identity) if name == OF_THE_ALERT else _keys(name, known)
    if isinstance(keys, Unresolved):
        return told if isinstance(told, str) and keys.reason == "target_unknown" else keys
    by_labels = frozenset() if isinstance(told, Unresolved) else frozenset({told})
    by_jobs = frozenset[str]().union(*(_jobs(known, f"told:gpu:{key}") for key in keys))
    by_agent = frozenset[str]().union(*(_jobs(known, f"gpu:{key}") for key in keys))
    seen = [by_jobs, by_agent]
    if any(len(source) > 1 for source in seen) and by_labels and all(by_labels <= one for one in seen if one):
        return next(iter(by_labels))
    return _agreed([by_jobs, by_labels, by_agent], f"GPU {' or '.join(keys)}")


def _keys(name: str, known: Known) -> tuple[str, ...] | Unresolved:
    node, slash, gpu = name.rpartition("/")
    if not slash:
        if gpu_names.is_of_one_node(name):
            return Unresolved("target_unknown", f"GPU {name!r} is one of many; write gpu:<node>/{name}, or its UUID")
        return (gpu_names.key(name),)
    found = target.named_node(node, known)
    return found if isinstance(found, Unresolved) else (gpu_names.key(gpu, found),)


def _keys_of_alert(labels: Mapping[str, str], known: Known, identity: IdentityLabels) -> tuple[str, ...] | Unresolved:
    """Of the GPU that the labels name. Its UUID is enough, and tells it without a node."""
    gpu = target.gpu_told_by(labels, identity)
    if isinstance(gpu, Unresolved):
        return gpu
    if not gpu_names.is_of_one_node(gpu):
        return (gpu_names.key(gpu),)
    node = target.node_told_by(labels, known, identity)
    return node if isinstance(node, Unresolved) else (gpu_names.key(gpu, node),)


def _jobs(known: Known, key: str) -> frozenset[str]:
    found = known.get(key, ())
    return frozenset((found,) if isinstance(found, str) else found)


def _agreed(sources: Sequence[frozenset[str]], what: str) -> str | Unresolved:
    """The job of the first source that knows one."""
    several = next((source for source in sources if len(source) > 1), None)
    if several is not None:
        return Unresolved("target_ambiguous", f"several jobs are known to use {what}: {', '.join(sorted(several))}")
    job = next((next(iter(source)) for source in sources if source), None)
    return job or Unresolved("target_unknown", f"no job is known to use {what}")
