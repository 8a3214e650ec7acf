"""The audit log on disk: private, whole lines, whatever happens to the file (rule A8)."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from sow_server.access.audit import AuditLog, NoAudit
from sow_server.metrics import Metrics

NOW_MICROS = 1_800_000_000_123_456


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
    assert log.write("denied", {"identity": "desk", "count": 3, "whole": True, "why": 'line\nbreak "é"'})
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
        assert log.write("begin", {"number": number, "filler": "x" * 40})
    assert [mode(file) for file in sorted(path.parent.iterdir())] == [0o600] * 4


def test_full_files_are_kept_up_to_a_number(path: Path) -> None:
    log = audit_log(path, bytes_max=150, files=2)
    for number in range(5):
        log.write("begin", {"number": number, "filler": "x" * 40})
    kept = sorted(path.parent.iterdir())
    assert [file.name for file in kept] == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    assert [line["number"] for file in kept for line in lines(file)] == [4, 3, 2]


def test_a_line_longer_than_a_file_is_written_whole(path: Path) -> None:
    log = audit_log(path, bytes_max=100)
    assert log.write("begin", {"filler": "x" * 1_000})
    assert log.write("begin", {"filler": "y"})
    assert lines(path)[0]["filler"] == "y"
    assert lines(path.with_name("audit.jsonl.1"))[0]["filler"] == "x" * 1_000


def test_a_full_disk_is_told_and_the_next_line_begins_anew(path: Path) -> None:
    """Story: a line that was cut off by a full disk was continued by the next one, and both were unreadable."""
    disk = Disk()
    log = audit_log(path, write=disk.write)
    log.write("begin", {"number": 1})
    disk.room = 20
    assert not log.write("begin", {"number": 2})
    assert not log.write("begin", {"number": 3}), "it fails as long as the disk is full"
    disk.room = 10**9
    assert log.write("begin", {"number": 4})
    first, half, last = path.read_text().splitlines()
    assert json.loads(first)["number"] == 1
    assert half == '{"time": "2027-01-15'
    assert json.loads(last)["number"] == 4


def test_a_short_write_is_continued(path: Path) -> None:
    log = audit_log(path, write=lambda file, data: os.write(file, data[:7]))
    assert log.write("begin", {"number": 1})
    assert log.write("begin", {"number": 2})
    assert [line["number"] for line in lines(path)] == [1, 2]


def test_a_line_that_a_crash_has_cut_off_is_not_continued_after_the_start(path: Path) -> None:
    path.write_text('{"time": "2026')
    log = audit_log(path)
    log.write("begin", {"number": 1})
    half, line = path.read_text().splitlines()
    assert half == '{"time": "2026'
    assert json.loads(line)["number"] == 1


@pytest.mark.parametrize("act", ["moved", "removed", "replaced"])
def test_a_file_that_was_taken_away_is_followed_by_a_new_one(path: Path, act: str) -> None:
    log = audit_log(path)
    log.write("begin", {"number": 1})
    moved = path.with_name("old")
    if act == "removed":
        path.unlink()
    else:
        path.rename(moved)
    if act == "replaced":
        path.touch(0o644)  # as `create` of logrotate does
    log.write("begin", {"number": 2})
    assert [line["number"] for line in lines(path)] == [2]
    assert mode(path) == 0o600
    if moved.exists():
        assert [line["number"] for line in lines(moved)] == [1]


def test_a_file_that_was_emptied_goes_on_at_its_begin(path: Path) -> None:
    """As `copytruncate` of logrotate does."""
    log = audit_log(path)
    log.write("begin", {"number": 1})
    os.truncate(path, 0)
    log.write("begin", {"number": 2})
    assert [line["number"] for line in lines(path)] == [2]


def test_a_folder_that_has_gone_fails_until_it_is_back(path: Path, tmp_path: Path) -> None:
    log = audit_log(path)
    away = tmp_path.with_name("away")
    tmp_path.rename(away)
    assert not log.write("begin", {"number": 1})
    away.rename(tmp_path)
    assert log.write("begin", {"number": 2})
    assert [line["number"] for line in lines(path)] == [2]


def test_failures_keep_no_file_open(path: Path) -> None:
    disk = Disk()
    log = audit_log(path, write=disk.write)
    disk.room = 0
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert not log.write("begin", {})
    assert len(os.listdir("/proc/self/fd")) <= before
    log.close()
    log.close()


def test_a_file_that_cannot_be_opened_fails_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        audit_log(tmp_path / "absent" / "audit.jsonl")


def test_without_an_access_file_nothing_is_written() -> None:
    log = NoAudit()
    assert log.write("begin", {})
    log.close()


def test_lines_are_counted_and_so_are_those_that_could_not_be_written(path: Path) -> None:
    disk, metrics = Disk(), Metrics()
    log = audit_log(path, write=disk.write, metrics=metrics)
    for _ in range(2):
        log.write("begin", {})
    disk.room = 0
    log.write("begin", {})
    values = [
        metrics.registry.get_sample_value("sow_audit_lines_total", {"event": "begin", "outcome": outcome})
        for outcome in ("written", "failed")
    ]
    assert values == [2, 1]
