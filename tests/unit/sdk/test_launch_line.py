"""Which launcher a command is, and what is added to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmedic.launch import program
from trainmedic.launch.command_line import LaunchLine

LOGS = Path("/logs")


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("torchrun train.py", "torchrun --tee=3 --log-dir=/logs train.py"),
        (
            "/opt/bin/torchrun --standalone t.py --tee 1",
            "/opt/bin/torchrun --tee=3 --log-dir=/logs --standalone t.py --tee 1",
        ),
        (
            "python3 -u -m torch.distributed.run --nnodes 2 t.py",
            "python3 -u -m torch.distributed.run --tee=3 --log-dir=/logs --nnodes 2 t.py",
        ),
        (
            "python -X dev -W ignore -m torch.distributed.run t.py",
            "python -X dev -W ignore -m torch.distributed.run --tee=3 --log-dir=/logs t.py",
        ),
    ],
)
def test_torchrun_is_told_to_keep_the_output_of_each_rank(line: str, changed: str) -> None:
    """It may have any name; options after the script are the script's."""
    assert LaunchLine.of(line.split()).for_attempt(LOGS) == changed.split()


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("torchrun train.py", "torchrun --nnodes=2:4 train.py"),
        ("torchrun --nnodes 2 train.py", "torchrun --nnodes 2 train.py"),
        ("srun python train.py", "srun --exclude=n1,n2 python train.py"),
    ],
)
def test_nodes_are_limited_and_excluded_where_the_launcher_can(line: str, changed: str) -> None:
    """Torchrun does it by its bounds, unless they are given; srun does it by name."""
    assert LaunchLine.of(line.split()).for_attempt(None, ("n1", "n2"), (2, 4)) == changed.split()


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("srun --exclude=n9 python t.py", "srun --exclude=n9,n1 python t.py"),
        ("srun --exclude n[7-9] -n 4 python t.py", "srun --exclude n[7-9],n1 -n 4 python t.py"),
        ("srun --exclud=n9 t", "srun --exclud=n9,n1 t"),
        ("srun -x n9 t", "srun -x n9,n1 t"),
        ("srun -xn9 t", "srun -xn9,n1 t"),
        ("srun -lux n9 t", "srun -lux n9,n1 t"),
        ("srun -x n8 --exclude=n9 t", "srun -x n8 --exclude=n9,n1 t"),
        ("srun --label --exclusive -n 4 -x n9 t -x 3", "srun --label --exclusive -n 4 -x n9,n1 t -x 3"),
        ("srun --label python t.py -x 3 --exclude=4", "srun --exclude=n1 --label python t.py -x 3 --exclude=4"),
        ("srun -K1 -l t --exclude=4", "srun --exclude=n1 -K1 -l t --exclude=4"),
        ("srun -- t -x 3", "srun --exclude=n1 -- t -x 3"),
        ("srun -n1 a -x 3 : -n2 -x n9 b", "srun --exclude=n1 -n1 a -x 3 : -n2 -x n9,n1 b"),
        ("srun --container-image=x --no-container-mount-home --exclude=n9 t", None),
        ("srun --container-writable -x n9 t", None),
        ("srun --container-readonly t --exclude=4", "srun --exclude=n1 --container-readonly t --exclude=4"),
        ("srun --unbuff -n 4 -x n9 t", None),
        ("srun --exclude= t", "srun --exclude=n1 t"),
        ("srun --unbuff t --exclude=4", "srun --exclude=n1 --unbuff t --exclude=4"),
        ("srun --flag-of-a-plugin --exclude=n9 t", None),
        ("srun --odd=1 --exclude=n9 t", None),
        ("srun --exclude=n9 --odd python t --exclude=4", "srun --exclude=n9,n1 --odd python t --exclude=4"),
        ("srun --odd python t.py -x 3", "srun --exclude=n1 --odd python t.py -x 3"),
        ("srun --gpus-per-t 1 --tres-per-task cpu:1 --exclude n9 t", None),
        ("srun --wait 5 --container dir --exclude n9 t", None),
        ("srun -n1 a : -n2 b : -n3 c", "srun --exclude=n1 -n1 a : --exclude=n1 -n2 b : --exclude=n1 -n3 c"),
    ],
)
def test_a_node_stays_excluded_in_addition_to_those_that_the_user_excludes(line: str, changed: str | None) -> None:
    """srun uses only its last --exclude; one after the program is the program's. None: n9 becomes n9,n1."""
    changed = line.replace("n9", "n9,n1") if changed is None else changed
    launch = LaunchLine.of(line.split())
    assert launch.why_no_node_excludable == ""
    assert launch.for_attempt(None, ("n1",)) == changed.split()


@pytest.mark.parametrize("line", ["srun -x /etc/bad t", "srun -n1 a : --exclude=./bad b"])
def test_no_node_is_added_to_a_file_of_excluded_ones(line: str) -> None:
    assert "names a file" in LaunchLine.of(line.split()).why_no_node_excludable


@pytest.mark.parametrize(
    "line",
    [
        "srun --my-plugin-flag python --exclude=4 t.py",
        "srun -n1 --my-plugin-flag=1 --my-plugin-flag value -x n9 t",
        "srun -x n8 --my-plugin-flag python -x 4",
        "srun -n1 a : --my-plugin-flag python -x 4",
    ],
)
def test_an_exclusion_that_may_be_the_programs_is_not_changed(line: str) -> None:
    """The word after an unknown option may be its value or the program."""
    why = LaunchLine.of(line.split()).why_no_node_excludable
    assert "--my-plugin-flag is unknown" in why
    assert "write --my-plugin-flag=VALUE, or put a flag before another option" in why


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nnodes 1 --redirects 3 t.py",
        "torchrun -m --log-dir=/mine pkg.train",
        "accelerate launch train.py",
        "deepspeed --num_gpus 8 train.py",
        "python train.py -m torch.distributed.run",
        "srun python -m torch.distributed.run t.py",
    ],
)
def test_other_commands_are_not_changed(line: str) -> None:
    """This includes a torchrun whose output the user already keeps."""
    assert LaunchLine.of(line.split()).for_attempt(LOGS) == line.split()


@pytest.mark.parametrize(
    ("line", "interpreter"),
    [
        ("/opt/bin/python -m torch.distributed.run t.py", "/opt/bin/python"),
        ("python -O -m torch.distributed.run t.py", None),
        ("python -m torch.distributed.launch t.py", None),
        ("accelerate launch t.py", None),
    ],
)
def test_only_torchrun_can_start_in_a_warm_process(line: str, interpreter: str | None) -> None:
    """The older module passes ``--local-rank`` to the script, and torchrun does not."""
    assert LaunchLine.of(line.split()).interpreter == interpreter


@pytest.mark.parametrize(
    ("line", "restarts"),
    [
        ("torchrun --standalone --max-restarts=3 train.py", True),
        ("python -m torch.distributed.run --max_restarts 3 train.py", True),
        ("torchrun --standalone --max-restarts=0 train.py", False),
        ("torchrun --standalone train.py --max-restarts=3", False),
        ("python train.py --max-restarts=3", False),
    ],
)
def test_torchrun_may_restart_ranks_only_by_its_own_option(line: str, restarts: bool) -> None:
    """Options after the script are the script's."""
    assert LaunchLine.of(line.split()).restarts_ranks is restarts


def test_torchruns_own_variable_may_restart_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The option takes precedence over it."""
    monkeypatch.setenv("PET_MAX_RESTARTS", "2")
    assert LaunchLine.of(["torchrun", "--standalone", "train.py"]).restarts_ranks
    assert not LaunchLine.of(["torchrun", "--max-restarts=0", "train.py"]).restarts_ranks


@pytest.mark.parametrize(
    ("line", "is_one_of_several"),
    [
        ("torchrun train.py", False),
        ("torchrun --nnodes=1 train.py", False),
        ("torchrun --nnodes 1 train.py", False),
        ("torchrun --nnodes 1:1 --rdzv-backend c10d train.py", False),
        ("torchrun --nnodes 2 train.py", True),
        ("torchrun --nnodes=1:4 train.py", True),
        ("torchrun --nnodes 2 train.py --nnodes=1", True),
        ("python train.py --nnodes 2", False),
    ],
)
def test_several_nodes_are_recognized_by_torchruns_option(line: str, is_one_of_several: bool) -> None:
    """It is written as one word or as two; options after the script are the script's."""
    assert LaunchLine.of(line.split()).is_one_of_several is is_one_of_several


def test_torchrun_also_reads_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator for Kubernetes sets them; options take precedence."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "8")
    line = LaunchLine.of(["torchrun", "train.py"])
    assert line.is_one_of_several
    assert line.threads == "1"
    given = LaunchLine.of(["torchrun", "--nnodes", "1", "--nproc-per-node", "1", "train.py"])
    assert not given.is_one_of_several
    assert given.threads == ""
    assert not LaunchLine.of(["python", "train.py"]).is_one_of_several


@pytest.mark.parametrize(
    ("line", "threads"),
    [
        ("torchrun train.py", ""),
        ("torchrun --nproc-per-node 1 train.py", ""),
        ("torchrun --nproc_per_node=8 train.py", "1"),
        ("torchrun --nproc-per-node gpu train.py", "1"),
        ("torchrun train.py --nproc-per-node 8", ""),
    ],
)
def test_a_warm_process_has_torchruns_thread_count(line: str, threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has one thread if there are several ranks."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert LaunchLine.of(line.split()).threads == threads


@pytest.mark.parametrize(
    ("line", "stores"),
    [
        ("torchrun --standalone -- train.py --log-dir out", True),
        ("torchrun --virtual-local-rank train.py --log-dir out", True),
        ("python -m torch.distributed.launch --use_env train.py --log-dir out", True),
        ("torchrun -r3 train.py", False),
        ("torchrun -t3 --nnodes 2 train.py", False),
    ],
)
def test_the_scripts_options_are_distinguished_from_torchruns(line: str, stores: bool) -> None:
    """They come after ``--`` or after flags; a short option may have its value in the same word."""
    assert LaunchLine.of(line.split()).can_store_ranks is stores
    assert LaunchLine.of(line.split()).is_one_of_several is ("--nnodes" in line)


@pytest.mark.parametrize(
    ("options", "bounds"),
    [([], None), (["--max-nodes=4"], (1, 4)), (["--min-nodes=2", "--max-nodes=4"], (2, 4))],
)
def test_the_bounds_of_an_elastic_job_are_read(options: list[str], bounds: tuple[int, int] | None) -> None:
    """The minimum is one node by default."""
    assert program._bounds(program.parser().parse_args(options), LaunchLine.of(["torchrun", "t.py"])) == bounds


@pytest.mark.parametrize("options", [["--min-nodes=0", "--max-nodes=2"], ["--min-nodes=3", "--max-nodes=2"]])
def test_invalid_bounds_are_rejected(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """No nodes at all are rejected too."""
    with pytest.raises(SystemExit):
        program._bounds(program.parser().parse_args(options), LaunchLine.of(["torchrun", "t.py"]))
    assert "--min-nodes, which must be 1 or more" in capsys.readouterr().err
