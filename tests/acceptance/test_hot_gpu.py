"""The loop of heat and power, all of it real but the silicon: hot GPUs are cooled, and get their power back.

The stand-in for the driver has GPUs whose temperature follows their power. The agent sets limits and exports
readings through the real pynvml; Prometheus scrapes it and evaluates the shipped rules; Alertmanager posts to
``trainmedic serve``; the shipped playbook lowers the limit in as many stages as it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.acceptance import scene
from tests.driver.driver import Driver, cards
from tests.support.agent_node import KEY
from tests.support.gpu_node import GpuNode
from tests.support.programs import alertmanagers, eventually, free_port, start_server

FASTER = 30
"""15 s between scrapes become half a second, the 5 minutes for which an alert is kept 10 s."""
NODE = "localhost"
"""A name that Prometheus can scrape: the node's label, and its address."""
HOT, WARM, FINE = range(3)
"""At full load and 700 W the first comes to 94 °C, and 80 % of that power leaves it at 81 °C; the second comes to
88 °C, and to 77 °C; the third has less to do and stays at 57 °C."""


@dataclass(frozen=True)
class Room:
    """What runs, and how to ask it."""

    driver: Driver
    server: str
    prometheus: str

    def firing(self) -> set[str]:
        """The GPUs for which Prometheus has GPUTemperatureHigh firing."""
        alerts = httpx.get(f"{self.prometheus}/api/v1/alerts").raise_for_status().json()["data"]["alerts"]
        hot = [alert["labels"] for alert in alerts if alert["state"] == "firing"]
        return {labels["uuid"] for labels in hot if labels["alertname"] == "GPUTemperatureHigh"}

    def told(self, query: str) -> dict[str, float]:
        """What Prometheus answers, by GPU."""
        reply = httpx.get(f"{self.prometheus}/api/v1/query", params={"query": query}).raise_for_status().json()
        return {one["metric"]["uuid"]: float(one["value"][1]) for one in reply["data"]["result"]}

    def runs(self) -> dict[str, dict[str, Any]]:
        """What the history lists, by GPU."""
        items = httpx.get(f"{self.server}/history").raise_for_status().json()["items"]
        by_gpu = {item["alert_labels"]["uuid"]: item for item in items}
        assert len(by_gpu) == len(items), "one heat, one run"
        return by_gpu

    def run(self, gpu: str) -> dict[str, Any]:
        whole: dict[str, Any] = httpx.get(f"{self.server}/history/{self.runs()[gpu]['run_id']}").json()
        return whole


@pytest.fixture
def room(tmp_path: Path, make_driver: Callable[..., Driver]) -> Iterator[Room]:
    """A server in mode enforce, a node with three idle GPUs and its agent, Prometheus and Alertmanager."""
    hot, warm, fine = cards(3)
    driver = make_driver((hot, replace(warm, kelvin_per_watt=0.08), fine), speed=FASTER)
    playbooks = scene.faster_playbook(tmp_path / "playbooks", "gpu-temperature-high.yaml", FASTER)
    for book in playbooks.iterdir():  # only waiting is shortened: a command takes as long as it takes
        book.write_text(book.read_text().replace("timeout: 1000ms", "timeout: 30s"))
    signed = {"TRAINMEDIC_SIGNING_KEY": KEY}
    with ExitStack() as stack:
        directory = tmp_path / "server"
        server, url = start_server(directory, "--mode", "enforce", environment=signed, playbooks=playbooks)
        stack.enter_context(server)
        redis_url = (directory / "state" / "redis.url").read_text().strip()
        node = GpuNode(tmp_path / "node", redis_url, driver, name=NODE)
        stack.push(node)
        exporter = free_port()
        node.start("--exporter-port", str(exporter))
        prometheus, _ = stack.enter_context(
            scene.watching(
                tmp_path / "scene",
                alertmanagers()["installed"],
                url,
                nodes=[NODE],
                exporter=exporter,
                factor=FASTER,
            )
        )
        yield Room(driver, url, prometheus)


def test_hot_gpus_are_cooled_in_as_many_stages_as_needed_and_get_their_power_back(room: Room) -> None:
    """Heat, alert, limit, a second limit only if the first is not enough, cool, resolved, original limit."""
    driver = room.driver
    hot, warm, fine = (card.uuid for card in driver.cards)
    eventually(lambda: len(room.told("gpu_temperature_celsius")) == 3, 60, "readings of all GPUs")
    for gpu, load in ((HOT, 1.0), (WARM, 1.0), (FINE, 0.35)):
        driver.load(gpu, load)

    eventually(lambda: room.firing() == {hot, warm}, 60, "the alerts")
    eventually(lambda: driver.watts(HOT) == 420, 60, "the second limit")
    assert driver.watts(WARM) == 560
    eventually(lambda: max(room.told("gpu_temperature_celsius").values()) <= 80, 60, "all GPUs cool, at full load")
    assert room.firing() == {hot, warm}, "cool, and kept so for a while"
    driver.load(HOT, 0.5)  # the phase of the training that was so hot is over
    driver.load(WARM, 0.5)

    eventually(lambda: {run["status"] for run in room.runs().values()} == {"succeeded"}, 60, "the alerts' end")
    eventually(lambda: (driver.watts(HOT), driver.watts(WARM)) == (700, 700), 60, "the limit of before")
    eventually(
        lambda: set(room.told("gpu_power_limit_watts == 700")) == {hot, warm, fine}, 60, "and Prometheus sees it"
    )
    assert not room.firing()
    assert [call.watts for call in driver.sets(WARM)] == [560, 700]
    assert [call.watts for call in driver.sets(HOT)] == [560, 420, 560, 700]
    assert not [call for call in driver.attempts() if call.gpu == FINE]
    highest = room.told("max_over_time(gpu_temperature_celsius[60s])")
    assert highest[hot] >= 90
    assert 85 < highest[warm] < 90
    assert highest[fine] < 60
    the_history_shows_each_value(room.run(hot), room.run(warm))


def the_history_shows_each_value(hot: dict[str, Any], warm: dict[str, Any]) -> None:
    """Every limit, what it replaced, what was read in between, what was given back, and in which order."""
    steps = {step["id"]: step for step in hot["steps"]}
    set_to = [steps[step]["output"] for step in ("cap", "cap_harder")]
    assert [(told["previous_watts"], told["limit_watts"]) for told in set_to] == [(700, 560), (560, 420)]
    assert 80 < steps["reading"]["output"]["gpu"]["temperature_celsius"] <= 85
    undone = [steps[step]["undo"] for step in ("cap_harder", "cap")]
    assert [undo["status"] for undo in undone] == ["done", "done"]
    limits = [(undo["output"]["previous_watts"], undo["output"]["limit_watts"]) for undo in undone]
    assert limits == [(420, 560), (560, 700)]
    story = [(event["kind"], event["data"].get("step")) for event in hot["events"]]
    assert [entry for entry in story if entry[0] != "alert_repeated"] == [
        ("started", None),
        *(("step_started", "cap"), ("step_succeeded", "cap")),
        *(("wait_started", "settled"), ("wait_ended", "settled")),
        *(("step_started", "reading"), ("step_succeeded", "reading")),
        *(("step_started", "cap_harder"), ("step_succeeded", "cap_harder")),
        *(("wait_started", "recovered"), ("alert_resolved", None), ("wait_ended", "recovered")),
        ("closed", None),
        *(("undo_started", "cap_harder"), ("undo_done", "cap_harder")),
        *(("undo_started", "cap"), ("undo_done", "cap")),
    ]

    steps = {step["id"]: step for step in warm["steps"]}
    assert steps["reading"]["output"]["gpu"]["temperature_celsius"] <= 80
    assert steps["cap_harder"]["status"] == "skipped"
    cap = steps["cap"]
    assert (cap["output"]["previous_watts"], cap["output"]["limit_watts"]) == (700, 560)
    assert (cap["undo"]["status"], cap["undo"]["output"]["limit_watts"]) == ("done", 700)
