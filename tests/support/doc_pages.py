"""The examples on a page of the documentation: finding them, and doing what a reader would do.

A fenced block is run by its kind, the first word after the fence; further words say more:

- ``console`` holds commands after ``$ `` and, under each, what it prints. The lines shown must come
  in that order; ``…`` stands for anything, within a line or, alone on one, for any lines.
  ``console exit=1`` ends with that status; ``console eventually`` is tried again for a while, until
  it comes out as shown. ``console background`` starts something that stays until the page ends; a
  server is waited for. ``console background alone`` ends what the block before of this kind has started.
- ``sh`` is a script without output shown.
- ``yaml`` and others with ``file=NAME`` are what the reader saves under that name.
- ``yaml alertmanager`` is checked with amtool, ``nginx`` with nginx as a part of a server; ``yaml`` and ``json`` alone
  are read.
- ``text`` is an illustration.

Commands run in one shell, so that variables stay. Port 8080 is replaced by a free one.
Who calls it: ``integration/test_documentation.py``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.support.programs import Program, free_port

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_PATIENCE_SECONDS = 120.0  # a training framework takes that long to load where all cores are busy
_END = "--- the command ended with "


@dataclass(frozen=True)
class Block:
    """One fenced block, with the line of the page that it begins on."""

    kind: str
    words: tuple[str, ...]
    body: str
    line: int

    def option(self, name: str) -> str | None:
        return next((word.partition("=")[2] for word in self.words if word.startswith(f"{name}=")), None)


@dataclass(frozen=True)
class Command:
    """One command of a ``console`` block, and the output that the page shows for it."""

    text: str
    shown: tuple[str, ...]


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found = []
    for match in _FENCE.finditer(page):
        kind, *words = match["info"].split() or ["text"]
        body = re.sub(rf"^{match['indent']}", "", match["body"], flags=re.MULTILINE)
        found.append(Block(kind, tuple(words), body, page.count("\n", 0, match.start()) + 1))
    return found


def commands(body: str) -> list[Command]:
    """The commands of a ``console`` block. A line that ends with a backslash goes on in the next."""
    found: list[Command] = []
    lines = iter(body.splitlines())
    for line in lines:
        if line.startswith("$ "):
            text = line[2:]
            while text.endswith("\\"):
                text += "\n" + next(lines)
            found.append(Command(text, ()))
        elif line:
            assert found, f"output before the first command: {line!r}"
            found[-1] = Command(found[-1].text, (*found[-1].shown, line))
    return found


def is_shown(shown: tuple[str, ...], printed: str) -> bool:
    """Whether the lines that a page shows are, in order, among those that a command printed."""
    lines = iter(printed.splitlines())
    return all(
        any(re.fullmatch(_pattern(wanted), line.rstrip()) for line in lines) for wanted in shown if wanted != "…"
    )


def _pattern(wanted: str) -> str:
    """`wanted` as a regular expression: ``…`` is anything, and the width of gaps does not count."""
    parts = [r"\s+".join(re.escape(word) for word in re.split(r"\s+", part)) for part in wanted.rstrip().split("…")]
    return ".*".join(parts)


class Reader:
    """Somebody who follows a page in `directory`; `scratch` is for what the reader would not see.

    Leaving the context ends what was started.
    """

    def __init__(self, directory: Path, scratch: Path, environment: Mapping[str, str]) -> None:
        self._directory = directory
        self._scratch = scratch
        self._port = free_port()
        self._environment = {
            **environment,
            "TRAINMEDIC_PORT": str(self._port),
            "TRAINMEDIC_URL": f"http://127.0.0.1:{self._port}",
        }
        self._programs: list[Program] = []
        self._alone: Program | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for program in reversed(self._programs):
            program.end()

    def follow(self, block: Block) -> None:
        """Do what the block says. AssertionError where it does not come out as shown."""
        file = block.option("file")
        if file is not None:
            path = self._directory / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._here(block.body))
        elif block.kind == "console" and "background" in block.words:
            self._start(block)
        elif block.kind == "console":
            patience = _PATIENCE_SECONDS if "eventually" in block.words else 0.0
            for command in commands(block.body):
                self._try(command, int(block.option("exit") or 0), time.monotonic() + patience)
        elif block.kind == "sh":
            self._run(Command(block.body, ()), 0)
        else:
            self._read(block)

    def _read(self, block: Block) -> None:
        match block.kind:
            case "yaml" if "alertmanager" in block.words:
                path = self._scratch / "alertmanager.yml"
                path.write_text(block.body)
                amtool = shutil.which("amtool")
                assert amtool, "amtool is needed"
                subprocess.run([amtool, "check-config", path], check=True, capture_output=True)
            case "nginx":
                path = self._scratch / "nginx.conf"
                path.write_text(
                    f"events {{}}\nhttp {{ server {{ listen 127.0.0.1:{free_port()};\n{block.body}\n}} }}\n"
                )
                nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
                assert nginx, "nginx is needed"
                check = [nginx, "-t", "-q", "-c", path, "-g", f"pid {self._scratch}/nginx.pid;", "-e", "stderr"]
                done = subprocess.run(check, capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stderr
            case "yaml":
                yaml.safe_load(block.body)
            case "json":
                json.loads(block.body)
            case "text":
                pass
            case _:
                raise AssertionError(f"nothing is known of blocks of the kind {block.kind!r}")

    def _start(self, block: Block) -> None:
        (command,) = commands(block.body)
        if "alone" in block.words and self._alone is not None:
            self._alone.end()
        program = Program(
            ["/bin/bash", "-c", f"cd '{self._directory}' && exec {self._here(command.text)}"],
            self._scratch / f"background-{len(self._programs)}.log",
            self._environment,
        )
        self._programs.append(program)
        if "alone" in block.words:
            self._alone = program
        if "trainmedic serve" in command.text or "scripts/run" in command.text:
            program.wait_for(f"http://127.0.0.1:{self._port}/ready", within=60)

    def _try(self, command: Command, status: int, until: float) -> None:
        while True:
            try:
                return self._run(command, status)
            except AssertionError:
                if time.monotonic() > until:
                    raise
            time.sleep(0.2)

    def _run(self, command: Command, status: int) -> None:
        # What a script sets is kept for the next one, as in the reader's own shell.
        kept = self._scratch / "variables"
        script = f"""
[ ! -e '{kept}' ] || . '{kept}'
trap 'ended=$?; declare -p | grep -v -E "^declare -[a-zA-Z]*r" > "{kept}"; echo "{_END}$ended"' EXIT
set -o pipefail {"-e" if status == 0 else ""}
"""
        done = subprocess.run(
            ["/bin/bash", "-c", script + self._here(command.text)],
            cwd=self._directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        printed, _, ended = done.stdout.rpartition(_END)
        told = f"$ {command.text}\n{printed}"
        assert ended.strip() == str(status), f"ended with {ended.strip() or done.returncode}, not {status}:\n{told}"
        assert is_shown(command.shown, self._there(printed)), "\n".join(
            ["the page shows", *command.shown, "and it printed", told, *(program.tail() for program in self._programs)]
        )

    def _here(self, text: str) -> str:
        """`text` of the page as it is run."""
        return re.sub(r"\b(127\.0\.0\.1|localhost):8080\b", rf"\g<1>:{self._port}", text)

    def _there(self, text: str) -> str:
        """What was printed as the page shows it."""
        return text.replace(f":{self._port}", ":8080")
