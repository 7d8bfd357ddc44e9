"""Settings of a job: the arguments of `connect`, else the environment."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Callable, Mapping, Sequence

from trainmedic.errors import ConfigurationError

# Variables with rank and world size of torchrun and most launchers, Open MPI, Slurm. The first rank that is set counts.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
# Variables with local rank, node rank and attempt.
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_NODE_RANKS = ("GROUP_RANK", "OMPI_COMM_WORLD_NODE_RANK", "SLURM_NODEID")
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
ATTEMPT = "TRAINMEDIC_ATTEMPT"
LOG_DIR = "TRAINMEDIC_LOG_DIR"
_JOB = re.compile(r"^[^\s\x00-\x1f\x7f]{1,253}\Z")
_NOT_UTF_8 = re.compile("[\ud800-\udfff]")
URL_FILE = "redis.url"


@dataclass(frozen=True)
class Settings:
    job: str
    rank: int
    world_size: int
    # Returns the signing key, then the previous one; may raise ConfigurationError. None without a key.
    read_keys: Callable[[], Sequence[bytes]] | None
    redis_url: str | None
    url_file: Path  # with the URL of a server of the same user; read without ``redis_url``
    url_origin: str = "TRAINMEDIC_REDIS_URL"  # name for error messages

    def find_url(self) -> str | None:
        return self.redis_url if self.redis_url is not None else read_url(self.url_file)


@dataclass(frozen=True)
class LogSettings:
    log_dir: Path
    attempt: int  # from 1
    local_rank: int | None  # None if the launcher does not state it; also below
    node_rank: int | None
    interval: int  # steps between two records


def resolve_logs(
    log_dir: str | os.PathLike[str] | None, interval: int, environment: Mapping[str, str] | None = None
) -> LogSettings | None:
    """Return None without a directory. Raises ConfigurationError."""
    env = os.environ if environment is None else environment
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise ConfigurationError(f"log_interval is {interval!r}; it is a whole number of steps, 1 or more")
    directory = os.fspath(log_dir) if log_dir is not None else env.get(LOG_DIR, "")
    if not directory:
        return None
    attempt = _first_number(env, (ATTEMPT,))
    if attempt is None:
        attempt = 1 + (_first_number(env, _RESTARTS) or 0)
    local_rank, node_rank = _first_number(env, _LOCAL_RANKS), _first_number(env, _NODE_RANKS)
    return LogSettings(Path(directory).absolute(), max(attempt, 1), local_rank, node_rank, interval)


def slurm_job(env: Mapping[str, str]) -> dict[str, str | int] | None:
    job_id = env.get("SLURM_JOB_ID", "")
    if not (job_id.isascii() and job_id.isdecimal()):
        return None
    names = {"name": env.get("SLURM_JOB_NAME", ""), "node": env.get("SLURMD_NODENAME", "")}
    texts = {key: value for key, value in names.items() if value and not _NOT_UTF_8.search(value)}
    return {"job_id": job_id, **texts, "restarts": _first_number(env, ("SLURM_RESTART_COUNT",)) or 0}


def _first_number(env: Mapping[str, str], variables: Sequence[str]) -> int | None:
    return next((int(env[name]) for name in variables if env.get(name, "").isdecimal()), None)


def read_url(file: Path) -> str | None:
    try:
        return file.read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def resolve(
    job: str | None,
    redis_url: str | None,
    signing_key: str | bytes | None,
    rank: int | None,
    world_size: int | None,
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Return the settings. Raises ConfigurationError, whose text shows no key."""
    env = os.environ if environment is None else environment
    name = job if job is not None else env.get("TRAINMEDIC_JOB", "")
    if not isinstance(name, str) or not _JOB.match(name):
        raise ConfigurationError(
            "a job needs a name, the one that its alerts carry as job_name, without spaces: "
            'connect(job="llm-1"), or the variable TRAINMEDIC_JOB'
        )
    for variable, value in (("TRAINMEDIC_JOB", name), ("TRAINMEDIC_NODE", env.get("TRAINMEDIC_NODE", ""))):
        if _NOT_UTF_8.search(value):  # Python decodes such bytes of the environment to surrogates
            raise ConfigurationError(f"{variable} is not UTF-8; use a UTF-8 name")
    url = redis_url or env.get("TRAINMEDIC_REDIS_URL") or None
    url_origin = "redis_url" if redis_url else "TRAINMEDIC_REDIS_URL"
    for option, number in (("rank", rank), ("world_size", world_size)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, Integral)):
            raise ConfigurationError(f"{option} is {number!r}; it is a whole number")
    launched_rank, launched_size = _ranks(env)
    my_rank = launched_rank if rank is None else rank
    size = world_size if world_size is not None else max(launched_size, my_rank + 1)
    if not 0 <= my_rank < size:
        raise ConfigurationError(f"rank {my_rank} does not exist in a world of {size}")
    state = Path(env.get("TRAINMEDIC_STATE_DIR") or _home(env) / ".local/state/trainmedic")
    return Settings(name, my_rank, size, key_reader(signing_key, env), url, state / URL_FILE, url_origin)


def _ranks(env: Mapping[str, str]) -> tuple[int, int]:
    for rank, size in _LAUNCHERS:
        if rank in env:
            try:
                return int(env[rank]), int(env.get(size) or 1)
            except ValueError as error:
                raise ConfigurationError(f"{rank} or {size} is not a whole number") from error
    return 0, 1


def key_reader(argument: str | bytes | None, env: Mapping[str, str]) -> Callable[[], Sequence[bytes]] | None:
    """Return `Settings.read_keys`; None without a key. Both raise ConfigurationError."""

    def read_keys() -> list[bytes]:
        keys = _read_key("TRAINMEDIC_SIGNING_KEY", argument, env), _previous_key(env)
        if keys[0] is None and keys[1] is not None:
            raise ConfigurationError("TRAINMEDIC_PREVIOUS_SIGNING_KEY is set, and TRAINMEDIC_SIGNING_KEY is not")
        return [key for key in keys if key is not None]

    return read_keys if read_keys() else None


def _previous_key(env: Mapping[str, str]) -> bytes | None:
    """Return the key that is still accepted, unless withdrawn."""
    variable = "TRAINMEDIC_PREVIOUS_SIGNING_KEY"
    path = env.get(f"{variable}_FILE")
    if env.get(variable):
        return _read_key(variable, None, env)
    if not path or is_withdrawn(path):
        return None
    return _read_key(variable, None, {f"{variable}_FILE": path})


def is_withdrawn(path: str) -> bool:
    """Return whether the file is empty or gone."""
    try:
        return not _key_file(path).read_bytes().strip()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False  # reading it reports the error


def _home(env: Mapping[str, str]) -> Path:
    try:
        return Path(env.get("HOME") or Path.home())
    except RuntimeError:  # the user is unknown
        return Path("/")  # as in containers; a relative path would depend on the working directory


def _key_file(path: str) -> Path:
    return Path(os.path.expanduser(path))  # noqa: PTH111 - it raises nothing for an unknown user


def _read_key(variable: str, argument: str | bytes | None, env: Mapping[str, str]) -> bytes | None:
    key = argument
    if key is None:
        key = env.get(variable)
    path = env.get(f"{variable}_FILE")
    if key is None and path:
        try:
            key = _key_file(path).read_bytes()
        except OSError as error:
            raise ConfigurationError(
                f"{variable}_FILE: cannot read the signing key {path}: {error.strerror}; "
                f"name a file that user {os.geteuid()} can read"
            ) from error
    if key is None:
        return None
    if not isinstance(key, (str, bytes)):
        raise ConfigurationError(f"the signing key must be text or bytes, not {type(key).__name__}")
    # Variables hold bytes, which need not be UTF-8.
    raw = (key.encode("utf-8", "surrogateescape") if isinstance(key, str) else key).strip()
    if not raw:
        raise ConfigurationError("the signing key is empty; omit it to run without one")
    return raw
