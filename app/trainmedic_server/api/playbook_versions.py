"""``GET /playbooks/{name}/versions`` and ``POST /playbooks/{name}/test``: what a playbook was, and if it is right."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

from fastapi import Depends, Query, Request
from msgspec import Struct
from pydantic import ConfigDict, Field

from trainmedic_server.api.engine import CatalogPort
from trainmedic_server.api.view import ApiModel, View
from trainmedic_server.auth.auth import Authenticator, Principal, requires
from trainmedic_server.auth.tokens import TokenRole
from trainmedic_server.errors import NotFound, PayloadError
from trainmedic_server.http.api_routes import ApiRoutes
from trainmedic_server.http.bodies import body_schema, read_body
from trainmedic_server.http.body import BodyReader
from trainmedic_server.http.problems import responses
from trainmedic_server.http.read_turns import ReadTurns
from trainmedic_server.ports.playbook_tests import PlaybookTester, PlayedTests
from trainmedic_server.ports.playbook_versions import PlaybookVersions, UsedVersion
from trainmedic_server.ports.playbooks import CompiledPlaybook

_MOST_RUNS = 20_000
_MOST_LINES = 5_000
"""Of a text that is compared: comparing two takes up to the square of that."""

PartOfVersion = Annotated[
    str | None, Query(min_length=1, max_length=128, pattern=r"^[0-9a-zA-Z]+$", description="Or a unique beginning.")
]


class PlaybookTextsApi(Struct, frozen=True):
    """Who keeps the texts, and who runs the tests beside them."""

    versions: PlaybookVersions
    tester: PlaybookTester


class VersionView(View):
    """One text that the playbook had or has."""

    version: str = Field(description="Hash of the text.")
    loaded: bool = Field(description="Whether it is the one that new runs go by.")
    first_used_at: datetime | None = Field(description="When the first run went by it; null where none has.")
    last_used_at: datetime | None = Field(description="When the newest of them was created.")
    runs: int = Field(description="Runs and decisions not to start one, of the playbook's newest 20,000.")
    first_run: str | None = Field(description="The oldest of these.")
    last_run: str | None = Field(description="The newest of these.")


class DiffView(View):
    """What changed from one text to another."""

    before: str = Field(description="The version that is compared with.")
    after: str
    text: str = Field(description="A unified diff with three lines around each change; empty where they are alike.")


class VersionList(View):
    """The versions, newest first."""

    items: list[VersionView]
    diff: DiffView | None = Field(description="Of the two that are asked for.")


class PlayBody(ApiModel):
    """Nothing: the tests are those beside the playbook."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{}]})


class FailureView(View):
    """What is wrong, and where."""

    file: str
    line: int | None
    column: int | None
    message: str


class PlayedTestView(View):
    """One test."""

    name: str
    line: int | None
    passed: bool
    seconds: float = Field(description="Real ones; its virtual time may be days.")
    failures: list[FailureView]


class PlayedTestsView(View):
    """What came of a playbook's tests."""

    file: str
    passed: bool = Field(description="Whether there are tests, and all of them passed.")
    tests: list[PlayedTestView]
    problems: list[FailureView] = Field(description="Mistakes in the files, for which no test was run.")
    unfinished: str = Field(description="Why there is no outcome; empty where there is one.")


def router(
    catalog: CatalogPort, texts: PlaybookTextsApi, auth: Authenticator, bodies: BodyReader, reads: ReadTurns
) -> ApiRoutes:
    """The routes of this module."""
    routes = ApiRoutes("operations")
    viewer, operator = requires(auth, TokenRole.VIEWER), requires(auth, TokenRole.OPERATOR)

    @routes.get(
        "/playbooks/{name}/versions",
        summary="The texts that a playbook had",
        response_model=VersionList,
        responses=responses(401, 403, 404, 422, 503),
        dependencies=[Depends(viewer)],
    )
    async def listed(name: str, before: PartOfVersion = None, after: PartOfVersion = None) -> VersionList:
        """Each with the runs that went by it; with `before`, what changed from it to `after`, or to the loaded one."""
        loaded = catalog.get(name)
        async with reads.take():
            used = await texts.versions.used_versions(name, _MOST_RUNS)
            items = _items(loaded, used)
            if not items:
                raise NotFound("No playbook of that name is loaded, and none has run.")
            diff = None
            if before is not None:
                ends = _one_of(items, "before", before), _one_of(items, "after", after) if after else items[0].version
                diff = await _compared(texts.versions, loaded, name, *ends)
        return VersionList(items=items, diff=diff)

    @routes.post(
        "/playbooks/{name}/test",
        summary="Run the tests that stand beside a playbook",
        response_model=PlayedTestsView,
        responses=responses(400, 401, 403, 404, 408, 409, 413, 415, 422, 503),
        openapi_extra=body_schema(PlayBody),
    )
    async def play(request: Request, name: str, _: Principal = Depends(operator)) -> PlayedTestsView:
        """As `trainmedic playbook test` would: the files as they are now, in virtual time, in a process of its own
        without any effect outside. It takes up to a minute; one is run at a time, and a few wait."""
        await read_body(bodies, request, PlayBody)
        loaded = catalog.get(name)
        if loaded is None:
            raise NotFound("No playbook of that name is loaded.")
        return _played(await texts.tester.run_beside(loaded.source))

    return routes


def _items(loaded: CompiledPlaybook | None, used: Sequence[UsedVersion]) -> list[VersionView]:
    """The loaded one first, then the others, newest first."""
    views = [
        VersionView(
            version=each.version,
            loaded=loaded is not None and each.version == loaded.version,
            first_used_at=each.first_used_at,
            last_used_at=each.last_used_at,
            runs=each.runs,
            first_run=each.first_run,
            last_run=each.last_run,
        )
        for each in used
    ]
    if loaded is not None and not any(view.loaded for view in views):
        unused = {"first_used_at": None, "last_used_at": None, "first_run": None, "last_run": None}
        views.append(VersionView(version=loaded.version, loaded=True, runs=0, **unused))
    return sorted(views, key=lambda view: not view.loaded)


def _one_of(items: Sequence[VersionView], field: str, part: str) -> str:
    fitting = [item.version for item in items if item.version.startswith(part)]
    if len(fitting) != 1:
        known = ", ".join(item.version[:12] for item in items[:10])
        problem = "begins several versions" if fitting else f"is no version of the playbook; there are {known}"
        raise PayloadError.at([(field, f"{part} {problem}")])
    return fitting[0]


async def _compared(
    versions: PlaybookVersions, loaded: CompiledPlaybook | None, name: str, before: str, after: str
) -> DiffView:
    async def text(version: str) -> str:
        if loaded is not None and loaded.version == version:
            return loaded.text
        return await versions.text_of_version(name, version) or ""

    old, new = (await text(before)).splitlines(), (await text(after)).splitlines()
    if max(len(old), len(new)) > _MOST_LINES:
        raise PayloadError.at([("before", f"a text with over {_MOST_LINES:,} lines is not compared here")])
    named = f"{name} {before[:12]}", f"{name} {after[:12]}"
    lines = await asyncio.to_thread(lambda: list(difflib.unified_diff(old, new, *named, lineterm="")))
    return DiffView(before=before, after=after, text="\n".join(lines))


def _played(outcome: PlayedTests) -> PlayedTestsView:
    tests = [
        PlayedTestView(
            name=each.name,
            line=each.line,
            passed=not each.failures,
            seconds=each.seconds,
            failures=[FailureView.model_validate(failure) for failure in each.failures],
        )
        for each in outcome.tests
    ]
    problems = [FailureView.model_validate(problem) for problem in outcome.problems]
    return PlayedTestsView(
        file=outcome.file, passed=outcome.passed, tests=tests, problems=problems, unfinished=outcome.unfinished
    )
