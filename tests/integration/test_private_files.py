"""The files of a running server are for its own user alone, and so are the secrets that it is given (rule X5)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sow_client import FailedPrecondition, InvalidArgument
from tests.support.servers.modes import not_private, open_to_all
from tests.support.servers.server import DidNotStart, ServerProcess

CONFIG = """
[server]
dynamic_topics = true
[backup]
root = "backups"
"""


def careless(folder: Path, config: str = CONFIG) -> ServerProcess:
    """A server that is started with a umask of 0, which gives everybody everything."""
    server = ServerProcess(folder, config, start=False)
    server.module = "tests.support.servers.umask_server"
    server.start()
    return server


def test_data_and_backups_are_private_whatever_the_umask(tmp_path: Path) -> None:
    with careless(tmp_path) as server, server.client() as client:
        client.publish_many("orders", [{"n": number} for number in range(100)], keys=[str(n) for n in range(100)])
        assert not_private(server.data) == {}
        client.backup("first")
        assert not_private(tmp_path / "backups") == {}
        client.compact()
        client.publish("orders", {"n": 1}, key="1")
        client.backup("second")
        server.restart()
        client.publish("orders", {"n": 2}, key="1")
        assert server.events("modes_tightened") == []
        assert not_private(server.data) == {}
        server.kill9()
        server.start()
        assert not_private(server.data) == {}
        assert not_private(tmp_path / "backups") == {}


def test_data_that_others_could_read_are_private_after_the_start(tmp_path: Path) -> None:
    with careless(tmp_path) as server, server.client() as client:
        client.publish("orders", {"n": 1}, key="1")
        client.backup("backup")
        assert server.terminate() == 0
        changed = open_to_all(server.data)
        server.start()
        (event,) = server.events("modes_tightened")
        assert event["files"] == changed
        assert not_private(server.data) == {}
        assert not_private(tmp_path / "backups") == {}, "tables are links, and have one mode"
        assert server.terminate() == 0
        shutil.rmtree(server.data)
        shutil.copytree(tmp_path / "backups" / "backup", server.data)
        open_to_all(server.data)
        server.start()
        assert client.count("orders") == 1
        assert not_private(server.data) == {}


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "", ".hidden", "..", "x" * 101])
def test_a_backup_is_made_nowhere_but_in_its_root(tmp_path: Path, name: str) -> None:
    with careless(tmp_path / "server") as server, server.client() as client:
        with pytest.raises(InvalidArgument) as caught:
            client.backup(name)
        assert caught.value.details["field"] == "name"
        assert not (tmp_path / "server" / "backups").exists()
        assert [path.name for path in tmp_path.iterdir()] == ["server"]


def test_a_root_that_cannot_be_written_is_told_without_a_path(tmp_path: Path) -> None:
    with careless(tmp_path) as server, server.client() as client:
        (tmp_path / "backups").write_text("a file has taken its place")
        with pytest.raises(FailedPrecondition) as caught:
            client.backup("backup")
        assert caught.value.reason == "BACKUP_UNAVAILABLE"
        assert str(tmp_path) not in str(caught.value)
        (event,) = server.events("backup_failed")
        assert str(tmp_path) in str(event["cause"])


def test_without_a_root_backups_are_refused(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, server.client() as client:
        with pytest.raises(FailedPrecondition, match=r"set root in \[backup\]") as caught:
            client.backup("backup")
        assert caught.value.reason == "BACKUP_UNAVAILABLE"


def test_a_token_that_others_can_read_is_refused_at_the_start(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    token.chmod(0o644)
    config = CONFIG + '[replication]\naccept = ["ldn-1"]\ntoken_file = "token"\n'
    with ServerProcess(tmp_path, config, start=False) as server:
        with pytest.raises(DidNotStart) as caught:
            server.start()
        assert caught.value.code == 2
        assert f"[replication] token_file: {token} holds a secret" in caught.value.said
        assert f"chmod 600 {token}" in caught.value.said
        token.chmod(0o600)
        server.start()
