"""``POST /pause``, ``/resume``, ``GET /pauses`` and the mode of a playbook, without a socket."""

from __future__ import annotations

import pytest

from tests.support.api_world import World


async def test_a_pause_has_a_scope_an_end_and_a_note() -> None:
    """They are seen in the answer, in the list and in `/ready`; a pause without a body is of everything."""
    async with World().client() as client:
        body = {"node": "node-7", "for": "2h", "note": "new fans"}
        made = (await client.post("/pause", json=body)).json()
        assert (made["paused"], made["pause"]["scope"], made["pause"]["in_force"]) == (False, "node node-7", True)
        listed = (await client.get("/pauses")).json()["items"]
        ready = (await client.get("/ready")).json()
        assert listed == ready["pauses"] == made["pauses"] == [made["pause"]]
        assert (listed[0]["note"], listed[0]["until"]) == ("new fans", "2026-01-31T14:00:00Z")
        everything = (await client.post("/pause")).json()
        assert (everything["paused"], len(everything["pauses"])) == (True, 2)
        rest = (await client.post("/resume", json={"id": made["pause"]["id"]})).json()
        assert (rest["paused"], len(rest["pauses"])) == (True, 1)
        assert (await client.post("/resume", json={"id": made["pause"]["id"]})).status_code == 404
        assert (await client.post("/resume")).json()["pauses"] == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"nod": "x"}, "nod"),
        ({"for": "2"}, "for"),
        ({"for": "0s"}, "for"),
        ({"until": "2026-01-31T12:00:00"}, "until"),
        ({"for": "1h", "until": "2026-01-31T12:00:00Z"}, ""),
        ({"every": "7d"}, ""),
        ({"every": "1h", "for": "2h"}, ""),
        ({"until": "2026-01-30T12:00:00Z"}, "until"),
        ({"starts": "2026-01-31T11:54:00Z", "for": "1h"}, "starts"),
        ({"starts": "2026-01-31T06:00:00Z", "for": "1h", "every": "7d"}, "starts"),
        ({"starts": "9999-12-31T23:59:59-01:00"}, "starts"),
        ({"until": "0001-01-01T00:00:00+01:00"}, "until"),
        ({"starts": "9999-12-31T00:00:00Z", "for": "2d"}, "starts"),
        ({"starts": "9999-12-31T00:00:00Z", "for": "1h", "every": "1d"}, "starts"),
        ({"until": "9999-12-31T23:59:59.999999Z"}, "until"),
        ({"starts": "2026-02-01T00:00:00Z", "until": "9999-12-31T23:59:59.999999Z"}, "until"),
    ],
)
async def test_a_pause_that_makes_no_sense_is_refused(body: dict[str, str], field: str) -> None:
    """With the member that is wrong."""
    async with World().client() as client:
        answer = await client.post("/pause", json=body)
    assert (answer.status_code, answer.json().get("field")) == (422, field), answer.json()
    assert "Value error" not in answer.text


async def test_a_playbook_is_kept_to_observing_for_a_while() -> None:
    """By name; one that is not loaded is not known."""
    async with World().client() as client:
        body = {"mode": "observe", "for": "1d", "note": "it drained twice"}
        kept = (await client.post("/playbooks/cool/mode", json=body)).json()
        assert (kept["paused"], kept["pauses"][0]["observe"], kept["pauses"][0]["playbook"]) == (False, True, "cool")
        assert (await client.post("/playbooks/coool/mode", json=body)).status_code == 404
        assert (await client.post("/playbooks/cool/mode", json={"mode": "as_written"})).json()["pauses"] == []
        assert (await client.post("/playbooks/cool/mode", json={"mode": "as_written"})).status_code == 404


@pytest.mark.parametrize("until", ["9999-12-31T23:59:59.999999Z", "2026-01-30T12:00:00Z"])
async def test_a_mode_that_ends_too_late_or_in_the_past_is_refused(until: str) -> None:
    async with World().client() as client:
        answer = await client.post("/playbooks/cool/mode", json={"mode": "observe", "until": until})
    assert (answer.status_code, answer.json().get("field")) == (422, "until"), answer.json()


async def test_a_pause_of_a_playbook_that_is_not_loaded_holds_and_warns() -> None:
    """Who has misspelt it must not believe that the playbook stands still."""
    async with World().client() as client:
        misspelt = (await client.post("/pause", json={"playbook": "coool"})).json()
        assert misspelt["pause"]["in_force"] is True
        assert misspelt["warning"] == "no loaded playbook is named 'coool'; did you mean 'cool'?"
        pattern = (await client.post("/pause", json={"playbook": "xyz-*"})).json()
        assert pattern["warning"] == "no loaded playbook is named 'xyz-*'"
        for known in ({"playbook": "co*"}, {"node": "node-7"}, {}):
            assert (await client.post("/pause", json=known)).json()["warning"] == ""
