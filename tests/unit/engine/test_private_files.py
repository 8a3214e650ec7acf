"""The data directory is for its own user alone (rule X5)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sow_server.engine.disk.mark import MARK
from sow_server.engine.disk.private import tighten
from sow_server.engine.replicas.dropped import DroppedFiles
from sow_server.engine.replicas.merging import Dead
from sow_server.engine.store import Store
from sow_server.engine.values.errors import OpenError
from tests.support.servers.modes import not_private, open_to_all
from tests.support.stores.stores import Rig


@pytest.fixture(autouse=True)
def careless_umask() -> Iterator[None]:
    """New files are for everybody, unless the code that makes them says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def tightened(path: Path) -> list[object]:
    """The numbers that starts log on a directory, over two starts."""
    with capture_logs() as logged:
        for _ in range(2):
            Store.open(path).close()
    return [event["files"] for event in logged if event["event"] == "modes_tightened"]


def test_a_new_data_directory_and_its_mark_are_private_whatever_the_umask(tmp_path: Path) -> None:
    Store.open(tmp_path / "data").close()
    assert mode(tmp_path / "data") == 0o700
    assert mode(tmp_path / "data" / MARK) == 0o600


def test_the_folder_of_dropped_records_is_private(tmp_path: Path) -> None:
    DroppedFiles(tmp_path).write("orders", "ldn-1", [Dead(b"k", 1, 1, 0, "nyc-1", b"{}")])
    assert mode(tmp_path / "dropped") == 0o700


def test_a_start_tightens_the_modes_of_all_data_and_logs_it_once(tmp_path: Path) -> None:
    os.umask(0o077)
    rig = Rig(tmp_path)
    rig.create_topic("orders")
    rig.put("orders", "a")
    rig.close()
    DroppedFiles(rig.path).write("orders", "ldn-1", [Dead(b"k", 1, 1, 0, "nyc-1", b"{}")])
    changed = open_to_all(rig.path)
    assert tightened(rig.path) == [changed]
    assert not_private(rig.path) == {}


def test_each_permission_of_others_is_taken_and_no_other_is_changed(tmp_path: Path) -> None:
    (tmp_path / "db").mkdir(0o700)
    for bit in (0o040, 0o020, 0o010, 0o004, 0o002, 0o001):
        (tmp_path / "db" / f"{bit:03o}.sst").touch(0o400 | bit)
    tmp_path.chmod(0o2750)
    assert tighten(tmp_path) == 7
    assert {mode(file) for file in (tmp_path / "db").iterdir()} == {0o400}
    assert mode(tmp_path) == 0o2700
    assert tighten(tmp_path) == 0


def test_files_that_are_not_the_stores_keep_their_modes(tmp_path: Path) -> None:
    """A data directory may be chosen that has other files in it: the directory's own mode protects those."""
    data = tmp_path / "data"
    (data / "db").mkdir(parents=True)
    (data / "lost+found").mkdir()
    (data / "notes").touch()
    (tmp_path / "elsewhere").touch()
    (data / "db" / "link").symlink_to(tmp_path / "elsewhere")
    before = [mode(path) for path in (data / "lost+found", data / "notes", tmp_path / "elsewhere")]
    assert tighten(data) == 2
    assert [mode(path) for path in (data / "lost+found", data / "notes", tmp_path / "elsewhere")] == before
    assert (mode(data), mode(data / "db")) == (0o700, 0o700)


def test_a_data_directory_of_another_user_is_refused_and_left_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = os.geteuid()
    data = tmp_path / "data"
    data.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: owner + 1)
        with pytest.raises(OpenError, match=rf"data: belongs to another user \(id {owner}\).* the id {owner + 1}"):
            Store.open(data)
    assert (mode(data), list(data.iterdir())) == (0o777, [])
    Store.open(data).close()


def test_a_mode_that_cannot_be_changed_is_refused_and_the_directory_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    data.mkdir()

    def refused(path: Path, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "chmod", refused)
        with pytest.raises(OpenError, match=r"other users may read or write .*data, .*Operation not permitted"):
            Store.open(data)
    Store.open(data).close()
