"""What a release says of its parts is what was pinned, and an audit that was not made is not taken for a good one."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cyclonedx.validation.json import JsonStrictValidator

ROOT = Path(__file__).parents[2]
BUILD_TOOLS = {"packaging", "setuptools", "wheel"}


def loaded(name: str) -> ModuleType:
    """A module of the directory ``packaging``, which is no package: its name is a library's."""
    spec = importlib.util.spec_from_file_location(f"supply_{name}", ROOT / "packaging" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


sbom, audit = loaded("sbom"), loaded("audit")


def pins(lock: str) -> dict[str, str]:
    text = (ROOT / "requirements" / f"{lock}.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))


@pytest.mark.parametrize(
    ("package", "distribution"),
    [
        ("server", "trainmedic-server"),
        ("agent", "trainmedic-agent"),
        ("logs", "trainmedic-logs"),
        ("sdk", "trainmedic"),
    ],
)
def test_the_sbom_of_a_wheel_lists_exactly_the_pins_with_their_hashes(package: str, distribution: str) -> None:
    """It has the wheel's version and is valid under CycloneDX's schema."""
    bom = sbom.of_wheel(package)
    assert JsonStrictValidator(sbom.SCHEMA).validate_str(json.dumps(bom)) is None
    about = bom["metadata"]["component"]
    assert (about["name"], about["version"]) == (distribution, "0.1.0")
    listed = {part["name"]: part["version"] for part in bom["components"]}
    assert listed == {name: version for name, version in pins(package).items() if name not in BUILD_TOOLS}
    assert all(reference["hashes"] for part in bom["components"] for reference in part["externalReferences"])
    (depends,) = (each for each in bom["dependencies"] if each["ref"] == about["bom-ref"])
    assert len(depends["dependsOn"]) == len(listed)


def test_the_wheels_have_their_sboms_inside_and_next_to_them(tmp_path: Path) -> None:
    """The place is that of PEP 770, and the wheel's own file list contains it."""
    script = ROOT / "scripts" / "build-wheels"
    done = subprocess.run([script, tmp_path], check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for name in ("trainmedic-0.1.0", "trainmedic_logs-0.1.0", "trainmedic_agent-0.1.0", "trainmedic_server-0.1.0"):
        beside = (tmp_path / f"{name}.cdx.json").read_bytes()
        with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl") as wheel:
            within = f"{name}.dist-info/sboms/sbom.cdx.json"
            assert wheel.read(within) == beside
            assert within in wheel.read(f"{name}.dist-info/RECORD").decode()
            assert not [path for path in wheel.namelist() if path.startswith(("tests", "build"))]
            assert f"{name.partition('-')[0]}/py.typed" in wheel.namelist()
            if name.startswith("trainmedic_server"):
                _has_console(wheel)
                assert "trainmedic_server/demo/playbooks/hot-gpu.yaml" in wheel.namelist()
    listed = {line.split()[1] for line in (tmp_path / "SHA256SUMS").read_text().splitlines()}
    assert listed == {path.name for path in tmp_path.iterdir()} - {"SHA256SUMS"}
    assert checked(tmp_path).returncode == 0
    (tmp_path / "trainmedic-0.1.0.cdx.json").write_text("{}")
    assert checked(tmp_path).returncode == 1


def checked(directory: Path) -> subprocess.CompletedProcess[str]:
    command = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def small_environment(directory: Path) -> Path:
    """An environment with two packages, one of them installed from a checkout; its Python."""
    venv.create(directory, symlinks=True)
    (packages,) = directory.glob("lib/python3*/site-packages")
    for name, version in (("trainmedic_server", "0.1.0"), ("pydantic", "2.14.3")):
        metadata = packages / f"{name}-{version}.dist-info"
        metadata.mkdir()
        about = f"Metadata-Version: 2.4\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (metadata / "METADATA").write_text(about)
    source = {"url": "file:///src", "dir_info": {}}
    (packages / "trainmedic_server-0.1.0.dist-info" / "direct_url.json").write_text(json.dumps(source))
    return directory / "bin" / "python"


def _has_console(wheel: zipfile.ZipFile) -> None:
    """All that its pages are made of, in less than 250 kB."""
    inside = "trainmedic_server/console"
    here = ROOT / "app" / inside
    wanted = {f"{inside}/{path.relative_to(here)}" for path in here.glob("[ts]*/*") if path.suffix != ".py"}
    assert len(wanted) > 20
    assert wanted <= set(wheel.namelist())
    assert sum(info.compress_size for info in wheel.infolist() if info.filename.startswith(inside)) < 250_000


def test_the_sbom_of_an_image_lists_python_and_debian_packages_too(tmp_path: Path) -> None:
    """It has the packages that dpkg lists as installed, not removed ones whose configuration is left."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "os-release").write_text('ID=debian\nVERSION_ID="12"\nVERSION="12 (bookworm)"\n')
    (tmp_path / "var" / "lib" / "dpkg").mkdir(parents=True)
    stanza = "Package: {}\nStatus: {}\nArchitecture: amd64\nVersion: {}\nDescription: a\n longer: text\n"
    (tmp_path / "var" / "lib" / "dpkg" / "status").write_text(
        stanza.format("libc6", "install ok installed", "2.36-9+deb12u10")
        + "\n"
        + stanza.format("gone", "deinstall ok config-files", "1")
    )
    bom = sbom.of_image(str(small_environment(tmp_path / "environment")), tmp_path)
    assert JsonStrictValidator(sbom.SCHEMA).validate_str(json.dumps(bom)) is None
    urls = {part["purl"] for part in bom["components"]}
    debian = {url for url in urls if url.startswith("pkg:deb")}
    assert debian == {"pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=amd64&distro=debian-12"}
    assert {"pkg:pypi/trainmedic-server@0.1.0", "pkg:pypi/pydantic@2.14.3"} <= urls
    assert any(url.startswith("pkg:generic/python@3.") for url in urls)
    assert bom["metadata"]["component"]["type"] == "container"


CLEAN = {"name": "a", "version": "1", "vulns": []}
SKIPPED = {"name": "b", "version": "1", "skip_reason": "Dependency not found on PyPI and could not be audited"}
BROKEN = {"name": "c", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"]}]}


@pytest.mark.parametrize(
    ("dependencies", "status"),
    [
        ([CLEAN], audit.OK),
        ([CLEAN, SKIPPED], audit.NOT_CHECKED),
        ([SKIPPED], audit.NOT_CHECKED),
        ([], audit.NOT_CHECKED),
        ([CLEAN, BROKEN], audit.VULNERABLE),
        ([BROKEN, SKIPPED], audit.VULNERABLE),
    ],
)
def test_an_unchecked_package_is_not_reported_as_good(dependencies: list[dict[str, Any]], status: int) -> None:
    """pip-audit itself succeeds even if it has skipped everything."""
    assert audit.reading(dependencies, "pypi").status == status


def test_an_unreachable_database_is_distinguished(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """It has a status and a message of its own."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nothing listens
    assert audit.main([ROOT / "requirements" / "sdk.txt"]) == audit.NOT_CHECKED
    assert "sdk.txt: NOT CHECKED: osv could not be asked" in capsys.readouterr().out
