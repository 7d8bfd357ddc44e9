"""Simulated GPU nodes with an agent each, by the real wire protocol.

Not modelled: the agent's policy and journal, so caps end with the demo.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import redis
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from trainmedic.wire import command_book, envelope, undoing
from trainmedic.wire.command_book import CommandDecision, CommandRecord, Do
from trainmedic.wire.command_memory import CommandMemory
from trainmedic.wire.connection import OutageLog, RedisConnection
from trainmedic.wire.receiver import Addressee, CommandReceiver, ReceivedCommand
from trainmedic.wire.writer import OutgoingReplies, PresenceKey, ReplyWriter
from trainmedic_core.target import TargetKind
from trainmedic_server import __version__

DEFAULT_WATTS, IDLE_WATTS = 350.0, 90.0
# At 350 W: 68.5 °C, and 96.5 °C without the fan, above the rule's 85 °C. The playbook's cap of 60 % makes it 70 °C.
_ROOM_CELSIUS, _CELSIUS_PER_WATT, _CELSIUS_PER_WATT_WITHOUT_FAN = 30.0, 0.11, 0.19
_SETTLING_SECONDS = 6.0  # time constant in seconds
_TICK_SECONDS = 0.5
_STOP_SECONDS = 5.0


class _Action(StrEnum):
    FACTS = "node.facts"
    POWER_LIMIT = "gpu.power_limit"
    RENEW = "gpu.renew_lease"


@dataclass
class SimulatedGpu:
    """A busy GPU. Its temperature follows its power, and more so while its fan is stopped."""

    node: str
    index: int
    uuid: str
    caps: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Limit in watts and end of the lease (monotonic seconds), by command ID."""
    celsius: float = _ROOM_CELSIUS + _CELSIUS_PER_WATT * DEFAULT_WATTS
    fan_stopped_until: float = 0.0

    @property
    def limit_watts(self) -> float:
        return min((watts for watts, _ in self.caps.values()), default=DEFAULT_WATTS)

    def is_called(self, name: str) -> bool:
        return name in (str(self.index), self.uuid)

    def advance(self, seconds: float, now: float) -> None:
        self.caps = {command: cap for command, cap in self.caps.items() if cap[1] > now}
        per_watt = _CELSIUS_PER_WATT_WITHOUT_FAN if now < self.fan_stopped_until else _CELSIUS_PER_WATT
        settled = _ROOM_CELSIUS + per_watt * self.limit_watts
        self.celsius += (settled - self.celsius) * (1 - math.exp(-seconds / _SETTLING_SECONDS))

    def inventory(self) -> dict[str, Any]:
        limits = {"power_limit_watts": self.limit_watts, "default_limit_watts": DEFAULT_WATTS}
        return {
            "index": self.index,
            "uuid": self.uuid,
            "name": "Simulated GPU",
            **limits,
            "max_limit_watts": DEFAULT_WATTS,
        }

    def reading(self) -> dict[str, Any]:
        return {"uuid": self.uuid, "temperature_celsius": round(self.celsius, 1), "power_watts": self.limit_watts}

    def facts(self) -> dict[str, Any]:
        return {
            **self.reading(),
            "index": self.index,
            "power": {"limit_watts": self.limit_watts, "default_watts": DEFAULT_WATTS},
        }


class SimulatedNode:
    """Executes commands at once, in the receiver's thread, each at most once."""

    def __init__(self, name: str, redis_url: str, gpus: int) -> None:
        self.name = name
        self.gpus = [SimulatedGpu(name, index, f"GPU-{uuid.uuid4()}") for index in range(gpus)]
        self._lock = threading.Lock()
        instance = envelope.new_id()
        writing = RedisConnection(lambda: redis_url, OutageLog(name, "the simulation continues"))
        stream = envelope.node_commands(name)
        self._memory = CommandMemory(f"node:{name}", instance)
        self._described: dict[str, Any] = {"node": name, "instance": instance, "version": __version__}
        self._described["actions"] = [_Action.FACTS, _Action.POWER_LIMIT]
        presence = PresenceKey(envelope.agent_presence(name), name, self._describe, lambda rival: None)
        self._writer = ReplyWriter(writing, self._memory, stream, presence, None)
        addressee = Addressee("node", name, stream, "agent", name)
        self._receiver = CommandReceiver(writing.shared(), addressee, None, self)

    def start(self) -> None:
        self._writer.start()
        self._receiver.start()

    def stop(self) -> None:
        self._receiver.stop(_STOP_SECONDS)
        self._writer.stop(_STOP_SECONDS)

    def advance(self, seconds: float) -> None:
        with self._lock:
            for gpu in self.gpus:
                gpu.advance(seconds, time.monotonic())

    def stop_fan(self, index: int, seconds: float) -> None:
        with self._lock:
            self.gpus[index].fan_stopped_until = time.monotonic() + seconds

    def _describe(self) -> dict[str, Any]:
        with self._lock:
            gpus = [gpu.inventory() for gpu in self.gpus]
            return {**self._described, "gpus": gpus, "gpu_readings": [gpu.reading() for gpu in self.gpus]}

    # --- commands -------------------------------------------------------------------------------------------

    def receive(self, received: ReceivedCommand) -> None:
        command = received.command
        decision = command_book.admit(
            command,
            self._memory.look_up(received.client, command.id),
            envelope.utc_now(),
            lambda: None,
            lambda: self._memory.claim(received.client, command.id),
        )
        if decision.what is Do.CARRY_OUT:
            decision = CommandDecision(Do.CLOSE, self.carry_out(command))
        if decision.outcome is None:
            received.drop()
            return
        record = decision.outcome
        self._memory.remember(command.id, record)
        reply = envelope.Reply(command.id, self.name, record.status, output=record.output, node=self.name)
        self._writer.put(OutgoingReplies((reply,), received.entry, record))

    def refuse(self, received: ReceivedCommand, reason: str) -> None:
        received.drop()

    def note_unreadable(self) -> None:
        """Do nothing."""

    def connected(self, client: redis.Redis) -> None:
        """Do nothing."""

    def carry_out(self, command: envelope.Command) -> CommandRecord:
        with self._lock:
            match command.action:
                case _Action.FACTS:
                    gpus = [gpu.facts() for gpu in self.gpus]
                    return CommandRecord(envelope.APPLIED, {"node": self.name, "gpus": gpus})
                case _Action.RENEW:
                    return self._renew(command.params)
                case _Action.POWER_LIMIT:
                    return self._limit(command)
        return command_book.ended(envelope.UNSUPPORTED, f"a simulated agent does not know {command.action}")

    def _renew(self, params: Mapping[str, Any]) -> CommandRecord:
        until = time.monotonic() + float(params["lease_seconds"])
        unknown = []
        for command_id in params["holds"]:
            holders = [gpu for gpu in self.gpus if command_id in gpu.caps]
            for gpu in holders:
                gpu.caps[command_id] = (gpu.caps[command_id][0], until)
            if not holders:
                unknown.append(command_id)
        return CommandRecord(envelope.APPLIED, {"unknown": unknown})

    def _limit(self, command: envelope.Command) -> CommandRecord:
        name, params = str(command.target.get("gpu")), command.params
        gpu = next((gpu for gpu in self.gpus if gpu.is_called(name)), None)
        if gpu is None:
            return command_book.ended(envelope.REJECTED, f"there is no GPU {name!r} on this node")
        before = gpu.limit_watts
        output = {"gpu": gpu.uuid, "previous_watts": before, "default_watts": DEFAULT_WATTS}
        if command.undo_of is not None:
            if gpu.caps.pop(command.undo_of, None) is None:
                return CommandRecord(envelope.APPLIED, undoing.nothing_to_undo(undoing.NOT_IN_FORCE))
            return CommandRecord(envelope.APPLIED, {**output, "limit_watts": gpu.limit_watts})
        watts = float(params.get("watts") or DEFAULT_WATTS * float(params.get("percent", 100)) / 100)
        watts = min(max(watts, IDLE_WATTS), DEFAULT_WATTS)
        lease = float(params.get("lease_seconds", 300))
        gpu.caps[command.id] = (watts, time.monotonic() + lease)
        done = {"requested_watts": watts, "limit_watts": gpu.limit_watts, "lease_seconds": lease}
        return CommandRecord(envelope.APPLIED, {**output, **done})


class SimulatedCluster:
    """All simulated nodes, their metrics, and the passing of time."""

    def __init__(self, nodes: Sequence[SimulatedNode], port: int) -> None:
        self._nodes = nodes
        self._over = threading.Event()
        registry = CollectorRegistry()
        registry.register(_Temperatures(nodes))
        self._metrics, self._serving = start_http_server(port, "127.0.0.1", registry)
        self._ticking = threading.Thread(target=self._tick, name="simulated GPUs", daemon=True)

    def start(self) -> None:
        for node in self._nodes:
            node.start()
        self._ticking.start()

    def stop(self) -> None:
        self._over.set()
        self._ticking.join()
        for node in self._nodes:
            node.stop()
        self._metrics.shutdown()
        self._metrics.server_close()
        self._serving.join()

    def node(self, name: str) -> SimulatedNode:
        return next(node for node in self._nodes if node.name == name)

    def index_of(self, uuid: str) -> int | None:
        return next((gpu.index for node in self._nodes for gpu in node.gpus if gpu.uuid == uuid), None)

    def _tick(self) -> None:
        before = time.monotonic()
        while not self._over.wait(_TICK_SECONDS):
            # Elapsed time: on a busy machine ticks come late, and a stopped fan would not heat its GPU to the limit.
            now = time.monotonic()
            for node in self._nodes:
                node.advance(now - before)
            before = now


class _Temperatures(Collector):
    def __init__(self, nodes: Sequence[SimulatedNode]) -> None:
        self._nodes = nodes

    def collect(self) -> Iterator[GaugeMetricFamily]:
        labels = [str(TargetKind.NODE), "gpu_id", "uuid"]
        celsius = GaugeMetricFamily("gpu_temperature_celsius", "Simulated temperature.", labels=labels)
        watts = GaugeMetricFamily("gpu_power_limit_watts", "Simulated power limit.", labels=labels)
        for gpu in (gpu for node in self._nodes for gpu in node.gpus):
            values = [gpu.node, str(gpu.index), gpu.uuid]
            celsius.add_metric(values, gpu.celsius)
            watts.add_metric(values, gpu.limit_watts)
        yield celsius
        yield watts
