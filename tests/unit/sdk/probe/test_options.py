"""The options of ``trainmedic-probe``."""

from __future__ import annotations

import pytest

from trainmedic.probe.__main__ import parser


@pytest.mark.parametrize("sizes", ["0,x", "x", "", "1,,2", "0", "nan", "1,20000"])
def test_sizes_that_are_none_are_refused_in_words(sizes: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong is the option, and not a function of the program."""
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["--sizes", sizes])
    assert ended.value.code == 2
    assert "argument --sizes: sizes are in megabytes" in capsys.readouterr().err
