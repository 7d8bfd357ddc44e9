"""What a measurement is held against, and what is kept of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmedic.errors import ConfigurationError
from trainmedic.probe import judging
from trainmedic.probe.judging import BaselineFile, PairBaseline, judged
from trainmedic.probe.measuring import BarrierTimes, Measurement, ReduceTime

USUAL = PairBaseline(3, 200e-6, {1_000_000: 1e9, 100_000_000: 10e9})


def shown(barrier: float = 200e-6, small: float = 1e9, large: float = 10e9, is_right: bool = True) -> Measurement:
    reduces = [
        ReduceTime(size, size / rate, rate, rate, is_right) for size, rate in ((1_000_000, small), (100_000_000, large))
    ]
    return Measurement(4, BarrierTimes(10, barrier, barrier, barrier), tuple(reduces))


@pytest.mark.parametrize(
    ("measurement", "word", "reason"),
    [
        (shown(), judging.OK, None),
        (shown(barrier=390e-6), judging.OK, None),
        (shown(barrier=410e-6), judging.SLOW, "barrier: 410 µs, usually 200 µs"),
        (shown(large=7.1e9), judging.OK, None),
        (shown(large=6.9e9), judging.SLOW, "all-reduce of 100 MB: 6.9 GB/s, usually 10 GB/s"),
        (shown(small=0.5e9), judging.SLOW, "all-reduce of 1 MB: 0.5 GB/s, usually 1 GB/s"),
        (shown(is_right=False), judging.WRONG, "incorrect sums of 1 MB, 100 MB on at least one rank"),
    ],
)
def test_a_pair_is_held_against_what_it_was(measurement: Measurement, word: str, reason: str | None) -> None:
    """Twice the latency, or less than 70 % of the bandwidth of any size, is slow; and wrong sums are worse."""
    judgement = judged(measurement, USUAL)
    assert judgement.word == word
    assert judgement.reasons == ((reason,) if reason else ())


def test_a_short_latency_may_be_a_multiple_of_itself() -> None:
    """A tenth of a millisecond is what a busy processor costs."""
    assert judged(shown(barrier=90e-6), PairBaseline(3, 10e-6, {})).word == judging.OK


def test_without_a_baseline_only_what_is_asked_for_counts() -> None:
    """The largest all-reduce must reach it."""
    assert judged(shown(), None).word == judging.NEW
    assert judged(shown(), None, 9e9).word == judging.NEW
    refused = judged(shown(), None, 11e9)
    assert (refused.word, refused.reasons) == (
        judging.SLOW,
        ("all-reduce of 100 MB: 10 GB/s, at least 11 GB/s is required",),
    )


def test_the_worst_word_stands_for_all() -> None:
    """And nothing is nothing wrong."""
    assert judging.worst(["ok", "new", "slow"]) == "slow"
    assert judging.worst(["slow", "wrong"]) == "wrong"
    assert judging.worst([]) == "ok"


def test_a_baseline_is_the_median_of_the_last_ten(tmp_path: Path) -> None:
    """Of each pair by itself; the folder is made."""
    file = BaselineFile(tmp_path / "deep" / "probe.json")
    assert file.baselines() == {}
    for number in range(15):
        file.add({"a b": shown(barrier=number * 1e-3), "a c": shown()})
    kept = file.baselines()
    assert kept["a b"].measurements == 10
    assert kept["a b"].barrier_seconds == pytest.approx(9.5e-3)
    assert kept["a c"].bytes_per_s == {1_000_000: 1e9, 100_000_000: 10e9}
    assert [path.name for path in (tmp_path / "deep").iterdir() if path.suffix == ".new"] == []


@pytest.mark.parametrize("name", ["probe", "probe.new", "probe.lock", "probe.json"])
def test_a_baseline_of_any_name_is_kept(tmp_path: Path, name: str) -> None:
    """Its lock and its unfinished copy are other files."""
    file = BaselineFile(tmp_path / name)
    for _ in range(2):
        file.add({"a b": shown()})
    assert file.baselines()["a b"].measurements == 2
    assert {path.name for path in tmp_path.iterdir()} == {name, f"{name}.lock"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pairs": {"a b": [{}]}}', '{"pairs": {"a b": [1]}}', "not JSON"])
def test_a_file_of_something_else_is_refused_and_left(tmp_path: Path, text: str) -> None:
    """It may be somebody's."""
    path = tmp_path / "probe.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="not a baseline file"):
        BaselineFile(path).baselines()
    with pytest.raises(ConfigurationError):
        BaselineFile(path).add({"a b": shown()})
    assert path.read_text() == text


@pytest.mark.parametrize("name", ["probe.json.lock", "probe.json.new"])
def test_a_link_in_the_directory_leads_to_no_other_file(tmp_path: Path, name: str) -> None:
    """Others may write to a shared directory. What the link leads to stays as it is."""
    victim, file = tmp_path / "victim", BaselineFile(tmp_path / "probe.json")
    victim.write_text("theirs")
    (tmp_path / name).symlink_to(victim)
    if name == "probe.json.lock":
        with pytest.raises(ConfigurationError, match="cannot be written"):
            file.add({"a b": shown()})
    else:
        file.add({"a b": shown()})
        assert file.baselines()["a b"].measurements == 1
    assert victim.read_text() == "theirs"


@pytest.mark.parametrize("number", ["NaN", "1e999", "-1", "9" * 400, "[]", '"x"'])
@pytest.mark.parametrize("size", ["1", "x"])
def test_a_baseline_that_is_no_number_is_refused(tmp_path: Path, number: str, size: str) -> None:
    """Nothing is ever slower than NaN."""
    path = tmp_path / "probe.json"
    sample = f'{{"barrier_seconds": 1e-4, "bytes_per_s": {{"{size}": {number}}}}}'
    path.write_text(f'{{"pairs": {{"a b": [{sample}]}}}}')
    with pytest.raises(ConfigurationError, match="not a baseline file"):
        BaselineFile(path).baselines()


def test_a_deep_file_is_none_of_baselines(tmp_path: Path) -> None:
    """Python's own parser gives up on it by another error."""
    (tmp_path / "probe.json").write_text("[" * 100_000)
    with pytest.raises(ConfigurationError, match="not a baseline file"):
        BaselineFile(tmp_path / "probe.json").baselines()
