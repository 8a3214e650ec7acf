"""`make requirements`: writes requirements/*.txt, the versions that the tests ran with, and the hashes of their files.

Each file is complete by itself: `pip install --require-hashes -r requirements/server.txt` installs exactly these files,
on every supported Python and system. pip has no hash for a checkout, so this follows: `pip install --no-deps .`.

    [1]  The versions are those of the environment that runs this, as far as it has the package.
    [2]  No file names the place that packages come from: pip's configuration does.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "requirements"
FILES: Final[Mapping[str, tuple[str, ...]]] = {
    "base": (),
    "server": ("server", "jwt", "otel"),
    "console": ("console",),
    "spark": ("spark",),
    "dev": ("server", "console", "http", "sql", "spark", "dev", "otel", "docs"),
}
"""The extras in each file."""
BUILD: Final = "build"
"""The file with what building the wheel needs."""
HEADER: Final = """\
# {what}
# Written by `make requirements`. To install: pip install --require-hashes -r requirements/{name}.txt
"""
PINNED: Final = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", re.MULTILINE)


def installed() -> dict[str, str]:
    """The packages of this environment with their versions, by their normalized names."""
    found = {name_of(one.metadata["Name"]): one.version for one in importlib.metadata.distributions()}
    return {name: version for name, version in found.items() if name != "sow"}


def name_of(text: str) -> str:
    """A normalized name."""
    return re.sub(r"[-_.]+", "-", text).lower()


def compiled(uv: str, source: str, extras: Sequence[str], constraints: Path) -> str:
    """The complete list of what `source` needs, for all Pythons and systems, with hashes."""
    # Not 3.11.0: a package of the extra `docs` needs 3.11.5. The other files are the same for both.
    command = [uv, "pip", "compile", "--universal", "--python-version", "3.11.5", "--generate-hashes", "--quiet"]
    command += ["--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
    command += ["--constraints", str(constraints), *(part for extra in extras for part in ("--extra", extra)), source]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the files; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.requirements", description="Writes requirements/*.txt.")
    parser.add_argument("--uv", default="uv", metavar="PROGRAM", help="the program uv, which resolves")
    given = parser.parse_args(arguments)
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in sorted(installed().items())))
        build = Path(folder) / "build.in"
        needs = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
        build.write_text("\n".join(needs))
        for name, extras in FILES.items():
            what = f"sow[{','.join(extras)}]" if extras else "sow"
            _write(name, f"Everything that {what} needs.", compiled(given.uv, "pyproject.toml", extras, constraints))
        _write(BUILD, "Everything that building the wheel needs.", compiled(given.uv, str(build), (), constraints))
    return 0


def _write(name: str, what: str, text: str) -> None:
    path = FOLDER / f"{name}.txt"
    path.write_text(HEADER.format(what=what, name=name) + text, encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {len(PINNED.findall(text))} packages")


if __name__ == "__main__":
    sys.exit(main())
