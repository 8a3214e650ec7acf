"""Legal records and requests that were made to cost as much as possible: the answers are right, and soon there.

tests/unit/engine/test_levels.py counts the work.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from sow_client import Change, Client
from tests.support.oracles.access import GUARDED, client_of, grant, identity, write_access
from tests.support.servers.server import ServerProcess

DEPTH = 250
HIDDEN = "/a" * DEPTH + "/s"
NAMES = 100_000
PATHS = 1000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("payloads")
    desk = identity("desk", "desk") + grant("desk", ".*", "read consume", f'hide = ["{HIDDEN}", "/legs/s"]')
    write_access(folder, desk)
    with ServerProcess(folder, GUARDED + '[limits]\npayload_bytes_max = "2MiB"\n') as made:
        with client_of(made, "root") as root:
            root.create_topic("deep", key=["/id"])
            root.create_topic("wide", key=["/id"])
        yield made


@pytest.fixture
def root(server: ServerProcess) -> Iterator[Client]:
    with client_of(server, "root") as client:
        yield client


@pytest.fixture
def desk(server: ServerProcess) -> Iterator[Client]:
    with client_of(server, "desk") as client:
        yield client


def deep(secret: int) -> bytes:
    """1 MB, nested 250 deep. The number of the innermost level has digits that no float keeps."""
    text = b'{"s":%d, "n":1.50, "t":"%s"}' % (secret, b"x" * 1_000_000)
    return b'{"id":"deep","legs":' + b"[" * 200 + b'{"s":1,"k":2}' + b"]" * 200 + b"," + _nested(text)[1:]


def _nested(inner: bytes) -> bytes:
    return b'{"a":' * DEPTH + inner + b"}" * DEPTH


def shown() -> bytes:
    """The part of it that may be seen: untouched values keep their bytes."""
    text = b'{"n":1.50,"t":"%s"}' % (b"x" * 1_000_000)
    return b'{"id":"deep","legs":' + b"[" * 200 + b'{"k":2}' + b"]" * 200 + b"," + _nested(text)[1:]


def test_hidden_fields_of_a_large_and_deep_record(root: Client, desk: Client) -> None:
    """Story: one get of such a record, by a role with hidden fields, stopped the server for 3.7 s."""
    root.publish("deep", deep(1))
    got = desk.get("deep", "deep")
    assert got is not None
    assert got.payload == shown()
    (found,) = desk.query("deep")
    assert found.payload == shown()
    stream = desk.sow_and_subscribe("deep")
    assert _next(stream) == shown()
    root.publish("deep", deep(2))
    assert _next(stream) == shown()
    stream.close()
    selected = list(root.query("deep", select=[HIDDEN]))
    assert [record.payload for record in selected] == [_nested(b'{"s":2}')]


def test_a_thousand_paths_of_a_record_with_a_hundred_thousand_names(root: Client, desk: Client) -> None:
    """Story: each name was compared with each path, 4.6 s for a key."""
    fields = {f"n{number}": number for number in range(NAMES)}
    root.publish("wide", msgspec.json.encode({"id": 1, **fields}))
    chosen = [f"n{number * 97}" for number in range(PATHS)]
    (found,) = desk.query("wide", select=[f"/{name}" for name in chosen])
    assert found.data == {name: fields[name] for name in chosen}
    (rest,) = desk.query("wide", exclude=[f"/{name}" for name in chosen])
    assert rest.data == {"id": 1, **{name: fields[name] for name in fields.keys() - chosen}}
    root.delta_publish("wide", {"id": 1, "n0": None}, unset=[f"/{name}" for name in chosen[1:]])
    left = root.get("wide", 1)
    assert left is not None
    assert len(left.data) == NAMES + 1 - (PATHS - 1)


def _next(stream: Iterator[Change]) -> bytes:
    for change in stream:
        if change.record is not None:
            return change.record.payload
    raise AssertionError("the stream has ended")
