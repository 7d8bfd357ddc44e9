"""Scaling of the learning rate, kept over schedulers, rollbacks and restarts.

A loop that sets the rate itself must ask for the factor (`LearningRate.scaled`, ``Run.lr_scale``).
"""

from __future__ import annotations

import copyreg
import math
from typing import AbstractSet, Any, Callable, Hashable, Iterable, Iterator, Mapping, NamedTuple, Sequence, cast

import torch
from torch.optim import lr_scheduler

from trainmedic.errors import Rejected
from trainmedic.torch.rate_schedule import RateSchedule, closed_form, computes_as_pytorch

_MOST_RETURNED = 64  # last rates returned to the loop that `overwritten` compares with

MARK = "trainmedic_lr_scale"  # key of the scale in the optimizer's groups

# Rates from which PyTorch's schedulers compute the next one: in the optimizer's groups (the last three of OneCycleLR
# and SWALR), and in attributes of schedulers.
_GROUP_KEYS = ("initial_lr", "max_lr", "min_lr", "swa_lr")
_SCHEDULER_ATTRIBUTES = ("base_lrs", "max_lrs", "min_lrs", "default_min_lr", "eta_min", "_last_lr")
_STEP_METHODS = ("step", "step_update")  # the latter of timm's schedulers

Number = Any  # float or one-element tensor
Name = Hashable


class _RateSlot:
    __slots__ = ("_container", "_key", "name")

    def __init__(self, name: Name, container: Any, key: Any) -> None:
        self.name = name
        self._container = container
        self._key = key

    def read(self) -> float:
        return float(self._container[self._key])

    def write(self, value: float) -> None:
        held = self._container[self._key]
        if isinstance(held, torch.Tensor):
            held.fill_(value)
        else:
            self._container[self._key] = value

    @property
    def address(self) -> int | None:
        held = self._container[self._key]
        return held.data_ptr() if isinstance(held, torch.Tensor) else None


class _LastChange(NamedTuple):
    expected: list[float]  # rates right after it, by group
    ratio: float  # new scale divided by the old one
    scheduled: list[float | None]  # `_scheduled` then, by group


class LearningRate:
    """Rates of all groups, times ``scale``; 1.0 changes nothing."""

    def __init__(self, optimizer: Any, scheduler: Any = None) -> None:
        self.optimizers = list(_as_sequence(optimizer))
        self._given = [_unwrapped(member) for member in _as_sequence(scheduler)]
        self._schedulers = list(_with_inner(self._given))
        self.schedule = RateSchedule(self.optimizers[0], self._given)
        self.scale = self._marked()  # not 1.0 if the script has loaded a scaled optimizer
        # {slot: (written value, unscaled value)}: undoing must be exact, but multiplication and division round.
        self._written: dict[Name, tuple[float, float]] = {}
        self._scheduled_then: dict[Name, float | None] = {}  # `_scheduled` when a group's rate was written
        self.is_asked_for = False  # True if the loop has asked for the factor
        self.left_alone = False  # True if the last change kept a rate that the loop had set
        self._returned: list[Number] = []  # scaled rates returned to the loop, since the last change was watched
        self._last_change = _LastChange([], 1.0, [])
        self._value: Number | None = None  # last one that the loop has had scaled; None after a load
        self._multiples: list[float] = []  # by group: its unscaled rate divided by `_value`, at the last `watch`

    @property
    def is_scheduled(self) -> bool:
        return bool(self._schedulers)

    def schedule_positions(self) -> list[Any]:
        return [each.last_epoch for each in self._schedulers if hasattr(each, "last_epoch")]

    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for group in self._groups() for parameter in group["params"]]

    @property
    def values(self) -> list[float]:
        return [float(group["lr"]) for group in self._groups()]

    @property
    def has_none(self) -> bool:
        return any(group["lr"] is None for group in self._groups())

    def why_unused(self) -> str:
        """Return why updates ignore the groups' rates, as in some Adafactors, or ""."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if group["lr"] is None or group.get("relative_step"):
                    return "the optimizer computes its rate itself (relative_step, or an lr of None)"
                if isinstance(optimizer, _LIMITING) and _is_limited(optimizer, group):
                    return "Adafactor limits its rate to 1/√steps, which is below its lr"
        return ""

    @property
    def value(self) -> float:
        return float(self.present)

    @property
    def present(self) -> Number:
        """First group's rate, perhaps a tensor on the device."""
        return self.optimizers[0].param_groups[0]["lr"]

    @property
    def expected(self) -> Number | None:
        """First group's scaled scheduled rate; None if unknown."""
        return self.schedule.read_rate()

    def asked_scale(self) -> float:
        """Return the factor to a loop that applies it."""
        self.is_asked_for = True
        return self.scale

    def scaled(self, value: Number) -> Number:
        """Return the rate times the factor; the same object if unscaled."""
        self.is_asked_for = True
        scaled = value if self.scale == 1.0 else value * self.scale
        self._value, self._returned = value, [*self._returned[1 - _MOST_RETURNED :], scaled]
        return scaled

    def watch(self, before: float) -> None:
        """Begin to detect overwritten rates, after a change from the scale ``before``."""
        self._last_change = _LastChange(self.values, self.scale / before, self._scheduled())
        value = 0.0 if self._value is None else float(self._value)
        if value > 0.0:
            self._multiples = [rate / self.scale / value for rate in self.values]
        self._returned = []

    def overwritten(self) -> tuple[float, float] | None:
        """Return the first rate set without the factor since `watch`, and the expected one, or None."""
        # Without a factor, the rates of a known scheduler are right.
        if (self._schedulers and self.scale == 1.0) or self.left_alone:
            return None
        returned = list(map(float, self._returned))
        scheduled = self._scheduled()
        for number, (found, expected) in enumerate(zip(self.values, self._last_change.expected, strict=False)):
            if math.isclose(found, expected, rel_tol=1e-6):
                continue
            drift = _drift(self._last_change.scheduled[number], scheduled[number])
            if self._is_scheduled(number, found) and (drift is None or self._is_nearer(found / drift, expected)):
                continue
            multiplied = self._multiplied(number, returned)
            if _is_among(found, (*returned, *multiplied)):
                continue
            ratio = self._last_change.ratio
            is_without = _is_among(found, [each / ratio for each in multiplied])
            if is_without or not (self.is_asked_for and self._is_nearer(found, expected)):
                return found, found * ratio if is_without else expected
        return None

    def _multiplied(self, number: int, returned: Sequence[float]) -> list[float]:
        # Rates of the group for each returned one; empty without a value before the change.
        return [each * times for times in self._multiples[number : number + 1] for each in returned]

    def set_since(self) -> tuple[float, float, bool] | None:
        """Return a rate that the loop has set over its scaled one, that one, and whether the factor is lost."""
        # The reported expected rate shows what overwrites a schedule; a loop that asks for the factor applies it.
        if self.scale == 1.0 or self._schedulers or self.is_asked_for:
            return None
        found = None
        for number, rate in enumerate(self.values):
            written, raw = self._written.get(("group", number, "lr"), (rate, rate))
            if rate == written:
                continue
            # A fall may be the loop's own, of the scaled rate; so may a small rise.
            is_lost = 0.0 < written < min(rate, raw) and rate**2 > written * raw
            if found is None or is_lost:
                found = rate, written, is_lost
        return found

    def give_up(self, scale: float) -> None:
        """Set the former scale, but keep rates that the loop has set since."""
        present = [group["lr"] for group in self._groups()]
        rates = [self._without_change(number, float(rate), scale) for number, rate in enumerate(present)]
        self._rescale(self.scale, scale)
        for group, rate, value in zip(self._groups(), present, rates, strict=True):
            if isinstance(rate, torch.Tensor):
                rate.fill_(value)
            else:
                group["lr"] = value
        self._written.clear()

    def _without_change(self, number: int, rate: float, scale: float) -> float:
        expected, ratio, _ = self._last_change
        if ratio == 1.0 or number >= len(expected) or not self._is_nearer(rate, expected[number]):
            return rate
        written, raw = self._written.get(("group", number, "lr"), (None, 0.0))
        if written == rate:
            return raw if scale == 1.0 else raw * scale  # division rounds
        return rate / ratio

    def _is_scheduled(self, number: int, rate: float) -> bool:
        # Whether `_rescale` or a scheduler has set the rate.
        if not self._schedulers:
            return False
        if self._written.get(("group", number, "lr"), (None,))[0] == rate:
            return True
        last = [each for scheduler in self._schedulers for each in getattr(scheduler, "_last_lr", None) or ()]
        return _is_among(rate, map(float, last))

    def _is_nearer(self, found: float, expected: float) -> bool:
        """Return whether a rate still has the last change."""
        before = expected / self._last_change.ratio
        if min(found, expected, before) <= 0.0:
            return True
        return abs(math.log(found / expected)) <= abs(math.log(found / before))

    def multiply(self, factor: float) -> None:
        self.set_scale(self.scale * factor)

    def set_scale(self, scale: float) -> None:
        """Set the scale. Raises Rejected without changing anything."""
        if scale == self.scale:
            return
        _check(scale, self.values)
        self._unscale_other_schedulers()
        self._rescale(self.scale, scale)

    def loaded(self, held: float | None = None, scale: float | None = None) -> None:
        """Rescale loaded rates from the scale ``held`` (None: their groups') to ``scale`` (None: the present)."""
        if held is None:
            held = self._marked()
        if scale is None:
            scale = self.scale
        self._written.clear()
        self._value = None
        unscaled = self._unscaled_groups() if held == scale else set()
        if held != scale:
            self._rescale(held, scale)
        self.scale = scale
        self._mark(unscaled)
        if self.scale != 1.0:
            self._unscale_other_schedulers()
            scheduled = self._scheduled()
            for number, value in enumerate(self.values):
                name = ("group", number, "lr")
                self._written.setdefault(name, (value, value if name in unscaled else value / self.scale))
                self._scheduled_then[name] = scheduled[number]

    def _rescale(self, old: float, new: float) -> None:
        self.left_alone = False
        total, unscaled = old, self._unscaled_groups()
        scheduled: dict[Name, float | None] = {
            ("group", number, "lr"): each for number, each in enumerate(self._scheduled())
        }
        rescaled: dict[int | None, Name] = {}  # by address: PyTorch gives all groups the same tensor
        for slot in self._slots():
            if (shared := rescaled.get(slot.address)) is not None:
                self._written[slot.name] = self._written[shared]
                self._scheduled_then[slot.name] = scheduled.get(slot.name)
                continue
            old = 1.0 if slot.name in unscaled else total
            held = slot.read()
            written, raw = self._written.get(slot.name, (None, 0.0))
            if old != 1.0 and written not in (None, held) and self._is_set_by_loop(slot.name, held, scheduled):
                self.left_alone = True
                continue
            if held != written:  # moved by the schedule
                raw = held if old == 1.0 else held / old
            scaled = raw if new == 1.0 else raw * new
            if scaled != held:
                slot.write(scaled)
            self._written[slot.name] = (slot.read(), raw)
            self._scheduled_then[slot.name] = scheduled.get(slot.name)
            if (address := slot.address) is not None:
                rescaled[address] = slot.name
        self.scale = new
        self._mark()

    def _is_set_by_loop(self, name: Name, rate: float, scheduled: Mapping[Name, float | None]) -> bool:
        # Whether the loop has set a scaled rate without the factor.
        if self.is_asked_for or not self._schedulers:
            return not self.is_asked_for
        drift = _drift(self._scheduled_then.get(name), scheduled.get(name))
        written, raw = self._written[name]
        if drift is None or min(rate, written, raw) <= 0.0:
            return False
        moved = rate / drift
        return abs(math.log(moved / written)) > abs(math.log(moved / raw))

    def _scheduled(self) -> list[float | None]:
        # By group, without the scale, where a closed form has it.
        forms = [closed_form(group, self._given) for group in self._groups()]
        return [None if each is None else each / self.scale for each in forms]

    def _unscaled_groups(self) -> set[Name]:
        # Of groups that the loop has added since.
        groups = list(self._groups())
        added = [number for number, group in enumerate(groups) if MARK not in group]
        return {("group", number, "lr") for number in added} if len(added) < len(groups) else set()

    def _mark(self, unscaled: AbstractSet[Name] = frozenset()) -> None:
        for number, group in enumerate(self._groups()):
            if self.scale != 1.0 and ("group", number, "lr") not in unscaled:
                group[MARK] = self.scale
            else:
                group.pop(MARK, None)

    def _marked(self) -> float:
        return marked_scale(self.optimizers)

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self.optimizers:
            yield from optimizer.param_groups

    def _slots(self) -> Iterator[_RateSlot]:
        standard = [scheduler for scheduler in self._schedulers if computes_as_pytorch(scheduler)]
        for number, group in enumerate(self._groups()):
            for key in ("lr", *(_GROUP_KEYS if standard else ())):
                if key in group:
                    yield _RateSlot(("group", number, key), group, key)
        for number, scheduler in enumerate(standard):
            attributes = vars(scheduler)
            for name in _SCHEDULER_ATTRIBUTES:
                value = attributes.get(name)
                if isinstance(value, list):
                    for index in range(len(value)):
                        yield _RateSlot((number, name, index), value, index)
                elif value is not None:
                    yield _RateSlot((number, name), attributes, name)

    def _unscale_other_schedulers(self) -> None:
        """Let other schedulers step with unscaled rates. Raises Rejected."""
        for scheduler in self._schedulers:
            if not computes_as_pytorch(scheduler):
                _step_unscaled(scheduler, self)

    def unscaled(self, step: Callable[[], Any]) -> Any:
        # Such as a scheduler's step, or a framework's save or load; the scale returns after an error too.
        scale = self.scale
        if scale == 1.0:
            return step()
        self._rescale(scale, 1.0)
        try:
            return step()
        finally:
            self._rescale(1.0, scale)


def _step_unscaled(scheduler: Any, rate: LearningRate) -> None:
    """Replace the class by one whose steps see unscaled rates. Raises Rejected."""
    kind = type(scheduler)
    if not hasattr(kind, "_trainmedic_rate"):
        methods = {name: getattr(kind, name, None) for name in _STEP_METHODS}
        steps = {name: _unscaled(method) for name, method in methods.items() if callable(method)}
        members = {**steps, "__reduce_ex__": _reduced, "__module__": kind.__module__, "__doc__": kind.__doc__}
        try:
            scheduler.__class__ = kind = type(kind.__name__, (kind,), members)
        except TypeError as error:
            raise Rejected(f"the scheduler {kind.__name__} sets the rate by itself and cannot be followed") from error
    kind._trainmedic_rate = rate


def _unscaled(step: Callable[..., Any]) -> Callable[..., Any]:
    def stepped(scheduler: Any, *arguments: Any, **options: Any) -> Any:
        rate: LearningRate = type(scheduler)._trainmedic_rate
        return rate.unscaled(lambda: step(scheduler, *arguments, **options))

    return stepped


def _reduced(scheduler: Any, protocol: Any) -> Any:
    # Copies and pickles are of the original class: the subclass has no importable name.
    kind = scheduler.__class__
    scheduler.__class__ = kind.__base__
    try:
        make, *rest = scheduler.__reduce_ex__(protocol)
    finally:
        scheduler.__class__ = kind
    # Else pickle compares the classes.
    return (object.__new__ if make is copyreg.__newobj__ else make, *rest)  # type: ignore[attr-defined]


def _with_inner(schedulers: Iterable[Any]) -> Iterator[Any]:
    for scheduler in schedulers:
        yield scheduler
        yield from _with_inner(getattr(scheduler, "_schedulers", ()))


_LIMITING = getattr(torch.optim, "Adafactor", ())  # since PyTorch 2.5


def _is_limited(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    counts = [optimizer.state[each]["step"] for each in group["params"] if "step" in optimizer.state.get(each, ())]
    return bool(counts) and float(group["lr"]) > (float(counts[0]) + 1) ** -0.5


def _as_sequence(members: Any) -> Sequence[Any]:
    if members is None:
        return ()
    if isinstance(members, Mapping):
        return list(members.values())
    return cast(Sequence[Any], members) if isinstance(members, (list, tuple)) else (members,)


def _unwrapped(scheduler: Any) -> Any:
    while not isinstance(scheduler, lr_scheduler.LRScheduler) and hasattr(scheduler, "scheduler"):
        scheduler = scheduler.scheduler
    return scheduler


def marked_scale(optimizers: Iterable[Any]) -> float:
    """Return the groups' scale; 1.0 without a mark."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return next((float(group[MARK]) for group in groups if MARK in group), 1.0)


def _is_among(rate: float, rates: Iterable[float]) -> bool:
    return any(math.isclose(rate, each, rel_tol=1e-6) for each in rates)


def _drift(before: float | None, now: float | None) -> float | None:
    # Factor by which the schedule itself has changed the rate; None if unknown. `closed_form` never returns 0.
    return None if before is None or now is None else now / before


def _check(scale: float, values: Sequence[float]) -> None:
    if not 0.0 < scale < float("inf"):
        raise Rejected(f"the learning rate cannot be multiplied by {scale}")
    if any(not value * scale < float("inf") for value in values):
        raise Rejected(f"the learning rate {max(values)} times {scale} is not a finite number")


def rate_change(before: Sequence[float], after: Sequence[float], scale: float) -> Mapping[str, Any]:
    """Return the answer: the first group's change, all if they differ."""
    output: dict[str, Any] = {"before": before[0], "after": after[0], "scale": scale}
    if len(set(after)) > 1:
        output["groups"] = [{"before": old, "after": new} for old, new in zip(before, after, strict=True)]
    return output
