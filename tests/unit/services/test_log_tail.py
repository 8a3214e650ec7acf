"""The last lines of the log (rule X10)."""

from __future__ import annotations

import io
import json
import logging

import pytest
import structlog

from sow_server import logs
from sow_server.config import LogConfig
from sow_server.services.log_tail import LINE_BYTES_MAX, LINES_MAX, LogTail

SECRET = "wO8x-this-is-one"


def fields(tail: LogTail) -> dict[str, object]:
    (line,) = tail.last(10)[0]
    found = json.loads(line.fields)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cause", f"refused with {SECRET} at ldn"),
        ("token", "anything"),
        ("nested", {"deep": [{"password": "anything"}]}),
        ("header", "authorization: Bearer anything.of-this"),
        ("address", "http://ann:anything@collector:4317/v1"),
        ("jwt", "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhbnl0aGluZyJ9.anything"),
        ("key", "-----BEGIN PRIVATE KEY-----\nanything\n-----END PRIVATE KEY-----"),
    ],
)
def test_a_line_has_no_secret(name: str, value: object) -> None:
    tail = LogTail([SECRET])
    tail.add(1, {"event": "e", name: value})
    told = json.dumps(fields(tail))
    assert "***" in told
    assert SECRET not in told
    assert "anything" not in told


def test_ordinary_fields_are_told_as_they_are() -> None:
    tail = LogTail([SECRET, "ab"])  # so short a secret would take words away
    tail.add(
        5, {"event": "ready", "level": "info", "logger": "l", "time": "t", "address": "abc:7450", "n": 3, "ok": True}
    )
    assert fields(tail) == {"address": "abc:7450", "n": 3, "ok": True}
    line = tail.last(10)[0][0]
    assert (line.time_micros, line.level, line.event, line.logger) == (5, "info", "ready", "l")


def test_the_tail_is_bounded_in_lines_and_bytes_and_counts_those_that_were_missed() -> None:
    tail = LogTail()
    tail.add(0, {"event": "first", "text": "x" * 100_000})
    assert len(tail.last(1)[0][0].fields) <= LINE_BYTES_MAX
    for number in range(LINES_MAX + 4):
        tail.add(number, {"event": str(number)})
    lines, last, missed = tail.after(1)
    assert (len(lines), last, missed) == (LINES_MAX, LINES_MAX + 5, 4)
    assert [line.event for line in tail.last(2)[0]] == [str(LINES_MAX + 2), str(LINES_MAX + 3)]
    assert tail.after(last) == ([], last, 0)


def test_only_lines_of_a_level_and_worse_ones_are_asked_for() -> None:
    tail = LogTail()
    for level in ("debug", "info", "warning", "error"):
        tail.add(1, {"event": level, "level": level})
    assert [line.event for line in tail.last(10, "warning")[0]] == ["warning", "error"]
    assert [line.event for line in tail.after(0, "error")[0]] == ["error"]


def test_every_logger_writes_to_the_tail_and_to_the_stream() -> None:
    stream, tail = io.StringIO(), LogTail()
    logs.configure(LogConfig(), stream, tail=tail)
    structlog.get_logger("ours").warning("odd", cause="c")
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("theirs").exception("took %d s", 3)
    lines, _ = tail.last(10)
    assert [(line.event, line.level, line.logger) for line in lines] == [
        ("odd", "warning", "ours"),
        ("took 3 s", "error", "theirs"),
    ]
    assert json.loads(lines[0].fields) == {"cause": "c"}
    assert "ValueError: bad" in lines[1].fields
    assert len(stream.getvalue().splitlines()) == 2
