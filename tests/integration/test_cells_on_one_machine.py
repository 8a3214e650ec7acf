"""`sow-server --cells N`: one command runs several servers, and none is lost (rule C9)."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from sow_cli.moving import Mover
from sow_cli.session import Session, connect
from sow_client import Client
from tests.support.servers.server import DidNotStart, ServerProcess, free_port, until

WAIT_SECONDS: Final = 90.0
QUIET: Final = "[server]\ndynamic_topics = true\nreader_processes = 0\n"


@pytest.fixture
def cells(tmp_path: Path) -> Iterator[ServerProcess]:
    """Two cells, not started."""
    with ServerProcess(tmp_path, QUIET, arguments=["--cells", "2"], start=False) as server:
        yield server


def _pid(cells: ServerProcess, name: str) -> int:
    """The process of a cell, of its last start."""
    pid = [event["pid"] for event in cells.events("cell_started") if event["cell"] == name][-1]
    assert isinstance(pid, int)
    return pid


def _state(pid: int) -> str:
    """The state of a process: "T" stopped, "Z" ended and not awaited by anybody, "" gone (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _runs(pid: int) -> bool:
    return _state(pid) not in ("", "Z")


def _halt(pid: int) -> None:
    """Stops a process for a while: it hears of nothing until SIGCONT."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _state(pid) == "T", WAIT_SECONDS, "the process to halt")


def _address(cells: ServerProcess, name: str) -> str:
    return str([event["address"] for event in cells.events("cell_ready") if event["cell"] == name][-1])


def _place_trades(cells: ServerProcess) -> None:
    """As a user does it: a line more, the next version, SIGHUP."""
    file = cells.data / "placement.toml"
    text = file.read_text().replace("version = 1", "version = 2")
    file.write_text(text + '[[topics]]\npattern = "trades"\ncell = "cell-2"\n')
    cells.signal(signal.SIGHUP)
    until(lambda: len(cells.events("placement_reloaded")) == 2, WAIT_SECONDS, "both to read the file")
    assert {event["cell"] for event in cells.events("placement_reloaded")} == {"cell-1", "cell-2"}


def _ready_times(cells: ServerProcess, name: str) -> int:
    return len([event for event in cells.events("cell_ready") if event["cell"] == name])


def test_a_cell_that_is_killed_comes_back_with_its_data_while_the_other_serves(cells: ServerProcess) -> None:
    cells.start()
    (ready,) = cells.events("ready")
    host, _, port = cells.address.rpartition(":")
    assert (ready["address"], ready["cell"]) == (cells.address, "all")
    assert ready["addresses"] == [cells.address, f"{host}:{int(port) + 1}"]
    with Client(_address(cells, "cell-1")) as first, Client(_address(cells, "cell-2")) as second:
        first.publish("orders", {"id": 1}, key="1")
        _place_trades(cells)
        second.publish("trades", {"id": 2}, key="2")
        settings = {(one.table, one.key): one for one in second.config()}
        assert settings["server", "data_dir"].value == f'"{cells.data}/cell-2"'
        assert settings["server", "data_dir"].origin == "command line"

        os.kill(_pid(cells, "cell-2"), signal.SIGKILL)
        until(lambda: cells.events("cell_ended"), WAIT_SECONDS, "the end of cell-2")
        first.publish("orders", {"id": 3}, key="3")
        until(lambda: _ready_times(cells, "cell-2") == 2, WAIT_SECONDS, "cell-2 to come back")
    with Client(_address(cells, "cell-2")) as second:
        assert second.get("trades", "2") is not None
    (ended,) = cells.events("cell_ended")
    assert (ended["cell"], ended["code"], ended["starts_again_in_seconds"]) == ("cell-2", -signal.SIGKILL, 1.0)
    assert _ready_times(cells, "cell-1") == 1

    assert cells.terminate() == 0
    assert all("cell" in event for event in cells.events()), "each line has the field"
    assert [event["cell"] for event in cells.events("stopped")][-1] == "all", "after the last cell"
    assert {event["cell"] for event in cells.events("stopped")} == {"cell-1", "cell-2", "all"}
    assert not cells.faults()


@pytest.mark.long
def test_no_cell_outlives_a_supervisor_that_is_killed_and_a_new_one_waits_for_the_old(cells: ServerProcess) -> None:
    cells.start()
    with Client(cells.address) as client:
        client.publish("orders", {"id": 1}, key="1")
    pids = [_pid(cells, name) for name in ("cell-1", "cell-2")]
    os.kill(cells.pid, signal.SIGKILL)
    cells.wait()
    until(lambda: not any(map(_runs, pids)), WAIT_SECONDS, "the end of the cells")
    slow = os.open(cells.data / "cell-1", os.O_RDONLY)  # as one of them that takes longer to stop
    fcntl.flock(slow, fcntl.LOCK_EX)
    cells.launch()
    until(lambda: cells.events("cell_waits"), WAIT_SECONDS, "the new supervisor to wait")
    until(lambda: _ready_times(cells, "cell-2"), WAIT_SECONDS, "the other cell, which need not wait")
    os.close(slow)
    cells.await_ready()
    assert [event["cell"] for event in cells.events("cell_waits")] == ["cell-1"]
    with Client(cells.address) as client:
        assert client.get("orders", "1") is not None
    assert cells.terminate() == 0


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_start_stops_all_and_a_second_one_changes_nothing(
    cells: ServerProcess, number: signal.Signals
) -> None:
    cells.launch()
    until(lambda: len(cells.events("cell_started")) == 2, WAIT_SECONDS, "both processes")
    pids = [_pid(cells, name) for name in ("cell-1", "cell-2")]
    _halt(pids[0])
    cells.signal(number)
    until(lambda: cells.events("stopping"), WAIT_SECONDS, "the stop to begin")
    until(lambda: not _runs(pids[1]), WAIT_SECONDS, "the end of cell-2")
    cells.signal(number)
    until(lambda: cells.events("still_stopping"), WAIT_SECONDS, "the answer to the second signal")
    assert "cell-1" in str(cells.events("still_stopping")[0]["cells"])
    assert cells.alive
    os.kill(pids[0], signal.SIGCONT)
    assert cells.wait() == 0
    assert not any(map(_runs, pids))


@pytest.mark.long
def test_a_cell_that_cannot_start_ends_the_first_start_with_its_message(tmp_path: Path) -> None:
    port = free_port()
    with (
        socket.create_server(("127.0.0.1", port + 1)),
        ServerProcess(tmp_path, QUIET, arguments=["--cells", "2"], port=port, start=False) as cells,
    ):
        with pytest.raises(DidNotStart) as ended:
            cells.start()
        assert ended.value.code == 2
        last = ended.value.said.splitlines()[-1]
        assert last.startswith(f"sow-server: cell-2: cannot listen on 127.0.0.1:{port + 1}: perhaps the port is taken")
        assert not any(_runs(_pid(cells, name)) for name in ("cell-1", "cell-2"))


@pytest.mark.long
def test_a_cell_that_cannot_start_again_does_not_end_the_others(cells: ServerProcess) -> None:
    cells.start()
    os.kill(_pid(cells, "cell-2"), signal.SIGKILL)
    until(lambda: cells.events("cell_ended"), WAIT_SECONDS, "the end of cell-2")
    database = cells.data / "cell-2" / "db"
    database.rename(cells.data / "aside")  # before the start again, a second later
    until(lambda: len(cells.events("cell_ended")) == 2, WAIT_SECONDS, "a start that goes wrong")
    killed, refused = cells.events("cell_ended")
    assert (killed["code"], killed["starts_again_in_seconds"]) == (-signal.SIGKILL, 1.0)
    assert (refused["code"], refused["starts_again_in_seconds"]) == (2, 2.0)
    assert str(cells.data / "cell-2") in str(refused["message"])
    with Client(cells.address) as client:
        client.publish("orders", {"id": 1}, key="1")
    (cells.data / "aside").rename(database)
    until(lambda: _ready_times(cells, "cell-2") == 2, WAIT_SECONDS, "cell-2 to come back")
    assert cells.terminate() == 0


@pytest.mark.long
def test_a_cell_that_starts_again_has_the_configuration_of_the_others(cells: ServerProcess) -> None:
    """Story: the file had another data directory by then, and the one cell that was started again had no data."""
    cells.start()
    with Client(cells.address) as client:
        client.publish("orders", {"id": 1}, key="1")
    cells.configure(QUIET + '[defaults]\nmax_age = "1h"\n[log]\nlevel = "error"\n')
    for times in (2, 3):
        os.kill(_pid(cells, "cell-1"), signal.SIGKILL)

        def is_back(times: int = times) -> bool:
            return _ready_times(cells, "cell-1") == times

        until(is_back, WAIT_SECONDS, "cell-1 to come back")
        with Client(cells.address) as client:
            assert client.get("orders", "1") is not None
            assert {one.value for one in client.config() if one.key == "level"} == {'"info"'}
    (told,) = cells.events("configuration_changed")
    assert (told["cell"], told["file"]) == ("all", str(cells.config))
    assert cells.terminate() == 0


@pytest.mark.long
def test_the_options_for_one_start_are_not_those_of_the_next(cells: ServerProcess) -> None:
    """A cell that is started again must not accept another loss."""
    cells.start("--accept-loss", "--accept-clock")
    before = Path(f"/proc/{_pid(cells, 'cell-2')}/cmdline").read_text().split("\0")
    assert {"--accept-loss", "--accept-clock"} < set(before)
    os.kill(_pid(cells, "cell-2"), signal.SIGKILL)
    until(lambda: _ready_times(cells, "cell-2") == 2, WAIT_SECONDS, "cell-2 to come back")
    after = Path(f"/proc/{_pid(cells, 'cell-2')}/cmdline").read_text().split("\0")
    assert [one for one in before if one not in after] == ["--accept-clock", "--accept-loss"]
    assert cells.terminate() == 0


@pytest.mark.long
def test_data_that_would_be_left_aside_refuse_the_start(cells: ServerProcess) -> None:
    cells.arguments = []
    cells.start()
    assert cells.terminate() == 0
    cells.arguments = ["--cells", "2"]
    with pytest.raises(DidNotStart, match="has the data of a server without --cells"):
        cells.start()
    moved = cells.data.rename(cells.data.with_name("aside"))
    cells.data.mkdir(mode=0o700)
    moved.rename(cells.data / "cell-1")
    cells.start()
    with pytest.raises(DidNotStart, match="another sow-server is using this data directory"):
        ServerProcess(cells.data.parent, QUIET, arguments=["--cells", "2"], port=free_port())
    assert cells.terminate() == 0
    for arguments, said in ([], "has the data of cells"), (["--cells", "1"], "has the data of cell-2, which --cells 1"):
        cells.arguments = arguments
        with pytest.raises(DidNotStart, match=said):
            cells.start()
    cells.arguments = ["--cells", "2", "--cell", "cell-2"]  # one alone, without a supervisor
    cells.start()
    assert cells.terminate() == 0


@pytest.mark.long
def test_all_read_the_access_file_again_at_sighup_also_one_that_was_starting(tmp_path: Path) -> None:
    access = tmp_path / "auth.toml"
    access.touch(mode=0o600)
    access.write_text('[[identities]]\nname = "ops"\ntoken_sha256 = "' + 64 * "0" + '"\n')
    config = QUIET + '[access]\nfile = "auth.toml"\n'
    with ServerProcess(tmp_path, config, arguments=["--cells", "2"]) as cells:
        os.kill(_pid(cells, "cell-2"), signal.SIGKILL)
        until(lambda: len(cells.events("cell_started")) == 3, WAIT_SECONDS, "the second start of cell-2")
        cells.signal(signal.SIGHUP)
        until(lambda: len(cells.events("access_reloaded")) == 2, WAIT_SECONDS, "both to read the file")
        assert {event["cell"] for event in cells.events("access_reloaded")} == {"cell-1", "cell-2"}
        assert cells.terminate() == 0
        names = sorted(file.name for file in tmp_path.glob("sow-audit*"))
        assert "sow-audit-cell-1.jsonl" in names
        assert "sow-audit-cell-2.jsonl" in names


def _dead_children(pid: int) -> list[int]:
    """Children of a process that have ended, and whose end it has not taken note of."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if (state, int(parent)) == ("Z", pid):
            found.append(int(stat.parent.name))
    return found


@pytest.mark.long
def test_a_supervisor_that_is_process_1_leaves_no_dead_processes_of_killed_cells(tmp_path: Path) -> None:
    config = QUIET.replace("reader_processes = 0", "reader_processes = 2")
    with ServerProcess(tmp_path, config, arguments=["--cells", "2"], start=False) as cells:
        cells.module = "tests.support.servers.inheriting"
        cells.start()
        with Client(cells.address) as client, client.publisher("t", durability="buffered") as publisher:
            for number in range(20_000):
                publisher.publish({"id": number}, key=str(number))
            publisher.flush()
            client.count("t", "/id >= 0")  # the first long query starts a reader process
        until(lambda: cells.events("reader_process_ready"), WAIT_SECONDS, "a reader process")
        readers = [int(str(event["pid"])) for event in cells.events("reader_process_ready")]
        os.kill(_pid(cells, "cell-1"), signal.SIGKILL)
        until(lambda: not any(map(_state, readers)), WAIT_SECONDS, "the end of the readers to be taken note of")
        until(lambda: _ready_times(cells, "cell-1") == 2, WAIT_SECONDS, "cell-1 to come back")
        assert not _dead_children(cells.pid)
        (ended,) = cells.events("cell_ended")
        assert ended["code"] == -signal.SIGKILL
        assert cells.terminate() == 0


@pytest.mark.long
def test_a_topic_moves_between_the_cells_without_more_settings(cells: ServerProcess) -> None:
    """They share the placement file: the one that the topic leaves writes it for all."""
    cells.start()
    with Client(_address(cells, "cell-1")) as client:
        client.create_topic("trades", key=["/id"])
        client.publish("trades", {"id": 1})
    with Mover(Session(_address(cells, "cell-1"), None, connect), ("trades",), "cell-2", print) as mover:
        assert mover.move().kept == ()
    for cell in (1, 2):
        _kill_and_await(cells, f"cell-{cell}")
    with Client(_address(cells, "cell-1")) as client:
        assert [record.key for record in client.query("trades")] == ["1"]
        assert client.servers_of("trades") == _address(cells, "cell-2")
        assert client.placement().prepared is None
    assert cells.terminate() == 0


def _kill_and_await(cells: ServerProcess, name: str) -> None:
    times = _ready_times(cells, name)
    os.kill(_pid(cells, name), signal.SIGKILL)
    until(lambda: _ready_times(cells, name) > times, WAIT_SECONDS, f"{name} to come back")
