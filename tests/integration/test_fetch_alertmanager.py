"""scripts/fetch-alertmanager prints a path that works, or says why there is none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.programs import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A directory with the script and nothing else."""
    (tmp_path / "scripts").mkdir()
    shutil.copy2(ROOT / "scripts" / "fetch-alertmanager", tmp_path / "scripts")
    return tmp_path


def fetch(checkout: Path, path: str) -> subprocess.CompletedProcess[str]:
    script = checkout / "scripts" / "fetch-alertmanager"
    return subprocess.run(["/bin/bash", script], capture_output=True, text=True, check=False, env={"PATH": path})


def programs_without_network(directory: Path) -> str:
    """A PATH with what the script needs, and an apt-get that has no network."""
    directory.mkdir()
    for name in ("dirname", "awk", "dpkg-deb", "mkdir", "rm", "ls", "head"):
        (directory / name).symlink_to(shutil.which(name) or pytest.fail(f"no {name} here"))
    apt = directory / "apt-get"
    apt.write_text(
        "#!/bin/sh\n"
        'case "$*" in *indextargets*) . /etc/os-release; echo "$VERSION_CODENAME http://mirror.invalid/debian";;\n'
        '*) echo "E: no network" >&2; exit 100;; esac\n'
    )
    apt.chmod(0o755)
    return str(directory)


def test_a_fetched_alertmanager_is_reused_without_network(checkout: Path, tmp_path: Path) -> None:
    """The path of the binary is printed, and nothing is downloaded."""
    binary = checkout / ".cache" / "alertmanager-sid" / "usr" / "bin" / "prometheus-alertmanager"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    done = fetch(checkout, programs_without_network(tmp_path / "bin"))
    assert (done.returncode, done.stdout) == (0, f"{binary}\n")


def test_without_network_it_reports_the_consequences(checkout: Path, tmp_path: Path) -> None:
    """Every suite is tried, the exit status is 1, and the last line says that tests are skipped."""
    done = fetch(checkout, programs_without_network(tmp_path / "bin"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "suite sid could not be used" in done.stderr
    assert "suite trixie could not be used" in done.stderr
    assert "no current Alertmanager could be fetched (tried: sid trixie)" in done.stderr.splitlines()[-1]
    assert list((checkout / ".cache").iterdir()) == []


def test_on_systems_other_than_debian_it_reports_this(checkout: Path, tmp_path: Path) -> None:
    """Without apt-get nothing is tried."""
    path = tmp_path / "bin"
    path.mkdir()
    (path / "dirname").symlink_to(shutil.which("dirname") or "/usr/bin/dirname")
    done = fetch(checkout, str(path))
    assert done.returncode == 1
    assert "this works on Debian only" in done.stderr
