"""Cause by an exception's message: error numbers, HTTP status, signals, device words."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping, Sequence

from trainmedic_logs.domain.finding import CauseClass

_ERRNO = re.compile(r"\[Errno (-?\d{1,3})\]|\(os error (\d{1,3})\)|\berrno[:= ]{1,2}(\d{1,3})\b")
_ERRNO_NAME = re.compile(r"\bE[A-Z]{2,14}\b")  # Programs on libuv print the name, such as ``EADDRINUSE``.
_ERRNO_BY_NAME = {name: number for number, name in errno.errorcode.items()}
# Linux's numbers, and getaddrinfo's negative ones.
_BY_ERRNO: Mapping[int, CauseClass] = {
    5: CauseClass.STORAGE,  # EIO
    11: CauseClass.NODE,  # EAGAIN: cannot create a process or thread
    12: CauseClass.HOST_MEMORY,  # ENOMEM
    16: CauseClass.STORAGE,  # EBUSY of a network file system
    19: CauseClass.NODE,  # ENODEV
    23: CauseClass.NODE,  # ENFILE
    24: CauseClass.NODE,  # EMFILE: limit of open files
    27: CauseClass.STORAGE,  # EFBIG
    28: CauseClass.STORAGE,  # ENOSPC
    30: CauseClass.STORAGE,  # EROFS
    31: CauseClass.STORAGE,  # EMLINK: a directory's limit
    37: CauseClass.STORAGE,  # ENOLCK
    61: CauseClass.STORAGE,  # ENODATA
    **dict.fromkeys((62, 64), CauseClass.NETWORK),  # ETIME, ENONET
    67: CauseClass.STORAGE,  # ENOLINK
    70: CauseClass.STORAGE,  # ECOMM
    71: CauseClass.NETWORK,  # EPROTO
    74: CauseClass.STORAGE,  # EBADMSG: ext4's and XFS's wrong checksum
    **dict.fromkeys((100, 101, 102, 103, 104, 110, 111, 112, 113), CauseClass.NETWORK),  # ENETDOWN to EHOSTUNREACH
    98: CauseClass.CODE,  # EADDRINUSE
    99: CauseClass.NETWORK,  # EADDRNOTAVAIL
    105: CauseClass.NODE,  # ENOBUFS
    107: CauseClass.STORAGE,  # ENOTCONN of a FUSE mount
    108: CauseClass.STORAGE,  # ESHUTDOWN
    116: CauseClass.STORAGE,  # ESTALE
    117: CauseClass.STORAGE,  # EUCLEAN
    121: CauseClass.STORAGE,  # EREMOTEIO
    **dict.fromkeys((122, 123, 124), CauseClass.STORAGE),  # EDQUOT, ENOMEDIUM, EMEDIUMTYPE
    **dict.fromkeys((126, 127, 128, 129), CauseClass.STORAGE),  # keys of encrypted disks and Kerberos mounts
    133: CauseClass.NODE,  # EHWPOISON
    512: CauseClass.STORAGE,  # ERESTARTSYS of NFS and Lustre
    524: CauseClass.STORAGE,  # ENOTSUPP of NFS and Lustre
    **dict.fromkeys((-2, -3, -5), CauseClass.NETWORK),  # getaddrinfo
}
# glibc's texts of errors whose number is not printed, at the end of a message. Others are in `_BY_WORDS`.
_BY_STRERROR: Mapping[str, int] = {
    "Resource temporarily unavailable": 11, "Device or resource busy": 16, "No such device": 19,
    "Too many open files in system": 23, "File too large": 27, "Too many links": 31, "No locks available": 37,
    "No data available": 61, "Link has been severed": 67, "Communication error on send": 70, "Protocol error": 71,
    "Bad message": 74, "Address already in use": 98, "Cannot assign requested address": 99, "Network is down": 100,
    "Network dropped connection on reset": 102, "Software caused connection abort": 103,
    "No buffer space available": 105, "Transport endpoint is not connected": 107,
    "Cannot send after transport endpoint shutdown": 108, "Host is down": 112, "Structure needs cleaning": 117,
    "Remote I/O error": 121, "No medium found": 123, "Required key not available": 126,
    "Memory page has hardware error": 133,
}  # fmt: skip
_STRERROR = re.compile(rf"(?:^|[:=] |\b(?:with|error|due to) |\()({'|'.join(_BY_STRERROR)})[.)]?\s*$")
_WINDOWS_ERROR = re.compile(r"\[WinError (\d{1,5})\]|\(os error (1\d{3}|100\d\d)\)")
# Windows' numbers, without those of a program's own calls, such as a missing file.
_BY_WINDOWS_ERROR: Mapping[int, CauseClass] = {
    **dict.fromkeys((8, 14, 1455), CauseClass.HOST_MEMORY),  # memory, page file
    **dict.fromkeys((19, 21, 23, 39, 112, 483, 1006, 1110, 1117, 1167, 1392, 1393), CauseClass.STORAGE),
    **dict.fromkeys((51, 53, 55, 59, 64, 67, 121, 1231, 1232, 1236), CauseClass.NETWORK),  # shares
    **dict.fromkeys((10050, 10051, 10052, 10053, 10054, 10060, 10061, 10064, 10065, 11001), CauseClass.NETWORK),
    **dict.fromkeys((1450, 10024, 10055), CauseClass.NODE),  # system resources
}
# Causes of errors that are given by name (``EBUSY``) without a path: sockets and devices report these too.
_WITHOUT_FILE = {16: None, 107: CauseClass.NETWORK, 108: CauseClass.NETWORK}
# Errors of Linux that a program's own call causes, such as a wrong path or argument.
_OF_CALLS = frozenset(
    (1, 2, 3, 7, 8, 9, 10, 13, 14, 17, 18, 20, 21, 22, 25, 26, 29, 33, 34, 35, 36, 38, 39, 40, 75, *range(88, 98))
)
_REFUSED = re.compile(r"\[Errno 61\] Connection refused")
_QUOTES_A_PATH = re.compile(r"['\"]/")
_NAMES_A_FILE = re.compile(r"\[Errno \d+\] [^:]{3,60}: b?['\"]/|unable to lock file")
_OF_MACHINE = re.compile(r"\[Errno (?:2[34]|105|133)\]|[Tt]oo many open files")
_SQL_ERRORS = re.compile(r"^(?:no such (?:table|column|function)|near \"|\w+ \w+ already exists|table \S+ has)")
_NPU_CODE = re.compile(r"\berror code(?: is|[:=]) ?(\d{6})\b")
# Error codes of Ascend's runtime (``acl/error_codes``).
_BY_NPU_CODE: Mapping[int, CauseClass] = {
    207001: CauseClass.GPU_MEMORY,
    207018: CauseClass.GPU_MEMORY,
    507010: CauseClass.GPU,  # task scheduler heartbeat lost
    507033: CauseClass.GPU,  # device initialisation failed
    **dict.fromkeys((507053, 507054, 507055), CauseClass.GPU),  # device memory errors
    507056: CauseClass.NETWORK,  # link errors between devices
    507057: CauseClass.NETWORK,
}
NPU_TIMEOUTS = re.compile(r"\berror code(?: is|[:=]) ?(?:107020|50704[678])\b")
_STATUS = re.compile(
    r"\b(?P<a>[45]\d\d) (?:Client|Server) Error\b|\bHTTP(?:/\d(?:\.\d)?)?(?: [Ee]rror)?:? (?P<b>[45]\d\d)\b"
    r"|\bstatus(?:[ _]?code)?(?: of)?[:= ',\"]{1,5}(?P<c>[45]\d\d)\b"
    r"|^\((?P<i>[45]\d\d)\)\s*$|^\(?(?P<d>[45]\d\d)\)?,? (?:Reason|[A-Z][a-z]+ ?[A-Z(:]|(?:GET|PUT|POST|HEAD"
    r"|PATCH|DELETE) )"
    r"|\bError code: (?P<e>[45]\d\d)\b|^(?P<f>[45]\d\d)(?:,|:) |\((?P<g>[45]\d\d)\) when calling"
    r"|\bHTTPStatusCode[\"': ]+(?P<h>[45]\d\d)|\b[A-Z][a-z]+, (?P<j>[45]\d\d)\s*$"
)
_STORE_NAMES = re.compile(
    r"(?i)\bboto|\bazure\.|s3fs|gcsfs|adlfs|fsspec|google\.cloud\.storage|google\.resumable_media|storage\.googleapis"
    r"|azure\.storage|minio|\boss2?\b"
    r"|\bs3\b|\bs3:/|\bgs:/|\bbucket|amazonaws\.com|blob\.core\.windows|PutObject|GetObject|HeadObject"
    r"|MultipartUpload|UploadPart"
)
_STORE_ANSWERS = re.compile(
    r"\((?:SlowDown|ServiceUnavailable|InternalError|RequestTimeout|503|500|Throttling\w*|OperationAborted)\)"
    r"|\bSlowDown\b|[Rr]educe your request rate|rate limit for object mutation|ServerBusy|OperationTimedOut"
    r"|[Ss]erver is (?:currently )?busy|could not be completed within the specified time"
    r"|(?:encountered|experienced) an internal error"
    r"|AWS Error (?:NETWORK_CONNECTION|SLOW_DOWN|SERVICE_UNAVAILABLE|INTERNAL_FAILURE|REQUEST_TIMEOUT|THROTTLING)"
)
_STORE_REFUSES = re.compile(
    r"\((?:AccessDenied|403|ExpiredToken|InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|NoSuch\w+"
    r"|InvalidBucketName|404|401)\)|[Ff]ailed to authenticate the request"
    r"|AWS Error (?:ACCESS_DENIED|NO_SUCH_\w+|INVALID_\w+|UNRECOGNIZED_CLIENT|SIGNATURE_DOES_NOT_MATCH|REQUEST_EXPIRED)"
)
_GRPC = re.compile(
    r"StatusCode\.(UNAVAILABLE|DEADLINE_EXCEEDED)|^(?:UNAVAILABLE|DEADLINE_EXCEEDED): |^Deadline exceeded: "
)
_BY_WORDS: Sequence[tuple[re.Pattern[str], CauseClass]] = (
    (re.compile(r"[Dd]evice already acquired|already in use by another process"), CauseClass.NODE),
    (
        re.compile(
            r"\b(?:MPS backend|[Dd]evice|(?!CPU\b|RAM\b)[A-Z]{3,4})\b.{0,20}out of memory"
            r"|[Oo]ut of (?:HBM|GPU|[Dd]evice|VRAM) memory|CUBLAS_STATUS_ALLOC_FAILED|CUDA_ERROR_OUT_OF_MEMORY"
            r"|RESOURCE_EXHAUSTED: (?:.*[Oo]ut of memory|.*allocat|.*[Rr]an out of memory|.*hbm|.*bottom of memory)"
            r"|[Rr]an out of memory in memory space|\bOOM: |[Aa]llocation failed for size"
            r"|No available memory for the cache blocks|^Free memory on device"
            r"|Not enough memory\. Please try to increase"
            r"|is larger than the (?:maximum number of tokens|available KV cache memory)"
            r"|memory to serve at least one request"
            r"|cudaErrorMemoryAllocation|ERROR_OUT_OF_DEVICE_MEMORY|ALLOC_FAILED|workspace allocation failed"
            r"|OOM when allocating tensor.*GPU"
            r"|[Aa]llocation failed:.* device memory|workspace Allocation of size ::\d+ failed"
        ),
        CauseClass.GPU_MEMORY,
    ),
    (
        re.compile(
            r"^(?:Unable to allocate [\d.]+ [KMGTP]iB for an array|std::bad_alloc|.*[Cc]annot allocate memory)"
            r"|_HOST_ALLOCATION_FAILED|unable to (?:write to|resize|allocate shared memory).{0,20} file </torch_"
        ),
        CauseClass.HOST_MEMORY,
    ),
    (
        re.compile(
            r"GPU is lost|[Ff]allen off the bus|[Dd]evice (?:acquire|acquisition) failed|UR_RESULT_ERROR_DEVICE_LOST"
            r"|uncorrectable (?:ECC|NVLink) error|NVLink error|No (?:HIP|CUDA) GPUs are available|hipErrorNoDevice"
            r"|[Dd]evice(?: \d+)? (?:is |was )?lost\b|No devices match|Failed to acquire device"
            r"|drv[A-Z]\w+ failed|heartbeat lost"
            r"|no CUDA-capable device is detected|HSA_STATUS_ERROR|HW Exception"
            r"|Unable to determine the device handle for GPU"
        ),
        CauseClass.GPU,
    ),
    (
        re.compile(
            r"NVIDIA driver on your system is too old|[Tt]oo many open files|received 0 items of ancdata"
            r"|lib(?:cuda|nvidia-ml|hccl|ascendcl)[\w.-]*\.so[\w.]*: cannot open"
            r"|Driver/library version mismatch|Found no NVIDIA driver|can't start new thread"
            r"|CUDA driver initialization failed|system not yet initialized|\b[Nn]o (?:GPU|NPU|HPU"
            r"|accelerator)s? found"
            r"|^Unable to initialize backend '\w+': (?:UNAVAILABLE|FAILED_PRECONDITION|INTERNAL|UNKNOWN|ABORTED)"
            r"|\bTPU initialization failed"
        ),
        CauseClass.NODE,
    ),
    (
        re.compile(
            r"[Nn]o space left on device|[Dd]isk quota exceeded|[Ii]nput/output error"
            r"|[Ss]tale (?:NFS )?file handle|[Rr]ead-only file system|database is locked"
            r"|disk I/O error|unable to lock file|database or disk is full|[Ll]ocal disk is full"
            r"|Unable to load weights from .*checkpoint"
            r"|enforce fail at inline_container.*(?:unexpected pos|write)|[Nn]ot enough free disk space"
            r"|^\d+ requested and \d+ written$"
        ),
        CauseClass.STORAGE,
    ),
    (
        re.compile(
            r"[Nn]ame or service not known|[Tt]emporary failure in name resolution"
            r"|[Ff]ailed to resolve|nodename nor servname"
            r"|Could not resolve host|[Mm]ax retries exceeded|Read timed out"
            r"|[Cc]onnection (?:refused|reset|aborted|timed out|to .{1,80} timed out|error|closed|brok"
            r"en|was closed)"
            r"|[Nn]etwork is unreachable|[Nn]o route to host|couldn't connect to"
            r"|[Cc]ould not connect to|[Cc]an(?:not|'t) connect to|Unable to connect"
            r"|[Ff]ailed to connect"
            r"|\bconnect\(\) timed out|[Cc]onnection attempts failed|[Cc]onnect call failed"
            r"|[Rr]emote end closed connection|EOF occurred in violation of protocol"
            r"|certificate verify failed|Server disconnected|socket (?:has )?timed out"
            r"|[Tt]oo [Mm]any [Rr]equests|[Pp]eer closed connection|[Cc]annot send a request"
            r"|[Bb]roken pipe"
            r"|[Rr]ate ?limit|[Cc]annot reach|connectFullMesh failed|Couldn't reach|transport error"
            r"|ECONNRESET|Bad Gateway"
            r"|Gateway Time-?out|Service (?:Temporarily )?Unavailable|Internal Server Error"
            r"|IncompleteRead|ReqwestMiddleware|error sending request for url|[Rr]equest failed after \d+ retries"
            r"|file should be of size \d+ but has"
        ),
        CauseClass.NETWORK,
    ),
    (
        re.compile(
            r"unexpected end of data|file signature not found|[Tt]runcated file|truncated"
            r"|did not match any variant of untagged enum"
            r"|\b(?:[Ss]ample|[Rr]ecord)s?(?: index| number)? \S{1,200} (?:is|are|was) (?:not present|missing"
            r"|incomplete|damaged|unreadable|empty)\b"
            r"|file size is 0 bytes|Could not open Parquet"
            r"|mmap length is greater than file size|could not parse ModelProto|[Cc]orrupt|bad magic"
            r"|invalid (?:magic|header)|not a gzip file"
            r"|CRC check|database disk image is malformed|Magic bytes not match|not a zip file|[Ff]ile is not a zip"
            r"|Compressed file ended before|incorrect header check|invalid start byte|Expecting value: line"
        ),
        CauseClass.DATA,
    ),
    (
        re.compile(
            r"(?i:(?:loss(?!y|less)|grad\w*|logits|probability tensor).{0,40}(?:\bnan\b|\binf\b|not finite|non-?finite)"
            r"|\b(?:nan|non-?finite|inf or nan)\b.{0,40}\b(?:loss(?!y|less)|grad\w*|logits))"
            r"|returned nan values in its|probability tensor contains either|found invalid values:.*\bnan\b"
        ),
        CauseClass.NUMERICS,
    ),
    (
        re.compile(r"^(?:INVALID_ARGUMENT|UNIMPLEMENTED|Invalid argument|Unimplemented): |^Weights only load failed"),
        CauseClass.CODE,
    ),
)
_FULL_BUT_NO_DISK: Sequence[tuple[re.Pattern[str], CauseClass]] = (
    (
        re.compile(r"\bdev/shm|(?i:shared_?\s?memory)|/torch_\d+|shm_open|shmget|psm_\w+|[Ss]em_?[Ll]ock|memfd_create"),
        CauseClass.HOST_MEMORY,
    ),
    (
        re.compile(
            r"(?i)inotify|user namespace|namespaces|semaphore|sem_open|cgroup|io_uring|watch(?:es)? limit|unshare"
            r"|CLONE_NEW|add_watch|\bObserver\(|keyctl|add_key|bpf\w*\("
        ),
        CauseClass.NODE,
    ),
)
_NO_SPACE = re.compile(r"[Nn]o space left|\[Errno 28\]|os error 28\b")


def cause_of(name: str, message: str, shown: str = "") -> CauseClass | None:
    """Return the stated cause. `shown`: source of the raising call."""
    if cause := other_than_disk(message, shown):
        return cause
    if name.startswith("sqlite3."):
        return _of_sqlite(message) or _by_words(message)
    if cause := _by_npu_code(message) or _by_windows_error(message):
        return cause
    # Device and memory words are exact. Others, such as "timed out", say less than a store's answer, a status or errno.
    words = _by_words(message, CauseClass.GPU_MEMORY, CauseClass.HOST_MEMORY, CauseClass.GPU, CauseClass.NODE)
    return (
        words or _by_store(name, message) or _by_status(name, message) or _by_errno(name, message) or _by_words(message)
    )


def has_unusual_errno(message: str) -> bool:
    """Return whether it begins with an error number that no program's own call causes."""
    match = re.match(r"\[Errno (\d{1,3})\]", message)
    return match is not None and int(match[1]) not in _OF_CALLS


def is_store(name: str) -> bool:
    return bool(_STORE_NAMES.search(name))


def other_than_disk(message: str, shown: str = "") -> CauseClass | None:
    """Return the cause of "no space left" if it is not a disk."""
    if not _NO_SPACE.search(message):
        return None
    return next((cause for words, cause in _FULL_BUT_NO_DISK if words.search(message) or words.search(shown)), None)


def _of_sqlite(message: str) -> CauseClass | None:
    if _SQL_ERRORS.search(message):
        return CauseClass.CODE
    return CauseClass.STORAGE if "unable to open database" in message else None


def _by_words(message: str, *causes: CauseClass) -> CauseClass | None:
    return next(
        (cause for words, cause in _BY_WORDS if (not causes or cause in causes) and words.search(message)), None
    )


def _by_store(name: str, message: str) -> CauseClass | None:
    if not (_STORE_NAMES.search(name) or _STORE_NAMES.search(message)):
        return None
    if _STORE_REFUSES.search(message):
        return CauseClass.CODE
    return CauseClass.STORAGE if _STORE_ANSWERS.search(message) else None


def _by_status(name: str, message: str) -> CauseClass | None:
    match = _STATUS.search(message)
    if match is None:
        return CauseClass.NETWORK if _GRPC.search(message) else None
    status = int(next(group for group in match.groups() if group))
    if status >= 500 or status in (408, 425, 429):
        return CauseClass.STORAGE if _STORE_NAMES.search(name) or _STORE_NAMES.search(message) else CauseClass.NETWORK
    return CauseClass.CODE  # bad request: refused, or no such object


def _by_errno(name: str, message: str) -> CauseClass | None:
    match = _ERRNO.search(message)
    if match is None:
        # Classes of libraries state more than a text that all share.
        return _by_errno_name(message) or (None if "." in name else _by_strerror(message))
    cause = _BY_ERRNO.get(int(next(group for group in match.groups() if group)))
    if _REFUSED.search(message):  # 61 on BSD and macOS
        return CauseClass.NETWORK
    # With a path, a file system did not answer or refused a lock.
    is_files = cause in (CauseClass.NETWORK, CauseClass.NODE) and bool(_NAMES_A_FILE.search(message))
    is_files = is_files and not _OF_MACHINE.search(message)
    return CauseClass.STORAGE if is_files else cause


def _by_errno_name(message: str) -> CauseClass | None:
    number = next((_ERRNO_BY_NAME[name] for name in _ERRNO_NAME.findall(message) if name in _ERRNO_BY_NAME), 0)
    if number in _WITHOUT_FILE and not _QUOTES_A_PATH.search(message):
        return _WITHOUT_FILE[number]
    return _BY_ERRNO.get(number)


def _by_strerror(message: str) -> CauseClass | None:
    match = _STRERROR.search(message.partition("\n")[0])
    if match is None:
        return None
    number = _BY_STRERROR[match[1]]
    if number in _WITHOUT_FILE and not _QUOTES_A_PATH.search(message):
        return _WITHOUT_FILE[number]
    return _BY_ERRNO[number]


def _by_windows_error(message: str) -> CauseClass | None:
    match = _WINDOWS_ERROR.search(message)
    return _BY_WINDOWS_ERROR.get(int(match[1] or match[2])) if match else None


def _by_npu_code(message: str) -> CauseClass | None:
    match = _NPU_CODE.search(message)
    return _BY_NPU_CODE.get(int(match[1])) if match else None
