"""Who did not come to a collective, from dumps that are written here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from trainmedic_logs.diagnosis.flight_recorder import dump, missing_ranks
from trainmedic_logs.diagnosis.flight_recorder.dump import Dump

_STARTED = 1_758_610_505_000_000_000


def entry(number: int, state: str = "scheduled", group: str = "0", **other: Any) -> dict[str, Any]:
    """One entry as torch 2.9 writes it."""
    return {
        "collective_seq_id": number,
        "process_group": (group, "default_pg" if group == "0" else "SOME_GROUP"),
        "profiling_name": "nccl:all_reduce",
        "state": state,
        "retired": state == "completed",
        "is_p2p": False,
        "input_sizes": [[8, 8]],
        "time_created_ns": _STARTED + number * 1_000_000,
        **other,
    }


def one(
    rank: int,
    *entries: dict[str, Any],
    called: dict[str, int] | None = None,
    groups: Mapping[str, Sequence[int]] = {},
) -> Dump:
    """The dump of a rank in a job of four, and in the `groups` that are named."""
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    config |= {name: {"name": name, "desc": "SOME_GROUP", "ranks": str(list(ranks))} for name, ranks in groups.items()}
    plain: dict[str, Any] = {"version": "2.9", "pg_config": config, "entries": list(entries)}
    if called is not None:
        plain["pg_status"] = {key: {"last_enqueued_collective": value} for key, value in called.items()}
    return dump.from_plain(plain, rank)


def test_a_rank_that_has_not_joined_the_pending_collective_is_absent() -> None:
    """The plain case: three wait in number 8; one has completed 7 and called nothing since."""
    waiting = [one(rank, entry(7, "completed"), entry(8)) for rank in (0, 1, 3)]
    reading = missing_ranks.read_together([*waiting, one(2, entry(7, "completed"))])
    assert reading.absent == (2,)
    (wait,) = reading.waits
    assert (wait.number, wait.waiting, wait.operation) == (8, (0, 1, 3), "nccl:all_reduce")


@pytest.mark.parametrize("number", ["--5", "-", "5\n", "\N{SUPERSCRIPT TWO}", "1" * 20])
def test_text_that_is_not_a_number_is_not_read_as_one(number: str) -> None:
    read = one(0, entry(7), {**entry(8), "collective_seq_id": number})
    assert [each.number for each in read.entries] == [7]


def test_a_rank_that_called_fewer_collectives_ahead_is_not_absent() -> None:
    """Of those that wait, one has called more collectives in advance than the other; only who lacks the first is
    absent."""
    ahead, behind = one(0, *(entry(n) for n in range(8, 14))), one(1, entry(8), entry(9))
    reading = missing_ranks.read_together([ahead, behind, one(3, entry(8)), one(2, entry(7, "completed"))])
    assert reading.absent == (2,)


def test_if_all_ranks_have_joined_the_collective_none_is_absent() -> None:
    """The collective itself does not end then, and no rank can be blamed for it."""
    reading = missing_ranks.read_together([one(rank, entry(8, "started")) for rank in range(4)])
    assert reading.absent == ()
    assert reading.waits[0].waiting == (0, 1, 2, 3)


def test_a_rank_without_a_dump_is_reported_and_not_blamed() -> None:
    """It may have been killed as a victim."""
    reading = missing_ranks.read_together([one(rank, entry(8)) for rank in (0, 1, 2)])
    assert (reading.absent, reading.silent) == ((), (3,))


def test_a_dump_of_pending_collectives_needs_its_counters() -> None:
    """A rank with nothing pending is at the collective before (absent), or is past it (not absent)."""
    waiting = [one(rank, entry(8)) for rank in (0, 1)]
    stopped, past = one(2, called={"0": 7}), one(3, called={"0": 8})
    assert missing_ranks.read_together([*waiting, stopped, past]).absent == (2,)


def test_absent_in_one_group_and_waiting_in_another_is_resolved_by_time() -> None:
    """The wait that began first comes first: rank 1 is absent in g2 as it waits in g1, for rank 0."""
    groups = {"g1": [0, 1], "g2": [1, 2]}
    first = one(0, entry(4, "completed", "g1"), groups=groups)
    second = one(1, entry(5, group="g1"), entry(9, "completed", "g2"), groups=groups)
    third = one(2, entry(10, group="g2"), groups=groups)
    reading = missing_ranks.read_together([third, second, first])
    assert [(wait.group.name, wait.absent) for wait in reading.waits] == [("g1", (0,)), ("g2", (1,))]
    assert reading.culprits == (0,)


def test_another_operation_under_the_same_number_is_a_program_fault() -> None:
    """Three ranks call an all-reduce and one a broadcast; the one that differs is named."""
    others = [one(rank, entry(8)) for rank in (0, 1, 2)]
    reading = missing_ranks.read_together([*others, one(3, entry(8, profiling_name="nccl:broadcast"))])
    assert reading.differing == (3,)
    halves = [one(rank, entry(8, profiling_name=f"nccl:{rank % 2}")) for rank in range(4)]
    assert missing_ranks.read_together(halves).differing == ()


def test_gloo_marks_a_finished_collective_as_retired() -> None:
    """Its entries stay "scheduled", and its configuration does not name the group: its members are all ranks."""
    done, open_ = {"state": "scheduled", "retired": True}, {"state": "scheduled", "retired": False}

    def gloo(rank: int, *entries: dict[str, Any]) -> Dump:
        config = {"": {"name": "", "desc": "", "ranks": "[0, 1, 2]"}}
        return dump.from_plain({"pg_config": config, "entries": list(entries)}, rank)

    waiting = [gloo(rank, entry(1) | done, entry(2) | open_) for rank in (0, 1)]
    assert missing_ranks.read_together([*waiting, gloo(2, entry(1) | done)]).absent == (2,)


def test_the_parts_of_a_coalesced_collective_do_not_wait() -> None:
    """torch records them with its number and never updates their state; the last entry, the collective, has one."""

    def coalesced(number: int, state: str = "completed") -> list[dict[str, Any]]:
        return [entry(number), entry(number), entry(number, state, profiling_name="nccl:coalesced")]

    completed = [each for number in range(1, 60) for each in coalesced(number)]
    assert missing_ranks.read_together([one(rank, *completed) for rank in range(4)]).waits == ()
    waiting = [one(rank, *completed, *coalesced(60, "started")) for rank in range(3)]
    reading = missing_ranks.read_together([*waiting, one(3, *completed)])
    (wait,) = reading.waits
    assert (wait.number, wait.waiting, wait.operation, reading.absent) == (60, (0, 1, 2), "nccl:coalesced", (3,))
