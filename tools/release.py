"""`make release-dry-run`: builds all that a release publishes, and checks it. It publishes nothing itself.

    [1]  The wheel is built from the sdist, so the sdist is complete.
    [2]  A package has the files of its folders that git knows, all of them and no others.
    [3]  Everything that names a version names the same one; with a tag, this is the tag's, and the changelog has it.
    [4]  The wheel is installed in a new environment, where its commands tell that version, and all man pages are.

.github/workflows/release.yml publishes what this has built.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator, Sequence
from email.parser import BytesParser
from pathlib import Path
from typing import Final

from tools import man, state_jar

ROOT: Final = Path(__file__).resolve().parents[1]
TYPESCRIPT: Final = "clients/typescript"
METADATA: Final = ("Name", "Version", "Summary", "License-Expression", "Requires-Python", "Description-Content-Type")
NODE_MIN: Final = 20


class Fault(Exception):
    """A release cannot be made of this."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds and checks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder of the packages; emptied first")
    parser.add_argument("--tag", default="", help="the tag of the release, such as v0.1.0")
    given = parser.parse_args(arguments)
    try:
        version = agreed_version(given.tag)
        for file in build(given.out.absolute(), version):
            print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB, checked")
    except Fault as fault:
        print(f"release: {fault}", file=sys.stderr)
        return 1
    return 0


def agreed_version(tag: str = "", root: Path = ROOT) -> str:
    """The version of everything ([3]). Raises Fault."""
    named = dict(_versions(root))
    version = named["proto/sow/version.py"]
    others = [f"{file} has {other}" for file, other in named.items() if other != version]
    if others:
        raise Fault(f"proto/sow/version.py has {version}, but {', '.join(others)}")
    if tag and tag != f"v{version}":
        raise Fault(f"the tag is {tag}, but the version {version}")
    if tag and not re.search(rf"^## {re.escape(version)}( |$)", (root / "CHANGELOG.md").read_text(), re.MULTILINE):
        raise Fault(f"CHANGELOG.md has no heading for {version}")
    return version


def _versions(root: Path) -> Iterator[tuple[str, str]]:
    for file, pattern in (
        ("proto/sow/version.py", r'^__version__ = "(.+)"$'),
        ("deploy/helm/sow/Chart.yaml", "^version: (.+)$"),
        ("deploy/helm/sow/Chart.yaml", "^appVersion: (.+)$"),
        ("deploy/compose/compose.yaml", r"SOW_IMAGE:-sow:(.+)\}$"),
        ("deploy/kubernetes/sow.yaml", r"^ +image: sow:(\S+)$"),
        ("deploy/kubernetes/cells.yaml", r"^ +image: sow:(\S+)$"),
        (f"{TYPESCRIPT}/package.json", r'^  "version": "(.+)",$'),
        (f"{TYPESCRIPT}/package-lock.json", r'^  "version": "(.+)",$'),
    ):
        found = re.findall(pattern, (root / file).read_text(encoding="utf-8"), re.MULTILINE)
        if not found:
            raise Fault(f"{file}: names no version")
        yield from ((file, version) for version in found)


def build(out: Path, version: str) -> list[Path]:
    """Builds the packages in an empty folder, and checks them. Raises Fault."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    known = set(_run("git", "ls-files", "-z").split("\0"))
    if state_jar.main() == 0 and state_jar.JAR.is_file():
        known.add(str(state_jar.JAR.relative_to(ROOT)))
    else:
        raise Fault("the engine of states on Spark needs a compiler of Java and PySpark")
    _run(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(out))
    sdist = _only(out, f"sow-{version}.tar.gz")
    check_sdist(sdist, known)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        source = Path(folder) / sdist.name.removesuffix(".tar.gz")  # [1]
        _run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out), folder=source)
        wheel = _only(out, f"sow-{version}-py3-none-any.whl")
        check_wheel(wheel, known, version)
        _check_installed(wheel, Path(folder) / "venv", version)
    node = shutil.which("node")
    if node is None or int(_run(node, "-p", "parseInt(process.versions.node)")) < NODE_MIN:
        print(f"the package for npm: not built, as there is no Node {NODE_MIN} or later", file=sys.stderr)
        return [sdist, wheel]
    _run("npm", "ci", "--silent", folder=ROOT / TYPESCRIPT)
    _run("npm", "pack", "--silent", "--pack-destination", str(out), folder=ROOT / TYPESCRIPT)
    packed = _only(out, f"sow-client-{version}.tgz")
    check_npm(packed, known, version)
    return [sdist, wheel, packed]


def check_sdist(file: Path, known: set[str]) -> None:
    """Raises Fault for a file that git does not know."""
    with tarfile.open(file) as archive:
        names = {one.name.partition("/")[2] for one in archive if one.isfile()}
    _refuse(file, "has files that git does not know", names - known - {"PKG-INFO"})


def check_wheel(file: Path, known: set[str], version: str) -> None:
    """Raises Fault if the wheel lacks a file of its packages, has another one, or has incomplete metadata."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    packages: list[str] = wheel["packages"]
    expected = {
        name[len(path) - len(Path(path).name) :] for path in packages for name in known if name.startswith(f"{path}/")
    }
    expected |= {f"sow_cli/pages/{page}" for page in wheel["hooks"]["custom"]["pages"] if f"docs/{page}" in known}
    with zipfile.ZipFile(file) as archive:
        listed = archive.namelist()
        names = {name for name in listed if not re.match(rf"sow-{re.escape(version)}\.(dist-info|data)/", name)}
        metadata = BytesParser().parsebytes(archive.read(f"sow-{version}.dist-info/METADATA"))
    _refuse(file, "has files that git does not know", names - expected)
    _refuse(file, "lacks files", expected - names)
    _refuse(file, "has no metadata", {name for name in METADATA if not metadata[name]})
    if metadata["Version"] != version or not str(metadata.get_payload()).strip():
        raise Fault(f"{file.name}: has version {metadata['Version']}, or no description")


def check_npm(file: Path, known: set[str], version: str) -> None:
    """Raises Fault if the package has a file that no source has made, or lacks what it names."""
    with tarfile.open(file) as archive:
        names = {one.name.removeprefix("package/") for one in archive if one.isfile()}
        content = archive.extractfile("package/package.json")
        assert content is not None, "it was listed"
        told = json.load(content)
    sources = {name.removeprefix(f"{TYPESCRIPT}/src/").removesuffix(".ts") for name in known if "/src/" in name}
    made = {f"dist/{source}{ending}" for source in sources for ending in (".js", ".js.map", ".d.ts")}
    _refuse(file, "has files that no source has made", names - made - {"package.json", "README.md"})
    _refuse(
        file, "lacks files", {told["main"].removeprefix("./"), told["types"].removeprefix("./"), "README.md"} - names
    )
    if told["version"] != version:
        raise Fault(f"{file.name}: has version {told['version']}")


def _check_installed(wheel: Path, folder: Path, version: str) -> None:
    venv.create(folder, with_pip=True)
    _run(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", str(wheel), folder=folder)
    for program in ("sow", "sow-server"):
        said = _run(str(folder / "bin" / program), "--version", folder=folder)
        if not said.startswith(f"{program} {version}\n"):  # `sow` goes on with a server, if one listens here
            raise Fault(f"{wheel.name}: {program} --version says {said!r}")
    check_man_pages(wheel, folder / "share" / "man" / "man1")


def check_man_pages(wheel: Path, folder: Path) -> None:
    """Raises Fault if a page is missing: the hook of the build leaves them out where a command cannot be imported."""
    _refuse(wheel, "lacks man pages", set(man.pages()) - {page.name for page in folder.glob("*")})


def _refuse(file: Path, what: str, names: set[str]) -> None:
    if names:
        raise Fault(f"{file.name}: {what}: {', '.join(sorted(names)[:10])}{', …' if len(names) > 10 else ''}")


def _only(folder: Path, name: str) -> Path:
    found = folder / name
    if not found.is_file():
        raise Fault(f"{name} was not built, but {', '.join(sorted(one.name for one in folder.iterdir())) or 'nothing'}")
    return found


def _run(*command: str, folder: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Fault(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
