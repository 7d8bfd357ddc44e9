"""Compiler of alert maps. Errors have line, column and the nearest valid names."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from trainmedic_core import model_errors, yaml_text
from trainmedic_core.allowance import Allowance, TooLarge
from trainmedic_core.expressions import evaluation, template_syntax
from trainmedic_core.expressions.evaluation import Expression, TextTemplate
from trainmedic_core.expressions.template_syntax import Malformed, SyntaxTree
from trainmedic_core.fields import Identifier
from trainmedic_core.problems import DocumentPath, FileProblem, did_you_mean
from trainmedic_core.yaml_text import YamlDocument
from trainmedic_server.catalog import matchers, overlaps, scope_check
from trainmedic_server.catalog.alert_map import Accept, CompiledFile, EventEntry, LabelValue, Rename
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook, by_alertname
from trainmedic_server.catalog.scope_check import VisibleNames
from trainmedic_server.domain.alert import SHIPPED_RULE_LABEL
from trainmedic_server.domain.beginnings import EVENT_LABEL
from trainmedic_server.domain.own_source import SOURCE
from trainmedic_server.domain.proof import XID_LABELS, AlertProof
from trainmedic_server.ports.actions import Actions

_LABELS, _BODY = ("labels",), ("body",)  # names in templates of alerts and of events
MOST_MATCHERS = 50  # of an entry
MOST_NAMES = 10_000  # renamed alertnames of a file
_LONGEST_NAME = 500  # characters
_NOT_ALPHANUMERIC = re.compile(r"[^a-z0-9]")

_Text = Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME)]
_Matchers = Annotated[tuple[str, ...], Field(max_length=MOST_MATCHERS)]


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class _RenameForm(_Form):
    alert: _Text | tuple[_Text, ...]
    matchers: _Matchers = ()
    name: _Text | None = Field(None, alias="as")
    labels: dict[_Text, str] = {}
    drop: tuple[_Text, ...] = ()

    @property
    def alertnames(self) -> tuple[str, ...]:
        return (self.alert,) if isinstance(self.alert, str) else self.alert


class _EventForm(_Form):
    event: Identifier
    when: str | None = None
    labels: dict[_Text, str] = {}
    key: _Text | None = None
    alerts: _Text | None = None


class AlertMapForm(_Form):
    accept: _Matchers = ()
    rename: tuple[_RenameForm, ...] = ()
    events: Annotated[tuple[_EventForm, ...], Field(max_length=1000)] = ()


def compile_text(text: str, source: str) -> CompiledFile | list[FileProblem]:
    documents, problems = yaml_text.read(text, source)
    if problems:
        return problems
    if not documents:
        return [FileProblem(source, None, None, "the file is empty; an alert map has accept, rename or events")]
    if len(documents) > 1:
        return [documents[1].problem((), "a file has one alert map; put what follows '---' into the first document")]
    return _Compilation(documents[0]).run()


@dataclass
class _Compilation:
    document: YamlDocument
    allowance: Allowance = field(default_factory=Allowance)
    problems: list[FileProblem] = field(default_factory=list)

    def run(self) -> CompiledFile | list[FileProblem]:
        form = model_errors.validate(AlertMapForm, self.document)
        if isinstance(form, list):
            return sorted(set(form)) or [self.document.problem((), "is not an alert map")]
        if not form.accept and not form.rename and not form.events:
            self._problem((), "an alert map has accept, rename or events; this one has none of them")
        if "accept" in self.document.value and not form.accept:
            self._problem(("accept",), "accept: is empty; leave it out to accept every alert")
        names = sum(len(entry.alertnames) for entry in form.rename)
        if names > MOST_NAMES:
            self._problem(("rename",), f"rename: a file has at most {MOST_NAMES} alert names")
            return self.problems
        accept = [Accept(self.document.source, each) for each in self._matchers(form.accept, ("accept",))]
        renames = [self._rename(entry, ("rename", place)) for place, entry in enumerate(form.rename)]
        events = [self._event(entry, ("events", place)) for place, entry in enumerate(form.events)]
        return sorted(set(self.problems)) or CompiledFile(tuple(accept), tuple(renames), tuple(events))

    def _rename(self, entry: _RenameForm, path: DocumentPath) -> Rename:
        if not entry.alertnames:
            self._problem((*path, "alert"), "alert: names no alert")
        if entry.name is None and not entry.labels and not entry.drop:
            self._problem(path, "changes nothing; give as, labels or drop")
        for label in entry.drop:
            if _holds_xid(label):
                self._problem(
                    (*path, "drop"), f"drop: {label!r} holds an XID; playbooks judge by it, and a map keeps it"
                )
        if "alertname" in entry.drop:
            self._problem((*path, "drop"), "drop: an alert keeps its alertname; write the new one as 'as'")
        if "\0" in (entry.name or ""):
            self._problem((*path, "as"), "as: has a NUL character, which PostgreSQL cannot store")
        return Rename(
            source=self.document.source,
            line=self.document.marks[path].line,
            column=self.document.marks[path].column,
            alertnames=tuple(dict.fromkeys(entry.alertnames)),
            name=entry.name,
            matchers=tuple(self._matchers(entry.matchers, (*path, "matchers"))),
            labels=self._labels(entry.labels, path, _LABELS),
            drop=frozenset(entry.drop),
        )

    def _event(self, entry: _EventForm, path: DocumentPath) -> EventEntry:
        if entry.alerts is not None and (entry.labels or entry.key is not None):
            self._problem((*path, "alerts"), "alerts: the alerts have their own labels; leave out labels and key")
        if entry.alerts is not None and not evaluation.is_template(entry.alerts):
            cure = "{{ body.alerts }}"
            self._problem((*path, "alerts"), f"alerts: must be a template for a list, such as {cure!r}")
        if EVENT_LABEL in entry.labels:
            self._problem((*path, "labels", EVENT_LABEL), "labels: 'event' is the event's name", at_key=True)
        when = None
        if entry.when is not None:
            when = self._compiled(entry.when, (*path, "when"), "when", _BODY, template_syntax.parse_expression)
        return EventEntry(
            source=self.document.source,
            line=self.document.marks[path].line,
            column=self.document.marks[path].column,
            event=entry.event,
            when=when if isinstance(when, Expression) else None,
            labels=self._labels(entry.labels, path, _BODY),
            key=None if entry.key is None else self._value(entry.key, (*path, "key"), "key", _BODY),
            alerts=None if entry.alerts is None else self._value(entry.alerts, (*path, "alerts"), "alerts", _BODY),
        )

    def _labels(
        self, written: Mapping[str, str], path: DocumentPath, names: tuple[str, ...]
    ) -> tuple[tuple[str, LabelValue], ...]:
        for label in written:
            if reason := _why_forbidden(label):
                self._problem((*path, "labels", label), f"labels: {label!r} {reason}", at_key=True)
        return tuple(
            (label, self._value(text, (*path, "labels", label), f"labels.{label}", names))
            for label, text in written.items()
        )

    def _value(self, text: str, path: DocumentPath, name: str, names: tuple[str, ...]) -> LabelValue:
        return self._compiled(text, path, name, names) or "" if evaluation.is_template(text) else text

    def _matchers(self, written: Sequence[str], path: DocumentPath) -> Iterator[matchers.Matcher]:
        for place, text in enumerate(written):
            try:
                parsed = matchers.parse(text)
            except ValueError as error:
                self._problem((*path, place), f"{path[-1]}[{place}]: {error}")
                continue
            for wrong in filter(None, map(matchers.pattern_error, parsed)):
                self._problem((*path, place), f"{path[-1]}[{place}]: {wrong}")
            yield from parsed

    def _compiled(
        self,
        text: str,
        path: DocumentPath,
        name: str,
        names: tuple[str, ...],
        parse: Callable[[str], SyntaxTree] = template_syntax.parse_template,
    ) -> Expression | TextTemplate | None:
        """Return None after reporting wrong syntax."""
        try:
            tree = parse(text)
            self.allowance.spend_on_template(len(tree.every))
            wrong = scope_check.check(tree, VisibleNames(names))
            made = evaluation.compile_parsed(tree, ".".join(map(str, path)))
        except (Malformed, TooLarge) as error:
            self._problem(path, f"{name}: {error}")
            return None
        for each in wrong:
            self._problem(path, f"{name}: {each}")
        return made

    def _problem(self, path: DocumentPath, message: str, *, at_key: bool = False) -> None:
        self.problems.append(self.document.problem(path, message, at_key=at_key))


def _why_forbidden(label: str) -> str:
    """Return why a map cannot set the label, also in another spelling; empty if it can."""
    normal = _NOT_ALPHANUMERIC.sub("", unicodedata.normalize("NFKC", label).casefold())
    if normal == _NOT_ALPHANUMERIC.sub("", SHIPPED_RULE_LABEL):
        return "is the proof of a shipped rule, which playbooks that can do harm require; a map cannot set it"
    if _holds_xid(label):
        return "holds an XID, which is proof that hardware is broken; a map cannot set it"
    if normal == SOURCE:
        return "is the label by which Trainmedic recognises its own alerts; a map cannot set it"
    if normal == "alertname":
        return "is not set as a label; write the new name as 'as'"
    return ""


def _holds_xid(label: str) -> bool:
    """Return whether harmful playbooks read an XID from this label."""
    normal = unicodedata.normalize("NFKC", label).casefold().strip().removeprefix("exported_")
    return normal.replace("-", "_") in XID_LABELS


def warnings(
    files: Iterable[CompiledFile], playbooks: Sequence[YamlPlaybook] | None = None, actions: Actions | None = None
) -> Iterator[FileProblem]:
    """Yield likely mistakes. `playbooks` adds names that start none, `actions` constant labels by which a playbook
    acts.
    """
    files = tuple(files)
    if playbooks is not None:
        yield from _event_warnings([entry for file in files for entry in file.events], playbooks)
    renames = [rename for file in files for rename in file.renames]
    sources: dict[str, Rename] = {}
    for rename in renames:
        for name in rename.alertnames:
            sources.setdefault(name, rename)
    reacting = by_alertname(playbooks or ())
    unconditional: dict[str, Rename] = {}
    for rename in renames:
        for message in _rename_warnings(rename, unconditional, sources):
            yield FileProblem(rename.source, rename.line, rename.column, f"warning: {message}")
        if playbooks is not None and rename.name is not None:
            for message in _use_warnings(rename, rename.name, reacting, actions):
                yield FileProblem(rename.source, rename.line, rename.column, f"warning: {message}")


def _event_warnings(entries: Sequence[EventEntry], playbooks: Sequence[YamlPlaybook]) -> Iterator[FileProblem]:
    awaited = {playbook.definition.on.event: playbook for playbook in playbooks if playbook.definition.on.event}
    for entry in entries:
        if entry.alerts is None and entry.event not in awaited:
            hint = did_you_mean(entry.event, sorted(awaited))
            message = f"warning: no playbook begins with the event {entry.event!r}{hint}"
            yield FileProblem(entry.source, entry.line, entry.column, message)
    mapped = sorted({entry.event for entry in entries if entry.alerts is None})
    for event, playbook in awaited.items() if mapped else ():
        if event not in mapped:
            message = f"warning: on.event: no alert map here has labels for {event!r}{did_you_mean(event, mapped)}"
            yield FileProblem(playbook.source, playbook.line, 1, message)


def _rename_warnings(rename: Rename, unconditional: dict[str, Rename], sources: dict[str, Rename]) -> Iterator[str]:
    for name in rename.alertnames:
        if (earlier := unconditional.get(name)) is not None:
            yield f"{name!r} never comes here: {earlier.source}:{earlier.line} takes it, and the first match wins"
        elif not rename.matchers:
            unconditional[name] = rename
    if rename.name in rename.alertnames and not rename.labels and not rename.drop:
        yield f"{rename.name!r} is renamed to itself"
    elif rename.name is not None and rename.name not in rename.alertnames and rename.name in sources:
        again = sources[rename.name]
        yield f"{rename.name!r} is not renamed again by {again.source}:{again.line}: an alert is renamed once"


def _use_warnings(
    rename: Rename, name: str, reacting: dict[str, list[YamlPlaybook]], actions: Actions | None
) -> Iterator[str]:
    playbooks = reacting.get(name, [])
    if not playbooks:
        yield f"no playbook reacts to {name!r}{did_you_mean(name, sorted(reacting))}"
    if playbooks and all(playbook.definition.on.proofs == (AlertProof.SHIPPED_RULE,) for playbook in playbooks):
        names = " and ".join(playbook.definition.name for playbook in playbooks)
        yield f"{name!r} starts nothing: {names} asks for the proof of a shipped rule, which a map cannot give"
    for playbook in playbooks:
        if actions is None or not overlaps.acts(playbook, actions):
            continue
        # A severity may be the same for all alerts of a name. Proof must come from the alert itself.
        matched = {matcher.label for matcher in playbook.matchers} - {"severity"}
        for label in sorted(rename.constants.keys() & matched):
            yield (
                f"labels.{label} is the same for every alert, and {playbook.definition.name} acts by it; "
                "take it from the alert with a template"
            )
