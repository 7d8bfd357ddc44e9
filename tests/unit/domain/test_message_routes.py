"""Which channels a message goes to, and what is wrong with a text of routes."""

from __future__ import annotations

import itertools

import pytest

from trainmedic_server.domain.component import Component
from trainmedic_server.domain.message import Severity
from trainmedic_server.domain.message_routes import KINDS, parse_routes, routes_of

TEAMS = """gpu=component:gpu,node  training=component:training
    oncall=severity:critical;kind:run_failed,notify oncall=kind:approval"""
NAMES = ("gpu", "oncall", "rest", "training")


@pytest.mark.parametrize(
    ("component", "severity", "kind", "expected"),
    [
        (Component.GPU, Severity.WARNING, "run_failed", ["gpu"]),
        (Component.GPU, Severity.CRITICAL, "run_failed", ["gpu", "oncall"]),
        (Component.NODE, Severity.CRITICAL, "breaker", ["gpu"]),
        (Component.TRAINING, Severity.WARNING, "approval", ["oncall", "training"]),
        (Component.STORAGE, Severity.CRITICAL, "notify", ["oncall"]),
        (Component.STORAGE, Severity.WARNING, "run_failed", ["rest"]),
        (Component.TRAINMEDIC, Severity.CRITICAL, "breaker", ["rest"]),
    ],
)
def test_a_channel_takes_what_one_of_its_routes_describes(
    component: Component, severity: Severity, kind: str, expected: list[str]
) -> None:
    """All conditions of a route must hold; what nobody takes is for the default channel."""
    chosen = routes_of(f"{TEAMS} rest=default", NAMES).choose(component, severity, kind)
    assert list(chosen.names) == expected
    assert chosen.is_taken is (expected != ["rest"])


@pytest.mark.parametrize(
    "text", ["", "gpu=component:gpu", TEAMS, f"{TEAMS} rest=default", "rest=default gpu=kind:pause"]
)
def test_no_message_is_lost(text: str) -> None:
    """Whatever it is about, some channel gets it."""
    routes = routes_of(text, NAMES)
    for component, severity, kind in itertools.product(Component, Severity, KINDS):
        chosen = routes.choose(component, severity, kind)
        assert chosen.names
        assert set(chosen.names) <= set(NAMES)


def test_without_routes_all_channels_take_everything() -> None:
    """And nothing is said of them."""
    routes = routes_of("", NAMES)
    assert routes.choose(Component.GPU, Severity.INFO, "pause").names == NAMES
    assert (routes.are_set, routes.described("gpu"), routes.caveat) == (False, [], "")


def test_a_channel_without_a_route_takes_everything() -> None:
    """A route restricts the channel that it names and no other one."""
    routes = routes_of("gpu=component:gpu", ("chat", "gpu"))
    assert routes.choose(Component.TRAINING, Severity.INFO, "pause").names == ("chat",)
    assert routes.choose(Component.GPU, Severity.INFO, "pause").names == ("chat", "gpu")
    assert (routes.described("chat"), routes.described("gpu")) == (["all"], ["component:gpu"])


def test_what_no_channel_takes_goes_to_all_where_none_is_a_default() -> None:
    """Which is said to who looks."""
    routes = routes_of("a=component:gpu b=severity:critical", ("a", "b"))
    chosen = routes.choose(Component.TRAINING, Severity.INFO, "pause")
    assert (chosen.names, chosen.is_taken) == (("a", "b"), False)
    assert "no default channel is set" in routes.caveat
    assert not routes_of("a=component:gpu b=all", ("a", "b")).caveat
    assert not routes_of("a=component:gpu b=default", ("a", "b")).caveat


def test_a_default_channel_can_have_routes_too() -> None:
    routes = routes_of("a=default a=component:gpu b=component:training", ("a", "b"))
    assert routes.choose(Component.GPU, Severity.INFO, "pause").is_taken
    assert routes.choose(Component.NODE, Severity.INFO, "pause").names == ("a",)
    assert routes.described("a") == ["component:gpu", "default"]


def test_routes_are_written_as_they_are_read() -> None:
    """For the API and the log."""
    text = "severity:warning,critical;kind:approval,notify"
    assert routes_of(f"a={text}", ("a",)).described("a") == [text]
    assert routes_of("a=kind:notify,approval;severity:critical,warning", ("a",)).described("a") == [text]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("gpu", "pair 1, 'gpu', is not channel=conditions, such as gpu=component:gpu,node;severity:warning,critical"),
        ("a=all gpu=", "pair 2, 'gpu=', is not channel=conditions"),
        ("gpu=team:gpu", "pair 1, channel 'gpu': 'team' is no field of a message; use component, severity, kind"),
        ("gpu=componet:gpu", "channel 'gpu': 'componet' is no field of a message; did you mean 'component'?"),
        ("gpu=component:gpus", "channel 'gpu', field component: 'gpus' is none of gpu, network, .*did you mean 'gpu'?"),
        ("gpu=component:", "channel 'gpu', field component: '' is none of gpu, "),
        ("a=all gpu=severity:warning,high", "pair 2, channel 'gpu', field severity: 'high' is none of info, warning, "),
        (
            "gpu=kind:approvals",
            "channel 'gpu', field kind: 'approvals' is none of approval, .*did you mean 'approval'?",
        ),
        ("gpu=kind:pause;kind:breaker", "channel 'gpu', field kind: is given twice; join the values by commas"),
        ("gpu=all;kind:pause", "channel 'gpu': 'all' is no field of a message"),
    ],
)
def test_a_wrong_route_is_refused_with_its_channel_and_field(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        parse_routes(text)


def test_a_channel_that_is_not_set_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"channel 'ops' is not set; add it to TRAINMEDIC_NOTIFY_URLS .*: chat, gpu"):
        routes_of("gpu=component:gpu ops=all", ("gpu", "chat"))


@pytest.mark.parametrize("text", ["json://user:hunter2@host/path", "ops=slack://hunter2/b/c", "slack://hunter2?to=x"])
def test_a_url_in_the_place_of_a_channel_is_not_repeated(text: str) -> None:
    """It may have a secret, and the error stands in the log."""
    with pytest.raises(ValueError, match="pair 2 has a URL; name a channel") as refused:
        parse_routes(f"a=all {text}")
    assert "hunter2" not in str(refused.value)
