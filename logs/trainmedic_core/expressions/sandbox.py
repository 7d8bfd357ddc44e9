"""Jinja2 environment of expressions and templates: sandboxed, strict, and limited in work.

Operations that can cost more than one step report to the `work_meter` first, because a C call cannot be interrupted.
Compiling evaluates nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote

import jinja2
from jinja2 import sandbox
from jinja2.runtime import Context, LoopContext

from trainmedic_core import duration
from trainmedic_core.expressions import work_meter
from trainmedic_core.problems import did_you_mean, shown

_LARGEST_EXPONENT = 64
_LARGEST_BASE = 1e6
_LONGEST_REPETITION = 100_000  # characters or members
_MOST_DIGITS = 30  # largest precision of `round`
_NUMBER = re.compile(r"^\s*[+-]?(\d{1,30}(\.\d{0,30})?|\.\d{1,30})([eE][+-]?\d{1,3})?\s*$", re.ASCII)
_STEPS_PER_MEMBER = 3  # of a list that a filter or test reads

WEIGH, LOOP, CONCATENATE = "-weigh", "-loop", "-concatenate"
"""Filters that `template_syntax` inserts; no template can write such names."""

# fmt: off
_FILTERS = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "groupby",
    "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject",
    "rejectattr", "replace", "reverse", "round", "select", "selectattr", "slice", "sort",
    "string", "sum", "title", "trim", "truncate", "unique", "upper",
)
# fmt: on
# They pass members on without reading them.
_LAZY_FILTERS = frozenset(
    {"count", "d", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr", "reverse"}
    | {"select", "selectattr", "slice"}
)
_MAPPING_METHODS = frozenset({"get", "items", "keys", "values"})
# fmt: off
# Readable members; only `join` and `replace` can produce more than their input.
_MEMBERS: Mapping[type, frozenset[str]] = {
    str: frozenset({
        "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal",
        "isdigit", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "join", "lower", "lstrip",
        "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip",
        "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper",
    }),
    list: frozenset({"count", "index"}),
    tuple: frozenset({"count", "index"}),
    int: frozenset({"bit_length", "is_integer"}),
    float: frozenset({"is_integer"}),
    LoopContext: frozenset({
        "changed", "cycle", "depth", "depth0", "first", "index", "index0", "last", "length", "nextitem", "previtem",
        "revindex", "revindex0",
    }),
}
# fmt: on

# Marks of the functions to which Jinja passes its context, as first argument.
_PASS_EVALUATION_CONTEXT = vars(jinja2.pass_eval_context(lambda: None))["jinja_pass_arg"]
_PASS_ENVIRONMENT = vars(jinja2.pass_environment(lambda: None))["jinja_pass_arg"]
_PASS_CONTEXT = vars(jinja2.pass_context(lambda: None))["jinja_pass_arg"]


class PlainFunction:
    """Function of plain values that costs about one step."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


class _MissingMember(jinja2.StrictUndefined):
    """Missing member; suggestions are computed when shown."""

    @property
    def _undefined_message(self) -> str:
        if isinstance(self._undefined_obj, Mapping):
            name = str(self._undefined_name)
            return f"there is no {shown(name)} here{did_you_mean(name, map(str, self._undefined_obj))}"
        return str(super()._undefined_message)


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    """Environment in which members of mappings precede methods."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict or isinstance(obj, Mapping):
            return self._member(obj, attribute)
        if isinstance(obj, jinja2.Undefined):
            return obj  # members of undefined stay undefined until `default` or a use that raises
        if attribute in _readable(obj):
            return getattr(obj, attribute)
        if isinstance(obj, tuple) and attribute in getattr(obj, "_fields", ()):
            return getattr(obj, attribute)  # a group made by `groupby`
        if hasattr(type(obj), attribute):
            return self.unsafe_undefined(obj, attribute)
        return self.undefined(obj=obj, name=attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, jinja2.Undefined):
            return obj
        if isinstance(obj, Mapping) and isinstance(argument, str):
            return self._member(obj, argument)
        work_meter.current().weigh(argument)  # hashing a tuple reads all its contents
        try:
            return obj[argument]
        except (TypeError, LookupError):
            return self.getattr(obj, argument) if isinstance(argument, str) else self.undefined(obj=obj, name=argument)

    def _member(self, obj: Mapping[str, Any], name: str) -> Any:
        if name in obj:
            return obj[name]
        if name in _MAPPING_METHODS:
            return getattr(obj, name)
        return self.undefined(obj=obj, name=name)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call an allowed method. This is a second check: `getattr` returns no other."""
        if isinstance(obj, jinja2.Undefined):
            obj()  # raises, with the reason
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        is_of_mapping = isinstance(owner, Mapping) and name in _MAPPING_METHODS
        if not (is_of_mapping or type(obj) is PlainFunction or name in _readable(owner)):
            raise jinja2.TemplateRuntimeError("only methods of values can be called")
        meter = work_meter.current()
        if not (is_of_mapping or owner is None):
            meter.weigh(owner)
        meter.weigh(args)
        if kwargs:
            meter.weigh(kwargs)
        if isinstance(owner, str):
            _count_method(meter, owner, name, args)
        made = obj(*args, **kwargs)
        meter.weigh_outside(made)
        return made

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(right) > _LARGEST_EXPONENT or abs(left) > _LARGEST_BASE):
            raise jinja2.TemplateRuntimeError("the power is too large")
        if operator == "%" and not isinstance(left, (int, float, jinja2.Undefined)):
            raise jinja2.TemplateRuntimeError("text is not formatted with %; use ~ to join")
        if operator == "*":
            _check_product(left, right)
        made = super().call_binop(context, operator, left, right)
        work_meter.current().weigh_outside(made)
        return made


def _readable(value: Any) -> frozenset[str]:
    return next((names for kind, names in _MEMBERS.items() if isinstance(value, kind)), frozenset())


def _check_product(left: Any, right: Any) -> None:
    match left, right:
        case int(), int():
            if left.bit_length() + right.bit_length() > work_meter.LARGEST_NUMBER_BITS:
                raise jinja2.TemplateRuntimeError("the product is too large")
        case (str() | list() | tuple(), int()) | (int(), str() | list() | tuple()):
            sequence, count = (right, left) if isinstance(left, int) else (left, right)
            if len(sequence) * count > _LONGEST_REPETITION:
                raise jinja2.TemplateRuntimeError("the repeated text or list is too long")


def _count_method(meter: work_meter.WorkMeter, text: str, method: str, args: Sequence[Any]) -> None:
    if not args:
        return
    if method == "join":
        meter.spend_on_text(len(text) * len(args[0]))
    elif isinstance(args[0], str):
        meter.spend_on_search(text, args[0])
    if method == "replace" and len(args) > 1:
        meter.spend_on_text(text.count(args[0]) * len(args[1]))


def written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)  # as YAML does


# --- filters and tests ------------------------------------------------------------------------------


def _metered(function: Callable[..., Any], *, is_lazy: bool = False) -> Callable[..., Any]:
    """Return a filter or test that counts input and output."""
    # It takes the context, so that Jinja never calls it at compile time.
    passed = getattr(function, "jinja_pass_arg", None)

    @jinja2.pass_context
    def call(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = work_meter.current()
        if is_lazy:
            meter.weigh_outside(value)
            meter.weigh((args, kwargs))
        else:
            meter.weigh((value, args, kwargs))
            if isinstance(value, (list, tuple, dict)):
                meter.spend(_STEPS_PER_MEMBER * len(value))
        first = {
            _PASS_CONTEXT: context,
            _PASS_EVALUATION_CONTEXT: context.eval_ctx,
            _PASS_ENVIRONMENT: context.environment,
        }
        made = function(*([first[passed]] if passed is not None else []), value, *args, **kwargs)
        if isinstance(made, Iterator):
            return meter.listed(made, _STEPS_PER_MEMBER)
        meter.weigh_outside(made)
        return made

    return call


def _numeric(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Allow numbers only, because Python's operators also accept text."""

    def call(value: Any, *args: Any, **kwargs: Any) -> Any:
        for operand in (value, *args, *kwargs.values()):
            if not isinstance(operand, (int, float, jinja2.Undefined)):
                raise jinja2.TemplateRuntimeError(f"{what} takes numbers")
        return function(value, *args, **kwargs)

    return call


def _round(value: Any, precision: int = 0, method: str = "common") -> float:
    if not isinstance(value, (int, float, jinja2.Undefined)):
        raise jinja2.TemplateRuntimeError("round takes a number")
    if abs(precision) > _MOST_DIGITS:
        raise jinja2.TemplateRuntimeError(f"round takes a precision of at most {_MOST_DIGITS} digits")
    rounded: float = jinja2.filters.do_round(value, precision, method)  # type: ignore[arg-type]
    return rounded


@jinja2.pass_environment
def _sum(environment: jinja2.Environment, value: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    if not isinstance(start, (int, float)):
        raise jinja2.TemplateRuntimeError("sum starts with a number")
    return jinja2.filters.sync_do_sum(environment, value, attribute, start)


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    separator = str(d)
    work_meter.current().spend_on_text(len(value) * len(separator))
    members = value if attribute is None else map(jinja2.filters.make_attrgetter(environment, attribute), value)
    return separator.join(map(written, members))


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, before, after = written(value), str(old), str(new)
    _count_method(work_meter.current(), text, "replace", (before, after))
    return text.replace(before, after, -1 if count is None else count)


def _trim(value: Any, chars: str | None = None) -> str:
    text = written(value)
    work_meter.current().spend_on_search(text, chars or "")
    return text.strip(chars)


def _contains(value: Any, values: Any) -> bool:
    if isinstance(value, str) and isinstance(values, str):
        work_meter.current().spend_on_search(values, value)
    return value in values


def _urlencode(value: Any) -> str:
    if isinstance(value, jinja2.Undefined):
        str(value)  # raises, as for every use of an undefined value
    return quote(written(value), safe="")


def _tojson(value: Any) -> str:
    if isinstance(value, jinja2.Undefined):
        str(value)
    return json.dumps(value, ensure_ascii=False, default=str)


# Convert text such as 5m to seconds, and seconds (also as text) to such text.
def _duration(value: Any) -> str | float:
    if isinstance(value, str) and not _NUMBER.match(value):
        try:
            return duration.parse(value).total_seconds()
        except ValueError as error:
            raise jinja2.TemplateRuntimeError(str(error)) from None
    return duration.write(value if isinstance(value, timedelta) else timedelta(seconds=float(value)))


def _number(value: Any) -> int | float:
    """Return a text's number, never 0 for other texts."""
    if isinstance(value, jinja2.Undefined):
        str(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _NUMBER.match(value):
        return int(value) if value.strip().lstrip("+-").isdigit() else float(value)
    raise jinja2.TemplateRuntimeError(f"{shown(value)} is not a number")


def _time(value: Any) -> float:
    """Return Unix seconds."""
    if isinstance(value, jinja2.Undefined):
        str(value)
    try:
        read = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        read = None
    if read is None or read.tzinfo is None:
        raise jinja2.TemplateRuntimeError(f"{shown(value)} is not a time with its zone, such as 2026-01-31T12:00:00Z")
    return read.timestamp()


def _weigh(value: Any) -> Any:
    work_meter.current().weigh(value)
    return value


def _loop(values: Any, steps: int) -> list[Any]:
    return work_meter.current().listed(values, steps)


def _concatenate(values: list[Any]) -> str:
    work_meter.current().weigh(values)
    return "".join(map(written, values))


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> str:
    work_meter.current().weigh(value)
    return written(value)


def _environment() -> _Environment:
    environment = _Environment(
        undefined=_MissingMember, keep_trailing_newline=True, autoescape=False, optimized=False, finalize=_finalize
    )
    environment.globals.clear()
    filters: dict[str, Callable[..., Any]] = {name: environment.filters[name] for name in _FILTERS}
    filters.update(join=_join, replace=_replace, round=_round, string=written, sum=_sum, trim=_trim)
    filters.update(urlencode=_urlencode, tojson=_tojson, duration=_duration, number=_number, time=_time)
    environment.filters = {name: _metered(each, is_lazy=name in _LAZY_FILTERS) for name, each in filters.items()}
    environment.filters.update({WEIGH: _weigh, LOOP: _loop, CONCATENATE: _concatenate})
    tests: dict[str, Any] = dict(environment.tests.items())
    tests.update({name: _numeric(tests[name], name) for name in ("odd", "even", "divisibleby")}, **{"in": _contains})
    environment.tests = {name: _metered(each) for name, each in tests.items()}
    environment.policies["truncate.leeway"] = 0
    return environment


ENVIRONMENT = _environment()
FILTERS = tuple(name for name in ENVIRONMENT.filters if not name.startswith("-"))
TESTS = tuple(ENVIRONMENT.tests)
