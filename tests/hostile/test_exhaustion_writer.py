"""One identity sends more work to the writer than it can do; the publishes of others have their turns (rule N7)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

import pytest

from sow_client import Client, InvalidArgument
from tests.support.oracles.access import GUARDED, client_of, grant, identity, write_access
from tests.support.servers.server import ServerProcess

ACCESS: Final = identity("heavy", "writer") + identity("light", "writer") + grant("writer", ".*", "read publish")
PUBLISHES: Final = 6
WATCHDOG_SECONDS: Final = 240.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    write_access(tmp_path, ACCESS)
    with ServerProcess(tmp_path, GUARDED) as made:
        with client_of(made, "root") as root:
            root.create_topic("large", key=["/id"])
            root.create_topic("small", key=["/id"])
        yield made


def flat() -> dict[str, object]:
    return {"id": 1, **{f"field-{number}": "x" * 20 for number in range(24_000)}}


def nested() -> dict[str, object]:
    document: dict[str, object] = {"id": 1}
    level = document
    for number in range(30):
        level["text"] = "x" * 30_000
        level["next"] = level = {"number": number}
    return document


def heavy_work(client: Client, deltas: int) -> int:
    documents = [{"id": 1, "n": number} for number in range(deltas)]
    return len(client.publish_many("large", documents, delta=True, durability="buffered"))


def large_record(client: Client) -> dict[str, object]:
    found = client.get("large", "1")
    assert found is not None
    document: dict[str, object] = found.data
    return document


@pytest.mark.parametrize("document", [flat, nested])
@pytest.mark.parametrize("deltas", [30, pytest.param(2000, marks=pytest.mark.long)])
def test_others_publish_between_the_deltas_of_an_identity_on_a_large_record(
    server: ServerProcess, document: Callable[[], dict[str, object]], deltas: int
) -> None:
    """Counts the changes of the one between two answers of the other, in the order of the journal: no times.

    Story: 300 deltas on a record of 1 MB made the publishes of all others wait for 82 s, 2,000 on a flat one for 48 s.
    """
    payload = json.dumps(document())
    assert 600_000 < len(payload) < 1_000_000
    with (
        client_of(server, "heavy") as heavy,
        client_of(server, "light") as light,
        ThreadPoolExecutor(1) as threads,
    ):
        heavy.publish("large", payload)
        work = threads.submit(heavy_work, heavy, deltas)
        while "n" not in large_record(light):
            pass  # until the deltas have begun
        sequences = [light.publish("small", {"id": number}, durability="buffered").sequence for number in range(1, 20)]
        between = [later - earlier - 1 for earlier, later in pairwise(sequences)]
        served = [count for count in between if count]
        assert len(served) >= PUBLISHES or work.done() is False
        assert median(served) <= 4, f"changes of the other between two answers: {between}"
        assert work.result(WATCHDOG_SECONDS) == deltas
        assert large_record(light)["n"] == deltas - 1


def test_others_publish_while_an_identity_fills_indexes(server: ServerProcess) -> None:
    """Story: one record of 0.9 MB, 150,000 numbers of it in an index, each entry with a key of 1,000 bytes, took a
    commit 5.8 s and 510 MB."""
    with client_of(server, "root") as root:
        root.create_topic("tagged", index=["/tags"])
    long = "k" * 1000
    with (
        client_of(server, "heavy") as heavy,
        client_of(server, "light") as light,
        ThreadPoolExecutor(1) as threads,
    ):
        with pytest.raises(InvalidArgument, match="10000 index entries") as caught:
            heavy.publish("tagged", {"tags": list(range(150_000))}, key=long)
        assert caught.value.reason == "PAYLOAD_TOO_LARGE"

        def fill() -> int:
            rows = [{"tags": list(range(5000))}] * 20
            keys = [f"{number}{long}" for number in range(20)]
            return len(heavy.publish_many("tagged", rows, keys=keys, durability="buffered"))

        work = threads.submit(fill)
        while light.get("tagged", f"0{long}") is None:
            pass  # until it has begun
        sequences = [light.publish("small", {"id": number}, durability="buffered").sequence for number in range(1, 8)]
        between = [later - earlier - 1 for earlier, later in pairwise(sequences)]
        assert max(between) <= 4, f"records of the other between two answers: {between}"
        assert work.result(WATCHDOG_SECONDS) == 20
