"""Backups: their contents, and a start on one (rule J14)."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sow_server.engine.disk import backups
from sow_server.engine.store import Store
from sow_server.engine.values.database import Damaged, DiskFull, Failed, RocksError
from sow_server.engine.values.errors import OpenError, Reason, StoreError
from tests.support.stores.stores import Rig


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
    made = rig.store.upkeep.backup("backup")
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
    rig.store.upkeep.backup("backup")
    rig.put("orders", "d", b"d")
    rig.reopen()
    assert (rig.store.instance.id, rig.store.instance.epoch) == (instance, epoch)
    assert payloads(rig.store, "c", "d") == [b"c", b"d"]
    assert sorted(file.name for file in rig.path.iterdir()) == ["MARK", "SOW", "db"]
    rig.close()


def test_a_store_made_from_a_backup_is_another_instance_with_another_journal(rig: Rig, tmp_path: Path) -> None:
    rig.store.upkeep.backup("backup")
    bookmark = rig.store.instance.bookmark(1)
    restored = opened(rig, tmp_path / "backup")
    assert restored.instance.id != rig.store.instance.id
    assert restored.instance.bookmark(1) != bookmark
    assert not restored.instance.authoritative
    assert restored.origins.names == (*rig.store.origins.names, "sow"), (
        "its writes from now on have a number of their own (K7)"
    )
    restored.close()
    rig.close()


def test_each_copy_of_a_backup_becomes_a_separate_instance(rig: Rig, tmp_path: Path) -> None:
    rig.store.upkeep.backup("backup")
    shutil.copytree(tmp_path / "backup", tmp_path / "copy")
    one, other = opened(rig, tmp_path / "backup"), opened(rig, tmp_path / "copy")
    assert one.instance.id != other.instance.id
    assert one.instance.epoch != other.instance.epoch
    one.close()
    other.close()
    rig.close()


def test_a_restored_store_keeps_its_identity_over_restarts(rig: Rig, tmp_path: Path) -> None:
    rig.store.upkeep.backup("backup")
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
    rig.store.upkeep.backup("backup")

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
    rig.store.upkeep.backup("backup")
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
    rig.store.upkeep.backup("backup")
    restored = opened(rig, tmp_path / "backup", authoritative=True)
    restored.upkeep.backup("second")
    restored.close()
    second = opened(rig, tmp_path / "second")
    assert not second.instance.authoritative
    second.close()
    rig.close()


def refused(rig: Rig, name: str) -> StoreError:
    """The error with which a backup is refused. It tells nothing of where the server's files are."""
    with pytest.raises(StoreError) as caught:
        rig.store.upkeep.backup(name)
    assert str(rig.path.parent) not in caught.value.message
    return caught.value


def test_an_existing_backup_is_not_changed(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "backup").mkdir()
    error = refused(rig, "backup")
    assert (error.reason, error.field) == (Reason.BACKUP_EXISTS, "name")
    assert list((tmp_path / "backup").iterdir()) == []
    (tmp_path / "dangling").symlink_to("nowhere")
    assert refused(rig, "dangling").reason is Reason.BACKUP_EXISTS
    rig.close()


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "../x", "/etc/x", "a/b", "a\\b", "a b", "a\0", "a\n", "ä", "x" * 101]
)
def test_a_name_that_is_a_path_or_no_name_is_refused(rig: Rig, tmp_path: Path, name: str) -> None:
    error = refused(rig, name)
    assert (error.reason, error.field) == (Reason.INVALID_ARGUMENT, "name")
    assert [file.name for file in tmp_path.iterdir()] == ["data-0"]
    rig.close()


@pytest.mark.parametrize("name", ["x", "x" * 100, "2030-01-31", "-a", "_a", "a..b", "a.", "Nightly_7.full"])
def test_a_name_may_have_letters_digits_and_three_marks(rig: Rig, tmp_path: Path, name: str) -> None:
    assert rig.store.upkeep.backup(name).bytes > 0
    assert backups.is_backup(tmp_path / name)
    rig.close()


def test_without_a_root_there_are_no_backups_and_the_error_names_the_knob(rig: Rig) -> None:
    rig.close()
    rig.options = replace(rig.options, backup_root=None)
    rig.open()
    error = refused(rig, "backup")
    assert error.reason is Reason.BACKUP_UNAVAILABLE
    assert "set root in [backup]" in error.message
    rig.close()


def test_a_missing_root_is_made_and_is_private(rig: Rig, tmp_path: Path) -> None:
    rig.close()
    rig.options = replace(rig.options, backup_root=tmp_path / "var" / "backups")
    rig.open()
    rig.store.upkeep.backup("backup")
    assert (tmp_path / "var" / "backups").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "var" / "backups" / "backup").stat().st_mode & 0o777 == 0o700
    rig.close()


def other_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories cannot be moved to another one."""
    rename = Path.rename

    def renamed(self: Path, target: Path) -> Path:
        if self.parent != target.parent:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renamed)


def test_on_another_file_system_it_is_copied_and_appears_whole(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links end at the border of a file system; RocksDB itself would copy with every thread of the server standing."""
    other_file_system(monkeypatch)
    rig.store.upkeep.backup("backup")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["backup", "data-0"]
    assert (tmp_path / "backup").stat().st_mode & 0o777 == 0o700
    assert sorted(file.name for file in rig.path.iterdir()) == ["MARK", "SOW", "db"]
    restored = opened(rig, tmp_path / "backup")
    assert payloads(restored, "a", "c") == [b"a", b"c"]
    restored.close()
    rig.close()


def test_a_copy_to_another_file_system_spares_other_backups(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: the copy of `backup` was called `backup.new`, and a backup of that name was removed."""
    rig.store.upkeep.backup("backup.new")
    other_file_system(monkeypatch)
    rig.store.upkeep.backup("backup")
    for name in ("backup", "backup.new"):
        assert backups.is_backup(tmp_path / name)
    rig.close()


def test_the_next_backup_removes_the_copy_of_a_killed_one(rig: Rig, tmp_path: Path) -> None:
    for left in (".killed@sow.new", ".killed@not.sow.new"):
        (tmp_path / left / "db").mkdir(parents=True)
    rig.store.upkeep.backup("backup")
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == [".killed@not.sow.new", "backup", "data-0"], "another instance may be at work on the other"
    rig.close()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_full_disk_leaves_no_files_and_the_store_continues(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    copyfile = shutil.copyfile

    def full(source: Path, target: Path) -> Path:
        if elsewhere and target.is_relative_to(rig.path):
            return copyfile(source, target)
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    with monkeypatch.context() as patched:
        other_file_system(patched)
        patched.setattr(shutil, "copyfile", full)
        error = refused(rig, "backup")
    assert error.reason is Reason.DISK_FULL
    assert "backup" in error.message
    assert [file.name for file in tmp_path.iterdir()] == ["data-0"]
    assert sorted(file.name for file in rig.path.iterdir()) == ["MARK", "SOW", "db"]
    rig.put("orders", "d", b"d")
    rig.store.upkeep.backup("backup")
    rig.close()


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (DiskFull("IO error: No space left on device: While link file to {0}/db/000012.sst"), Reason.DISK_FULL),
        (Damaged("Corruption: block checksum mismatch in {0}/db/000012.sst"), Reason.DATA_DAMAGED),
        (Failed("IO error: While open a file: {0}/db/MANIFEST-000005: Input/output"), Reason.BACKUP_UNAVAILABLE),
    ],
)
def test_an_error_of_the_database_reaches_the_log_with_its_paths_and_the_caller_without(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, cause: RocksError, reason: Reason
) -> None:
    text = str(cause).format(rig.path)

    def fails(path: Path) -> None:
        raise type(cause)(text)

    monkeypatch.setattr(rig.store._rocks, "checkpoint", fails)
    with capture_logs() as logged:
        assert refused(rig, "backup").reason is reason
    (event,) = [event for event in logged if event["event"] == "backup_failed"]
    assert (event["backup"], event["cause"]) == ("backup", text)
    rig.close()


def test_a_root_that_cannot_be_written_is_told_without_its_path(rig: Rig, tmp_path: Path) -> None:
    rig.close()
    rig.options = replace(rig.options, backup_root=tmp_path / "file" / "backups")
    rig.open()
    (tmp_path / "file").write_text("no directory")
    error = refused(rig, "backup")
    assert error.reason is Reason.BACKUP_UNAVAILABLE
    assert "Not a directory" in error.message
    rig.close()


def test_a_store_that_has_stopped_writing_makes_no_backup_and_names_no_file(rig: Rig, tmp_path: Path) -> None:
    rig.store.writer.fail(StoreError(Reason.STORE_FAILED, f"IO error: {rig.path}/db/000012.log"))
    assert refused(rig, "backup").reason is Reason.STORE_FAILED
    assert not (tmp_path / "backup").exists()
    rig.close()


def test_the_next_start_removes_the_files_of_a_killed_backup(rig: Rig) -> None:
    rig.close()
    (rig.path / "backup.new" / "db").mkdir(parents=True)
    rig.open()
    assert not (rig.path / "backup.new").exists()
    rig.close()


def test_two_backups_at_a_time_are_one_too_many(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[Reason] = []
    make = backups.make

    def while_one_is_made(*arguments: object, **options: object) -> backups.Made:
        with pytest.raises(StoreError) as caught:
            rig.store.upkeep.backup("other")
        reasons.append(caught.value.reason)
        return make(*arguments, **options)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(backups, "make", while_one_is_made)
    rig.store.upkeep.backup("backup")
    assert reasons == [Reason.OVERLOADED]
    assert not (tmp_path / "other").exists()
    rig.close()
