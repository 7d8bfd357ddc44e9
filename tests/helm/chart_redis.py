"""The chart's Redis as its pod would run it: the rendered start script, configuration and passwords, with the real
server on the loopback.

Here: laying the files out as the pod's volumes do, starting, killing. Not here: what its users may do.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.helm import charts
from tests.helm.charts import Object, Values
from tests.support.programs import Program, eventually, free_port, system_path

ADMIN = "admin"
"""A user that the chart does not have, for tests that look at what Redis has refused."""


class ChartRedis:
    """One Redis, with its data and its port kept over restarts. ``secrets`` are those that the chart does not make."""

    def __init__(self, directory: Path, values: Values, secrets: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self.directory = directory
        self.port = free_port()
        self.starts = 0
        self.program: Program | None = None
        self.passwords: dict[str, str] = {}
        for name in ("data", "etc", "passwords", "run"):
            (directory / name).mkdir(parents=True)
        self.lay_out(charts.parsed(charts.rendered(values)), secrets or {})

    def lay_out(self, found: list[Object], secrets: Mapping[str, Mapping[str, str]]) -> None:
        """Write what the pod mounts."""
        made = {each["metadata"]["name"]: charts.secret(each) for each in found if each["kind"] == "Secret"}
        pod = charts.one(found, "StatefulSet", "-redis")["spec"]["template"]["spec"]
        (volume,) = [volume["projected"] for volume in pod["volumes"] if volume["name"] == "passwords"]
        self.passwords.clear()
        for source in volume["sources"]:
            held = {**made, **secrets}[source["secret"]["name"]]
            for item in source["secret"]["items"]:
                if item["key"] in held or not source["secret"]["optional"]:
                    self.passwords[item["path"]] = held[item["key"]]
        for user, password in self.passwords.items():
            (self.directory / "passwords" / user).write_text(password)
        mounts = {"/etc/redis-passwords": "passwords", "/etc/redis": "etc", "/run/redis": "run", "/data": "data"}
        for name, text in charts.one(found, "ConfigMap", "-redis")["data"].items():
            for path, here in mounts.items():
                text = text.replace(path, f"{self.directory}/{here}")
            (self.directory / "etc" / name).write_text(text)
        with (self.directory / "etc" / "redis.conf").open("a") as configuration:
            configuration.write(f"port {self.port}\nbind 127.0.0.1\nuser {ADMIN} on >{ADMIN} ~* &* +@all\n")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.program is not None:
            self.program.end()

    def start(self) -> None:
        self.starts += 1
        log = self.directory / f"redis-{self.starts}.log"
        script = ["/bin/sh", self.directory / "etc" / "start.sh"]
        self.program = Program(script, log, {"PATH": system_path()})
        eventually(self._answers, 60, f"Redis answers; its log is {log}", every=0.02)

    def kill(self) -> None:
        assert self.program is not None
        self.program.process.kill()
        self.program.process.wait()

    def restart(self) -> None:
        """End it as its pod is ended, so that it writes its file out first, and start it anew."""
        assert self.program is not None
        self.program.end()
        self.start()

    def url(self, user: str = "default") -> str:
        """As the chart gives it to a pod."""
        name = "" if user == "default" else user
        return f"redis://{name}:{self.passwords[user]}@127.0.0.1:{self.port}/0"

    def client(self, user: str = "default") -> redis.Redis:
        return redis.Redis.from_url(self.url(user), retry=Retry(NoBackoff(), 0))

    def refused(self) -> set[tuple[str, str]]:
        """Which user was refused what since the start, but for the name of its library, which redis-py offers."""
        with redis.Redis(port=self.port, username=ADMIN, password=ADMIN, decode_responses=True) as client:
            entries = [(one["username"], one["object"]) for one in client.acl_log(128)]
        return {(user, what) for user, what in entries if what != "client|setinfo"}

    def _answers(self) -> bool:
        assert self.program is not None
        if self.program.process.poll() is not None:
            raise AssertionError(f"Redis ended with {self.program.process.returncode}:\n{self.program.tail()}")
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.exceptions.ConnectionError:
            return False
