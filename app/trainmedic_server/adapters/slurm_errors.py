"""Meaning of Slurm's errors, by number (slurmrestd) or text (scontrol, scancel)."""

from __future__ import annotations

from trainmedic_server.errors import ActionFailure, ClusterRefused, ClusterUnavailable, ObjectMissing

NO_JOB, NO_NODE, ENDED, NO_RESERVATION = 2017, 2018, 2021, 2053
"""Slurm's error numbers (slurm_errno.h): invalid job id, invalid node name, job already completing or completed,
invalid reservation.
"""
_NO_ANSWER = frozenset({-1, *range(1, 1007), *range(1008, 2000), *range(5000, 6000)})
"""Error numbers of communication with slurmctld, such as 1001 (connection failure) and 5004 (timed out).

Those below 1000 are errno values. -1, which states no cause, comes from a controller under load.
"""
UNAUTHENTICATED = 9202
# Protocol authentication error, access denied, unable to authenticate.
_AUTH_ERRORS = frozenset({1007, 2002, UNAUTHENTICATED})
# Parts of what scontrol and scancel write, and of the agent's text if they do not end; none has a number.
_TEXTS = {
    "Invalid job id specified": NO_JOB,
    "Invalid node name specified": NO_NODE,
    "Job/step already completing or completed": ENDED,
    "Requested reservation is invalid": NO_RESERVATION,
    "Unable to contact slurm controller": 1800,
    "Connection refused": 1800,
    "Connection timed out": 1800,
    "Communication connection failure": 1001,
    "Zero Bytes were transmitted or received": 5005,
    "Socket timed out on send/recv operation": 5004,
    "Unexpected message received": 1000,
    " did not end in time": 5004,
    "Protocol authentication error": 1007,
    "Access/permission denied": 2002,
}


NOTHING_CHANGED = "; nothing was changed"  # added by agents to a failure before the change


def number_in(text: str) -> int | None:
    return next((number for part, number in _TEXTS.items() if part in text), None)


def failure(number: object, text: str, is_change: bool, remedy: str) -> ActionFailure:
    """Return the failure that an error means. `remedy`: what to check if the access is denied."""
    if not isinstance(number, int) or number in _NO_ANSWER:
        return ClusterUnavailable(text, may_be_done=is_change)
    if number in (NO_NODE, NO_JOB, NO_RESERVATION):
        return ObjectMissing(text)
    if number in _AUTH_ERRORS:
        return ClusterRefused(f"{text}; {remedy}", may_pass=True)
    return ClusterRefused(text)
