"""``/playbooks/{name}/versions`` and ``/playbooks/{name}/test``; without a socket."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.support.api_world import World
from tests.support.clocks import START
from tests.unit.server.test_console_access import TOKENS
from trainmedic_core.problems import FileProblem
from trainmedic_server import errors
from trainmedic_server.auth.auth import Authenticator
from trainmedic_server.ports.playbook_tests import PlayedTest, PlayedTests


@dataclass
class ScriptedTester:
    """Says what it is told to; None stands for no tests."""

    outcome: PlayedTests | None = None
    asked: list[str] = field(default_factory=list)

    async def run_tests_of(self, source: str) -> PlayedTests:
        self.asked.append(source)
        if self.outcome is None:
            raise errors.NotFound("There are no tests beside the playbook.")
        return self.outcome


async def test_the_loaded_text_comes_first_though_no_run_went_by_it() -> None:
    """And what changed since an earlier one is a unified diff; a version may be named by its beginning."""
    world = World()
    await world.findings.transact(lambda tx: tx.keep_playbook("cool", "abc1", "playbook: cold\n", START))
    await world.findings.transact(lambda tx: tx.keep_playbook("cool", "abd2", "playbook: cool\n", START))
    async with world.client() as client:
        listed = (await client.get("/playbooks/cool/versions")).json()
        assert [(each["version"], each["loaded"]) for each in listed["items"]] == [
            *(("v1", True), ("abc1", False), ("abd2", False))
        ]
        assert (listed["items"][0]["first_used_at"], listed["diff"]) == (None, None)
        diff = (await client.get("/playbooks/cool/versions?before=abc")).json()["diff"]
        assert (diff["before"], diff["after"]) == ("abc1", "v1")
        assert diff["text"].splitlines()[-2:] == ["-playbook: cold", "+playbook: cool"]
        alike = (await client.get("/playbooks/cool/versions?before=abd2&after=v1")).json()["diff"]
        assert alike["text"] == ""
        for wrong, why in (("ab", "matches several"), ("zz", "is no version")):
            answer = await client.get(f"/playbooks/cool/versions?before={wrong}")
            assert answer.status_code == 422
            assert why in answer.json()["detail"]
        assert (await client.get("/playbooks/unheard-of/versions")).status_code == 404
        # PostgreSQL takes no such text, which would seem to be an outage.
        assert (await client.get("/playbooks/co%00ol/versions")).status_code == 422


async def test_a_text_that_is_not_stored_is_not_compared_as_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    await world.findings.transact(lambda tx: tx.keep_playbook("cool", "abc1", "playbook: cold\n", START))

    async def none(playbook: str, version: str) -> None:
        return None

    monkeypatch.setattr(world.findings, "text_of_version", none)
    async with world.client() as client:
        answer = await client.get("/playbooks/cool/versions?before=abc")
        assert answer.status_code == 404
        assert answer.json()["detail"] == "The text of the version abc1 of cool is not stored."


async def test_tests_are_run_for_operators_alone() -> None:
    """Each with the place of its failure; the file is the one that the loaded playbook came from."""
    failure = FileProblem("playbooks/cool_test.yaml", 8, 3, "expected failed, got succeeded")
    played = PlayedTests("playbooks/cool_test.yaml", (PlayedTest("a", 2, 0.5), PlayedTest("b", 8, 0.1, (failure,))))
    tester = ScriptedTester(played)
    async with World(auth=Authenticator(TOKENS), tester=tester).client() as client:
        viewer, operator = ({"authorization": f"Bearer {secret}"} for secret in ("look", "op"))
        assert (await client.post("/playbooks/cool/test", headers=viewer)).status_code == 403
        assert tester.asked == []
        answer = (await client.post("/playbooks/cool/test", headers=operator)).json()
        assert (answer["passed"], [test["passed"] for test in answer["tests"]]) == (False, [True, False])
        assert answer["tests"][1]["failures"][0]["line"] == 8
        assert tester.asked == ["playbooks/cool.yaml"]
        tester.outcome = None
        assert (await client.post("/playbooks/cool/test", headers=operator)).status_code == 404
        assert (await client.post("/playbooks/other/test", headers=operator)).status_code == 404
        assert (await client.get("/playbooks/cool/test", headers=operator)).status_code in (404, 405)
