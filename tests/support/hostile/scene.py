"""A node under attack: the real agent with its reader and opener, a real server, and a store, beside two attackers.

One attacker is a user of the node, the other is root of a container. Both know the source (``stealing``,
``exhausting``). Beside them run jobs of two other users and one normal job of the attacker. A second node has one
normal job and no attacker: it shows what the load of the machine alone does.

What is observed: the seconds until a failing line of these jobs is a finding in Redis, the seconds of commands, the
memory of the agent, and whether anything that comes out holds a byte of a private file.

Without root there is one user only. All files of others lie outside the directories of the policy then. The attackers
spare the logs of the victims: they own them, and could write into them, cut them or remove them like their own.

Not here: what is asserted about it (``tests/attack/test_hostile_jobs.py``, ``benchmarks/hostile_jobs.py``).
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import re
import shutil
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Struct, field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.support.agent_node import KEY
from tests.support.hostile.ground import Ground
from tests.support.live import Server
from tests.support.log_node import LogNode
from tests.support.log_stores.served import Served
from tests.support.process_use import MIB, process_use
from tests.support.programs import PYTHON_PATH, Program, eventually
from tests.support.two_users import MAY_GIVE, directory, file
from trainmedic.wire.log_layout import AttemptLogs, job_directory

MALLORY, BOB, DAVE, READER, TEAM = 20_011, 20_012, 20_013, 20_019, 20_110
"""Users and a group that no database knows."""
CALM = "calm"
"""The job of the node without attackers."""
OTHERS = ("bob", "dave")
"""Users of the node who attack nobody. The third victim is a normal job of the attacker's own user, whose budgets it
shares."""
FORBIDDEN = 6_660_000
"""The number in the lines of private files. A finding with it would be of such a file."""
_FIRST_MARK = 1000
_WARM_SECONDS = 15.0
"""Time of the attack after which the memory of the agent counts: by then it has done each kind of work."""
_MARK_SECONDS = 2.5
_COMMAND_SECONDS = 2.0
_ASK_SECONDS = 1.5
_RULES = r"""
log_rule: marked
summary: A line that a normal job writes for the attack.
source: [training, launcher]
contains: [MARK]
match: ['MARK (?P<n>\d+)']
role: root
cause: code
alert: {name: Marked, severity: warning, component: code, labels: {n: "{{ fields.n }}"}, summary: "Line {{ fields.n }}"}
"""
_PLAYBOOK = "playbook: none\non: {alert: Nothing}\ntarget: job\nsteps: [{id: a, action: job.checkpoint}]\n"
_NUMBER = re.compile(rb'\\"n\\":\\"(\d+)\\"')
_REPLY = re.compile(rb'\\"command_id\\":\\"([^\\"]+)\\".*?\\"status\\":\\"(\w+)\\"')
_LETTERS = "ghjkmnpqrstvwxyz"


class Outcome(Struct):
    """What was observed."""

    seed: int
    waits: dict[str, list[float]] = field(default_factory=dict)
    """By victim, the seconds from each line to its finding in Redis."""
    lost: dict[str, int] = field(default_factory=dict)
    """By victim, the lines that became no finding."""
    breaches: list[str] = field(default_factory=list)
    """Where bytes of private files came out."""
    commands: list[float] = field(default_factory=list)
    """Seconds from a command to its reply."""
    unanswered: list[str] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    """Answers of server, store and agent that were searched for private bytes, by kind and status."""
    slowest_answer: float = 0.0
    before: float = 0.0
    """MiB of the acting process when its memory began to count."""
    memory: list[tuple[float, float]] = field(default_factory=list)
    """Seconds since the attack began, and MiB of the acting process."""
    reader_memory: float = 0.0
    """MiB of the reader, at most."""
    restarts: float = 0.0
    cuts: dict[str, float] = field(default_factory=dict)
    loop_errors: dict[str, float] = field(default_factory=dict)
    tactics: dict[str, dict[str, int]] = field(default_factory=dict)
    load: list[float] = field(default_factory=list)

    @property
    def hidden(self) -> int:
        """Lines of other users' jobs that became no finding."""
        return sum(self.lost.get(name, 0) for name in OTHERS)

    @property
    def growth(self) -> float:
        """MiB by which the acting process was larger than when its memory began to count, at most."""
        return max((size for _, size in self.memory), default=self.before) - self.before


class BesiegedNode(LogNode):
    """Its reader has a user of its own, where this process may give it one. Its agent may cap GPUs."""

    def __init__(self, directory: Path, url: str, **logs: Any) -> None:
        super().__init__(directory, url, **logs)
        self._policy.write_text(self._policy.read_text().replace("allow: []", "allow: [gpu.power_limit]"))

    def start(self, *options: str, wait: bool = True, **environment: str) -> None:
        user = ("--reader-user", str(READER)) if MAY_GIVE else ()
        super().start(*options, *user, wait=wait, **environment)


class Victim(Struct):
    """A user with normal jobs. Each second line that fails is of a new job."""

    name: str
    uid: int | None
    secret: str
    """Is in each of the lines, which may be shown as lines of this user's jobs only."""
    root: Path
    node: str
    written: int = 0

    @property
    def job(self) -> str:
        return f"{self.name}-{self.written // 2}"

    def begin(self, job: str) -> Path:
        """Make the directory and the log of a job, if it has none. Return the log's path."""
        logs = AttemptLogs.of(self.root, job, 1)
        path = logs.launcher(self.node)
        if not path.exists():
            for each in (job_directory(self.root, job), logs.path):
                directory(each, self.uid, 0o700)
            file(path, "started\n", self.uid)
        return path

    def fail(self, mark: int) -> None:
        """Write a line of a failure."""
        with self.begin(self.job).open("a") as opened:
            opened.write(f"MARK {mark} of {self.secret}\n")
        self.written += 1


class Attack:
    """The attack, from entering the context to leaving it. `run` once, in between."""

    def __init__(self, top: Path, redis_url: str, seed: int, share: float = 1.0) -> None:
        """`top` must be a directory that every user may enter."""
        self._rng = random.Random(seed)
        self._url = redis_url
        self._share = share
        self.outcome = Outcome(seed)
        self._secret = "the-secret-" + "".join(self._rng.choices(_LETTERS, k=16))
        self._top = top
        self._root = directory(top / "logs", mode=0o1777)
        self._calm_root = directory(top / "calm", mode=0o1777)
        self._victims = [self._victim("bob", BOB), self._victim("dave", DAVE), self._victim("mallorys-own", MALLORY)]
        self._calm = Victim(CALM, None, CALM, self._calm_root, "n2")
        self._stack = contextlib.ExitStack()
        self._over = threading.Event()
        self._has_ended = threading.Event()
        """Nothing is observed any more. The last command gets its reply after the attack is over."""
        self._arrived: dict[int, float] = {}
        self._replied: dict[str, tuple[float, str]] = {}
        self._seen = threading.Lock()
        self._began = 0.0

    def _victim(self, name: str, uid: int) -> Victim:
        secret = f"of-{name}-" + "".join(self._rng.choices(_LETTERS, k=16))
        return Victim(name, uid if MAY_GIVE else None, secret, self._root, "n1")

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self._over.set()
        self._has_ended.set()
        self._stack.close()

    # --- the place --------------------------------------------------------------------------------------

    def _start(self) -> None:
        top, private = self._top, self._private_files()
        store = self._stack.enter_context(Served(Starlette(routes=[_route("/loki/api/v1/push", self._take_push)])))
        rules = directory(top / "rules") / "marked.yaml"
        rules.write_text(_RULES)
        paths = [f"{top}/homes", f"{top}/admin"] if MAY_GIVE else [f"{top}/homes/mallory"]
        self.node = BesiegedNode(
            directory(top / "node"),
            self._url,
            roots=[str(self._root)],
            paths=paths,
            files=[{"path": f"{top}/scratch/*.log"}],
            ship={"url": store.url},
        )
        options = ("--redis", self._url, "--log-rules", str(rules))
        self.server = Server(top / "server", _PLAYBOOK, *options, environment={"TRAINMEDIC_SIGNING_KEY": KEY})
        calm = BesiegedNode(top / "calm-node", self._url, name="n2", roots=[str(self._calm_root)])
        for each in (self.server, self.node, calm):
            self._stack.push(each)
            each.start(wait=False)
        eventually(lambda: self.server.ask("/health").status == 200, 120, "the server")
        for node in (self.node, calm):
            eventually(node.presence, 120, "an agent's presence")
        eventually(lambda: 'rules_info{version=""}' not in self._metrics(), 120, "rules from the server")
        self._stack.enter_context(self._thread(self._watch))
        self._grounds = self._attackers(private)

    def _private_files(self) -> list[str]:
        """Make the files that nobody but their owners may see, and return their paths."""
        top, bob = self._top, BOB if MAY_GIVE else None
        text = f"MARK {FORBIDDEN} {self._secret}\n"
        home = directory(top / "homes" / "bob", bob, 0o700)
        directory(top / "homes" / "mallory", MALLORY if MAY_GIVE else None, 0o755)
        directory(home / "deep", bob, 0o700)
        directory(top / "scratch", mode=0o1777)
        directory(top / "team", None, 0o770 if MAY_GIVE else 0o700, TEAM)
        if MAY_GIVE:
            os.chown(top / "team", 0, TEAM)
        made = [
            file(home / "private.log", text, bob),
            file(home / "deep" / "launcher-n1.log", text, bob),
            file(home / "open-mode.log", text, bob, 0o644),
            file(directory(top / "outside", bob, 0o700) / "private.log", text, bob),
            file(directory(top / "admin", mode=0o700) / "private.log", text),
        ]
        if MAY_GIVE:
            made.append(file(top / "scratch" / "bobs-private.log", text, bob))
        packed = home / "private.log.1.gz"
        packed.write_bytes(gzip.compress(text.encode()))
        packed.chmod(0o600)
        if bob is not None:
            os.chown(packed, bob, bob)
        return [*map(str, made), str(packed), str(home), str(home / "deep")]

    def _attackers(self, private: list[str]) -> list[Ground]:
        top, node = self._top, self.node
        address = urlsplit(node.exporter())
        # They exist from the beginning: whoever writes through a link to a missing file makes it, and takes the name.
        logs = [str(victim.begin(f"{victim.name}-{number}")) for victim in self._victims[:2] for number in (0, 1)]
        if not MAY_GIVE:
            logs = []
        prey = (*private, *logs, *(str(Path(path).parents[1]) for path in logs))
        state = node.state
        user = Ground(
            node=node.name,
            name="mallory",
            root=str(self._root),
            seen_root=str(self._root),
            home=str(top / "homes" / "mallory"),
            seen_home=str(top / "homes" / "mallory"),
            shared=str(top / "scratch"),
            team=str(top / "team") if MAY_GIVE else "",  # without root, the victim's files are the attacker's own
            prey=prey,
            exporter=(address.hostname or "127.0.0.1", address.port or 0),
            links=tuple(f"{state}/{path.name}" for path in state.iterdir()),
            uid=MALLORY,
            gid=MALLORY,
            groups=(TEAM,),
            other_uids=(BOB, 0, READER),
            changes_user=MAY_GIVE,
            share=self._share,
        )
        job = directory(self._root / "tenant", mode=0o755)
        directory(job / "home")
        seen = {"seen_root": str(job), "seen_home": f"{job}/home"}
        own = {"root": "/", "home": "/home"} if MAY_GIVE else {"root": str(job), "home": f"{job}/home"}
        changes = {"name": "tenant", **seen, **own, "shared": "", "team": "", "exporter": None, "links": ()}
        tenant = msgspec.structs.replace(user, uid=0, gid=0, groups=(), is_contained=True, **changes)
        return [user, tenant]

    # --- the time of the attack ----------------------------------------------------------------------------

    def run(self, seconds: float) -> Outcome:
        """Attack for so long. Then wait for what was written by then, which no attacker may have hidden for good."""
        with contextlib.ExitStack() as stack:
            self._began = time.monotonic()
            for work in (self._command, self._ask, self._sample):
                stack.enter_context(self._thread(work))
            with contextlib.ExitStack() as attackers:
                for ground in self._grounds:
                    attackers.enter_context(self._attacker(ground))
                written = self._write_lines(seconds)
            self._await(lambda: written.keys() <= self._arrived.keys())
            self._over.set()
        for mark, (victim, at) in written.items():
            arrived = self._arrived.get(mark)
            if arrived is None:
                self.outcome.lost[victim] = self.outcome.lost.get(victim, 0) + 1
            else:
                self.outcome.waits.setdefault(victim, []).append(arrived - at)
        self._conclude()
        return self.outcome

    def _write_lines(self, seconds: float) -> dict[int, tuple[str, float]]:
        """Write failing lines of victims until the time is over. Return who wrote each, and when."""
        written: dict[int, tuple[str, float]] = {}
        mark = _FIRST_MARK
        while time.monotonic() - self._began < seconds:
            victim = self._rng.choice([*self._victims, self._calm])
            at = time.monotonic()
            victim.fail(mark)
            written[mark] = (victim.name, at)
            self._leave_files_in_the_team(mark)
            mark += 1
            self._over.wait(self._rng.uniform(0.2, 2 * _MARK_SECONDS))
        return written

    def _leave_files_in_the_team(self, mark: int) -> None:
        place = self._top / "team"
        for number in range(3):
            with contextlib.suppress(OSError):
                path = place / f"{mark}-{number}.log"
                file(path, f"MARK {FORBIDDEN} {self._secret}\n", BOB if MAY_GIVE else None)

    def _await(self, is_so: Callable[[], bool]) -> None:
        """Wait for the last findings, for two minutes at most. What is missing then counts as lost."""
        with contextlib.suppress(AssertionError):
            eventually(is_so, 120, "the last findings")

    @contextlib.contextmanager
    def _attacker(self, ground: Ground) -> Iterator[None]:
        report = self._top / f"{ground.name}.json"
        argv = [sys.executable, "-m", "tests.support.hostile.program"]
        argv += [msgspec.json.encode(ground).decode(), str(self._rng.randrange(2**32)), str(report)]
        program = Program(argv, self._top / f"{ground.name}.log", {"PYTHONPATH": PYTHON_PATH})
        try:
            yield
            status = program.process.poll()
            assert status is None, f"attacker {ground.name} has ended with {status}: {program.tail()}"
        finally:
            program.end(30)
        self.outcome.tactics[ground.name] = json.loads(report.read_text())

    @contextlib.contextmanager
    def _thread(self, work: Callable[[], None]) -> Iterator[None]:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(60)

    # --- what is observed -------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Watch all that passes Redis, as its MONITOR states it: findings, replies, and everything else."""
        address = urlsplit(self._url)
        with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
            connection.sendall(b"MONITOR\r\n")
            connection.settimeout(1.0)
            rest = b""
            while not self._has_ended.is_set():
                try:
                    taken = connection.recv(1 << 20)
                except TimeoutError:
                    continue
                now = time.monotonic()
                *lines, rest = (rest + taken).split(b"\n")
                for line in lines:
                    self._watched(line, now)

    def _watched(self, line: bytes, now: float) -> None:
        self._search("Redis", line)
        if b'"XADD"' not in line[:80].upper():
            return
        for found in _NUMBER.findall(line):
            if int(found) == FORBIDDEN:
                self._breach("Redis", line)
            self._arrived.setdefault(int(found), now)
        for command, status in _REPLY.findall(line):
            if status not in {b"received", b"running", b"accepted"}:
                self._replied.setdefault(command.decode(), (now, status.decode()))

    def _command(self) -> None:
        """Cap a GPU, and renew its lease, again and again."""
        params = {"watts": 500.0, "lease_seconds": 600}
        first = self.node.cap("0", lasting=300.0, **params)
        self._carry_out(first)
        turn = 0
        while not self._over.wait(_COMMAND_SECONDS):
            turn += 1
            if turn % 3:
                command = self.node.renewal(first.id, seconds=600.0)
            else:
                command = self.node.cap("1", lasting=300.0, watts=400.0 + turn % 100, lease_seconds=60)
            self._carry_out(command)

    def _carry_out(self, command: Any) -> None:
        sent = time.monotonic()
        self.node.send(command)
        while command.id not in self._replied and time.monotonic() - sent < 60:
            time.sleep(0.005)
        at, status = self._replied.get(command.id, (0.0, "no reply"))
        if status == "applied":
            self.outcome.commands.append(at - sent)
        else:
            self.outcome.unanswered.append(f"{command.action}: {status}")

    def _ask(self) -> None:
        """Search logs of victims and attackers, list findings and jobs, and scrape metrics, again and again."""
        rng = random.Random(self.outcome.seed + 1)
        while not self._over.wait(_ASK_SECONDS):
            names = [f"mallory-{rng.randrange(40)}", "tenant", f"mallory-many-{rng.randrange(100)}", "mallory-linked"]
            for job in (rng.choice(names), rng.choice(self._victims).job):
                since = rng.choice(("1h", "10m", "1d"))
                self._answer(f"/jobs/{quote(job, safe='')}/logs?since={since}&limit=5000", job)
            for path in ("/findings?limit=1000", "/jobs", "/now", "/metrics"):
                self._answer(path)
            with contextlib.suppress(OSError, AssertionError):
                self._search("metrics of the agent", self._metrics().encode())

    def _answer(self, path: str, job: str = "") -> None:
        kind, began = re.sub(r"^/jobs/.*/logs.*", "/jobs/…/logs", path.partition("?")[0]), time.monotonic()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.server.port}{path}", timeout=60) as reply:
                status, raw = reply.status, reply.read()
        except urllib.error.HTTPError as error:
            with error:
                status, raw = error.code, error.read()
        except (OSError, ValueError) as error:
            self.outcome.answers[f"{kind} {type(error).__name__}"] += 1
            return
        self.outcome.slowest_answer = max(self.outcome.slowest_answer, time.monotonic() - began)
        self.outcome.answers[f"{kind} {status}"] += 1
        self._search(path, raw)
        if path.startswith("/findings") and status == 200:
            for item in json.loads(raw)["items"]:
                self._search_for_others(path, json.dumps(item).encode(), str(item["stream"]))
        elif job:
            self._search_for_others(path, raw, job)

    async def _take_push(self, request: Request) -> Response:
        """Take what the agent ships, as Loki does, and keep nothing of it."""
        raw = await request.body()
        raw = gzip.decompress(raw) if request.headers.get("content-encoding") == "gzip" else raw
        self.outcome.answers["push to the store"] += 1
        self._search("store", raw)
        if any(victim.secret.encode() in raw for victim in self._victims):
            for stream in json.loads(raw)["streams"]:
                text = json.dumps(stream["values"]).encode()
                self._search_for_others("store", text, json.dumps([stream["stream"], stream["values"]]))
        return Response(status_code=204)

    def _search(self, where: str, raw: bytes) -> None:
        if self._secret.encode() in raw:
            self._breach(where, raw)

    def _search_for_others(self, where: str, raw: bytes, job: str) -> None:
        """Look for a victim's line that is shown as one of another's job."""
        for victim in self._victims:
            if victim.secret.encode() in raw and f"{victim.name}-" not in job.replace(victim.secret, ""):
                self._breach(f"{where}, of {victim.name}", raw)

    def _breach(self, where: str, raw: bytes) -> None:
        at = max(raw.find(self._secret.encode()), 0)
        if len(self.outcome.breaches) < 20:
            self.outcome.breaches.append(f"{where}: {raw[max(at - 300, 0) : at + 300]!r}")

    def _sample(self) -> None:
        pid = self.node.agent.process.pid
        while not self._over.wait(1.0):
            since = time.monotonic() - self._began
            resident = process_use(pid).resident / MIB
            if since < _WARM_SECONDS:
                self.outcome.before = resident
            else:
                self.outcome.memory.append((since, resident))
            for reader in self.node.reader_pids()[-1:]:
                with contextlib.suppress(OSError, ValueError, IndexError):
                    used = process_use(reader).resident / MIB
                    self.outcome.reader_memory = max(self.outcome.reader_memory, used)
            self.outcome.load.append(os.getloadavg()[0])

    def _conclude(self) -> None:
        """Search what agent and server have logged and kept, and take the last metrics."""
        for path in (self.node.agent.log, self.server.directory / "server-1.log"):
            self._search(path.name, path.read_bytes())
        for path in (*self.node.state.rglob("*"), *self.server.state.rglob("*")):
            if path.is_file():
                self._search(f"state {path.name}", path.read_bytes())
        metrics = eventually(self._metrics, 60, "metrics")
        for line in metrics.splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith("trainmedic_agent_reader_restarts_total"):
                self.outcome.restarts = float(value)
            elif name.startswith("trainmedic_agent_log_cuts_total") and float(value):
                self.outcome.cuts[name.partition("{")[2]] = float(value)
            elif "loop_errors_total{" in name and float(value):
                self.outcome.loop_errors[name.partition("{")[2]] = float(value)

    def _metrics(self) -> str:
        """Return the agent's metrics. Empty while the attackers hold all of the exporter's places."""
        try:
            return self.node.metrics()
        except (OSError, ValueError):
            return ""


def _route(path: str, take: Any) -> Route:
    return Route(path, take, methods=["POST"])


def remove(top: Path) -> None:
    """Remove what the attackers have left: directories that are closed, also for their owners.

    The directory in which `top` lies is left as it is. It can be the one for temporary files of all users.
    """

    def open_and_retry(remove_it: Callable[[str], object], path: str, _: object) -> None:
        with contextlib.suppress(OSError):
            parent = Path(path).parent
            if parent.is_relative_to(top):
                parent.chmod(0o700)
            if not Path(path).is_symlink():
                Path(path).chmod(0o700)
            remove_it(path)

    shutil.rmtree(top, onerror=open_and_retry)
    shutil.rmtree(top, ignore_errors=True)
