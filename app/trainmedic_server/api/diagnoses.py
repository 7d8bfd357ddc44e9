"""``GET /jobs/{job}/diagnosis``."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

from fastapi import Path, Query, Response
from pydantic import Field

from trainmedic_logs.domain.finding import CauseClass
from trainmedic_logs.domain.known_verdict import KnownVerdict
from trainmedic_server.api.view import ApiModel
from trainmedic_server.errors import NotFound
from trainmedic_server.http.api_routes import ApiRoutes, RouteParts
from trainmedic_server.http.ascii_json import AsciiJson
from trainmedic_server.live.job_location import JobLocations
from trainmedic_server.ports.verdicts import VerdictHistory

_FROM_FILES = "`trainmedic diagnose --dir DIR` makes one from a job's files."

JobName = Annotated[str, Path(min_length=1, max_length=253, pattern=r"^[^\s\x00-\x1f\x7f]+$")]
Attempt = Annotated[
    int | None, Query(ge=1, le=1_000_000, description="Attempt; by default that of the newest verdict.")
]


class EvidenceView(ApiModel):
    why: str = Field(description="Why it matters, for people.")
    line: str = Field(description="As printed; empty if it is not a line.")
    source: str
    node: str | None
    rank: int | None
    at: str | None
    rule: str | None


class DiagnosisView(ApiModel):
    id: str
    job: str
    attempt: int | None = Field(description="Null if unknown.")
    began_at: datetime = Field(description="When the server received the first sign of the failure.")
    made_at: datetime
    cause: CauseClass
    node: str | None = Field(description="The node at fault; only with high confidence.")
    ranks: list[int]
    gpu: str | None
    confidence: str = Field(examples=["high", "medium", "low"])
    summary: str
    advice: str = Field(examples=["restart", "isolate_node", "stop", "rollback", "ask"])
    evidence: list[EvidenceView] = Field(description="Supporting evidence, strongest first.")
    against: list[EvidenceView] = Field(description="Contradicting evidence.")
    missing: list[str] = Field(description="Missing evidence that would have helped.")
    same_before: int = Field(description="Number of earlier equal failures of the job.")
    fingerprint: str
    shares: dict[str, float] | None


def view(verdict: KnownVerdict) -> Mapping[str, Any]:
    own = {"id": verdict.id, "job": verdict.job, "attempt": verdict.attempt}
    return {**own, "began_at": verdict.began_at, "made_at": verdict.made_at, **verdict.plain}


def router(history: VerdictHistory, job_locations: JobLocations, parts: RouteParts) -> ApiRoutes:
    routes = ApiRoutes("diagnosis", parts.auth)

    @routes.read("/jobs/{job:path}/diagnosis", 404, summary="Cause of a job's failure", response_model=DiagnosisView)
    async def diagnosis(job: JobName, attempt: Attempt = None) -> Response:
        """The verdict made when the job failed or hung. An unknown cause is a verdict, too."""
        async with parts.reads.take():
            newest = await history.verdicts_of(job, 1, attempt)
            if newest:
                return AsciiJson.of(DiagnosisView.model_validate(view(newest[0])))
            if attempt is not None and (others := await history.verdicts_of(job, 1)):
                raise NotFound(f"There is no verdict on attempt {attempt} of {job}; {_other(others[0])}")
            raise NotFound(f"There is no verdict on {job}: {await _why_none(job, job_locations)}")

    return routes


def _other(newest: KnownVerdict) -> str:
    attempt = newest.attempt
    return "that of the newest is unknown." if attempt is None else f"the newest is for attempt {attempt}."


async def _why_none(job: str, job_locations: JobLocations) -> str:
    found = await job_locations.of(job)
    if found.nodes or found.pods:
        return f"no failure was reported to the server. {_FROM_FILES}"
    if not found.is_whole:
        return f"Redis does not answer, so it is unknown whether the job exists. {_FROM_FILES}"
    return (
        "the server does not know this job. It diagnoses jobs started with trainmedic-run, with the SDK or in pods, "
        f"but not jobs of which it has only files or Slurm's output. {_FROM_FILES}"
    )
