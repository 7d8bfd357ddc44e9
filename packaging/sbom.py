"""Software bill of materials of a wheel or of the image, as CycloneDX JSON on standard output.

    python packaging/sbom.py wheel server|agent|logs|sdk
    python packaging/sbom.py image PYTHON [--root DIRECTORY]

A wheel's lists the versions and hashes with which it was tested, by requirements/*.txt. The image's lists its content:
the packages of PYTHON's environment, that Python, and Debian's packages under DIRECTORY (/). Needs
requirements/supply.txt.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

ROOT = Path(__file__).parents[1]
SCHEMA = SchemaVersion.V1_6
_BUILD_TOOLS = frozenset({"packaging", "setuptools", "wheel"})
"""Packages that only build our wheels (`wheel` needs `packaging`)."""

Bom = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    wheel = kinds.add_parser("wheel")
    wheel.add_argument("package", choices=("server", "agent", "logs", "sdk"))
    image = kinds.add_parser("image")
    image.add_argument("python")
    image.add_argument("--root", type=Path, default=Path("/"))
    options = parser.parse_args()
    bom = of_wheel(options.package) if options.kind == "wheel" else of_image(options.python, options.root)
    text = json.dumps(bom, indent=1, sort_keys=True)
    problem = JsonStrictValidator(SCHEMA).validate_str(text)
    if problem is not None:
        sys.exit(f"sbom: the result breaks the schema of CycloneDX {SCHEMA.to_version()}: {problem}")
    print(text)


# --- wheels -----------------------------------------------------------------------------------------------


def of_wheel(package: str) -> Bom:
    """Return the pins of the package's lock, as parts of the wheel."""
    project = ROOT if package == "server" else ROOT / package
    about = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bom = _cyclonedx("requirements", str(ROOT / "requirements" / f"{package}.txt"))
    components = [part for part in bom["components"] if part["name"] not in _BUILD_TOOLS]
    for part in components:
        part["bom-ref"] = part["purl"]
        del part["description"]  # the line of the lock, whose hashes are told beside it
    return _assembled(bom, _this(about["name"], _version(about), about["license"]), components)


def _version(about: Mapping[str, Any]) -> str:
    if "version" in about:
        return str(about["version"])
    text = (ROOT / "app" / "trainmedic_server" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert found is not None
    return found[1]


# --- the image --------------------------------------------------------------------------------------------


def of_image(python: str, root: Path) -> Bom:
    """Return all that is installed: Python's packages, Python, and Debian's packages."""
    bom = _cyclonedx("environment", python)
    versions = {part["name"]: part["version"] for part in bom["components"]}
    name = "trainmedic" if "trainmedic-server" in versions else "trainmedic-agent"
    version = subprocess.run(
        [python, "-c", "import platform; print(platform.python_version())"], check=True, capture_output=True, text=True
    ).stdout.strip()
    for part in bom["components"]:  # one that was installed from a checkout has none
        part.setdefault("purl", PackageURL("pypi", None, part["name"], part["version"]).to_string())
    parts = [*bom["components"], _component("python", version, PackageURL("generic", None, "python", version))]
    this = {
        **_this(name, versions.get("trainmedic-server") or versions["trainmedic-agent"], "Apache-2.0"),
        "type": "container",
    }
    whole = _assembled(bom, this, [*parts, *debian_packages(root)])
    whole["dependencies"] += bom["dependencies"]
    return whole


def debian_packages(root: Path) -> Iterator[dict[str, Any]]:
    """Yield dpkg's packages; none on another base than Debian."""
    release = _fields((root / "etc" / "os-release").read_text(encoding="utf-8"), "=")
    distribution = f"{release['ID']}-{release.get('VERSION_ID', '')}".replace('"', "")
    status = root / "var" / "lib" / "dpkg" / "status"
    for stanza in status.read_text(encoding="utf-8").split("\n\n") if status.exists() else ():
        package = _fields(stanza, ": ")
        if package.get("Status") == "install ok installed":
            name, version = package["Package"], package["Version"]
            qualifiers = {"arch": package["Architecture"], "distro": distribution}
            yield _component(name, version, PackageURL("deb", "debian", name, version, qualifiers))


def _fields(text: str, separator: str) -> dict[str, str]:
    pairs = (line.partition(separator) for line in text.splitlines() if not line.startswith(" "))
    return {name: value for name, found, value in pairs if found}


# --- both -------------------------------------------------------------------------------------------------


def _cyclonedx(*arguments: str) -> Bom:
    """Return the output of CycloneDX's tool, without times and random numbers."""
    options = ("--output-reproducible", "--no-validate", "--spec-version", SCHEMA.to_version())
    command = [sys.executable, "-m", "cyclonedx_py", arguments[0], *options, *arguments[1:]]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    bom: Bom = json.loads(done.stdout)
    return bom


def _this(name: str, version: str, license_id: str) -> dict[str, Any]:
    component = _component(name, version, PackageURL("pypi", None, name, version))
    return {**component, "type": "application", "licenses": [{"license": {"id": license_id}}]}


def _component(name: str, version: str, url: PackageURL) -> dict[str, Any]:
    purl = url.to_string()
    return {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}


def _assembled(bom: Bom, this: dict[str, Any], components: list[dict[str, Any]]) -> Bom:
    parts = sorted(components, key=lambda part: part["bom-ref"])
    depends = {"ref": this["bom-ref"], "dependsOn": [part["bom-ref"] for part in parts]}
    return {
        **bom,
        "metadata": {**bom.get("metadata", {}), "component": this},
        "components": parts,
        "dependencies": [depends],
    }


if __name__ == "__main__":
    main()
