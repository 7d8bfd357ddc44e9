"""Digests of flight recorder dumps: what a server needs of them, and nothing that it is told is believed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.diagnosis.test_job_diagnoses import World
from trainmedic_logs.diagnosis.flight_recorder import digest, dump, missing_ranks
from trainmedic_logs.diagnosis.flight_recorder.dump import Dump, Entry, ProcessGroup
from trainmedic_logs.domain.finding import CauseClass, Excerpt, Origin, Role
from trainmedic_logs.domain.known_finding import EpisodeKey, KnownExcerpt
from trainmedic_logs.errors import DumpError
from trainmedic_logs.files import dump_reader

SETS = Path(__file__).with_name("nvidia_dumps")
GROUP = ProcessGroup("0", "default_pg", (0, 1, 2))


def dump_of(rank: int, done: int, under_way: int = 0, group: ProcessGroup = GROUP) -> Dump:
    """A rank that has completed so many collectives, and waits in so many."""
    entries = [
        Entry(group, number, "nccl:all_reduce", "", number < done, is_started=True, created_ns=10**18 + number)
        for number in range(done + under_way)
    ]
    return Dump(rank, (group,), tuple(entries), None)


@pytest.mark.parametrize("name", ["gpu_error_1st", "gpu_error_2nd", "lock_gil_1st", "lock_gil_2nd"])
def test_digests_together_state_what_the_dumps_state(name: str) -> None:
    """The dumps are the published sets of real hangs; a node's eight ranks make a small excerpt."""
    dumps, _ = dump_reader.read_files(sorted((SETS / name).glob("_dump_*")))
    lines = [digest.write(each, 2) for each in dumps]
    read, refused = digest.read(lines, 2)
    whole, reading = missing_ranks.read_together(dumps), missing_ranks.read_together(read)
    assert (reading.culprits, reading.absent, reading.silent, refused) == (
        whole.culprits,
        whole.absent,
        whole.silent,
        {},
    )
    assert sum(sorted(map(len, lines))[-8:]) < 128 * 1024


def test_all_ranks_of_a_large_job_are_read_within_the_limit_of_a_dump() -> None:
    """A short line can repeat a group of 65,536 ranks a thousand times."""
    group = ProcessGroup("0", "default_pg", tuple(range(100_000)))
    (read,), _ = digest.read([digest.write(dump_of(0, 1, group=group), 2)], 2)
    assert read.groups == (group,)
    fields = json.loads(digest.write(dump_of(0, 1), 2)) | {"groups": [["0", "", "0-65535"]] * 16}
    assert digest.read([json.dumps(fields)], 2) == ([], {})


def test_dumps_of_one_job_share_their_groups() -> None:
    """Otherwise thousands of dumps would take gigabytes."""
    shared = digest.SharedGroups()
    group = ProcessGroup("0", "default_pg", tuple(range(1000)))
    (first, second), _ = digest.read([digest.write(dump_of(rank, 1, group=group), 2) for rank in (0, 1)], 2, shared)
    assert first.groups[0] is second.groups[0]
    fields = json.loads(digest.write(dump_of(0, 1), 2))
    # Together, groups have a limit too.
    lines = [json.dumps(fields | {"groups": [["0", "", f"{number}-999999"]]}) for number in range(6)]
    assert len([dump for line in lines for dump in digest.read([line], 2, shared)[0]]) == 3


def test_an_impossible_value_in_a_dump_does_not_cost_its_digest() -> None:
    """A server skips a line with a negative number, or a rank beyond any job."""
    called = {"process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce", "state": "started"}
    plain = {
        "pg_config": {"0": {"desc": "default_pg", "ranks": [-1, 0, 1, 2**40]}},
        "entries": [{**called, "collective_seq_id": number, "time_created_ns": -5} for number in (-3, 4)],
        "pg_status": {"0": {"last_enqueued_collective": -7}, "1": {"last_enqueued_collective": -1}},
    }
    (read,), _ = digest.read([digest.write(dump.from_plain(plain, 0), 2)], 2)
    assert [(entry.number, entry.created_ns, entry.group.ranks) for entry in read.entries] == [(4, 0, (0, 1))]
    assert read.last_called == {-1}


def test_digests_of_another_attempt_and_invalid_ones_are_left_out() -> None:
    """They cost nothing and count for nothing; what was not read is reported."""
    good = json.loads(digest.write(dump_of(1, 3, 1), 2))
    hostile = [
        "",
        "[]",
        "[" * 10_000,
        "7",
        json.dumps({**good, "rank": True}),
        json.dumps({**good, "rank": -1}),
        json.dumps({**good, "rank": 10**6}),
        json.dumps({**good, "entries": [[9, 1, 0, 0, 0, 0]]}),
        json.dumps({**good, "entries": [[0, 1, 0, 0]]}),
        json.dumps({**good, "groups": [["0", "default_pg", "5-2"]]}),
        json.dumps({**good, "groups": [["0", "default_pg", "0-9999999"]]}),
        json.dumps({**good, "called": ["x"]}),
        json.dumps({"rank": 4, "attempt": 2}),
        json.dumps({**good, "padding": "x" * digest.LONGEST}),
    ]
    others = [digest.write(dump_of(0, 3, 1), 1), digest.write_refused(3, 1, "it is no pickle")]
    assert digest.read([*hostile, *others], 2) == ([], {})
    read, refused = digest.read([*hostile, json.dumps(good), digest.write_refused(3, 2, "it is no pickle")], 2)
    assert [(each.rank, len(each.entries)) for each in read] == [(1, 4)]
    assert refused == {3: "it is no pickle"}


def test_a_dump_with_many_pending_collectives_is_cut_or_refused() -> None:
    """The first and the last pending collective are always included; a secret in a name is not."""
    whole = digest.read([digest.write(dump_of(0, 400, 1000), None)], None)[0][0]
    numbers = [entry.number for entry in whole.entries]
    assert numbers == [*range(392, 416), 1399]
    groups = [ProcessGroup(str(number), "x" * 200, (0, 1)) for number in range(1000)]
    with pytest.raises(DumpError, match="too many groups or open"):
        digest.write(Dump(0, tuple(groups), (), None), None)
    named = digest.write(dump_of(0, 1, group=ProcessGroup("0", "token=hf_abcdefghijklmnopqrstuvwxyz")), None)
    assert "hf_abc" not in named


async def test_a_server_verdict_names_the_missing_rank() -> None:
    """It uses the digests of the job's nodes. Those of the failure before are not used for this one."""
    world = World()
    await world.time_out("f1", frozenset({0, 1}))
    await tell_dumps(world, [dump_of(0, 3, 1), dump_of(1, 3, 1)], "node-1")
    await tell_dumps(world, [dump_of(2, 3)], "node-2")
    await world.look(6)
    (first,) = await world.store.verdicts_of("llm-1", 5)
    assert (first.cause, first.plain["ranks"]) == ("hang", [2])
    await world.store.transact(lambda tx: tx.findings.save([]))
    world.clock.sleep(180)
    await world.find("f2")
    await world.look(6)
    (second, _) = await world.store.verdicts_of("llm-1", 5)
    assert second.plain["ranks"] != [2]


async def tell_dumps(world: World, dumps: list[Dump], node: str) -> None:
    """What a node's agent says of dumps is in the store."""
    now = world.clock.now()
    origin = Origin(digest.SOURCE, node, job="llm-1", attempt=1, stream="/logs/llm-1/attempt-1/flight-recorder")
    await world.find("dumps", rule=digest.RULE, role=Role.CONFIRMATION, cause=CauseClass.HANG, origin=origin)
    lines = tuple(digest.write(each, 1) for each in dumps)
    kept = KnownExcerpt("dumps", EpisodeKey(node, "e"), digest.SOURCE, "", None, now, Excerpt(lines, 0))
    await world.store.transact(lambda tx: tx.findings.save_excerpts([kept]))


def test_the_last_entry_of_a_repeated_number_counts() -> None:
    """In dumps, the parts of a coalesced collective come before it."""
    fields = json.loads(digest.write(dump_of(0, done=0, under_way=2), 2))
    place, number, operation, _, started, created = fields["entries"][-1]
    fields["entries"].append([place, number, operation, 1, started, created])
    read, _ = digest.read([json.dumps(fields)], 2)
    (wait,) = missing_ranks.read_together(read).waits
    assert (wait.number, wait.waiting) == (0, (0,))
    fields["entries"] = fields["entries"][1:]
    read, _ = digest.read([json.dumps(fields)], 2)
    assert missing_ranks.read_together(read).waits == ()
