"""What people read of a verdict: the words that say what happened, and nothing that is not so."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.diagnosis.test_folder import RAISED, STEP, diagnosed, write
from tests.unit.diagnosis.test_job_diagnoses import World
from trainmedic_logs.diagnosis.verdict import Confidence, Verdict

FAILED = (
    "E0121 04:41:52.620000 2606 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) "
    "local_rank: 1 (pid: 2620) of binary: /opt/conda/bin/python\n"
)


def verdict_on(directory: Path, **files: str) -> Verdict:
    return diagnosed(write(directory, **files)).attempts[-1].verdict


def test_an_exception_in_a_record_is_shown_by_its_message(tmp_path: Path) -> None:
    """It is not shown as a piece of JSON from the middle of a long traceback."""
    frames = "".join(f'  File "/app/layer{number}.py", line 3, in forward\n    x = f(x)\n' for number in range(40))
    told = {"event": "exception", "rank": 1, "traceback": f"Traceback (most recent call last):\n{frames}"}
    record = json.dumps({"ts": "2025-01-21T04:41:45Z", **told, "error": "KeyError", "message": "'labels'"})
    verdict = verdict_on(tmp_path, **{"rank1.jsonl": STEP % (1, 1, "") + record + "\n"})
    assert verdict.evidence[0].line == "KeyError: 'labels'"
    assert verdict.summary == "Probably the program failed on rank 1 (node-1): KeyError: 'labels'."


def test_a_non_finite_loss_is_described_in_words(tmp_path: Path) -> None:
    """The record is shown beneath."""
    nan = STEP.replace("2.0", '"NaN"')
    verdict = verdict_on(tmp_path, **{"rank0.log": STEP % (1, 0, "") + nan % (2, 0, "")})
    assert verdict.summary.endswith("on rank 0 (node-1): in step 2 the loss is nan.")


def test_an_exit_is_shown_next_to_the_printed_error(tmp_path: Path) -> None:
    """The text does not state that none was printed."""
    verdict = verdict_on(tmp_path, **{"rank1.log": RAISED, "rank0.log": STEP % (1, 0, ""), "launcher.log": FAILED})
    whys = [each.why for each in verdict.evidence]
    assert "it ended first, with exit code 1: after it printed an error" in whys, whys
    assert not any("the logs do not show why" in why for why in whys)


def test_logs_that_were_read_are_not_reported_as_missing(tmp_path: Path) -> None:
    """A rank that printed nothing into a file of its own, and ranks that print into one log without saying who they
    are."""
    verdict = verdict_on(tmp_path, **{"rank0.log": STEP % (1, 0, ""), "rank1.log": "", "launcher.log": FAILED})
    assert not any("output" in line or "printed" in line for line in verdict.missing), verdict.missing
    other = tmp_path / "other"
    verdict = verdict_on(other, **{"train.log": "epoch 1\n", "rank3.log": STEP % (1, 3, ""), "launcher.log": FAILED})
    assert "which lines of train.log are of ranks 0, 1 and 2: they state no rank" in verdict.missing


async def test_a_server_does_not_claim_to_lack_what_agents_read() -> None:
    """Of the ranks' lines it knows only those that a rule matched."""
    world = World()
    await world.find("f1")
    await world.look(11)
    (verdict,) = await world.store.verdicts_of("llm-1", 5)
    assert not any("output" in line for line in verdict.plain["missing"])


def test_a_high_confidence_verdict_lists_nothing_missing(tmp_path: Path) -> None:
    """Other possible logs are no help to a reader who has the cause."""
    verdict = verdict_on(tmp_path, **{"rank0.log": STEP % (1, 0, ""), "rank1.log": STEP % (1, 1, "") + RAISED})
    assert (verdict.confidence, verdict.missing) == (Confidence.HIGH, ())


def test_a_guessed_time_is_not_shown(tmp_path: Path) -> None:
    """Only the position is known of a line without a time, in a file without times."""
    verdict = verdict_on(tmp_path, **{"rank1.log": RAISED})
    assert verdict.evidence[0].at is None


def test_a_progress_bar_in_the_same_line_is_not_what_happened(tmp_path: Path) -> None:
    """A bar has no line feed, so Slurm's message follows it in the line; the evidence has all of it."""
    said = "slurmstepd: error: *** JOB 77 ON node-1 CANCELLED AT 2025-01-21T04:42:10 DUE TO TIME LIMIT ***"
    bar = f"train:  22%|██▏{' ' * 200}| 11/50 [1:56:21<6:51:20, 632.83s/it, loss=2.1]"
    verdict = verdict_on(tmp_path, **{"slurm-77.out": f"{STEP % (1, 0, '')}{bar}{said}\n"})
    assert verdict.summary.endswith(f"ended it: {said}."), verdict.summary
    assert verdict.evidence[0].line == bar + said
