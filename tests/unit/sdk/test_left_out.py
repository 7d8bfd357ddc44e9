"""What rollbacks have left out of the data, as it is kept over restarts."""

from __future__ import annotations

from pathlib import Path

from trainmedic.recovery import left_out


def test_what_was_left_out_is_kept(tmp_path: Path) -> None:
    """Over restarts, until a training begins anew; a damaged record counts as none."""
    assert left_out.read(tmp_path) == []
    left_out.write(tmp_path, [(20, 23), (40, 41)])
    assert left_out.read(tmp_path) == [(20, 23), (40, 41)]
    (tmp_path / left_out.FILE).write_text("[[20")
    assert left_out.read(tmp_path) == []
    left_out.forget(tmp_path)
    left_out.forget(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_second_number_of_a_range_is_not_in_it() -> None:
    assert [number for number in range(6) if left_out.contains([(1, 3), (2, 4)], number)] == [1, 2, 3]
