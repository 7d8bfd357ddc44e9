"""What the shipped playbooks tell people is so, however a run goes.

Each playbook is carried out by the simulation once for each way in which its steps can end. Every sentence of every
text that it sends has to be known here: as one about the alert or about what to do, or as a claim about what was
done, which is then held against the run. So a text that is new or changed has to be put in its place before the test
passes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from tests.support.examples import some
from tests.unit.playbooks.test_shipped_playbooks import FILES
from trainmedic_server.actions import registry
from trainmedic_server.catalog import loader
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook
from trainmedic_server.domain.playbook import ActionStep, Mode, WaitStep
from trainmedic_server.domain.run import Run, StepStatus
from trainmedic_server.engine import service
from trainmedic_server.simulation import suite
from trainmedic_server.simulation.suite_format import TestEntry

ACTIONS = registry.specs_only()
SUMMARY = "The alert says so"
WAYS = ("failed", "rejected", "timeout")
"""How an action can end that is not applied; of a timeout nobody knows."""

Claim = Callable[[Run], bool]


def statuses(run: Run, *actions: str) -> list[StepStatus]:
    return [step.status for step in run.steps if step.action in actions and step.phase == "steps"]


def done(*actions: str) -> Claim:
    """One of these actions is known to have been carried out."""
    return lambda run: StepStatus.SUCCEEDED in statuses(run, *actions)


def not_done(*actions: str) -> Claim:
    """None of these actions was carried out, for certain."""
    return lambda run: not {StepStatus.SUCCEEDED, StepStatus.UNKNOWN} & set(statuses(run, *actions))


def not_known(*actions: str) -> Claim:
    """Of one of these actions nobody knows whether it was carried out; and none is known to have been."""
    return lambda run: StepStatus.UNKNOWN in statuses(run, *actions) and not done(*actions)(run)


def possibly(*actions: str) -> Claim:
    """One of these actions was carried out, or nobody knows whether it was."""
    return lambda run: bool({StepStatus.SUCCEEDED, StepStatus.UNKNOWN} & set(statuses(run, *actions)))


def owed_or_done(run: Run) -> bool:
    """Everything that may have been changed is taken back, or will be."""
    changed = [step for step in run.steps if step.undo and step.status in (StepStatus.SUCCEEDED, StepStatus.UNKNOWN)]
    return bool(changed) and all(step.undo is not None and step.undo.trigger == "on_failure" for step in changed)


def lowered(run: Run) -> bool:
    """A power limit is known to be lower than before."""
    succeeded = [step.output for step in run.steps if step.action == CAP and step.status is StepStatus.SUCCEEDED]
    return any(output.get("limit_watts", 0) < output.get("previous_watts", 1) for output in succeeded)


def deleted(run: Run) -> bool:
    """A cleaning is known to have deleted something."""
    files = sum(step.output.get("files", 0) for step in run.steps if step.action == CLEAN)
    pruned = [step.output for step in run.steps if step.action == PRUNE]
    return bool(files or any(sum(each.get("removed", {}).values()) or each.get("build_cache_bytes") for each in pruned))


def both(*claims: Claim) -> Claim:
    return lambda run: all(claim(run) for claim in claims)


CAP, CLEAN, SAVE = "gpu.power_limit", "disk.clean", "job.checkpoint"
PRUNE = "disk.prune_containers"
SLOW_CHANGES = ("job.dataloader_workers", "job.scale_batch")
NODES_OF_JOB = ("launcher.exclude_node", "launcher.include_node")
CLAIMS: Mapping[str, Claim] = {
    "A lower power limit has not cooled it enough.": lowered,
    "A lower power limit has not ended it.": lowered,
    "Whether its power limit was lowered is not known.": lambda run: (
        StepStatus.UNKNOWN in statuses(run, CAP) and not lowered(run)
    ),
    "Its power limit was not lowered.": lambda run: not lowered(run) and StepStatus.UNKNOWN not in statuses(run, CAP),
    "Cleaning up by the agent's rules was not enough.": both(done(CLEAN, PRUNE), deleted),
    "Nothing was deleted by the agent's rules.": both(done(CLEAN, PRUNE), lambda run: not deleted(run)),
    "Nothing was deleted: the agents' rules clean disks of nodes only.": not_done(CLEAN),
    "Whether anything was cleaned up is not known.": lambda run: (
        StepStatus.UNKNOWN in statuses(run, CLEAN, PRUNE) and not deleted(run)
    ),
    "No cleaning by the agent's rules has come to its end.": not_done(CLEAN, PRUNE),
    "Its state is saved; start it again from there, with the leak mended.": done(SAVE),
    "Whether its state is saved is not known.": not_known(SAVE),
    "Its state was not saved.": not_done(SAVE),
    "What was changed did not help, and is to be taken back.": both(done(*SLOW_CHANGES), owed_or_done),
    "Whether anything was changed is not known; if so, it is to be taken back.": both(
        not_known(*SLOW_CHANGES), owed_or_done
    ),
    "Nothing was changed.": not_done(*SLOW_CHANGES, *NODES_OF_JOB),
    "Nothing was changed: REASON": not_done(*NODES_OF_JOB),
    "JOB continues without a node": done("launcher.exclude_node"),
    "JOB has a node back": done("launcher.include_node"),
    "Throughput: FIGURES": done("job.load"),
    "GPUs busy: FIGURES": done("job.load"),
    "The node waits until training-below-target, or a person (launcher.include_node), takes it back.": done(
        "launcher.exclude_node"
    ),
    "The node that left is to be taken back.": both(possibly("launcher.exclude_node"), owed_or_done),
    "The node that came back is to leave again.": both(possibly("launcher.include_node"), owed_or_done),
    "Node NODE has a broken GPU and is drained": done("k8s.drain"),
    "Node NODE has broken hardware and is drained": done("k8s.drain"),
    "JOB failed on node NODE, which is drained": done("k8s.drain"),
    "It takes pods again after a health check.": done("k8s.drain"),
    "job other goes on without the node": lambda run: any(
        "other" in step.output.get("jobs", ()) for step in run.steps if step.action == "launcher.exclude_node"
    ),
    "NODE could not be asked: REASON": lambda run: not done("node.facts")(run),
    "NODE: READINGS": done("node.facts"),
    "GPU 4 does not answer": done("node.facts"),
    "The most on one of its nodes: READINGS": done("node.facts"),
    "For half an hour all ranks have waited for one on NODE.": lambda run: (
        run.ended_at is not None and run.ended_at - run.created_at >= timedelta(minutes=30)
    ),
}
ABOUT_THE_ALERT = frozenset(
    {
        SUMMARY, f"{SUMMARY}.", "It ended so N times before.",
        "NODE: a file system is nearly full, and Trainmedic cannot clean it", "/boot/efi (/dev/nvme0n1p1)",
        "NODE: the disk is still nearly full", "NODE: memory is nearly full", "Node NODE is down and needs somebody",
        "Node NODE has a broken GPU and needs somebody", "Node NODE has broken hardware and needs somebody",
        "Node NODE, on which JOB failed, needs somebody", "NODE still holds up JOB",
        "GPU GPU on NODE is still hot", "GPU GPU on NODE is still slowed down by heat",
        "GPU GPU on NODE is held and idle", "GPU 4 does not answer",
        "JOB: GPU memory is still nearly full", "JOB: memory is still nearly full", "JOB: still slow",
        "A GPU of JOB is nearly out of memory; its next long sequence may end the job.",
        "JOB is nearly out of memory; its next long sequence may end it.", "JOB has become slow.",
        "JOB: the gradients are still too large", "The gradients of JOB exploded at TIME and have not come down.",
        "JOB: the learning rate is still off its schedule",
        "The learning rate of JOB has been off its schedule since TIME.",
        "JOB: the loss is still not a number", "The loss of JOB has not been a number since TIME.",
        "JOB: the loss is still high", "The loss of JOB jumped at TIME and has not recovered.",
        "JOB: the loss still scatters", "JOB leaks memory",
        "JOB keeps more memory with every step, and will end when there is none left.",
        "JOB: the ranks' weights differ", "The weights of JOB have not been the same on all ranks since TIME.",
        "JOB: rank N holds up the others", "JOB hangs", "JOB has completed no step since before TIME.",
        "JOB is gone", "JOB has not come back", "JOB has been gone since TIME.",
        "JOB fails again and again", "JOB failed: CAUSE", "JOB failed", "JOB is slow",
        "JOB is slow: data, confidence medium", "JOB uses little of its GPUs",
        "JOB misses its target, and its GPUs are busy", "JOB: running on fewer nodes did not work out",
        "JOB: another node did not work out",
    }
)  # fmt: skip
"""True because the alert fires, whatever was done."""
ADVICE = frozenset(
    {
        "Look at its fan, its air inlet, and the room.",
        "Look at its fan, its air inlet, its power supply, and the room.",
        "Look at the data that it trains on, and at the gradient norm.",
        "Look for a hot GPU, a slow file system, or a slow network.",
        "The log of each rank says which differ; look at the memory and the GPU of these.",
        "Where a rank is lost, end the job's processes and start it from its last checkpoint.",
        "Reset or repair it;",
        "Make room there, or make it larger.",
        "Consider to cordon the node and to start the job without it.",
        "Its launcher keeps what each attempt printed, and its exit status, under its log directory.",
        "Start it again from its newest checkpoint, or let a scheduler or trainmedic-run do so.",
        "Where it was ended on purpose, say so by trainmedic jobs end JOB --note ..., which ends the alert.",
        "Mend it, look whether it is healthy (trainmedic agent health), and give it back to the cluster.",
        "Mend the node, look whether it is healthy (trainmedic agent health), and give it back to the cluster.",
        "trainmedic diagnose JOB shows what this rests on.",
        "See what its steps wait for (trainmedic report JOB), or give it fewer nodes.",
        "Give it more nodes within its bounds, such as by k8s.scale, or a target that it can reach.",
    }
)  # fmt: skip


def cases(path: Path) -> Iterator[tuple[YamlPlaybook, TestEntry]]:
    """The playbook of the file, and a test for each way in which its steps can end."""
    (shipped,) = loader.load_file(path, ACTIONS).playbooks
    # Some are shipped to observe, until somebody lets them act.
    book = replace(shipped, definition=shipped.definition.model_copy(update={"mode": Mode.ENFORCE}))
    written = yaml.safe_load(path.with_name(f"{path.stem}_test.yaml").read_text(encoding="utf-8"))
    alert = next(entry["alert"] for test in written["tests"] for entry in test.get("alerts", ()))
    alert = {**alert, "annotations": {**alert.get("annotations", {}), "summary": SUMMARY}}
    alerts = [{"at": "0s", "alert": alert}]
    if goes_on_after_it_is_over(book):
        alerts.append({"at": "20m", "status": "resolved", "alert": alert})
    for case, replies in some(ways(book, outputs(written))):
        entry = {"name": case, "alerts": alerts, "replies": replies, "end": "45m", "expect": {"runs": []}}
        yield book, TestEntry.model_validate(entry)


def goes_on_after_it_is_over(book: YamlPlaybook) -> bool:
    """Whether it acts after its alert has resolved; else what people are told while it fires says all."""
    steps = book.definition.steps
    waits = [index for index, step in enumerate(steps) if isinstance(step, WaitStep) and step.on_timeout == "fail"]
    return bool(waits) and any(isinstance(step, ActionStep) for step in steps[waits[0] :])


def outputs(written: Mapping[str, Any]) -> Mapping[str, Any]:
    """What steps return where they are carried out, as the playbook's own tests say."""
    replies = [(step, reply) for test in written["tests"] for step, reply in (test.get("replies") or {}).items()]
    return {
        step: reply["applied"]
        for step, given in replies
        for reply in (given if isinstance(given, list) else [given])
        if isinstance(reply, dict) and isinstance(reply.get("applied"), dict)
    }


def ways(book: YamlPlaybook, known: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each step ends in each way while the others are applied; and all of them end in each way. With that in words."""
    steps = [
        step.id or f"step-{number}"
        for number, step in enumerate(book.definition.steps, 1)
        if isinstance(step, ActionStep)
    ]
    applied = {step: {"applied": {"jobs": ["other"]} if step == "leave" else known.get(step, {})} for step in steps}
    yield "all applied", applied
    for way in WAYS:
        yield f"all {way}", dict.fromkeys(steps, way)
        for step in steps:
            yield f"{step} {way}", {**applied, step: way}


def sentences(text: str, run: Run) -> Iterator[str]:
    """The sentences of a text, with the names of this run replaced, without what is said of each step."""
    target = run.target
    assert target is not None
    labels = run.alert_labels
    names = {
        labels.get("job_name", ""): "JOB",
        target.job or "": "JOB",
        target.node or "": "NODE",
        target.gpu or "": "GPU",
    }
    for name, word in sorted(names.items(), key=lambda pair: -len(pair[0])):
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", word, text) if name else text
    text = re.sub(r"\d{4}-\d\d-\d\dT[0-9:.]+(Z|\+00:00)", "TIME", text)
    text = re.sub(r"^- (?!job )[\w-]+: \w+(, .*)?$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^NODE: processors .*$", "NODE: READINGS", text, flags=re.MULTILINE)
    text = re.sub(r"^(The most on one of its nodes: ).*$", r"\1READINGS", text, flags=re.MULTILINE)
    text = re.sub(r"^(NODE could not be asked: ).*$", r"\1REASON", text, flags=re.MULTILINE)
    text = re.sub(r"^(JOB failed: ).*$", r"\1CAUSE", text, flags=re.MULTILINE)
    text = re.sub(r"^(Nothing was changed: ).*$", r"\1REASON", text, flags=re.MULTILINE)
    text = re.sub(r"^((?:Throughput|GPUs busy): ).*$", r"\1FIGURES", text, flags=re.MULTILINE)
    text = re.sub(r"^JOB continues without n\d+$", "JOB continues without a node", text, flags=re.MULTILINE)
    text = re.sub(r"^JOB has n\d+ back$", "JOB has a node back", text, flags=re.MULTILINE)
    text = re.sub(r"(?<=rank )\d+|(?<=ended so )\d+", "N", text)
    text = re.sub(r"^- ", "", text, flags=re.MULTILINE)
    text = re.sub(r"(?<=[a-z,])\n(?=[a-z])", " ", text)  # lines that are broken for their length
    text = text.replace("repair it; it takes", "repair it;\nIt takes")
    yield from filter(None, map(str.strip, re.split(r"\n|(?<=\.) (?=[A-Z])", text)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_people_are_told_is_so_however_the_run_goes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No text claims an act that did not happen, or denies one that did or may have; and every branch tells people
    at most what is on record."""
    monkeypatch.setattr(service, "HEARTBEAT", timedelta(hours=1))  # so that 45 minutes pass quickly
    extra = alert_texts(path)
    for book, entry in cases(path):
        seen = suite.played(entry, [book], ACTIONS)
        (record,) = [record for record in seen.runs if record.run.decision == "started"]
        for call in seen.calls:
            if call.action != "notify":
                continue
            for sentence in sentences(f"{call.params.get('title', '')}\n{call.params['message']}", record.run):
                claim = CLAIMS.get(sentence)
                if claim is None:
                    assert sentence in ABOUT_THE_ALERT | ADVICE | extra, f"{entry.name}: nobody has judged {sentence!r}"
                else:
                    assert claim(record.run), f"{entry.name}: {sentence!r} is not so: {record.run.steps}"


def alert_texts(path: Path) -> frozenset[str]:
    """What a playbook passes on that came with its alert, or stands in its variables as advice."""
    written = yaml.safe_load(path.with_name(f"{path.stem}_test.yaml").read_text(encoding="utf-8"))
    annotations = next(entry["alert"] for test in written["tests"] for entry in test.get("alerts", ())).get(
        "annotations"
    )
    variables = yaml.safe_load(path.read_text(encoding="utf-8")).get("vars", {}).get("next", {})
    texts = [*(annotations or {}).values(), *variables.values()]
    return frozenset(part.strip() for text in texts for part in re.split(r"\n|(?<=\.) (?=[A-Z])", str(text)))
