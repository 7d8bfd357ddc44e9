"""What steps, targets and runs are called, and a run in three sentences."""

from __future__ import annotations

from typing import Any

import pytest

from trainmedic_server.domain.alert import STAND_INS
from trainmedic_server.presentation import run_story, steps, targets
from trainmedic_server.presentation.sentences import At

UUID = "GPU-5f3a9c1e-7b42-4d1e-9a31-0c4f2b6d8e10"
KEY = f"gpu:node-2/{UUID}"


def third(_: str) -> int:
    """Every GPU has index 3."""
    return 3


@pytest.mark.parametrize(
    ("key", "name", "within"),
    [
        (KEY, "node-2 · GPU 3", "GPU 3 on node-2"),
        ("gpu:node-2/5", "node-2 · GPU 5", "GPU 5 on node-2"),
        ("job:team/llm-1", "job team/llm-1", "job team/llm-1"),
        ("node:node-2", "node node-2", "node node-2"),
        ("cluster", "cluster", "the cluster"),
        ("nothing of it", "nothing of it", "nothing of it"),
    ],
)
def test_a_target_is_named_for_people(key: str, name: str, within: str) -> None:
    """An index that is already there is not looked up."""
    assert str(targets.words(key, third)) == name
    assert targets.within(key, third) == within


def test_a_gpu_of_unknown_index_has_the_beginning_of_its_uuid() -> None:
    """No index is made up; the whole UUID stays behind the name."""
    assert targets.words(KEY) == targets.TargetWords("gpu", "node-2 · GPU 5f3a9c1e", UUID)


def test_an_alert_that_has_both_names_of_its_gpu_gives_the_index() -> None:
    """Of that GPU alone."""
    index_of = targets.index_in({"gpu": "3", "uuid": UUID})
    assert (index_of(UUID), index_of("GPU-0")) == (3, None)
    assert targets.index_in({"uuid": UUID})(UUID) is None


def test_the_key_of_a_gpu_within_a_text_becomes_its_name() -> None:
    """The rest of the text stays."""
    assert targets.shortened(f"another run holds {KEY} until 12:20", third) == (
        "another run holds node-2 · GPU 3 until 12:20"
    )
    assert (
        targets.shortened(f"Lower the limit of GPU {UUID} on node-2?", third) == "Lower the limit of GPU 3 on node-2?"
    )


@pytest.mark.parametrize(
    ("action", "params", "base", "past"),
    [
        (
            "gpu.power_limit",
            {"percent": 80},
            "lower the power limit of X to 80 %",
            "lowered the power limit of X to 80 %",
        ),
        ("gpu.power_limit", {"watts": 300.0}, "lower the power limit of X to 300 W", "lowered the power limit of X to"),
        ("job.scale_lr", {"factor": 0.5}, "lower the learning rate of X by half", "lowered the learning rate of X"),
        ("job.scale_lr", {"factor": 2.0}, "raise the learning rate of X by the factor 2", "raised the learning rate"),
        ("job.rollback", {}, "take X back to the newest checkpoint from before the alert began", "took X back"),
        (
            "job.rollback",
            {"step": 7, "skip_batches": 1},
            "take X back to the checkpoint at or before step 7, skipping 1 batch of data",
            "took X back to the checkpoint at or before step 7, skipping 1 batch",
        ),
        ("job.rollback", {"step": 7}, "take X back to the checkpoint at or before step 7", "took X back"),
        ("job.stop", {}, "stop X after a checkpoint", "stopped X after a checkpoint"),
        ("job.stop", {"checkpoint": False}, "stop X", "stopped X"),
        ("job.pause", {"max": "10m"}, "pause X for 10m at most", "paused X for 10m at most"),
        ("k8s.drain", {"node": "n 1"}, "drain n 1 in Kubernetes", "drained n 1 in Kubernetes"),
        ("job.dataloader_workers", {"at_most": 2}, "use 2 data loader workers at most for each rank of X", "used 2"),
        ("notify", {"title": "Hot"}, "send a message: Hot", "sent a message: Hot"),
        ("site.fix", {"hard": True}, "site.fix hard=true on X", "carried out site.fix hard=true on X"),
    ],
)
def test_a_step_is_told_in_plain_words(action: str, params: dict[str, Any], base: str, past: str) -> None:
    """Before it is done and after; an action that nobody described appears as it is written."""
    step = {"action": action, "params": params, "targets": ["job:llm-1"]}
    assert steps.sentence(step) == base.replace("X", "job llm-1")
    assert steps.done(step).startswith(past.replace("X", "job llm-1"))


def test_a_condition_stands_before_its_step_and_a_doubt_behind_it() -> None:
    """So that an alternative does not read as a second act."""
    capped = {"action": "gpu.power_limit", "params": {"percent": 60}, "targets": [KEY]}
    first, second = steps.sentences(
        [{**capped, "note": "if the alert still fires after 3 min"}, {**capped, "note": "would depend on <b>"}],
        index_of=third,
    )
    assert first == "If the alert still fires after 3 min: lower the power limit of GPU 3 on node-2 to 60 %"
    assert second == "Lower the power limit of GPU 3 on node-2 to 60 % (would depend on <b>)"


CAPPED = {"action": "gpu.power_limit", "params": {"percent": 80}, "status": "succeeded"}
RUN: dict[str, Any] = {
    "playbook": "cool",
    "alert_name": "GPUHot",
    "target": KEY,
    "status": "succeeded",
    "acted_at": "2026-01-31T12:00:00Z",
    "alerts": [{"resolved_at": "2026-01-31T12:09:00Z"}],
    "steps": [CAPPED],
    "changed": [],
}
CHANGE = {
    **CAPPED,
    "before": "700 W",
    "after": "560 W",
    "given_back": "when GPUHot resolves",
    "is_certain": True,
    "undo_error": None,
}


def test_a_run_that_helped_is_told_in_three_sentences() -> None:
    """What was done is in the past tense, and what is over is called over."""
    told = run_story.story({**RUN, "undone_at": "2026-01-31T12:09:01Z"}, third)
    assert told.happened == (
        "GPUHot fired for GPU 3 on node-2. Trainmedic lowered the power limit of GPU 3 on node-2 to 80 %; "
        "the run succeeded, and the alert has resolved."
    )
    assert told.changed == ("Nothing. All changes were reverted at 2026-01-31 12:09:01Z.",)
    assert told.next == (("Nothing: the run is over.",),)


def test_nothing_is_called_unchanged_that_is_changed() -> None:
    """A change has its values and its end; one of unknown outcome is told as a doubt."""
    told = run_story.story({**RUN, "status": "failed", "message": "still hot", "changed": [CHANGE]}, third)
    assert told.changed == (
        "Lowered the power limit of GPU 3 on node-2 to 80 % (700 W → 560 W). Reverted: when GPUHot resolves.",
    )
    (lost,) = run_story.story({**RUN, "changed": [{**CHANGE, "lost_because": "its lease had run out"}]}).changed
    assert lost.endswith("(700 W → 560 W). It ended early: its lease had run out. Reverted: when GPUHot resolves.")
    (doubted,) = run_story.story({**RUN, "changed": [{**CHANGE, "is_certain": False, "undo_error": "away"}]}).changed
    assert doubted.startswith("Perhaps lower the power limit")
    assert doubted.endswith("Reverted: when GPUHot resolves. The last attempt to revert it failed: away.")


@pytest.mark.parametrize("undone_at", [None, "2026-01-31T12:09:01Z"])
def test_a_step_that_found_the_work_of_another_claims_no_change(undone_at: str | None) -> None:
    """Neither before nor after its undo, which leaves what another has done."""
    output = {"changed": False, "note": "drained by another already"}
    step = {"action": "slurm.drain", "params": {}, "status": "succeeded", "output": output}
    step["undo"] = {"status": "done" if undone_at else "armed"}
    left = {**CHANGE, **step, "before": None, "after": None, "unchanged_because": "drained by another already"}
    run = {**RUN, "target": "node:n1", "steps": [step], "changed": [] if undone_at else [left], "undone_at": undone_at}
    told = run_story.story(run)
    assert told.happened == (
        "GPUHot fired for node n1. Trainmedic had nothing to change by slurm.drain (drained by another already); "
        "the run succeeded, and the alert has resolved."
    )
    assert told.changed == (
        "Nothing: its actions have left no lasting change, or a person closed their undo."
        if undone_at
        else "Nothing by slurm.drain: drained by another already.",
    )


@pytest.mark.parametrize(
    ("changes", "happened", "follows"),
    [
        (
            {"status": "failed", "message": "still hot", "alerts": [{"resolved_at": None}], "steps": []},
            "Trainmedic carried out no step successfully; the run failed: still hot; the alert still fires.",
            "Nothing by itself: the alert still fires, and a person has to look at it.",
        ),
        (
            {"status": "not_started", "decision": "cooldown", "message": "", "steps": []},
            "GPUHot fired for GPU 3 on node-2, and no run was started: cooldown.",
            "Nothing: the run is over.",
        ),
        (
            {"status": "observed", "steps": [{**CAPPED, "status": "observed"}]},
            "recorded what it would do: lower the power limit of GPU 3 on node-2 to 80 %.",
            "Nothing: the run is over.",
        ),
        (
            {"status": "running", "steps": [{**CAPPED, "status": "unknown", "attempts": [{"status": "unknown"}]}],
             "next": {"outcome": "succeeded"}},
            "tried to lower the power limit of GPU 3 on node-2 to 80 % (whether it was carried out is not known yet)",
            "then succeeded",
        ),
        (
            {"status": "failed", "owes_undo": True, "message": "x"},
            "the run failed: x",
            "The run has ended. Its changes are reverted as stated above.",
        ),
    ],
)  # fmt: skip
def test_each_outcome_is_told_as_it_was_observed(changes: dict[str, Any], happened: str, follows: str) -> None:
    """No more is claimed than is on record."""
    told = run_story.story({**RUN, **changes}, third)
    assert happened in told.happened
    assert "".join(map(str, told.next[0])).startswith(follows)


FAILED = {**RUN, "status": "failed", "message": "x", "changed": []}


def test_a_failed_run_that_is_tried_again_waits_for_no_person() -> None:
    coming = {"not_before": "2026-01-31T12:30:00Z", "outcome": "tried again", "note": "up to 2 more"}
    effect = {"verdict": "pending", "due_at": None}
    told = run_story.story({**FAILED, "alerts": [{"fingerprint": "ab"}], "next": coming, "effect": effect})
    assert told.next == (
        ("not before ", At("2026-01-31T12:30:00Z")),
        ("then tried again", " (up to 2 more)"),
        ("The effect on the alert's metric is measured ", "later"),
    )


@pytest.mark.parametrize(
    ("fingerprint", "follows"),
    [
        ("ab", "Nothing by itself: the alert still fires, and a person has to look at it."),
        *((f"{stand_in}1", "Nothing by itself: a person has to look at it.") for stand_in in STAND_INS),
    ],
)
def test_a_failed_run_needs_a_person_and_only_an_alert_fires(fingerprint: str, follows: str) -> None:
    told = run_story.story({**FAILED, "alerts": [{"fingerprint": fingerprint}]})
    assert told.next == ((follows,),)


def test_a_run_of_an_older_server_is_told_too() -> None:
    """Without the members that it lacks."""
    told = run_story.story({"run_id": "r"})
    assert told.changed == ("Nothing. The run has changed nothing.",)


@pytest.mark.parametrize(
    ("undo", "text"),
    [
        ({"status": "available", "trigger": "never"}, "An operator can revert it"),
        ({"status": "armed", "trigger": "on_resolve"}, "It is reverted automatically when the alert resolves"),
        ({"status": "dropped", "trigger": "never"}, "No undo"),
        ({"status": "done", "because": "the alert resolved"}, "It was reverted: the alert resolved"),
    ],
)
def test_an_undo_is_told_in_words(undo: dict[str, Any], text: str) -> None:
    """No status stands beside a trigger without saying what it means."""
    assert run_story.undo_text(undo) == text


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["job:a"], "paused job a for 30m at most"),
        (["job:a", "job:b"], "paused job a and job b for 30m at most"),
        (["job:a", "job:b", "job:c"], "paused job a, job b and job c for 30m at most"),
        (["job:a", "job:b", "job:c", "job:d"], "paused job a, job b, job c and 1 more for 30m at most"),
    ],
)
def test_a_step_on_several_jobs_names_them(keys: list[str], said: str) -> None:
    """In place of the run's target."""
    step = {"action": "job.pause", "params": {"max": "30m"}, "targets": keys}
    assert steps.done(step, "node:n1") == said


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (KEY, "reset GPU 3 on node-2 if no process uses it"),
        ("node:n1", "reset all GPUs of node n1 if no process uses one"),
        (None, "reset the target if no process uses it"),
    ],
)
def test_a_reset_names_all_gpus_of_a_node(target: str | None, said: str) -> None:
    """Only of a known node."""
    assert steps.sentence({"action": "gpu.reset", "params": {}}, target, third) == said


def test_a_step_of_a_group_names_the_first_member() -> None:
    """The note has their number."""
    step = {"action": "k8s.cordon", "params": {}, "targets": ["node:n1", "node:n2"], "note": "for each of 2 members"}
    assert steps.sentence(step) == "k8s.cordon on node n1 (for each of 2 members)"
