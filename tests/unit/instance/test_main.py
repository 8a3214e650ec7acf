"""`sow-server` as it is started: its options, its exit codes, its one message, its logs."""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from sow_server import __main__ as program
from sow_server import __version__, app, config, logs
from sow_server.config import Config, LogConfig, MetricsConfig
from sow_server.engine.values.errors import OpenError
from sow_server.metrics import Metrics
from sow_server.metrics_pages import Readiness
from sow_server.metrics_server import serve_metrics
from sow_server.ready import why_not_ready
from sow_server.services.log_tail import LogTail
from tests.support.servers.certificates import Authority
from tests.support.servers.server import free_port


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


@pytest.fixture(autouse=True)
def umask_as_before() -> Iterator[None]:
    """So is the umask, which `main` sets."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Records the arguments of the start instead of starting a server."""
    found: list[Config] = []

    def run(settings: Config, tail: LogTail, *, time_source: object) -> int:
        found.append(settings)
        return 0

    monkeypatch.setattr(app, "run", run)
    return found


# --- options ---------------------------------------------------------------------------------------------------------


def test_every_option_reaches_the_configuration(started: list[Config], tmp_path: Path) -> None:
    file = tmp_path / "sow.toml"
    file.write_text('[log]\nlevel = "error"\n')
    options = ["--data-dir", "d", "--listen", "0.0.0.0:1", "--prune-interval", "5s", "--accept-clock", "--insecure"]
    options += ["--accept-loss", "--authoritative"]
    assert program.main(["--config", str(file), *options]) == 0
    (found,) = started
    assert found.log.level == "error"
    assert found.server.data_dir == Path.cwd() / "d"
    assert found.server.listen == "0.0.0.0:1"
    assert found.journal.prune_interval_micros == 5_000_000
    assert found.accept_clock
    assert found.accept_loss
    assert found.authoritative
    assert found.server.insecure


def test_a_server_makes_no_file_that_others_may_access(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """X5: whatever the umask of its caller."""

    def run(settings: Config, tail: LogTail, *, time_source: object) -> int:
        (tmp_path / "file").touch()
        (tmp_path / "folder").mkdir()
        return 0

    monkeypatch.setattr(app, "run", run)
    assert program.main([]) == 0
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("file", "folder")] == [0o600, 0o700]


def test_without_options_it_starts_with_the_defaults(started: list[Config]) -> None:
    assert program.main([]) == 0
    assert started == [config.load(None)]


def test_checking_warns_of_retention_without_a_bound_in_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """J17: allowed, and told; a hard limit, or no journal, is a bound. The [defaults] hold for topics, too."""
    file = tmp_path / "sow.toml"
    file.write_text(
        "[topics.forever]\nretain_time = 'unlimited'\nretain_bytes = 'unlimited'\n"
        "[topics.hour]\nretain_time = '1h'\nretain_bytes = 'unlimited'\n"
        "[topics.bounded]\nretain_bytes = 'unlimited'\nmax_bytes = '1GiB'\n"
        "[topics.unjournaled]\nretain_bytes = 'unlimited'\njournal = false\n"
    )
    assert program.main(["--config", str(file), "--check-config"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{file}: ok\n"
    forever, hour = said.err.splitlines()
    assert forever.startswith(f"sow-server: warning: {file}: [topics.forever] retain_bytes: ")
    assert "keeps everything, however large" in forever
    assert "[topics.hour] retain_bytes: " in hour
    assert "younger than 1h" in hour
    file.write_text("[defaults]\nretain_bytes = 'unlimited'\n[topics.a]\n[topics.b]\nretain_bytes = '1GiB'\n")
    assert program.main(["--config", str(file), "--check-config"]) == 0
    told = capsys.readouterr().err.splitlines()
    assert [line.split("[")[1].split("]")[0] for line in told] == ["defaults", "topics.a"]


def test_checking_starts_nothing(started: list[Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sow.toml"
    file.write_text("[topics.orders]\n")
    assert program.main(["--config", str(file), "--check-config"]) == 0
    assert capsys.readouterr().out == f"{file}: ok\n"
    file.write_text("[topics.orders]\nexpriation = '30s'\n")
    assert program.main(["--config", str(file), "--check-config"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"sow-server: {file}: [topics.orders] expriation: unknown key, did you mean expiration?\n"
    assert not started


def test_a_server_starts_with_the_printed_configuration(
    started: list[Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["--print-config", "--data-dir", str(tmp_path / "d"), "--prune-interval", "90s"]) == 0
    file = tmp_path / "sow.toml"
    file.write_text(capsys.readouterr().out)
    assert not started
    assert program.main(["--config", str(file)]) == 0
    assert started[0].journal.prune_interval_micros == 90_000_000
    assert started[0].server.data_dir == tmp_path / "d"


def test_check_ready_asks_the_running_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also over TLS, as a name in the certificate means nothing on the machine itself."""
    readiness = Readiness()
    issued = Authority(tmp_path, "ca").issue("elsewhere")
    port = free_port()
    file = tmp_path / "sow.toml"
    file.write_text(f'[metrics]\nlisten = "0.0.0.0:{port}"\ncertificate = "elsewhere.pem"\nkey = "elsewhere.key"\n')
    command = ["--config", str(file), "--check-ready"]

    assert program.main(command) == 1
    assert capsys.readouterr().out.startswith(f"not ready: no answer from 0.0.0.0:{port} (")

    settings = MetricsConfig(listen=f"127.0.0.1:{port}", certificate=issued.certificate, key=issued.key)
    server = serve_metrics(settings, Metrics(), readiness)
    assert server is not None
    try:
        assert program.main(command) == 1
        assert capsys.readouterr().out == "not ready: starting\n"
        readiness.ready()
        assert program.main(command) == 0
        assert capsys.readouterr().out == "ready\n"
    finally:
        server.close()


@pytest.mark.slow
def test_check_ready_bounds_the_whole_answer() -> None:
    """An answer that came byte by byte took as long as it liked: the timeout was one of each read."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        done = threading.Event()

        def trickle() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\n")
                while not done.wait(0.02):
                    connection.sendall(b"X-Slow: 1\r\n")

        slow = threading.Thread(target=trickle)
        slow.start()
        try:
            assert why_not_ready(MetricsConfig(listen=address), 0.2) == f"no whole answer from {address} within 0.2 s"
        finally:
            done.set()
            slow.join()


def test_check_ready_needs_the_metrics_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--check-ready"]) == 2
    assert "[metrics] listen is not set" in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"sow-server {__version__}\n"


@pytest.mark.parametrize("options", [["--lisen", "x"], ["surplus"], ["--config"], ["--check-config", "--print-config"]])
def test_wrong_usage_exits_with_2(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(options)
    assert ended.value.code == 2
    assert "usage: sow-server" in capsys.readouterr().err


# --- trouble at start ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OpenError("no data"), app.StartError("port taken")])
def test_trouble_at_start_is_one_message_and_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def run(settings: Config, tail: LogTail, *, time_source: object) -> int:
        raise error

    monkeypatch.setattr(app, "run", run)
    assert program.main([]) == 2
    assert capsys.readouterr().err == f"sow-server: {error}\n"


def test_the_exit_code_is_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "run", lambda settings, tail, *, time_source: 7)
    assert program.main([]) == 7


def test_an_interrupted_start_leaves_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(settings: Config, tail: LogTail, *, time_source: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "run", run)
    assert program.main([]) == 130


# --- logs ------------------------------------------------------------------------------------------------------------


def _logged(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_away_from_a_terminal_a_line_is_an_object_with_the_events_fields() -> None:
    stream = io.StringIO()
    logs.configure(LogConfig(), stream)
    structlog.get_logger("sow_server.app").info("ready", address="127.0.0.1:7450", data_dir=Path("/d"))
    (event,) = _logged(stream)
    assert list(event) == ["time", "level", "event", "logger", "address", "data_dir"]
    assert str(event.pop("time")).endswith("Z")
    assert event == {
        "level": "info",
        "event": "ready",
        "logger": "sow_server.app",
        "address": "127.0.0.1:7450",
        "data_dir": "/d",
    }


def test_loggers_of_the_standard_library_join_in() -> None:
    stream = io.StringIO()
    logs.configure(LogConfig(), stream)
    logging.getLogger("asyncio").warning("took %d s", 3, extra={"task": "t"})
    logging.getLogger("apscheduler.executors.default").info("job ran")
    (event,) = _logged(stream)
    assert (event["event"], event["level"], event["logger"], event["task"]) == ("took 3 s", "warning", "asyncio", "t")


def test_exceptions_are_logged_with_their_traceback() -> None:
    stream = io.StringIO()
    logs.configure(LogConfig(), stream)
    log = structlog.get_logger("a")
    try:
        raise ValueError("odd")
    except ValueError as error:
        log.exception("failed")
        log.error("failed_again", exc_info=error)
    first, second = _logged(stream)
    assert "ValueError: odd" in str(first["exception"])
    assert "ValueError: odd" in str(second["exception"])


@pytest.mark.parametrize(("level", "seen"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_events_below_the_level_are_not_logged(level: str, seen: int) -> None:
    stream = io.StringIO()
    logs.configure(LogConfig(level=level), stream)
    log = structlog.get_logger("a")
    for say in (log.debug, log.info, log.warning, log.error):
        say("said")
    assert len(_logged(stream)) == seen


def test_a_console_line_reads_from_the_left_and_is_no_object() -> None:
    stream = io.StringIO()
    logs.configure(LogConfig(format="console"), stream)
    structlog.get_logger("sow_server.app").info("ready", address="127.0.0.1:7450")
    line = stream.getvalue()
    assert "ready" in line
    assert "address=127.0.0.1:7450" in line
    assert not line.startswith("{")


def test_on_a_terminal_auto_is_for_people() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    logs.configure(LogConfig(), stream)
    structlog.get_logger("a").info("ready")
    assert not stream.getvalue().startswith("{")
