"""Playbooks of the engine's tests, compiled by the real catalog."""

from __future__ import annotations

from collections.abc import Sequence

from trainmedic_server.catalog import loader
from trainmedic_server.catalog.library import StaticCatalog
from trainmedic_server.ports.actions import Actions

CAP = """
playbook: cap
on: {alert: Hot}
target: {gpu: "{{ labels.gpu }}", node: "{{ labels.node }}"}
steps:
  - id: cap
    action: test.cap
    with: {amount: 80}
    undo: on_resolve
"""


def catalog_of(texts: Sequence[str], actions: Actions) -> StaticCatalog:
    return StaticCatalog([loader.load_one(text, "test.yaml", actions) for text in texts], actions)
