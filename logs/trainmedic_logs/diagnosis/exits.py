"""Ends of processes in launcher output, and their meaning."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_logs.diagnosis import clock_guess
from trainmedic_logs.domain.finding import CauseClass
from trainmedic_logs.lines import exception_causes

LAUNCHER = "trainmedic-run"
_ENDED_BY_SIGNAL = re.compile(r"SignalException: Process \d{1,10} got signal: (?:1|2|15|SIGHUP|SIGINT|SIGTERM)\b")
# Sent by the watchdog, and by launchers to the remaining ranks.
_SIGNALS_TO_VICTIMS = {signal.SIGABRT, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


# Exception and message, as the last line of a traceback has them.
_SAID = re.compile(r"((?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{0,80}(?:Error|Exception))(?:: (.*))?$")
# Words of errors that a device, the network or another rank may cause.
_MAY_BE_DEVICES = re.compile(
    r"\b(?:CUDA|HIP|[NRHX]CCL|cuBLAS|cuDNN|CUBLAS\w*|CUDNN\w*)\b|[Tt]imed? ?out|[Ss]ocket|/dev/"
)
# Exceptions for failures of any kind: even an assertion may be about the machine or other ranks.
_ANY_FAILURE = frozenset({"RuntimeError", "Exception", "OSError", "AssertionError", "MemoryError"})
_OWN_CAUSES = frozenset(
    {CauseClass.CODE, CauseClass.DATA, CauseClass.GPU_MEMORY, CauseClass.HOST_MEMORY, CauseClass.STORAGE}
)


class Exit(Struct, frozen=True):
    reporter: str
    """Source: ``torchrun``, ``slurm``, ``deepspeed``, ``error file``, ``trainmedic-run``, ``sdk`` and others."""
    code: int | None = None
    """None after a signal, or if unknown."""
    signal: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    node: str = ""
    is_node_sure: bool = False
    """Others than the job state it."""
    pid: int | None = None
    at: datetime | None = None
    """UTC; in launcher tables node-local time taken as UTC."""
    is_first: bool = False
    """The launcher's first failure on its node."""
    said: str = ""
    """The traceback's last line, or the reporter's text."""
    ruled: CauseClass | None = None
    """`said`'s cause by an exact log rule."""
    line: str = ""

    @property
    def is_failure(self) -> bool:
        return self.signal is not None or self.code not in (0, None)

    @property
    def is_victims(self) -> bool:
        """It ended as others do after the failure of one."""
        return self.signal in _SIGNALS_TO_VICTIMS or bool(_ENDED_BY_SIGNAL.search(self.said))

    @property
    def how(self) -> str:
        """``SIGKILL``, ``exit code 1``."""
        if self.signal is not None:
            return signal_name(self.signal)
        return "no exit code" if self.code is None else f"exit code {self.code}"

    @property
    def manner(self) -> str:
        """``by SIGKILL``, ``with exit code 1``."""
        return f"{'with' if self.signal is None else 'by'} {self.how}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def reported(status: int, rank: int | None, line: str, node: str = "", pid: int | None = None) -> Exit:
    """Return a reported end. `status`: exit code, or negative signal number."""
    code, by_signal = of_code(status)
    return Exit(LAUNCHER, code, by_signal, rank=rank, node=node, pid=pid, is_first=True, line=line[:500])


def meaning(ended: Exit) -> tuple[CauseClass, str]:
    match ended.signal:
        case signal.SIGSEGV | signal.SIGILL | signal.SIGFPE:
            return CauseClass.CODE, "the program, or one of its libraries, executed an invalid operation"
        case signal.SIGBUS:
            return CauseClass.HOST_MEMORY, "shared memory, such as that of data loaders, was not available"
        case signal.SIGKILL:
            return CauseClass.UNKNOWN, "a person, a scheduler, or the kernel (out of memory) killed it"
        case None:
            cause = _stated_cause(ended.said) if ended.ruled is None else ended.ruled
            return cause if cause in _OWN_CAUSES else CauseClass.UNKNOWN, ended.said or "the logs do not show why"
        case _:
            return CauseClass.UNKNOWN, "a signal ended it"


def _stated_cause(said: str) -> CauseClass:
    """Return the own cause that an exception states, UNKNOWN for those that a peer's end may cause."""
    match = _SAID.match(said)
    if match is None:
        return CauseClass.UNKNOWN
    reading = exception_causes.read(match[1], match[2] or "")
    is_vague = reading.is_guess or reading.is_consequence or _MAY_BE_DEVICES.search(said) is not None
    is_vague = is_vague or (reading.cause is CauseClass.CODE and not reading.is_proof and match[1] in _ANY_FAILURE)
    return CauseClass.UNKNOWN if is_vague else reading.cause


def of_code(code: int) -> tuple[int | None, int | None]:
    """Return exit code and signal from a launcher's (-9) or shell's (137) exit code."""
    if -64 <= code < 0:
        return None, -code
    return (None, code - 128) if 128 < code <= 192 else (code, None)


_BLOCK = re.compile(r"\[\d+\]:\s*$")
_MEMBER = re.compile(r"^\s*(time|host|rank|exitcode|error_file|traceback|msg)\s*:\s?(.*)$")
_RANK = re.compile(r"(\d{1,6}) \(local_rank: (\d{1,6})\)")
_CODE = re.compile(r"(-?\d{1,10}) \(pid: (\d{1,10})\)")


def torchrun_table(text: str, node: str = "") -> list[Exit]:
    """Parse any release's torchrun failure table."""
    exits: list[Exit] = []
    is_first = False
    # Releases of 2021 name and order the sections differently.
    for part in re.split(r"^(.*(?:Root Cause|Failures).*:)\s*$", text, flags=re.MULTILINE):
        if re.fullmatch(r".*(Root Cause|Failures).*:\s*", part):
            is_first = "Root Cause" in part
            continue
        ends = (_of_block(block, node) for block in _blocks(part))
        exits.extend(replace(ended, is_first=is_first) for ended in ends if ended)
    return exits


def _blocks(text: str) -> Iterator[list[str]]:
    block: list[str] = []
    for line in text.splitlines():
        if _BLOCK.search(line):
            yield block
            block = []
        else:
            block.append(line)
    yield block


def _of_block(lines: list[str], node: str) -> Exit | None:
    members: dict[str, str] = {}
    last = ""
    for line in lines:
        if (member := _MEMBER.match(line)) and member[1] not in members:
            last = member[1]
            members[last] = member[2].strip()
        elif last in ("traceback", "msg") and line.strip() and not set(line.strip()) <= set("=-*"):
            members[last] = line.strip()
    rank, code = _RANK.search(members.get("rank", "")), _CODE.search(members.get("exitcode", ""))
    if not code:
        return None
    gave, by_signal = of_code(int(code[1]))
    said = members.get("traceback") or members.get("msg") or ""
    return Exit(
        "torchrun",
        code=gave,
        signal=by_signal,
        rank=int(rank[1]) if rank else None,
        local_rank=int(rank[2]) if rank else None,
        node=node or members.get("host", ""),
        pid=int(code[2]),
        at=_local_time(members.get("time", "")),
        said="" if "enable traceback see" in said else said[:500],
        line=f"rank: {members.get('rank', '?')} exitcode: {members['exitcode']}",
    )


def _local_time(text: str) -> datetime | None:
    try:
        return datetime.strptime(text, "%Y-%m-%d_%H:%M:%S").replace(tzinfo=UTC)
    except ValueError:
        return None


_LONGEST_LINE = 1000
# Success messages of DeepSpeed, torchrun, Megatron-LM, Lightning, Hugging Face, fairseq and torchtitan.
_FINISHED = re.compile(
    r"\] Process (?P<pid>\d{1,10}) exits successfully|worker group successfully finished|\[after training is done\]"
    r"|`Trainer\.fit` stopped: `max_\w{1,20}=|^\*{5} train metrics \*{5}|done training in [\d.]{1,20} seconds"
    r"|Training completed(?:\. Do not forget|$)"
)
_ELASTIC = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_DEEPSPEED = re.compile(r"exits with return code = (-?\d+)\s*$")
_ACCELERATE = re.compile(
    r"CalledProcessError: Command .* (?:returned non-zero exit status (\d+)|died with <Signals\.(\w+))"
)
# The end of a long command's line.
_DIED = re.compile(r"' (?:returned non-zero exit status (\d+)|died with <Signals\.(\w+)[^\n]{0,12})\.?$")
# Composer, and Horovod without MPI. A rank's exit code 0 says nothing about the others.
_RANK_ENDED = re.compile(
    r"\b[Rr]ank (?P<rank>\d{1,6})(?: \(PID (?P<pid>\d{1,10})\))? (?:crashed|exited|terminated) with (?:exit )?code"
    r" (?P<code>-?[1-9]\d{0,3})\b|^Process (?P<process>\d{1,6}) exit with status code (?P<status>-?[1-9]\d{0,3})\b"
)
# torch.multiprocessing.spawn, whose processes count as local ranks, and PyCharm.
_SPAWNED = re.compile(
    r"Exception: process (?P<process>\d{1,6}) terminated with (?:signal (?P<signal>SIG\w{2,8})"
    r"|exit code (?P<code>-?[1-9]\d{0,3}))"
)
_PYCHARM = re.compile(r"Process finished with exit code (\d{1,4}) \(interrupted by signal")
_MPI = re.compile(r"process rank (\d{1,6}) with PID (\d{1,10}) on node (\S{1,255}) exited on signal (\d{1,2})\b")
# Ends by a signal in kubectl's `describe`, `exec` and JSON.
_CONTAINER = re.compile(r"^\s*Exit Code:\s+(1\d\d)\s*$|terminated with exit code (1\d\d)\b|\"exitCode\": ?(1\d\d)\b")
# Ends of a whole job or script: LSF, PBS, Slurm's seff, docker compose, GitLab, GitHub, GNU time, systemd, make.
_JOB_ENDED = re.compile(
    r"^Exited with exit code (?P<lsf>\d{1,3})\.?\s*$|^Exited by signal (?P<lsf_signal>\d{1,2})\.?\s*$"
    r"|^\s*Exit[_ ][Ss]tatus ?[:=] ?(?P<pbs>-?\d{1,3})\s*$|^State: (?:FAILED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY)"
    r" \(exit code (?P<seff>\d{1,3})\)|^[\w.-]{1,100} exited with code (?P<compose>\d{1,3})\s*$"
    r"|^ERROR: Job failed: (?:exit (?:code|status)|command terminated with exit code) (?P<gitlab>\d{1,3})\b"
    r"|##\[error\]Process completed with exit code (?P<github>\d{1,3})\."
    r"|^Command exited with non-zero status (?P<time>\d{1,3})\s*$"
    r"|^Command terminated by signal (?P<time_signal>\d{1,2})\s*$"
    r"|\bMain process exited, code=exited, status=(?P<systemd>\d{1,3})/"
    r"|\bMain process exited, code=(?:killed|dumped), status=(?P<systemd_signal>\d{1,2})/"
    r"|^make(?:\[\d{1,3}\])?: \*\*\* \[.{1,200}\] Error (?P<make>\d{1,3})\s*$"
    r"|\bterminated with exit code (?P<exec>[1-9]\d?)\s*$"
)
_JOB_SUCCEEDED = re.compile(r"^Successfully completed\.\s*$")  # LSF
_SLURM = re.compile(r"srun: error: (\S+): tasks? ([\d,\-]+): (.+?)\s*$")
_SLURM_WORDS = {
    "killed": signal.SIGKILL,
    "out of memory": signal.SIGKILL,
    "bus error": signal.SIGBUS,
    "segmentation fault": signal.SIGSEGV,
    "aborted": signal.SIGABRT,
    "terminated": signal.SIGTERM,
    "illegal instruction": signal.SIGILL,
    "floating point exception": signal.SIGFPE,
}


def launcher_line(text: str, node: str = "") -> list[Exit]:
    """Parse the ends that a launcher's or kubectl's line states, or a success message. Slurm's tasks count as ranks."""
    tail, text = text[-200:], text[:_LONGEST_LINE]
    if match := _ELASTIC.search(text):
        code, by_signal = of_code(int(match[1]))
        ended = Exit("torchrun", code, by_signal, local_rank=int(match[2]), node=node, pid=int(match[3]))
        return [replace(ended, is_first=True, line=text[:500])]
    if match := _DEEPSPEED.search(tail):
        # The printed command is that of the last started process, not of the failed one.
        code, by_signal = of_code(int(match[1]))
        return [Exit("deepspeed", code, by_signal, node=node, line=tail)]
    if match := _RANK_ENDED.search(text):
        code, by_signal = of_code(int(match["code"] or match["status"]))
        ended = Exit("launcher", code, by_signal, rank=int(match["rank"] or match["process"]), node=node)
        return [replace(ended, pid=int(match["pid"]) if match["pid"] else None, line=text[:500])]
    if match := _SPAWNED.search(text):
        by_signal = signal.Signals.__members__.get(match["signal"] or "")
        code, by_signal = of_code(int(match["code"])) if match["code"] else (None, by_signal)
        return [Exit("spawn", code, by_signal, local_rank=int(match["process"]), node=node, line=text[:500])]
    if match := _PYCHARM.search(text):
        code, by_signal = of_code(int(match[1]))
        return [Exit("launcher", code, by_signal, node=node, line=text[:500])]
    if match := _ACCELERATE.search(text) or _DIED.search(tail):
        gave, name = match.groups()
        by_signal = signal.Signals.__members__.get(name or "")
        return [Exit("accelerate", int(gave) if gave else None, by_signal, node=node, line=text[:500])]
    if match := _MPI.search(text):
        # It reports the first such process, often without its ID.
        ended = Exit("mpirun", signal=int(match[4]), rank=int(match[1]), node=match[3], pid=int(match[2]) or None)
        return [replace(ended, is_first=True, line=text[:500])]
    if match := _CONTAINER.search(text):
        code, by_signal = of_code(int(next(filter(None, match.groups()))))
        if by_signal is not None:
            return [Exit("kubernetes", code, by_signal, node=node, line=text[:500])]
    if match := _JOB_ENDED.search(text):
        name, number = next((name, int(value)) for name, value in match.groupdict().items() if value is not None)
        code, by_signal = (None, number) if name.endswith("_signal") else of_code(number)
        return [Exit("scheduler", code, by_signal, node=node, line=text[:500])] if code or by_signal else []
    if _JOB_SUCCEEDED.match(text):
        return [Exit("scheduler", code=0, node=node, line=text[:500])]
    if match := _FINISHED.search(text):
        return [Exit("training", code=0, node=node, pid=int(match["pid"]) if match["pid"] else None, line=text[:500])]
    if match := _SLURM.search(text):
        code, by_signal = _slurm_words(match[3])
        if code is None and by_signal is None:
            return []
        ended = Exit("slurm", code, by_signal, node=match[1], said=match[3], line=text[:500])
        return [replace(ended, rank=task) for task in _tasks(match[2][:200])]
    return []


def _slurm_words(said: str) -> tuple[int | None, int | None]:
    if gave := re.search(r"exit code (\d+)", said):
        return of_code(int(gave[1]))
    by_signal = next((number for word, number in _SLURM_WORDS.items() if said.lower().startswith(word)), None)
    return None, by_signal


def _tasks(listed: str) -> Iterator[int]:
    for part in listed.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            yield from range(int(first), min(int(last or first), int(first) + 4095) + 1)  # at most 4,096 of a span


def error_file(raw: bytes, **known: Any) -> Exit | None:
    """Parse a ``TORCHELASTIC_ERROR_FILE`` of torch's ``@record``, None for others. `known`: `Exit` fields."""
    try:
        message = json.loads(raw[: 1024 * 1024])["message"]
        # Python ends with exit code 1 after an exception.
        if isinstance(message, str):
            return Exit("error file", code=1, said=message[:500], line=message[:500], **known)
        more = message.get("extraInfo") or {}
        said = str(message.get("message", ""))[:500]
        at = _time_of(int(more["timestamp"])) if "timestamp" in more else None
        return Exit("error file", code=1, said=said, line=said, at=at, **known)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _time_of(seconds: int) -> datetime | None:
    try:
        at = datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return at if clock_guess.is_time(at) else None


def call_stack(raw: bytes) -> str:
    """Return an error file's traceback, or ""."""
    try:
        return str(json.loads(raw)["message"]["extraInfo"]["py_callstack"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
