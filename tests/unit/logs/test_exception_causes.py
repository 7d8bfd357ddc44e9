"""Exceptions of ordinary libraries: what each states about its cause, and which of them prove it."""

from __future__ import annotations

import pytest

from trainmedic_server.domain.finding import CauseClass
from trainmedic_server.logs import exception_causes
from trainmedic_server.logs.exception_causes import ExceptionReading

OWN = 'Traceback (most recent call last):\n  File "/app/train.py", line 12, in main\n    step()\n'
LIBRARY = OWN + '  File "/opt/venv/lib/python3.11/site-packages/x/y.py", line 7, in call\n    raise\n'
NETWORK, STORAGE, DATA, CODE = CauseClass.NETWORK, CauseClass.STORAGE, CauseClass.DATA, CauseClass.CODE
GPU, GPU_MEMORY, HOST_MEMORY = CauseClass.GPU, CauseClass.GPU_MEMORY, CauseClass.HOST_MEMORY

STATED = [
    ('botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL: "https://b.s3.eu.amazonaws.com/x"', NETWORK),
    ("botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the PutObject operation: Please reduce your request rate.", STORAGE),
    ("botocore.exceptions.ClientError: An error occurred (503) when calling the UploadPart operation (reached max retries: 4): Service Unavailable", STORAGE),
    ("botocore.exceptions.ClientError: An error occurred (AccessDenied) when calling the GetObject operation: Access Denied", CODE),
    ("botocore.exceptions.NoCredentialsError: Unable to locate credentials", CODE),
    ("google.api_core.exceptions.ServiceUnavailable: 503 GET https://storage.googleapis.com/storage/v1/b/ckpt/o: Service Unavailable", STORAGE),
    ("google.api_core.exceptions.DeadlineExceeded: 504 Deadline Exceeded", NETWORK),
    ("azure.core.exceptions.ServiceRequestError: <urllib3.connection.HTTPSConnection object>: Failed to resolve 'a.blob.core.windows.net'", NETWORK),
    ("huggingface_hub.errors.HfHubHTTPError: 500 Server Error: Internal Server Error for url: https://huggingface.co/api/models/x", NETWORK),
    ("huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/api/datasets/x", NETWORK),
    ("huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error. (Request ID: Root=1) Repository Not Found", CODE),
    ("huggingface_hub.errors.GatedRepoError: 401 Client Error. Cannot access gated repo for url https://huggingface.co/x", CODE),
    ("huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the file on the Hub and we cannot find it in the cache.", NETWORK),
    ("OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.", NETWORK),
    ("requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='api.wandb.ai', port=443): Read timed out. (read timeout=20)", NETWORK),
    ("requests.exceptions.ConnectionError: ('Connection aborted.', RemoteDisconnected('Remote end closed connection without response'))", NETWORK),
    ("requests.exceptions.ChunkedEncodingError: ('Connection broken: IncompleteRead(123 bytes read)')", NETWORK),
    ("urllib3.exceptions.ProtocolError: ('Connection broken: ConnectionResetError(104)', ConnectionResetError(104))", NETWORK),
    ("urllib.error.URLError: <urlopen error [Errno 110] Connection timed out>", NETWORK),
    ("httpx.ConnectTimeout: timed out", NETWORK),
    ("aiohttp.client_exceptions.ServerDisconnectedError: Server disconnected", NETWORK),
    ("aiohttp.client_exceptions.ClientResponseError: 502, message='Bad Gateway', url='http://rollout:8000/generate'", NETWORK),
    ("ssl.SSLEOFError: EOF occurred in violation of protocol (_ssl.c:1007)", NETWORK),
    ("ConnectionRefusedError: [Errno 111] Connection refused", NETWORK),
    ("TimeoutError: [Errno 110] Connection timed out", NETWORK),
    ("socket.timeout: timed out", NETWORK),
    ("grpc._channel._InactiveRpcError: <_InactiveRpcError of RPC that terminated with: status = StatusCode.UNAVAILABLE", NETWORK),
    ("redis.exceptions.ConnectionError: Error 113 connecting to 10.0.0.3:6379. No route to host.", NETWORK),
    ("psycopg2.OperationalError: could not connect to server: Connection refused", NETWORK),
    ("wandb.errors.CommError: Network error (HTTPError), entering retry loop.", NETWORK),
    ("openai.RateLimitError: Error code: 429 - {'error': {'message': 'Rate limit reached'}}", NETWORK),
    ("pynvml.NVMLError_GpuIsLost: GPU is lost", GPU),
    ("RuntimeError: synStatus=26 [Generic failure] Device acquire failed.", GPU),
    ("RuntimeError: No HIP GPUs are available", GPU),
    ("RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total capacity)", GPU_MEMORY),
    ("RuntimeError: XPU out of memory. Tried to allocate 512.00 MiB", GPU_MEMORY),
    ("RuntimeError: MPS backend out of memory (MPS allocated: 17.2 GB)", GPU_MEMORY),
    ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.", GPU_MEMORY),
    ("cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 1,073,741,824 bytes", GPU_MEMORY),
    ("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.", HOST_MEMORY),
    ("numpy.core._exceptions._ArrayMemoryError: Unable to allocate 74.5 GiB for an array with shape (100000, 100000)", HOST_MEMORY),
    ("OSError: [Errno 12] Cannot allocate memory", HOST_MEMORY),
    ("OSError: [Errno 28] No space left on device: '/torch_1234_567'", HOST_MEMORY),
    ("OSError: [Errno 28] inotify watch limit reached", CauseClass.NODE),
    ("OSError: [Errno 28] No space left on device: '/data/ckpt/step-100.pt'", STORAGE),
    ("OSError: [Errno 122] Disk quota exceeded", STORAGE),
    ("OSError: [Errno 5] Input/output error", STORAGE),
    ("OSError: [Errno 107] Transport endpoint is not connected: '/mnt/s3/data'", STORAGE),
    ("sqlite3.OperationalError: database is locked", STORAGE),
    ("lmdb.MapFullError: mdb_put: MDB_MAP_FULL: Environment mapsize limit reached", STORAGE),
    ("PIL.UnidentifiedImageError: cannot identify image file <_io.BytesIO object at 0x7f>", DATA),
    ("pyarrow.lib.ArrowInvalid: Parquet magic bytes not found in footer.", DATA),
    ("json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)", DATA),
    ("zipfile.BadZipFile: File is not a zip file", DATA),
    ("gzip.BadGzipFile: Not a gzipped file (b'<!')", DATA),
    ("zlib.error: Error -3 while decompressing data: incorrect header check", DATA),
    ("UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte", DATA),
    ("pandas.errors.ParserError: Error tokenizing data. C error: Expected 3 fields in line 9, saw 4", DATA),
    ("datasets.exceptions.DatasetGenerationError: An error occurred while generating the dataset", DATA),
    ("triton.compiler.errors.CompilationError: at 12:5: unsupported operand", CODE),
    ("pydantic_core._pydantic_core.ValidationError: 1 validation error for TrainConfig", CODE),
]  # fmt: skip


def read(line: str, traceback: str = LIBRARY) -> ExceptionReading:
    name, _, message = line.partition(": ")
    return exception_causes.read(name, message, f"{traceback}{line}")


@pytest.mark.parametrize(("line", "cause"), STATED)
def test_a_library_states_the_cause_and_proves_nothing(line: str, cause: CauseClass) -> None:
    """Class, error number, HTTP status or words name the cause; none of them excludes another reading."""
    reading = read(line)
    assert (reading.cause, reading.is_proof, reading.is_guess) == (cause, False, False)


@pytest.mark.parametrize(
    "line",
    [
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.",
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
    assert read(line, traceback) == ExceptionReading(CODE, is_proof=True)


@pytest.mark.parametrize(
    ("line", "traceback"),
    [
        ("KeyError: 'labels'", LIBRARY),
        ("KeyError: 'text'", OWN.replace("/app/train.py", "/opt/venv/lib/python3.11/site-packages/torch/utils/data/_utils/fetch.py")),
        ("AssertionError: peer is gone", LIBRARY),
        ("ValueError: 17", OWN),
        ("RuntimeError: it went wrong", OWN),
        ("ImportError: libcudart.so.12: cannot open shared object file", OWN),
    ],
)  # fmt: skip
def test_what_may_have_another_reason_is_no_proof(line: str, traceback: str) -> None:
    """The same class in a library, or a class that anything raises."""
    assert not read(line, traceback).is_proof


def test_a_class_that_nobody_knows_is_a_guess() -> None:
    """It says so, and so the verdict is a hint."""
    assert read("acme.tools.FlumError: no flum").is_guess


def test_what_a_wrapper_passes_on_counts() -> None:
    """The exception before it in the chain."""
    inner = f"{LIBRARY}requests.exceptions.ConnectionError: Connection refused"
    chain = f"{inner}\n\nThe above exception was the direct cause of the following exception:\n\n{OWN}"
    assert read("datasets.exceptions.DatasetGenerationError: An error occurred", chain).cause is NETWORK
