"""Reading the ``cleaning`` part of a policy: plain mappings and lists in, checked rules or all their faults out.

`read` is called by the loader of the policy, which adds the lines to the faults. Nothing here looks at the
disk: a root that is missing today may be mounted tomorrow, so roots are opened, and refused, when a command
comes (``roots``).
"""

from __future__ import annotations

import posixpath
import pwd
import re
from collections.abc import Mapping
from dataclasses import fields
from datetime import timedelta
from typing import Any

from trainmedic_server.agent import mapping_reader
from trainmedic_server.agent.disk import rules
from trainmedic_server.agent.disk.globs import Glob
from trainmedic_server.agent.disk.rules import Cleaning, Rule
from trainmedic_server.agent.mapping_reader import FieldFault, MappingReader
from trainmedic_server.domain import duration, size
from trainmedic_server.errors import ConfigurationError

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,126}[A-Za-z0-9])?")
_KEYS = tuple(one.name for one in fields(Rule) if one.name != "name")
_SYSTEM = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr")
"""Neither they nor anything in them can be a root. The exceptions are memory-backed and meant for data."""
_EXCEPTIONS = ("/dev/shm", "/run/user")  # noqa: S108
_TOO_HIGH = ("/", "/home", "/mnt", "/opt", "/root", "/srv", "/var", "/var/lib", "/var/spool")
"""Cannot be roots themselves, what is in them can."""
_OTHERS = {
    "/var/lib/containerd": "the container runtime",
    "/var/lib/containers": "the container runtime",
    "/var/lib/docker": "the container runtime",
    "/var/lib/kubelet": "the kubelet",
}


class CleaningInvalid(ConfigurationError):
    """The ``cleaning`` part of a policy cannot be used; ``faults`` are all that were found."""

    def __init__(self, faults: tuple[FieldFault, ...]) -> None:
        super().__init__("; ".join(map(str, faults)))
        self.faults = faults


def read(section: object) -> Cleaning:
    """The cleaning part of a policy, as YAML or JSON gave it; ``None`` is an empty one. Raises CleaningInvalid."""
    form = MappingReader(("cleaning",), section if section is not None else {})
    form.known(("rules", "owners", "max_files", "max_bytes"))
    named: Mapping[Any, Any] = form.optional("rules", mapping_reader.mapping, {})
    cleaning = Cleaning(
        rules={name: _rule(form, name, raw) for name, raw in named.items()},
        owners=frozenset(form.each("owners", _owner)),
        max_files=form.optional("max_files", mapping_reader.whole(1, 10_000_000), rules.MAX_FILES),
        max_bytes=form.optional("max_bytes", size.parse, None),
    )
    if form.faults:
        raise CleaningInvalid(tuple(form.faults))
    return cleaning


def _rule(parent: MappingReader, name: object, raw: object) -> Rule:
    """The rule; what is wrong with it is added to the parent's faults, and it is not used then."""
    before = len(parent.faults)
    form = MappingReader(("cleaning", "rules", str(name)), raw, parent.faults)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        form.fault((), "a rule's name has letters, digits, and '-', '_', '.' between them; at most 128; quote a number")
    form.known(_KEYS)
    rule = Rule(
        name=str(name),
        roots=form.each("roots", _root, required=True),
        globs=form.each("globs", _glob, required=True),
        min_age=form.required("min_age", mapping_reader.age, timedelta(0)),
        exclude=form.each("exclude", _glob),
        kind=form.optional("kind", mapping_reader.one_of(rules.Kind), rules.Kind.FILES),
        do=form.optional("do", mapping_reader.one_of(rules.Deed), rules.Deed.DELETE),
        age_by=form.optional("age_by", mapping_reader.one_of(rules.AgeBy), rules.AgeBy.USED),
        keep_newest=form.optional("keep_newest", mapping_reader.whole(0, rules.MOST_KEPT), 0),
        min_size=form.optional("min_size", size.parse, None),
        max_size=form.optional("max_size", size.parse, None),
        when_free_below=form.optional("when_free_below", mapping_reader.percent, None),
        max_files=form.optional("max_files", mapping_reader.whole(1, 10_000_000), None),
        max_bytes=form.optional("max_bytes", size.parse, None),
    )
    if len(form.faults) == before:
        _check_together(form, rule)
    return rule


def _check_together(form: MappingReader, rule: Rule) -> None:
    """What no field can say alone."""
    if rule.do is rules.Deed.DELETE and rule.min_age < rules.YOUNGEST:
        least = duration.write(rules.YOUNGEST)
        form.fault(
            ("min_age",),
            f"must be at least {least}: what is deleted must be out of use. To empty a log that is "
            "being written, say do: truncate, which may have 0s",
        )
    if rule.kind is rules.Kind.CHECKPOINTS and rule.do is rules.Deed.TRUNCATE:
        form.fault(("do",), "a checkpoint cannot be truncated, only deleted whole")
    if rule.min_size is not None and rule.max_size is not None and rule.min_size > rule.max_size:
        form.fault(("max_size",), "is below min_size, so that nothing is ever matched")
    for at, root in enumerate(rule.roots):
        for other in rule.roots[:at]:
            if root == other or root.startswith(f"{other}/") or other.startswith(f"{root}/"):
                form.fault(("roots", at), f"{root} and {other} lie in each other; name the outer one alone")


def _glob(raw: object) -> Glob:
    return Glob.read(mapping_reader.text(raw))


def _owner(raw: object) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool) and 0 <= raw < 2**32:
        return raw
    try:
        return pwd.getpwnam(mapping_reader.text(raw)).pw_uid
    except KeyError:
        raise ValueError(f"there is no user {raw!r} on this node; name one, or write the numeric id") from None


def _root(raw: object) -> str:
    path = mapping_reader.text(raw)
    if not path.startswith("/") or posixpath.normpath(path) != path or "\0" in path or path.startswith("//"):
        raise ValueError(f"{path!r} must be an absolute path without '.', '..', double or closing '/'")
    if path in _TOO_HIGH:
        raise ValueError(f"{path} cannot be a root: name the directory in it that is to be cleaned")
    if not _in_one_of(path, _EXCEPTIONS) and _in_one_of(path, _SYSTEM):
        raise ValueError(f"{path} cannot be a root: it belongs to the system")
    for other, whose in _OTHERS.items():
        if _in_one_of(path, (other,)):
            raise ValueError(f"{path} cannot be a root: it belongs to {whose}, which cleans it itself")
    return path


def _in_one_of(path: str, directories: tuple[str, ...]) -> bool:
    return any(path == one or path.startswith(f"{one}/") for one in directories)
