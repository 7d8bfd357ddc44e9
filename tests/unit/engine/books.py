"""Playbooks of the engine's tests, compiled by the real catalog."""

from __future__ import annotations

from collections.abc import Sequence

from app import ports

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


import hashlib
import jinja2
from ruamel.yaml import YAML
from app.domain.playbook import Playbook
from app.domain import target as T
from app import errors

ENV = jinja2.Environment(undefined=jinja2.StrictUndefined)


class B:
    source = "x"

    def __init__(self, text, actions):
        self.text = text
        self.version = hashlib.sha256(text.encode()).hexdigest()
        self.spec = Playbook.model_validate(YAML(typ="safe").load(text))
        self.actions = actions

    def match(self, alert):
        return ports.Match(alert.name in self.spec.on.alertnames)

    def r(self, v, scope):
        if isinstance(v, str) and "{{" in v:
            try:
                return ENV.from_string(v).render(scope)
            except jinja2.UndefinedError as e:
                raise errors.ExpressionError(str(e))
        return v

    def target_of(self, alert, inventory):
        t = self.spec.target
        if isinstance(t, T.Kind):
            return T.resolve(t, alert.labels, inventory)
        sc = {"labels": dict(alert.labels)}
        return T.Target(t.kind, **{k: self.r(getattr(t, k), sc) for k in ("node", "gpu", "job") if getattr(t, k)})

    def step(self, phase, index):
        return (self.spec.steps if phase == "steps" else self.spec.on_failure)[index]

    def when(self, phase, index, scope):
        w = self.step(phase, index).when
        if w is None:
            return True
        try:
            return bool(ENV.compile_expression(w, undefined_to_none=False)(**scope))
        except jinja2.UndefinedError as e:
            raise errors.ExpressionError(str(e))

    def params(self, phase, index, scope):
        s = self.step(phase, index)
        return self.actions.spec(s.action).Params.model_validate({k: self.r(v, scope) for k, v in s.with_.items()})

    def message(self, phase, index, scope):
        return self.step(phase, index).message


class C:
    def __init__(self, books, actions):
        self.books = books
        self.actions = actions

    def for_alert(self, n):
        return [b for b in self.books if n in b.spec.on.alertnames]

    def get(self, n):
        return next((b for b in self.books if b.spec.name == n), None)

    def all(self):
        return self.books

    def compile(self, text, source):
        return B(text, self.actions)


def catalog_of(texts, actions):
    return C([B(t, actions) for t in texts], actions)
