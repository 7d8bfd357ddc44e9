"""The command that ``trainmedic-run`` is given: which launcher it is, and what is added to it for an attempt."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_FLAGS = frozenset({"--standalone", "-m", "--module", "--no-python", "--no_python", "--run-path", "--run_path"})
"""torchrun's options without a value."""
_KEEPING = frozenset({"-r", "--redirects", "-t", "--tee", "--log-dir", "--log_dir"})
"""torchrun's options by which somebody else keeps the output of ranks."""
_RESTARTS = frozenset({"--max-restarts", "--max_restarts"})
_RANKS_ON_NODE = ("--nproc-per-node", "--nproc_per_node")
_LONGEST_LINE = 4096


@dataclass(frozen=True)
class LaunchLine:
    """A command, taken apart as far as that is needed."""

    argv: tuple[str, ...]
    kind: str
    """``torchrun``, or the program's name."""
    options_at: int
    """Where options of the launcher's own can be put."""
    options: tuple[str, ...]
    """The launcher's options that were given, without their values."""

    @classmethod
    def of(cls, argv: Sequence[str]) -> LaunchLine:
        program = Path(argv[0]).name
        if program == "torchrun":
            return cls(tuple(argv), "torchrun", 1, _options(argv, 1))
        is_python = program.startswith("python")
        for place in range(1, len(argv) - 1) if is_python else ():
            if argv[place] == "-m" and argv[place + 1] in _TORCHRUN_MODULES:
                return cls(tuple(argv), "torchrun", place + 2, _options(argv, place + 2))
            if not argv[place].startswith("-"):
                break  # a script, and its own arguments
        return cls(tuple(argv), program, 1, ())

    @property
    def keeps_ranks(self) -> bool:
        """Whether it can be told to keep the output of each rank, and is not told so already."""
        return self.kind == "torchrun" and not _KEEPING.intersection(self.options)

    @property
    def starts_all_nodes(self) -> bool:
        """Whether it starts the processes of several nodes, and can leave some out."""
        return self.kind == "srun"

    @property
    def is_one_of_several(self) -> bool:
        """Whether others start the processes of other nodes."""
        return self.kind == "torchrun" and "--nnodes" in self.options and "--nnodes=1" not in self.argv

    @property
    def is_elastic(self) -> bool:
        """Whether the number of nodes can be given between two bounds."""
        return self.kind == "torchrun" and "--nnodes" not in self.options

    @property
    def restarts_ranks(self) -> bool:
        """Whether torchrun itself may start the ranks again."""
        return self.kind == "torchrun" and not _RESTARTS.isdisjoint(self.options)

    @property
    def interpreter(self) -> str | None:
        """The Python that runs torchrun. None for another launcher, or if it cannot be found."""
        if self.kind != "torchrun":
            return None
        if Path(self.argv[0]).name != "torchrun":
            # An option of Python's own, such as -O, would be lost in a process that was started without it. The older
            # module gives each rank its number as an argument, which torchrun does not.
            return self.argv[0] if tuple(self.argv[1:3]) == ("-m", _TORCHRUN_MODULES[0]) else None
        script = shutil.which(self.argv[0])
        if script is None:
            return None
        with contextlib.suppress(OSError), Path(script).open("rb") as file:
            first = file.readline(_LONGEST_LINE).decode(errors="replace").strip()
            if first.startswith("#!/") and " " not in first and "python" in Path(first).name:
                return first[2:]
        return None

    def torchrun_arguments(self, argv: Sequence[str]) -> Sequence[str]:
        """Return the arguments of torchrun in the command of an attempt, made by `for_attempt`."""
        return argv[self.options_at :]

    @property
    def threads(self) -> str:
        """The OMP_NUM_THREADS that torchrun sets: 1 for several ranks on a node, if it is not set. Else empty."""
        if os.environ.get("OMP_NUM_THREADS"):
            return ""
        for place, argument in enumerate(self.argv[self.options_at :], self.options_at):
            name, equals, value = argument.partition("=")
            if name in _RANKS_ON_NODE:
                value = value if equals else next(iter(self.argv[place + 1 :]), "1")
                return "" if value == "1" else "1"
        return ""

    def for_attempt(
        self, rank_logs: Path | None, without: Sequence[str] = (), nodes: tuple[int, int] | None = None
    ) -> list[str]:
        """The command of an attempt, which keeps the output of each rank under `rank_logs`, leaves out nodes, and has
        a number of nodes between these bounds."""
        added: list[str] = []
        if nodes is not None and self.is_elastic:
            added.append(f"--nnodes={nodes[0]}:{nodes[1]}")
        if rank_logs is not None and self.keeps_ranks:
            added += ["--tee=3", f"--log-dir={rank_logs}"]
        if without and self.starts_all_nodes:
            added.append(f"--exclude={','.join(without)}")
        return [*self.argv[: self.options_at], *added, *self.argv[self.options_at :]]


def _options(argv: Sequence[str], begin: int) -> tuple[str, ...]:
    """The names of the options from `begin` to the script."""
    names: list[str] = []
    place = begin
    while place < len(argv) and argv[place].startswith("-"):
        name, equals, _ = argv[place].partition("=")
        names.append(name)
        place += 1 if equals or name in _FLAGS else 2
    return tuple(names)
