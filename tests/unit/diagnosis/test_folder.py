"""`trainmedic diagnose --dir`: folders of every shape, and what is in the way of reading them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.unit.diagnosis.test_scenes import shipped_rules
from trainmedic_core.command import main
from trainmedic_logs.cli.folder_diagnosis import shown
from trainmedic_logs.domain.finding import CauseClass
from trainmedic_logs.files import log_folder
from trainmedic_logs.files.log_folder import Kind
from trainmedic_logs.folder_diagnosis import FolderDiagnosis, diagnose_folder
from trainmedic_server.errors import ConfigurationError

RAISED = (
    "Traceback (most recent call last):\n  File \"train.py\", line 3, in <module>\n    main()\nKeyError: 'labels'\n"
)
STEP = '{"ts": "2025-01-21T04:41:40Z", "event": "step", "step": %d, "rank": %d, "loss": 2.0, "node": "node-1"%s}\n'


def write(directory: Path, **files: str) -> Path:
    """Files by their paths, with ``__`` for a slash."""
    for name, text in files.items():
        path = directory / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def diagnosed(directory: Path, job: str | None = None) -> FolderDiagnosis:
    """The diagnosis by the shipped rules."""
    return diagnose_folder(directory, shipped_rules(), job)


@pytest.mark.parametrize(
    ("path", "source", "node", "rank", "local_rank", "attempt"),
    [
        ("rank3.log", "training", "", 3, None, None),
        ("logs/node-7/rank_12.txt", "training", "node-7", 12, None, None),
        ("local_rank3.log", "training", "", None, 3, None),
        ("dmesg-node7.txt", "kernel", "node7", None, None, None),
        ("node7-dmesg.log", "kernel", "node7", None, None, None),
        ("gpu-07/kern.log", "kernel", "gpu-07", None, None, None),
        ("journal-worker-3.txt", "kernel", "worker-3", None, None, None),
        ("fabricmanager.log", "fabric-manager", "", None, None, None),
        ("slurm-123.out", "slurm", "", None, None, None),
        ("llm-1-launcher.log", "launcher", "", None, None, None),
        ("run_x/attempt_1/3/stderr.log", "training", "", None, 3, 2),
        ("node-2/run_x/attempt_0/3/stdout.log", "training", "node-2", None, 3, 1),
        ("run_x/attempt_0/²/stderr.log", "training", "", None, None, None),
        (f"run_x/attempt_0/{'7' * 200}/stderr.log", "training", "", None, None, None),
        ("llm%2F1/attempt-2/rank-5.jsonl", "training", "", 5, None, 2),
        ("llm%2F1/attempt-2/launcher-gpu-07.log", "launcher", "gpu-07", None, None, 2),
        ("llm%2F1/attempt-2/ranks-gpu-07/r/attempt_0/1/stderr.log", "training", "gpu-07", None, 1, 2),
    ],
)
def test_a_file_name_states_what_the_file_is(
    path: str, source: str, node: str, rank: int | None, local_rank: int | None, attempt: int | None, tmp_path: Path
) -> None:
    """It gives source, node, rank and attempt, and nothing else. The other file is of another node's rank."""
    other = "other-1/run_x/attempt_0/9/stdout.log" if local_rank is not None else "other.log"
    write(tmp_path, **{path.replace("/", "__"): "text\n", other.replace("/", "__"): "text\n"})
    found = {str(file.path.relative_to(tmp_path)): file.origin for file in log_folder.classify_files(tmp_path).files}
    origin = found[path]
    assert (origin.source, origin.node, origin.attempt) == (source, node, attempt)
    one_node = len({each.node for each in found.values() if each.local_rank is not None}) == 1
    expected = local_rank if rank is None and one_node else rank
    assert (origin.rank, origin.local_rank) == (expected, local_rank)


@pytest.mark.parametrize(
    ("begins", "is_read"),
    [
        (b"ERROR: Unexpected segmentation fault encountered in worker.\n\0", True),
        (b"\0" * 5000, True),
        (b"step 1 of 9\n" + b"\0" * 5000, True),
        ("step 1\n".encode("utf-16-le") * 9, False),
        (b"h\0\0\0\0\0\0\0{}", False),
        (b"\x1f\x8bno gzip", False),
        (b"step 1\n" * 9 + bytes(range(256)), False),
    ],
)
def test_null_bytes_do_not_make_a_log_unreadable(begins: bytes, is_read: bool, tmp_path: Path) -> None:
    """PyTorch ends a message with one, and freed or cut space has them; otherwise they mean a binary file."""
    (tmp_path / "rank0.log").write_bytes(begins + b"\n" + RAISED.encode())
    assert len(log_folder.classify_files(tmp_path).files) == is_read
    if is_read:
        assert "KeyError" in diagnosed(tmp_path).attempts[-1].verdict.summary or b"ERROR" in begins


def test_a_waiting_rank_that_reports_it_in_its_error_file_is_not_a_culprit(tmp_path: Path) -> None:
    """An error is kept without its rank; the same words in the log of a rank that waited are a victim's."""
    place = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:129]"
    said = f"RuntimeError: {place} Timed out waiting 12000ms for send operation to complete"
    write(
        tmp_path,
        **{
            "j1/attempt-1/ranks-node-1/x/attempt_0/0/stderr.log": f"step 1\n[rank0]: {said}\n",
            "j1/attempt-1/error-node-1.json": json.dumps({"message": {"message": said}}),
        },
    )
    assert diagnosed(tmp_path).attempts[-1].verdict.cause is CauseClass.HANG


def test_non_text_files_are_left_out_and_named(tmp_path: Path) -> None:
    """These are a checkpoint, a pipe and an outside link; a dump is known by its name or its first bytes."""
    (tmp_path / "model.bin").write_bytes(b"PK\3\4\0\0\0")
    (tmp_path / "nccl_trace_rank_3").write_bytes(b"no pickle")
    (tmp_path / "whatever_4").write_bytes(b"\x80\x04N.")
    (tmp_path / "link.log").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe.log")
    write(tmp_path, **{"rank0.log": RAISED})
    folder = log_folder.classify_files(tmp_path)
    kinds = {file.path.name: file.kind for file in folder.files}
    assert kinds == {"nccl_trace_rank_3": Kind.DUMP, "whatever_4": Kind.DUMP, "rank0.log": Kind.LINES}
    assert set(folder.left_out) == {"model.bin", "pipe.log"}
    missing = diagnosed(tmp_path).attempts[-1].verdict.missing
    assert any(line.startswith("the dump nccl_trace_rank_3 was not read: it is not a pickle") for line in missing)


def test_each_attempt_has_its_verdict_and_repeated_failures_are_counted(tmp_path: Path) -> None:
    """Three attempts end with the same exception: the third verdict states two earlier ones and advises to stop."""
    for attempt in (1, 2, 3):
        base = f"llm-1__attempt-{attempt}"
        steps = STEP % (attempt * 10, 0, "") + STEP % (attempt * 10, 0, "")
        write(tmp_path, **{f"{base}__rank-0.jsonl": steps, f"{base}__ranks-n__r__attempt_0__0__stderr.log": RAISED})
    found = diagnosed(tmp_path)
    assert [(each.job, each.attempt) for each in found.attempts] == [("llm-1", 1), ("llm-1", 2), ("llm-1", 3)]
    assert [each.verdict.same_before for each in found.attempts] == [0, 1, 2]
    assert [each.verdict.advice.value for each in found.attempts] == ["restart", "stop", "stop"]
    assert {each.verdict.cause for each in found.attempts} == {CauseClass.CODE}


def test_an_error_file_alone_states_the_exception(tmp_path: Path) -> None:
    """torch's ``@record`` wrote it; there is no other log."""
    more = {"py_callstack": RAISED, "timestamp": "1737434505"}
    raw = json.dumps({"message": {"message": "KeyError: 'labels'", "extraInfo": more}})
    write(tmp_path, run_x__attempt_0__3__error=raw)
    (tmp_path / "run_x/attempt_0/3/error").rename(tmp_path / "run_x/attempt_0/3/error.json")
    verdict = diagnosed(tmp_path).attempts[-1].verdict
    assert (verdict.cause, verdict.ranks) == (CauseClass.CODE, (3,))


def test_a_job_that_is_only_slow_is_explained_by_the_parts_of_its_steps(tmp_path: Path) -> None:
    """Nothing failed; one rank needs so long that the others wait for it."""
    parts = ', "data_s": 0.02, "compute_s": %s, "wait_s": %s'
    for rank in range(4):
        own = parts % ((0.96, 0.02) if rank == 2 else (0.58, 0.4))
        write(tmp_path, **{f"llm-1__attempt-1__rank-{rank}.jsonl": "".join(STEP % (n, rank, own) for n in range(5))})
    verdict = diagnosed(tmp_path).attempts[-1].verdict
    assert (verdict.cause, verdict.ranks, verdict.node) == (CauseClass.NODE, (2,), None)
    assert verdict.shares is not None


def test_several_jobs_require_a_name(tmp_path: Path) -> None:
    """The name must exist; a directory that is missing or has nothing to read is reported."""
    write(tmp_path, **{"a__attempt-1__rank-0.jsonl": RAISED, "b__attempt-1__rank-0.jsonl": STEP % (1, 0, "")})
    with pytest.raises(ConfigurationError, match="there are logs of a, b; pass the name of the job"):
        diagnosed(tmp_path)
    with pytest.raises(ConfigurationError, match="there are logs of a, b; none of c"):
        diagnosed(tmp_path, "c")
    assert diagnosed(tmp_path, "a").attempts[-1].verdict.cause is CauseClass.CODE
    (tmp_path / "empty").mkdir()
    for nothing in ("empty", "none"):
        with pytest.raises(ConfigurationError):
            diagnosed(tmp_path / nothing)


def test_the_command_prints_for_people_and_for_programs(tmp_path: Path) -> None:
    """Control characters in a line do not reach the terminal; the exit codes are those of all commands."""
    write(tmp_path, **{"rank1.log": RAISED.replace("'labels'", "'\x1b]0;title\x07'")})
    rules = ["--rules", str(Path(__file__).parents[3] / "logs/trainmedic_logs/logrules")]
    run = CliRunner()
    text = run.invoke(main, ["diagnose", "--dir", str(tmp_path), *rules])
    assert text.exit_code == 0, text.output
    assert "cause       code" in text.output
    assert "\x1b" not in text.output
    data = json.loads(run.invoke(main, ["diagnose", "--dir", str(tmp_path), *rules, "--output", "json"]).output)
    assert (data["cause"], data["ranks"], data["files_read"], data["left_out"]) == ("code", [1], 1, {})
    assert run.invoke(main, ["diagnose", "--dir", str(tmp_path), *rules, "--attempt", "7"]).exit_code == 5
    assert run.invoke(main, ["diagnose"]).exit_code == 2
    (tmp_path / "empty").mkdir()
    assert run.invoke(main, ["diagnose", "--dir", str(tmp_path / "empty"), *rules]).exit_code == 2


def test_a_hostile_folder_is_read_in_bounded_time(tmp_path: Path) -> None:
    """It has a line of 8 MiB without an end, and a hundred thousand lines that nearly match."""
    (tmp_path / "rank0.log").write_bytes(b"Root Cause (first " * 500_000)
    (tmp_path / "rank1.log").write_bytes(b"srun: error: a: task 1: \n" * 20_000 + b"rank : 1 (local_rank: \n" * 80_000)
    began = time.process_time()
    assert diagnosed(tmp_path).attempts[-1].verdict.cause is CauseClass.UNKNOWN
    assert time.process_time() - began < 15


def test_nothing_is_advised_where_nothing_failed(tmp_path: Path) -> None:
    """With one file read and one earlier equal failure, the text uses no plural."""
    done = CliRunner().invoke(main, ["diagnose", "--dir", str(write(tmp_path / "well", a__train_log="hello\n"))])
    assert done.exit_code == 0, done.output
    assert "The logs show neither that it failed" in done.output
    assert "do next" not in done.output
    assert done.output.rstrip().endswith("1 file was read")
    folder = str(write(tmp_path / "well", **{"b.log": "hello\n", "model.bin": "PK\3\4\0\0\0"}))
    found = json.loads(CliRunner().invoke(main, ["diagnose", "--dir", folder, "--output", "json"]).output)
    assert (found["advice"], found["cause"], found["files_read"]) == ("none", "unknown", 2)
    *_, count, unread = CliRunner().invoke(main, ["diagnose", "--dir", folder]).output.splitlines()
    assert count == "2 files were read, 1 was not:"
    assert unread == "  model.bin: it is not text in UTF-8, or in UTF-16 with a byte order mark"


def test_a_count_of_one_is_worded_in_the_singular() -> None:
    """These are the lines of a verdict that people read."""
    verdict = {
        "summary": "s",
        "cause": "code",
        "confidence": "low",
        "node": None,
        "gpu": None,
        "advice": "restart",
        "ranks": [],
        "evidence": [],
        "against": [],
        "missing": [],
    }
    assert "  before      1 earlier failure was the same" in list(shown({**verdict, "same_before": 1}))
    assert "  before      2 earlier failures were the same" in list(shown({**verdict, "same_before": 2}))


def test_an_inner_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as an unread file, and the rest is diagnosed. The folder itself must be listed."""
    write(tmp_path, **{"rank0.log": RAISED, "node-7__rank1.log": "step 4", "node-8__rank2.log": "step 4"})
    listing, locked = os.scandir, {"node-7"}

    def scandir(path: Path) -> object:
        if path.name in locked:
            raise PermissionError(13, "Permission denied", str(path))
        return listing(path)

    monkeypatch.setattr(log_folder.os, "scandir", scandir)
    found = diagnosed(tmp_path)
    assert (found.files_read, found.left_out) == (2, {"node-7": "Permission denied"})
    assert found.attempts[-1].verdict.cause is CauseClass.CODE
    done = CliRunner().invoke(main, ["diagnose", "--dir", str(tmp_path)])
    assert (done.exit_code, done.output.splitlines()[-1]) == (0, "  node-7: Permission denied")
    locked.add(tmp_path.name)
    with pytest.raises(ConfigurationError, match=rf"{tmp_path.name}: Permission denied$"):
        diagnosed(tmp_path)


def test_a_line_about_a_stuck_rank_names_that_rank(tmp_path: Path) -> None:
    """This holds whichever rank printed it; the confidence is not high."""
    place = write(
        tmp_path, **{"rank0.log": "step 4, loss 2.1\nrank 3 is stuck in all_reduce\n", "rank3.log": "step 4\n"}
    )
    verdict = diagnosed(place).attempts[-1].verdict
    assert (verdict.cause, verdict.ranks) == (CauseClass.HANG, (3,))
    assert verdict.confidence in ("medium", "low")


def test_entries_beyond_the_limit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with too many folders does not count as fully read."""
    write(tmp_path, **{f"step-{number}__rank0.log": "text\n" for number in range(4)})
    monkeypatch.setattr(log_folder, "_MOST_ENTRIES", 3)
    assert log_folder.classify_files(tmp_path).left_out == {"the rest": "more than 3 entries"}


def test_a_folder_with_too_many_entries_hides_no_other_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entries are links or folders; its name sorts before the logs."""
    write(tmp_path, **{f"logs__{rank}__rank{rank}.log": "text\n" for rank in range(3)})
    (tmp_path / "cache").mkdir()
    for number in range(6):
        (tmp_path / "cache" / str(number)).symlink_to("/dev/null")
    monkeypatch.setattr(log_folder, "_MOST_ENTRIES", 5)
    found = log_folder.classify_files(tmp_path)
    assert [file.origin.rank for file in found.files] == [0, 1, 2]
    assert found.left_out == {"cache": "more than 5 entries"}
    write(tmp_path, **{f"cache-2__{number}__none": "" for number in range(6)})
    found = log_folder.classify_files(tmp_path)
    assert {file.origin.rank for file in found.files} >= {0, 1, 2}
    assert found.left_out == dict.fromkeys(("cache", "cache-2"), "more than 5 entries") | {
        "the rest": "more than 5 folders"
    }


@pytest.mark.parametrize(
    "event", ["Evicted   pod/{}   The node was low on resource: memory.", "{}   0/1   OOMKilled   3   4h"]
)
def test_a_pod_that_may_be_of_another_job_does_not_explain_an_own_exception(event: str, tmp_path: Path) -> None:
    """Events list all pods of a namespace. A folder named after a pod makes it the job's."""
    raised = "[rank0]: RuntimeError: Trying to backward through the graph a second time\n"
    foreign = write(tmp_path / "1", **{"events.txt": event.format("egg-0"), "train.log": raised})
    assert diagnosed(foreign).attempts[-1].verdict.cause is CauseClass.CODE
    own = write(tmp_path / "2", **{"events.txt": event.format("worker-0"), "worker-0__rank0.log": raised})
    assert diagnosed(own).attempts[-1].verdict.cause is CauseClass.HOST_MEMORY
    alone = write(tmp_path / "3", **{"events.txt": event.format("egg-0"), "train.log": "step 3 loss 2.1\n"})
    assert diagnosed(alone).attempts[-1].verdict.cause is CauseClass.HOST_MEMORY
