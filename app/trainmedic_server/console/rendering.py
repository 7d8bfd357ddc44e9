"""Templates. External text is escaped."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import ChainableUndefined, Environment, PackageLoader
from starlette.responses import Response

from trainmedic_core import words
from trainmedic_server import __version__
from trainmedic_server.console import formats, log_view, pictures
from trainmedic_server.console.assets import Assets
from trainmedic_server.http.base_path import BasePath
from trainmedic_server.ports.outside import Clock
from trainmedic_server.presentation import questions, run_story, runs, steps, targets, waiting
from trainmedic_server.presentation.targets import IndexOf

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
_COMPRESSED_FROM = 600  # bytes; smaller pages gain nothing
_FILTERS = (
    *("span", "pairs", "plain", "day", "segment"),
    *("shell", "as_json", "status_mark", "safe_link", "without", "coded"),
    *("local_field", "loss", "breaks", "moment"),
)
_LINK = re.compile(r"""(?<=[\s"'])(href|action|src|hx-get|hx-post)="(?=/)""")


class _LinksBelowBase(PackageLoader):
    """Puts the base path before links that begin with a slash."""

    def get_source(self, environment: Environment, template: str) -> tuple[str, str, Callable[[], bool] | None]:
        source, path, is_current = super().get_source(environment, template)
        return _LINK.sub(r'\1="{{ base }}', source), path, is_current


class Renderer:
    def __init__(
        self,
        clock: Clock,
        assets: Assets,
        base: BasePath = BasePath(),
        index_of: IndexOf = targets.unknown,
    ) -> None:
        self._clock = clock
        self._index_of = index_of
        self.base = base
        self._environment = Environment(
            loader=_LinksBelowBase("trainmedic_server.console", "templates"),
            autoescape=True,
            # An older API may lack members that a template shows if present.
            undefined=ChainableUndefined,
            finalize=formats.finish,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        for name in _FILTERS:
            self._environment.filters[name] = getattr(formats, name)
        self._environment.filters["when"] = lambda value: formats.when(value, clock.now())
        self._environment.filters["clock"] = lambda value: formats.clock_time(value, clock.now())
        self._environment.filters["precise"] = lambda value: formats.precise(value, clock.now())
        self._environment.filters["target"] = lambda value: formats.target(value, index_of)
        self._environment.filters["short_keys"] = lambda value: targets.shortened(str(value or ""), index_of)
        self._environment.filters["words"] = words.words
        self._environment.filters["tail"] = runs.short_id
        self._environment.filters["cut"] = lambda value, size: words.cut(str(value), size)
        self._environment.filters["sentence"] = lambda value: formats.sentence(value, clock.now(), base.link)
        self._environment.filters["linked_runs"] = lambda value: formats.linked_runs(value, base.link)
        self._environment.globals.update(
            asset=lambda name: base.over(assets.url(name)),
            base=base.link,
            version=__version__,
            questions=questions,
            titled=self.titled,
            run_story=lambda run: run_story.story(run, _either(index_of, run.get("alert_labels"))),
            undo_said=run_story.undo_text,
            step_said=lambda step, run: steps.sentence(
                step, run.get("target"), _either(index_of, run.get("alert_labels"))
            ),
            steps_said=lambda listed, key, labels: list(steps.sentences(listed or (), key, _either(index_of, labels))),
            run_words=runs,
            cap_may_stay=targets.cap_may_stay,
            waiting_for_person=waiting.waiting_for_person,
            count=words.count,
            spark=pictures.spark,
            gauge=pictures.gauge,
            log_around=log_view.around,
        )

    def titled(self, playbook: str, key: str | None) -> str:
        return runs.title(playbook, str(targets.words(key, self._index_of)) if key else None)

    def now(self) -> datetime:
        return self._clock.now()

    def text(self, template: str, **names: Any) -> str:
        return self._environment.get_template(template).render(now=self._clock.now(), **names)

    def part(self, template: str, macro: str, *arguments: Any) -> str:
        module = self._environment.get_template(template).module
        return str(getattr(module, macro)(*arguments))


def _either(index_of: IndexOf, labels: Mapping[str, str] | None) -> IndexOf:
    """Look in the agents' reports, then in an alert's labels."""
    in_labels = targets.index_in(labels or {})

    def found(uuid: str) -> int | None:
        index = index_of(uuid)
        return in_labels(uuid) if index is None else index

    return found


def page(text: str, status: int = 200, *, accepts_gzip: bool = False, headers: Mapping[str, str] = {}) -> Response:
    content = text.encode("utf-8", "replace")
    more = {"Cache-Control": "no-store", "Vary": "Accept, Accept-Encoding, Cookie", **SECURITY_HEADERS, **headers}
    if accepts_gzip and len(content) > _COMPRESSED_FROM:
        content = gzip.compress(content, 5)
        more["Content-Encoding"] = "gzip"
    return Response(content, status, more, media_type="text/html")
