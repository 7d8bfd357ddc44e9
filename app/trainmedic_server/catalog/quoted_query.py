"""PromQL in playbooks. Templates stand only inside quoted strings, escaped so that no label can end the string."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from trainmedic_core.errors import ExpressionError
from trainmedic_core.expressions.evaluation import Expression, TextTemplate, as_text
from trainmedic_core.target import PARTS
from trainmedic_server.domain import promql
from trainmedic_server.domain.run import Run

NAMES = ("labels", "target", "vars")  # in the query of an effect
_TEMPLATE = re.compile(r"(\{\{.*?\}\})", re.DOTALL)
_TARGET = ("kind", "key", *PARTS)

Template = Expression | TextTemplate | str


class QuotedQuery(Struct, frozen=True):
    pieces: Sequence[Template]  # constants and templates in order

    def of_effect(self, run: Run, variables: Mapping[str, Any]) -> str:
        """Raises ExpressionError."""
        target = run.target
        members = {name: str(value) for name in _TARGET if (value := getattr(target, name, None)) is not None}
        return self.rendered({"labels": dict(run.alert_labels), "target": members, "vars": variables})

    def rendered(self, scope: Mapping[str, Any]) -> str:
        """Raises ExpressionError."""
        query = "".join(
            piece if isinstance(piece, str) else promql.escaped(_written(piece.evaluate(scope)))
            for piece in self.pieces
        )
        if len(query) > promql.LONGEST_QUERY:
            raise ExpressionError(f"the query is longer than {promql.LONGEST_QUERY} characters")
        return query


def _written(value: Any) -> str:
    # Not an empty text for None: it would match series without the label.
    return "None" if value is None else as_text(value)


def compiled(text: str, compile_template: Callable[[str], Template]) -> QuotedQuery | str:
    """Return an error as text. `compile_template` compiles ``{{ … }}`` and reports its errors."""
    pieces: list[Template] = []
    quotes, is_quoted = promql.QuoteScan(), False
    for place, piece in enumerate(_TEMPLATE.split(text)):
        if place % 2 == 0:
            if "{%" in piece or "{#" in piece:
                return "a query can contain only values such as {{ target.job }}"
            pieces.append(piece)
            is_quoted = quotes.read(piece)
        elif is_quoted:
            pieces.append(compile_template(piece))
        else:
            return f'{piece} must be inside double or single quotes, as in {{job_name="{piece}"}}'
    return QuotedQuery(tuple(pieces))
