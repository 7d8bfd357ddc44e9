"""Logs that were compressed by logrotate or by hand, or are not in UTF-8."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.unit.diagnosis.test_scenes import shipped_rules
from trainmedic_core.command import main
from trainmedic_logs.files import log_folder
from trainmedic_logs.folder_diagnosis import diagnose_folder
from trainmedic_server.errors import ConfigurationError

_OOM = b"[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.78 GiB.\n"


def test_compressed_logs_are_read_under_their_original_names(tmp_path: Path) -> None:
    """They are read as if unpacked; a truncated one counts as far as it goes, an invalid one is left out."""
    (tmp_path / "rank2.log.gz").write_bytes(gzip.compress(_OOM))
    (tmp_path / "rank1.log.1.gz").write_bytes(gzip.compress(b"step 1\n" * 5000)[:-12])
    (tmp_path / "rank0.log.gz").write_bytes(b"\x1f\x8bjunk")
    found = diagnose_folder(tmp_path, shipped_rules())
    verdict = found.attempts[-1].verdict
    assert (str(verdict.cause), verdict.ranks) == ("gpu_memory", (2,))
    assert found.files_read == 2
    assert set(found.left_out) == {"rank0.log.gz"}


@pytest.mark.parametrize(
    "end", [b"junk", gzip.compress(b"step 2\n")[:-8] + b"badcrc!!"], ids=["junk", "wrong checksum"]
)
def test_trailing_data_in_a_compressed_log_do_not_hide_its_lines(end: bytes, tmp_path: Path) -> None:
    """These are other bytes, as after a disk was full, or a part with a wrong checksum."""
    (tmp_path / "rank2.log.gz").write_bytes(gzip.compress(_OOM * 3) + end)
    found = diagnose_folder(tmp_path, shipped_rules())
    assert (found.files_read, found.left_out) == (1, {})
    assert found.attempts[-1].verdict.ranks == (2,)


def test_an_archive_that_unpacks_to_an_implausible_size_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes can unpack to any number."""
    monkeypatch.setattr(log_folder, "MOST_UNPACKED", 1024)
    (tmp_path / "rank2.log").write_bytes(_OOM)
    (tmp_path / "rank1.log.gz").write_bytes(gzip.compress(b"a" * 4096))
    found = diagnose_folder(tmp_path, shipped_rules())
    assert set(found.left_out) == {"rank1.log.gz"}
    assert found.attempts[-1].verdict.ranks == (2,)


def test_the_end_of_a_docker_log_needs_no_line_feed(tmp_path: Path) -> None:
    """It may be missing in the log and in what the program printed."""
    printed = _OOM.decode().rstrip()
    (tmp_path / "node1.log").write_text(f'{{"log":"{printed}","stream":"stderr","time":"2025-01-01T00:00:00Z"}}')
    verdict = diagnose_folder(tmp_path, shipped_rules()).attempts[-1].verdict
    assert (str(verdict.cause), verdict.ranks) == ("gpu_memory", (2,))


def test_damaged_attempt_records_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt's own files are read all the same."""
    monkeypatch.setattr(log_folder, "MOST_UNPACKED", 1024)
    attempt = tmp_path / "llm-1" / "attempt-1"
    attempt.mkdir(parents=True)
    (attempt / "launcher-n.log").write_bytes(_OOM)
    (attempt.parent / "attempts.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 4096))
    found = diagnose_folder(attempt.parent, shipped_rules())
    assert set(found.left_out) == {"attempts.jsonl.gz"}
    assert found.attempts[-1].verdict.ranks == (2,)


def test_only_the_end_of_a_long_file_is_read_and_that_is_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compressed file counts by its unpacked size; other files are not named."""
    monkeypatch.setattr(log_folder, "MOST_BYTES", 1 << 20)
    early, step = b"Traceback (most recent call last):\nKeyError: 'early'\n", b"step 1 " + b"." * 700 + b"\n"
    steps = step * 3_000
    long = early + steps + _OOM
    (tmp_path / "rank2.log").write_bytes(long)
    (tmp_path / "rank1.log.gz").write_bytes(gzip.compress(early + steps))
    (tmp_path / "rank0.log").write_bytes(step)
    found = diagnose_folder(tmp_path, shipped_rules())
    assert (str(found.attempts[-1].verdict.cause), found.attempts[-1].verdict.ranks) == ("gpu_memory", (2,))
    assert found.read_in_part == {
        "rank1.log.gz": len(early + steps) - (1 << 20),
        "rank2.log": len(long) - (1 << 20),
    }
    said = CliRunner().invoke(main, ["diagnose", "--dir", str(tmp_path)]).output
    assert "rank2.log is long: its first 1 MiB were not read" in said


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be"])
def test_a_utf_16_file_is_recognised_by_its_byte_order_mark(tmp_path: Path, codec: str) -> None:
    """A Windows console writes it; without the mark it could be anything, and is named as not read."""
    text = f"step 1\n{_OOM.decode()}"
    (tmp_path / "rank2.log").write_bytes(f"\ufeff{text}".encode(codec))
    (tmp_path / "rank3.log").write_bytes(text.encode(codec))
    found = diagnose_folder(tmp_path, shipped_rules())
    assert (str(found.attempts[-1].verdict.cause), found.attempts[-1].verdict.ranks) == ("gpu_memory", (2,))
    assert found.left_out == {"rank3.log": "it is not text in UTF-8, or in UTF-16 with a byte order mark"}
    (tmp_path / "rank2.log").unlink()
    with pytest.raises(ConfigurationError, match=r"no logs or dumps found; not read: rank3\.log: it is not text"):
        diagnose_folder(tmp_path, shipped_rules())
