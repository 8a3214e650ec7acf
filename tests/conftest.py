"""Settings of every test run: Hypothesis profiles, and one seed for the tests that draw at random themselves."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Final

# Tests start hundreds of servers and commands. Where a container asks for no bytecode, each of them would compile our
# modules anew, and each run would rewrite all assertions.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Before anything imports grpc: Spark's tests start Java by a fork, which the handlers of an open connection do not let
# live ("Java gateway process exited").
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import pytest
import structlog
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.support.oracles.examples import NIGHTLY
from tests.support.servers.cpu import CpuTimes
from tests.support.servers.spread import VARIABLE
from tests.support.servers.workers import FewMessages, HangingTests, OneSession

# No deadline: a shared machine stalls a single example at will. A failure prints the blob that reproduces it.
settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow], max_examples=25
)
settings.register_profile(NIGHTLY, settings.get_profile("default"), max_examples=2_000)
settings.load_profile(os.environ.get("SOW_HYPOTHESIS_PROFILE", "default"))

MEMORY: Final = Path("/dev/shm")
MEMORY_BYTES: Final = 8 * 2**30
"""Temporary files go to memory where so much is free. A run needs less than a quarter of it."""
_SEED_VARIABLE = "SOW_TEST_SEED"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cells",
        type=int,
        metavar="N",
        help="run each server of a test as N cells, which share its topics, and leave out what is for one server",
    )


def pytest_configure(config: pytest.Config) -> None:
    if cells := config.getoption("--cells"):
        os.environ[VARIABLE] = str(cells)
    config.pluginmanager.register(CpuTimes(config))
    config.pluginmanager.register(HangingTests())
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(FewMessages(config))
    # Tests raise many exceptions that are logged. To print one in colours, with the source around it, takes 0.1 s.
    plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], plain])
    sys.dont_write_bytecode = False
    if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= MEMORY_BYTES:
        # Thousands of tests open a store of their own. A sync in memory costs nothing, and no test relies on one of a
        # disk: those that cut the power count the synced bytes themselves. The servers under test inherit this.
        os.environ["TMPDIR"] = str(MEMORY)
        tempfile.tempdir = None  # it may have looked already
    os.environ["XDG_CONFIG_HOME"] = "/nonexistent"  # no test meets the contexts of who runs it
    # Tables of the command are as wide in every run: as without a terminal. Processes of pytest-xdist have 80 columns
    # in some surroundings.
    os.environ["COLUMNS"] = "140"
    # Set once in the controlling process; the workers of xdist inherit it.
    os.environ.setdefault(_SEED_VARIABLE, str(random.SystemRandom().randrange(2**32)))
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A shell gives this to its background jobs, and they to their children: no process under test would see Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)


TESTS = Path(__file__).parent
SLOWEST_FIRST = ("spark", "fault", "hostile", "integration", "edges", "robustness", "property", "unit", "mutants")
"""The folders of tests."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> OneSession:
    config.option.loadscopereorder = False  # as `pytest_collection_modifyitems` has ordered them
    return OneSession(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodeready() -> None:
    """While the processes of xdist collect, the one that waits for them has Hypothesis make its tables of characters.
    That takes a second in a fresh checkout, and each of the others would do it."""
    st.text().validate()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Each process of xdist collects another part of a folder first. In a fresh checkout the rewriting of assertions
    takes most of the time: a process finds the other parts written by the others."""
    report = yield
    if isinstance(collector, pytest.Directory) and (worker := getattr(collector.config, "workerinput", None)):
        first = len(report.result) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        report.result = report.result[first:] + report.result[:first]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # Modules and tests stay until the end: a collection of garbage need not visit them, neither now nor in each test.
    # What garbage there is among them stays too.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest first, so that no process still has one to do when the others have finished. All processes need one
    # order.
    kinds = {path: SLOWEST_FIRST.index(path.relative_to(TESTS).parts[0]) for path in {item.path for item in items}}
    places = {path: place for place, path in enumerate(sorted(kinds, key=lambda path: (kinds[path], path)))}
    items.sort(key=lambda item: places[item.path])


def pytest_report_header() -> str:
    return f"seed: {os.environ[_SEED_VARIABLE]} (repeat with {_SEED_VARIABLE}=…)"


@pytest.fixture
def seed() -> int:
    """The seed of this run, for tests that use `random.Random(seed)`."""
    value = int(os.environ[_SEED_VARIABLE])
    print(f"{_SEED_VARIABLE}={value}")
    return value
