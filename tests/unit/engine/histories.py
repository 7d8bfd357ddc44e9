"""Random histories: playbooks, and what happens over time.

A history is plain data, drawn by Hypothesis, so that one that breaks a promise shrinks to a small example. ``lives``
plays it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from hypothesis import strategies as st

from trainmedic_server.domain.run import OrderKind

ALERTS = ("Hot", "Slow")
PLACES = (("n1", "0"), ("n1", "1"), ("n2", "0"))
GAPS = (0, 1, 1, 3, 10, 10, 45, 130, 400)
"""Seconds between one deed and the next: most come while what the last one began is still going on."""

ACTION_SECONDS = 20
"""The timeout of each action."""

Fate = Literal["applied", "failed", "rejected", "lost"]

# --- playbooks ------------------------------------------------------------------------------------

_GPU = '{gpu: "{{ labels.gpu }}", node: "{{ labels.node }}"}'
_TARGETS = ("node", "node", _GPU, _GPU, "cluster")
_GUARDS = ("", "", "", "", "cooldown: 3m", "max_concurrent: 1", "max_runs: {count: 2, per: 10m}")
_MODES = ("enforce", "enforce", "enforce", "enforce", "approve", "observe")


@st.composite
def _steps(draw: st.DrawFn, phase: str, most: int) -> list[str]:
    return [f"  - {{id: {phase}{index}, {draw(_step(index))}}}" for index in range(draw(st.integers(1, most)))]


@st.composite
def _step(draw: st.DrawFn, index: int) -> str:
    kind = draw(st.sampled_from(("action", "action", "action", "wait", "approve")))
    goes_on = draw(st.sampled_from(("fail", "continue")))
    if kind == "wait":
        timeout = draw(st.sampled_from(("", ", timeout: 50s", ", timeout: 7m")))
        return f"wait_for: resolved{timeout}, on_timeout: {goes_on}"
    if kind == "approve":
        return f"approve: 'go on?', timeout: {draw(st.sampled_from(('40s', '9m')))}, on_timeout: {goes_on}"
    action = draw(st.sampled_from(("cap", "cap", "other", "look", "tell")))
    text = f"action: test.{action}, timeout: {ACTION_SECONDS}s, on_error: {goes_on}"
    if action == "cap":
        text += f", undo: {draw(st.sampled_from(('never', 'on_resolve', 'on_resolve', 'on_failure')))}"
    if draw(st.booleans()):
        text += ", retry: {attempts: 3, delay: 4s}"
    if index and draw(st.integers(0, 4)) == 0:
        text += ", when: 'steps | length > 1'"
    return text


@st.composite
def _playbook(draw: st.DrawFn, name: str) -> str:
    alerts = draw(st.sampled_from(("[Hot]", "[Hot, Slow]", "[Slow]")))
    lines = [
        f"playbook: {name}",
        f"on: {{alert: {alerts}}}",
        f"target: {draw(st.sampled_from(_TARGETS))}",
        f"mode: {draw(st.sampled_from(_MODES))}",
        f"guards: {{{draw(st.sampled_from(_GUARDS))}}}",
        "steps:",
        *draw(_steps("s", 4)),
    ]
    if draw(st.booleans()):
        lines += ["on_failure:", *draw(_steps("f", 2))]
    return "\n".join(lines)


# --- what happens ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fire:
    """The alert fires; if it fires already, it is reported again."""

    alert: str
    place: tuple[str, str]


@dataclass(frozen=True)
class Resolve:
    """The alert resolves, if it fires."""

    alert: str
    place: tuple[str, str]


@dataclass(frozen=True)
class Say:
    """An order to one of the runs that there are, if it takes it."""

    kind: OrderKind
    which: int


@dataclass(frozen=True)
class Switch:
    """Pause, resume or close_breaker."""

    name: str


@dataclass(frozen=True)
class Kill:
    """The server is killed where it stands, and another one started some seconds later."""

    down: int = 0


@dataclass(frozen=True)
class Start:
    """A person has a playbook run at this place, and asks twice."""

    which: int
    place: tuple[str, str]


@dataclass(frozen=True)
class Again:
    """A person wants one of the runs that there are to be tried again."""

    which: int


@dataclass(frozen=True)
class Hold:
    """A person pauses a node for so many seconds."""

    node: str
    seconds: int


Deed = Fire | Resolve | Say | Switch | Kill | Start | Again | Hold

_places = {"alert": st.sampled_from(ALERTS), "place": st.sampled_from(PLACES)}
_fires = st.builds(Fire, **_places)
_resolves = st.builds(Resolve, **_places)
_orders = st.builds(Say, st.sampled_from((*OrderKind, OrderKind.APPROVE)), st.integers(0, 5))
_switches = st.builds(Switch, st.sampled_from(("pause", "pause", "resume", "resume", "resume", "close_breaker")))
_people = st.one_of(
    st.builds(Start, st.integers(0, 2), st.sampled_from(PLACES)),
    st.builds(Again, st.integers(0, 5)),
    st.builds(Hold, st.sampled_from(("n1", "n2", "n*")), st.sampled_from((30, 300))),
)
_kills = st.builds(Kill, st.sampled_from((0, 0, 7, 60, 1200)))


@dataclass(frozen=True)
class History:
    """What is drawn. ``fates`` says by turns what becomes of a new command, ``seed`` for whom and how soon."""

    playbooks: tuple[str, ...]
    deeds: tuple[tuple[int, Deed], ...]
    fates: tuple[Fate, ...]
    seed: int
    breaker: bool
    slow_store: bool

    @property
    def length(self) -> int:
        """Seconds from its first deed to its last."""
        return self.deeds[-1][0]

    def told(self) -> str:
        """For whoever has to find out what went wrong in it."""
        books = "\n---\n".join(self.playbooks)
        deeds = "\n".join(f"{at:5} {deed}" for at, deed in self.deeds)
        return f"History(\n{books}\n\n{deeds}\n{self.fates=} {self.seed=} {self.breaker=} {self.slow_store=})"


@st.composite
def histories(draw: st.DrawFn, *, kills: bool, surprises: bool) -> History:
    """`surprises`: replies are lost, and commits take a moment in which something else can happen."""
    fates: tuple[Fate, ...] = ("applied", "failed", "rejected", *(("lost",) if surprises else ()))
    names = [f"p{number}" for number in range(draw(st.integers(1, 3)))]
    deeds = [_fires, _fires, _resolves, _orders, _switches, _people, *([_kills] if kills else [])]
    gaps = draw(st.lists(st.sampled_from(GAPS), min_size=2, max_size=14))
    first = draw(_fires)
    rest = [(moment, draw(st.one_of(deeds))) for moment in accumulate(gaps)]
    return History(
        playbooks=tuple(draw(_playbook(name)) for name in names),
        deeds=((0, first), *rest),
        fates=("applied", draw(st.sampled_from(fates)), draw(st.sampled_from(fates))),
        seed=draw(st.integers(0, 1000)),
        breaker=draw(st.integers(0, 3)) == 0,
        slow_store=surprises and draw(st.booleans()),
    )
