"""The times at the beginning of lines, in the forms that loggers write."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest

from trainmedic_logs.lines.line_times import moment, stated
from trainmedic_logs.lines.parsed_line import parse

AT = datetime(2026, 3, 9, 7, 8, 9, tzinfo=UTC)
LATEST = AT + timedelta(minutes=3)
BERLIN = ZoneInfo("Europe/Berlin")
BOOTED = datetime(2026, 3, 1, tzinfo=UTC)

FORMS = {
    "Python logging": "2026-03-09 07:08:09,250 - trainer - INFO - step 7",
    "DeepSpeed": "[2026-03-09 07:08:09,250] [INFO] [logging.py:128:log_dist] [Rank 0] step=7",
    "Megatron-LM": " [2026-03-09 07:08:09] iteration        7/     100 | lm loss: 2.1E+00 |",
    "torchrun": "W0309 07:08:09.250000 4711 torch/distributed/run.py:793] ****",
    "PyTorch with its rank": "[rank3]:[E309 07:08:09.250123456 ProcessGroupNCCL.cpp:629] [Rank 3] Watchdog caught",
    "LLaMA-Factory": "[INFO|trainer.py:2414] 2026-03-09 07:08:09,250 >> ***** Running training *****",
    "LLaMA-Factory, newer": "[INFO|2026-03-09 07:08:09] llamafactory.model.adapter:143 >> trainable params",
    "ISO 8601": "2026-03-09T07:08:09.250 step 7",
    "slashes": "2026/03/09 07:08:09 step 7",
    "Hugging Face examples": "03/09/2026 07:08:09 - INFO - __main__ - step 7",
    "Rich": "[03/09/26 07:08:09] INFO     step 7            train.py:12",
    "Spark": "26/03/09 07:08:09 INFO DAGScheduler: step 7",
    "absl with the year": "I20260309 07:08:09.250000 1401 train.py:12] step 7",
    "klog": "I0309 07:08:09.250123       1 leaderelection.go:250] step 7",
    "vLLM": "INFO 03-09 07:08:09 [core.py:58] step 7",
    "vLLM under Ray": "(EngineCore_DP0 pid=77) INFO 03-09 07:08:09 [core.py:58] step 7",
    "Ray": "(pid=4711) 2026-03-09 07:08:09,250\tINFO worker.py:1852 -- step 7",
    "Ray worker": "(TrainWorker pid=4711, ip=10.0.0.3) 2026-03-09 07:08:09,250 step 7",
    "torchtitan": "[titan] 2026-03-09 07:08:09,250 - root - INFO - step: 7",
    "NeMo": "[NeMo I 2026-03-09 07:08:09 exp_manager:396] step 7",
    "logging.basicConfig": "INFO:root:2026-03-09 07:08:09 step 7",
    "level and colon": "INFO: 2026-03-09 07:08:09,250 step 7",
    "loguru": "2026-03-09 07:08:09.250 | INFO     | __main__:main:7 - step 7",
    "syslog": "Mar  9 07:08:09 gpu-07 trainer[4711]: step 7",
    "ctime": "Mon Mar  9 07:08:09 2026 step 7",
    "day first": "9 Mar 2026 07:08:09 step 7",
    "compact": "20260309 07:08:09 step 7",
    "compact with T": "20260309T070809Z step 7",
    "seconds": f"{AT.timestamp():.3f} INFO step 7",
    "seconds in brackets": f"[{int(AT.timestamp())}] step 7",
    "JSON": json.dumps({"asctime": "2026-03-09 07:08:09,250", "message": "step 7"}),
    "JSON of seconds": json.dumps({"ts": AT.timestamp(), "msg": "step 7"}),
    "logfmt": 'time="2026-03-09T07:08:09Z" level=info msg="step 7"',
    "torchrun's prefix": "[default3]:2026-03-09 07:08:09,250 step 7",
    "container runtime": "2026-03-09T07:08:09.250000000Z stderr F step 7",
}


@pytest.mark.parametrize("form", FORMS)
def test_the_time_of_a_line_is_read_in_each_form(form: str) -> None:
    """In the zone that it states, else in that of its node; the year is that in which the line was written."""
    line = parse(FORMS[form].encode(), "training", BOOTED)
    assert line is not None
    at = line.at
    if at is None:
        assert line.stated is not None
        at = moment(line.stated, UTC, LATEST)
    assert at is not None
    assert timedelta(0) <= at - AT <= timedelta(milliseconds=251)


@pytest.mark.parametrize(
    "text",
    [
        "sample 2021-03-04 05:06:07 was read",
        "step 7 began at 2026-03-09 07:08:09",
        "batch of [2021-03-04 05:06:07, 2021-03-04 05:06:08]",
        " 12%|#2        | 12/100 [07:08:09<10:00:00,  3.2s/it]",
        "loss 2.5 lr 0.0001",
        "[W socket.cpp:697] [c10d] The client socket cannot be initialized",
        "12:34:56:78:9a:bc is the address of eth0",
        "00:12:34 elapsed",
        "2026-13-40 99:99:99 is none",
        "10.0.0.3 - - [09/Mar/2026:07:08:09 +0000] GET /health",
        json.dumps({"event": "step", "step": 7, "loss": 2.5}),
        "Traceback (most recent call last):",
        "",
    ],
)
def test_a_time_within_a_message_is_none_of_the_line(text: str) -> None:
    """Only what stands where loggers put it counts."""
    assert stated(text) is None


@pytest.mark.parametrize("text", ["1773040089 tokens so far", "1773040089250 params", "[07:08:09] hello"])
def test_a_number_that_may_be_something_else_is_marked(text: str) -> None:
    """It counts where the line arrived about then."""
    found = stated(text)
    assert found is not None
    assert found.is_weak


def test_the_year_is_the_one_in_which_the_line_was_written() -> None:
    """Also over New Year, and for 29 February."""
    found = stated("W1231 23:59:59.500000 1 run.py:1] x")
    assert found is not None
    assert moment(found, UTC, datetime(2027, 1, 1, 0, 5, tzinfo=UTC)) == datetime(2026, 12, 31, 23, 59, 59, 500000, UTC)
    leap = stated("E0229 10:00:00.000000 1 run.py:1] x")
    assert leap is not None
    assert moment(leap, UTC, datetime(2027, 5, 1, tzinfo=UTC)) is None
    assert moment(leap, UTC, datetime(2028, 5, 1, tzinfo=UTC)) == datetime(2028, 2, 29, 10, tzinfo=UTC)


def test_the_hour_that_summer_time_repeats_is_the_one_in_which_the_line_was_written() -> None:
    """By what was before it, or by its arrival; an hour that was left out moves on."""
    twice = stated("2026-10-25 02:30:00,000 x")
    assert twice is not None
    first, second = datetime(2026, 10, 25, 0, 30, tzinfo=UTC), datetime(2026, 10, 25, 1, 30, tzinfo=UTC)
    late = datetime(2026, 10, 26, tzinfo=UTC)
    assert moment(twice, BERLIN, late, first - timedelta(seconds=1)) == first
    assert moment(twice, BERLIN, late, second + timedelta(seconds=1)) == second
    assert moment(twice, BERLIN, first + timedelta(seconds=1)) == first
    skipped = stated("2026-03-29 02:30:00 x")
    assert skipped is not None
    assert moment(skipped, BERLIN, late) is not None


def test_the_order_of_day_and_month_is_what_fits_to_when_the_line_was_written() -> None:
    """Both are in use."""
    found = stated("05/04/2026 10:00:00 x")
    assert found is not None
    april, may = datetime(2026, 4, 5, 10, tzinfo=UTC), datetime(2026, 5, 4, 10, tzinfo=UTC)
    assert moment(found, UTC, april + timedelta(minutes=1)) == april
    assert moment(found, UTC, may + timedelta(minutes=1), may) == may


@pytest.mark.parametrize("zone", [UTC, BERLIN, timezone(timedelta(hours=-8)), ZoneInfo("Asia/Kolkata")])
def test_what_is_after_the_line_was_written_is_none(zone: ZoneInfo) -> None:
    """No line states the future, but for what clocks differ."""
    local = AT.astimezone(zone).strftime("%Y-%m-%d %H:%M:%S")
    found = stated(f"{local} x")
    assert found is not None
    assert moment(found, zone, AT) == AT
    assert moment(found, zone, AT - timedelta(minutes=1)) == AT
    assert moment(found, zone, AT - timedelta(hours=1)) is None


def test_hostile_beginnings_cost_little() -> None:
    """Whatever is repeated, no pattern looks at much of it."""
    for text in ("[" * 5000, "INFO " * 2000, "1" * 8000, "(a pid=" * 1000, "Mon " * 2000, "9999-99-99 99:99:99 " * 400):
        assert stated(text) is None
    assert stated("9" * 19 + " x") is None
    assert stated("{" + '"ts":' * 500 + "}") is None
