"""The options of ``trainmedic-probe``."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmedic.probe.__main__ import WRONG_USE, _token, main, parser


@pytest.mark.parametrize("sizes", ["0,x", "x", "", "1,,2", "0", "nan", "1,20000"])
def test_sizes_that_are_none_are_refused_in_words(sizes: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong is the option, and not a function of the program."""
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["--sizes", sizes])
    assert ended.value.code == 2
    assert "argument --sizes: sizes are in megabytes" in capsys.readouterr().err


@pytest.mark.parametrize("bandwidth", ["nan", "inf", "0", "-1"])
def test_a_bandwidth_that_nothing_falls_below_is_refused(bandwidth: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Or that everything does."""
    with pytest.raises(SystemExit) as ended:
        main(["--least-bandwidth", bandwidth])
    assert ended.value.code == WRONG_USE
    assert "--least-bandwidth must be above 0" in capsys.readouterr().err


def test_a_token_is_shown_by_no_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Line feeds at its end, as in many secrets, do not count; within it they cannot be sent."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("TRAINMEDIC_TOKEN_FILE", raising=False)
    monkeypatch.setenv("TRAINMEDIC_TOKEN", "geheim\n")
    assert _token(parser().parse_args(["--server", "http://127.0.0.1:9"])) == "geheim"
    monkeypatch.setenv("TRAINMEDIC_TOKEN", "geheim\ngeheim")
    assert main(["--server", "http://127.0.0.1:9"]) == WRONG_USE
    printed = capsys.readouterr().err
    assert printed.startswith("trainmedic-probe: TRAINMEDIC_TOKEN: not a token")
    assert "geheim" not in printed


def test_a_token_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it, the server would only answer that nobody has asked."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("TRAINMEDIC_TOKEN_FILE", str(tmp_path / "missing"))
    assert main(["--server", "http://127.0.0.1:9"]) == WRONG_USE
    expected = f"trainmedic-probe: TRAINMEDIC_TOKEN_FILE: cannot read {tmp_path}/missing: No such file or directory; "
    assert capsys.readouterr().err.startswith(expected)
