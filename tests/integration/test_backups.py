"""A backup of a running server, and a server started on it (rule J14)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sow_client import AlreadyExists, ReplicationUnavailable, ResyncRequired
from tests.support.servers.server import DidNotStart, ServerProcess

CONFIG = """
[server]
instance = "nyc-1"
[backup]
root = "../backups"
[topics.orders]
key = ["/id"]
[topics.unlogged]
key = ["/id"]
journal = false
"""


@pytest.fixture
def server(tmp_path: Path) -> ServerProcess:
    return ServerProcess(tmp_path / "server", CONFIG)


def test_a_server_restored_from_a_backup_has_the_data_and_another_journal(
    server: ServerProcess, tmp_path: Path
) -> None:
    backup = tmp_path / "backups" / "nightly"
    with server, server.client() as client:
        for number in range(10):
            client.publish("orders", {"id": number})
        with client.durable("orders", "billing", start="earliest") as durable:
            for change in durable:
                durable.acknowledge(change)
                if change.key == "3":
                    break
        with client.subscribe("orders") as subscription:
            client.publish("orders", {"id": 10})
            bookmark = next(iter(subscription)).bookmark
        before = client.status()
        made = client.backup("nightly")
        assert made.name == "nightly"
        client.publish("orders", {"id": 11})
        assert made.sequence == before.last_sequence
        with pytest.raises(AlreadyExists, match="there is a backup nightly already") as taken:
            client.backup("nightly")
        assert taken.value.reason == "BACKUP_EXISTS"
    folder = tmp_path / "restored"
    folder.mkdir()
    shutil.copytree(backup, folder / "data")
    with ServerProcess(folder, CONFIG) as restored, restored.client() as client:
        assert [record.key for record in client.query("orders", order_by="/id")] == [str(n) for n in range(11)]
        after = client.status()
        assert after.instance_id != before.instance_id
        assert after.journal_epoch != before.journal_epoch
        with pytest.raises(ResyncRequired) as caught:
            next(iter(client.subscribe("orders", start=bookmark)))
        assert caught.value.reason == "BOOKMARK_OTHER_EPOCH"
        with client.durable("orders", "billing") as durable:
            assert next(iter(durable)).key == "4"  # its position is in the data
        restored.terminate()
        restored.start()
        assert client.status().instance_id == after.instance_id


def test_authoritative_is_for_the_start_on_a_backup(server: ServerProcess, tmp_path: Path) -> None:
    with server, server.client() as client:
        client.publish("orders", {"id": 1})
        client.backup("backup")
        server.terminate()
        with pytest.raises(DidNotStart) as caught:
            server.start("--authoritative")
        assert caught.value.code == 2
        assert "--authoritative is for the first start on a backup" in caught.value.said
    shutil.rmtree(server.data)
    shutil.copytree(tmp_path / "backups" / "backup", server.data)
    with server:
        server.start("--authoritative")
        (event,) = server.events("backup_restored")
        assert event["authoritative"] is True


def test_replicated_without_peers_is_refused_and_writes_nothing(server: ServerProcess) -> None:
    with server, server.client() as client:
        for write in (
            lambda: client.publish("orders", {"id": 1}, durability="replicated"),
            lambda: client.touch("orders", "1", ttl="1h", durability="replicated"),
            lambda: client.sow_delete("orders", filter="true", durability="replicated"),
            lambda: client.sow_delete("orders", all=True, durability="replicated"),
            lambda: client.sow_delete("orders", keys=["1"], durability="replicated"),
            lambda: client.publish("unlogged", {"id": 1}, durability="replicated"),
        ):
            with pytest.raises(ReplicationUnavailable, match="nothing was written") as caught:
                write()
            assert caught.value.applied == 0
        with pytest.raises(ReplicationUnavailable), client.publisher("orders", durability="replicated") as publisher:
            publisher.publish({"id": 1})
        assert client.count("orders") == 0
        status = client.replication_status()
        assert (status.instance, status.outgoing, status.incoming) == ("nyc-1", (), ())
