"""Playbooks of the engine's tests, compiled by the real catalog."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app import ports
from app.catalog import yaml_text
from app.catalog.compiler import compile_document

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


@dataclass(frozen=True)
class Books:
    """`ports.Catalog` over texts that do not change."""

    books: tuple[ports.Book, ...]
    actions: ports.Actions

    def for_alert(self, alertname: str) -> Sequence[ports.Book]:
        return [book for book in self.books if alertname in book.spec.on.alertnames]

    def get(self, name: str) -> ports.Book | None:
        return next((book for book in self.books if book.spec.name == name), None)

    def all(self) -> Sequence[ports.Book]:
        return self.books

    def compile(self, text: str, source: str) -> ports.Book:
        return _compiled(text, source, self.actions)


def catalog_of(texts: Sequence[str], actions: ports.Actions) -> Books:
    return Books(tuple(_compiled(text, "test.yaml", actions) for text in texts), actions)


def _compiled(text: str, source: str, actions: ports.Actions) -> ports.Book:
    documents, problems = yaml_text.read(text, source)
    assert not problems, problems
    book = compile_document(documents[0], actions)
    assert not isinstance(book, list), book
    return book
