"""Exceptions of ordinary libraries: what each states about its cause, and which of them prove it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from trainmedic_logs.domain.finding import CauseClass
from trainmedic_logs.lines import exception_causes
from trainmedic_logs.lines.exception_causes import ExceptionReading

OWN = 'Traceback (most recent call last):\n  File "/app/train.py", line 12, in main\n    step()\n'
LIBRARY = OWN + '  File "/opt/venv/lib/python3.11/site-packages/x/y.py", line 7, in call\n    raise\n'
LOADING = 'File "/opt/venv/lib/python3.11/site-packages/torch/utils/data/_utils/fetch.py", line 54, in fetch\n'

STATED = [
    (line, CauseClass(cause))
    for cause, line in yaml.load(Path(__file__).with_name("exceptions.yaml").read_bytes(), yaml.CSafeLoader)
]


def read(line: str, traceback: str = LIBRARY) -> ExceptionReading:
    name, _, message = line.partition(": ")
    return exception_causes.read(name, message, f"{traceback}{line}")


@pytest.mark.parametrize(("line", "cause"), STATED)
def test_a_library_states_the_cause_and_proves_nothing(line: str, cause: CauseClass) -> None:
    """Class, error number, HTTP status or words name the cause; none of them excludes another reading."""
    reading = read(line)
    assert (reading.cause, reading.is_proof, reading.is_guess) == (cause, False, False)


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("ENOTCONN: socket is not connected, read", CauseClass.NETWORK),
        ("read ENOTCONN", CauseClass.NETWORK),
        ("ESHUTDOWN: cannot send after transport endpoint shutdown", CauseClass.NETWORK),
        ("ENOTCONN: transport endpoint is not connected, open '/mnt/data/a.bin'", CauseClass.STORAGE),
        ("EBUSY: resource busy or locked", CauseClass.UNKNOWN),
        ("EBUSY: resource busy or locked, unlink '/mnt/data/a.bin'", CauseClass.STORAGE),
    ],
)
def test_a_name_of_an_error_number_is_of_storage_where_it_names_a_file(message: str, cause: CauseClass) -> None:
    """Sockets and devices report the same names."""
    reading = read(f"uvloop.Error: {message}")
    assert (CauseClass.UNKNOWN if reading.is_guess else reading.cause) is cause


@pytest.mark.parametrize(
    "line",
    [
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above).",
        "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly",
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ],
)
def test_what_another_process_did_is_a_consequence(line: str) -> None:
    """It is no cause, whatever class it has."""
    assert read(line).is_consequence


@pytest.mark.parametrize(
    ("line", "traceback"),
    [
        ("KeyError: 'labels'", OWN),
        ("TypeError: forward() got an unexpected keyword argument 'num_items'", LIBRARY),
        ("ImportError: cannot import name 'PreTrainedModel' from 'transformers'", LIBRARY),
        ("ModuleNotFoundError: No module named 'flash_attn'", OWN),
        ("SyntaxError: invalid syntax", ""),
        ("AssertionError: batch must divide by 8", OWN),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x512 and 768x512)", LIBRARY),
        ("RuntimeError: Error(s) in loading state_dict for Llama: size mismatch for lm_head.weight", LIBRARY),
        ("omegaconf.errors.ConfigAttributeError: Key 'lr' is not in struct", LIBRARY),
    ],
)
def test_what_only_the_program_raises_there_is_proof(line: str, traceback: str) -> None:
    """In a file of its own, or by a message that names a wrong call or shape."""
    assert read(line, traceback) == ExceptionReading(CauseClass.CODE, is_proof=True)


@pytest.mark.parametrize(
    ("line", "traceback"),
    [
        ("KeyError: 'labels'", LIBRARY),
        ("KeyError: 'text'", f"{OWN}  {LOADING}"),
        ("AssertionError: peer is gone", LIBRARY),
        ("ValueError: 17", OWN),
        ("IndexError: list index out of range", OWN),
        ("AttributeError: 'NoneType' object has no attribute 'shape'", OWN),
        ("RuntimeError: it went wrong", OWN),
        ("ImportError: libcudart.so.12: cannot open shared object file", OWN),
    ],
)  # fmt: skip
def test_what_may_have_another_reason_is_no_proof(line: str, traceback: str) -> None:
    """The same class in a library, or a class that anything raises."""
    assert not read(line, traceback).is_proof


FROM_OUTSIDE = [
    ("KeyError: 391090", "index = self._map[image_id]"),
    ("KeyError: 'labels'", "labels = torch.stack([f.pop('labels') for f in features])"),
    ("KeyError: 'cat'", "label = self.class_to_idx[name]"),
    ("KeyError: 'image'", 'load = cfg["loaders"][kind]'),
    ("KeyError: '<pad>'", "pad = lookup(token)"),
    ("TypeError: '<' not supported between instances of 'str' and 'int'", "order = sorted(scores)"),
    ("TypeError: unsupported operand type(s) for +: 'int' and 'str'", "total = total + count"),
    ("TypeError: unhashable type: 'list'", "seen.add(ident)"),
    ("TypeError: must be real number, not str", "w = math.exp(weight)"),
    ("TypeError: Sample.__init__() got an unexpected keyword argument 'meta'", "sample = Sample(**line)"),
    ("AttributeError: 'int' object has no attribute 'split'", "words = caption.split()"),
    ("AttributeError: 'ErrorResponse' object has no attribute 'choices'", "c = judged.choices"),
    ("AssertionError: caption must be a string", "assert isinstance(caption, str), 'caption must be a string'"),
    ("AssertionError: reward must be between 0 and 1", "assert 0 <= x <= 1, 'reward must be between 0 and 1'"),
    ("AssertionError", "assert size % 4096 == 0"),
    ("AssertionError: batch size must match", "assert a.shape[0] == b.shape[0], 'batch size must match'"),
    ("NotImplementedError: file type .heic", "raise NotImplementedError(f'file type {suffix}')"),
    ("RuntimeError: stack expects each tensor to be equal size, but got [2048] at entry 0", "torch.stack(x)"),
    ("RuntimeError: The size of tensor a (2050) must match the size of tensor b (2048)", "h = h + self.pos"),
    ("RuntimeError: Given groups=1, weight of size [64, 3, 7, 7], expected input[8, 4, 9, 9]", "y = self.net(x)"),
]
OF_THE_PROGRAM = [
    ("KeyError: 'weight_decy'", 'wd = config["optim"]["weight_decy"]'),
    ("KeyError: 'warmup'", "warmup = args.pop('warmup')"),
    ("KeyError: 'labels'", 'raise KeyError("labels")'),
    ("TypeError: unsupported operand type(s) for +: 'int' and 'str'", '1 + "x"'),
    ("TypeError: unsupported operand type(s) for @: 'Tensor' and 'Linear'", "y = x @ self.head"),
    ("TypeError: Model() got an unexpected keyword argument 'n_hed'", "model = Model(**config)"),
    ("AttributeError: 'GPT' object has no attribute 'lm_haed'", "y = self.lm_haed(h)"),
    ("AssertionError", "assert cfg.n_embd % cfg.n_head == 0"),
    ("AssertionError: layers", "assert args.num_layers % args.pipeline_parallel_size == 0, 'layers'"),
    ("NotImplementedError: activation swigluu", "raise NotImplementedError(f'activation {cfg.act}')"),
]


@pytest.mark.parametrize(("line", "shown"), FROM_OUTSIDE)
def test_a_value_that_may_come_from_outside_proves_nothing(line: str, shown: str) -> None:
    """The source that read it does not show that it is the program's own."""
    reading = read(line, OWN.replace("step()", shown))
    assert (reading.cause, reading.is_proof) == (CauseClass.CODE, False)


@pytest.mark.parametrize(("line", "shown"), OF_THE_PROGRAM)
def test_a_value_that_the_program_has_set_is_proof(line: str, shown: str) -> None:
    """It reads its settings, its own object, or literals."""
    assert read(line, OWN.replace("step()", shown)).is_proof


def test_a_call_of_compiled_python_is_no_file_of_the_program() -> None:
    """Its tracebacks name no source, and a path without a folder of libraries."""
    compiled = OWN + '  File "python/ray/_raylet.pyx", line 480, in ray._raylet.execute_task\n'
    assert not read("KeyError: 'step_reward'", compiled).is_proof


def test_a_class_that_says_that_something_was_not_found_is_a_guess() -> None:
    """The thing may be data, a checkpoint or a setting."""
    assert read("zarr.errors.ChunkNotFoundError: chunk 12 is missing").is_guess


def test_a_class_that_nobody_knows_is_a_guess() -> None:
    """It says so, and so the verdict is a hint."""
    assert read("acme.tools.FlumError: no flum").is_guess


def test_what_a_wrapper_passes_on_counts() -> None:
    """The exception before it in the chain."""
    inner = f"{LIBRARY}requests.exceptions.ConnectionError: Connection refused"
    chain = f"{inner}\n\nThe above exception was the direct cause of the following exception:\n\n{OWN}"
    assert read("datasets.exceptions.DatasetGenerationError: An error occurred", chain).cause is CauseClass.NETWORK


def test_a_check_that_numbers_are_numbers_is_about_numbers() -> None:
    """The traceback shows the source of the assertion."""
    checked = OWN.replace("    step()", "    assert torch.isfinite(loss)")
    assert read("AssertionError", checked) == ExceptionReading(CauseClass.NUMERICS)


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: NPU function error: aclrtSynchronizeDevice, error code is 507048",
        "RuntimeError: The Inner error is reported as above.",
        "subprocess.TimeoutExpired: Command '['nvidia-smi']' timed out after 30 seconds",
        "multiprocessing.context.AuthenticationError: digest received was wrong",
    ],
)
def test_a_timeout_or_a_pointer_to_another_error_is_a_consequence(line: str) -> None:
    """It states that something did not answer, and not why."""
    assert read(line).is_consequence


@pytest.mark.parametrize(
    "line",
    [
        "jaxlib.xla_extension.XlaRuntimeError: INTERNAL: an error occurred",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
        "RuntimeError: Graph compile failed. synStatus=synStatus 26 [Generic failure].",
    ],
)
def test_a_class_for_every_kind_of_failure_states_no_cause(line: str) -> None:
    """Without a message that is known."""
    assert read(line) == ExceptionReading(CauseClass.UNKNOWN, is_guess=True)


def test_an_exception_of_a_loader_process_is_read_by_its_own_class() -> None:
    """PyTorch raises its message again, as the class that it had or as RuntimeError."""
    assert read("RuntimeError: Caught CastError in DataLoader worker process 0.").cause is CauseClass.DATA
    assert read("RuntimeError: Caught ReadTimeout in DataLoader worker process 3.").cause is CauseClass.NETWORK


def test_a_long_chain_of_caught_exceptions_is_read_in_linear_time() -> None:
    """Each names the class of another, so each could be read twice with all before it."""
    caught = "ValueError: Caught KeyError in DataLoader worker process 0.\n"
    chain = f"{caught}\nDuring handling of the above exception, another exception occurred:\n\n" * 60
    assert read(caught.rstrip(), chain).cause is CauseClass.CODE


def test_a_caught_wrapper_states_the_cause_before_it() -> None:
    """As if it had not been raised again: a map function of Hugging Face's datasets, in a loader."""
    chain = f"{LIBRARY}TypeError: x\n\nThe above exception was the direct cause of the following exception:\n\n"
    last = "RuntimeError: Caught DatasetGenerationError in DataLoader worker process 0."
    assert read(last, chain).cause is CauseClass.CODE


def test_an_error_number_with_a_path_is_of_a_file_system() -> None:
    """The same number without one is of the network."""
    assert read("TimeoutError: [Errno 110] Connection timed out: '/nfs/data/s1'").cause is CauseClass.STORAGE
    assert read("TimeoutError: [Errno 110] Connection timed out").cause is CauseClass.NETWORK


def test_the_end_of_a_pipe_is_a_guess() -> None:
    """Without a message nobody knows what ended."""
    assert read("EOFError").is_guess
    assert not read("EOFError: Ran out of input").is_guess


_LOADER = "/usr/lib/python3/dist-packages/torch/utils/data/_utils/fetch.py"
_SHARDS = "/opt/conda/lib/python3.10/site-packages/webdataset/filters.py"
_LIBRARY = "/opt/conda/lib/python3.10/site-packages/tensorflow/hook.py"


@pytest.mark.parametrize(
    ("line", "calls", "cause"),
    [
        ("AssertionError: file named 000001/0001.jpg not found", [_LOADER, "/app/data.py"], CauseClass.DATA),
        ("FileNotFoundError: Caught FileNotFoundError in DataLoader worker process 1.", [], CauseClass.DATA),
        ("ValueError: didn't find ['y.txt'] in ['__key__', 'x.pyd']", ["/app/train.py", _SHARDS], CauseClass.DATA),
        ("KeyError: 'labels'", ["/app/train.py", "/app/model.py"], CauseClass.CODE),
        ("ValueError: too few", [_SHARDS, "/app/model.py"], CauseClass.CODE),
        ("AttributeError: 'Set' object has no attribute 'lenn'", [_LOADER, "/app/data.py"], CauseClass.CODE),
        ("TypeError: decode() got an unexpected keyword argument 'a'", ["/app/t.py", _SHARDS], CauseClass.CODE),
        ("RuntimeError: Cannot re-initialize CUDA in forked subprocess.", [_LOADER, "/app/data.py"], CauseClass.CODE),
        ("RuntimeError: stack expects each tensor to be equal size, but", [_LOADER, _LIBRARY], CauseClass.CODE),
    ],
)
def test_where_samples_are_read_an_error_is_of_the_data(line: str, calls: list[str], cause: CauseClass) -> None:
    """Unless no sample can cause it."""
    frames = "".join(f'  File "{call}", line 3, in f\n    f()\n' for call in calls)
    name, _, message = line.partition(": ")
    reading = exception_causes.read(name, message, f"Traceback (most recent call last):\n{frames}{line}")
    assert reading.cause is cause
    assert not (reading.is_proof and cause is CauseClass.DATA)


@pytest.mark.parametrize(("place", "cause"), [("/app/writer.py", CauseClass.CODE), (_LIBRARY, CauseClass.UNKNOWN)])
def test_the_end_of_a_thread_is_a_hint(place: str, cause: CauseClass) -> None:
    """In a library's own thread not even that."""
    traceback = f'Exception in thread Thread-4:\nTraceback (most recent call last):\n  File "{place}", line 3, in f\n'
    sure = ExceptionReading(CauseClass.CODE, is_proof=True)
    assert exception_causes.read_in_thread(sure, traceback) == ExceptionReading(cause, is_guess=True)
    stated = ExceptionReading(CauseClass.STORAGE)
    assert exception_causes.read_in_thread(stated, traceback) is stated
