"""Cause of an exception by its class, place and message, for all libraries.

Only exceptions that nothing but the program can cause are proof. Rules with exact wordings take precedence
(``matcher``).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources

from msgspec import Struct

from trainmedic_logs.domain.finding import CauseClass
from trainmedic_logs.lines import message_causes, outside_values, shown_source

PROOF = "proof"
"""Field of a finding whose exception has no other reading."""
GUESS = "guess"
"""Field of a finding whose cause is only a hint."""
_DATA = tomllib.loads(resources.files(__package__).joinpath("exception_classes.toml").read_text(encoding="utf-8"))
# Groups of class names, which the file explains.
_PROGRAM_ERRORS = frozenset(_DATA["program"])
_SURELY_CODE = frozenset(_DATA["surely_code"])
_BUILTIN = frozenset(_DATA["anything"]) | _PROGRAM_ERRORS | _SURELY_CODE
_WRAPPERS = frozenset(_DATA["wrappers"])
_CONSEQUENCES = frozenset(_DATA["consequences"])
# Program errors whose message may state another cause.
_MESSAGE_MAY_DECIDE = frozenset({"ImportError", "AssertionError"})
_UNSPECIFIC = frozenset(_DATA["unspecific"])
# Errors that only the program causes.
_SIGNATURE = re.compile(
    r"got an unexpected keyword argument|missing \d+ required (?:positional|keyword-only) argument"
    r"|takes \d+ positional arguments? but \d+|got multiple values for|^cannot import name |^module '[\w.]+' has no att"
    r"|^No module named '|object is not callable$|^name '\w+' is not defined"
)
# PyTorch errors about types, devices and calls, caused by no sample.
_TENSOR_ERRORS = re.compile(
    r"shapes cannot be multiplied|[Ee]xpected all tensors to be on the same dev"
    r"|^Trying to backward through the graph a second time"
    r"|does not require grad and does not have a grad_fn|^Expected to have finished reduction in the prior iteration"
    r"|^Detected mismatch between collectives on ranks|^expected scalar type \w+ but match"
    r"|modified by an inplace operat|must have the same dtype, but got"
    r"|^Default process group has not been initialized|^Expected to mark a variable ready only once"
    r"|^(?:mat1|self) and (?:mat2|mat) must have the same dtype|^Error\(s\) in loading state_dict for"
)
# Errors about shapes, which may be those of samples.
_SHAPE_ERRORS = re.compile(
    r"^The size of tensor a \(\d+\) must match|^Sizes of tensors must match except in dimension"
    r"|^shape '\[[\d, -]+\]' is invalid for input of size|^Given groups=\d+, weight of size"
    r"|^stack expects each tensor to be equal size"
)
_CLASSES: Mapping[str, CauseClass] = {
    name: CauseClass(cause) for cause, names in _DATA["causes"].items() for name in names
}
_BY_PART_OF_CLASS: Sequence[tuple[re.Pattern[str], CauseClass]] = (
    (re.compile(r"OutOfMemory|OOM"), CauseClass.GPU_MEMORY),
    (
        re.compile(
            r"Connect|Endpoint|NameResolution|Socket|Proxy|Throttl|RateLimit|Unreachable|Unavailable|NotAvailable|NoBrokers"
        ),
        CauseClass.NETWORK,
    ),
    (re.compile(r"Checksum|Corrupt|Truncated|Decod|Parse"), CauseClass.DATA),
    (re.compile(r"CUDA|Cuda|NVML"), CauseClass.GPU),
    (re.compile(r"Config|Validation|Argument|Unsupported|Compil|Forbidden|Setup"), CauseClass.CODE),
)
_LIBRARY_FILE = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python\d|^<frozen |/conda/|\.so$|\.pyx$")
_DATA_LOADER_FILE = re.compile(
    r"/torch/utils/data/_utils/|/datasets/(?:iterable_|arrow_)?(?:dataset|builder|reader)\.py"
)
# Code that reads samples: loader processes, and libraries that only read data.
_SAMPLE_READER_FILE = re.compile(r"/torch/utils/data/_utils/(?:worker|fetch)\.py$")
_DATA_LIBRARY_FILE = re.compile(
    r"/(?:site|dist)-packages/(?:streaming/base|webdataset|wids|litdata|ffcv|torchdata|petastorm|tfrecord"
    r"|megatron/energon|nvidia/dali|array_record|grain)/"
)
_CAUGHT_IN_LOADER = re.compile(r"^Caught \w{2,60} in DataLoader worker")
# Errors that a bad sample causes as well as the program that reads it.
_SAMPLE_ERRORS = frozenset(
    {
        "AssertionError", "IndexError", "KeyError", "LookupError", "ValueError", "RuntimeError", "Exception", "OSError",
        "IOError", "FileNotFoundError", "ZeroDivisionError", "OverflowError", "StopIteration", "struct.error",
    }
)  # fmt: skip
_FILE_ERRORS = frozenset({"OSError", "IOError", "FileNotFoundError", "struct.error"})
_LACKS_FILE = re.compile(r"\b[Ff]iles?\b.{0,200}\b(?:not found|missing|does not exist)\b")
_PROCESS_COMMUNICATION_FILE = re.compile(
    r"/(?:multiprocessing/(?:connection|managers|resource_\w+|queues)|concurrent/futures)[/.]"
)
_CALL = re.compile(r'File "([^"\n]{1,400})", line \d+')
_CHAINED = re.compile(r"\n(?:The above exception was the direct cause|During handling of the above exception)")
_LAST_CLASS = re.compile(r"\n((?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?:: ([^\n]*))?\s*$")
_READERS_OF_DATA = (
    "zlib",
    "lzma",
    "_csv",
    "csv",
    "tarfile",
    "gzip",
    "zipfile",
    "PIL.",
    "av.",
    "cv2.",
    "decord",
    "webdataset.",
)
_ASSERTS_FINITE = re.compile(r"\n\s*assert [^\n]*\b(?:is_?nan|is_?finite|is_?inf|nan|inf)\b")
_SEARCHED_TAIL = 500  # characters of a traceback in which its last assertion stands
_TIMEOUT_MODULES = ("TimeoutError", "asyncio.", "concurrent.", "multiprocessing.", "ray.")
_COLLECTIVE_ERROR = re.compile(
    r"\b(?:HCCL|[Hh]ccl\w*|XCCL|oneCCL|RCCL)\b.{0,80}(?i:error|fail|time ?out)"
    r"|^NCCL error: (?:unhandled (?:cuda|system) error|internal error|remote process exited)"
)
# Source without a file, such as a model's answer run by a reward function.
_EXECUTED_TEXT = re.compile(
    r"<(?:string|stdin|console|exec|eval|code|generated|solution|answer|completion|snippet|sandbox|ast|input|test"
    r"|reward|module)\b[\w -]{0,30}>$"
)
# Temporary file, such as a model's answer under test.
_TEMPORARY_FILE = re.compile(r"/tmp[a-z0-9_]{8}(?:/|\.py$)")  # noqa: S108
_HOST_WORDS = re.compile(r"(?i)\b(?:host|cpu|ram|system|array|object|list|string)\b")
_HEADING = "Traceback (most recent call last)"
_ORIGINAL = f"Original {_HEADING}"
# Heading above exceptions of several tasks, of which none is proof.
_GROUP_HEADING = "Exception Group Traceback"
_SPAWN_FILE = re.compile(r"/torch/multiprocessing/spawn\.py$")
# Words of assertions about the machine, which are no proof of a program's fault.
_MACHINE_WORDS = re.compile(
    r"(?i)\b(?:[gnt]pus?|cuda|devices?|accelerators?|nodes?|hosts?|workers?|peers?|servers?|connect\w*|reachable"
    r"|respon\w*|time[ds]?[ _]?out|path\.\w+|exists?|is_?file|is_?dir|not found|mount\w*|disk|free|memory)\b"
    r"|is_available|_count\("
)
_ASSERTED = re.compile(r"\n\s*assert ([^\n]*)")
# Messages that refer to an earlier error, often of another process.
_SEE_ABOVE = re.compile(
    r"(?i)\bsee (?:the )?(?:root cause|stack trace|error|traceback|logs?) ?\(?above|\bis reported as above"
    r"|^Executor failed\.$|not the actual error message"
    r"|\b(?:one|some|any) (?:or more )?(?:of (?:your|the) )?(?:background )?workers? (?:has |have |may have )?"
    r"(?:crashed|died)"
    r"|\b(?:worker|process|thread)(?:es|s)? (?:has |have )?(?:crashed|died|failed)\b.{0,40}\b(?:check|see) .{0,20}"
    r"\blogs?\b"
)
# Messages of Gaudi and NVIDIA's libraries for any failure.
_SAYS_NOTHING = re.compile(
    r"\[Generic failure\]|Exception in Launch thread|^NVML_SUCCESS == "
    r"|^cu(?:solver|FFT|sparse|RAND) error: CU\w+_(?:INTERNAL_ERROR|EXECUTION_FAILED|EXEC_FAILED)"
)
# Messages that name the class of an exception in another process.
_CAUGHT_CLASS = re.compile(
    r"^Caught (\w{2,60}) in (?:DataLoader worker|pin memory thread|replica)|state=finished raised (\w{2,60})>"
)
_BARE_TIMEOUT = re.compile(r"(?i)^time(?:d ?out|out) (?:waiting|while waiting)\b")
_DATA_WORDS = re.compile(r"(?i)\b(?:columns?|data ?sets?|samples?)\b")


class ExceptionReading(Struct, frozen=True):
    cause: CauseClass
    is_proof: bool = False
    is_consequence: bool = False
    """Another process failed first."""
    is_guess: bool = False
    stated_by: str = ""
    """Class of the earlier exception that states the cause."""


def read(name: str, message: str, traceback: str = "") -> ExceptionReading:
    """Return the cause by the exception at the end of `traceback`.

    In a chain, the first cause other than the program counts. A program error after another exception is proof only if
    that one is the program's too.
    """
    inner, last = _earlier_in_chain(traceback), name.rpartition(".")[2]
    earlier = read(*inner) if inner else None  # once: each exception of the chain may name another
    if earlier and last in _WRAPPERS:
        return earlier
    if (caught := _CAUGHT_CLASS.search(message)) and (caught_name := caught[1] or caught[2]) != last:
        last, name, message = caught_name, caught_name, ""
    reading = earlier if earlier and last in _WRAPPERS else _read_last(name, message, traceback)
    if not inner or not earlier or reading.is_consequence:
        return reading
    if earlier.is_guess or earlier.is_consequence or earlier.cause in (CauseClass.CODE, CauseClass.UNKNOWN):
        is_proof = reading.is_proof and earlier.cause is CauseClass.CODE
        return ExceptionReading(reading.cause, is_proof=is_proof, is_guess=reading.is_guess)
    return ExceptionReading(earlier.cause, stated_by=earlier.stated_by or inner[0])


def read_in_thread(reading: ExceptionReading, traceback: str) -> ExceptionReading:
    """Return the reading for a thread, whose end need not end the program."""
    if reading.cause is not CauseClass.CODE:
        return reading
    calls = _CALL.findall(traceback)
    is_in_library = bool(calls) and bool(_LIBRARY_FILE.search(calls[-1]))
    return ExceptionReading(CauseClass.UNKNOWN if is_in_library else CauseClass.CODE, is_guess=True)


def _read_last(name: str, message: str, traceback: str) -> ExceptionReading:
    last = name.rpartition(".")[2]
    calls = _CALL.findall(traceback)
    place = calls[-1] if calls else ""
    if _EXECUTED_TEXT.match(place):
        return ExceptionReading(CauseClass.CODE, is_guess=True)
    if last == "Exception" and not message.strip() and _SPAWN_FILE.search(place):
        return ExceptionReading(CauseClass.UNKNOWN, is_consequence=True)
    if _is_consequence(name, message, place):
        return ExceptionReading(CauseClass.UNKNOWN, is_consequence=True)
    if name == "requests.exceptions.JSONDecodeError":
        return ExceptionReading(CauseClass.NETWORK)  # the server sent an unexpected answer
    if last in _SURELY_CODE:
        return ExceptionReading(CauseClass.CODE, is_proof=True)
    is_programs = last in _PROGRAM_ERRORS or (last in ("RuntimeError", "ValueError") and _is_tensor_error(message))
    shown = shown_source.last_shown(traceback)
    by_message = (
        None if last in _PROGRAM_ERRORS - _MESSAGE_MAY_DECIDE else message_causes.cause_of(name, message, shown)
    )
    if by_message is not None:
        return ExceptionReading(by_message)
    if _SAYS_NOTHING.search(message):
        return ExceptionReading(CauseClass.UNKNOWN, is_guess=True)
    if last in _SAMPLE_ERRORS and _reads_samples(last, message, calls):
        return ExceptionReading(CauseClass.DATA)
    if last == "AssertionError" and _ASSERTS_FINITE.search(traceback[-_SEARCHED_TAIL:]):
        return ExceptionReading(CauseClass.NUMERICS)
    if last == "AssertionError" and _asserts_about_machine(message, traceback):
        return ExceptionReading(CauseClass.CODE)
    if is_programs:
        is_proof = _is_proof(last, message, calls, shown) and not _has_several_tracebacks(traceback)
        return ExceptionReading(CauseClass.CODE, is_proof=is_proof)
    return _by_class(name, last, message)


def _reads_samples(last: str, message: str, calls: Sequence[str]) -> bool:
    if _SIGNATURE.search(message) or _is_tensor_error(message) or "CUDA" in message:
        return False
    is_loader = _CAUGHT_IN_LOADER.search(message) or any(_SAMPLE_READER_FILE.search(call) for call in calls)
    # In a loader's process, the user's data set or collator may be wrong as well.
    is_of_file = last in _FILE_ERRORS or _LACKS_FILE.search(message) is not None
    return bool((is_loader and is_of_file) or (calls and _DATA_LIBRARY_FILE.search(calls[-1])))


def _is_consequence(name: str, message: str, place: str) -> bool:
    last = name.rpartition(".")[2]
    if (
        last in _CONSEQUENCES
        or message_causes.NPU_TIMEOUTS.search(message)
        or _SEE_ABOVE.search(message)
        or _COLLECTIVE_ERROR.search(message)
    ):
        return True
    if _BARE_TIMEOUT.search(message) and message_causes.cause_of(name, message) is None:
        return True
    # A bare timeout does not say which path failed, or why.
    if last == "TimeoutError" and name.startswith(_TIMEOUT_MODULES) and message_causes.cause_of(name, message) is None:
        return True
    if name.startswith("multiprocessing.") and last == "AuthenticationError":
        return True
    of_processes = last in ("EOFError", "BrokenPipeError", "ConnectionResetError", "ConnectionRefusedError")
    return of_processes and bool(_PROCESS_COMMUNICATION_FILE.search(place))


def _asserts_about_machine(message: str, traceback: str) -> bool:
    asserted = _ASSERTED.findall(traceback[-_SEARCHED_TAIL:])
    return bool(_MACHINE_WORDS.search(message) or (asserted and _MACHINE_WORDS.search(asserted[-1])))


def _has_several_tracebacks(traceback: str) -> bool:
    chained = len(_CHAINED.findall(traceback)) + traceback.count(_ORIGINAL)
    return _GROUP_HEADING in traceback or traceback.count(_HEADING) > 1 + chained


def _is_proof(last: str, message: str, calls: Sequence[str], shown: str) -> bool:
    place = calls[-1] if calls else ""
    if _TEMPORARY_FILE.search(place):
        return False
    # None often comes from outside, such as a missing file.
    if "NoneType" in message or _SHAPE_ERRORS.search(message):
        return False
    is_own = bool(place) and not _LIBRARY_FILE.search(place)
    if _SIGNATURE.search(message):
        return (is_own or last != "ModuleNotFoundError") and not outside_values.unpacks_outside(shown)
    if _TENSOR_ERRORS.search(message):
        return True
    # A missing member of a sample can be a fault of the data or of the program.
    is_loading = any(_DATA_LOADER_FILE.search(call) for call in calls)
    if not is_own or is_loading or _DATA_WORDS.search(message):
        return False
    return outside_values.is_own(last, message, shown)


def _is_tensor_error(message: str) -> bool:
    return bool(_TENSOR_ERRORS.search(message) or _SHAPE_ERRORS.search(message))


def _by_class(name: str, last: str, message: str) -> ExceptionReading:
    if last in _UNSPECIFIC:
        return ExceptionReading(CauseClass.UNKNOWN, is_guess=True)
    if name.startswith("ray.") and last.endswith("OutOfMemoryError"):
        return ExceptionReading(CauseClass.HOST_MEMORY)  # raised by Ray's memory monitor
    if ("Checksum" in last or "Corrupt" in last) and message_causes.is_store(name):
        return ExceptionReading(CauseClass.STORAGE)  # the store's answer was damaged, not the object
    if name.startswith(_READERS_OF_DATA):
        return ExceptionReading(CauseClass.DATA)
    if cause := _CLASSES.get(last):
        return ExceptionReading(cause)
    if last == "MemoryError" and _HOST_WORDS.search(message):
        # Python's own has no message and a rule of its own. GPU allocators raise it too.
        return ExceptionReading(CauseClass.HOST_MEMORY)
    if last == "EOFError":
        # Without a message it can also be the end of a pipe.
        return ExceptionReading(CauseClass.DATA, is_guess=not message)
    if last in _BUILTIN:
        return ExceptionReading(CauseClass.CODE, is_guess=message_causes.has_unusual_errno(message))
    if last.endswith(("Timeout", "TimeoutError")):
        return ExceptionReading(CauseClass.NETWORK)
    for part, cause in _BY_PART_OF_CLASS:
        if part.search(last):
            return ExceptionReading(cause)
    # User-defined class: most are the program's failures.
    return ExceptionReading(CauseClass.CODE, is_guess=True)


def _earlier_in_chain(traceback: str) -> tuple[str, str, str] | None:
    """Return class, message and traceback before the last exception."""
    ends = [match.start() for match in _CHAINED.finditer(traceback)]
    if not ends:
        return None
    before = traceback[: ends[-1]].rstrip()
    match = _LAST_CLASS.search(before)
    return (match[1], match[2] or "", before) if match else None
