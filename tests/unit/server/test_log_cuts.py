"""``GET /agents/log-cuts``, and the lines about it in the lists of jobs and findings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.api_world import World
from tests.support.clocks import START
from tests.unit.server.test_api_operations import OPERATOR, world_with_tokens
from trainmedic_core.cli import exits
from trainmedic_server.cli import log_cuts
from trainmedic_server.ports.outside import Presence

SINCE = 1_700_000_000


def cut(what: str, count: int, job: str | None = "llm-1", since: int = SINCE) -> dict[str, Any]:
    return {"job": job, "uid": 1000, "what": what, "count": count, "since": since}


def world_of(*agents: Presence, world: World | None = None) -> World:
    made = world or World()
    made.bus.present = list(agents)
    return made


AGENTS = (
    Presence("n1", START, {"logs": {"cuts": [cut("lines", 7), cut("files", 3, "llm-2", SINCE + 5), {"what": "x"}]}}),
    Presence("n2", START, {"logs": {"cuts": [cut("jobs", 9, None, SINCE + 9)]}}),
    Presence("old", START, {"logs": {"files": 3}}),
    Presence("none", START, {}),
)


async def test_cuts_of_all_agents_are_listed_the_newest_first() -> None:
    """Of agents from before them, none."""
    async with world_of(*AGENTS).client() as client:
        found = (await client.get("/agents/log-cuts")).json()
        assert [(each["node"], each["job"], each["what"], each["count"]) for each in found["items"]] == [
            ("n2", None, "jobs", 9),
            ("n1", "llm-2", "files", 3),
            ("n1", "llm-1", "lines", 7),
        ]
        assert found["left_out"] == 0
        assert found["items"][2]["since"] == "2023-11-14T22:13:20Z"
        assert found["items"][2]["uid"] == 1000


@pytest.mark.parametrize(
    ("query", "counts", "left_out"),
    [({"limit": 1}, [9], 2), ({"job": "llm-1"}, [7], 0), ({"node": ["n2", "none"]}, [9], 0), ({"job": "other"}, [], 0)],
)
async def test_they_are_selected_and_bounded(query: Mapping[str, Any], counts: list[int], left_out: int) -> None:
    """The number of others is stated."""
    async with world_of(*AGENTS).client() as client:
        found = (await client.get("/agents/log-cuts", params=query)).json()
        assert ([each["count"] for each in found["items"]], found["left_out"]) == (counts, left_out)
        assert (await client.get("/agents/log-cuts", params={"job": ["x"] * 21})).status_code == 422


async def test_they_need_the_role_viewer() -> None:
    """As the list of agents does."""
    async with world_of(*AGENTS, world=world_with_tokens()).client() as client:
        assert (await client.get("/agents/log-cuts")).status_code == 401
        answer = await client.get("/agents/log-cuts", headers={"authorization": "Bearer am"})
        assert answer.status_code == 403
        assert (await client.get("/agents/log-cuts", headers=OPERATOR)).status_code == 200


class Server:
    """Answers one question."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[Mapping[str, Any]] = []

    def get(self, path: str, query: Mapping[str, Any]) -> Any:
        assert path == "agents/log-cuts"
        self.asked.append(query)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_the_command_line_states_whose_logs_are_read_in_part() -> None:
    """With the job, the user, the node and the budget; also of a kind that only a newer server knows."""
    since = "2023-11-14T22:13:20Z"
    items = [
        {"node": "n1", "job": "llm-1", "uid": 1000, "what": "lines", "count": 7000, "since": since},
        {"node": "n2", "job": None, "uid": None, "what": "new", "count": 1, "since": since},
        {"node": "n3", "job": "/logs", "uid": None, "what": "entries", "count": 2, "since": since},
    ]
    server = Server({"items": items, "left_out": 4})
    first, second, third, more = log_cuts.lines(server, job="llm-1")  # type: ignore[arg-type]
    assert first.startswith("CUT job llm-1 of user 1000 on n1: 7,000 lines not checked since ")
    assert "1 new" in second
    assert third.startswith("CUT directory /logs on n3: 2 scans ended before the last directory entry since ")
    assert more == "CUT 4 more, see GET /agents/log-cuts"
    assert server.asked[0]["job"] == "llm-1"


@pytest.mark.parametrize(
    ("error", "count"), [(exits.UnknownName("x"), 0), (exits.NotAllowed("x"), 0), (exits.Unreachable("away"), 1)]
)
def test_a_list_without_cuts_is_printed_all_the_same(error: Exception, count: int) -> None:
    """Where the server is older, or the token is for certain jobs. That it is not known is stated."""
    said = list(log_cuts.lines(Server(error)))  # type: ignore[arg-type]
    assert len(said) == count
    assert all(line.startswith("Unknown which logs") for line in said)
