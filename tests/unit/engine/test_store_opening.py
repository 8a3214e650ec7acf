"""Opening a data directory, and refusing to (X2, opening [1]): one clear message, and nothing half-done."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sow_server.engine import losses
from sow_server.engine.disk.layout import FORMAT_KEY
from sow_server.engine.disk.mark import MARK, load, save
from sow_server.engine.disk.rocks import META, VIEWS, Batch, Rocks, first_log_needed
from sow_server.engine.store import Store, StoreOptions
from sow_server.engine.stored import u32
from sow_server.engine.values.database import Damaged, DiskFull, Stalled
from sow_server.engine.values.errors import OpenError
from tests.support.stores.stores import HOUR, Rig


def test_an_empty_directory_becomes_a_store_and_is_marked(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    assert (rig.path / "SOW").read_text().startswith("sow data, format 6")
    assert rig.store.origins.names == ("sow",)
    rig.close()


def test_a_directory_is_used_by_one_server_at_a_time(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    with pytest.raises(OpenError, match="another sow-server is using"):
        Store.open(rig.path)
    rig.reopen()
    rig.close()


def test_data_without_its_marker_is_not_taken_for_a_new_store(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.create_topic("orders")
    rig.put("orders", "a")
    rig.store._rocks.flush()
    rig.close()
    (rig.path / "SOW").rename(tmp_path / "marker")
    with pytest.raises(OpenError, match="SOW is missing"):
        rig.open()
    (tmp_path / "marker").rename(rig.path / "SOW")
    rig.open()
    assert rig.count("orders") == 1
    rig.close()


def test_a_store_with_a_missing_database_is_not_created_anew(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.close()
    (rig.path / "db").rename(tmp_path / "elsewhere")
    with pytest.raises(OpenError, match="damaged"):
        rig.open()


def test_a_server_killed_before_the_marker_was_written_starts(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    instance = rig.store.instance.id
    rig.kill()
    (rig.path / "SOW").unlink()
    (rig.path / MARK).unlink()  # it comes after the marker
    rig.open()
    assert rig.store.instance.id == instance
    assert (rig.path / "SOW").exists()
    rig.close()


def test_a_server_killed_before_its_first_row_starts_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.mkdir()
    Rocks(path / "db", create=True).close()
    opened = Store.open(path, options=StoreOptions(instance="nyc-1"))
    assert opened.origins.names == ("nyc-1",)
    opened.close()


def test_data_of_another_format_is_refused_by_number(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    batch = Batch()
    batch.puts[META][FORMAT_KEY] = u32(7)
    rig.store._rocks.write(batch)
    rig.close()
    for _ in range(2):
        with pytest.raises(OpenError, match=r"format 7, this version of sow reads format 6"):
            rig.open()


@pytest.mark.parametrize("earlier", [3, 4, 5])
def test_data_of_the_formats_before_are_upgraded_and_an_older_version_refuses_them(
    tmp_path: Path, earlier: int
) -> None:
    rig = Rig(tmp_path)
    rig.create_topic("t")
    rig.put("t", "k", b"1")
    batch = Batch()
    batch.puts[META][FORMAT_KEY] = u32(earlier)
    rig.store._rocks.write(batch)
    rig.close()
    rig.open()
    assert rig.store._rocks.get(META, FORMAT_KEY) == u32(6)
    assert rig.get("t", "k") is not None
    rig.close()


def test_data_of_a_release_without_views_get_their_column_family(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.create_topic("t")
    rig.put("t", "k", b"1")
    batch = Batch()
    batch.puts[META][FORMAT_KEY] = u32(5)
    rig.store._rocks.write(batch)
    rig.store._rocks._families.pop(VIEWS)
    rig.store._rocks._open().drop_column_family(VIEWS)
    rig.close()
    assert first_log_needed(rig.path / "db") >= 0
    rig.open()
    assert rig.get("t", "k") is not None
    assert rig.rows(VIEWS) == []
    rig.close()


def test_a_directory_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OpenError, match="file"):
        Store.open(tmp_path / "file" / "data")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (DiskFull("IO error: No space left on device"), "cannot be opened .*No space left"),
        (Damaged("Corruption: checksum mismatch"), "the data is damaged .*checksum"),
    ],
)
def test_a_failure_after_the_database_is_open_is_one_message_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    """A disk that was full at the first start ended in a traceback."""

    def fails(rocks: Rocks, batch: Batch) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Rocks, "write", fails)
        with pytest.raises(OpenError, match=message):
            Store.open(tmp_path / "data")
    Store.open(tmp_path / "data").close()  # the lock is free, and nothing is in the way


def test_a_start_waits_while_the_database_takes_no_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: to settle an accepted loss writes more than goes to table files in that time, so a large store was refused
    ("cannot be opened (Result incomplete: Write stall)"), at each start again."""
    rig = Rig(tmp_path)
    rig.create_topic("t")
    for number in range(5):
        rig.put("t", str(number), ttl=HOUR)
    rig.close()
    mark = load(rig.path)
    assert mark is not None
    save(rig.path, replace(mark, number=mark.number + 1, accepted_after=0))
    write, calls = Rocks.write, itertools.count(1)

    def stalls(rocks: Rocks, batch: Batch) -> None:
        if next(calls) % 2:
            raise Stalled("Result incomplete: Write stall")
        write(rocks, batch)

    monkeypatch.setattr(losses, "CHUNK", 2)
    monkeypatch.setattr(Rocks, "write", stalls)
    rig.open()
    assert rig.topic("t").statistics.records == 5
    assert len(rig.entries()) == 5
    assert next(calls) > 8
    monkeypatch.undo()
    rig.close()


def test_a_failing_mark_is_logged_once_and_again_after_a_success(tmp_path: Path) -> None:
    """X4. Story: after one failure that passed, all that followed were silent, and one that met a damaged CURRENT kept
    the store from closing."""
    rig = Rig(tmp_path)
    current = rig.path / "db" / "CURRENT"
    name = current.read_text()
    told: list[int] = []
    for text in ("damaged", "damaged", name, "damaged", name):
        current.write_text(text)
        with capture_logs() as logs:
            rig.store.upkeep.keep_mark()
        told.append(len([line for line in logs if line["event"] == "mark_failed"]))
    assert told == [1, 0, 0, 1, 0]
    current.write_text("damaged")
    rig.close()
    current.write_text(name)
    rig.open()
    rig.close()


def test_an_instance_may_be_renamed_and_old_records_keep_their_origin(tmp_path: Path) -> None:
    """K6: origin is the instance that accepted the record."""
    rig = Rig(tmp_path, options=StoreOptions(instance="old"))
    rig.create_topic("orders")
    rig.put("orders", "a")
    rig.options = StoreOptions(instance="new")
    rig.reopen()
    rig.put("orders", "b")
    for _ in range(2):
        assert rig.store.origins.names == ("old", "new")
        assert {key: rig.store.origins.names[kept.origin] for key, kept in rig.live("orders").items()} == {
            b"a": "old",
            b"b": "new",
        }
        rig.reopen()
    rig.close()


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.store.close()
    rig.close()
    rig.open()
    rig.close()
