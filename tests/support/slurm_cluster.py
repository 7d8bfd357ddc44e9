"""A real Slurm cluster on the loopback: munged, slurmctld, the slurmd of three nodes, and slurmrestd.

The programs come from a root directory that ``scripts/fetch-slurm`` made, and run in it (chroot) with mounts of their
own. So starting a cluster needs root. This machine's files are under /srv there. Processes are tracked by /proc instead
of cgroups.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import pytest

from tests.support.programs import ROOT, Program, eventually, free_port

RELEASES = {"24.11": "trixie", "26.05": "forky"}
"""The suite of Debian that has each release."""
NODES = ("n1", "n2", "n3")
STANDBY = "standby"
WITH_STANDBY = f"""
SlurmctldHost={STANDBY}(127.0.0.2)
SlurmctldTimeout=10
CommunicationParameters=NoCtldInAddrAny
"""
"""Settings of a cluster with a second controller, which takes over when the first is silent for 10 s."""
_ENTER = """
root=$1 work=$2; shift 2
mount --rbind / "$root/srv"
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --bind "$work" "$root/mnt"
: >>"$root/etc/hosts"
mount --bind "$work/hosts" "$root/etc/hosts"
mount --bind /dev/null "$root/etc/resolv.conf"
if [ -n "${STANDBY:-}" ]; then
    hostname "$STANDBY"
    mount --bind "$work/standby.pid" "$root/mnt/slurmctld.pid"
fi
exec chroot $CHROOT_OPTIONS "$root" "$@"
"""
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket=/mnt/munge.socket
CredType=cred/munge
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key=/mnt/jwt.key
StateSaveLocation=/mnt/state
SlurmdSpoolDir=/mnt/spool/%n
SlurmctldPidFile=/mnt/slurmctld.pid
SlurmdPidFile=/mnt/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
ReturnToService=1
SchedulerParameters=sched_interval=1,bf_interval=1
KillWait=2
MessageTimeout=20
"""


def fetched(release: str) -> Path:
    """The root directory with this release; installs it if it is not there. Skips the test without root."""
    if os.geteuid() != 0:
        pytest.skip("needs root: Slurm runs in a root directory and with mounts of its own")
    done = subprocess.run([ROOT / "scripts" / "fetch-slurm", RELEASES[release]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


class SlurmCluster:
    """One cluster. Entering it starts all of its programs, leaving it ends them."""

    def __init__(self, root: Path, work: Path, settings: str = "", scripts: Path | None = None, gpus: int = 0) -> None:
        """`settings` are further lines of slurm.conf. The programs see a copy of `scripts` as /mnt/scripts. Each node
        has `gpus` GPUs, which are null devices, and the feature h100 if there are any.
        """
        self._root = root
        self._settings = settings
        self._scripts = scripts
        self._gpus = gpus
        self.work = work
        """Its files, which its programs see as /mnt."""
        self.rest_port = free_port()
        self.controller_port = free_port()
        self.token_file = work / "token"
        self.programs: dict[str, Program] = {}

    def __enter__(self) -> Self:
        self.work.mkdir(parents=True)
        self.work.chmod(0o755)
        try:
            self._configure()
            self._start_all()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def rest_url(self) -> str:
        return f"http://127.0.0.1:{self.rest_port}"

    @property
    def socket_url(self) -> str:
        """The URL of slurmrestd's UNIX socket."""
        return f"unix://{self.work}/run/slurmrestd.socket"

    @property
    def is_old(self) -> bool:
        """Whether it is 24.11, which writes the address of a socket otherwise."""
        return self._root.name.endswith(RELEASES["24.11"])

    def run(self, *argv: str) -> str:
        """Run a command of Slurm's as root, and return its output."""
        done = self._ask(*argv)
        assert done.returncode == 0, f"{argv}: {done.stderr or done.stdout}"
        return done.stdout

    def _ask(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.entering(*argv), env=self._environment(), capture_output=True, text=True)

    def shown(self, *what: str) -> str | None:
        """What scontrol shows of a node or job; None if it fails."""
        done = self._ask("scontrol", "show", *what)
        return done.stdout if done.returncode == 0 else None

    def submit(self, script: str, *options: str) -> str:
        """Submit a batch job; return its id."""
        return self.run("sbatch", "--parsable", "-o", "/dev/null", *options, "--wrap", script).strip()

    def renew_token(self, lifespan: int = 3600) -> None:
        """Write a token of root's that is valid for `lifespan` seconds to the token file."""
        self.token_file.write_text(self.run("scontrol", "token", f"lifespan={lifespan}", "username=root"))

    def start_controller(self) -> None:
        self._start("slurmctld", "slurmctld", "-D", "-f", "/mnt/slurm.conf")

    def kill_controller(self) -> None:
        process = self.programs["slurmctld"].process
        process.kill()
        process.wait()

    def start_standby(self) -> None:
        """Start a second controller, under a host name of its own; see `WITH_STANDBY`."""
        name = "slurmctld-standby"
        environment = {**self._environment(), "STANDBY": STANDBY}
        argv = self.entering("slurmctld", "-D", "-f", "/mnt/slurm.conf")
        self.programs[name] = Program(argv, self.work / f"{name}.log", environment)
        self.await_controllers()

    def await_controllers(self) -> None:
        """Wait until the first controller and the standby answer."""
        ask = ("scontrol", "ping")
        eventually(lambda: self._ask(*ask).stdout.count(" is UP") == 2, 120, "both controllers answer", every=0.5)

    def await_saved(self, what: str, text: str) -> None:
        """Wait until the controller has stored `text` in its file `what`, such as ``node_state``."""
        saved = self.work / "state" / what
        eventually(lambda: saved.exists() and text.encode() in saved.read_bytes(), 60, f"{what} has {text}", every=0.2)

    def await_saved_job(self, job: str) -> None:
        """Wait until the controller has stored the job as it is now."""
        mark = f"stored-{time.time_ns()}"
        self.run("scontrol", "update", f"jobid={job}", f"comment={mark}")
        self.await_saved("job_state", mark)

    @contextmanager
    def unsaved(self, what: str) -> Iterator[None]:
        """Keep the controller from storing the file `what`, as a full disk does. Nodes are stored before."""
        if what == "node_state":
            mark = f"stored-{time.time_ns()}"
            self.run("scontrol", "update", f"nodename={self._states()[0][0]}", f"comment={mark}")
            self.await_saved(what, mark)
        blocked = self.work / "state" / f"{what}.new"  # it writes this file, and renames it
        blocked.mkdir()
        try:
            yield
        finally:
            blocked.rmdir()

    def start_node(self, name: str, *options: str) -> None:
        self._start(f"slurmd-{name}", "slurmd", "-D", "-N", name, "-f", "/mnt/slurm.conf", *options)

    def clear(self) -> None:
        """End all jobs and return all nodes to service. Wait until no job is left, completing ones too."""

        def is_clear() -> bool:
            for name, state in self._states():
                if state.startswith(("drain", "down", "fail")):
                    self._ask("scontrol", "update", f"nodename={name}", "state=resume")
            self._ask("scancel", "--user=root")
            return not self.run("squeue", "-h") and self._is_idle()

        eventually(is_clear, 120, "no job is left, and the nodes are idle", every=0.5)

    def stop(self) -> None:
        for program in reversed(self.programs.values()):
            program.end(patience=5)

    def _configure(self) -> None:
        for name, size in (("munge.key", 128), ("jwt.key", 32)):
            (self.work / name).write_bytes(secrets.token_bytes(size))
            (self.work / name).chmod(0o400)
        for name in NODES:
            (self.work / "spool" / name).mkdir(parents=True)
        (self.work / "state").mkdir()
        (self.work / "run").mkdir()
        (self.work / "run").chmod(0o777)  # slurmrestd runs as nobody
        # Without it, Slurm waits for a DNS server.
        (self.work / "hosts").write_text(f"127.0.0.1 localhost {os.uname().nodename}\n127.0.0.2 {STANDBY}\n")
        for name in ("slurmctld.pid", "standby.pid"):
            (self.work / name).touch()
        (self.work / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        if self._scripts is not None:
            shutil.copytree(self._scripts, self.work / "scripts")
        host = os.uname().nodename
        have = f" Gres=gpu:h100:{self._gpus} Feature=h100,ib" if self._gpus else ""
        nodes = "".join(
            f"NodeName={name} NodeHostName={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2 RealMemory=100{have}\n"
            for name in NODES
        )
        if self._gpus:
            for number in range(self._gpus):
                os.mknod(self.work / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
            files = f"NodeName={','.join(NODES)} Name=gpu Type=h100 File=/mnt/gpu[0-{self._gpus - 1}]\n"
            (self.work / "gres.conf").write_text(files)
            nodes = f"GresTypes=gpu\n{nodes}"
        configuration = _CONFIGURATION.format(host=host, port=self.controller_port)
        partition = f"PartitionName=main Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE\n"
        (self.work / "slurm.conf").write_text(f"{configuration}{self._settings}{nodes}{partition}")

    def _start_all(self) -> None:
        self._start(
            "munged",
            *("munged", "--foreground", "--force", "--socket=/mnt/munge.socket", "--key-file=/mnt/munge.key"),
            *("--pid-file=/mnt/munge.pid", "--log-file=/mnt/munge.out", "--seed-file=/mnt/munge.seed"),
        )
        eventually((self.work / "munge.socket").exists, 60, "munged listens")
        self.start_controller()
        for name in NODES:
            self.start_node(name)
        eventually(self._is_idle, 120, "the nodes are idle", every=0.5)
        self.renew_token()
        # It refuses to run as root.
        self._start(
            "slurmrestd",
            *("slurmrestd", "-f", "/mnt/slurm.conf", "-a", "rest_auth/jwt", "-s", "openapi/slurmctld"),
            f"127.0.0.1:{self.rest_port}",
            f"{'unix:' if self.is_old else 'unix://'}/mnt/run/slurmrestd.socket",
            chroot_options="--userspec=65534:65534",
        )
        eventually(self._rest_answers, 120, "slurmrestd answers", every=0.5)

    def _rest_answers(self) -> bool:
        headers = {"X-SLURM-USER-TOKEN": self.token_file.read_text().strip().removeprefix("SLURM_JWT=")}
        try:
            return httpx.get(f"{self.rest_url}/openapi/v3", headers=headers, timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    def _is_idle(self) -> bool:
        return [state for _, state in self._states()] == ["idle"] * len(NODES)

    def _states(self) -> list[tuple[str, str]]:
        """Names and states of the nodes; empty while slurmctld does not answer."""
        lines = self._ask("sinfo", "-h", "-N", "-o", "%N %T").stdout.splitlines()
        return [(name, state) for name, state in (line.split() for line in lines)]

    def _start(self, name: str, *argv: str, chroot_options: str = "") -> Program:
        program = Program(self.entering(*argv), self.work / f"{name}.log", self._environment(chroot_options))
        self.programs[name] = program
        return program

    def entering(self, *argv: str) -> list[str]:
        """Return the command in the cluster's root, with its files under /mnt."""
        enter = ("unshare", "--mount", "--uts", "--propagation", "private", "sh", "-euc", _ENTER, "sh")
        return [*enter, str(self._root), str(self.work), *argv]

    def _environment(self, chroot_options: str = "") -> dict[str, str]:
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "CHROOT_OPTIONS": chroot_options,
            "SLURM_CONF": "/mnt/slurm.conf",
        }
        if chroot_options:
            environment |= {"SLURM_JWT": "daemon", "SLURMRESTD_SECURITY": "disable_unshare_sysv,disable_unshare_files"}
        return environment
