"""Behaviour that only a real process shows: a terminal, a pipe whose reader goes away, Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("no pseudo-terminals", allow_module_level=True)

from tests.support.servers.terminals import SECONDS_MAX, Terminal, plain, start


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def test_on_a_terminal_a_query_is_a_table_of_its_width(terminals: list[Terminal]) -> None:
    terminals.append(Terminal("query", "orders"))

    lines = plain(terminals[0].read_until(None)).splitlines()

    assert lines[0].split() == ["key", "expires", "id", "text"]
    assert [len(line) for line in lines[1:4]] == [80, 80, 80]
    assert lines[4].startswith("3 records, as of ")


@pytest.mark.parametrize("output_format", ["ndjson", "csv", "json", "table", "raw"])
def test_a_terminal_gets_no_control_characters_of_the_data(terminals: list[Terminal], output_format: str) -> None:
    """X7."""
    terminals.append(Terminal("query", "hostile", "--format", output_format))

    text = plain(terminals[0].read_until(None))

    assert "x1b[2J" in text or "u001b[2J" in text or output_format == "raw", "raw shows no key"
    assert re.findall("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", text) == []
    assert "x9b31m" in text or "u009b31m" in text


def test_a_pipe_gets_the_bytes_of_the_data() -> None:
    """X7."""
    process = start(
        "query", "hostile", "--format", "ndjson",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    data, _ = process.communicate(timeout=SECONDS_MAX)
    assert b'"payload":{"id":"\x7f\xc2\x9b31m"}}\n' in data


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1)])
def test_deleting_everything_asks_on_a_terminal(terminals: list[Terminal], answer: str, code: int) -> None:
    terminals.append(Terminal("delete", "orders", "--all"))
    terminals[0].read_until("Delete every record of topic orders? [y/N]: ")

    terminals[0].type(answer)

    text = plain(terminals[0].read_until(None))
    assert terminals[0].process.wait(SECONDS_MAX) == code
    assert (re.search("deleted +3", text) is not None) is (code == 0)
    assert ("nothing was done" in text) is (code == 1)


def test_publishing_a_file_shows_progress_on_a_terminal(terminals: list[Terminal], tmp_path: Path) -> None:
    file = tmp_path / "orders.ndjson"
    file.write_bytes(b'{"id":1}\n{"price":2}\n' + b"".join(b'{"id":%d}\n' % one for one in range(20_000)))
    terminals.append(Terminal("publish", "orders", str(file)))

    text = plain(terminals[0].read_until(None))

    assert terminals[0].process.wait(SECONDS_MAX) == 1
    assert "publishing" in text
    assert "100%" in text
    assert "line 2: KEY_FIELD_MISSING: key field /id is missing or null" in text
    assert re.search("refused +1 record", text)
    assert "20,001 records" in text


def test_a_terminal_gets_a_thousand_records_unless_it_asks_for_more(terminals: list[Terminal]) -> None:
    """A query of a million records scrolled for minutes. A pipe gets all (see the test of its reader)."""
    for options in ((), ("--top", "1500")):
        terminals.append(Terminal("query", "many", "--keys-only", "--format", "csv", *options))
        text = plain(terminals[-1].read_until(None))
        assert len(re.findall(r",fake-1,\d+\r$", text, re.MULTILINE)) == (1500 if options else 1000)
        assert ("the first 1,000 records, and there are more" in text) is not bool(options)


def test_a_watched_query_asks_again_and_leaves_the_terminal_in_order(terminals: list[Terminal]) -> None:
    terminals.append(Terminal("query", "many", "--watch", "20ms", "--select", "/id"))
    terminals[0].read_until("… and 2,980 more")
    terminals[0].text = ""
    terminals[0].read_until("… and 2,980 more")  # the next answer

    terminals[0].type("\x03")  # shown as ^C, if anything shows it; the terminal is not the process's own
    # The system looks at what was typed some time later, and the command shows what is typed once it has ended.
    terminals[0].text = ""
    typed = terminals[0].read_until("… and 2,980 more")
    terminals[0].process.send_signal(signal.SIGINT)

    text = typed + terminals[0].read_until(None)
    assert terminals[0].process.wait(SECONDS_MAX) == 130
    assert "^C" not in text
    assert "Traceback" not in text
    assert text.rstrip().endswith("\x1b[?25h")
    assert plain(text).splitlines()[-1] == "… and 2,980 more"


def test_ctrl_c_ends_a_command_that_waits(terminals: list[Terminal]) -> None:
    terminals.append(Terminal("status"))
    terminals[0].read_until("waiting")

    terminals[0].process.send_signal(signal.SIGINT)

    assert terminals[0].process.wait(SECONDS_MAX) == 130
    assert "Traceback" not in terminals[0].read_until(None)


@pytest.mark.parametrize("output_format", ["ndjson", "csv", "json", "table"])
def test_a_reader_that_goes_away_ends_the_command_quietly(output_format: str) -> None:
    process = start(
        "query", "many", "--format", output_format,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline()

    process.stdout.close()

    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(SECONDS_MAX) == 0


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("query", "--help"), ("help", "filters")])
def test_a_help_that_nobody_reads_is_no_failure(arguments: tuple[str, ...]) -> None:
    """Story: `sow --help | head -1` ended with 1, and a script with `pipefail` along with it."""
    process = start(*arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()

    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(SECONDS_MAX) == 0


# ---- subscriptions ----


def test_a_reader_that_goes_away_ends_a_subscription_though_nothing_more_comes() -> None:
    process = start(
        "subscribe", "orders", "--sow", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert [json.loads(process.stdout.readline())["op"] for _ in range(4)] == ["sow", "sow", "sow", "snapshot_end"]

    process.stdout.close()

    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(SECONDS_MAX) == 0


@pytest.mark.parametrize("options", [(), ("--format", "table")])
@pytest.mark.parametrize(("interrupt", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_end_a_subscription_quietly(
    options: tuple[str, ...], interrupt: signal.Signals, code: int
) -> None:
    process = start(
        "subscribe", "orders", "--sow", *options,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        for _ in range(5 if options else 4):  # with the headings of a table
            assert process.stdout.readline()

        process.send_signal(interrupt)

        assert process.stderr.read() == b""
        assert process.stdout.read() == b""
    assert process.wait(SECONDS_MAX) == code


def test_on_a_terminal_a_snapshot_is_a_live_table_that_stays(terminals: list[Terminal]) -> None:
    terminals.append(Terminal("subscribe", "many", "--sow"))
    terminals[0].read_until("… and 2,980 more")

    terminals[0].process.send_signal(signal.SIGINT)

    text = terminals[0].read_until(None)
    assert terminals[0].process.wait(SECONDS_MAX) == 130
    assert "Traceback" not in text
    last = plain(text[text.rindex("3,000 records · ") :]).splitlines()
    assert last[0].startswith("3,000 records · 0 changes · 0.0 changes/s · bookmark epoch.")
    assert re.split(" +", last[1]) == ["key", "expires", "id", "text"]
    assert [line.split()[0] for line in last[2:22]] == [str(number) for number in range(20)]
    assert "^C" not in text
    assert max(len(line) for line in last) == 80
    assert last[22] == "… and 2,980 more"
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_sigterm_at_a_subscription_leaves_the_terminal_in_order(terminals: list[Terminal]) -> None:
    """Story: the process died where it was, and the terminal's cursor stayed hidden."""
    terminals.append(Terminal("subscribe", "many", "--sow"))
    terminals[0].read_until("… and 2,980 more")

    terminals[0].process.send_signal(signal.SIGTERM)

    text = terminals[0].read_until(None)
    assert terminals[0].process.wait(SECONDS_MAX) == 143
    assert "Traceback" not in text
    assert text.rstrip().endswith("\x1b[?25h")


def test_on_a_terminal_without_a_snapshot_messages_are_lines(terminals: list[Terminal]) -> None:
    terminals.append(Terminal("subscribe", "orders", "--sow", "--format", "table", "--count", "2"))

    lines = plain(terminals[0].read_until(None)).splitlines()

    assert re.split(" +", lines[0]) == ["time", "op", "reason", "key", "id", "text"]
    assert [re.split(" +", line)[1:4] for line in lines[1:3]] == [["sow", "0", "0"], ["sow", "1", "1"]]
    assert all(len(line) <= 80 for line in lines[:3])
    assert lines[3].startswith("2 messages")
