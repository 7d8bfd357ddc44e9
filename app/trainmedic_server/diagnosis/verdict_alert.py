"""The alert of a verdict: by which labels playbooks take it, and what it says. Pure.

Who calls it: the simulation, for tests in which a job fails.
"""

from __future__ import annotations

from trainmedic_server.diagnosis.verdict import Verdict

ALERTNAME = "TrainingFailed"


def labels_of(job: str, verdict: Verdict) -> dict[str, str]:
    """Return the labels. There is a node among them only where the verdict names one."""
    labels = {"alertname": ALERTNAME, "severity": "critical", "component": "training", "source": "diagnosis"}
    labels |= {"job_name": job, "cause": str(verdict.cause), "confidence": str(verdict.confidence)}
    return labels | ({"node": verdict.node} if verdict.node else {})


def annotations_of(verdict: Verdict) -> dict[str, str]:
    """Return what people are told; what is empty is left out."""
    said = {
        "summary": verdict.summary,
        "ranks": ", ".join(map(str, verdict.ranks[:100])),
        "advice": str(verdict.advice),
        "same_before": str(verdict.same_before),
        "confidence": str(verdict.confidence),
    }
    return {name: text for name, text in said.items() if text}
