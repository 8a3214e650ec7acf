"""`make release-dry-run`: what it refuses (tools/release [2], [3]). A long test builds the real packages."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from sow.version import __version__
from tools import man, release

ROOT: Final = Path(__file__).parents[3]
FILES: Final = (
    "CHANGELOG.md",
    "proto/sow/version.py",
    "deploy/helm/sow/Chart.yaml",
    "deploy/compose/compose.yaml",
    "deploy/kubernetes/sow.yaml",
    "deploy/kubernetes/cells.yaml",
    "clients/typescript/package.json",
    "clients/typescript/package-lock.json",
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with the files that name a version."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def _change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_everything_of_this_checkout_names_one_version() -> None:
    assert release.agreed_version() == __version__


@pytest.mark.parametrize("name", FILES[2:])
def test_a_file_that_names_another_version_is_refused_by_its_name(copy: Path, name: str) -> None:
    assert release.agreed_version(root=copy) == __version__
    _change(copy / name, __version__, "9.9.9")
    with pytest.raises(release.Fault, match=rf"has {__version__}, but {name} has 9\.9\.9"):
        release.agreed_version(root=copy)


def test_a_file_that_names_no_version_is_refused(copy: Path) -> None:
    _change(copy / "deploy/helm/sow/Chart.yaml", "appVersion", "appversion")
    with pytest.raises(release.Fault, match=r"Chart\.yaml: names no version"):
        release.agreed_version(root=copy)


def test_a_tag_needs_this_version_and_its_heading_in_the_changelog(copy: Path) -> None:
    with pytest.raises(release.Fault, match=r"the tag is v9\.9\.9, but the version"):
        release.agreed_version("v9.9.9", copy)
    (copy / "CHANGELOG.md").write_text(f"# Changelog\n\n## Unreleased ({__version__})\n")
    with pytest.raises(release.Fault, match="has no heading"):
        release.agreed_version(f"v{__version__}", copy)
    (copy / "CHANGELOG.md").write_text(f"# Changelog\n\n## {__version__} (2026-12-01)\n")
    assert release.agreed_version(f"v{__version__}", copy) == __version__


def _wheel(file: Path, names: Mapping[str, str]) -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in names.items():
            archive.writestr(name, text)
    return file


def _tar(file: Path, names: Mapping[str, str]) -> Path:
    with tarfile.open(file, "w:gz") as archive:
        for name, text in names.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return file


METADATA: Final = (
    "Name: sow\nVersion: 1.0\nSummary: s\nLicense-Expression: Apache-2.0\nRequires-Python: >=3.11\n"
    "Description-Content-Type: text/markdown\n\n# sow\n"
)
KNOWN: Final = {"sow_server/app.py", "proto/sow/version.py", "proto/generate.py", "tests/a.py"}
WHEEL: Final = {"sow_server/app.py": "", "sow/version.py": "", "sow-1.0.dist-info/METADATA": METADATA}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sow_server/notes.txt": ""}, "has files that git does not know: sow_server/notes.txt"),
        ({"tests/a.py": ""}, "has files that git does not know: tests/a.py"),
        ({"sow/version.py": None}, "lacks files: sow/version.py"),
        ({"sow-1.0.dist-info/METADATA": METADATA.replace("Summary: s\n", "")}, "has no metadata: Summary"),
        ({"sow-1.0.dist-info/METADATA": METADATA.replace("1.0", "1.1")}, "has version 1.1"),
        ({"sow-1.0.dist-info/METADATA": METADATA.replace("# sow", "")}, "or no description"),
    ],
)
def test_a_wheel_with_stray_or_missing_files_is_refused(
    tmp_path: Path, change: dict[str, str | None], message: str
) -> None:
    release.check_wheel(_wheel(tmp_path / "good.whl", WHEEL), KNOWN, "1.0")
    names = {name: text for name, text in {**WHEEL, **change}.items() if text is not None}
    with pytest.raises(release.Fault, match=message):
        release.check_wheel(_wheel(tmp_path / "bad.whl", names), KNOWN, "1.0")


def test_an_sdist_with_a_stray_file_is_refused(tmp_path: Path) -> None:
    good = {"sow-1.0/PKG-INFO": "", "sow-1.0/sow_server/app.py": ""}
    release.check_sdist(_tar(tmp_path / "good.tar.gz", good), KNOWN)
    with pytest.raises(release.Fault, match="git does not know: sow-demo"):
        release.check_sdist(_tar(tmp_path / "bad.tar.gz", {**good, "sow-1.0/sow-demo.toml": ""}), KNOWN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"package/dist/old.js": ""}, "no source has made: dist/old.js"),
        ({"package/.env": ""}, r"no source has made: \.env"),
        ({"package/dist/index.d.ts": None}, "lacks files: dist/index.d.ts"),
        ({"package/README.md": None}, "lacks files: README.md"),
    ],
)
def test_a_package_for_npm_with_stray_or_missing_files_is_refused(
    tmp_path: Path, change: dict[str, str | None], message: str
) -> None:
    told = json.dumps({"version": "1.0", "main": "./dist/index.js", "types": "./dist/index.d.ts"})
    good = {f"package/{name}": "" for name in ("README.md", "dist/index.js", "dist/index.d.ts", "dist/index.js.map")}
    good["package/package.json"] = told
    known = {"clients/typescript/src/index.ts"}
    release.check_npm(_tar(tmp_path / "good.tgz", good), known, "1.0")
    names = {name: text for name, text in {**good, **change}.items() if text is not None}
    with pytest.raises(release.Fault, match=message):
        release.check_npm(_tar(tmp_path / "bad.tgz", names), known, "1.0")
    with pytest.raises(release.Fault, match=r"has version 1\.0"):
        release.check_npm(_tar(tmp_path / "other.tgz", good), known, "1.1")


@pytest.mark.long
def test_the_real_packages_pass(tmp_path: Path) -> None:
    """Wheel, sdist and, where Node is, the package for npm; the wheel in a new environment."""
    assert release.main(["--out", str(tmp_path / "dist")]) == 0
    found = {file.name for file in (tmp_path / "dist").iterdir()}
    assert found >= {f"sow-{__version__}-py3-none-any.whl", f"sow-{__version__}.tar.gz"}


def test_a_wheel_without_man_pages_is_refused(tmp_path: Path) -> None:
    """The hook of the build takes none where a module is missing, and says nothing."""
    with pytest.raises(release.Fault, match=r"sow.whl: lacks man pages: sow-"):
        release.check_man_pages(Path("sow.whl"), tmp_path)
    man.write(tmp_path)
    release.check_man_pages(Path("sow.whl"), tmp_path)
