"""An instance that has lost its data, or has older ones, gets along with its own earlier writes (K7)."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from sow_peering import MergeCounts
from sow_server.engine.disk.layout import INSTANCE_KEY
from sow_server.engine.disk.rocks import META, Batch, Rocks
from tests.support.stores.replicas import identity, instance, live, pair, ship
from tests.support.stores.stores import SECOND, START, FakeTime, Rig

__all__ = ["pair"]  # a fixture


def wiped(rig: Rig, path: Path) -> Rig:
    """The same instance with new data, and a clock that is five seconds behind."""
    rig.close()
    time = FakeTime(START - 5 * SECOND)
    again = instance(path / "again", rig.options.instance, peers=["b"], time=time)
    again.create_topic("t")
    return again


def test_writes_of_an_instance_after_it_lost_its_data_outrank_its_earlier_writes(
    pair: tuple[Rig, Rig], tmp_path: Path
) -> None:
    """K7: an instance was wiped, and wrote with a clock that was behind. The peer had its earlier write, of a greater
    version, so the newer one, although acknowledged (even as REPLICATED), was gone everywhere after the seed."""
    a, b = pair
    a.put("t", "1", b"before")
    a.put("t", "2", b"before")
    ship(a, b)
    a = wiped(a, tmp_path)
    a.put("t", "1", b"after", ttl=30 * SECOND)
    expire_time = live(a)["1"].expire_time_micros
    ship(b, a)
    assert live(a)["1"].payload == b"after"
    assert live(a)["1"].expire_time_micros == expire_time, "it keeps the lifetime that it was given"
    assert live(a)["1"].version > live(b)["1"].version
    assert live(a)["2"].payload == b"before"
    ship(a, b)
    assert live(a)["1"] == live(b)["1"]
    assert ship(b, a) == MergeCounts()


def test_a_delete_after_the_loss_wins_over_earlier_writes(pair: tuple[Rig, Rig], tmp_path: Path) -> None:
    """K7: else the record that the instance had deleted came back with the seed."""
    a, b = pair
    a.put("t", "1", b"before")
    ship(a, b)
    a = wiped(a, tmp_path)
    a.store.replicas.sources.begin(identity(b), topics=".*", filter_text="", cursor=0, missing_is_deleted=False)
    a.store.writer.step()
    a.put("t", "1", b"after")
    a.delete("t", "1")
    ship(b, a)
    assert live(a) == {}
    ship(a, b)
    assert live(b) == {}


def test_a_newer_write_of_before_replaces_an_older_one_of_before(pair: tuple[Rig, Rig], tmp_path: Path) -> None:
    """K7: a row that came back from one peer is no write of the present life: a newer one that another peer has
    wins."""
    a, b = pair
    c = instance(tmp_path, "c", peers=["a"], time=b.time)
    c.create_topic("t")
    a.put("t", "1", b"first")
    ship(a, b)
    a.put("t", "1", b"second")
    ship(a, c)
    a = wiped(a, tmp_path)
    ship(b, a)
    assert live(a)["1"].payload == b"first"
    ship(c, a)
    assert live(a)["1"].payload == b"second"


def test_restored_data_get_the_rows_written_after_the_backup(pair: tuple[Rig, Rig], tmp_path: Path) -> None:
    """J14, K7: the backup is older than the rows of the peers, though both are by the same instance."""
    a, b = pair
    a.put("t", "1", b"in the backup")
    a.store.upkeep.backup("backup")
    a.put("t", "1", b"after the backup")
    ship(a, b)
    a.close()
    restored = Rig(tmp_path, options=a.options, time=a.time, opened=False)
    restored.path = tmp_path / "a" / "backup"
    restored.open()
    ship(b, restored)
    assert live(restored)["1"].payload == b"after the backup"


def test_an_instance_that_takes_over_a_name_gets_the_rows_written_under_it(
    pair: tuple[Rig, Rig], tmp_path: Path
) -> None:
    """K7. Story: rows received from the previous instance counted as its own, and was put above newer writes of that
    one, which had reached another peer alone: an acknowledged write was gone everywhere."""
    a, b = pair
    c = instance(tmp_path, "c", peers=["b"], time=a.time)
    c.create_topic("t")
    a.put("t", "1", b"first")
    ship(a, c)
    a.put("t", "1", b"second")
    ship(a, b)
    c.options = replace(c.options, instance="a")
    c.reopen()
    ship(b, c)
    assert live(c)["1"].payload == b"second"
    c.put("t", "2", b"own")
    c.reopen()
    assert c.store.origins.names[c.live("t")[b"2"].origin] == "a"
    assert c.store.origins.names.count("a") == 2, "a start alone gives no further number"


def test_data_of_an_older_release_get_newer_writes_of_the_same_name(pair: tuple[Rig, Rig], tmp_path: Path) -> None:
    """K7. Story: in older data all that an instance wrote, before and after a restore, has one number."""
    a, b = pair
    a.put("t", "1", b"first")
    a.store.sync()
    shutil.copytree(a.path, tmp_path / "older")
    a.put("t", "1", b"second")
    ship(a, b)
    a.close()
    older = Rig(tmp_path, options=a.options, time=a.time, opened=False)
    older.path = tmp_path / "older"
    (older.path / "MARK").unlink(missing_ok=True)
    rocks = Rocks(older.path / "db", create=False)
    fields = json.loads(rocks.get(META, INSTANCE_KEY) or b"")
    del fields["origin"]
    batch = Batch()
    batch.puts[META][INSTANCE_KEY] = json.dumps(fields | {"id": "restored", "epoch": "restored"}).encode()
    rocks.write(batch)
    rocks.close()
    older.open()
    ship(b, older)
    assert live(older)["1"].payload == b"second"
