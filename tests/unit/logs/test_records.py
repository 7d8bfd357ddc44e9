"""Step lines of the frameworks, read into one form."""

# ruff: noqa: E501 (lines stand here as programs print them)

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from trainmedic_logs.lines import records
from trainmedic_logs.lines.records import record_of


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ("{'loss': 0.0, 'grad_norm': 2.5, 'learning_rate': 9.7e-06, 'epoch': 0.53}", {"event": "step", "loss": 0.0, "epoch": 0.53}),
        ("{'loss': '2.5', 'grad_norm': '1e-3', 'learning_rate': '5e-06'}", {"loss": 2.5, "grad_norm": 0.001, "learning_rate": 5e-6}),
        ("{'eval_loss': 1.5, 'epoch': 1.0}", {"event": "evaluation", "eval_loss": 1.5}),
        ("{'train_runtime': 5.2, 'train_loss': 1.5, 'epoch': 1.0}", {"event": "end", "loss": 1.5}),
        ('{"current_steps": 3200, "loss": 4.4671, "eval_loss": null, "lr": 1e-5}', {"step": 3200, "loss": 4.4671, "learning_rate": 1e-5}),
        ('{"loss": 2.68, "global_step/max_steps": "1/36", "memory(GiB)": 12.67}', {"step": 1, "gpu_memory_gib": 12.67}),
        (
            " iteration        5/   10 | consumed samples:   20 | lm loss: 1.0E+01 | loss scale: 1.0 | grad norm: 6.25 | number of nan iterations:   2 |",
            {"event": "step", "step": 5, "loss": 10.0, "grad_norm": 6.25, "nan_iterations": 2.0, "consumed_samples": 20.0},
        ),
        (
            "[titan] 2025-01-05 13:49:46,148 - root - INFO - step:  1  loss: 12.2530  memory: 30.6GiB(32.2%)  tps: 1,520  mfu: 1.40%",
            {"event": "step", "step": 1, "loss": 12.253, "tokens_per_s": 1520.0},
        ),
        ('{"event": "exception", "message": "no", "rank": 3}', {"event": "exception", "rank": 3}),
    ],
)  # fmt: skip
def test_step_lines_are_read(text: str, members: dict[str, Any]) -> None:
    """The members have one name, whoever wrote them."""
    record = record_of(text)
    assert record is not None
    assert {name: record.get(name) for name in members} == members


@pytest.mark.parametrize(
    "text",
    [
        "{'loss': nan, 'epoch': 1}",
        "{'loss': -inf}",
        '{"event": "step", "loss": NaN}',
        '{"event": "step", "loss": "NaN"}',
        '{"event": "step", "loss": -Infinity}',
        "{'loss': 'nan'}",
        " iteration 5/ 10 | lm loss: nan |",
        "step:  1  loss: nan  memory: 30.6GiB(32.2%)",
    ],
)
def test_what_is_not_finite_is_a_number(text: str) -> None:
    """So that a rule can ask for it, as JSON or as text."""
    record = record_of(text)
    assert record is not None
    assert not math.isfinite(record["loss"])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{}",
        '{"a": 1}',
        "{'loss': ",
        "{'a': nan}",
        "{'loss': __import__('os').system('x')}",
        "{'loss': " + "[" * 500 + "}",
        '{"loss": ' + "[" * 5000 + "}",
        '{"loss": ' + "9" * 6000 + "}",
        "loss: nan",
        "iteration",
        '["loss"]',
        "{'loss': '\\d'}",
    ],
)
def test_any_other_text_is_no_record_and_no_error(text: str) -> None:
    """Whatever a line holds, it is not evaluated."""
    record = record_of(text)
    assert record is None or record.keys() <= {"event", "loss"}


@pytest.mark.parametrize(
    "text",
    [
        "{'loss': 0.0, 'grad_norm': -2.5e-3, 'epoch': 0.53, 'step': 12}",
        "{'loss': 2.1,'learning_rate': '1e-05', 'what': 'a b/c'}",
        "{'train_loss': 1e5}",
        "{'loss': 01}",
        "{'loss': true}",
        "{'loss': 1.0, 'a': {'b': 2}}",
        "{'loss': 1.0, 'a': \"it's\"}",
        "{'loss': 1.0, 'a\\n': 2}",
        "{'loss': 1_000}",
        "{'loss': 1.0, 'loss': 2.0}",
    ],
)
def test_the_quick_way_reads_what_python_reads(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dictionary as Python prints it, or as only somebody who imitates it does."""
    quick = record_of(text)
    monkeypatch.setattr(records, "_plain_dictionary", lambda _: None)
    assert quick == record_of(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"msg": "failed\\nTraceback (most recent call last):\\n  File \\"a.py\\", line 1, in f\\nKeyError: 1"}',
        '{"text": "Traceback (most recent call last):\\nKeyError: 1\\n", "record": {"message": "failed"}}',
        '{"error": {"stack": {"trace": "Traceback (most recent call last):\\nKeyError: 1"}}}',
        '{"exception": [{"exc_type": "KeyError", "exc_value": "1"}, {"exc_type": "ValueError", "exc_value": "2"}]}',
    ],
)
def test_json_with_a_traceback_is_a_record_of_an_exception(text: str) -> None:
    """Under whichever name a logger puts it."""
    record = record_of(text)
    assert record is not None
    assert record["event"] == "exception"
    assert records.words_of(record).rstrip().endswith("KeyError: 1")


def test_the_end_of_a_long_traceback_is_kept() -> None:
    """It says what was raised."""
    frames = '  File "a.py", line 1, in f\n' * 10_000
    record = record_of(json.dumps({"msg": f"Traceback (most recent call last):\n{frames}KeyError: 1"}))
    assert record is not None
    assert len(record["traceback"]) < 8 * 1024
    assert record["traceback"].endswith("KeyError: 1")


@pytest.mark.parametrize("kind", ["null", '""', "0", "{}"])
def test_a_logger_that_names_no_exception_tells_none(kind: str) -> None:
    """Some write the member into every line."""
    assert record_of(f'{{"message": "step 1 done", "exc_type": {kind}, "exc_value": null}}') is None
    assert record_of(f'{{"extra": {{"exc_type": {kind}}}}}') is None


def test_an_exception_beside_many_members_is_read() -> None:
    text = json.dumps({f"k{n}": n for n in range(63)} | {"msg": "Traceback (most recent call last):\nKeyError: 1"})
    record = record_of(text)
    assert record is not None
    assert record["event"] == "exception"
    assert records.words_of(record).endswith("KeyError: 1")


def test_json_that_is_deep_or_wide_is_no_exception() -> None:
    """Nor is it looked into without an end."""
    deep = '{"exc_type": {"a": ' * 400 + "1" + "}}" * 400
    wide = json.dumps({"a": {str(n): "x" for n in range(1000)}, "b": "no Traceback (most recent call last)"[:12]})
    assert record_of('{"x": ' * 90 + '"Traceback (most recent call last):"' + "}" * 90) is None
    assert record_of(wide) is None
    record_of(deep)


def test_a_number_with_two_points_is_left_out() -> None:
    """A line that two processes wrote at once may have one."""
    line = "iteration 10/ 100 | elapsed time per iteration (ms): 1.2.3 | lm loss: 2.0 |"
    assert records.record_of(line) == {"event": "step", "step": 10, "loss": 2.0}
