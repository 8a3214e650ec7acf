"""A caller with the rows R that asks F gets the same answers as root that asks `R AND F` (rules A4, A5).

Random documents, changes, R and F. Desk may see the rows R of the topic `full`. Where fields are hidden from it, the
same changes are made to `bare`, without those fields: desk sees in `full` what root sees in `bare`. The naive filter
works out what differs by the rules: a record that leaves R is told as `not_permitted`, without its payload.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sow.v1 import snapshot_pb2, sow_pb2
from sow_server.access.model import AccessFile, Credential, Grant, Identity, Role
from sow_server.access.needs import GRANTABLE, SERVER_ACTIONS, Action
from sow_server.engine.values.keys import parse_path
from sow_server.engine.values.model import (
    ABSENT,
    Delete,
    Expiration,
    Lifetime,
    LifetimeKind,
    Publish,
    TopicSettings,
    Touch,
)
from sow_server.filters import Filter, Meta, parse, print_filter
from sow_server.filters.restriction import without
from sow_server.subscriptions.frames import ChangeFrame, ChangeOp, ChangeReason, Row
from tests.property.test_filters import filters, plannable_filters
from tests.support.fakes.guarded import GuardedParts
from tests.support.oracles.examples import examples
from tests.support.oracles.naive_filter import NaiveFilter
from tests.support.stores.stores import SECOND, Rig
from tests.support.stores.subscribers import Follower

Document = dict[str, Any]
KEYS: Final = ["a", "b", "c", "d", "e", "f"]
HIDDEN: Final = ["/b", "/o/x", "/l/x", "/l", "/o", "/a/x"]
SETTINGS: Final = TopicSettings(expiration=Expiration.ENABLED, index=("/a", "/o/x", "/b"))
SIMPLE: Final = [
    "/a > 0",
    "/a IN (1, 2)",
    "/b = 'x' OR /a < 2",
    "/b IS NULL",
    "/o/x = 1",
    "/o/x IS NULL OR /a = 1",
    "@key != 'b'",
    "/l/x = 1",
    "ARRAY_COUNT(/l) > 0",
    "NOT /a = 2",
    "1 = 1",
]
trees: st.SearchStrategy[Filter] = st.one_of(filters, plannable_filters())


class Publishing(NamedTuple):
    records: list[tuple[str, Document]]
    lifetime: Lifetime
    atomic: bool


class Touching(NamedTuple):
    keys: list[str]
    lifetime: Lifetime


class Deleting(NamedTuple):
    keys: list[str]


class Ticking(NamedTuple):
    micros: int


class Reading(NamedTuple):
    """Subscribers take what there is."""


Operation = Publishing | Touching | Deleting | Ticking | Reading


def document(random: Random) -> Document:
    """A document with few values, so that filters often match."""
    made: Document = {"a": random.randint(0, 3), "b": random.choice([0, "x", None])}
    if random.random() < 0.7:
        made["o"] = {"x": random.randint(0, 1)} | ({"y": 1} if random.random() < 0.5 else {})
    if random.random() < 0.7:
        made["l"] = [random.choice([{"x": 1}, {"x": 2, "y": 1}, 1, [{"x": 1}]]) for _ in range(random.randint(0, 2))]
    if random.random() < 0.2:
        made["a"] = random.choice([{"x": 1}, [1, {"x": 2}], "1", None])
    return made


def operations(random: Random) -> Iterator[Operation]:
    """All records are published, then some change, expire, or go."""
    yield Publishing([(key, document(random)) for key in KEYS], ABSENT, False)
    for _ in range(random.randint(5, 15)):
        keys = random.sample(KEYS, random.randint(1, 3))
        lifetime = random.choice([ABSENT, ABSENT, Lifetime(LifetimeKind.TTL, SECOND)])
        match random.randrange(10):
            case 0:
                yield Touching(keys, lifetime)
            case 1:
                yield Deleting(keys[:1])
            case 2:
                yield Ticking(random.choice([1, SECOND]))
            case 3:
                yield Reading()
            case _:
                yield Publishing([(key, document(random)) for key in keys], lifetime, random.random() < 0.3)


class Asking(NamedTuple):
    """The options of a query."""

    order: str
    top_n: int
    skip_n: int
    page_size: int
    keys: list[str]
    select: Mapping[str, Sequence[str]]


def asking_of(random: Random) -> Asking:
    """Some options."""
    paths = random.sample(["/a", "/b", "/o", "/o/x", "/l", "/l/x"], random.randint(1, 3))
    fields = random.sample(["/a", "/b", "/o/x", "/l", "/l/x", "@key", "/missing"], random.randint(1, 3))
    return Asking(
        ", ".join([field + random.choice(["", " DESC"]) for field in fields]),
        random.randint(1, 4),
        random.randint(0, 2),
        random.randint(1, 3),
        random.sample(KEYS, 3),
        {random.choice(["include", "exclude"]): paths},
    )


SUBSCRIPTIONS: Final[list[dict[str, Any]]] = [
    {"sow": True, "oof": True},
    {"changes": True},
    {"delta": True, "oof": True},
    {"delta": True, "empty_deltas": True, "sow": True},
    {"sow": True, "oof": True, "conflation_micros": SECOND},
    {"sow": True, "oof": True, "delta": True, "conflation_micros": SECOND},
    {"earliest": True, "oof": True, "batch_size": 1},
]


class Pair:
    """Desk, which may see rows and fields of `full`, and root, which asks the other topic for `R AND F`."""

    def __init__(self, folder: Path, rows: Filter | None, hidden: Sequence[str]) -> None:
        self.rig = Rig(folder)
        self.hidden = tuple(tuple(str(step) for step in parse_path(path)) for path in hidden)
        # R reads nothing hidden, so that it means the same without these fields; nothing that differs between topics.
        self.rows = None if rows is None else without(parse(_portable(print_filter(rows))), self.hidden)
        self.other = "bare" if hidden else "full"
        for name in dict.fromkeys(["full", self.other]):
            self.rig.create_topic(name, SETTINGS)
        everything = frozenset(GRANTABLE)
        self.parts = GuardedParts(
            self.rig,
            AccessFile(
                {
                    "desk": _identity(
                        "desk", Grant("", "full", _is_full, everything - SERVER_ACTIONS, _NONE, self.rows, self.hidden)
                    ),
                    "root": _identity("root", Grant("", ".*", lambda name: True, everything, _NONE, None, ())),
                }
            ),
        )

    def text(self, asked: Filter | None) -> tuple[str, str]:
        """The filters that desk and root give."""
        given = "" if asked is None else print_filter(asked)
        if self.other != "full":
            given = _portable(given)
        conditions = [f"({text})" for text in (given, "" if self.rows is None else print_filter(self.rows)) if text]
        return given, " AND ".join(conditions[::-1])

    def visible(self, key: bytes, payload: bytes) -> bool:
        """Whether R holds, by the naive interpreter."""
        if self.rows is None:
            return True
        meta = Meta(key.decode(), 0, 0, None, "full", 0)
        return NaiveFilter(msgspec.json.decode(payload), meta, []).matches(self.rows)

    def both(self, method: str, desk: Mapping[str, Any], root: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        """The answers to both."""
        found = self.parts.answers("desk", method, topic="full", **desk)
        return found, self.parts.answers("root", method, topic=self.other, **root)

    # -- changes ------------------------------------------------------------------------------------------------------

    def run(self, operation: Operation) -> None:
        """The same in both topics, at one time."""
        for topic in dict.fromkeys(["full", self.other]):
            match operation:
                case Publishing(records, lifetime, atomic):
                    shown = [self.stripped(document) if topic == "bare" else document for _, document in records]
                    self.rig.run(
                        Publish(
                            topic,
                            [msgspec.json.encode(document) for document in shown],
                            [key for key, _ in records],
                            lifetime=lifetime,
                            atomic=atomic,
                        )
                    )
                case Touching(keys, lifetime):
                    self.rig.run(Touch(topic, keys, lifetime))
                case Deleting(keys):
                    self.rig.run(Delete(topic, keys))
                case Ticking() | Reading():
                    pass
        if isinstance(operation, Ticking):
            self.rig.time.tick(operation.micros)
            self.rig.store.sweep()

    def stripped(self, document: Document) -> Document:
        """A document without the hidden fields."""
        found: Document = _stripped(document, self.hidden)
        return found


_NONE: Final[frozenset[Action]] = frozenset()


def _is_full(name: str) -> bool:
    return name == "full"


def _identity(name: str, grant: Grant) -> Identity:
    token = hashlib.sha256(name.encode()).hexdigest()
    return Identity(name, Credential(token_sha256=token), (Role(name, (grant,), {}),))


def _portable(text: str) -> str:
    """A filter without what differs from topic to topic, and what `rows` cannot have."""
    for name in ("@version", "@topic", "@publish_time", "@expire_time", "@sequence", "@origin"):
        text = text.replace(name, "@key")
    return text.replace("NOW_MICROS()", "1")


def _stripped(value: Any, hidden: Sequence[tuple[str, ...]]) -> Any:
    if isinstance(value, list):
        return [_stripped(element, hidden) for element in value]
    if isinstance(value, dict):
        return {
            name: _stripped(inner, [path[1:] for path in hidden if path[0] == name and path[1:]])
            for name, inner in value.items()
            if (name,) not in hidden
        }
    return value


Told = tuple[object, ...]


def records_of(responses: Sequence[sow_pb2.QueryResponse]) -> list[Told]:
    """The records of a query's answer."""
    return [
        record
        for response in responses
        if response.HasField("batch")
        for record in zip_longest(response.batch.key, response.batch.payload, response.batch.expire_time_micros)
    ]


def packed(batch: snapshot_pb2.PackedRecords) -> Iterator[Told]:
    """The rows of a packed batch: key, payload, operation, reason."""
    keys, payloads = _cut(batch.keys, batch.key_offsets), _cut(batch.payloads, batch.payload_offsets)
    ops, reasons = batch.ops or bytes(batch.count), batch.reasons or bytes(batch.count)
    yield from zip(keys, payloads, ops, reasons, strict=True)


def _cut(joined: bytes, offsets: bytes) -> list[bytes]:
    edges = [edge for (edge,) in struct.iter_unpack("<i", offsets)]
    return [joined[start:stop] for start, stop in pairwise(edges)]


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), tree=trees, whose=st.sampled_from(["R", "F", "nobody's"]))
def test_a_caller_with_rows_is_told_what_root_is_told_of_those_rows(seed: int, tree: Filter, whose: str) -> None:
    """`whose`: which of the filters is the random tree; the others are simple, so that they match something."""
    random = Random(seed)
    rows = tree if whose == "R" else random.choice([None, *map(parse, SIMPLE)])
    asked = [random.choice([None, *map(parse, SIMPLE)]), tree if whose == "F" else parse(random.choice(SIMPLE))]
    hidden = random.sample(HIDDEN, random.randint(1, 3)) if random.random() < 0.6 else []
    with TemporaryDirectory() as folder:
        pair = Pair(Path(folder), rows, hidden)
        with pair.parts:
            for operation in operations(random):
                pair.run(operation)
            followers = [_followers(pair, asked[0], options) for options in SUBSCRIPTIONS]
            for operation in operations(random):
                pair.run(operation)
                if isinstance(operation, Reading):
                    for one in followers:
                        _settle(pair, one)
            pair.rig.time.tick(2 * SECOND)
            for one in followers:
                _check_followers(pair, one)
            for text in asked:
                _check_reads(pair, text, asking_of(random))
                _check_changes(pair, text)
                _check_export(pair, text, random.randint(0, 4))
                _check_durable(pair, text)
            _check_deletes(pair, asked[1], random.sample(KEYS, 3))
        pair.rig.close()


def _followers(pair: Pair, asked: Filter | None, options: Mapping[str, Any]) -> tuple[Follower, Follower]:
    desk, root = (_portable(text) for text in pair.text(asked))
    return (
        pair.parts.follow("desk", sow_pb2.SubscribeRequest(topic="full", filter=desk, **options)),
        pair.parts.follow("root", sow_pb2.SubscribeRequest(topic=pair.other, filter=root, **options)),
    )


def _settle(pair: Pair, followers: tuple[Follower, Follower]) -> None:
    pair.parts.subscribers.settle()
    for follower in followers:
        follower.pump()
        assert follower.error is None


def _check_followers(pair: Pair, followers: tuple[Follower, Follower]) -> None:
    for _ in range(3):
        pair.rig.time.tick(2 * SECOND)
        _settle(pair, followers)
    desk, root = followers
    assert desk.snapshot() == root.snapshot()
    assert [_told(row) for row in desk.changes()] == [_as_desk(pair, row) for row in root.changes()]
    for follower in followers:
        follower.close()


def _told(row: Row) -> Told:
    return row.op, row.reason, row.key, row.payload, row.is_delta, row.unset_paths, row.expire_time


def _as_desk(pair: Pair, row: Row) -> Told:
    """A row of root's as desk is told of it."""
    leaves = row.reason is ChangeReason.MATCH or row.op is ChangeOp.PUT
    if leaves and not row.is_delta and not pair.visible(row.key, row.payload):
        op = ChangeOp.OOF if row.op is ChangeOp.OOF else ChangeOp.DELETE
        return op, ChangeReason.NOT_PERMITTED, row.key, b"", False, (), 2**63 - 1
    return _told(row)


def _check_reads(pair: Pair, tree: Filter | None, asking: Asking) -> None:
    desk, root = pair.text(tree)
    order = asking.order
    for options in (
        {},
        {"order_by": order},
        {"order_by": order, "top_n": asking.top_n, "skip_n": asking.skip_n},
        {"top_n": asking.top_n, "select": asking.select},
        {"keys": asking.keys, "batch_size": 1},
        {"keys_only": True},
        {"select": asking.select, "order_by": order},
    ):
        ours, theirs = pair.both("Query", {"filter": desk, **options}, {"filter": root, **options})
        assert records_of(ours) == records_of(theirs), options
        assert ours[0].header.as_of_micros == theirs[0].header.as_of_micros
        assert (ours[-1].footer.matched, ours[-1].footer.returned) == (
            theirs[-1].footer.matched,
            theirs[-1].footer.returned,
        )
    for flag in ("count_only", "explain"):
        ours, theirs = pair.both("Query", {"filter": desk, flag: True}, {"filter": root, flag: True})
        assert ours[-1].footer.matched == theirs[-1].footer.matched
    for by in ("", order):
        options = {"order_by": by, "page_size": asking.page_size}
        assert _pages(pair, "desk", "full", desk, options) == _pages(pair, "root", pair.other, root, options)
    if tree is None:
        (got,) = pair.parts.answers("desk", "Get", topic="full", keys=KEYS, select=asking.select)
        theirs = pair.parts.answers("root", "Query", topic=pair.other, filter=root, keys=KEYS, select=asking.select)
        assert [(record.key, record.payload) for record in got.records] == [told[:2] for told in records_of(theirs)]


def _pages(pair: Pair, identity: str, topic: str, text: str, options: Mapping[str, Any]) -> list[Told]:
    found: list[Told] = []
    token = ""
    while True:
        answer = pair.parts.answers(identity, "Query", topic=topic, filter=text, page_token=token, **options)
        found += records_of(answer)
        token = answer[-1].footer.next_page_token
        if not token:
            return found


def _check_changes(pair: Pair, tree: Filter | None) -> None:
    desk, root = (_portable(text) for text in pair.text(tree))
    instance, head = pair.rig.store.instance, pair.rig.store.commits.last_sequence
    ends = {"start_bookmark": instance.bookmark(0), "end_bookmark": instance.bookmark(head), "columns": [1, 2, 8]}
    answers = pair.both("ReadChanges", {"filter": desk, **ends}, {"filter": root, **ends})
    ours, theirs = ([row for answer in one for row in packed(answer.batch)] for one in answers)
    expected = []
    for key, payload, op, reason in theirs:
        assert isinstance(key, bytes)
        assert isinstance(payload, bytes)
        leaves = op == ChangeOp.PUT and not pair.visible(key, payload)
        expected.append(
            (key, b"", ChangeOp.DELETE, ChangeReason.NOT_PERMITTED) if leaves else (key, payload, op, reason)
        )
    assert ours == expected


def _check_export(pair: Pair, tree: Filter | None, parts: int) -> None:
    desk, root = pair.text(tree)
    opened = pair.both("OpenExport", {"filter": desk, "parts": parts}, {"filter": root, "parts": parts})
    told = []
    for identity, (export,) in zip(("desk", "root"), opened, strict=True):
        rows: list[Told] = []
        for part in range(len(export.parts)):
            token = b""
            for answer in pair.parts.answers(
                identity, "ReadExport", export_id=export.export_id, part=part, columns=[1, 2], batch_size=1
            ):
                rows += packed(answer.batch)
                token = answer.resume_token or token
            if token:
                (footer,) = pair.parts.answers(
                    identity, "ReadExport", export_id=export.export_id, part=part, resume_token=token
                )
                assert footer.footer.returned == 0, "there is nothing behind the last batch"
        told.append(rows)
        pair.parts.answers(identity, "CloseExport", export_id=export.export_id)
    assert told[0] == told[1]


def _check_durable(pair: Pair, tree: Filter | None) -> None:
    desk, root = (_portable(text) for text in pair.text(tree))
    name = f"d{pair.rig.store.durables.count(pair.rig.topic('full'))}"
    told = []
    for identity, topic, text in (("desk", "full", desk), ("root", pair.other, root)):
        durable = {"name": name}
        asked = sow_pb2.SubscribeRequest(topic=topic, filter=text, durable=durable, earliest=True, oof=True)  # type: ignore[arg-type]  # a message
        consumer = pair.parts.consume(identity, asked)
        pair.parts.subscribers.settle()
        consumer.pump()
        frames = [frame for frame in consumer.frames if isinstance(frame, ChangeFrame)]
        rows = [row for frame in frames for row in frame.rows]
        consumer.close()
        pair.parts.subscribers.settle()
        (described,) = pair.parts.answers(identity, "DescribeDurable", topic=topic, name=name, exact=True)
        figures = described.durable.figures
        told.append(
            (
                [_told(row) if identity == "desk" else _as_desk(pair, row) for row in rows],
                figures.total_entries,
                figures.unacknowledged_entries,
            )
        )
    assert told[0] == told[1]


def _check_deletes(pair: Pair, tree: Filter | None, keys: list[str]) -> None:
    """Desk deletes what it sees, and nothing else."""
    desk, root = pair.text(tree)
    live = pair.rig.live("full")
    shown = {key for key, record in live.items() if pair.visible(key, record.payload)}
    for selection in ({"by_keys": {"keys": keys}}, {"by_filter": desk or "1 = 1"}, {"all": True}):
        if "by_keys" in selection:
            chosen = shown & {key.encode() for key in keys}
        else:
            text = root if "by_filter" in selection else pair.text(None)[1]
            theirs = pair.parts.answers("root", "Query", topic=pair.other, filter=text, keys_only=True)
            chosen = {str(told[0]).encode() for told in records_of(theirs)}
            chosen &= pair.rig.live("full").keys()  # bare still has what desk has deleted of full
        (dry,) = pair.parts.answers("desk", "SowDelete", topic="full", dry_run=True, **selection)
        done = pair.parts.answers("desk", "SowDelete", topic="full", **selection)[-1]
        assert (dry.matched, done.matched, done.deleted) == (len(chosen), len(chosen), len(chosen))
        before, live = live, pair.rig.live("full")
        assert before.keys() - live.keys() == chosen
        shown -= chosen
    assert not shown
