"""``GET /jobs/{job}/diagnosis``."""

from __future__ import annotations

from datetime import timedelta

import pytest
from msgspec.structs import replace

from tests.contract.test_verdicts import NOW, made
from tests.support.api_world import World
from trainmedic_logs.diagnosis.verdict import Advice, Confidence, Evidence, Verdict
from trainmedic_logs.domain.finding import CauseClass
from trainmedic_server.errors import BusUnavailable
from trainmedic_server.ports.outside import Presence

PLACEMENT = [{"rank": 0, "node": "node-1", "gpu": None}]
VERDICT = Verdict(
    cause=CauseClass.GPU,
    confidence=Confidence.HIGH,
    summary="A GPU failed on rank 3 (node-1): the kernel of node-1 reported it.",
    advice=Advice.ISOLATE_NODE,
    ranks=(3,),
    node="node-1",
    gpu="GPU-5f3a",
    evidence=(Evidence("the kernel of node-1 reported it", "NVRM: \x1b[31mXid", "kernel", "node-1", None, NOW, "xid"),),
    missing=("no flight recorder dumps",),
    same_before=1,
)


async def with_verdicts() -> World:
    """With a verdict on each of two attempts of a job."""
    world = World()
    verdicts = [made(number, job="team/llm-1", plain=VERDICT.plain()) for number in (1, 2)]
    await world.findings.transact(lambda tx: tx.verdicts.save(verdicts))
    return world


async def test_the_newest_verdict_is_shown_in_full() -> None:
    """In ASCII, with all that it rests on."""
    world = await with_verdicts()
    async with world.client() as client:
        answer = await client.get("/jobs/team/llm-1/diagnosis")
    assert answer.status_code == 200, answer.text
    assert b"\x1b" not in answer.content
    shown = answer.json()
    assert (shown["id"], shown["job"], shown["attempt"]) == ("v2", "team/llm-1", 2)
    assert (shown["cause"], shown["node"], shown["ranks"], shown["gpu"]) == ("gpu", "node-1", [3], "GPU-5f3a")
    assert (shown["confidence"], shown["advice"], shown["same_before"]) == ("high", "isolate_node", 1)
    assert shown["evidence"][0]["line"] == "NVRM: \x1b[31mXid"
    assert shown["missing"] == ["no flight recorder dumps"]
    assert shown["began_at"] == (NOW + timedelta(minutes=2)).isoformat().replace("+00:00", "Z")


async def test_an_attempt_is_chosen_and_what_is_not_there_is_said() -> None:
    """However many newer ones there are. 404 for a job without a verdict, and for another attempt; 422 for none."""
    world = await with_verdicts()
    newer = [replace(made(number, job="team/llm-1", plain=VERDICT.plain()), attempt=2) for number in range(3, 400)]
    await world.findings.transact(lambda tx: tx.verdicts.save(newer))
    async with world.client() as client:
        assert (await client.get("/jobs/team/llm-1/diagnosis?attempt=1")).json()["id"] == "v1"
        missing = await client.get("/jobs/team/llm-1/diagnosis?attempt=3")
        assert missing.status_code == 404
        said = "There is no verdict on attempt 3 of team/llm-1; the newest is for attempt 2."
        assert missing.json()["detail"] == said
        assert (await client.get("/jobs/other/diagnosis")).status_code == 404
        assert (await client.get("/jobs/team/llm-1/diagnosis?attempt=0")).status_code == 422


@pytest.mark.parametrize(
    ("present", "away", "said"),
    [
        (["llm-1"], None, "no failure was reported to the server. "),
        ([], None, "the server does not know this job. It diagnoses jobs started with trainmedic-run, "),
        ([], BusUnavailable, "Redis does not answer, so it is unknown whether the job exists. "),
    ],
)
async def test_where_there_is_no_verdict_it_is_said_why_and_what_makes_one(
    present: list[str], away: type[BusUnavailable] | None, said: str
) -> None:
    """Whoever has given a file's name for a job's, or runs it by torchrun alone, reads what to do."""
    world = World()
    world.bus.present = [Presence(name, NOW, {"placement": PLACEMENT}) for name in present]
    world.bus.away = away
    async with world.client() as client:
        answer = await client.get("/jobs/llm-1/diagnosis")
    detail = answer.json()["detail"]
    assert answer.status_code == 404
    assert detail.startswith(f"There is no verdict on llm-1: {said}")
    assert detail.endswith("`trainmedic diagnose --dir DIR` makes one from a job's files.")


async def test_the_page_of_a_job_that_is_gone_says_what_is_known_of_its_failure() -> None:
    """With cause, confidence, place, reasons and what to do next, also where no run was on it; nothing as it was
    printed."""
    world = World()
    await world.findings.transact(lambda tx: tx.verdicts.save([made(1, job="llm-1", plain=VERDICT.plain())]))
    async with world.client() as client:
        page = await client.get("/jobs/llm-1", headers={"Accept": "text/html"})
    assert page.status_code == 200, page.text
    for part in ("gpu", "high", "node-1", "GPU-5f3a", "isolate node: cordon the node", "NVRM: ", "no flight"):
        assert part in page.text, part
    assert "\x1b" not in page.text
