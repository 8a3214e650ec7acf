"""The parts of `--cells` that need no process: pauses, the log of all, the data directory."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from sow_server import logs
from sow_server.config import Config, ConfigError, LogConfig, Overrides, all_cells, load
from sow_server.engine.disk.backups import DATABASE
from sow_server.engine.values.errors import OpenError
from sow_server.placement import load_placement
from sow_server.supervision import directories
from sow_server.supervision.output import LINE_BYTES_MAX, Lines, Output
from sow_server.supervision.pauses import PAUSE_SECONDS_MAX, WELL_SECONDS, Pauses
from sow_server.supervision.placement_file import prepare, to_make
from sow_server.supervision.supervisor import Starting
from tests.support.servers.certificates import Authority


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """The configuration of logs is global; a test's changes end with it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


# --- pauses ----------------------------------------------------------------------------------------------------------


def test_the_pause_doubles_up_to_a_bound_and_begins_anew_after_a_good_life() -> None:
    pauses = Pauses()
    assert [pauses.ended(0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert pauses.ended(WELL_SECONDS - 0.1) == PAUSE_SECONDS_MAX, "ready, but not for long"
    assert [pauses.ended(WELL_SECONDS), pauses.ended(0)] == [1, 2]


# --- the process of a cell -------------------------------------------------------------------------------------------


def test_options_for_one_start_are_not_those_of_the_next() -> None:
    """A cell that is started again must not accept another loss."""
    starting = Starting("cell-1", Path("data"), ("--cells", "2"), ("--accept-loss",))
    assert [starting.options(starts) for starts in range(3)] == [
        ("--cells", "2", "--accept-loss"),
        ("--cells", "2"),
        ("--cells", "2"),
    ]


@pytest.mark.slow
def test_a_cell_gets_sigterm_once_the_supervisor_has_gone_and_not_before() -> None:
    program = (
        "import sys; from sow_server.supervision.supervised import stop_with; stop_with(int(sys.argv[1])); input()"
    )
    read, written = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", program, str(read)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        pass_fds=[read],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as cell:
        os.close(read)
        with pytest.raises(subprocess.TimeoutExpired):
            cell.wait(0.5)
        os.close(written)
        assert cell.wait(60) == -signal.SIGTERM


@pytest.mark.slow
def test_sighup_ends_no_process_that_stops() -> None:
    program = (
        "import asyncio, os, signal; from sow_server.signals import ignore_reloads\n"
        "async def stop():\n"
        "    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, print, 'reads again')\n"
        "    ignore_reloads()\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    await asyncio.sleep(0)\n"
        "asyncio.run(stop())\n"
        "os.kill(os.getpid(), signal.SIGHUP)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], check=False, env=environment, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# --- the log ---------------------------------------------------------------------------------------------------------


class Log:
    """The log of all cells, as it was written."""

    def __init__(self, config: LogConfig) -> None:
        self.stream = io.StringIO()
        logs.configure(config, self.stream)
        self.output = Output(config, self.stream)
        self.ready: list[dict[str, object]] = []

    def lines(self, cell: str) -> Lines:
        return Lines(cell, self.output, self.ready.append)

    @property
    def written(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]


def _line(event: str, **more: object) -> bytes:
    return json.dumps({"time": "t", "level": "info", "event": event, "logger": "l"} | more).encode() + b"\n"


def test_lines_of_several_cells_go_out_whole_however_they_come_in() -> None:
    log = Log(LogConfig(format="json"))
    first, second = log.lines("cell-1"), log.lines("cell-2")
    one, two = _line("published", text='a "quoted" } text é'), _line("pruned", topic="b")
    for number in range(max(len(one), len(two))):
        first.feed(one[number : number + 1])
        second.feed(two[number : number + 1])
    assert log.written == [json.loads(two) | {"cell": "cell-2"}, json.loads(one) | {"cell": "cell-1"}]
    assert list(log.written[0])[:4] == ["time", "level", "event", "logger"]


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_cell_that_tells_of_another_one_keeps_its_own_name(form: str) -> None:
    log = Log(LogConfig(format=form))
    log.lines("cell-1").feed(_line("cell_in_trouble", cell="cell-2", trouble="DIFFERS"))
    (line,) = log.stream.getvalue().splitlines()
    assert ("about_cell=cell-2" if form == "console" else '"about_cell": "cell-2"') in line
    assert (" cell=cell-1" if form == "console" else ' "cell": "cell-1"') in line


def test_the_event_ready_goes_to_the_supervisor_alone() -> None:
    log = Log(LogConfig(format="json"))
    log.lines("cell-1").feed(_line("ready", address="127.0.0.1:1") + _line("pruned"))
    assert [event["address"] for event in log.ready] == ["127.0.0.1:1"]
    assert [event["event"] for event in log.written] == ["pruned"]


def test_a_line_that_is_no_event_becomes_one_and_the_message_of_a_start_is_kept() -> None:
    log = Log(LogConfig(format="json"))
    lines = log.lines("cell-3")
    lines.feed(b"terminate called\n\xff\n\nsow-server: no \xc3\xa9\n[1]\nand no end")
    assert lines.trouble == "no é"
    assert [(event["event"], event["cell"], event["text"]) for event in log.written] == [
        ("cell_output", "cell-3", "terminate called"),
        ("cell_output", "cell-3", "\\xff"),
        ("cell_output", "cell-3", "[1]"),
    ]
    lines.end()
    assert log.written[-1]["text"] == "and no end"
    lines.end()
    assert len(log.written) == 4


@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize(
    "line",
    [
        "{}",
        '{"level": "info"}',
        '{"event": 5}',
        '{"event": "e", "level": []}',
        '{"event": "e", "exception": 5}',
        '{"event": "e", "stack": 5}',
        pytest.param('{"event": ' + "[" * 5000 + "]" * 5000 + "}", id="deep"),
    ],
)
def test_a_line_of_json_that_is_no_event_is_written_and_ends_nothing(line: str, form: str) -> None:
    log = Log(LogConfig(format=form))
    lines = log.lines("cell-1")
    lines.feed(f"{line}\n".encode() + _line("pruned"))
    first, second = log.stream.getvalue().splitlines()
    assert "cell_output" in first
    assert "pruned" in second
    if form == "json":
        assert [(event["cell"], event.get("text", "")) for event in log.written] == [("cell-1", line), ("cell-1", "")]


def test_a_line_without_end_takes_bounded_memory() -> None:
    log = Log(LogConfig(format="json"))
    lines = log.lines("cell-1")
    for _ in range(3):
        lines.feed(b"x" * (LINE_BYTES_MAX // 2))
    assert [len(str(event["text"])) for event in log.written] == [3 * LINE_BYTES_MAX // 2]


@pytest.mark.parametrize(("level", "events"), [("debug", 3), ("info", 3), ("warning", 2), ("error", 1)])
def test_the_level_of_the_file_counts_though_cells_log_more(level: str, events: int) -> None:
    log = Log(LogConfig(format="json", level=level))
    lines = log.lines("cell-1")
    for own in ("info", "warning", "error"):
        lines.feed(_line("e", level=own))
    lines.feed(_line("ready", address="a"))
    assert (len(log.written), len(log.ready)) == (events, 1), "readiness does not depend on it"


def test_people_get_lines_for_people() -> None:
    log = Log(LogConfig(format="console"))
    log.lines("cell-2").feed(_line("pruned", topic="orders"))
    (line,) = log.stream.getvalue().splitlines()
    assert "cell=cell-2" in line
    assert "topic=orders" in line
    assert "{" not in line


def test_a_reader_of_the_log_that_has_gone_stops_nothing() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    Lines("cell-1", Output(LogConfig(format="json"), Gone()), lambda event: None).feed(_line("pruned"))


# --- the data directory ----------------------------------------------------------------------------------------------


def _store(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "SOW").write_text("sow data")


def test_cells_do_not_start_empty_beside_the_data_of_a_server_alone(tmp_path: Path) -> None:
    data = tmp_path / "it's data"
    _store(data)
    with pytest.raises(OpenError) as refused:
        directories.check_cells(data, 4)
    said = str(refused.value)
    assert said.startswith(f"{data} has the data of a server without --cells; to make it the first cell, run: ")
    subprocess.run(["sh", "-ec", said.partition("run: ")[2]], check=True)
    assert (data / "cell-1" / "SOW").exists()
    directories.check_cells(data, 4)


def test_a_server_alone_does_not_start_empty_beside_cells(tmp_path: Path) -> None:
    directories.check_alone(tmp_path / "none")
    for number in (2, 10):
        _store(tmp_path / f"cell-{number}")
    with pytest.raises(OpenError, match="has the data of cells; start with --cells 10, or take another"):
        directories.check_alone(tmp_path)
    directories.check_alone(tmp_path / "cell-2")
    (tmp_path / "SOW").touch()
    directories.check_alone(tmp_path)  # it has its own data


def test_fewer_cells_than_have_data_are_refused(tmp_path: Path) -> None:
    for number in (1, 3, 4):
        _store(tmp_path / f"cell-{number}")
    (tmp_path / "cell-9").mkdir()  # without data
    (tmp_path / "cell-05").mkdir()
    directories.check_cells(tmp_path, 4)
    directories.check_cells(tmp_path, 8)
    with pytest.raises(
        OpenError, match="has the data of cell-3, cell-4, which --cells 2 does not serve; start with --c"
    ):
        directories.check_cells(tmp_path, 2)


# --- the placement ---------------------------------------------------------------------------------------------------


class Machine:
    """A configuration that several cells have, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made = folder / "sow-data" / "placement.toml"

    def cells(self, of: int, config: str = "") -> dict[str, Config]:
        path = self.folder / "sow.toml"
        path.write_text(config)
        return {cell.name: load(path, Overrides(cell=cell)) for cell in all_cells(of, 2)}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_file_that_is_made_names_all_cells_and_is_made_anew_with_a_higher_version(machine: Machine) -> None:
    prepare(machine.cells(2))
    placement = load_placement(machine.made)
    assert (placement.version, placement.default, placement.topics) == (1, "cell-1", ())
    assert dict(placement.cells) == {"cell-1": ("127.0.0.1:7450",), "cell-2": ("127.0.0.1:7451",)}
    before = machine.made.stat()
    prepare(machine.cells(2))
    assert machine.made.stat() == before, "the same file"
    prepare(machine.cells(3, '[server]\nlisten = "127.0.0.1:7500"\n'))
    placement = load_placement(machine.made)
    assert (placement.version, placement.cells["cell-3"]) == (2, ("127.0.0.1:7502",))
    prepare(machine.cells(1))
    assert (load_placement(machine.made).version, list(load_placement(machine.made).cells)) == (3, ["cell-1"])
    assert [file.name for file in machine.made.parent.iterdir()] == ["placement.toml"]


def test_no_file_is_made_beside_data_of_a_second_cell(machine: Machine) -> None:
    prepare(machine.cells(2))
    machine.made.unlink()
    (machine.made.parent / "cell-1" / DATABASE).mkdir(parents=True)
    prepare(machine.cells(2))
    machine.made.unlink()
    (machine.made.parent / "cell-2" / DATABASE).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"placement\.toml: is missing, although cells have data"):
        prepare(machine.cells(2))


def test_a_file_that_somebody_changed_is_never_written(machine: Machine) -> None:
    prepare(machine.cells(2))
    changed = machine.made.read_text() + '[[topics]]\npattern = "trades"\ncell = "cell-2"\n'
    machine.made.write_text(changed)
    prepare(machine.cells(2))
    with pytest.raises(ConfigError) as refused:
        prepare(machine.cells(3))
    said = "[cells] has no cell-3, which --cells 3 starts: add it, with the port 7452, and raise the version"
    assert str(refused.value) == f"{machine.made}: {said}"
    with pytest.raises(ConfigError) as refused:
        prepare(machine.cells(2, '[server]\nlisten = "127.0.0.1:7500"\n'))
    assert str(refused.value) == (
        f"{machine.made}: [cells] cell-1: none of its addresses has the port where cell-1 listens, 7500"
    )
    assert machine.made.read_text() == changed


def test_a_file_of_the_configuration_is_never_written_and_may_name_other_hosts(machine: Machine) -> None:
    own = machine.folder / "place.toml"
    config = '[server]\nlisten = "0.0.0.0:7450"\ninsecure = true\n[placement]\nfile = "place.toml"\n'
    with pytest.raises(ConfigError, match=r"place\.toml: cannot be read"):
        prepare(machine.cells(2, config))
    text = (
        'version = 1\ndefault = "cell-1"\n[cells]\ncell-1 = ["a:7450"]\ncell-2 = ["b:1", "a:7451"]\nfar = ["c:7450"]\n'
    )
    own.write_text(text)
    prepare(machine.cells(2, config))
    assert own.read_text() == text
    assert not machine.made.exists()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('[server]\nlisten = "0.0.0.0:7450"\ninsecure = true\n', "each cell is: 0.0.0.0:7450 names no host"),
        ('[server]\nlisten = "[::]:7450"\ninsecure = true\n', r"each cell is: \[::\]:7450 names no host"),
        (
            '[[server.listeners]]\nlisten = "127.0.0.1:7450"\n[[server.listeners]]\nlisten = "127.0.0.1:7451"\n',
            "each listens on several addresses",
        ),
    ],
)
def test_without_one_address_for_clients_a_file_is_asked_for(machine: Machine, config: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        prepare(machine.cells(2, config))
    assert not machine.made.exists()


def test_cells_that_speak_tls_need_the_authority_by_which_they_ask_each_other(machine: Machine) -> None:
    authority = Authority(machine.folder, "ca")
    issued = authority.issue("sow")
    tls = f'[server.tls]\ncertificate = "{issued.certificate}"\nkey = "{issued.key}"\n'
    with pytest.raises(ConfigError, match=r"^\[placement\] ca: is needed, because the cells ask each other over TLS"):
        prepare(machine.cells(2, tls))
    prepare(machine.cells(2, f'{tls}[placement]\nfile = "sow-data/placement.toml"\nca = "{authority.file}"\n'))
    assert list(load_placement(machine.made).cells) == ["cell-1", "cell-2"]


def test_a_check_makes_nothing(machine: Machine) -> None:
    assert 'cell-2 = ["127.0.0.1:7451"]' in to_make(machine.cells(2))
    assert not machine.made.parent.exists()
