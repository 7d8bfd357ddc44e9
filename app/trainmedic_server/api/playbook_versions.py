"""Routes of a playbook's versions and tests."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

from fastapi import Path, Query, Request
from msgspec import Struct
from pydantic import ConfigDict, Field

from trainmedic_server.api.view import ApiModel, View
from trainmedic_server.catalog.library import Library
from trainmedic_server.errors import NotFound, PayloadError
from trainmedic_server.http.api_routes import ApiRoutes, RouteParts
from trainmedic_server.ports.playbook_tests import PlaybookTester, PlayedTests
from trainmedic_server.ports.playbook_versions import PlaybookVersions, UsedVersion
from trainmedic_server.ports.playbooks import CompiledPlaybook

_MOST_RUNS = 20_000  # of a playbook, whose versions are listed
_MOST_LINES = 5_000  # a diff takes up to quadratic time

PartOfVersion = Annotated[
    str | None,
    Query(min_length=1, max_length=128, pattern=r"^[0-9a-zA-Z]+$", description="Complete, or a unique beginning."),
]


class PlaybookTextsApi(Struct, frozen=True):
    versions: PlaybookVersions
    tester: PlaybookTester


class VersionView(View):
    version: str = Field(description="Hash of the text.")
    loaded: bool = Field(description="Whether new runs use it.")
    first_used_at: datetime | None = Field(description="Creation of the first run with it; null if none used it.")
    last_used_at: datetime | None = Field(description="Creation of its newest run.")
    runs: int = Field(description="Its runs and decisions not to start one, among the playbook's newest 20,000.")
    first_run: str | None = Field(description="Its oldest run.")
    last_run: str | None = Field(description="Its newest run.")


class DiffView(View):
    before: str = Field(description="The version compared with.")
    after: str
    text: str = Field(description="Unified diff with three context lines; empty if equal.")


class VersionList(View):
    items: list[VersionView]
    diff: DiffView | None = Field(description="Difference of the requested versions.")


class PlayBody(ApiModel):
    """The tests are those next to the playbook."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{}]})


class FailureView(View):
    file: str
    line: int | None
    column: int | None
    message: str


class PlayedTestView(View):
    name: str
    line: int | None
    passed: bool
    seconds: float = Field(description="Real time; the virtual time may be days.")
    failures: list[FailureView]


class PlayedTestsView(View):
    file: str
    passed: bool = Field(description="Whether there are tests, and all of them passed.")
    tests: list[PlayedTestView]
    problems: list[FailureView] = Field(description="Errors in the files, because of which no test was run.")
    unfinished: str = Field(description="Why there is no outcome; otherwise empty.")


def router(catalog: Library, texts: PlaybookTextsApi, parts: RouteParts) -> ApiRoutes:
    routes = ApiRoutes("operations", parts.auth)

    @routes.read("/playbooks/{name}/versions", 404, summary="Past texts of a playbook")
    async def listed(
        name: Annotated[str, Path(pattern=r"^[^\x00]*$")], before: PartOfVersion = None, after: PartOfVersion = None
    ) -> VersionList:
        """With `before`, also the difference to `after`, by default to the loaded version, otherwise the newest."""
        loaded = catalog.get(name)
        async with parts.reads.take():
            used = await texts.versions.used_versions(name, _MOST_RUNS)
            items = _items(loaded, used)
            if not items:
                raise NotFound("No playbook of that name is loaded, and none has run.")
            diff = None
            if before is not None:
                old = _version_named(items, "before", before)
                new = _version_named(items, "after", after) if after else items[0].version
                diff = await _compared(texts.versions, loaded, name, old, new)
        return VersionList(items=items, diff=diff)

    @routes.act("/playbooks/{name}/test", PlayBody, 404, 409, summary="Run the tests next to a playbook")
    async def play(request: Request, name: str) -> PlayedTestsView:
        """Run the present files in virtual time, in a separate process without external effects. Takes up to a minute.
        One runs at a time, and a few wait.
        """
        await parts.bodies.read_model(request, PlayBody)
        loaded = catalog.get(name)
        if loaded is None:
            raise NotFound("No playbook of that name is loaded.")
        return _played(await texts.tester.run_tests_of(loaded.source))

    return routes


def _items(loaded: CompiledPlaybook | None, used: Sequence[UsedVersion]) -> list[VersionView]:
    views = [VersionView.of(each, loaded=loaded is not None and each.version == loaded.version) for each in used]
    if loaded is not None and not any(view.loaded for view in views):
        unused = {"first_used_at": None, "last_used_at": None, "first_run": None, "last_run": None}
        views.append(VersionView(version=loaded.version, loaded=True, runs=0, **unused))
    return sorted(views, key=lambda view: not view.loaded)


def _version_named(items: Sequence[VersionView], field: str, part: str) -> str:
    fitting = [item.version for item in items if item.version.startswith(part)]
    if len(fitting) != 1:
        known = ", ".join(item.version[:12] for item in items[:10])
        problem = "matches several versions" if fitting else f"is no version of the playbook; use one of {known}"
        raise PayloadError.at([(field, f"{part} {problem}")])
    return fitting[0]


async def _compared(
    versions: PlaybookVersions, loaded: CompiledPlaybook | None, name: str, before: str, after: str
) -> DiffView:
    async def text(version: str) -> str:
        if loaded is not None and loaded.version == version:
            return loaded.text
        stored = await versions.text_of_version(name, version)
        if stored is None:
            raise NotFound(f"The text of the version {version[:12]} of {name} is not stored.")
        return stored

    old, new = (await text(before)).splitlines(), (await text(after)).splitlines()
    if max(len(old), len(new)) > _MOST_LINES:
        raise PayloadError.at([("before", f"texts over {_MOST_LINES:,} lines are not compared")])
    named = f"{name} {before[:12]}", f"{name} {after[:12]}"
    lines = await asyncio.to_thread(lambda: list(difflib.unified_diff(old, new, *named, lineterm="")))
    return DiffView(before=before, after=after, text="\n".join(lines))


def _played(outcome: PlayedTests) -> PlayedTestsView:
    return PlayedTestsView.of(
        outcome, tests=[PlayedTestView.of(each, passed=not each.failures) for each in outcome.tests]
    )
