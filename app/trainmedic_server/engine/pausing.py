"""Pauses: which one holds a run, and how they begin and end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import TypeVar

from msgspec.structs import replace

from trainmedic_core import duration
from trainmedic_core.target import Target
from trainmedic_server import errors
from trainmedic_server.domain import event_kinds as kinds
from trainmedic_server.domain import places
from trainmedic_server.domain.event_codec import recorded
from trainmedic_server.domain.pause import EVERYTHING, OperatorPause, PauseOrder, Scope
from trainmedic_server.domain.run import Controls, Event
from trainmedic_server.domain.topology import Topology

_P = TypeVar("_P", bound=kinds.OfPause)

MOST = 200  # Most pauses. Each decision checks all.


def holding(
    controls: Controls,
    playbook: str,
    targets: Collection[Target],
    labels: Mapping[str, str],
    now: datetime,
    topology: Topology,
    nodes: Collection[str] = (),
) -> OperatorPause | None:
    """Return the active pause that holds a run, of several the one that ends last, or None.

    `nodes` are touched in addition to its targets'.
    """
    if not controls.pauses:
        return None
    candidates = [pause for pause in controls.pauses if not pause.observe and pause.is_in_force(now)]
    if not candidates:
        return None
    touched = {*nodes, *(node for target in targets for node in places.nodes_of(target, topology))}
    if any(pause.scope.node is not None for pause in candidates):  # a scope may use any source's name of a node
        touched |= {topology.listed_as(node, source) for node in touched for source in topology.known.sources}
    jobs = {job for target in targets for job in places.jobs_of(target, topology)}
    held = [pause for pause in candidates if pause.scope.covers(playbook, touched, jobs, labels)]
    return max(held, key=lambda pause: (pause.until(now) is None, pause.until(now) or now), default=None)


def observing(controls: Controls, playbook: str, now: datetime) -> OperatorPause | None:
    """Return the operator's restriction of the playbook to observing."""
    # Such a pause has a playbook as its scope.
    pauses = (pause for pause in controls.pauses if pause.observe and pause.is_in_force(now))
    return next((pause for pause in pauses if pause.scope.covers(playbook, (), (), {})), None)


def begin(
    controls: Controls, order: PauseOrder, actor: str, now: datetime, new_id: Callable[[], str]
) -> tuple[Controls, OperatorPause, list[Event]]:
    """Return the switches, the pause and its event. A pause from now on replaces an active equal one.

    Raises Conflict for too many.
    """
    starts_at = max(order.starts_at or now, now)
    ends_at = starts_at + order.length if order.length else None
    replaced = [
        pause
        for pause in controls.pauses
        if starts_at == now
        and (pause.scope, pause.observe, pause.every) == (order.scope, order.observe, order.every)
        and pause.is_in_force(now)
    ]
    kept = [pause for pause in controls.pauses if pause not in replaced]
    if len(kept) >= MOST:
        raise errors.Conflict(f"there are {len(kept)} pauses already; end some of them")
    pause_id = replaced[0].id if replaced else _fresh_id(controls, new_id)
    pause = OperatorPause(
        pause_id,
        actor,
        now,
        starts_at,
        ends_at,
        every=order.every,
        scope=order.scope,
        note=order.note,
        observe=order.observe,
    )
    content = _pause_event(kinds.ModeChanged if order.observe else kinds.PauseOrdered, pause)
    return as_of(replace(controls, pauses=(*kept, pause)), now), pause, [recorded(content, now, actor=actor)]


def end(
    controls: Controls, actor: str, now: datetime, wanted: Callable[[OperatorPause], bool] | None = None
) -> tuple[Controls, list[Event]]:
    """Return the switches without the `wanted` pauses, or without all that hold runs now.

    Without `wanted`, recurring ones return with their next window.
    """
    kept: list[OperatorPause] = []
    events: list[Event] = []
    for pause in controls.pauses:
        is_ended = wanted(pause) if wanted is not None else not pause.observe and pause.is_in_force(now)
        if not is_ended:
            kept.append(pause)
            continue
        recurring = pause.without_this_window(now) if wanted is None else None
        if recurring is not None:
            kept.append(recurring)
        if pause.observe:
            events.append(
                recorded(replace(_pause_event(kinds.ModeChanged, pause), mode=kinds.AS_WRITTEN), now, actor=actor)
            )
        else:
            events.append(recorded(_pause_event(kinds.Resumed, pause), now, actor=actor))
    return as_of(replace(controls, pauses=tuple(kept)), now), events


def settle(controls: Controls, since: datetime | None, now: datetime) -> tuple[Controls, list[Event]]:
    """Return the switches without ended pauses, and events since the last check (`since`, None for the first).

    A server paused by an earlier release, without scopes, stays paused.
    """
    if controls.paused and not any(pause.scope.is_everything and not pause.observe for pause in controls.pauses):
        since_then = controls.paused_at or now
        inherited = OperatorPause("earlier0", controls.paused_by or "anonymous", since_then, since_then)
        controls = replace(controls, pauses=(*controls.pauses, inherited))
    events: list[Event] = []
    for pause in controls.pauses:
        was, is_now = since is not None and pause.is_in_force(since), pause.is_in_force(now)
        window = pause.window(now)
        # `pause_ordered` covers a pause that begins with its order.
        if is_now and not was and window is not None and window[0] != pause.at:
            events.append(recorded(_pause_event(kinds.PauseBegan, pause), now))
        elif was and not is_now:
            events.append(recorded(_pause_event(kinds.PauseEnded, pause), now))
    left = tuple(pause for pause in controls.pauses if not pause.is_over(now))
    return as_of(replace(controls, pauses=left), now), events


def in_force(controls: Controls, now: datetime) -> frozenset[str]:  # their IDs
    return frozenset(pause.id for pause in controls.pauses if pause.is_in_force(now))


def as_of(controls: Controls, now: datetime) -> Controls:
    """Set the members that show a pause of everything."""
    total = next(
        (
            pause
            for pause in controls.pauses
            if pause.scope.is_everything and not pause.observe and pause.is_in_force(now)
        ),
        None,
    )
    by, at = (total.by, max(total.at, total.starts_at)) if total else (None, None)
    if (controls.paused, controls.paused_by, controls.paused_at) == (total is not None, by, at):
        return controls
    return replace(controls, paused=total is not None, paused_by=by, paused_at=at)


def chosen(
    pause_id: str | None, scope: Scope, pauses: Sequence[OperatorPause]
) -> Callable[[OperatorPause], bool] | None:
    """Return which pauses an operator ends: by ID, by scope, or None for all that hold now. Raises NotFound."""
    if pause_id is None and scope == EVERYTHING:
        return None
    matching = [
        pause.id for pause in pauses if (pause.id == pause_id if pause_id is not None else pause.scope == scope)
    ]
    if not matching:
        raise errors.NotFound(f"there is no pause {pause_id}" if pause_id else f"there is no pause of {scope}")
    return lambda pause: pause.id in matching


def _fresh_id(controls: Controls, new_id: Callable[[], str]) -> str:
    taken = {pause.id for pause in controls.pauses}
    while (pause_id := new_id()[-8:]) in taken:
        pass
    return pause_id


def _pause_event(kind: type[_P], pause: OperatorPause) -> _P:
    scope = pause.scope
    return kind(
        pause.id,
        str(scope),
        until=pause.ends_at,
        starts_at=pause.starts_at,
        every=duration.write(pause.every) if pause.every else None,
        playbook=scope.playbook or None,
        node=scope.node or None,
        job=scope.job or None,
        labels=scope.labels,
        note=pause.note,
        observe=pause.observe,
    )
