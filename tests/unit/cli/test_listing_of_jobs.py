"""Lists for a token that may read certain jobs alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from trainmedic_core.cli import exits
from trainmedic_server.cli import listing


class BoundedServer:
    """Refuses all paths that are not below /jobs/team/llm-1, and pages the items there."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Mapping[str, Any]]] = []

    def get(self, path: str, params: Mapping[str, Any]) -> dict[str, Any]:
        self.asked.append((path, params))
        if not path.startswith("jobs/team/llm-1/"):
            raise exits.NotAllowed("this token is for certain jobs")
        is_first = "cursor" not in params
        return {"items": [{"id": 1 if is_first else 2}], "next": "more" if is_first else None}


def listed(server: BoundedServer, path: str, conditions: Mapping[str, Any]) -> list[Any]:
    return list(listing.items(server, path, conditions, None))  # type: ignore[arg-type]


@pytest.mark.parametrize(("path", "job"), [("findings", "team/llm-1"), ("history", ("team/llm-1",))])
def test_the_items_of_one_job_are_read_below_its_path(path: str, job: str | tuple[str, ...]) -> None:
    """From the first refusal on, the client uses the job's path, with all other conditions."""
    server = BoundedServer()
    assert listed(server, path, {"job": job, "since": "1h"}) == [{"id": 1}, {"id": 2}]
    assert [asked for asked, _ in server.asked] == [path, f"jobs/team/llm-1/{path}", f"jobs/team/llm-1/{path}"]
    assert all(params["since"] == "1h" for _, params in server.asked)
    assert all("job" not in params for _, params in server.asked[1:])


@pytest.mark.parametrize(
    ("path", "conditions"),
    [
        ("findings", {}),
        ("findings", {"job": "team/llm-1", "claimed_job": "x"}),
        ("history", {"job": ("team/llm-1", "other")}),
        ("history", {"job": ("team/llm-1",), "target": ("job:other",)}),
        ("alerts", {"job": "team/llm-1"}),
    ],
)
def test_a_condition_that_the_job_path_cannot_answer_stays_refused(path: str, conditions: Mapping[str, Any]) -> None:
    """No condition is dropped silently."""
    server = BoundedServer()
    with pytest.raises(exits.NotAllowed):
        listed(server, path, conditions)
    assert len(server.asked) == 1
