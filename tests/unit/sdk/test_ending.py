"""The error that ends a process, left for the launcher."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from trainmedic.job import ending


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    return file


def test_the_error_is_written_in_the_form_that_torchrun_reads(file: Path) -> None:
    """It has a traceback and its time, by which torchrun finds out who failed first."""
    ending.write_error_file(raised(ValueError("a bad batch")))
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "ValueError: a bad batch"
    assert 'raised(ValueError("a bad batch"))' not in message["extraInfo"]["py_callstack"]
    assert message["extraInfo"]["py_callstack"].startswith("Traceback (most recent call last)")
    assert abs(int(message["extraInfo"]["timestamp"]) - time.time()) < 10
    assert file.stat().st_mode & 0o777 == 0o600


def test_an_existing_error_file_is_not_overwritten(file: Path) -> None:
    """PyTorch's own ``record`` may have written it, or another rank that shares the file and was first."""
    file.write_text("{}")
    ending.write_error_file(raised(ValueError("a consequence")))
    assert file.read_text() == "{}"


@pytest.mark.parametrize("error", [None, SystemExit(3), KeyboardInterrupt()])
def test_an_exit_that_is_no_error_writes_no_file(file: Path, error: BaseException | None) -> None:
    """A script may leave by an exit code, or a person may end it."""
    ending.write_error_file(error)
    assert not file.exists()


def test_the_error_of_a_rank_that_lost_another_one_is_not_written(file: Path) -> None:
    """Torchrun would take it for the root cause: it is earlier than the end of a rank that writes none."""
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.7]:6549")
    wrapped = ValueError("the step failed")
    wrapped.__cause__ = lost
    for error in (lost, wrapped):
        ending.write_error_file(raised(error))
        assert not file.exists()
    ending.write_error_file(raised(ConnectionResetError("Connection reset by peer")))  # a storage's, as far as is known
    assert file.exists()


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_with_an_unreadable_text_is_written_by_its_type(file: Path) -> None:
    """It ends nothing else."""
    ending.write_error_file(raised(Unreadable()))
    assert "Unreadable" in json.loads(file.read_text())["message"]["message"]


def test_an_unwritable_error_file_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log reports it."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none" / "error.json"))
    ending.write_error_file(raised(ValueError("a bad batch")))
    assert "cannot write the error file" in caplog.text
