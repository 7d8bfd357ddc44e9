"""Rendering of live page fragments, the same for all viewers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from trainmedic_server.console import run_pages
from trainmedic_server.console.inner_api import InnerApi
from trainmedic_server.console.rendering import Renderer
from trainmedic_server.console.standing import ServerStanding, StandingView
from trainmedic_server.errors import StoreUnavailable

_MOST_ROWS = 40  # the newest; a page with more than 20 new rows reloads its list (`console.js`)


class Fragments:
    def __init__(self, api: InnerApi, renderer: Renderer, standing: ServerStanding) -> None:
        self._api = api  # not asked by a particular viewer, as all share the fragments
        self._renderer = renderer
        self._standing = standing

    async def render(self, topic: str, run_ids: Collection[str], seq: int) -> Mapping[str, str]:
        match topic.partition(":"):
            case ("head", _, _):
                standing = await self._known_state(seq)
                return {"head": self._renderer.part("parts.html", "head_status", standing)}
            case ("runs", _, _):
                return await self._rows(run_ids)
            case ("now", _, _):
                standing = await self._known_state(seq)
                return {"now": self._renderer.text("now_parts.html", standing=standing)}
            case ("run", _, run_id):
                shown = await self._api.get_or(None, f"/history/{run_id}")
                if shown is None:
                    return {}
                names = await run_pages.story(self._api.get_or, shown)
                return {"story": self._renderer.text("run_story.html", **names)}
            case _:
                return {}

    async def _known_state(self, seq: int) -> StandingView:
        standing = await self._standing.now(since=seq)
        if standing.document is None:
            # The board tries again. A fragment that says so would stay on the pages until the next event.
            raise StoreUnavailable("the run store does not respond")
        return standing

    async def _rows(self, run_ids: Collection[str]) -> Mapping[str, str]:
        rows: dict[str, str] = {}
        for run_id in sorted(run_ids)[-_MOST_ROWS:]:
            run = await self._api.get_or(None, f"/history/{run_id}")
            if run is not None:
                rows[f"run-{run_id}"] = self._renderer.part("parts.html", "run_row", run)
        return rows
