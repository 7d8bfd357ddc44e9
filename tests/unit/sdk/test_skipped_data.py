"""What rollbacks have left out of the data, as it is kept over restarts."""

from __future__ import annotations

from pathlib import Path

from trainmedic.recovery import skipped_data


def test_what_was_left_out_is_kept(tmp_path: Path) -> None:
    """Over restarts, until a training begins anew; a damaged record counts as none."""
    assert skipped_data.read(tmp_path) == []
    skipped_data.write(tmp_path, [(20, 23), (40, 41)])
    assert skipped_data.read(tmp_path) == [(20, 23), (40, 41)]
    for damaged in ("[[20", "[[20, 1e999]]"):
        (tmp_path / skipped_data.FILE).write_text(damaged)
        assert skipped_data.read(tmp_path) == []
    skipped_data.forget(tmp_path)
    skipped_data.forget(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_second_number_of_a_range_is_not_in_it() -> None:
    assert [number for number in range(6) if skipped_data.contains([(1, 3), (2, 4)], number)] == [1, 2, 3]
