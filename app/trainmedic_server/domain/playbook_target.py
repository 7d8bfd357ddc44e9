"""Models of a playbook's ``target``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from trainmedic_core.target import MEMBER_KINDS, PARTS, TargetKind
from trainmedic_server.domain import host_lists, selectors
from trainmedic_server.domain.question_form import PlaybookModel

ON_NODE = "on_node"
_LAST_PARTS = {kind.parts[-1]: kind for kind in TargetKind if kind.parts}
JOBS = "jobs"


def _checked_on_node(value: Any) -> Any:
    if value != ON_NODE:
        raise ValueError(f"next to a node or gpu, write jobs: {ON_NODE}, or select jobs alone")
    return value


class TargetParts(PlaybookModel):
    """Parts of the target as templates, for labels that are not built in."""

    node: str | None = None
    gpu: str | None = None
    job: str | None = None
    """Name, or ``node:…``, ``gpu:…`` or ``pod:…`` that the job uses (``job_lookup``)."""
    jobs: Annotated[Literal["on_node"], BeforeValidator(_checked_on_node)] | None = None

    @model_validator(mode="after")
    def _names_one_thing(self) -> TargetParts:
        if self.jobs is not None and self.node is None:
            raise ValueError("on_node needs a node: {node: '{{ labels.node }}', jobs: on_node}")
        if self.job is not None and (self.node is not None or self.gpu is not None):
            raise ValueError("name a job, or a node, or a gpu with its node; not a job and a node")
        if self.gpu is not None and self.node is None:
            raise ValueError("a gpu needs its node too")
        if self.job is None and self.node is None:
            raise ValueError("name at least a node or a job")
        return self

    @property
    def kind(self) -> TargetKind:
        kind = kind_of_parts([part for part in PARTS if getattr(self, part) is not None])
        assert kind is not None
        return kind


Attribute = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,252}$")]
_Values = Annotated[
    Annotated[str, Field(min_length=1), Tag("str")]
    | Annotated[tuple[str, ...], Field(min_length=1, max_length=1000), Tag("tuple[str]")],
    Discriminator(lambda value: "tuple[str]" if isinstance(value, (list, tuple)) else "str"),
]


def _checked_selector(value: Any) -> Any:
    """Refuse an empty selector: it must not select all."""
    if value == ON_NODE:
        raise ValueError("on_node is for jobs, next to a node: {node: '{{ labels.node }}', jobs: on_node}")
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        raise ValueError(f"names are written as a condition: {{name: [{', '.join(value[:3])}]}}")
    if isinstance(value, str) and value != "all":
        raise ValueError(f"write {{name: {value!r}}} for names, {{pool: h100}} for an attribute, or all")
    if not value:
        raise ValueError("name conditions, such as {pool: h100}, or write all")
    return value


Selected = Annotated[
    Annotated[Literal["all"], Tag("literal")] | Annotated[dict[Attribute, _Values], Field(max_length=20), Tag("dict")],
    Discriminator(lambda value: "dict" if isinstance(value, dict) else "literal"),
    BeforeValidator(_checked_selector),
]
"""``all``, or the value of each topology attribute, or a list of possible ones."""

SelectedJobs = Annotated[
    Annotated[Literal["all", "on_node"], Tag("literal")]
    | Annotated[dict[Attribute, _Values], Field(max_length=20), Tag("dict")],
    Discriminator(lambda value: "dict" if isinstance(value, dict) else "literal"),
    BeforeValidator(lambda value: value if value == ON_NODE else _checked_selector(value)),
]


def check_host_lists(written: str | Sequence[str]) -> None:
    """Raises ValueError. Templates are not checked."""
    for value in (written,) if isinstance(written, str) else written:
        if "{" not in value:
            try:
                host_lists.expand(value)
            except host_lists.UnreadableHostList as error:
                raise ValueError(f"the host list {value!r} {error}") from None


class GroupTarget(PlaybookModel):
    """A group of targets, resolved once when the run starts. Each member gets a run of its own."""

    gpus: Selected = "all"
    nodes: Selected = "all"
    """By attributes; ``name`` is a node name or host list."""
    jobs: SelectedJobs = "all"
    """By attributes of their nodes, ``name`` (of the job) or ``on_nodes`` (a host list). ``on_node``, next to ``gpus``
    or ``nodes``: the jobs on each member's node.
    """

    @model_validator(mode="after")
    def _is_one_group(self) -> GroupTarget:
        if self.model_fields_set == {JOBS} and self.jobs == ON_NODE:
            raise ValueError("on_node needs a node: {node: '{{ labels.node }}', jobs: on_node}")
        if len(self._selected_kinds) != 1:
            raise ValueError(
                "name one of gpus, nodes and jobs: a playbook works on one group; jobs on its nodes are jobs: on_node"
            )
        written = self.selected if isinstance(self.selected, dict) else {}
        if self.plural != JOBS and selectors.ON_NODES in written:
            raise ValueError("on_nodes selects jobs; write {name: 'n[1-4]'} for nodes")
        check_host_lists(written.get(selectors.ON_NODES if self.plural == JOBS else selectors.NAME, ()))
        return self

    @property
    def _selected_kinds(self) -> list[str]:
        return [name for name in self.model_fields_set if getattr(self, name) != ON_NODE]

    @property
    def plural(self) -> str:
        return self._selected_kinds[0]

    @property
    def kind(self) -> TargetKind:
        return MEMBER_KINDS[self.plural]

    @property
    def selected(self) -> Selected:
        written: Selected = getattr(self, self.plural)
        return written


def kind_of_parts(written: Collection[str]) -> TargetKind | None:
    return next((kind for part, kind in _LAST_PARTS.items() if part in written), None)


def is_group(written: Any) -> bool:
    if not isinstance(written, dict):
        return False
    names_one = kind_of_parts(written) is not None
    return bool(written.keys() & (MEMBER_KINDS.keys() - {JOBS})) or (JOBS in written and not names_one)


def kind_of_target(value: Any) -> str:
    """Return the tag of the model for a written target."""
    if isinstance(value, GroupTarget) or is_group(value):
        return "GroupTarget"
    return "TargetParts" if isinstance(value, (dict, TargetParts)) else "enum[TargetKind]"


def _checked_kind(value: Any) -> Any:
    if value == TargetKind.GROUP:
        raise ValueError("write a group as its selector, such as target: {nodes: {pool: h100}}")
    if value not in _KINDS:
        raise PydanticCustomError("enum", "must be one of {expected}", {"expected": ", ".join(map(repr, _KINDS))})
    return value


_KINDS = tuple(str(kind) for kind in TargetKind if kind is not TargetKind.GROUP)
OneTargetKind = Annotated[
    TargetKind, BeforeValidator(_checked_kind), WithJsonSchema({"type": "string", "enum": list(_KINDS)})
]
