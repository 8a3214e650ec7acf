"""The audit log on disk: private, whole lines, whatever happens to the file (rule A8)."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sow_server.access.audit import RESERVE_BYTES, TEXT_MAX, AuditLog, NoAudit, Part, Value, path_of
from sow_server.metrics import Metrics

NOW_MICROS = 1_800_000_000_123_456
ADMIN = Part.ADMINISTRATION


def audit_log(
    path: Path,
    bytes_max: int = 10**6,
    files: int = 3,
    write: Callable[[int, bytes], int] = os.write,
    metrics: Metrics | None = None,
) -> AuditLog:
    return AuditLog(
        path,
        bytes_max=bytes_max,
        files=files,
        now_micros=lambda: NOW_MICROS,
        observer=metrics or Metrics(),
        write=write,
    )


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class Disk:
    """A disk that takes only so many bytes more."""

    def __init__(self) -> None:
        self.room = 10**9

    def write(self, file: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = data[: self.room]
        self.room -= len(taken)
        return os.write(file, taken)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def test_a_line_is_one_json_object_and_is_in_the_file_at_once(path: Path) -> None:
    log = audit_log(path)
    assert log.write(ADMIN, "denied", {"identity": "desk", "count": 3, "whole": True, "why": 'line\nbreak "é"'})
    assert path.read_bytes().count(b"\n") == 1
    assert lines(path) == [
        {
            "time": "2027-01-15T08:00:00.123456+00:00",
            "event": "denied",
            "identity": "desk",
            "count": 3,
            "whole": True,
            "why": 'line\nbreak "é"',
        }
    ]


def test_every_file_is_for_the_servers_user_alone(path: Path) -> None:
    """Story: a log that an earlier version or an administrator had made with mode 0644 kept it."""
    path.touch(0o644)
    path.chmod(0o644)
    log = audit_log(path, bytes_max=100)
    for number in range(4):
        assert log.write(ADMIN, "begin", {"number": number, "filler": "x" * 40})
    log.write(Part.CALLS, "begin", {})
    assert {file.name: mode(file) for file in path.parent.iterdir()} == dict.fromkeys(
        [
            "audit.jsonl",
            *(f"audit.jsonl.{number}" for number in (1, 2, 3)),
            "audit.jsonl.reserve",
            "audit-calls.jsonl",
            "audit-refused.jsonl",
        ],
        0o600,
    )


def test_full_files_are_kept_up_to_a_number(path: Path) -> None:
    log = audit_log(path, bytes_max=150, files=2)
    for number in range(5):
        log.write(ADMIN, "begin", {"number": number, "filler": "x" * 40})
    kept = sorted(file for file in path.parent.glob("audit.jsonl*") if "reserve" not in file.name)
    assert [file.name for file in kept] == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    assert [line["number"] for file in kept for line in lines(file)] == [4, 3, 2]


def test_a_line_longer_than_a_file_is_written_whole(path: Path) -> None:
    log = audit_log(path, bytes_max=100)
    assert log.write(ADMIN, "begin", {"filler": "x" * 150})
    assert log.write(ADMIN, "begin", {"filler": "y"})
    assert lines(path)[0]["filler"] == "y"
    assert lines(path.with_name("audit.jsonl.1"))[0]["filler"] == "x" * 150


def test_a_full_disk_is_told_and_the_next_line_begins_anew(path: Path) -> None:
    """Story: a line that was cut off by a full disk was continued by the next one, and both were unreadable."""
    disk = Disk()
    log = audit_log(path, write=disk.write)
    log.write(ADMIN, "begin", {"number": 1})
    disk.room = 20
    assert not log.write(ADMIN, "begin", {"number": 2})
    assert not log.write(ADMIN, "begin", {"number": 3}), "it fails as long as the disk is full"
    disk.room = 10**9
    assert log.write(ADMIN, "begin", {"number": 4})
    first, half, last = path.read_text().splitlines()
    assert json.loads(first)["number"] == 1
    assert half == '{"time": "2027-01-15'
    assert json.loads(last)["number"] == 4


def test_a_short_write_is_continued(path: Path) -> None:
    log = audit_log(path, write=lambda file, data: os.write(file, data[:7]))
    assert log.write(ADMIN, "begin", {"number": 1})
    assert log.write(ADMIN, "begin", {"number": 2})
    assert [line["number"] for line in lines(path)] == [1, 2]


def test_a_line_that_a_crash_has_cut_off_is_not_continued_after_the_start(path: Path) -> None:
    path.write_text('{"time": "2026')
    log = audit_log(path)
    log.write(ADMIN, "begin", {"number": 1})
    half, line = path.read_text().splitlines()
    assert half == '{"time": "2026'
    assert json.loads(line)["number"] == 1


@pytest.mark.parametrize("act", ["moved", "removed", "replaced"])
def test_a_file_that_was_taken_away_is_followed_by_a_new_one(path: Path, act: str) -> None:
    log = audit_log(path)
    log.write(ADMIN, "begin", {"number": 1})
    moved = path.with_name("old")
    if act == "removed":
        path.unlink()
    else:
        path.rename(moved)
    if act == "replaced":
        path.touch(0o644)  # as `create` of logrotate does
    log.write(ADMIN, "begin", {"number": 2})
    assert [line["number"] for line in lines(path)] == [2]
    assert mode(path) == 0o600
    if moved.exists():
        assert [line["number"] for line in lines(moved)] == [1]


def test_a_file_that_was_emptied_goes_on_at_its_begin(path: Path) -> None:
    """As `copytruncate` of logrotate does."""
    log = audit_log(path)
    log.write(ADMIN, "begin", {"number": 1})
    os.truncate(path, 0)
    log.write(ADMIN, "begin", {"number": 2})
    assert [line["number"] for line in lines(path)] == [2]


def test_a_folder_that_has_gone_fails_until_it_is_back(path: Path, tmp_path: Path) -> None:
    log = audit_log(path)
    away = tmp_path.with_name("away")
    tmp_path.rename(away)
    assert not log.write(ADMIN, "begin", {"number": 1})
    away.rename(tmp_path)
    assert log.write(ADMIN, "begin", {"number": 2})
    assert [line["number"] for line in lines(path)] == [2]


def test_failures_keep_no_file_open(path: Path) -> None:
    disk = Disk()
    log = audit_log(path, write=disk.write)
    disk.room = 0
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert not log.write(ADMIN, "begin", {})
    assert len(os.listdir("/proc/self/fd")) <= before
    log.close()
    log.close()


def test_a_file_that_cannot_be_opened_fails_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        audit_log(tmp_path / "absent" / "audit.jsonl")


def test_without_an_access_file_nothing_is_written() -> None:
    log = NoAudit()
    assert log.write(ADMIN, "begin", {})
    log.close()


def test_lines_are_counted_and_so_are_those_that_could_not_be_written(path: Path) -> None:
    disk, metrics = Disk(), Metrics()
    log = audit_log(path, write=disk.write, metrics=metrics)
    for _ in range(2):
        log.write(ADMIN, "begin", {})
    disk.room = 0
    log.write(ADMIN, "begin", {})
    values = [
        metrics.registry.get_sample_value("sow_audit_lines_total", {"event": "begin", "outcome": outcome})
        for outcome in ("written", "failed")
    ]
    assert values == [2, 1]


# --- parts -----------------------------------------------------------------------------------------------------------


def test_no_part_pushes_out_a_line_of_another(path: Path) -> None:
    """Story: denials were in the same file as the lines of administrators, and pushed these out of it."""
    log = audit_log(path, bytes_max=1_000, files=2)
    log.write(ADMIN, "begin", {"method": "ReloadAccess"})
    for number in range(200):
        log.write(Part.REFUSALS, "denied", {"number": number})
        log.write(Part.CALLS, "begin", {"number": number})
    assert [line["method"] for line in lines(path)] == ["ReloadAccess"]
    for part in (Part.CALLS, Part.REFUSALS):
        own = path_of(path, part)
        assert lines(own)[-1]["number"] == 199
        assert len(list(path.parent.glob(f"{own.name}*"))) == 3


def test_a_path_that_is_no_file_gets_all_parts(tmp_path: Path) -> None:
    """As a pipe to a program that collects logs."""
    pipe = tmp_path / "audit"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    log = audit_log(pipe)
    for part in Part:
        assert log.write(part, "begin", {})
    assert os.read(reading, 10_000).count(b"\n") == len(Part)
    assert list(tmp_path.iterdir()) == [pipe]
    os.close(reading)
    log.close()


def test_texts_of_a_caller_are_cut(path: Path) -> None:
    log = audit_log(path)
    names: dict[str, Value] = {
        "identity": "i" * 5_000,
        "topic": "é" * (TEXT_MAX + 1),
        "durable": "d" * TEXT_MAX,
        "records": 10**18,
    }
    log.write(Part.CALLS, "end", names)
    (line,) = lines(path_of(path, Part.CALLS))
    assert line["identity"] == "i" * TEXT_MAX + "…"
    assert line["topic"] == "é" * TEXT_MAX + "…"
    assert (line["durable"], line["records"]) == (names["durable"], names["records"])


# --- the reserve -----------------------------------------------------------------------------------------------------


def reserve_of(path: Path) -> list[str]:
    return path.with_name("audit.jsonl.reserve").read_text().split()


def numbers(path: Path) -> list[object]:
    return [line["number"] for line in lines(path)]


def test_a_reserved_line_waits_for_room_and_keeps_its_place(path: Path) -> None:
    """access/audit [6]"""
    disk = Disk()
    log = audit_log(path, write=disk.write)
    log.write(ADMIN, "begin", {"number": 1})
    disk.room = 0
    assert log.write(ADMIN, "begin", {"number": 2}, reserved=True)
    assert not log.write(ADMIN, "begin", {"number": 3}), "other lines have no room kept"
    assert log.write(ADMIN, "end", {"number": 4}, reserved=True)
    log.catch_up()
    assert numbers(path) == [1]
    disk.room = 10**9
    assert log.write(ADMIN, "begin", {"number": 5})
    assert numbers(path) == [1, 2, 4, 5]
    log.catch_up()
    assert numbers(path) == [1, 2, 4, 5], "each once"
    assert reserve_of(path) == []
    assert path.with_name("audit.jsonl.reserve").stat().st_size == RESERVE_BYTES


def test_room_for_some_of_the_lines_that_wait_takes_these(path: Path) -> None:
    """Story of the kind that would be: each attempt wrote the first half of them again, into the last of the room."""
    disk = Disk()
    log = audit_log(path, write=disk.write)
    disk.room = 0
    for number in range(3):
        log.write(ADMIN, "begin", {"number": number}, reserved=True)
    disk.room = path.with_name("audit.jsonl.reserve").read_bytes().index(b"\n") + 11
    for _ in range(5):
        log.catch_up()
    assert path.read_text().count('"number": 0') == 1
    disk.room = 10**9
    log.catch_up()
    whole = [json.loads(line)["number"] for line in path.read_text().splitlines() if line.endswith("}")]
    assert whole == [0, 1, 2]


def test_lines_that_waited_at_a_crash_are_in_the_log_after_the_start(path: Path) -> None:
    disk = Disk()
    log = audit_log(path, write=disk.write)
    disk.room = 0
    log.write(ADMIN, "begin", {"number": 1}, reserved=True)
    assert lines(path) == []
    assert audit_log(path).write(ADMIN, "begin", {"number": 2})
    assert numbers(path) == [1, 2]


@pytest.mark.slow
def test_a_line_for_which_nothing_is_left_is_in_the_servers_log(path: Path) -> None:
    disk, metrics = Disk(), Metrics()
    log = audit_log(path, write=disk.write, metrics=metrics)
    disk.room = 0
    with capture_logs() as logs:
        for number in range(RESERVE_BYTES // 200):
            log.write(ADMIN, "end", {"number": number, "filler": "x" * 150}, reserved=True)
    assert {line["event"] for line in logs} == {"audit_line_failed"}
    assert json.loads(logs[-1]["line"])["number"] == RESERVE_BYTES // 200 - 1
    kept = [
        metrics.registry.get_sample_value("sow_audit_lines_total", {"event": "end", "outcome": outcome})
        for outcome in ("reserved", "failed")
    ]
    assert kept[1] == len(logs)
    assert sum(filter(None, kept)) == RESERVE_BYTES // 200
    disk.room = 10**9
    log.catch_up()
    assert len(numbers(path)) == kept[0]


def test_a_start_without_room_for_the_reserve_goes_on_and_takes_it_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(os, "pwrite", full)
        log = audit_log(path)
    assert [line["event"] for line in logs] == ["audit_reserve_failed"]
    disk = Disk()
    log = audit_log(path, write=disk.write)
    disk.room = 0
    path.with_name("audit.jsonl.reserve").unlink()
    assert log.write(ADMIN, "begin", {"number": 1}, reserved=True), "one that was removed is made anew"
    assert len(reserve_of(path)) > 0
