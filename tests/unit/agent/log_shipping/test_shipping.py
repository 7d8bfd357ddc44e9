"""Lines that the agent pushes to a store: each is there once, in order, whatever ends in between, or is counted."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from tests.unit.agent.log_shipping.shipping import Agent
from trainmedic.wire import log_layout
from trainmedic_agent.log_shipping.entries import Arrivals
from trainmedic_agent.log_shipping.ship_counters import LostReason
from trainmedic_agent.log_shipping.ship_policy import ShipPolicy, StoreKind
from trainmedic_agent.log_shipping.store_access import StoreAccess
from trainmedic_agent.log_shipping.store_push import Answer, Outcome, StorePush, answer_of, lost_lines
from trainmedic_logs.domain.log_search import LogQuery
from trainmedic_server.adapters.log_stores.loki import Loki
from trainmedic_server.adapters.log_stores.paging import StoredLogs
from trainmedic_server.adapters.log_stores.store_http import StoreHttp
from trainmedic_server.adapters.system_clock import SystemClock


@pytest.fixture(autouse=True)
def _no_agent_is_left() -> Iterator[None]:
    yield
    for agent in [*Agent.running]:
        agent.kill()


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


def agent_of(tmp_path: Path, logs: Path, **policy: object) -> Agent:
    return Agent(tmp_path / "state", files=[f"{logs}/{{job}}.log"], **policy)


def append(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def timed(at: datetime, text: str) -> str:
    return f"{at.isoformat()} {text}"


def test_lines_are_stored_with_labels_and_metadata(tmp_path: Path, logs: Path) -> None:
    """Four labels are set; high-cardinality values are structured metadata. Prefixes are removed."""
    attempt = log_layout.AttemptLogs.of(logs, "llm-1", 2)
    said = {"version": 1, "job": "llm-1", "attempt": 2, "rank": 7, "local_rank": 0, "node_rank": 1, "node": "n1"}
    append(attempt.sources("n1", 0), json.dumps(said))
    agent = Agent(tmp_path / "state", roots=[str(logs)])
    at = agent.now() - timedelta(seconds=5)
    append(attempt.ranks("n1") / "x_1" / "attempt_0" / "0" / "stderr.log", timed(at, "ERROR it broke"))
    agent.step()
    ((labels, entries),) = agent.store.streams[""].items()
    assert dict(labels) == {"job": "llm-1", "node": "n1", "source": "training", "level": "error"}
    assert entries[0].line.endswith("ERROR it broke")
    assert dict(entries[0].metadata) == {"attempt": "2", "rank": "7", "local_rank": "0", "node_rank": "1"}
    assert entries[0].at // 1000 == (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    assert agent.value("log_shipped_lines_total", source="training") == 1
    assert agent.value("log_ship_behind_bytes") == 0


def test_equal_lines_with_the_same_time_are_all_kept(tmp_path: Path, logs: Path) -> None:
    """The store keeps one of two lines equal to the nanosecond, so their times are made different."""
    agent = Agent(tmp_path / "state", files=[f"{logs}/llm-1/{{rank}}.log"])
    agent.step()
    at = agent.now()
    for rank in range(8):
        append(logs / "llm-1" / f"{rank}.log", *["loading", timed(at, "ready")] * 20)
    agent.step()
    assert agent.store.lines().count("loading") == 160
    assert len(agent.store.lines()) == 320


def test_equal_lines_with_a_repeated_time_are_all_kept(tmp_path: Path, logs: Path) -> None:
    """Several processes write to one file, and each with its own delay."""
    agent = Agent(tmp_path / "state", files=[f"{logs}/llm-1/{{rank}}.log"])
    agent.step()
    late, early = agent.now(), agent.now() - timedelta(seconds=5)
    for _ in range(3):
        append(logs / "llm-1" / "0.log", timed(late, "ready"), timed(early, "ready"))
        agent.step()
    assert len(agent.store.lines()) == 6


def test_the_connection_is_closed_whatever_happens_at_the_end(
    tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store would keep it open."""
    agent = agent_of(tmp_path, logs)
    closed = []

    def fail() -> None:
        raise KeyError("as the test says")

    monkeypatch.setattr(agent.push, "close", lambda: closed.append(True))
    monkeypatch.setattr(agent.shipping, "store_positions", fail)
    agent.shipping._stopping.set()
    with pytest.raises(KeyError):
        agent.shipping._run()
    assert closed == [True]


def test_secrets_do_not_leave_the_node(tmp_path: Path, logs: Path) -> None:
    """This includes a private key of many lines, also when the agent is killed in the middle of it."""
    agent = agent_of(tmp_path, logs)
    append(logs / "a.log", "token hf_" + "a" * 34, "-----BEGIN RSA PRIVATE KEY-----", "secret0")
    agent.step()
    agent.kill()
    append(logs / "a.log", "secret1", "secret2", "-----END RSA PRIVATE KEY-----", "after")
    agent.start()
    agent.step()
    text = "\n".join(agent.store.lines())
    assert "secret" not in text
    assert "hf_a" not in text
    assert agent.store.lines()[-1] == "after"


def test_a_key_at_the_start_of_a_file_does_not_leave_the_node(tmp_path: Path, logs: Path) -> None:
    agent = agent_of(tmp_path, logs)
    append(logs / "a.log", "-----BEGIN RSA PRIVATE KEY-----", "secret0")
    agent.step()
    agent.kill()
    append(logs / "a.log", "secret1", "-----END RSA PRIVATE KEY-----", "after")
    agent.start()
    agent.step()
    assert "secret" not in "\n".join(agent.store.lines())
    assert agent.store.lines()[-1] == "after"


def test_the_total_at_the_end_of_a_long_answer_counts() -> None:
    """Loki lists some rejected lines first."""
    listed = "\n".join(f"entry with timestamp {at} ignored, reason: 'entry too far behind'," for at in range(10))
    answer = answer_of(400, f"{listed}\ntotal ignored: 70 out of 90 for stream: {{}}", 90)
    assert (answer.outcome, answer.lost) == (Outcome.TAKEN, {LostReason.OUT_OF_ORDER: 70})
    assert len(answer.text) <= 300


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (
            "8 errors like: timestamp too old; 7 errors like: entry out of order; 9 errors like: max entry size",
            {LostReason.TOO_LARGE: 9, LostReason.TOO_OLD: 1},
        ),
        ("timestamp too old, " * 6 + "timestamp too new, " * 6, {LostReason.TOO_OLD: 6, LostReason.TOO_NEW: 4}),
        ("999999999 errors like: anything; 999999999 errors like: out of order", {LostReason.REFUSED: 10}),
    ],
)
def test_no_more_lines_are_rejected_than_were_sent(text: str, lost: dict[LostReason, int]) -> None:
    """The store may count its own requests, or one line for two reasons."""
    assert lost_lines(text, 10) == lost


def test_a_kill_at_any_time_loses_nothing_and_repeats_nothing(tmp_path: Path, logs: Path) -> None:
    """While two files are written, rotated and truncated by renaming; lines say their times, so what is pushed twice
    is there once."""
    rng = random.Random(3)
    agent = Agent(tmp_path / "state", files=[f"{logs}/*.log"], hours_ago=1)
    written = 0
    for turn in range(40):
        for name in ("a", "b"):
            for _ in range(rng.randrange(4)):
                agent.elapsed += 0.01
                append(logs / f"{name}.log", timed(agent.now(), f"line {written}"))
                written += 1
        agent.push.is_away = rng.random() < 0.3
        agent.step(rng.choice([0.5, 2.1, 70.0]))
        if rng.random() < 0.3:
            (logs / "a.log").rename(logs / f"a.log.{turn}") if (logs / "a.log").exists() else None
            agent.step(0.1)
        if rng.random() < 0.5:
            agent.kill()
            agent.start()
    agent.push.is_away = False
    for _ in range(5):
        agent.step(70)
    numbers = [line.rpartition(" ")[2] for line in agent.store.lines()]
    assert sorted(numbers, key=int) == [str(number) for number in range(written)]
    assert agent.lost() == {}


def test_a_repeated_time_repeats_nothing_after_a_kill(tmp_path: Path, logs: Path) -> None:
    """Lines with times in seconds come from several writers; some are equal, and each is stored once."""
    rng = random.Random(5)
    agent = Agent(tmp_path / "state", files=[f"{logs}/*.log"], hours_ago=1)
    written: list[str] = []
    for _ in range(80):
        agent.elapsed += 1
        for _ in range(rng.randrange(4)):
            at = (agent.now() - timedelta(seconds=rng.randrange(3))).replace(microsecond=0)
            written.append(timed(at, rng.choice(["ready", f"line {len(written)}"])))
            append(logs / "a.log", written[-1])
        agent.push.is_away = rng.random() < 0.3
        agent.step(0.1)
        if rng.random() < 0.3:
            agent.kill()
            agent.start()
    agent.push.is_away = False
    agent.step(70)
    agent.step(70)
    assert sorted(agent.store.lines()) == sorted(written)


def test_after_an_outage_the_oldest_lines_of_all_files_come_first(tmp_path: Path, logs: Path) -> None:
    """A quiet file and a busy one share labels; Loki rejects lines that are an hour behind. None is rejected."""
    agent = Agent(tmp_path / "state", files=[f"{logs}/llm-1/{{rank}}.log"], hours_ago=6)
    agent.push.is_away = True
    for minute in range(300):
        append(logs / "llm-1" / "0.log", timed(agent.now(), f"quiet {minute}"))
        append(logs / "llm-1" / "1.log", *[timed(agent.now(), f"busy {minute} {n} {'x' * 200}") for n in range(20)])
        if minute % 10 == 0:
            agent.step(0)
        agent.elapsed += 60
    agent.push.is_away = False
    agent.step(120)
    assert agent.lost() == {}
    assert len(agent.store.lines(rank="0")) == 300
    assert len(agent.store.lines(rank="1")) == 6000


def test_lines_without_a_time_have_their_arrival_time_even_if_read_late(tmp_path: Path, logs: Path) -> None:
    """Files are still checked while the store is unavailable."""
    agent = Agent(tmp_path / "state", files=[f"{logs}/{{job}}.log"], hours_ago=3)
    agent.step()
    agent.push.is_away = True
    came = []
    for number in range(6):
        append(logs / "a.log", f"line {number}")
        agent.step(600)
        came.append(agent.now())
    agent.push.is_away = False
    agent.step(120)
    ((_, entries),) = agent.store.streams[""].items()
    assert [entry.line for entry in entries] == [f"line {number}" for number in range(6)]
    for entry, at in zip(entries, came, strict=True):
        assert abs(entry.at / 1e9 - at.timestamp()) < 1


def test_a_traceback_stays_after_the_line_before_it(tmp_path: Path, logs: Path) -> None:
    """Its lines have no times, and come a moment later than they were printed."""
    agent = agent_of(tmp_path, logs)
    at = agent.now()
    append(logs / "a.log", timed(at, "one"), "Traceback:", "  File 1", timed(at + timedelta(seconds=0.1), "two"))
    agent.step()
    assert [line.rpartition(" ")[2] for line in agent.store.lines()] == ["one", "Traceback:", "1", "two"]


def test_lines_that_the_store_refuses_are_counted_and_not_retried(tmp_path: Path, logs: Path) -> None:
    """What is too old is not even pushed; what is too far behind others of its labels the store leaves out; the rest
    of the push is there."""
    agent = agent_of(tmp_path, logs, hours_ago=5)
    append(logs / "a.log", timed(agent.now() - timedelta(days=8), "of last week"), timed(agent.now(), "now"))
    agent.step()
    append(logs / "a.log", timed(agent.now() - timedelta(hours=2), "late"), timed(agent.now(), "good"))
    agent.step()
    pushed = len(agent.push.pushes)
    for _ in range(5):
        agent.step(60)
    assert len(agent.push.pushes) == pushed
    assert [line.rpartition(" ")[2] for line in agent.store.lines()] == ["now", "good"]
    assert agent.lost() == {"too_old": 1, "out_of_order": 1}
    assert agent.value("log_shipped_lines_total", source="training") == 2


def test_a_long_line_is_cut_and_the_rest_of_the_file_continues(tmp_path: Path, logs: Path) -> None:
    """The limit is 64 KiB; skipped bytes are counted."""
    agent = agent_of(tmp_path, logs)
    agent.step()
    append(logs / "a.log", "x" * 200_000, "after")
    agent.step()
    assert [len(line) for line in agent.store.lines()] == [64 * 1024, 5]
    assert agent.lost() == {"too_large": 200_000 - 64 * 1024}


@pytest.mark.parametrize("status", [429, 500, 503, 502])
def test_a_busy_store_is_asked_less_and_less_often(tmp_path: Path, logs: Path, status: int) -> None:
    """Retries continue until it accepts the lines; nothing is lost."""
    agent = agent_of(tmp_path, logs)
    append(logs / "a.log", "one")
    agent.store.fail_with = [status] * 5
    for _ in range(10):
        agent.step(1.0)
    tried = len(agent.push.pushes)
    assert 3 <= tried <= 5
    assert agent.shipping.counters.problem
    for _ in range(5):
        agent.step(80)
    assert agent.store.lines() == ["one"]
    assert agent.shipping.counters.problem == ""
    assert agent.lost() == {}


def test_each_reason_for_a_failed_push_is_logged_once(
    tmp_path: Path, logs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """This also holds for successive reasons, such as a timeout and then an invalid certificate."""
    agent = agent_of(tmp_path, logs)
    append(logs / "a.log", "one")
    agent.push.is_away = True
    agent.step(80)
    agent.step(80)
    agent.push.is_away = False
    agent.store.fail_with = [401] * 2
    agent.step(80)
    agent.step(80)
    answers = [record.__dict__["answer"] for record in caplog.records if "accepts no lines" in record.getMessage()]
    assert [answer.partition(" ")[0] for answer in answers] == ["connection", "401"]


def test_an_unreadable_log_is_logged_once_and_delays_no_other(
    tmp_path: Path, logs: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk may fail for days, and it is checked every second. A different failure is logged again."""
    agent = agent_of(tmp_path, logs)
    append(logs / "a.log", "one")
    agent.step()
    [file] = agent.shipping._following.followed
    read = file.head

    def fail() -> None:
        raise OSError(5, "Input/output error")

    for _ in range(2):
        monkeypatch.setattr(file, "head", fail)
        agent.step()
        append(logs / "b.log", "two")
        agent.step()
        monkeypatch.setattr(file, "head", read)
        agent.step()
    failed = [record for record in caplog.records if record.getMessage() == "cannot continue shipping a log"]
    assert [record.__dict__["path"] for record in failed] == [str(logs / "a.log")] * 2
    assert sorted(agent.store.lines()) == ["one", "two", "two"]


def test_a_reason_that_differs_only_in_numbers_is_logged_once(
    tmp_path: Path, logs: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loki counts the lines that it refuses, and proxies number requests: a line for each push would flood the log."""
    agent = agent_of(tmp_path, logs)
    append(logs / "a.log", "one")
    texts = ("no ingester, request 7f3a9c", "no ingester, request 81bb02", "disk full", "disk full")
    answers = iter([Answer(Outcome.LATER, "unavailable", f"503 {text}") for text in texts])
    monkeypatch.setattr(agent.push, "push", lambda entries: next(answers))
    for _ in texts:
        agent.step(80)
    told = [record.__dict__["answer"] for record in caplog.records if "accepts no lines" in record.getMessage()]
    assert told == ["503 no ingester, request 7f3a9c", "503 disk full"]
    assert agent.shipping.counters.problem == "unavailable: 503 disk full"


def test_a_store_with_a_low_rate_gets_small_pushes(tmp_path: Path, logs: Path) -> None:
    """A push larger than its rate would be refused permanently."""
    agent = agent_of(tmp_path, logs)
    agent.store.bytes_per_push = 40_000
    append(logs / "a.log", *[f"{number} {'x' * 1000}" for number in range(500)])
    for _ in range(60):
        agent.step(60)
    assert len(agent.store.lines()) == 500
    assert agent.lost() == {}


def test_one_line_that_the_store_cannot_read_costs_only_that_line(tmp_path: Path, logs: Path) -> None:
    """The line is found by bisection."""
    agent = agent_of(tmp_path, logs)
    agent.store.cannot_read = "poison"
    append(logs / "a.log", *[f"line {number}" for number in range(700)], "poison", *["after"] * 50)
    agent.step()
    assert len(agent.store.lines()) == 750
    assert agent.lost() == {"refused": 1}
    assert len(agent.push.pushes) < 40


def test_a_store_that_rejects_everything_is_not_flooded(tmp_path: Path, logs: Path) -> None:
    """The URL may be of another service: after some refusals it is retried like an unavailable store."""
    agent = agent_of(tmp_path, logs)
    agent.store.cannot_read = ""
    append(logs / "a.log", *[f"line {number}" for number in range(1000)])
    for _ in range(30):
        agent.step(1.0)
    assert len(agent.push.pushes) < 60
    assert agent.shipping.counters.problem.startswith("refused")


def test_a_file_of_one_large_hole_delays_no_other(tmp_path: Path, logs: Path) -> None:
    """Its pieces end no line. They are read a few at a time, and the content after them is pushed."""
    agent = agent_of(tmp_path, logs, hours_ago=1)
    agent.step()
    with (logs / "a.log").open("ab") as file:
        file.truncate(24 * 2**20)
        file.seek(0, 2)
        file.write(b"\nbehind the hole\n")
    append(logs / "b.log", "one")
    agent.step()
    assert agent.store.lines() == ["one"]
    for _ in range(30):
        agent.step()
    assert "behind the hole" in agent.store.lines()


def test_name_lookup_needs_no_file_of_the_program_later() -> None:
    """A confined reader may be unable to open the program's files when it first resolves a name."""
    code = "import sys, trainmedic_agent.log_shipping.store_push; print('encodings.idna' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout == "True\n"


def test_a_deleted_file_is_still_pushed(tmp_path: Path, logs: Path) -> None:
    """It is pushed for ten minutes while the store is unavailable; then its rest is lost, and counted."""
    agent = agent_of(tmp_path, logs, hours_ago=1)
    agent.step()
    agent.push.is_away = True
    append(logs / "a.log", "one")
    append(logs / "b.log", "two")
    agent.step()
    (logs / "a.log").unlink()
    agent.step(300)
    agent.push.is_away = False
    agent.step(70)
    assert sorted(agent.store.lines()) == ["one", "two"]
    agent.push.is_away = True
    append(logs / "b.log", *["x" * 1000] * 2000)
    agent.step()
    (logs / "b.log").unlink()
    for _ in range(20):
        agent.step(60)
    assert 800_000 < agent.lost()["deleted"] < 2_002_000


def test_a_truncated_file_is_read_again_and_lost_content_is_counted(tmp_path: Path, logs: Path) -> None:
    """Content read before the truncation is sent to the store."""
    agent = agent_of(tmp_path, logs, hours_ago=1)
    agent.step()
    agent.push.is_away = True
    append(logs / "a.log", *[f"old {number} {'x' * 1000}" for number in range(2000)])
    agent.step()
    (logs / "a.log").write_text("new\n")
    agent.push.is_away = False
    for _ in range(3):
        agent.step(60)
    lines = agent.store.lines()
    assert lines[0].startswith("old 0 ")
    assert lines[-1] == "new"
    lost = agent.lost()["truncated"]
    assert abs(lost + sum(len(line) + 1 for line in lines[:-1]) - 2000 * 1009) < 2000 * 4
    agent.kill()
    agent.start()
    append(logs / "a.log", "newer")
    agent.step()
    assert agent.store.lines()[-2:] == ["new", "newer"]


def test_the_read_ahead_is_bounded_while_the_store_is_unavailable(tmp_path: Path, logs: Path) -> None:
    """The files keep the rest: one piece of each is in memory, and one batch."""
    agent = agent_of(tmp_path, logs)
    agent.push.is_away = True
    for number in range(20):
        append(logs / f"{number}.log", *["x" * 1000] * 1000)
    for _ in range(5):
        agent.step(60)
    held = sum(entry.size for _, entry in agent.shipping._batch)
    assert held < 1_100_000
    raw = sum(len(line) for file in agent.shipping._following.followed for _, (_, line) in file._raw)
    assert raw < 20 * 20_000
    assert agent.value("log_ship_behind_bytes") > 19_000_000


def test_only_the_first_start_skips_older_content(tmp_path: Path, logs: Path) -> None:
    """This holds also if the position of each log was forgotten since then."""
    agent = agent_of(tmp_path, logs)
    append(logs / "a.log", "skipped", "x" * 1024 * 1024)
    agent.step()
    (logs / "a.log").unlink()
    agent.step()
    agent.step(70.0)
    assert agent.shipping._following.followed == []
    agent.step()
    agent.kill()
    append(logs / "b.log", "first", *["y" * 1000] * 2000, "last")
    agent.start()
    agent.step()
    lines = [line for line in agent.store.lines() if len(line) < 1000]
    assert lines == ["first", "last"]


def test_jobs_beyond_a_limit_create_no_labels(tmp_path: Path, logs: Path) -> None:
    """A user with a thousand job names must not create a thousand streams."""
    agent = agent_of(tmp_path, logs)
    for number in range(130):
        append(logs / f"job-{number}.log", "line")
    agent.step()
    assert len(agent.store.streams[""]) == 100
    assert agent.lost() == {"too_many_jobs": 30}


def test_only_sources_named_by_the_policy_are_pushed(tmp_path: Path, logs: Path) -> None:
    """Others are not even opened for shipping."""
    files = [{"path": f"{logs}/fm.log", "source": "fabric-manager"}, f"{logs}/{{job}}-train.log"]
    agent = Agent(tmp_path / "state", files=files, ship={"sources": ["fabric-manager"]})
    append(logs / "fm.log", "fabric")
    append(logs / "a-train.log", "training")
    agent.step()
    assert agent.store.lines() == ["fabric"]


def test_torchruns_files_of_ranks_are_not_pushed_twice(tmp_path: Path, logs: Path) -> None:
    """The launcher's own file contains the same lines, after a rank's prefix."""
    attempt = log_layout.AttemptLogs.of(logs, "llm-1", 1)
    append(attempt.ranks("n1") / "x_1" / "attempt_0" / "0" / "stderr.log", "from a rank")
    append(attempt.launcher("n1"), "[default0]:from a rank", "from the launcher")
    agent = Agent(tmp_path / "state", roots=[str(logs)])
    agent.step()
    assert agent.store.lines() == ["from a rank", "from the launcher"]


def test_the_kernel_log_continues_after_a_restart(tmp_path: Path) -> None:
    """It continues by the numbers of /dev/kmsg; lines that the kernel had overwritten are counted."""
    kmsg = tmp_path / "kmsg"
    agent = Agent(tmp_path / "state", kernel="kmsg", kmsg=str(kmsg))
    records = [f"6,{number},{number * 1000},-;line {number}\n" for number in range(10)]
    kmsg.write_text("")
    _write_records(kmsg, records[:5])
    agent.step(61)
    agent.step()
    assert agent.store.lines(source="kernel") == [f"line {number}" for number in range(5)]
    agent.kill()
    _write_records(kmsg, records[7:])
    agent.start()
    agent.step()
    agent.step()
    assert agent.store.lines(source="kernel") == [f"line {number}" for number in (0, 1, 2, 3, 4, 7, 8, 9)]
    assert agent.lost() == {"overwritten": 2}


async def test_pod_lines_are_found_by_the_jobs_pods(tmp_path: Path) -> None:
    """Their containers know nothing of the job's name; the server does."""
    pods = tmp_path / "pods"
    agent = Agent(tmp_path / "state", pods_in=str(pods), pods=["team-a"])
    for number, name in enumerate(("llm-0", "llm-1", "other")):
        at = (agent.now() - timedelta(seconds=9 - number)).isoformat()
        append(pods / f"team-a_{name}_8a4f0001-1111-2222-3333-444455556666" / "main" / "0.log",
               f"{at} stdout F from {name}")  # fmt: skip
    agent.step()
    assert all("job" not in dict(labels) for labels in agent.store.streams[""])
    http = StoreHttp("http://store", {}, transport=httpx.ASGITransport(agent.store.app))
    query = LogQuery("llm", agent.now() - timedelta(hours=1), pods=("team-a/llm-0", "team-a/llm-1"))
    batches = [batch async for batch in StoredLogs(Loki(http), SystemClock()).search(query, [], 100)]
    assert [line.text for batch in batches for line in batch.lines] == ["from llm-0", "from llm-1"]
    await http.close()


def _write_records(path: Path, records: list[str]) -> None:
    """A file with one record, because the device gives one at a read: the records are padded to its size."""
    path.write_bytes(b"".join(record.encode().ljust(8192, b"\0") for record in records))


def test_a_token_that_is_no_valid_header_is_not_shown() -> None:
    """http.client's error has the whole header."""
    policy = ShipPolicy(StoreKind.LOKI, "http://127.0.0.1:9")
    answer = StorePush(policy, lambda: StoreAccess("s3cret-one\ns3cret-two")).push([])
    assert (answer.outcome, answer.reason) == (Outcome.LATER, "unavailable")
    assert "s3cret" not in answer.text
    assert "token" in answer.text


def test_the_last_of_many_arrivals_is_kept() -> None:
    """The last bytes of a file that is far behind did not arrive when they were read."""
    arrivals, began = Arrivals(), datetime(2026, 1, 1, tzinfo=UTC)
    for number in range(2000):
        arrivals.record(10 * (number + 1), now := began + timedelta(seconds=number))
        assert arrivals._sizes[-1] == 10 * (number + 1)
    assert len(arrivals._sizes) <= 600
    assert arrivals.of(10 * 2000 - 1, began + timedelta(hours=5)) == now
