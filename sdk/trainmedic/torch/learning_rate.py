"""Multiplying the learning rate so that it stays multiplied: over schedulers, rollbacks and restarts.

A scheduler sets the rate anew at each step. Those of PyTorch do so from values that they keep, in themselves or
in the optimizer's groups; these are scaled along, so that what a checkpoint holds agrees with itself and goes on
scaled wherever it is loaded. Any other scheduler is let work with the unscaled rates: its class is replaced by
a subclass, whose ``step`` takes the scale off before and puts it on after.

Not here: remembering the scale over a restart (``changes``), and a rate that the training loop sets by hand; it
multiplies by `LearningRate.scale` itself. Who calls it: the integrations, on the training thread.
"""

from __future__ import annotations

from typing import Any, Callable, Hashable, Iterable, Iterator, Mapping, Sequence, cast

import torch
from torch.optim import lr_scheduler

from trainmedic.errors import Rejected
from trainmedic.torch.rate_schedule import RateSchedule, keeps_what_is_known

MARK = "trainmedic_lr_scale"
"""Key of the optimizer's groups by which a state that was saved by whomever says how it is scaled."""

# What PyTorch's schedulers keep and compute from. In the optimizer's groups: OneCycleLR's and SWALR's own.
_IN_GROUPS = ("initial_lr", "max_lr", "min_lr", "swa_lr")
_IN_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "default_min_lr", "eta_min", "_last_lr")
_STEPS = ("step", "step_update")

Number = Any  # a float, or a tensor of one element
Name = Hashable


class _Place:
    """Where a rate is kept: an entry of a mapping or list, or an attribute."""

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


class LearningRate:
    """The learning rate of one or more optimizers, with the scheduler or schedulers that move it.

    ``scale`` is by how much it is multiplied now; 1.0 leaves everything as it is, to the bit.
    """

    def __init__(self, optimizer: Any, scheduler: Any = None) -> None:
        self.optimizers = list(_several(optimizer))
        given = [_unwrapped(one) for one in _several(scheduler)]
        self._schedulers = list(_flat(given))
        self._schedule = RateSchedule(self.optimizers[0], given)
        self.scale = self._marked()  # the optimizer may have been scaled before, and loaded or handed on since
        # What was written where, and the unscaled value of it: so that a scale that is taken back leaves no trace.
        self._written: dict[Name, tuple[float, float]] = {}

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
        """The same as the optimizer holds it: a number, or a tensor that is not waited for."""
        return self.optimizers[0].param_groups[0]["lr"]

    @property
    def expected(self) -> Number | None:
        """What the schedule says that the first group's rate is, scaled; None where there is not one that says so."""
        return self._schedule.rate

    def multiply(self, factor: float) -> None:
        """By so much more. Raises Rejected where the result is no usable number."""
        self.set_scale(self.scale * factor)

    def set_scale(self, scale: float) -> None:
        """Multiplied by so much, from now on. Raises Rejected, and changes nothing then."""
        if scale == self.scale:
            return
        _check(scale, self.values)
        self._follow_unknown()
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
            self._follow_unknown()

    # --- the places -------------------------------------------------------------------------------------

    def _rescale(self, old: float, new: float) -> None:
        for place in self._places():
            held = place.read()
            wrote, raw = self._written.get(place.name, (None, 0.0))
            if held != wrote:
                raw = held if old == 1.0 else held / old
            scaled = raw if new == 1.0 else raw * new
            if scaled != held:
                place.write(scaled)
            self._written[place.name] = (place.read(), raw)
        self.scale = new
        self._mark()

    def _mark(self) -> None:
        for group in self._groups():
            if self.scale != 1.0:
                group[MARK] = self.scale
            else:
                group.pop(MARK, None)

    def _marked(self) -> float:
        return next((float(group[MARK]) for group in self._groups() if MARK in group), 1.0)

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self.optimizers:
            yield from optimizer.param_groups

    def _places(self) -> Iterator[_Place]:
        known = [one for one in self._schedulers if keeps_what_is_known(one)]
        for number, group in enumerate(self._groups()):
            for key in ("lr", *(_IN_GROUPS if known else ())):
                if key in group:
                    yield _Place(("group", number, key), group, key)
        for number, scheduler in enumerate(known):
            held = vars(scheduler)
            for name in _IN_SCHEDULERS:
                value = held.get(name)
                if isinstance(value, list):
                    for index in range(len(value)):
                        yield _Place((number, name, index), value, index)
                elif value is not None:
                    yield _Place((number, name), held, name)

    # --- schedulers that are not PyTorch's --------------------------------------------------------------

    def _follow_unknown(self) -> None:
        for scheduler in self._schedulers:
            if not keeps_what_is_known(scheduler):
                _follow(scheduler, self)

    def unscaled(self, step: Callable[[], Any]) -> Any:
        """Call `step` with the rates as they would be had nothing been scaled."""
        scale = self.scale
        if scale == 1.0:
            return step()
        self._rescale(scale, 1.0)
        try:
            return step()
        finally:
            self._rescale(1.0, scale)


def _follow(scheduler: Any, rate: LearningRate) -> None:
    """Let it step with unscaled rates. Raises Rejected where its class cannot be replaced."""
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
    """With those that ChainedScheduler and SequentialLR hold, each once."""
    for scheduler in schedulers:
        yield scheduler
        yield from _flat(getattr(scheduler, "_schedulers", ()))


def _several(given: Any) -> Sequence[Any]:
    if given is None:
        return ()
    if isinstance(given, Mapping):
        return list(given.values())
    return cast(Sequence[Any], given) if isinstance(given, (list, tuple)) else (given,)


def _unwrapped(scheduler: Any) -> Any:
    """The scheduler in a wrapper such as Accelerate's."""
    while not isinstance(scheduler, lr_scheduler.LRScheduler) and hasattr(scheduler, "scheduler"):
        scheduler = scheduler.scheduler
    return scheduler


def _check(scale: float, values: Sequence[float]) -> None:
    if not 0.0 < scale < float("inf"):
        raise Rejected(f"the learning rate cannot be multiplied by {scale}")
    if any(not value * scale < float("inf") for value in values):
        raise Rejected(f"multiplied by {scale}, the learning rate {max(values)} is no number any more")


def rate_change(before: Sequence[float], after: Sequence[float], scale: float) -> Mapping[str, Any]:
    """What an answer tells of a change: the rates of the first group, of all where they differ, and the scale."""
    told: dict[str, Any] = {"before": before[0], "after": after[0], "scale": scale}
    if len(set(after)) > 1:
        told["groups"] = [{"before": one, "after": other} for one, other in zip(before, after, strict=True)]
    return told
