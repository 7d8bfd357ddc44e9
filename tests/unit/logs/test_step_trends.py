"""A training that waits for its data, and a loss that rises: one finding for a stretch, and none for a healthy job."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from random import Random

import pytest

from tests.unit.logs.reading import NOW, lines, origin
from tests.unit.logs.test_progress import NAMES, TRAINERS, step_line
from tests.unit.logs.test_shipped_rules import MATCHER, RULES
from trainmedic_logs.domain.finding import Finding
from trainmedic_logs.lines.assembly import LineAssembler
from trainmedic_logs.lines.rule import RuleSet
from trainmedic_logs.lines.step_trends import StepTrends
from trainmedic_logs.lines.tracker import FindingTracker

LOADING = {
    "the ImageNet example": "Epoch: [1][{0}/5005]\tTime  {1:.3f} ( 8.19)\tData  {2:.3f} ( 8.04)"
    "\tLoss 1.2e+00 (1.08e+00)",
    "timm": "Train: 3 [{0:>4}/9251 (  1%)]  Loss: 4.51 (4.61)  Time: {1:.3f}s, 416.9/s  (0.61s, 416.1/s)  LR: 1.000e-03"
    "  Data: {2:.3f} (0.013)",
    "mmengine": "10/30 11:02:02 - mmengine - INFO - Epoch(train) [1][{0}/9735]  lr: 1.9e-04  time: {1:.4f}"
    "  data_time: {2:.4f}  memory: 10762  loss: 2.7",
    "detectron2": "[02/06 11:36:02 d2.utils.events]:  eta: 2:51:19  iter: {0}  total_loss: 1.7  time: {1:.4f}"
    "  data_time: {2:.4f}  lr: 0.0015  max_mem: 5437M",
    "torchvision": "Epoch: [0]  [{0:>4}/7329]  eta: 1:02:03  lr: 0.000058  loss: 2.3 (2.41)  time: {1:.4f}"
    "  data: {2:.4f}",
    "open_clip": "Train Epoch: 0 [{0}/9999] Data (t): {2:.3f} Batch (t): {1:.3f}, 523.1/s LR: 0.000500"
    " Loss: 1.31 (1.2)",
    "PaddleClas": "[Train][Epoch 1/120][Iter: {0}/5004]lr: 0.10, loss: 6.9, avg_reader_cost: {2:.5f} sec,"
    " avg_batch_cost: {1:.5f} sec",
}


def found(written: Iterable[str], stream: str = "/logs/a.log") -> list[Finding]:
    """What the rules find in a stream, with the end of each finding."""
    tracker, assembler = FindingTracker(RuleSet()), LineAssembler(origin(stream=stream))
    placed = [(place, text.encode()) for place, text in enumerate(written)]
    read = assembler.feed_many(placed, NOW, MATCHER.prefilter(("training",)))
    return [finding for line in read for finding in tracker.take(line, MATCHER.match(line))]


def names(findings: Iterable[Finding]) -> list[tuple[str, bool]]:
    return [(finding.rule, finding.is_over) for finding in findings]


def noisy(curve: Callable[[int], float], steps: int, seed: int, noise: float = 0.08) -> list[float]:
    """Losses with noise in proportion, never below nothing."""
    random = Random(seed)
    return [max(curve(step) * (1 + random.gauss(0, noise)), 1e-4) for step in range(steps)]


def falling(step: int) -> float:
    return 1.8 + 9 * math.exp(-step / 60)


@pytest.mark.parametrize("trainer", LOADING)
def test_a_trainer_that_waits_for_its_data_is_one_finding(trainer: str) -> None:
    """It begins after some steps, and is over once as many are fast."""
    form, random = LOADING[trainer], Random(7)

    def stretch(first: int, steps: int, data: float) -> list[str]:
        return [form.format(first + at, 0.5 + (d := data * random.uniform(0.7, 1.3)), d) for at in range(steps)]

    fast, slow = stretch(0, 60, 0.02), stretch(60, 120, 8.2)
    assert names(found(fast)) == []
    assert names(found([*fast, *slow])) == [("waits-for-data", False)]
    assert names(found([*fast, *slow, *stretch(180, 60, 0.02)])) == [
        ("waits-for-data", False),
        ("waits-for-data", True),
    ]


def test_the_first_step_of_each_epoch_is_slow_in_every_training() -> None:
    """The workers start; the median shows nothing of it."""
    form = LOADING["torchvision"]
    steps = [
        form.format(at % 12, 0.5 + (9.0 if at % 12 == 0 else 0.01), 9.0 if at % 12 == 0 else 0.01) for at in range(200)
    ]
    assert names(found(steps)) == []


def test_an_evaluation_may_wait_for_its_data() -> None:
    """It is short, and nobody waits for it."""
    steps = [f"Test: [{at}/391] eta: 0:02:11  loss: 0.91 (0.91)  time: 0.5000  data: 0.4800" for at in range(200)]
    assert names(found(steps)) == []


@pytest.mark.parametrize("trainer", TRAINERS, ids=NAMES)
def test_a_healthy_trainer_has_no_finding(trainer: Mapping[str, str]) -> None:
    """Of every form that is known, over some hundred steps."""
    assert names(found(step_line(trainer["line"], number) for number in range(11, 411))) == []


HEALTHY: Mapping[str, list[float]] = {
    "it falls": noisy(falling, 600, 1),
    "it is very noisy": noisy(falling, 600, 2, noise=0.45),
    "it is flat": noisy(lambda _: 2.1, 600, 3, noise=0.2),
    "it is flat and large": noisy(lambda _: 40.0, 600, 4, noise=0.3),
    "a spike recovers by itself": [*noisy(falling, 300, 5), *noisy(lambda at: 2 + 6 * math.exp(-at / 8), 300, 6)],
    "single spikes": [loss * (9 if at % 23 == 0 else 1) for at, loss in enumerate(noisy(falling, 600, 7))],
    "a new stage that is harder by a half": [*noisy(falling, 300, 8), *noisy(lambda _: 2.7, 300, 9)],
    "it goes up and down": noisy(lambda at: 3 + 0.5 * math.sin(at / 25), 600, 10),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_loss_that_is_well_has_not_risen(name: str) -> None:
    """Noise, spikes and harder data are no divergence."""
    assert names(found(f"step {at}: loss={loss:.4f}, lr=1e-4" for at, loss in enumerate(HEALTHY[name]))) == []


@pytest.mark.parametrize(
    "form",
    [
        "step {0}: loss={1:.4f}, lr=1e-4",
        "{{'loss': {1:.4f}, 'grad_norm': 1.1, 'learning_rate': 1e-05, 'epoch': 0.5}}",
        " iteration {0}/ 500000 | consumed samples: 2048 | lm loss: {1:.6E} | loss scale: 1.0 | grad norm: 0.250 |",
        "iter {0}: loss {1:.4f}, time 24.35ms, mfu 31.2%",
        '{{"msg": "train", "metrics": {{"step": {0}, "loss": {1:.4f}}}}}',
    ],
)
def test_a_loss_that_diverges_is_one_finding(form: str) -> None:
    """It is over when the loss is down again."""
    up = [*noisy(falling, 300, 11), *noisy(lambda at: 2 + 5.5 * (1 - math.exp(-at / 10)), 200, 12)]
    text = [form.format(at, loss) for at, loss in enumerate(up)]
    (finding,) = found(text)
    assert (finding.rule, finding.is_over) == ("loss-rising", False)
    assert float(finding.fields["loss_now"]) > 2 * float(finding.fields["loss_before"])
    down = [form.format(500 + at, loss) for at, loss in enumerate(noisy(lambda _: 1.9, 60, 13))]
    assert names(found([*text, *down])) == [("loss-rising", False), ("loss-rising", True)]


def test_a_loss_that_swings_is_told_once() -> None:
    """A rise from which it has come back by itself is no news the next time."""
    losses = noisy(lambda at: 3 + 1.2 * math.sin(at / 25), 1500, 19)
    told = names(found(f"step {at}: loss={loss:.4f}, lr=1e-4" for at, loss in enumerate(losses)))
    assert told == [("loss-rising", False), ("loss-rising", True)]


def test_a_warm_restart_of_the_learning_rate_is_no_rise() -> None:
    """The loss goes up with the rate, as it is meant to."""

    def rate(at: int) -> float:
        return 1e-3 * (0.01 + 0.99 * (1 + math.cos(math.pi * (at % 200) / 200)) / 2)

    losses = noisy(lambda at: 1.0 + 2500 * rate(at), 900, 14)
    assert names(found(f"step {at}: loss={loss:.4f}, lr={rate(at):.3e}" for at, loss in enumerate(losses))) == []


@pytest.mark.parametrize(
    "form",
    [
        "step: {0} Loss_D: 0.4 loss: {1:.4f} Loss_G: 4.1",
        "step {0} | loss {1:.4f} | policy_loss 0.01 | value_loss 1.2 | entropy 0.3",
        "step {0}: loss={1:.4f}, kl=0.02, reward=1.5",
    ],
)
def test_lines_of_adversarial_and_reinforcement_learning_are_not_judged(form: str) -> None:
    """Their losses rise in a training that is well."""
    up = [*noisy(lambda _: 2.0, 200, 15), *noisy(lambda _: 9.0, 200, 16)]
    assert names(found(form.format(at, loss) for at, loss in enumerate(up))) == []


def test_a_job_that_starts_again_in_the_same_file_has_a_new_baseline() -> None:
    """Its first losses are large again."""
    again = [*enumerate(noisy(falling, 300, 17)), *enumerate(noisy(falling, 300, 18))]
    assert names(found(f"step {at}: loss={loss:.4f}, lr=1e-4" for at, loss in again)) == []


def test_each_rank_of_a_shared_stream_is_judged_by_itself() -> None:
    """One has a large loss from its beginning."""
    steps = [f"[rank{at % 2}]:step {at // 2}: loss={2.0 if at % 2 else 9.0}, lr=1e-4" for at in range(400)]
    assert names(found(steps)) == []


def test_windows_are_bounded() -> None:
    """However many ranks and forms a stream has; and records of the SDK have metrics of their own."""
    trends = StepTrends()
    for rank in range(5_000):
        trends.add(rank, {"event": "step", "step": rank, "loss": 1.0}, "")
    assert len(trends._windows) == 64
    assert trends.add(0, {"event": "step", "attempt": 1, "loss": 1.0}, "") == {}


def test_a_finding_of_a_stretch_lasts_over_a_restart() -> None:
    """The agent keeps what it follows; the windows fill again."""
    form = LOADING["torchvision"]
    text = "\n".join(form.format(at, 8.7, 8.6) for at in range(60))
    first, again = FindingTracker(RULES), FindingTracker(RULES)
    assert len([finding for line in lines(text) for finding in first.feed(line)]) == 1
    again.restore({number: json.loads(text) for number, text in first.changes().written.items()})
    assert [finding for line in lines(text) for finding in again.feed(line)] == []
    fast = "\n".join(form.format(60 + at, 0.5, 0.01) for at in range(60))
    (over,) = [finding for line in lines(fast) for finding in again.feed(line)]
    assert over.is_over
    assert over.last_at - over.first_at < timedelta(hours=1)
