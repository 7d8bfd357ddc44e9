"""Who this job is and how it finds its server, from arguments and environment."""

from __future__ import annotations

import pwd
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import trainmedic
from trainmedic.settings import Settings, is_withdrawn, resolve, slurm_job


def settled(environment: dict[str, str], **given: object) -> Settings:
    asked = {"job": "llm-1", "redis_url": None, "signing_key": None, "rank": None, "world_size": None, **given}
    return resolve(**asked, environment=environment)  # type: ignore[arg-type]


def keys_of(settings: Settings) -> list[bytes]:
    assert settings.read_keys is not None
    return list(settings.read_keys())


def test_arguments_win_over_the_environment() -> None:
    """For each of them."""
    environment = {
        "TRAINMEDIC_JOB": "other",
        "TRAINMEDIC_REDIS_URL": "redis://other",
        "TRAINMEDIC_SIGNING_KEY": "other",
        "RANK": "3",
        "WORLD_SIZE": "4",
    }
    found = settled(environment, redis_url="redis://mine", signing_key="mine", rank=1, world_size=2)
    assert (found.job, found.find_url(), keys_of(found)) == ("llm-1", "redis://mine", [b"mine"])
    assert (found.rank, found.world_size) == (1, 2)
    found = settled(environment, job=None)
    assert (found.job, found.find_url(), keys_of(found)) == ("other", "redis://other", [b"other"])
    assert (found.rank, found.world_size) == (3, 4)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "8", "SLURM_PROCID": "5", "SLURM_NTASKS": "6"}, (2, 8)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "6"}, (5, 6)),
        ({"RANK": "4"}, (4, 5)),
    ],
)
def test_the_launcher_says_the_rank(environment: dict[str, str], expected: tuple[int, int]) -> None:
    """torchrun before Open MPI before Slurm, and one process where nobody says anything."""
    found = settled(environment)
    assert (found.rank, found.world_size) == expected


def test_without_a_url_the_state_directory_is_asked_each_time(tmp_path: Path) -> None:
    """The server may come later, or come back at another address."""
    found = settled({"TRAINMEDIC_STATE_DIR": str(tmp_path)})
    assert found.find_url() is None
    (tmp_path / "redis.url").write_text("redis://:x@127.0.0.1:1/0\n")
    assert found.find_url() == "redis://:x@127.0.0.1:1/0"
    assert settled({"HOME": "/home/me"}).url_file == Path("/home/me/.local/state/trainmedic/redis.url")


def test_a_user_without_a_home_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under any user ID."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError("uid not found")))
    found = settled({"TRAINMEDIC_REDIS_URL": "redis://127.0.0.1:1"})
    assert found.find_url() == "redis://127.0.0.1:1"
    assert found.url_file.is_absolute()


def test_the_key_may_be_in_a_file(tmp_path: Path) -> None:
    """Without the line end that is always there."""
    path = tmp_path / "key"
    path.write_text("secret\n")
    assert keys_of(settled({"TRAINMEDIC_SIGNING_KEY_FILE": str(path)})) == [b"secret"]


def test_a_previous_key_counts_beside_the_key(tmp_path: Path) -> None:
    """And both are read anew each time, because a file can be replaced while the job runs."""
    path = tmp_path / "key"
    path.write_text("first\n")
    read_keys = settled({"TRAINMEDIC_SIGNING_KEY_FILE": str(path), "TRAINMEDIC_PREVIOUS_SIGNING_KEY": "old"}).read_keys
    assert read_keys is not None
    assert read_keys() == [b"first", b"old"]
    path.write_text("second\n")
    assert read_keys() == [b"second", b"old"]


@pytest.mark.parametrize("withdrawn", ["deleted", "emptied"])
def test_a_previous_key_is_withdrawn_by_its_file(tmp_path: Path, withdrawn: str) -> None:
    """While the job runs, and the key itself can be exchanged again afterwards."""
    key, previous = tmp_path / "key", tmp_path / "previous"
    key.write_text("new")
    previous.write_text("old")
    files = {"TRAINMEDIC_SIGNING_KEY_FILE": str(key), "TRAINMEDIC_PREVIOUS_SIGNING_KEY_FILE": str(previous)}
    read_keys = settled(files).read_keys
    assert read_keys is not None
    assert read_keys() == [b"new", b"old"]
    if withdrawn == "deleted":
        previous.unlink()
    else:
        previous.write_text("\n")
    assert read_keys() == [b"new"]


@pytest.mark.parametrize(
    ("environment", "given", "named"),
    [
        ({}, {"job": None}, "TRAINMEDIC_JOB"),
        ({}, {"job": "two words"}, "without spaces"),
        ({}, {"job": "llm-1\n"}, "without spaces"),
        ({}, {"job": ""}, "name"),
        ({}, {"job": 7}, "name"),
        ({}, {"rank": 2, "world_size": 2}, "rank 2"),
        ({}, {"rank": -1}, "rank -1"),
        ({}, {"rank": "0"}, "rank is '0'; it is a whole number"),
        ({}, {"world_size": 2.0}, "world_size is 2.0; it is a whole number"),
        ({"RANK": "first"}, {}, "RANK"),
        ({}, {"signing_key": " "}, "empty"),
        ({}, {"signing_key": 7}, "text or bytes, not int"),
        ({"TRAINMEDIC_SIGNING_KEY_FILE": "/nowhere/key"}, {}, "/nowhere/key"),
        ({"TRAINMEDIC_PREVIOUS_SIGNING_KEY": "old"}, {}, "TRAINMEDIC_SIGNING_KEY is not"),
        (
            {"TRAINMEDIC_SIGNING_KEY": "new", "TRAINMEDIC_PREVIOUS_SIGNING_KEY_FILE": f"/{'k' * 300}"},
            {},
            "cannot read the signing key /k",
        ),
    ],
)
def test_what_cannot_be_is_told_before_the_training_begins(
    environment: dict[str, str], given: dict[str, object], named: str
) -> None:
    """As a ConfigurationError that names it, and never shows a password."""
    with pytest.raises(trainmedic.ConfigurationError, match=named) as caught:
        settled(environment, **given)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"hang_floor": 0},
        {"hang_floor": "60"},
        {"startup_floor": float("nan")},
        {"metrics_port": "9108"},
        {"layer_norms": -1},
        {"largest_lr_scale": 0.5},
        {"largest_lr_scale": "4"},
        {"capabilities": {"job.pause": "sometimes"}},
    ],
)
def test_so_is_an_option_that_cannot_be(options: dict[str, Any]) -> None:
    """Before anything is connected."""
    (name,) = options
    with pytest.raises(trainmedic.ConfigurationError, match=rf"^{name}(:| is )"):
        trainmedic.connect(job="llm-1", redis_url="redis://127.0.0.1:1", rank=0, world_size=1, **options)


@pytest.mark.parametrize("variable", ["TRAINMEDIC_JOB", "TRAINMEDIC_NODE"])
def test_a_name_that_is_not_utf_8_is_refused(variable: str) -> None:
    """No message can hold it: each one would fail, for as long as the job runs."""
    environment = {"TRAINMEDIC_JOB": "llm-1", variable: b"n\xff".decode("utf-8", "surrogateescape")}
    with pytest.raises(trainmedic.ConfigurationError, match=f"{variable} is not UTF-8"):
        settled(environment, job=None)


def test_a_key_need_not_be_utf_8() -> None:
    """A variable holds bytes, as a file does."""
    key = b"\xff\xfe key \x80"
    settings = settled({"TRAINMEDIC_SIGNING_KEY": key.decode("utf-8", "surrogateescape")})
    assert keys_of(settings) == [key]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "x"}, None),
        ({"SLURM_JOB_ID": "4711"}, {"job_id": "4711", "restarts": 0}),
        (
            {
                "SLURM_JOB_ID": "4714",
                "SLURM_ARRAY_JOB_ID": "4711",
                "SLURM_JOB_NAME": "llm",
                "SLURMD_NODENAME": "n7",
                "SLURM_RESTART_COUNT": "2",
            },
            {"job_id": "4714", "name": "llm", "node": "n7", "restarts": 2},
        ),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "\udcff"}, {"job_id": "1", "restarts": 0}),
    ],
)
def test_a_slurm_job_is_told_by_its_environment(
    environment: dict[str, str], expected: dict[str, str | int] | None
) -> None:
    """The id is a task's own, not its array's. A name that is not UTF-8 is left out."""
    assert slurm_job(environment) == expected


def test_a_previous_key_that_cannot_be_read_is_no_withdrawn_one(tmp_path: Path) -> None:
    """Such as one at a link that leads to itself."""
    path = tmp_path / "previous"
    path.symlink_to(path)
    assert not is_withdrawn(str(path))
    assert is_withdrawn(str(tmp_path / "gone"))
