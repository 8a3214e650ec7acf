"""A built wheel puts only names into site-packages that say whose they are, and everything that belongs to them."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import sow_client
import sow_server
from sow.version import __version__
from sow_cli import helping
from sow_cli.command import COMMANDS

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    target = tmp_path_factory.mktemp("wheel")
    # hatchling itself, not a build front end: those make an environment and need the network for it.
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(target)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert built.returncode == 0, built.stderr
    (wheel,) = target.glob("sow-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.mark.slow
def test_top_level_names_say_whose_they_are(names: list[str]) -> None:
    top_level = {name.split("/")[0] for name in names}
    foreign = {
        name
        for name in top_level
        if not re.fullmatch(r"sow|sow_[a-z_]+|pyspark_sow|sow-[0-9.]+\.(dist-info|data)", name)
    }
    assert foreign == set()
    assert {"sow", "sow_client", "sow_cli", "sow_peering", "sow_replication", "sow_server"} <= top_level


def test_the_contract_and_its_stubs_are_inside(names: list[str]) -> None:
    expected = {f"sow/v1/{name}.proto" for name in ("types", "sow", "admin", "replication")}
    expected |= {
        f"sow/v1/{name}_pb2{ending}" for name in ("types", "sow", "admin", "replication") for ending in (".py", ".pyi")
    }
    expected |= {"sow/durations.py", "sow/version.py", "sow/v1/descriptors.binpb"}
    assert expected <= set(names)


def test_every_package_says_that_it_is_typed(names: list[str]) -> None:
    packages = {name.split("/")[0] for name in names if not name.startswith("sow-")}
    assert {f"{package}/py.typed" for package in packages} <= set(names)


def test_the_console_is_inside_with_its_files(names: list[str]) -> None:
    sources = ROOT / "clients" / "sow_console"
    files = [path for kind in ("static", "templates") for path in (sources / kind).rglob("*") if path.is_file()]
    assert len(files) > 10
    assert {str(path.relative_to(sources.parent)) for path in files} <= set(names)


def test_the_pages_of_the_help_are_inside(names: list[str]) -> None:
    assert {f"sow_cli/pages/{page.partition('#')[0]}" for page in helping.TOPICS.values()} <= set(names)


def test_the_man_pages_are_inside(names: list[str]) -> None:
    pages = {name.rpartition("/")[2] for name in names if "/share/man/man1/" in name}
    assert pages == {"sow.1", "sow-server.1", *[f"sow-{name}.1" for name in COMMANDS]}


def test_nothing_of_the_workshop_is_inside(names: list[str]) -> None:
    assert [
        name for name in names if re.search(r"(^|/)(tests?|benchmarks|examples|generate\.py|__pycache__)(/|$)", name)
    ] == []


def test_the_version_is_the_one_that_the_packages_tell(names: list[str]) -> None:
    assert f"sow-{__version__}.dist-info/METADATA" in names
    assert sow_client.__version__ == sow_server.__version__ == __version__


def test_both_commands_are_declared(names: list[str]) -> None:
    assert any(re.fullmatch(r"sow-[0-9.]+\.dist-info/entry_points\.txt", name) for name in names)
    assert any(re.fullmatch(r"sow-[0-9.]+\.dist-info/licenses/LICENSE", name) for name in names)
