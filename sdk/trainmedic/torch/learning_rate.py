"""Scaling the learning rate, so that it stays scaled over schedulers, rollbacks and restarts.

A scheduler sets the rate at each step. PyTorch's schedulers compute it from values that they keep, in themselves or
in the optimizer's groups. These values are scaled too, so that a checkpoint is consistent and stays scaled wherever it
is loaded. Any other scheduler works with the unscaled rates: its class is replaced by a subclass, whose ``step`` takes
the scale off before and puts it on after.

A loop that sets the rate by itself asks for the factor (`LearningRate.scaled`, or ``Run.lr_scale``). If it does not,
its rate is never multiplied nor divided, because it has no factor in it.

Not here: remembering the scale over a restart (``recovery.changes``), and the answer (``rate_commands``). Who calls it:
the integrations, on the training thread.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Hashable, Iterable, Iterator, Mapping, NamedTuple, Sequence, cast

import torch
from torch.optim import lr_scheduler

from trainmedic.errors import Rejected
from trainmedic.torch.rate_schedule import RateSchedule, computes_as_pytorch

MARK = "trainmedic_lr_scale"
"""The key of the scale in the optimizer's groups, so that every saved state holds its own scale."""

# What PyTorch's schedulers keep and compute from. In the optimizer's groups it is what OneCycleLR and SWALR put there.
_IN_GROUPS = ("initial_lr", "max_lr", "min_lr", "swa_lr")
_IN_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "default_min_lr", "eta_min", "_last_lr")
_STEPS = ("step", "step_update")

Number = Any  # a float, or a tensor of one element
Name = Hashable


class _RateSlot:
    """An entry of a mapping or list that holds a rate. ``name`` is unique among the slots."""

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


class _Watched(NamedTuple):
    """A change of the scale whose effect is looked for."""

    expected: list[float]
    """The rates that were written."""
    ratio: float
    """By how much they were multiplied."""


class LearningRate:
    """The learning rate of one or more optimizers, with the scheduler or schedulers that move it.

    ``scale`` is by how much it is multiplied now; 1.0 leaves everything as it is, to the bit.
    """

    def __init__(self, optimizer: Any, scheduler: Any = None) -> None:
        self.optimizers = list(_several(optimizer))
        schedulers = [_unwrapped(member) for member in _several(scheduler)]
        self._schedulers = list(_flat(schedulers))
        self.schedule = RateSchedule(self.optimizers[0], schedulers)
        self.scale = self._marked()  # the optimizer may have been scaled before, and loaded or handed on since
        # By slot what was written there, and the unscaled value of it: multiplying and dividing rounds, and a scale
        # that is taken back is to leave no trace.
        self._written: dict[Name, tuple[float, float]] = {}
        self.is_asked_for = False
        """Whether the loop has asked for the factor, and so multiplies what it sets by itself."""
        self.left_alone = False
        """Whether the last change has found a rate that the loop had set without the factor, and left it."""
        self._returned = False  # a scaled rate, to the loop
        self._watched = _Watched([], 1.0)

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimizers move."""
        return [parameter for group in self._groups() for parameter in group["params"]]

    @property
    def values(self) -> list[float]:
        """The present rate of each group."""
        return [float(group["lr"]) for group in self._groups()]

    @property
    def value(self) -> float:
        """The present rate of the first group."""
        return float(self.present)

    @property
    def present(self) -> Number:
        """The present rate of the first group as the optimizer holds it: a number, or a tensor that is not read."""
        return self.optimizers[0].param_groups[0]["lr"]

    @property
    def expected(self) -> Number | None:
        """The first group's rate by the schedule, scaled; None if no schedule prescribes it."""
        return self.schedule.rate

    def asked_scale(self) -> float:
        """Return the factor to a loop that multiplies by it."""
        self.is_asked_for = True
        return self.scale

    def scaled(self, value: Number) -> Number:
        """Return the rate that a loop computed, times the factor; without a change that value itself."""
        self.is_asked_for = self._returned = True
        return value if self.scale == 1.0 else value * self.scale

    def watch(self, before: float) -> None:
        """Expect the present rates to be used. ``before`` is the scale before the last change."""
        self._watched, self._returned = _Watched(self.values, self.scale / before), False

    def overwritten(self) -> tuple[float, float] | None:
        """Return the first rate that is neither what `watch` saw, nor set by a known scheduler or with the factor,
        and what was expected. None where all rates hold."""
        if self._returned or (self._schedulers and self.scale == 1.0) or self.left_alone:
            return None
        for number, (found, expected) in enumerate(zip(self.values, self._watched.expected, strict=False)):
            if math.isclose(found, expected, rel_tol=1e-6) or self._is_scheduled(number, found):
                continue
            if not (self.is_asked_for and self._is_nearer(found, expected)):
                return found, expected
        return None

    def give_up(self, scale: float) -> None:
        """Take ``scale`` for the present one, because the loop sets rates by itself. Those that it has set stay.

        A rate that still has the factor in it loses it: of a group that the loop does not set, or of a scheduler that
        computes each rate from the one before, such as ``CosineAnnealingLR``.
        """
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
        """Return the rate of that group as if the change that is watched had not been made."""
        expected, ratio = self._watched
        if ratio == 1.0 or number >= len(expected) or not self._is_nearer(rate, expected[number]):
            return rate
        written, raw = self._written.get(("group", number, "lr"), (None, 0.0))
        if written == rate:
            return raw if scale == 1.0 else raw * scale  # dividing rounds
        return rate / ratio

    def _is_scheduled(self, number: int, rate: float) -> bool:
        """Whether the rate of that group is what a known scheduler has set last."""
        if not self._schedulers:
            return False
        if self._written.get(("group", number, "lr"), (None,))[0] == rate:
            return True
        last = [each for scheduler in self._schedulers for each in getattr(scheduler, "_last_lr", None) or ()]
        return any(math.isclose(float(each), rate, rel_tol=1e-6) for each in last)

    def _is_nearer(self, found: float, expected: float) -> bool:
        """Whether a rate that a loop computed anew is nearer to the scaled one than to the one of before."""
        before = expected / self._watched.ratio
        if min(found, expected, before) <= 0.0:
            return True
        return abs(math.log(found / expected)) <= abs(math.log(found / before))

    def multiply(self, factor: float) -> None:
        """Multiply by ``factor`` more. Raises Rejected where the result is no usable number."""
        self.set_scale(self.scale * factor)

    def set_scale(self, scale: float) -> None:
        """Multiply the unscaled rate by ``scale`` from now on. Raises Rejected, and changes nothing then."""
        if scale == self.scale:
            return
        _check(scale, self.values)
        self._follow_others()
        self._rescale(self.scale, scale)

    def loaded(self, held: float | None = None, scale: float | None = None) -> None:
        """The state of optimizer and scheduler was replaced by one that is scaled by ``held``: scale it as before.

        Without ``held`` the state itself is asked; one that does not say counts as not scaled. ``scale`` sets
        another one at the same time.
        """
        if held is None:
            held = self._marked()
        if scale is None:
            scale = self.scale
        self._written.clear()
        if held != scale:
            self._rescale(held, scale)
        self.scale = scale
        self._mark()
        if self.scale != 1.0:
            self._follow_others()
            for number, value in enumerate(self.values):
                self._written.setdefault(("group", number, "lr"), (value, value / self.scale))

    # --- where rates are kept ---------------------------------------------------------------------------

    def _rescale(self, old: float, new: float) -> None:
        self.left_alone = False
        for slot in self._slots():
            held = slot.read()
            written, raw = self._written.get(slot.name, (None, 0.0))
            if old != 1.0 and written not in (None, held) and not self._schedulers and not self.is_asked_for:
                self.left_alone = True  # the loop has set it since, without the factor
                continue
            if held != written:  # the schedule has moved it since
                raw = held if old == 1.0 else held / old
            scaled = raw if new == 1.0 else raw * new
            if scaled != held:
                slot.write(scaled)
            self._written[slot.name] = (slot.read(), raw)
        self.scale = new
        self._mark()

    def _mark(self) -> None:
        for group in self._groups():
            if self.scale != 1.0:
                group[MARK] = self.scale
            else:
                group.pop(MARK, None)

    def _marked(self) -> float:
        return marked_scale(self.optimizers)

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self.optimizers:
            yield from optimizer.param_groups

    def _slots(self) -> Iterator[_RateSlot]:
        pytorchs = [scheduler for scheduler in self._schedulers if computes_as_pytorch(scheduler)]
        for number, group in enumerate(self._groups()):
            for key in ("lr", *(_IN_GROUPS if pytorchs else ())):
                if key in group:
                    yield _RateSlot(("group", number, key), group, key)
        for number, scheduler in enumerate(pytorchs):
            held = vars(scheduler)
            for name in _IN_SCHEDULERS:
                value = held.get(name)
                if isinstance(value, list):
                    for index in range(len(value)):
                        yield _RateSlot((number, name, index), value, index)
                elif value is not None:
                    yield _RateSlot((number, name), held, name)

    # --- schedulers that are not PyTorch's --------------------------------------------------------------

    def _follow_others(self) -> None:
        for scheduler in self._schedulers:
            if not computes_as_pytorch(scheduler):
                _follow(scheduler, self)

    def unscaled(self, step: Callable[[], Any]) -> Any:
        """Call `step` while the rates are as if nothing had been scaled."""
        scale = self.scale
        if scale == 1.0:
            return step()
        self._rescale(scale, 1.0)
        try:
            return step()
        finally:
            self._rescale(1.0, scale)


def _follow(scheduler: Any, rate: LearningRate) -> None:
    """Let a scheduler step with unscaled rates. Raises Rejected where its class cannot be replaced."""
    kind = type(scheduler)
    if not hasattr(kind, "_trainmedic_rate"):
        steps = {name: _following(getattr(kind, name)) for name in _STEPS if callable(getattr(kind, name, None))}
        members = {**steps, "__module__": kind.__module__, "__doc__": kind.__doc__}
        try:
            scheduler.__class__ = kind = type(kind.__name__, (kind,), members)
        except TypeError as error:
            raise Rejected(f"the scheduler {kind.__name__} sets the rate by itself and cannot be followed") from error
    kind._trainmedic_rate = rate


def _following(step: Callable[..., Any]) -> Callable[..., Any]:
    def stepped(scheduler: Any, *arguments: Any, **options: Any) -> Any:
        return type(scheduler)._trainmedic_rate.unscaled(lambda: step(scheduler, *arguments, **options))

    return stepped


def _flat(schedulers: Iterable[Any]) -> Iterator[Any]:
    """The schedulers, with those that ChainedScheduler and SequentialLR hold."""
    for scheduler in schedulers:
        yield scheduler
        yield from _flat(getattr(scheduler, "_schedulers", ()))


def _several(members: Any) -> Sequence[Any]:
    """The objects of an argument that may be none, one, or a list or dict of several."""
    if members is None:
        return ()
    if isinstance(members, Mapping):
        return list(members.values())
    return cast(Sequence[Any], members) if isinstance(members, (list, tuple)) else (members,)


def _unwrapped(scheduler: Any) -> Any:
    """The scheduler in a wrapper such as Accelerate's."""
    while not isinstance(scheduler, lr_scheduler.LRScheduler) and hasattr(scheduler, "scheduler"):
        scheduler = scheduler.scheduler
    return scheduler


def marked_scale(optimizers: Iterable[Any]) -> float:
    """Return the scale that the groups of these optimizers hold."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return next((float(group[MARK]) for group in groups if MARK in group), 1.0)


def _check(scale: float, values: Sequence[float]) -> None:
    if not 0.0 < scale < float("inf"):
        raise Rejected(f"the learning rate cannot be multiplied by {scale}")
    if any(not value * scale < float("inf") for value in values):
        raise Rejected(f"multiplied by {scale}, the learning rate {max(values)} is no number any more")


def rate_change(before: Sequence[float], after: Sequence[float], scale: float) -> Mapping[str, Any]:
    """The answer for a changed rate: the first group's rates, those of all groups if they differ, and the scale."""
    output: dict[str, Any] = {"before": before[0], "after": after[0], "scale": scale}
    if len(set(after)) > 1:
        output["groups"] = [{"before": old, "after": new} for old, new in zip(before, after, strict=True)]
    return output
