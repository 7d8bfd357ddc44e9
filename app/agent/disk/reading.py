"""Reading the ``cleaning`` part of a policy: plain mappings and lists in, checked rules or all their faults out.

`read` is called by the loader of the policy, which knows the lines and adds them: a `Fault` says where it
is by keys and positions only. Nothing here looks at the disk: a root that is missing today may be mounted
tomorrow, so roots are opened, and refused, when a command comes (``roots``).
"""

from __future__ import annotations

import difflib
import posixpath
import pwd
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypeVar

from app.agent.disk import rules
from app.agent.disk.globs import Glob
from app.agent.disk.rules import Cleaning, Rule
from app.domain import duration, size
from app.errors import ConfigurationError

T = TypeVar("T")
Choice = TypeVar("Choice", bound=StrEnum)
Place = tuple[str | int, ...]

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


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong; ``place`` is the way to it from the ``cleaning`` mapping: ("rules", "tmp", "roots", 0)."""

    place: Place
    message: str

    def __str__(self) -> str:
        return (
            f"cleaning.{'.'.join(map(str, self.place))}: {self.message}" if self.place else f"cleaning: {self.message}"
        )


class CleaningInvalid(ConfigurationError):
    """The ``cleaning`` part of a policy cannot be used; ``faults`` are all that were found."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        super().__init__("; ".join(map(str, faults)))
        self.faults = faults


def read(section: object) -> Cleaning:
    """The cleaning part of a policy, as YAML or JSON gave it; ``None`` is an empty one. Raises CleaningInvalid."""
    form = _Form((), section if section is not None else {})
    form.known(("rules", "owners", "max_files", "max_bytes"))
    named: Mapping[Any, Any] = form.optional("rules", _mapping, {})
    cleaning = Cleaning(
        rules={name: _rule(form, name, raw) for name, raw in named.items()},
        owners=frozenset(form.each("owners", _owner)),
        max_files=form.optional("max_files", _whole(1, 10_000_000), rules.MAX_FILES),
        max_bytes=form.optional("max_bytes", size.parse, None),
    )
    if form.faults:
        raise CleaningInvalid(tuple(form.faults))
    return cleaning


def _rule(parent: _Form, name: object, raw: object) -> Rule:
    """The rule; what is wrong with it is added to the parent's faults, and it is not used then."""
    before = len(parent.faults)
    form = _Form(("rules", str(name)), raw, parent.faults)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        form.fault((), "a rule's name has letters, digits, and '-', '_', '.' between them; at most 128; quote a number")
    form.known(_KEYS)
    rule = Rule(
        name=str(name),
        roots=form.each("roots", _root, required=True),
        globs=form.each("globs", _glob, required=True),
        min_age=form.required("min_age", _age, timedelta(0)),
        exclude=form.each("exclude", _glob),
        kind=form.optional("kind", _one_of(rules.Kind), rules.Kind.FILES),
        do=form.optional("do", _one_of(rules.Deed), rules.Deed.DELETE),
        age_by=form.optional("age_by", _one_of(rules.AgeBy), rules.AgeBy.USED),
        keep_newest=form.optional("keep_newest", _whole(0, rules.MOST_KEPT), 0),
        min_size=form.optional("min_size", size.parse, None),
        max_size=form.optional("max_size", size.parse, None),
        when_free_below=form.optional("when_free_below", _percent, None),
        max_files=form.optional("max_files", _whole(1, 10_000_000), None),
        max_bytes=form.optional("max_bytes", size.parse, None),
    )
    if len(form.faults) == before:
        _check_together(form, rule)
    return rule


def _check_together(form: _Form, rule: Rule) -> None:
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


class _Form:
    """One mapping of the document: takes fields out of it and gathers what is wrong."""

    def __init__(self, place: Place, raw: object, faults: list[Fault] | None = None) -> None:
        self.place = place
        self.faults: list[Fault] = [] if faults is None else faults
        self._is_usable = isinstance(raw, Mapping)
        self._raw: Mapping[Any, Any] = raw if isinstance(raw, Mapping) else {}
        if not self._is_usable:
            self.fault((), f"must be a mapping (name: value), not {_shown(raw)}")

    def fault(self, place: Place, message: str) -> None:
        self.faults.append(Fault((*self.place, *place), message))

    def known(self, keys: tuple[str, ...]) -> None:
        for key in self._raw:
            if key not in keys:
                near = difflib.get_close_matches(str(key), keys, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(keys)}"
                self.fault((str(key),), f"is not known here; {hint}")

    def required(self, key: str, parse: Callable[[Any], T], otherwise: T) -> T:
        if key not in self._raw and self._is_usable:
            self.fault((), f"{key} is missing")
        return self.optional(key, parse, otherwise)

    def optional(self, key: str, parse: Callable[[Any], T], otherwise: T) -> T:
        if key not in self._raw:
            return otherwise
        try:
            return parse(self._raw[key])
        except ValueError as error:
            self.fault((key,), str(error))
            return otherwise

    def each(self, key: str, parse: Callable[[Any], T], *, required: bool = False) -> tuple[T, ...]:
        """The values of a list; one value alone is a list of one."""
        raw = self._raw.get(key)
        values = raw if isinstance(raw, list | tuple) else [raw] if raw is not None else []
        if required and not values and self._is_usable:
            self.fault((key,) if key in self._raw else (), f"{key} is missing" if raw is None else "must not be empty")
        parsed = []
        for at, value in enumerate(values):
            try:
                parsed.append(parse(value))
            except ValueError as error:
                self.fault((key, at) if isinstance(raw, list | tuple) else (key,), str(error))
        return tuple(parsed)


def _shown(raw: object) -> str:
    return "nothing" if raw is None else repr(raw)[:80]


def _mapping(raw: object) -> Mapping[Any, Any]:
    if not isinstance(raw, Mapping):
        raise ValueError(f"must be a mapping (name: value), not {_shown(raw)}")
    return raw


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError(f"must be text, not {_shown(raw)}; put it in quotes")
    return raw


def _glob(raw: object) -> Glob:
    return Glob.read(_text(raw))


def _age(raw: object) -> timedelta:
    try:
        return duration.parse(_text(raw))
    except ValueError:
        raise ValueError(f"{raw!r} is not a duration; write it with its unit: 30m, 12h, 7d") from None


def _whole(least: int, most: int) -> Callable[[object], int]:
    def parse(raw: object) -> int:
        if not isinstance(raw, int) or isinstance(raw, bool) or not least <= raw <= most:
            raise ValueError(f"must be a whole number from {least} to {most}, not {_shown(raw)}")
        return raw

    return parse


def _percent(raw: object) -> float:
    if isinstance(raw, int | float) and not isinstance(raw, bool) and 0 < raw < 100:
        return float(raw)
    raise ValueError(f"must be a percentage above 0 and below 100, as a number, not {_shown(raw)}")


def _one_of(kinds: type[Choice]) -> Callable[[object], Choice]:
    def parse(raw: object) -> Choice:
        try:
            return kinds(_text(raw))
        except ValueError:
            raise ValueError(f"must be {' or '.join(kinds)}, not {_shown(raw)}") from None

    return parse


def _owner(raw: object) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool) and 0 <= raw < 2**32:
        return raw
    try:
        return pwd.getpwnam(_text(raw)).pw_uid
    except KeyError:
        raise ValueError(f"there is no user {raw!r} on this node; name one, or write the numeric id") from None


def _root(raw: object) -> str:
    path = _text(raw)
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
