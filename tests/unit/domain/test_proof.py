"""What an alert proves: that it comes from a shipped rule, or that its XID means hardware."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from msgspec.structs import replace

from trainmedic_logs.domain import xids
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.domain.proof import AlertProof, lacking

BOTH = (AlertProof.SHIPPED_RULE, AlertProof.HARDWARE_XID)


def alert(labels: dict[str, str], annotations: dict[str, str] | None = None) -> Alert:
    return Alert("f", AlertStatus.FIRING, labels, annotations or {}, datetime(2026, 3, 5, tzinfo=UTC))


def test_a_playbook_that_asks_for_no_proof_is_given_none() -> None:
    """As every playbook before there were proofs."""
    assert lacking((), alert({"err_code": "31"})) == ""


@pytest.mark.parametrize(
    "labels",
    [{"trainmedic_rule": "1"}, {"source": "log"}, {"source": "diagnosis"}, {"trainmedic_rule": "1", "xid": "31"}],
)
def test_a_rule_of_ours_proves_what_it_says(labels: dict[str, str]) -> None:
    """Of the XIDs that mean hardware as well as of others: the rule has told them apart already."""
    assert lacking((AlertProof.SHIPPED_RULE,), alert(labels)) == lacking(BOTH, alert(labels)) == ""


@pytest.mark.parametrize("labels", [{}, {"trainmedic_rule": "true"}, {"trainmedic_rule": ""}, {"source": "kubelet"}])
def test_anything_else_is_no_rule_of_ours(labels: dict[str, str]) -> None:
    """The value counts too."""
    assert lacking((AlertProof.SHIPPED_RULE,), alert(labels)).startswith('it does not carry trainmedic_rule="1"; ')


@pytest.mark.parametrize("code", sorted(xids.catalogue()))
def test_a_code_proves_broken_hardware_where_the_catalogue_asks_for_a_reset_or_a_restart(code: int) -> None:
    """For every code that it lists."""
    is_hardware = xids.xid(code).action in ("reset_gpu", "restart_node")
    assert (lacking(BOTH, alert({"err_code": str(code)})) == "") is is_hardware


@pytest.mark.parametrize(
    "labels",
    [
        {"xid": "62"}, {"XID": "62"}, {"exported_xid": "62"}, {"xid_code": "62"}, {"error_code": "62"},
        {"err_code": "62.0"}, {"xid": "Xid 62"}, {"xid": "XID: 62"}, {"xid": "62", "err_code": "48"},
    ],
)  # fmt: skip
def test_a_code_is_read_in_the_labels_and_spellings_that_are_usual(labels: dict[str, str]) -> None:
    """Of exporters and of rules."""
    assert lacking(BOTH, alert(labels)) == ""


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ({"err_code": "31"}, '(err_code="31" is an error of the program)'),
        ({"xid": "63"}, '(xid="63" asks for no repair)'),
        ({"xid": "149"}, '(xid="149" needs a person to judge it)'),
        ({"xid": "154"}, '(xid="154" does not say which repair it asks for)'),
        ({"xid": "0"}, '(xid="0" is not in the catalogue of XIDs)'),
        ({"xid": "many"}, '(xid="many" is no XID)'),
        ({"xid": "79", "err_code": "31"}, '(err_code="31" is an error of the program)'),
        ({"xid": "79 31"}, '(xid="79 31" is no XID)'),
        ({}, "names no XID that means hardware; "),
    ],
)
def test_what_is_missing_is_said_with_what_the_code_means(labels: dict[str, str], said: str) -> None:
    """Codes that contradict each other prove nothing."""
    why = lacking(BOTH, alert(labels))
    assert why.startswith('it does not carry trainmedic_rule="1" and names no XID that means hardware')
    assert said in why


@pytest.mark.parametrize("blanks", [1, 55, 58, 59, 70, 500])
def test_a_second_code_far_behind_the_first_is_seen(blanks: int) -> None:
    """However many blanks stand between them: the value is read whole, or not at all."""
    assert "is no XID" in lacking(BOTH, alert({"xid": f"79{' ' * blanks}and 31"}))
    assert "is no XID" in lacking(BOTH, alert({"xid": f"79{' ' * blanks}31"}))


def test_blanks_around_a_code_do_not_count() -> None:
    """As some exporters pad it."""
    assert lacking(BOTH, alert({"xid": f"  79{' ' * 90}"})) == ""


def test_a_text_in_an_annotation_proves_nothing() -> None:
    """A summary often shows the value of an expression, such as the rise of a gauge, and calls it an XID."""
    assert lacking(BOTH, alert({}, {"summary": "GPU 3 reported XID 79", "xid": "79"}))


def test_a_rule_of_an_earlier_release_is_told_from_a_rule_of_others() -> None:
    """By its runbook: the first is to be deployed anew, the second may get the label."""
    ours = lacking(BOTH, alert({}, {"runbook_url": "docs/how-to/monitoring.md#gpumissing"}))
    assert "of an earlier release of Trainmedic: deploy the rules of this release" in ours
    assert "add this label to the rule" in lacking(BOTH, alert({}, {"runbook_url": "https://example.org/gpumissing"}))


def test_the_reason_is_short_whatever_the_labels_hold() -> None:
    """It is kept with the alert."""
    labels = dict.fromkeys(("xid", "XID", "err_code", "error_code", "xid_code", "xid_error"), "x" * 5000)
    assert len(lacking(BOTH, alert(labels))) < 500


def test_the_rule_of_a_renamed_alert_is_not_told_to_add_a_label_that_the_rename_removes() -> None:
    """Only under the name itself the label would count."""
    renamed = replace(alert({"alertname": "GPUMissing"}), original={"alertname": "CardGone", "trainmedic_rule": "1"})
    assert lacking(BOTH, renamed).endswith("call its alert GPUMissing and add the label to the rule")
    relabelled = replace(alert({"alertname": "GPUMissing"}), original={"alertname": "GPUMissing", "card": "3"})
    assert lacking(BOTH, relabelled).endswith(
        "; if its rule means what this playbook repairs, add this label to the rule"
    )
