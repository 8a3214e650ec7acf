"""The README and the pages of the documentation, word for word: every block runs, and writes what the page shows.

The pages for users of other systems have commands side by side. Those of Redis and etcd run where these are installed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from benchmarks.etcd_peer import EtcdServer
from benchmarks.processes import NotInstalled
from benchmarks.redis_peer import RedisServer
from tests.support.servers.forked_commands import commands
from tests.support.servers.pages import Reader, blocks
from tests.support.servers.server import DYNAMIC, ROOT, ServerProcess

DOCS: Final = ROOT / "docs"
FOLDERS: Final = ("howto", "migrate", "operations")
PAGES: Final = [
    ROOT / "README.md",
    DOCS / "index.md",
    DOCS / "tutorial.md",
    DOCS / "keys.md",
    DOCS / "lifetimes.md",
    DOCS / "sql.md",
    *(page for folder in FOLDERS for page in sorted((DOCS / folder).glob("*.md"))),
]
REDIS_PORT: Final = "6379"
TOOLS: Final = ("curl", "jq")
"""Programs that a page may use, and a machine may lack."""
# Records expire while they are followed.
pytestmark = pytest.mark.smoke


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The server of all pages that start none: a reader has one, too, and goes from page to page."""
    with ServerProcess(tmp_path_factory.mktemp("server"), DYNAMIC) as running:
        yield running


def starts_a_server(page: Path) -> bool:
    return any(block.is_run and block.is_server for block in blocks(page))


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    try:
        running = RedisServer(tmp_path_factory.mktemp("redis") / "data")
    except NotInstalled as error:
        pytest.skip(str(error))
    yield running
    running.stop()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: os.path.relpath(page, DOCS))
def test_a_page_does_what_it_says(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for tool in TOOLS:
        if shutil.which(tool) is None and any(re.search(rf"\b{tool} ", block.text) for block in blocks(page)):
            pytest.skip(f"the page uses {tool}, which is not installed")
    port = None
    if not starts_a_server(page):
        shared: ServerProcess = request.getfixturevalue("server")
        port = int(shared.address.rpartition(":")[2])
    reader = Reader(tmp_path, commands(), port=port)
    if any(REDIS_PORT in block.text for block in blocks(page)):
        redis: RedisServer = request.getfixturevalue("redis")
        reader.places[REDIS_PORT] = str(redis.port)
    try:
        reader.follow_page(page)
    finally:
        reader.close()


@pytest.mark.long
def test_the_tutorial_works_with_commands_as_users_start_them(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    try:
        reader.follow_page(DOCS / "tutorial.md")
    finally:
        reader.close()


def others(page: str) -> list[str]:
    """The commands of the other system on a page, without those that wait for something to happen."""
    found = [command for block in blocks(DOCS / "migrate" / page) for command in block.other]
    return [command for command in found if not command.startswith(("PSUBSCRIBE", "etcdctl watch", "etcdctl lock"))]


def test_the_commands_of_redis_on_its_page_are_such(redis: RedisServer) -> None:
    commands = [command for command in others("redis.md") if command.isascii() and command.split()[0].isupper()]
    assert len(commands) > 30
    for command in commands:
        done = subprocess.run(
            ["redis-cli", "-e", "-p", str(redis.port), *shlex.split(command)],
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


@pytest.mark.skipif(shutil.which("etcd") is None or shutil.which("etcdctl") is None, reason="etcd is not installed")
def test_the_commands_of_etcd_on_its_page_are_such(tmp_path: Path) -> None:
    etcd = EtcdServer(tmp_path / "data")
    try:
        commands = [command for command in others("etcd.md") if command.startswith("etcdctl ")]
        assert len(commands) > 10
        for command in commands:
            environment = os.environ | {"ETCDCTL_ENDPOINTS": etcd.address, "ETCDCTL_API": "3"}
            done = subprocess.run(shlex.split(command), check=False, capture_output=True, text=True, env=environment)
            assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    finally:
        etcd.stop()
