from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from trainmedic_core.problems import did_you_mean

if TYPE_CHECKING:
    _Choice = click.Choice[str]
else:
    _Choice = click.Choice  # not generic before click 8.4


class NearestChoice(_Choice):
    """Names the choice that is most similar to an invalid value."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            hint = did_you_mean(str(value), self.choices)
            raise click.BadParameter(error.message.removesuffix(".") + (hint or "."), ctx, param) from None
