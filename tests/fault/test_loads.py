"""Loads while the server is killed: staged rows stay, committed loads are finished, no row is applied twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from sow_client import Client, LoadInfo, LoadPart, SowError
from tests.support.servers.server import ServerProcess, until

CONFIG: Final = """
[topics.t]
key = ["/id"]
expiration = "enabled"
"""
OLD: Final = range(30_000)
NEW: Final = range(20_000, 45_000)


def documents(ids: range, kind: str) -> list[bytes]:
    return [json.dumps({"id": number, "kind": kind}).encode() for number in ids]


def content(client: Client) -> dict[int, str]:
    return {record.data["id"]: record.data["kind"] for record in client.query("t")}


def ended(client: Client, load_id: str) -> LoadInfo:
    """The load once it has ended by itself: nobody asks for its progress."""
    until(lambda: client.get_load(load_id).phase in ("done", "failed"), 60, "the load to end")
    return client.get_load(load_id)


def reached(client: Client, load_id: str, phase: str, *, applied: int) -> bool:
    """Waits for a load to be in a phase with so many rows applied; False: it has gone past that."""

    def there() -> bool:
        found = client.get_load(load_id)
        return found.phase == "done" or (found.phase == phase and found.figures.applied >= applied)

    until(there, 60, f"the load to be {phase}")
    return client.get_load(load_id).phase != "done"


@pytest.mark.parametrize("phase", ["applying", "deleting"])
def test_a_killed_server_finishes_committed_loads(tmp_path: Path, phase: str) -> None:
    with ServerProcess(tmp_path, CONFIG) as server, server.client() as client:
        with client.publisher("t") as publisher:
            for document in documents(OLD, "old"):
                publisher.publish(document)
        load = client.open_load("t")
        client.publish("t", {"id": 20_001, "kind": "theirs"})
        client.sow_delete("t", keys=["20002"])
        with client.stage_load(load.id, 0, 1) as stager:
            stager.stage(documents(NEW, "new"), lifetime="1h")
        client.commit_load(load.id, [stager.part()])
        kills = 0
        while kills < 3 and reached(client, load.id, phase, applied=5000 * kills):
            kills += 1
            server.kill9()
            server.start()
        done = ended(client, load.id)
        assert kills > 0
        assert done.phase == "done"
        assert done.figures.staged == len(NEW)
        assert (done.figures.applied, done.figures.superseded) == (len(NEW) - 2, 2)
        assert done.figures.deleted == 20_000  # those below the new ones
        expected = dict.fromkeys(NEW, "new") | {20_001: "theirs"}
        del expected[20_002]
        assert content(client) == expected
        (again,) = client.commit_load(load.id, [stager.part()])
        assert again.phase == "done"
        assert again.figures == done.figures


def test_a_stager_goes_on_with_a_server_that_came_back(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, CONFIG) as server, server.client() as client:
        client.publish("t", {"id": 1, "kind": "old"})
        load = client.open_load("t")
        rows = documents(range(20_000), "new")
        with client.stage_load(load.id, 0, 1) as stager:
            for start in range(0, len(rows), 1000):
                stager.stage(rows[start : start + 1000])
                if start in (5_000, 10_000):
                    server.kill9()
                    server.start()
        assert stager.staged == len(rows)
        assert content(client) == {1: "old"}
        *_, last = client.commit_load(load.id, [stager.part()])
        assert last.figures.applied == len(rows)
        assert content(client) == dict.fromkeys(range(20_000), "new")


def test_a_load_that_is_aborted_leaves_the_topic_as_it_was(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, CONFIG) as server, server.client() as client:
        client.publish("t", {"id": 1, "kind": "old"})
        load = client.open_load("t")
        with client.stage_load(load.id, 0, 1) as stager:
            stager.stage(documents(range(100), "new"))
        client.abort_load(load.id)
        client.abort_load(load.id)
        with pytest.raises(SowError) as refused:
            client.commit_load(load.id, [LoadPart(0, 1, 100)])
        assert refused.value.reason == "LOAD_NOT_FOUND"
        assert content(client) == {1: "old"}
        assert server.faults() == []
