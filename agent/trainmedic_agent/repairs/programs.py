"""The machine's programs, run with fixed arguments, without a shell and without the agent's secrets."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from msgspec import Struct

from trainmedic_agent.errors import CommandFailed, CommandUnsupported

_LONGEST_TEXT = 300  # characters


class ProgramAnswer(Struct, frozen=True):
    code: int
    output: str
    said: str
    """The end of what it wrote, on one line."""


def run(argv: Sequence[str], seconds: float, *, acts: bool = True) -> ProgramAnswer:
    """Raises CommandUnsupported if the program is missing, CommandFailed if it does not start, or end in time.

    `acts`: after a timeout it may still take effect.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRAINMEDIC_")}
    try:
        done = subprocess.run(  # noqa: S603  # fixed arguments; names are checked by the policy
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=max(seconds, 0.1),
            env={**environment, "LC_ALL": "C.UTF-8"},
            check=False,
        )
    except FileNotFoundError as error:
        raise CommandUnsupported(f"{argv[0]} is not on this machine, or not in the agent's PATH") from error
    except OSError as error:
        raise CommandFailed(f"{argv[0]} cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        doubt = "; it may still take effect" if acts else ""
        raise CommandFailed(f"{' '.join(argv)} did not end in {seconds:.0f} s{doubt}", {"may_be_done": acts}) from error
    output, errors = (text.decode("utf-8", "replace") for text in (done.stdout, done.stderr))
    said = " ".join((errors.strip() or output).split())[-_LONGEST_TEXT:]
    return ProgramAnswer(done.returncode, output, said)
