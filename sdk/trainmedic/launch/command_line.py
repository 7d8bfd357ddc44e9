from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, Sequence

from trainmedic.launch.srun_line import why_not_excludable, with_excluded

_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_VALUED_OF_PYTHON = ("-W", "-X")  # options of Python whose value can be an argument of its own
# Options of torchrun without a value.
_FLAGS = frozenset(
    {
        *("--standalone", "-m", "--module", "--no-python", "--no_python", "--run-path", "--run_path"),
        *("--use-env", "--use_env", "--virtual-local-rank", "--virtual_local_rank"),
    }
)
# Options by which the user already stores or shows the ranks' output.
_OUTPUT_OPTIONS = frozenset({"-r", "--redirects", "-t", "--tee", "--log-dir", "--log_dir"})
_LONGEST_LINE = 4096


@dataclass(frozen=True)
class LaunchLine:
    argv: tuple[str, ...]
    kind: str  # ``torchrun``, ``srun``, or another program's name
    options_at: int  # index of the first option
    options: Mapping[str, str]  # values of torchrun's options; "" for flags

    @classmethod
    def of(cls, argv: Sequence[str]) -> LaunchLine:
        program = Path(argv[0]).name
        if program == "torchrun":
            return cls(tuple(argv), "torchrun", 1, _options(argv, 1))
        place = 1 if program.startswith("python") else len(argv)
        while place < len(argv) - 1 and argv[place].startswith("-"):  # else a script with its own arguments
            if argv[place] == "-m" and argv[place + 1] in _TORCHRUN_MODULES:
                return cls(tuple(argv), "torchrun", place + 2, _options(argv, place + 2))
            place += 2 if argv[place] in _VALUED_OF_PYTHON else 1
        return cls(tuple(argv), program, 1, {})

    @property
    def can_store_ranks(self) -> bool:
        # torchrun stores each rank's output, by options that the user has not given.
        return self.kind == "torchrun" and not _OUTPUT_OPTIONS.intersection(self.options)

    @property
    def starts_all_nodes(self) -> bool:
        return self.kind == "srun"

    @property
    def why_no_node_excludable(self) -> str:  # "" if nodes can be excluded
        return why_not_excludable(self.argv) if self.starts_all_nodes else ""

    @property
    def is_one_of_several(self) -> bool:
        # Other nodes have launchers of their own.
        return self.kind == "torchrun" and self._setting("nnodes") not in ("1", "1:1")

    @property
    def can_be_elastic(self) -> bool:
        # Our --nnodes can be added.
        return self.kind == "torchrun" and "--nnodes" not in self.options

    @property
    def restarts_ranks(self) -> bool:
        return self.kind == "torchrun" and self._setting("max_restarts", "0") != "0"

    @property
    def interpreter(self) -> str | None:
        # Python that runs torchrun; None if unknown, or if a warm standby (a waiting Python that has imported PyTorch)
        # cannot take its place.
        if self.kind != "torchrun":
            return None
        if Path(self.argv[0]).name != "torchrun":
            # Options of Python itself, such as -O, would be lost in the standby. The older module passes each
            # rank its number as an argument, unlike torchrun.
            return self.argv[0] if tuple(self.argv[1:3]) == ("-m", _TORCHRUN_MODULES[0]) else None
        script = shutil.which(self.argv[0])
        if script is None:
            return None
        with contextlib.suppress(OSError), Path(script).open("rb") as file:
            first = file.readline(_LONGEST_LINE).decode(errors="replace").strip()
            if first.startswith("#!/") and " " not in first and "python" in Path(first).name:
                return first[2:]
        return None

    def torchrun_arguments(self, argv: Sequence[str]) -> Sequence[str]:  # `argv` is an attempt's
        return argv[self.options_at :]

    @property
    def threads(self) -> str:
        """torchrun's OMP_NUM_THREADS: 1 for several ranks on a node, unless set; else empty."""
        if os.environ.get("OMP_NUM_THREADS"):
            return ""
        return "" if self._setting("nproc_per_node") == "1" else "1"

    def _setting(self, name: str, default: str = "1") -> str:
        # As torchrun reads it: its option, else its variable.
        forms = (f"--{name}", f"--{name.replace('_', '-')}")
        given = (self.options[form] for form in forms if form in self.options)
        return next(given, os.environ.get(f"PET_{name.upper()}", default))

    def for_attempt(
        self, rank_logs: Path | None, without: Sequence[str] = (), nodes: tuple[int, int] | None = None
    ) -> list[str]:
        added: list[str] = []
        if nodes is not None and self.can_be_elastic:
            added.append(f"--nnodes={nodes[0]}:{nodes[1]}")
        if rank_logs is not None and self.can_store_ranks:
            added += ["--tee=3", f"--log-dir={rank_logs}"]
        if without and self.starts_all_nodes:
            return with_excluded(self.argv, without)
        return [*self.argv[: self.options_at], *added, *self.argv[self.options_at :]]


def _options(argv: Sequence[str], begin: int) -> dict[str, str]:
    options: dict[str, str] = {}
    place = begin
    while place < len(argv) and argv[place].startswith("-") and argv[place] != "--":
        name, equals, value = argv[place].partition("=")
        if not name.startswith("--") and len(name) > 2:  # such as ``-r3``
            name, equals, value = name[:2], "=", argv[place][2:]
        is_next = not equals and name not in _FLAGS  # the value is an argument of its own
        options[name] = "".join(argv[place + 1 : place + 2]) if is_next else value
        place += 2 if is_next else 1
    return options
