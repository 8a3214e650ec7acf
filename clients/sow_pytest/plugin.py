"""The fixtures `sow_server`, `sow_client` and `sow_clock` of pytest.

[1]  A pytest that uses no fixture of these imports neither the client nor the server, and starts nothing.
[2]  There is one server for a session, with pytest-xdist one for each worker. A test meets no topic and no policy of a
     test before it: those that were made since its begin are deleted at its end.
[3]  The log that the server has written since the begin of a test is part of its report if it fails.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sow_client import Client
    from sow_pytest.process import ServerOfSession
    from sow_pytest.views import Clock, ServerOfTest

_SERVER: pytest.StashKey[ServerOfTest] = pytest.StashKey()


@pytest.fixture(scope="session")
def sow_server_config() -> str:
    """The configuration of the server, as TOML; override it in a conftest.py. Where it listens and keeps its data is
    not a part of it."""
    return '[server]\ndynamic_topics = true\ndurability = "buffered"\nreader_processes = 0\n'


@pytest.fixture(scope="session")
def sow_server_process(
    tmp_path_factory: pytest.TempPathFactory, sow_server_config: str
) -> Generator[ServerOfSession, None, None]:
    """The server of the session, for fixtures of a wider scope than a test. Their topics stay."""
    from sow_pytest.process import DidNotStart, ServerOfSession  # only here: [1]

    try:
        server = ServerOfSession(tmp_path_factory.mktemp("sow-server"), sow_server_config)
    except DidNotStart as error:
        pytest.fail(f"sow_server: {error}", pytrace=False)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def sow_server(
    request: pytest.FixtureRequest, sow_server_process: ServerOfSession
) -> Generator[ServerOfTest, None, None]:
    """A real server without a record of another test; see docs/howto/testing.md."""
    from sow_pytest.views import ServerOfTest

    view = ServerOfTest(sow_server_process, request.node.name)
    request.node.stash[_SERVER] = view
    try:
        yield view
    finally:
        view.close()


@pytest.fixture
def sow_client(sow_server: ServerOfTest) -> Client:
    """A client of `sow_server`."""
    return sow_server.client


@pytest.fixture
def sow_clock(sow_server: ServerOfTest) -> Clock:
    """Moves the time of `sow_server` forward. It stays ahead when the test ends, as time never goes back."""
    from sow_pytest.views import Clock

    return Clock(sow_server)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the server's log to the report of a test that fails ([3])."""
    report = yield
    view = item.stash.get(_SERVER, None)
    if report.failed and view is not None and (log := view.log):
        report.sections.append((f"log of sow-server on {view.address}", log))
    return report
