"""Backups: their contents, and a start on one (rule J14)."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from sow_server.engine.disk import backups
from sow_server.engine.store import Store
from sow_server.engine.values.errors import OpenError, Reason, StoreError
from tests.support.stores import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """A store with three records in it."""
    rig = Rig(tmp_path)
    rig.create_topic("orders", journal=True)
    for key in ("a", "b", "c"):
        rig.put("orders", key, key.encode())
    return rig


def opened(rig: Rig, path: Path, *, authoritative: bool = False) -> Store:
    return Store.open(path, clock=rig.time.clock(), options=rig.options, authoritative=authoritative)


def payloads(store: Store, *keys: str) -> list[bytes | None]:
    _, values = store.cuts.get(store.topics.find("orders"), [key.encode() for key in keys])
    return [None if value is None else value[40:] for value in values]


def test_a_backup_has_everything_up_to_its_sequence_and_nothing_later(rig: Rig, tmp_path: Path) -> None:
    made = rig.store.upkeep.backup(tmp_path / "backup")
    assert made.sequence == rig.store.writer.last_sequence
    assert made.bytes > 0
    rig.put("orders", "a", b"later")
    rig.put("orders", "d", b"later")
    restored = opened(rig, tmp_path / "backup")
    assert payloads(restored, "a", "b", "c", "d") == [b"a", b"b", b"c", None]
    restored.close()
    rig.close()


def test_the_store_goes_on_as_if_there_had_been_no_backup(rig: Rig, tmp_path: Path) -> None:
    instance, epoch = rig.store.instance.id, rig.store.instance.epoch
    rig.store.upkeep.backup(tmp_path / "backup")
    rig.put("orders", "d", b"d")
    rig.reopen()
    assert (rig.store.instance.id, rig.store.instance.epoch) == (instance, epoch)
    assert payloads(rig.store, "c", "d") == [b"c", b"d"]
    assert sorted(file.name for file in rig.path.iterdir()) == ["MARK", "SOW", "db"]
    rig.close()


def test_a_store_made_from_a_backup_is_another_instance_with_another_journal(rig: Rig, tmp_path: Path) -> None:
    rig.store.upkeep.backup(tmp_path / "backup")
    bookmark = rig.store.instance.bookmark(1)
    restored = opened(rig, tmp_path / "backup")
    assert restored.instance.id != rig.store.instance.id
    assert restored.instance.bookmark(1) != bookmark
    assert not restored.instance.authoritative
    assert restored.origins.names == (*rig.store.origins.names, "sow"), (
        "what it writes from now on has a number of its own (K7)"
    )
    restored.close()
    rig.close()


def test_each_copy_of_a_backup_becomes_a_separate_instance(rig: Rig, tmp_path: Path) -> None:
    rig.store.upkeep.backup(tmp_path / "backup")
    shutil.copytree(tmp_path / "backup", tmp_path / "copy")
    one, other = opened(rig, tmp_path / "backup"), opened(rig, tmp_path / "copy")
    assert one.instance.id != other.instance.id
    assert one.instance.epoch != other.instance.epoch
    one.close()
    other.close()
    rig.close()


def test_a_restored_store_keeps_its_identity_over_restarts(rig: Rig, tmp_path: Path) -> None:
    rig.store.upkeep.backup(tmp_path / "backup")
    restored = opened(rig, tmp_path / "backup")
    found = (restored.instance.id, restored.instance.epoch)
    restored.close()
    again = opened(rig, tmp_path / "backup")
    assert (again.instance.id, again.instance.epoch) == found
    again.close()
    rig.close()


def test_a_start_killed_before_the_mark_was_removed_begins_once_more(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other order would leave a restored store under the identity of the one that it was made of."""
    rig.store.upkeep.backup(tmp_path / "backup")

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(backups, "taken", killed)
        with pytest.raises(KeyboardInterrupt):
            opened(rig, tmp_path / "backup")
    assert backups.is_backup(tmp_path / "backup")
    restored = opened(rig, tmp_path / "backup")
    assert restored.instance.id != rig.store.instance.id
    assert not backups.is_backup(tmp_path / "backup")
    restored.close()
    rig.close()


def test_an_authoritative_restore_says_so_for_as_long_as_its_journal_lives(rig: Rig, tmp_path: Path) -> None:
    rig.store.upkeep.backup(tmp_path / "backup")
    restored = opened(rig, tmp_path / "backup", authoritative=True)
    assert restored.instance.authoritative
    assert restored.instance.epoch != rig.store.instance.epoch
    restored.close()
    for authoritative in (False, True):  # the option may stay in a service file
        restored = opened(rig, tmp_path / "backup", authoritative=authoritative)
        assert restored.instance.authoritative
        restored.close()
    rig.close()


def test_authoritative_is_refused_for_data_that_are_no_backup(rig: Rig) -> None:
    rig.close()
    with pytest.raises(OpenError, match="--authoritative is for the first start on a backup"):
        opened(rig, rig.path, authoritative=True)
    rig.open()  # it has let go of the directory
    rig.close()


def test_a_backup_of_an_authoritative_store_is_a_backup_like_any_other(rig: Rig, tmp_path: Path) -> None:
    rig.store.upkeep.backup(tmp_path / "backup")
    restored = opened(rig, tmp_path / "backup", authoritative=True)
    restored.upkeep.backup(tmp_path / "second")
    restored.close()
    second = opened(rig, tmp_path / "second")
    assert not second.instance.authoritative
    second.close()
    rig.close()


def test_an_existing_directory_is_not_changed(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "backup").mkdir()
    with pytest.raises(StoreError, match="is there already") as caught:
        rig.store.upkeep.backup(tmp_path / "backup")
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_ARGUMENT, "directory")
    assert list((tmp_path / "backup").iterdir()) == []
    rig.close()


@pytest.mark.parametrize(("where", "why"), [("missing/backup", "no directory"), ("data-0/backup", "data directory")])
def test_a_directory_that_cannot_be_is_refused(rig: Rig, tmp_path: Path, where: str, why: str) -> None:
    with pytest.raises(StoreError, match=why) as caught:
        rig.store.upkeep.backup(tmp_path / where)
    assert caught.value.reason is Reason.INVALID_ARGUMENT
    rig.close()


def test_on_another_file_system_it_is_copied_and_appears_whole(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links end at the border of a file system; RocksDB itself would copy with every thread of the server standing."""
    rename = Path.rename

    def renamed(self: Path, target: Path) -> Path:
        if self.parent != target.parent:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renamed)
    (tmp_path / "elsewhere").mkdir()
    rig.store.upkeep.backup(tmp_path / "elsewhere" / "backup")
    assert [file.name for file in (tmp_path / "elsewhere").iterdir()] == ["backup"]
    assert sorted(file.name for file in rig.path.iterdir()) == ["MARK", "SOW", "db"]
    restored = opened(rig, tmp_path / "elsewhere" / "backup")
    assert payloads(restored, "a", "c") == [b"a", b"c"]
    restored.close()
    rig.close()


def test_a_failed_backup_leaves_no_files_and_the_store_continues(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(StoreError, match="No space left on device"):
        rig.store.upkeep.backup(tmp_path / "backup")
    monkeypatch.undo()
    assert not (tmp_path / "backup").exists()
    assert sorted(file.name for file in rig.path.iterdir()) == ["MARK", "SOW", "db"]
    rig.put("orders", "d", b"d")
    rig.store.upkeep.backup(tmp_path / "backup")
    rig.close()


def test_the_next_start_removes_the_files_of_a_killed_backup(rig: Rig) -> None:
    rig.close()
    (rig.path / "backup.new" / "db").mkdir(parents=True)
    rig.open()
    assert not (rig.path / "backup.new").exists()
    rig.close()


def test_two_backups_at_a_time_are_one_too_many(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[Reason] = []
    make = backups.make

    def while_one_is_made(*arguments: object, **options: object) -> backups.Made:
        with pytest.raises(StoreError) as caught:
            rig.store.upkeep.backup(tmp_path / "other")
        refused.append(caught.value.reason)
        return make(*arguments, **options)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(backups, "make", while_one_is_made)
    rig.store.upkeep.backup(tmp_path / "backup")
    assert refused == [Reason.OVERLOADED]
    assert not (tmp_path / "other").exists()
    rig.close()
