"""The sentences of the reference design behind every prefix, and lines that only look like them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.unit.logs.reading import lines
from tests.unit.logs.test_shipped_rules import MATCHER
from trainmedic_logs.lines import step_lines
from trainmedic_logs.lines.matcher import LineMatch
from trainmedic_logs.lines.rule import RuleSet
from trainmedic_logs.lines.tracker import FindingTracker

PREFIXES = {
    "nothing": "",
    "Python logging": "2026-05-04 12:00:00,123 - trainer - ERROR - ",
    "Python logging, its usual form": "INFO:root:",
    "a time and a level": "2026-05-04 12:00:00 INFO ",
    "DeepSpeed": "[2026-05-04 12:00:00,123] [INFO] [train.py:12:step] [Rank 0] ",
    "loguru": "2026-05-04 12:00:00.123 | WARNING  | trainer:step:88 - ",
    "glog": "W0504 12:00:00.123456 140070334211904 train.py:88] ",
    "torchrun": "[default0]:",
    "torchrun and torch": "[default1]:[rank1]:",
    "torch": "[rank3]:",
    "Ray": "(TaskRunner pid=123) ",
    "Ray on another node": "(WorkerDict pid=4009, ip=10.0.0.7) ",
    "Kubernetes": "2026-05-04T12:00:00.123456789Z stdout F ",
    "docker compose": "trainer-1  | ",
    "srun": "12: ",
    "mpirun": "[1,3]<stderr>:",
    "journald": "May 04 12:00:00 gpu-07 python3[4009]: ",
    "a bar of tqdm": " 45%|####      | 45/100 [00:12<00:15,  3.6it/s]",
    "a redrawn bar of tqdm": "\r 44%|####      | 44/100 [00:12<00:15,  3.6it/s]\r",
    "colours": "\x1b[1;31mERROR\x1b[0m ",
}
FINDINGS = {
    "nan loss encountered at step 1198, stopping training": ("loss-nan", {"step": "1198"}),
    "nan loss encountered at step 1198 on rank 5": ("loss-nan", {"step": "1198", "rank": "5"}),
    "NCCL timeout: unhandled system error": ("nccl-timeout", {}),
    "gradient exploding": ("gradient-exploded", {}),
    "gradient exploded at step 77": ("gradient-exploded", {"step": "77"}),
    "possible deadlock": ("process-hung", {}),
    "possible deadlock in all_reduce on rank 6": ("process-hung", {"rank": "6"}),
    "rank 3 is stuck in all_reduce": ("process-hung", {"rank": "3"}),
    "training hang detected": ("process-hung", {}),
}
METRICS = {
    "Epoch: 1, Loss: 2.345, Accuracy: 0.78": {"epoch": 1, "loss": 2.345, "accuracy": 0.78},
    "Step 100: loss=1.234, lr=1e-4, time=0.5s": {"step": 100, "loss": 1.234, "learning_rate": 1e-4, "step_s": 0.5},
    '{"level":"info","msg":"train","metrics":{"step":7,"loss":2.1,"lr":1e-4}}': {
        "step": 7,
        "loss": 2.1,
        "learning_rate": 1e-4,
    },
    '{"run":{"state":{"metrics":{"step":7,"loss":2.1,"lr":1e-4}}}}': {"step": 7, "loss": 2.1, "learning_rate": 1e-4},
}
NOTHING = [
    "no nan loss encountered",
    "0 nan losses found in epoch 1",
    "--nan-loss-action stop: what to do when nan loss encountered",
    "{'stop_on_nan_loss': True, 'nccl_timeout': 1800, 'detect_deadlock': False}",
    "NCCL timeout: 1800 seconds",
    "NCCL timeout set to 30 minutes",
    "setting NCCL timeout",
    "nccl_timeout: 1800",
    "to avoid gradient exploding use clipping",
    "gradient exploding problem",
    "vanishing or exploding gradients are explained below",
    "gradient norm 1.2, no gradient exploded",
    "gradient exploding detection: off",
    "check for possible deadlock",
    "possible deadlock check passed",
    "no training hang detected",
    "training hang detected: false",
    "hang detection enabled",
    "this process is not stuck in all_reduce",
    "# rank 3 is stuck in all_reduce",
    "for example `nan loss encountered at step 1198, stopping training`",
    "see the FAQ, for example NCCL timeout: unhandled system error",
    '    raise RuntimeError("possible deadlock")',
    '    logger.error("NCCL timeout: unhandled system error")',
    'Traceback (most recent call last):\n  File "/app/train.py", line 9, in main\n'
    "    fail(\"nan loss encountered at step 5\")\nKeyError: 'x'",
]


def matches(text: str) -> list[LineMatch]:
    return [MATCHER.match(line) for line in lines(text)]


@pytest.mark.parametrize(("prefix", "sentence"), list(product(PREFIXES, FINDINGS)))
def test_a_sentence_is_found_behind_a_prefix(prefix: str, sentence: str) -> None:
    """With the step and the rank that it names."""
    (match,) = (match for match in matches(PREFIXES[prefix] + sentence) if match.rule)
    rule, fields = FINDINGS[sentence]
    assert match.rule is not None
    assert match.rule.name == rule
    assert fields.items() <= match.fields.items()


@pytest.mark.parametrize(("prefix", "sentence"), list(product(PREFIXES, METRICS)))
def test_metrics_are_read_behind_a_prefix(prefix: str, sentence: str) -> None:
    """By the names of records; and nothing is found in them."""
    (line,) = lines(PREFIXES[prefix] + sentence)
    assert line.record is not None
    assert METRICS[sentence].items() <= line.record.items()
    assert line.record["event"] == "step"
    assert MATCHER.match(line).rule is None


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    "form",
    [
        "Step {0}: loss={1}, lr=1e-4, time=0.5s",
        "Epoch: {0}, Loss: {1}, Accuracy: 0.1",
        '{{"msg":"train","metrics":{{"step":{0},"loss":{1}}}}}',
    ],
)
def test_five_steps_with_a_loss_over_1000_are_one_finding(prefix: str, form: str) -> None:
    """And not four, nor five with a small one between them."""
    assert found(prefix, form, [2000.5] * 4 + [3.5] + [2000.5] * 4) == []
    assert found(prefix, form, [2000.5] * 6) == ["loss-high"]


def found(prefix: str, form: str, losses: list[float]) -> list[str]:
    """The rules that find something in these steps."""
    tracker = FindingTracker(RuleSet())
    text = "\n".join(PREFIXES[prefix] + form.format(step, loss) for step, loss in enumerate(losses, 1))
    return [finding.rule for line in lines(text) for finding in tracker.take(line, MATCHER.match(line))]


@pytest.mark.parametrize("prefix", ["nothing", "Python logging, its usual form", "torchrun", "Kubernetes", "journald"])
@pytest.mark.parametrize("text", NOTHING)
def test_what_only_looks_like_a_sentence_is_none(prefix: str, text: str) -> None:
    """Denials, settings, help, documentation, and source."""
    before = PREFIXES[prefix] if not text.startswith(("#", " ", "Trace")) else ""
    names = [match.rule.name for match in matches(before + text) if match.rule]
    assert [name for name in names if not name.startswith("python-exception")] == []


def test_the_memory_of_a_gpu_is_read() -> None:
    """Used and total, in bytes, and their ratio."""
    metrics = step_lines.metrics_of("12:00:01 GPU 0: 22.1GB / 24.0GB")
    assert metrics == {
        "gpu": 0,
        "gpu_memory_bytes": 22_100_000_000,
        "gpu_memory_total_bytes": 24_000_000_000,
        "gpu_memory_ratio": 0.9208,
    }
    assert step_lines.metrics_of("GPU 3 memory: 1024MiB / 40960MiB")["gpu_memory_bytes"] == 1 << 30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("policy loss: 3.2, value loss: 1.5, step: 7", {"step": 7}),
        ("val loss 3.1, step 100", {"eval_loss": 3.1, "step": 100}),
        ("eta: 1:02:03  time: 0.31  data_time: 0.01", {"step_s": 0.31, "data_s": 0.01}),
        ("elapsed time: 31.5s", {}),
        ("Data (t): 0.054 Batch (t): 0.510", {"data_s": 0.054, "step_s": 0.51}),
        ("avg_reader_cost: 0.40 sec, avg_batch_cost: 0.50 sec", {"data_s": 0.4, "step_s": 0.5}),
        ("iter 12: loss 3.13, time 243.0ms", {"step": 12, "loss": 3.13, "step_s": 0.243}),
        ("tokens_per_sec: 22.5K, tok/sec: 1,133,236", {"tokens_per_s": 22500.0}),
        ("version 2.3.4 of loss 2.3.4", {}),
        ("batch 12 of 40", {}),
    ],
)
def test_names_and_numbers(text: str, expected: dict[str, Any]) -> None:
    """Only a training's own loss, and times that are a step's."""
    assert step_lines.metrics_of(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text",
    [
        "usage: train.py [--step 100] [--loss 1.0] [--lr 1e-4]",
        "config: epoch: 10, loss: 1.0",
        "EarlyStopping: epoch 5, best loss: 0.3",
        "the loss is computed at step 5",
        "Test: [10/391] time: 0.41 data: 0.39",
    ],
)
def test_what_reports_no_step_is_no_record(text: str) -> None:
    """Settings, help and evaluations."""
    assert step_lines.step_of(text) is None


@pytest.mark.parametrize(
    "text",
    [
        '{"config": {"model": {"loss": {"type": "CrossEntropy"}}, "training": {"loss": "mse"}}}',
        '{"a": {"b": {"c": {"d": {"e": {"f": {"loss": 2.1}}}}}}}',
        '{"a": [{"loss": 2.1}]}',
    ],
)
def test_metrics_are_numbers_within_some_levels_of_objects(text: str) -> None:
    """A configuration names a loss too, and a hostile line could be nested without end."""
    (line,) = lines(text)
    assert line.record is None


def test_a_message_of_an_error_that_names_a_step_is_still_an_error() -> None:
    """Rules over text are tried on a step in words."""
    (match,) = matches("ERROR CUDA out of memory. Tried to allocate 2.00 GiB at step 100, loss=1.2")
    assert match.rule is not None
    assert match.rule.name == "cuda-oom"
    (match,) = matches('{"msg": "CUDA out of memory. Tried to allocate 2.00 GiB", "loss": 1.2}')
    assert match.rule is not None
    assert match.rule.name == "cuda-oom"


def test_numbers_in_thousands_are_read() -> None:
    """Also those of counters, and with a small k."""
    metrics = step_lines.metrics_of("step 2K, loss: 1.5, tok/sec: 12.5k")
    assert metrics == {"step": 2000, "loss": 1.5, "tokens_per_s": 12_500}
