"""Steps of a playbook in plain words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trainmedic_core.words import call, count, plain
from trainmedic_server.presentation import targets
from trainmedic_server.presentation.targets import IndexOf

Document = Mapping[str, Any]
PhraseOf = Callable[[Document, str], str]
"""Arguments: parameters of an action, and the words for its target. Returns an imperative."""
_SHOWN = 3  # targets of a step
_FACTORS = {0.25: "to a quarter", 0.5: "by half"}


def _factor(params: Document) -> str:
    factor = params.get("factor")
    if not isinstance(factor, int | float):
        return "by a factor that depends on the run"
    return _FACTORS.get(factor, f"by the factor {factor:g}")


def _scaling_phrase(what: str) -> PhraseOf:
    def phrase_of(params: Document, on: str) -> str:
        factor = params.get("factor")
        verb = _direction(factor) if isinstance(factor, int | float) else "change"
        return f"{verb} the {what} of {on} {_factor(params)}"

    return phrase_of


def _direction(factor: float) -> str:
    return "lower" if factor < 1 else "raise"


def _power(params: Document, on: str) -> str:
    percent = params.get("percent")
    if params.get("restore") or (isinstance(percent, int | float) and percent >= 100):
        return f"restore the power limit of {on}"
    amounts = ((params.get(name), unit) for name, unit in (("percent", "%"), ("watts", "W")))
    phrase = [f"{amount:g} {unit}" for amount, unit in amounts if isinstance(amount, int | float)]
    return f"lower the power limit of {on} to {phrase[0] if phrase else 'a value that depends on the run'}"


def _rollback(params: Document, on: str) -> str:
    skipped = params.get("skip_batches")
    more = f", skipping {skipped} {'batch' if skipped == 1 else 'batches'} of data" if skipped else ""
    where = "the newest checkpoint from before the alert began"
    if params.get("before") is not None:
        where = f"the newest checkpoint from before {plain(params['before'])}"
    elif params.get("step") is not None:
        where = f"the checkpoint at or before step {params['step']}"
    elif params.get("steps_back") is not None:
        where = f"a checkpoint at least {count(params['steps_back'], 'step')} back"
    return f"take {on} back to {where}{more}"


def _workers(params: Document, on: str) -> str:
    number, most = params.get("count"), params.get("at_most")
    phrase = f"{plain(most)} data loader workers at most" if number is None else f"{plain(number)} data loader workers"
    return f"use {phrase} for each rank of {on}"


def _node_phrase(text: str) -> PhraseOf:
    return lambda params, on: text.replace("{node}", plain(params["node"]) if params.get("node") else on)


def _target_phrase(text: str) -> PhraseOf:
    return lambda _, on: text.replace("{on}", on)


_PHRASES: Mapping[str, PhraseOf] = {
    "gpu.power_limit": _power,
    "job.accumulate": _scaling_phrase("number of accumulated micro-batches"),
    "job.checkpoint": _target_phrase("write a checkpoint of {on}"),
    "job.dataloader_workers": _workers,
    "job.empty_cache": _target_phrase("free the unused GPU memory that {on} holds"),
    "job.pause": lambda params, on: f"pause {on} for {plain(params.get('max', '1h'))} at most",
    "job.resume": _target_phrase("let {on} continue"),
    "job.rollback": _rollback,
    "job.scale_batch": _scaling_phrase("micro-batch"),
    "job.scale_lr": _scaling_phrase("learning rate"),
    "job.stop": lambda params, on: f"stop {on}{' after a checkpoint' if params.get('checkpoint', True) else ''}",
    "k8s.cordon": _node_phrase("cordon {node} in Kubernetes"),
    "k8s.drain": _node_phrase("drain {node} in Kubernetes"),
    "k8s.uncordon": _node_phrase("uncordon {node} in Kubernetes"),
    "slurm.drain": _node_phrase("drain {node} in Slurm"),
    "slurm.reboot": _node_phrase("reboot {node} by Slurm"),
    "slurm.resume": _node_phrase("resume {node} in Slurm"),
    "slurm.requeue": _target_phrase("requeue {on} in Slurm"),
    "slurm.cancel": _target_phrase("cancel {on} in Slurm"),
    "launcher.exclude_node": _node_phrase("exclude {node} from the job's next attempts"),
    "launcher.include_node": _node_phrase("allow {node} in the job's next attempts again"),
    "node.restart_unit": lambda params, on: f"restart the unit {plain(params.get('unit', ''))} on {on}",
    "node.restart_container": lambda params, on: f"restart the container {plain(params.get('container', ''))} on {on}",
    "gpu.reset": lambda _, on: (
        f"reset all GPUs of {on} if no process uses one"
        if on.startswith("node ")
        else f"reset {on} if no process uses it"
    ),
    "node.reboot": _target_phrase("restart {on}"),
    "node.power": lambda params, on: f"turn {on} {plain(params.get('do', 'on or off'))}",
    "node.power_cycle": _target_phrase("turn {on} off and on again"),
    "node.facts": _target_phrase("read the state of {on}; this changes nothing"),
    "node.health": lambda params, on: (
        f"check the health of {on}{' under load' if params.get('level') == 'burn' else ''}; this changes nothing"
    ),
    "disk.clean": _target_phrase("delete files on {on} as the node's policy allows"),
    "disk.prune_containers": _target_phrase("delete unused containers and images on {on}"),
    "notify": lambda params, _: f"send a message{_titled(params)}",
}


_PAST: Mapping[str, str] = {
    "cancel": "cancelled",
    "send": "sent",
    "stop": "stopped",
    "take": "took",
    "write": "wrote",
    **{word: word for word in ("let", "read", "reset")},
}
"""By the first word, where it is not formed with -d or -ed."""


def _titled(params: Document) -> str:
    return f": {plain(params['title'])}" if params.get("title") else ""


def _listed(names: Sequence[str]) -> str:
    if len(names) > _SHOWN:
        return f"{', '.join(names[:_SHOWN])} and {len(names) - _SHOWN} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def sentence(step: Document, target: str | None = None, index_of: IndexOf = targets.unknown) -> str:
    """Return ``lower the power limit of GPU 3 on node-2 to 80 %``, with the step's condition first.

    `step` has ``action``, ``params``, ``targets`` and ``note``, as a question's. `target` is the run's, as a key.
    """
    action, params = str(step.get("action") or ""), step.get("params") or {}
    note = step.get("note")
    key = next(iter(step.get("targets") or ()), target)
    on = targets.within(key, index_of) if key else "the target"
    # The step of a group (`engine.preview`) is worded for its first member, as its note states.
    if key and not str(note or "").startswith("for each of"):
        on = _listed([targets.within(str(each), index_of) for each in step.get("targets") or (key,)])
    phrase_of = _PHRASES.get(action)
    # The parameters of a step with a note may be unknown before the run (`engine.preview`).
    if phrase_of is None or (note and not params):
        phrase = call(action, params) + (f" on {on}" if key else "")
    else:
        phrase = phrase_of(params, on)
    if not note:
        return phrase
    return f"{note}: {phrase}" if str(note).startswith("if ") else f"{phrase} ({plain(note)})"


def done(step: Document, target: str | None = None, index_of: IndexOf = targets.unknown) -> str:
    """Return ``lowered the power limit of GPU 3 on node-2 to 80 %``."""
    phrase = sentence({**step, "note": None}, target, index_of)
    if step.get("action") not in _PHRASES:
        return f"carried out {phrase}"
    verb, _, rest = phrase.partition(" ")
    return f"{_PAST.get(verb) or (f'{verb}d' if verb.endswith('e') else f'{verb}ed')} {rest}"


def sentences(
    steps: Sequence[Document], target: str | None = None, index_of: IndexOf = targets.unknown
) -> Iterator[str]:
    for step in steps:
        phrase = sentence(step, target, index_of)
        is_name = "." in phrase.partition(" ")[0]
        yield phrase if is_name else phrase[:1].upper() + phrase[1:]
