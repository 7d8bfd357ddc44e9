"""From bytes to lines: decoding, prefixes, kernel forms, times, records and blocks."""

# ruff: noqa: E501 (lines stand here as programs print them)

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from tests.unit.logs.reading import NOW, line, lines, origin
from trainmedic_logs.domain.finding import TimeSource
from trainmedic_logs.lines.assembly import PATIENCE, LineAssembler
from trainmedic_logs.lines.line import LONGEST

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
ValueError: no"""


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"plain", "plain"),
        (b"\x1b[31mred\x1b[0m and \x1b]0;title\x07bold", "red and bold"),
        (b"a\x00b\x08c", "abc"),
        ("größer".encode("latin-1"), "gr\ufffd\ufffder"),
        (
            b"\r 10%|#  | 1/10 [00:01<00:09, 1.1s/it]\r 20%|## | 2/10 [00:02<00:08, 1.1s/it]boom",
            " 20%|## | 2/10 [00:02<00:08, 1.1s/it]boom",
        ),
        (b"real message\r 20%|## | 2/10 [00:02]", "real message  20%|## | 2/10 [00:02]"),
        (b"windows line\r", "windows line"),
        (b"\xef\xbb\xbfwith a mark", "with a mark"),
    ],
)
def test_a_line_is_what_a_person_would_see(raw: bytes, text: str) -> None:
    """Colours, NUL, what is no UTF-8 and redrawn bars are gone or replaced."""
    assert line(raw).text == text


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_file_of_utf16_is_read(codec: str) -> None:
    """As PowerShell writes it: with a mark at its beginning or without, and with carriage returns."""
    written = f"größer\r\n{TRACEBACK}\r\nend".replace("\n", "\r\n").replace("\r\r", "\r")
    assert [each.text for each in lines(written.encode(codec))] == ["größer", TRACEBACK, "end"]


def test_a_hole_of_a_truncated_file_is_no_utf16() -> None:
    """It has NULs in front."""
    assert line(b"\0" * 101 + b"after the hole").text == "after the hole"


def test_a_long_line_is_cut_and_says_so() -> None:
    """Rules see 8 KiB, however long the line is; the file goes on."""
    first, second = lines(b"x" * 100_000 + b"\nnext")
    assert (len(first.text), first.is_cut, second.text, second.is_cut) == (LONGEST, True, "next", False)


def test_a_cut_does_not_divide_a_character() -> None:
    """The last character of a cut line is whole or missing."""
    assert "\ufffd" not in line("ö" * 9_000).text


@pytest.mark.parametrize(
    ("written", "source", "text", "rank", "local_rank"),
    [
        (
            "[rank3]:[E321 02:07:08.4 ProcessGroupNCCL.cpp:607] x",
            "training",
            "[E321 02:07:08.4 ProcessGroupNCCL.cpp:607] x",
            3,
            None,
        ),
        ("[default2]:[rank10]: Error", "launcher", "Error", 10, 2),
        ("[default0]:hello", "launcher", "hello", None, 0),
        (" 7: hello", "slurm", "hello", 7, None),
        ("12: a list in a training log", "training", "a list in a training log", None, None),
        ("(RayWorkerWrapper pid=4009, ip=10.0.0.7) hello", "training", "hello", None, None),
        ("2025-01-01T00:00:00.123456789Z stderr F hello", "training", "hello", None, None),
        ("[INFO] not a prefix", "training", "[INFO] not a prefix", None, None),
        ("[1,3]<stderr>:hello", "launcher", "hello", 3, None),
        ("[1,mpirank:3,algo-1]<stderr>:hello", "launcher", "hello", 3, None),
        ("[prterun-gpu-07-41@1,3]<stderr>: hello", "launcher", "hello", 3, None),
        ("[pod/llm-0/trainer] hello", "launcher", "hello", None, None),
        ("[train/loss] 0.3", "training", "[train/loss] 0.3", None, None),
        ("trainer-1  | hello", "launcher", "hello", None, None),
        ("trainer-1  | [rank3]: hello", "launcher", "hello", 3, None),
        ("loss | 0.3", "training", "loss | 0.3", None, None),
    ],
)
def test_prefixes_are_taken_off(written: str, source: str, text: str, rank: int | None, local_rank: int | None) -> None:
    """And a rank that one tells goes into the line's origin; none is guessed."""
    made = line(written, source)
    assert (made.text, made.origin.rank, made.origin.local_rank) == (text, rank, local_rank)


def test_a_line_of_dockers_log_is_what_was_printed() -> None:
    """With the time at which Docker took it; what is no such line stays as it is."""
    made = lines(
        '{"log":"CUDA out ","stream":"stderr","time":"2025-01-01T00:00:00.5Z"}\n'
        '{"log":"of memory\\n","stream":"stderr","time":"2025-01-01T00:00:01Z"}\n'
        '{"log":3}'
    )
    assert [each.text for each in made] == ["CUDA out of memory", '{"log":3}']
    assert made[0].at == datetime(2025, 1, 1, 0, 0, 1, tzinfo=UTC)


def test_the_end_of_dockers_log_needs_no_line_feed() -> None:
    """Docker divides nothing there: the program printed none. At the end of a file that is read once, it is a line."""
    assembler, rest = LineAssembler(origin()), {"stream": "stderr", "time": "2025-01-01T00:00:00Z"}
    printed = ("Traceback (most recent call last):\n", '  File "t.py", line 1, in f\n', "ValueError: ", "no")
    for place, text in enumerate(printed):
        raw = json.dumps({"log": text, **rest}, separators=(",", ":"))
        assert assembler.feed(raw.encode(), NOW, place) == []
    (block,) = assembler.finish()
    assert (block.text.splitlines()[-1], block.place, block.at.year) == ("ValueError: no", 0, 2025)
    assert (assembler.held_places, assembler.finish()) == ([], [])


def test_what_is_still_written_is_not_read_before_its_end() -> None:
    """The rest of a line of a followed file comes later."""
    assembler = LineAssembler(origin())
    assembler.feed(b'{"log":"CUDA out ","stream":"stderr","time":"2025-01-01T00:00:00Z"}', NOW, 0)
    assert (assembler.flush(NOW + PATIENCE), assembler.held_places) == ([], [0])
    assert (assembler.flush(), assembler.held_places) == ([], [])


def test_half_a_surrogate_pair_in_dockers_log_is_replaced() -> None:
    """JSON allows it; a text to be sent or measured cannot hold it."""
    members = '"stream":"stderr","time":"2025-01-01T00:00:00Z"}'
    printed = ("Traceback (most recent call last):", "  File \\ud800", "ValueError: \\ud83d")
    (block,) = lines("\n".join(f'{{"log":"{text}\\n",{members}' for text in printed))
    assert block.text == "Traceback (most recent call last):\n  File ?\nValueError: ?"


def test_a_rank_that_the_file_tells_is_not_overruled() -> None:
    """Where the stream has a rank, a prefix in it cannot claim another."""
    assert line("[rank9]: hello", rank=2).origin.rank == 2


def test_a_divided_line_of_a_container_is_joined() -> None:
    """Kubernetes divides lines at 16 KiB; the parts of each output belong together."""
    made = lines(
        "2025-01-01T00:00:00Z stderr P CUDA out \n2025-01-01T00:00:00Z stdout F other\n2025-01-01T00:00:01Z stderr F of memory"
    )
    assert [each.text for each in made] == ["other", "CUDA out of memory"]
    assert made[1].place == 0


@pytest.mark.parametrize(
    "written",
    [
        "[6781741.548779] NVRM: x",
        "[Sun Feb 23 16:24:18 2025] NVRM: x",
        "kern  :warn  : 2025-01-21T04:41:44,283575+00:00 NVRM: x",
        "kern  :warn  : [  123.456] NVRM: x",
        "6,3973,227996636,-;NVRM: x",
        "4,3973,227996636,-,caller=T123;NVRM: x",
        "kernel: [16450076.435595] NVRM: x",
        "<0>[2315424.098863] NVRM: x",
        "<4>[  12.098863][ T1234] NVRM: x",
        "Oct 16 20:47:19 host-1 kernel: NVRM: x",
        "Oct  6 20:47:19 host-1 kernel: [   12.5] NVRM: x",
        "2025-10-16T20:47:19.123456+02:00 host-1 kernel: NVRM: x",
        "[    0.000000] [      T0] NVRM: x",
        "[Tue Jan 21 04:41:44 2025] [   T77] NVRM: x",
        "Tue 2025-01-21 04:41:44 UTC host-1 kernel: NVRM: x",
        "2025-01-21 04:41:44 host-1 kernel: NVRM: x",
        "[1737434504.123456] host-1 kernel: NVRM: x",
        "<4>1 2025-01-21T04:41:44Z host-1 kernel - - - NVRM: x",
        "Jan 21 04:41:44 2025 host-1 kernel: [   12.5] NVRM: x",
        "Jan 21 04:41:44 host-1 kernel[12]: NVRM: x",
        "NVRM: x",
    ],
)
def test_every_form_of_the_kernels_log_is_read(written: str) -> None:
    """The same text comes out of dmesg with any options, the kernel's buffer, pstore, the journal and syslog."""
    assert line(written, "kernel").text == "NVRM: x"


def test_members_of_a_kernel_record_are_no_lines() -> None:
    """/dev/kmsg puts them below the text."""
    assert [each.text for each in lines("6,1,2,-;text\n SUBSYSTEM=pci\n DEVICE=+pci:0", "kernel")] == ["text"]


@pytest.mark.parametrize(
    ("written", "source", "at"),
    [
        ("kern  :warn  : 2025-01-21T04:41:44,283575+01:00 x", "kernel", datetime(2025, 1, 21, 3, 41, 44, 283575, UTC)),
        ("2025-01-21T04:41:44Z x", "training", datetime(2025, 1, 21, 4, 41, 44, 0, UTC)),
        (
            '{"event": "step", "step": 1, "ts": "2025-01-21T04:41:44.5Z"}',
            "training",
            datetime(2025, 1, 21, 4, 41, 44, 500000, UTC),
        ),
        ("2024-09-11 17:52:18,030 no zone", "training", None),
        ("[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] no year", "training", None),
        ("[Sun Feb 23 16:24:18 2025] no zone", "kernel", None),
        ("2126-01-21T04:41:44Z the future", "training", None),
        ("2025-13-41T04:41:44Z no date", "training", None),
    ],
)
def test_a_time_counts_where_it_has_date_and_zone(written: str, source: str, at: datetime | None) -> None:
    """Any other line has the time at which it was read."""
    made = line(written, source)
    assert (made.at, made.time_source) == ((at, TimeSource.LINE) if at else (NOW, TimeSource.ARRIVAL))


def test_the_kernels_seconds_count_from_the_boot() -> None:
    """Where the reader knows when that was."""
    assembler = LineAssembler(origin("kernel"), booted_at=NOW - timedelta(hours=1))
    (made,) = assembler.feed(b"[60.5] x", NOW, 0)
    assert (made.at, made.time_source) == (NOW - timedelta(minutes=59) + timedelta(seconds=0.5), TimeSource.LINE)


def test_a_traceback_is_one_line() -> None:
    """With the exceptions that follow from its own, and with the prefix of its rank taken off."""
    chained = f"{TRACEBACK}\n\nDuring handling of the above exception, another exception occurred:\n\n{TRACEBACK}"
    made = lines(f"before\n{chained}\nafter")
    assert [each.text for each in made] == ["before", chained, "after"]
    assert (made[1].place, made[1].number) == (7, 2)
    prefixed = "\n".join(f"[rank3]: {each}" for each in TRACEBACK.split("\n"))
    assert (line(prefixed).text, line(prefixed).origin.rank) == (TRACEBACK, 3)


def test_tracebacks_of_two_ranks_that_are_mixed_are_told_apart() -> None:
    """Lines of one prefix belong together."""
    mixed = "\n".join(f"[rank{rank}]: {each}" for each in TRACEBACK.split("\n") for rank in (0, 1))
    assert [(each.origin.rank, each.text) for each in lines(mixed)] == [(0, TRACEBACK), (1, TRACEBACK)]


def test_a_block_waits_no_longer_than_it_may() -> None:
    """A traceback whose end does not come is given after 5 s; one that has its exception, much sooner."""
    assembler = LineAssembler(origin())
    assert assembler.feed(b"Traceback (most recent call last):", NOW, 40) == []
    assert assembler.oldest_place == 40
    assert assembler.flush(NOW + PATIENCE / 2) == []
    assert len(assembler.flush(NOW + PATIENCE)) == 1
    assert assembler.oldest_place is None
    for number, each in enumerate(TRACEBACK.split("\n")):
        assert assembler.feed(each.encode(), NOW, number) == []
    assert len(assembler.flush(NOW + timedelta(seconds=0.5))) == 1


def test_a_block_has_200_lines_and_8_kib_at_most() -> None:
    """What is longer is divided; of long lines those in the middle are left out, and the end, which says what it was,
    stays."""
    made = lines("\n".join(["Traceback (most recent call last):", *["  x"] * 500]))
    assert len(made) > 1
    assert max(each.text.count("\n") for each in made) < 200
    long = "\n".join(["Traceback (most recent call last):", *[f"  {'y' * 200}"] * 90, "ValueError: the end"])
    (only,) = lines(long)
    assert len(only.text.encode()) <= LONGEST
    assert only.text.endswith("ValueError: the end")
    assert only.is_cut


def test_an_exception_of_a_thread_is_one_line_with_whose_it_was() -> None:
    said = 'Exception in thread Thread-3:\nTraceback (most recent call last):\n  File "a.py", line 1, in f\nKeyError: 1'
    assert [each.text for each in lines(f"{said}\nnext", "training")] == [said, "next"]


def test_what_a_loaders_process_raised_belongs_to_what_its_parent_says_of_it() -> None:
    """Also behind the rank; what PyTorch writes before it is taken for no prefix."""
    block = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\n'
        "RuntimeError: Caught RuntimeError in DataLoader worker process 0.\n"
        'Original Traceback (most recent call last):\n  File "b.py", line 2, in g\nRuntimeError: CUDA error: out of memory'
    )
    assert [each.text for each in lines(f"{block}\nnext", "training")] == [block, "next"]
    prefixed = block.replace("\n", "\n[rank3]: ")
    assert [each.text for each in lines(f"[rank3]: {prefixed}\n[rank3]: next", "training")] == [block, "next"]


def test_an_exception_that_python_ignored_is_one_line() -> None:
    """With its traceback; what is printed next begins anew, also where no traceback follows."""
    ignored = "Exception ignored in: <function f at 0x7f>"
    traceback = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nKeyError: 1'
    assert [each.text for each in lines(f"{ignored}\n{traceback}\nnext", "training")] == [
        f"{ignored}\n{traceback}",
        "next",
    ]
    assert [each.text for each in lines(f"{ignored}\nValueError: x", "training")] == [ignored, "ValueError: x"]


def test_the_launchers_table_is_one_line() -> None:
    """From its first rule to its last, or from wherever it is seen."""
    table = (
        "============================================================\ntrain.py FAILED\n"
        "------------------------------------------------------------\nFailures:\n  <NO_OTHER_FAILURES>\n"
        "------------------------------------------------------------\nRoot Cause (first observed failure):\n[0]:\n"
        "  time      : 2025-05-21_15:43:03\n  host      : w-7\n  rank      : 0 (local_rank: 0)\n"
        "  exitcode  : -9 (pid: 14750)\n  error_file: <N/A>\n  traceback : Signal 9 (SIGKILL) received by PID 14750\n"
        "============================================================"
    )
    assert [each.text for each in lines(f"before\n{table}\nafter", "launcher")] == ["before", table, "after"]
    row = "rank      : 4 (local_rank: 4)\nexitcode  : -9 (pid: 208585)\nerror_file: <N/A>"
    assert line(row, "launcher").text == row


def test_the_two_lines_of_an_old_oom_kill_are_one() -> None:
    """Kernels before 5.0 print both."""
    pair = "Memory cgroup out of memory: Kill process 4015 (python) score 1923 or sacrifice child\nKilled process 4015 (python) total-vm:32812kB"
    made = lines("\n".join(f"[12.5] {each}" for each in pair.split("\n")), "kernel")
    assert [each.text for each in made] == [pair]


def test_a_traceback_without_its_heading_is_one_line() -> None:
    """From its first call that was read to its exception; what is no exception is no part of it."""
    cut = TRACEBACK.partition("\n")[2]
    assert [each.text for each in lines(f"before\n{cut}\nafter")] == ["before", cut, "after"]
    stack = '  File "/app/a.py", line 3, in f\n    g()'
    assert [each.text for each in lines(f"{stack}\nloss: 2.1")] == [stack, "loss: 2.1"]


BOXED = """\
╭──────────── Traceback (most recent call last) ────────────╮
│ /app/train.py:190 in main                                 │
│                                                           │
│ ❱ 190     labels = batch["labels"]                        │
│ ╭─────── locals ───────╮                                  │
│ │ batch = {}           │                                  │
│ ╰──────────────────────╯                                  │
╰───────────────────────────────────────────────────────────╯
KeyError: 'labels'"""


@pytest.mark.parametrize("blank", ["\N{NO-BREAK SPACE}", "\N{IDEOGRAPHIC SPACE}"])
def test_a_line_of_odd_blanks_ends_a_traceback_in_a_frame(blank: str) -> None:
    """Whatever a program prints after its exception is a line like any other."""
    first, odd, after = sorted(lines(f"{BOXED}\n{blank}\nloss: 2.1"), key=lambda each: each.place)
    assert (first.text.splitlines()[-1], odd.text, after.text) == ("KeyError: 'labels'", blank, "loss: 2.1")


@pytest.mark.parametrize("before", ["", "[rank3]: ", " " * 29])
def test_a_traceback_in_a_frame_is_one_line(before: str) -> None:
    """With its exception, also where the frame stands behind a prefix or blanks."""
    written = "\n".join(before + each for each in BOXED.splitlines())
    first, after = sorted(lines(f"{written}\n[12:00:00] INFO  next"), key=lambda each: each.place)
    assert first.text.startswith("Traceback (most recent call last):\n│ /app/train.py:190 in main")
    assert first.text.endswith("╯\nKeyError: 'labels'")
    assert after.text == "[12:00:00] INFO  next"


@pytest.mark.parametrize("before", ["", "[rank3]: "])
def test_a_message_that_was_broken_below_a_frame_is_one_line(before: str) -> None:
    """Rich breaks the message of an exception where its next word has no room; what comes after it is none of it."""
    said = "RuntimeError: \n[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] \nConnection closed by peer."
    frame = BOXED.rpartition("\n")[0]
    written = "\n".join(before + each for each in f"{frame}\n{said}\nstep 7 loss 0.2".splitlines())
    first, after = sorted(lines(written), key=lambda each: each.place)
    whole = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer."
    assert first.text.splitlines()[-1] == whole
    assert after.text == "step 7 loss 0.2"


def test_loguru_marks_a_call_of_a_traceback() -> None:
    said = 'Traceback (most recent call last):\n\n> File "a.py", line 1, in f\n    g()\n    └ 1\n\nKeyError: 1'
    assert [each.text for each in lines(f"{said}\nnext")] == [said, "next"]


@pytest.mark.parametrize(
    "prefix",
    [
        "[1,3]<stderr>:",
        "trainer-1  | ",
        "[pod/llm-0/trainer] ",
        "gpu-07: ",
        "12:00:{n:02d} ",
        "2026-05-04 12:00:{n:02d},{n}12 ",
        "[gpu-07 rank 3] ",
        "2026-05-04T12:00:{n:02d}.{n}00001Z gpu-07 | ",
        "1777896{n:03d}.{n} ",
    ],
)
def test_a_traceback_is_joined_behind_any_prefix(prefix: str) -> None:
    """Its lines stand as they were printed, also while another prints the same in between; what follows is no part."""
    written = []
    for n, printed in enumerate([*TRACEBACK.splitlines(), "next line"]):
        written += [prefix.format(n=n) + printed, f"other-host: {printed}"]
    texts = [each.text for each in lines("\n".join(written), "launcher")]
    assert texts.count(TRACEBACK) == 2
    assert len(texts) == 4


@pytest.mark.parametrize("place", ["pod", "kubernetes"])
@pytest.mark.parametrize("member", ["log", "message", "textPayload"])
def test_a_traceback_in_a_log_stores_export_is_one(member: str, place: str) -> None:
    """Each line is a JSON object, and pods alternate. Objects outside of a traceback stay as they are."""
    other = json.dumps({member: "step 7", "pod": "llm-0"})
    written = [other]
    for printed in TRACEBACK.splitlines():
        for pod in ("llm-0", "llm-1"):
            named = {"pod_name": pod} if place == "kubernetes" else pod
            written.append(json.dumps({place: named, member: f"{printed}\n", "n": len(written)}))
    texts = [each.text for each in lines("\n".join([*written, other]))]
    assert texts.count(TRACEBACK) == 2
    assert texts.count(other) == 2
    assert len(texts) == 4


def test_a_chained_traceback_behind_a_prefix_is_one() -> None:
    """Its empty lines have lost the blank after the prefix."""
    chained = f"{TRACEBACK}\n\nDuring handling of the above exception, another exception occurred:\n\n{TRACEBACK}"
    written = "\n".join(f"gpu-07: {printed}".rstrip() for printed in chained.splitlines())
    assert [each.text for each in lines(written, "launcher")] == [chained]


def test_a_traceback_that_was_logged_as_one_message_has_its_prefix_once() -> None:
    """As the logging of many programs writes it."""
    written = f"2026-05-04 12:00:00,123 ERROR train: {TRACEBACK}"
    (made,) = lines(written)
    assert made.text == TRACEBACK


def test_prefixes_are_forgotten_with_their_tracebacks() -> None:
    """Lines that come long after one, with what stood before it, are lines like others."""
    assembler = LineAssembler(origin())
    for number, printed in enumerate(TRACEBACK.splitlines()):
        assert assembler.feed(f"gpu-07: {printed}".encode(), NOW, number) == []
    assert [each.text for each in assembler.flush(NOW + PATIENCE)] == [TRACEBACK]
    (after,) = assembler.feed(b"gpu-07: hello", NOW + PATIENCE, 10)
    assert after.text == "gpu-07: hello"
