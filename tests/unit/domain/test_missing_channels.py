"""Which playbooks notify people by channels that are not set."""

from __future__ import annotations

from tests.unit.engine.books import catalog_of
from trainmedic_server.actions import registry
from trainmedic_server.domain.missing_channels import unset_channels
from trainmedic_server.domain.playbook import Playbook

QUIET = "{playbook: quiet, on: {alert: A}, target: node, steps: [{action: node.facts}]}"
TELLS = "{playbook: tells, on: {alert: A}, target: node, steps: [{action: node.facts}], on_failure: [%s]}"
NOTIFY = "{action: notify, with: {message: m%s}}"
ASKS = "{playbook: asks, on: {alert: A}, target: node, steps: [{approve: {message: m, to: ops}}, {action: node.facts}]}"


def books(*texts: str) -> list[Playbook]:
    return [each.definition for each in catalog_of(texts, registry.specs_only()).all()]


def test_without_a_channel_every_playbook_that_notifies_is_named() -> None:
    """With what is done about it; and a server whose playbooks notify no one has none to send either."""
    assert unset_channels(books(QUIET, TELLS % (NOTIFY % ""), ASKS), ()) == (
        "no notification channel is set, so no messages are sent; 2 playbooks (asks, tells) would notify "
        "people: steps are skipped, questions not sent; set TRAINMEDIC_NOTIFY_URLS"
    )
    assert "would notify" not in unset_channels(books(QUIET), ())


def test_a_playbook_that_names_a_channel_which_is_not_set_is_named() -> None:
    """Those that name none, or one that only the run knows, need no channel of a certain name."""
    template = NOTIFY % ', to: "{{ labels.team }}"'
    every = books(QUIET, TELLS % (NOTIFY % ""), ASKS, (TELLS % template).replace("tells", "by-team"))
    assert unset_channels(every, {"ops"}) == ""
    assert unset_channels(every, {"chat", "pager"}) == (
        "1 playbook (asks) would notify 'ops', which TRAINMEDIC_NOTIFY_URLS does not set; it sets chat, pager"
    )
