"""What a job prints on its way through the launcher: whole lines, unchanged."""

from __future__ import annotations

import fcntl
import os
import select
import threading
from pathlib import Path

import pytest

from tests.support.programs import eventually
from trainmedic.job.rotating_file import RotatingFile
from trainmedic.launch import output
from trainmedic.launch.output import OutputCopies, bound_file


def test_lines_of_two_streams_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of a line waits for its rest while the other stream prints."""
    monkeypatch.setattr(output, "_LONGEST_HOLD", 60.0)
    kept = RotatingFile(tmp_path / "kept", 1 << 20)
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    sink = os.open(tmp_path / "sink", os.O_WRONLY | os.O_CREAT)
    copies = OutputCopies([(out, sink), (err, sink)], kept)
    for _ in range(100):
        os.write(out_end, b"first half ")
        os.write(err_end, b"error half ")
        os.write(out_end, b"second half\n")
        os.write(err_end, b"second error half\n")
    os.write(out_end, b"no end of line")
    os.close(out_end)
    os.close(err_end)
    copies.finish(60)
    kept.close()
    os.close(sink)
    for name in ("kept", "sink"):
        lines = (tmp_path / name).read_bytes().splitlines()
        assert len(lines) == 201
        assert set(lines) == {b"first half second half", b"error half second error half", b"no end of line"}
    assert copies.tail(out).endswith("no end of line")


def test_a_prompt_is_passed_on_without_a_line_end(tmp_path: Path) -> None:
    """It is passed on while the job waits for an answer."""
    kept = RotatingFile(None, 1 << 20)
    source, end = os.pipe()
    received, sink = os.pipe()
    copies = OutputCopies([(source, sink)], kept)
    os.write(end, b"continue? ")
    assert os.read(received, 100) == b"continue? "
    os.close(end)
    copies.finish(60)


def test_a_line_that_grows_slowly_is_passed_on_before_it_ends(tmp_path: Path) -> None:
    """An example is a program that prints a dot for each batch: no pause between the dots is needed."""
    source, end = os.pipe()
    received, sink = os.pipe()
    copies = OutputCopies([(source, sink)], RotatingFile(None, 1 << 20))
    is_passed_on = False
    for _ in range(60_000):
        os.write(end, b".")
        is_passed_on = bool(select.select([received], [], [], 0.001)[0])
        if is_passed_on:
            break
    os.close(end)
    copies.finish(60)
    assert is_passed_on


def test_a_link_in_place_of_a_ranks_output_is_not_followed(tmp_path: Path) -> None:
    """The file that it points to keeps its middle."""
    victim = tmp_path / "victim"
    content = os.urandom(4 << 20)
    victim.write_bytes(content)
    (tmp_path / "stdout.log").symlink_to(victim)
    bound_file(tmp_path / "stdout.log", 1 << 20)
    assert victim.read_bytes() == content


def test_a_non_blocking_terminal_gets_all_output() -> None:
    """Another program has made it non-blocking, and it reads slowly."""
    source, end = os.pipe()
    received, sink = os.pipe()
    for pipe in (end, sink):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(sink, False)
    copies = OutputCopies([(source, sink)], RotatingFile(None, 1 << 20))
    lines = (b"x" * 1023 + b"\n") * 100

    def write() -> None:
        with os.fdopen(end, "wb") as job:
            job.write(lines)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    eventually(lambda: not select.select([], [sink], [], 0)[1], 60, "the terminal is full", every=0.01)
    got = b""
    while len(got) < len(lines) and select.select([received], [], [], 60)[0]:
        got += os.read(received, 4096)
    writer.join(60)
    copies.finish(60)
    assert got == lines
