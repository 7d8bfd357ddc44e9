"""Reading alerts in the forms in which people have them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.clocks import START
from trainmedic_server import errors
from trainmedic_server.api import given_alerts
from trainmedic_server.domain.alert import AlertStatus

BEGAN = "2020-01-01T10:00:00Z"
LABELS = {"alertname": "GPUTemperatureHigh", "node": "n1"}
OF_API = {
    "annotations": {"summary": "hot"},
    "endsAt": "2199-01-01T00:00:00.000Z",
    "fingerprint": "0123456789abcdef",
    "receivers": [{"name": "trainmedic"}],
    "startsAt": BEGAN,
    "status": {"inhibitedBy": [], "silencedBy": [], "state": "active"},
    "updatedAt": BEGAN,
    "generatorURL": "http://prometheus/graph",
    "labels": LABELS,
}
"""As Alertmanager 0.27 answers ``GET /api/v2/alerts``, and amtool prints."""
ITEM = {
    "run_id": "r",
    "timestamp": BEGAN,
    "alert_name": "GPUTemperatureHigh",
    "alert_labels": LABELS,
    "status": "failed",
}
RUN = {
    **ITEM,
    "alerts": [
        {"fingerprint": "f", "status": "resolved", "labels": LABELS, "annotations": {}, "starts_at": BEGAN,
         "ends_at": "2020-01-01T11:00:00Z", "resolved_at": "2020-01-01T11:00:00Z"}
    ],
}  # fmt: skip
HEARD = {"alert_name": "GPUTemperatureHigh", "labels": LABELS, "status": "firing", "starts_at": BEGAN, "reactions": []}


@pytest.mark.parametrize(
    "document",
    [
        {"version": "4", "alerts": [{"status": "firing", "labels": LABELS, "startsAt": BEGAN}]},
        {"alerts": [{"status": "firing", "labels": LABELS, "startsAt": BEGAN}]},
        {"labels": LABELS, "startsAt": BEGAN},
        [{"labels": LABELS, "startsAt": BEGAN}],
        OF_API,
        [OF_API],
        {"status": "success", "data": {"alerts": [{"labels": LABELS, "state": "firing", "activeAt": BEGAN}]}},
        RUN,
        [RUN],
        [ITEM],
        {"items": [ITEM], "next": None},
        HEARD,
        {"items": [HEARD], "next": None},
    ],
    ids=["webhook", "no version", "alert", "alerts", "api", "api list", "prometheus", "run", "runs", "items", "history",
         "heard", "heard page"],
)  # fmt: skip
def test_each_form_gives_the_same_alert(document: Any) -> None:
    """Its labels, that it fires, and since when."""
    (alert,) = given_alerts.read(document, START)
    assert (alert.labels, alert.status) == (LABELS, AlertStatus.FIRING)
    assert alert.starts_at.isoformat() == "2020-01-01T10:00:00+00:00"


def test_what_is_not_said_is_that_it_fires_since_now() -> None:
    """Name and labels are enough."""
    (alert,) = given_alerts.read({"labels": LABELS}, START)
    assert (alert.status, alert.starts_at) == (AlertStatus.FIRING, START)


@pytest.mark.parametrize(
    "alert",
    [
        {**OF_API, "endsAt": "2020-01-01T11:00:00Z"},
        {"labels": LABELS, "status": "resolved"},
        {**HEARD, "status": "resolved"},
    ],
)
def test_what_has_resolved_stays_resolved(alert: Mapping[str, Any]) -> None:
    """Alertmanager's API says so by an end that is past."""
    (read,) = given_alerts.read(alert, START)
    assert read.status is AlertStatus.RESOLVED


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "contains no alert"),
        ({"alertname": "A"}, "no known form of alerts"),
        (3, "no known form"),
        ({"items": []}, "no known form"),
        ({"labels": {"a": 1}}, "labels.a: must be a string"),
        ([{"labels": LABELS, "startsAt": "soon"}], "startsAt"),
        ([3], "must be an object"),
        ([{"labels": LABELS}] * 1001, "at most 1000"),
        ({"status": "success", "data": {"result": []}}, "no known form"),
        ({"event": "\ud800", "labels": {}}, "half a surrogate pair"),
    ],
)
def test_what_is_no_alert_is_refused(document: Any, said: str) -> None:
    """With what is wrong."""
    with pytest.raises(errors.PayloadError) as refused:
        given_alerts.read(document, START)
    assert said in str(refused.value), refused.value


_KEYS = st.sampled_from(
    [
        "alerts",
        "items",
        "data",
        "labels",
        "alert_labels",
        "status",
        "startsAt",
        "endsAt",
        "run_id",
        "version",
        "timestamp",
    ]
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["4", "firing", "resolved", BEGAN, "x", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(document=_VALUES)
def test_whatever_is_given_is_read_or_refused(document: Any) -> None:
    """Nothing else comes of it."""
    with contextlib.suppress(errors.PayloadError):
        assert given_alerts.read(document, START) is not None


def test_what_alertmanager_keeps_back_is_said() -> None:
    """Its API lists what it sends to nobody, too; of other forms nothing is claimed."""
    silenced = {
        **OF_API,
        "status": {"silencedBy": ["5f3a"], "inhibitedBy": ["0b"], "mutedBy": [], "state": "suppressed"},
    }
    assert given_alerts.kept_back([OF_API, silenced]) == ("", "silenced by 5f3a and inhibited by 0b")
    webhook = {"version": "4", "alerts": [{"labels": LABELS, "status": "firing", "startsAt": BEGAN}]}
    assert given_alerts.kept_back(webhook) == ()
    of_prometheus = {"data": {"alerts": [{"labels": LABELS, "state": state} for state in ("pending", "firing")]}}
    assert given_alerts.kept_back(of_prometheus) == ("pending in Prometheus", "")
    assert given_alerts.kept_back(RUN | {"alerts": [{"labels": LABELS, "starts_at": BEGAN}]}) == ("",)
