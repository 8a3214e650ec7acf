"""What a caller may not see makes no difference to anything that it is told (rules A4, A5).

There are two worlds, equal but for what is hidden from `desk`: in one of them the hidden records are in another topic,
which desk may not see, and the hidden field is missing. Every RPC must answer desk with the same bytes in both, and end
with the same status. So a figure, a plan, a token, or an error that depends on something hidden shows.

A refused publish is left out: it tells that the key is not the caller's (docs/security.md).
"""

from __future__ import annotations

import itertools
import json
import secrets
import uuid
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from sow.checksums import checksum
from sow.v1 import snapshot_pb2, sow_pb2
from sow_server.engine.disk.rocks import cursor
from sow_server.engine.values.model import ABSENT, Delete, Expiration, Lifetime, LifetimeKind, Publish, TopicSettings
from sow_server.query import aggregating, export_parts, scan, sieve, sources
from sow_server.services.wire import subscribe_convert
from sow_server.subscriptions.journal import replay
from tests.support.fakes.guarded import METHODS, GuardedParts, request_of
from tests.support.oracles.access import grant, identity
from tests.support.stores.parts import reading_of
from tests.support.stores.stores import SECOND, Rig
from tests.support.stores.subscribers import Follower

SETTINGS: Final = TopicSettings(
    key=("/id",), expiration=Expiration.ENABLED, index=("/price", "/secret"), max_entries=10**6
)
RIGHTS: Final = "read publish delete consume"
ROWS: Final = "rows = \"/region = 'eu'\""
HIDE: Final = 'hide = ["/secret", "/client/iban"]'
GRANTS: Final = {"rows": ROWS, "hide": HIDE, "rows and hide": f"{ROWS}\n{HIDE}"}
COLUMNS: Final = list(range(1, 9))
SETTINGS_OF_DURABLES: Final = {
    "delivery_limit": 1,
    "retain_time": {"seconds": 90},
    "retain_bytes": 9999,
    "backlog_ttl": {"seconds": 90},
    "idle_ttl": {"seconds": 900},
    "replicated": True,
}
EXISTS: Final = {"only_if_present": True}
POSITION: Final = {"publisher_id": "p", "publisher_epoch": 1, "first_sequence": 1}
SMALL: Final[Mapping[Any, Mapping[str, object]]] = {
    export_parts: {"PART_RECORDS_MIN": 2, "PART_RECORDS_APT": 4, "LOOK_UPS": 3, "PIECE_SECONDS": 60.0},
    cursor: {"STEPS_AT_ONCE": 2},
    replay: {"READ_SECONDS": 60.0},
    sieve: {"JUDGING_SECONDS": 60.0},
    aggregating: {"WORKING_SECONDS": 60.0},
}
"""So small that what is hidden would make more parts. Pieces of work stay as large as they are: how soon a batch ends
tells how much there was to read, as its time does. None ends because the machine is busy: the two worlds would differ
by chance."""


class World:
    """One of the two worlds."""

    def __init__(self, folder: Path, restriction: str, *, hidden_here: bool) -> None:
        """`hidden_here`: whether what is hidden is in the topic that desk reads."""
        folder.mkdir()
        self.rig = Rig(folder)
        self._hides = "hide" in restriction
        self._rows = "rows" in restriction
        self._hidden_here = hidden_here
        for name in ("orders", "elsewhere"):
            self.rig.create_topic(name, SETTINGS)
        self.parts = GuardedParts(self.rig, identity("desk", "desk") + grant("desk", "orders", RIGHTS, restriction))
        self.know: dict[str, Any] = {}
        """Tokens and ids that desk was told."""
        self.followers: list[Follower] = []
        self.frames: list[bytes] = []
        """Everything that desk's subscribers were sent."""

    def follow(self) -> None:
        """Desk subscribes in many ways."""
        for request in FOLLOWED:
            self.followers.append(self.parts.follow("desk", request))
        self._pump()

    def _pump(self) -> None:
        for _ in range(2):  # a conflating subscriber reads on once it has sent
            self.parts.subscribers.settle()
            for follower in self.followers:
                reading = reading_of(self.rig.store)
                self.frames += [subscribe_convert.response(frame, reading, figures=False) for frame in follower.pump()]

    def publish(self, key: str, region: str, *, ttl: int | None = None, price: int = 1) -> None:
        """A record of eu is one that desk sees; any other one is hidden."""
        visible = region == "eu" or not self._rows
        document: dict[str, object] = {"id": key, "region": region, "price": price, "client": {"name": "n"}}
        if self._hidden_here or not self._hides:
            document |= {"secret": f"secret of {key}" * 3, "client": {"iban": [1, 2, 3], "name": "n"}}
        elif not visible:
            document |= {"secret": "as long as it may be"}
        lifetime = ABSENT if ttl is None else Lifetime(LifetimeKind.TTL, ttl)
        topic = "orders" if visible or self._hidden_here else "elsewhere"
        self.rig.run(Publish(topic, [json.dumps(document).encode()], lifetime=lifetime))
        self._pump()

    def delete(self, key: str) -> None:
        """Deletes a hidden record."""
        topic = "orders" if self._hidden_here or not self._rows else "elsewhere"
        self.rig.run(Delete(topic, [key]))
        self._pump()

    def happen(self) -> None:
        """Changes that desk sees, and more that it does not see, before, after and between those."""
        for number in range(12):
            self.publish(f"a{number:02}", "us", price=number)
            if number % 4 == 0:
                self.publish(f"b{number:02}", "eu", price=number)
        self.rig.time.tick(SECOND)
        self.publish("a03", "us", price=-5)
        self.publish("c1", "eu")
        self.publish("c2", "us", ttl=SECOND)
        self.publish("z1", "us")
        self.delete("a01")
        self.rig.time.tick(2 * SECOND)
        self.rig.store.sweep()
        self.publish("c1", "eu", price=7)
        self.publish("z2", "us")
        self.rig.time.tick(10 * SECOND)
        self._pump()

    def bookmark(self, sequence: int) -> str:
        return self.rig.store.instance.bookmark(sequence)

    @property
    def head(self) -> str:
        return self.bookmark(self.rig.store.commits.last_sequence)

    def close(self) -> None:
        self.parts.__exit__(None, None, None)
        self.rig.close()


FOLLOWED: Final = [
    sow_pb2.SubscribeRequest(topic="orders", sow=True, oof=True),
    sow_pb2.SubscribeRequest(topic="orders", changes=True, filter="/price < 7"),
    sow_pb2.SubscribeRequest(topic="orders", delta=True, oof=True, empty_deltas=True),
    sow_pb2.SubscribeRequest(topic="orders", oof=True, conflation_micros=SECOND),
    sow_pb2.SubscribeRequest(topic="orders", oof=True, delta=True, conflation_micros=SECOND),
    sow_pb2.SubscribeRequest(topic="orders", oof=True, filter="/secret IS NOT NULL OR /price = 8"),
    sow_pb2.SubscribeRequest(topic="orders", sow=True, order_by="/price DESC", top_n=2, skip_n=1),
    sow_pb2.SubscribeRequest(topic="orders", sow=True, order_by="/secret DESC, /price", top_n=3, filter="/price < 9"),
    sow_pb2.SubscribeRequest(topic_pattern=".*", sow=True, oof=True, progress_micros=SECOND),
]

COUNTS: Final = [{"name": "n", "expression": "COUNT(*)"}, {"name": "s", "expression": "COUNT(/secret)"}]

Request = Callable[[World], Mapping[str, object]]


def held(world: World) -> Mapping[str, object]:
    """Ranges of desk's records: one with the right ones, and before and behind it one with others."""
    live = [record for key, record in sorted(world.rig.live("orders").items()) if key.startswith(b"b")]
    origins = [world.rig.store.origins.names[record.origin] for record in live]
    keys = [record.key for record in live]
    right = checksum(map(len, keys), b"".join(keys), array("q", [one.version for one in live]), origins)
    return {"upto_key": ["b", "c", ""], "checksum": [1, right, 2], "records": [1, len(live), 1]}


def plain(**fields: object) -> Request:
    return lambda world: fields


def orders(**fields: object) -> Request:
    return lambda world: {"topic": "orders", **fields}


def elsewhere(world: World, sequence: int) -> str:
    """A bookmark of another instance that tells a position of this one."""
    return f"0123456789ab.1;t={10**18};{world.bookmark(sequence)}"


def document(key: str, **fields: object) -> bytes:
    return json.dumps({"id": key, "region": "eu", **fields}).encode()


FILTERS: Final = [
    "/price >= 0",
    "/secret IS NULL",
    "/secret = 'secret of a00'",
    "/secret BEGINS WITH 's' OR /price = 7",
    "LENGTH(/secret) > 3",
    "ROUND(/secret) / 0 = 1",
    "ARRAY_COUNT(/client/iban) = 3",
    "/client/iban[1] = 2",
    "/client IS NULL",
    "/region = 'us'",
    "@key IN ('a00', 'b00', 'z1')",
    "@key BEGINS WITH 'a'",
    "@key > 'b' AND @key < 'c2'",
    "@version > 0",
    "(",
    "/price = ",
    "1 = 1) OR (1 = 1",
    "NOW_MICROS() > 0",
]
ORDERS: Final = ["/price DESC", "/secret", "/secret DESC, /price", "/client/iban[0]", "@version DESC", "/x y"]

PARAMETERS: Final = {
    "text": {"scalar": {"text": "' OR true OR /secret != '"}},
    "some": {
        "list": {
            "items": [
                {"null": True},
                {"boolean": True},
                {"integer": 5},
                {"large_integer": "-18446744073709551617"},
                {"number": 7.5},
                {"text": "8"},
            ]
        }
    },
}


def grouped(text: str, **more: object) -> Request:
    """A query for results of groups, which read all that there is."""
    path, _, name = text.partition(" AS ")
    groups = [{"name": name, "expression": path}] if path else []
    texts = (
        "COUNT(*)",
        "MAX(/secret)",
        "SUM(/price)",
        "COUNT(DISTINCT /client/iban)",
        "MAX(MESSAGE_SIZE())",
        "MIN(@sequence)",
    )
    named = [{"name": name, "expression": expression} for name, expression in zip("nmsdzq", texts, strict=True)]
    return orders(group_by=groups, aggregate=named, **more)


REQUESTS: Final[dict[str, list[Request]]] = {
    "Publish": [
        orders(records=[{"payload": document("b00", price=3), "condition": EXISTS}]),
        orders(records=[{"payload": document("a00"), "condition": EXISTS}]),
        orders(records=[{"payload": document("a00"), "condition": {"only_if_version": 5}}]),
        orders(
            atomic=True,
            records=[{"payload": document("b00")}, {"payload": document("a02"), "condition": {"only_if_version": 1}}],
        ),
        orders(delta=True, records=[{"payload": document("b00", price=4)}], unset_paths=["/gone"]),
        orders(ttl_mode=2, records=[{"payload": document("b04")}], lifetime={"ttl_micros": 90 * SECOND}),
        orders(ttl_mode=3, records=[{"payload": document("b04")}], lifetime={"ttl_micros": 80 * SECOND}),
        orders(publisher=POSITION, records=[{"payload": document("p1")}], durability=2),
        orders(publisher=POSITION, records=[{"payload": document("p1")}]),
        orders(records=[{"payload": document("p2"), "lifetime": {"ttl_micros": 0}}]),
        orders(records=[{"payload": b"{"}, {"key": "k", "payload": b"{}"}]),
        orders(records=[{"key": "a03", "remove": True}, {"payload": document("a05"), "remove": True}]),
        orders(records=[{"key": "a03", "remove": True, "condition": EXISTS}, {"key": "b03", "remove": True}]),
        orders(records=[{"payload": document("n"), "condition": {"only_if_absent": True}}], lifetime={"never": True}),
        orders(records=[{"payload": document("n")}], lifetime={"expire_time_micros": 9 * 10**15}),
        orders(
            publisher={"publisher_id": "u", "publisher_epoch": 1, "first_sequence": 1, "unit": 2, "unit_done": True}
        ),
        orders(records=[{"payload": document("b00", price=5)}], encoded_as="json"),
        orders(records=[{"payload": document("a00")}, {"payload": document("b00")}], encoded_as="nvfix;"),
        plain(topic="elsewhere", records=[{"payload": document("x")}]),
        plain(topic="elsewhere", records=[{"payload": document("x")}], encoded_as="msgpack"),
        plain(topic="absent", records=[{"payload": document("x")}]),
    ],
    "PublishStream": [
        orders(payload=[document("s1"), document("s2")]),
        orders(payload=[document("a04")], condition=EXISTS),
        orders(payload=[document("s1", price=2)], delta=True, unset_paths=["/price"], lifetime_kind=[1]),
        orders(payload=[document("s1")], lifetime={"never": True}, ttl_mode=1, durability=1),
        orders(payload=[document("s3")], lifetime_kind=[1], lifetime_micros=[SECOND], atomic=True),
        orders(payload=[document("s3")], publisher={**POSITION, "publisher_id": "q", "publisher_token": 7}),
        orders(key=["x"], payload=[document("s3")]),
        orders(payload=[document("a04"), document("s4")], encoded_as="fix\x01"),
        orders(payload=[b"", document("r1"), document("r1")], key=["a03", "", ""], remove=[True, False, True]),
    ],
    "Get": [
        orders(keys=["a00", "b00", "z1", "none"]),
        orders(keys=["b00"], select={"include": ["/secret", "/client"]}),
        orders(keys=["b00"], select={"exclude": ["/client/name"]}),
        orders(keys=["a00", "b04", "none"], touch={"ttl_micros": 60 * SECOND}, touch_below_micros=90 * SECOND),
        orders(keys=["a00"], touch={"ttl_micros": 60 * SECOND}),
        orders(keys=["a00"], touch={"ttl_micros": -1}),
        orders(keys=["b00"], touch_below_micros=1),
        orders(keys=["a00"] * 300),
        lambda world: {"topic": "orders", "keys": ["b00"], "min_position": world.bookmark(1)},
        lambda world: {"topic": "orders", "keys": ["b00"], "min_position": world.bookmark(9_999)},
        orders(keys=["b00"], min_position="0123456789ab.1"),
        orders(),
        plain(topic="elsewhere", keys=["a00"]),
    ],
    "Query": [
        orders(),
        *[orders(filter=text) for text in FILTERS],
        *[orders(filter=text, explain=True) for text in FILTERS],
        *[orders(filter=text, count_only=True) for text in FILTERS],
        orders(filter="/price IN :some OR /secret = :text", parameters=PARAMETERS),
        orders(filter="/region = 'us'", parameters=PARAMETERS),
        *[orders(order_by=text) for text in ORDERS],
        *[orders(order_by=text, top_n=2, explain=True) for text in ORDERS],
        *[orders(filter=text, with_plan=True) for text in FILTERS],
        *[orders(filter=text, plan_only=True) for text in FILTERS],
        orders(plan_only=True, explain=True),
        orders(count_only=True),
        orders(keys_only=True, skip_n=1, top_n=2),
        orders(keys=["a00", "b00"], batch_size=1),
        orders(select={"exclude": ["/price"]}),
        *[orders(page_size=size) for size in (1, 2, 3, 4, 5)],
        *[orders(page_size=size, order_by=text) for size in (1, 2, 3) for text in ORDERS],
        *[grouped(path) for path in ("/region", "/secret", "/client/iban", "/price % 2 AS even", "@version", "")],
        grouped("/region", top_n=1, explain=True),
        grouped("/region", filter="/secret > ''", order_by="/m DESC", having="COUNT(/secret) < 3"),
        orders(group_by=[{"expression": "/secret"}], aggregate=[{"name": "s", "expression": "/secret"}]),
        orders(page_size=1, filter="@key BEGINS WITH 'b'"),
        orders(page_size=1, page_token="x"),
        lambda world: {"topic": "orders", "page_size": 2, "page_token": world.know["page"]},
        lambda world: {"topic": "orders", "min_position": world.head},
        lambda world: {"topic": "orders", "min_position": world.bookmark(9_999)},
    ],
    "Subscribe": [
        orders(sow=True, batch_size=1),
        lambda world: {"topic": "orders", "sow": True, "view": world.know.get("view", b"v"), "held": held(world)},
        lambda world: {"topic": "orders", "bookmark": world.bookmark(3), "view": world.know.get("view", b"v")},
        lambda world: {"topic": "orders", "bookmark": world.bookmark(3), "view": b"another"},
        lambda world: {"topic_pattern": "ord.*", "sow": True},
        lambda world: {"topic_pattern": "ord.*", "bookmark": world.bookmark(3), "view": world.know.get("view", b"v")},
        lambda world: {"topic_pattern": "ord.*", "bookmark": world.bookmark(3), "view": b"another"},
        *[orders(sow=True, snapshot_max=most) for most in (1, 2, 3, 4, 5, 6)],
        orders(sow=True, snapshot_max=2, filter="@key BEGINS WITH 'b'", batch_size=1),
        orders(snapshot_max=2),
        *[
            orders(sow=True, order_by=order, top_n=2, skip_n=1)
            for order in ("/price DESC", "/secret", "/client/iban DESC")
        ],
        orders(sow=True, order_by="/secret", top_n=2),
        *[orders(sow=True, group_by=[{"expression": path}], aggregate=COUNTS) for path in ("/region", "/secret")],
        orders(sow=True, aggregate=COUNTS, having="/n > 1", order_by="/n", filter="/price < 9"),
        orders(sow=True, order_by="/price", top_n=2, filter="/secret IS NULL", select={"include": ["/id"]}),
        orders(earliest=True),
        orders(earliest=True, oof=True, filter="/price < 5"),
        orders(earliest=True, changes=True, select={"exclude": ["/price"]}),
        orders(earliest=True, delta=True, oof=True, empty_deltas=True),
        orders(sow=True, filter="/secret > ''"),
        orders(sow=True, filter="/price IN :some OR /secret = :text", parameters=PARAMETERS),
        orders(sow=True, conflation_micros=SECOND, progress_micros=SECOND),
        lambda world: {"topic": "orders", "bookmark": world.bookmark(3)},
        lambda world: {"topic": "orders", "bookmark": elsewhere(world, 3), "oof": True},
        lambda world: {"topic": "orders", "bookmark": f"{world.bookmark(3)};h=0123456789ab.7", "oof": True},
        lambda world: {"topic": "orders", "start_time_micros": world.rig.time.wall_micros - 3 * SECOND},
        plain(topic_pattern=".*", sow=True),
        plain(topic_pattern="else.*", sow=True, tell_left=True),
        orders(durable={"name": "d"}, earliest=True, changes=True),
        orders(durable={"name": "d", "force": True}, earliest=True),
        orders(durable={"name": "e", "settings": SETTINGS_OF_DURABLES}, filter="/price > 100", earliest=True),
        orders(durable={"name": "d", "expected": True}, filter="/other = 1"),
        orders(durable={"name": "d", "expected": True, "told": ["0123456789ab.7"]}, oof=True),
        orders(durable={"name": "f", "settings": {"retain_time_unlimited": True}}),
        plain(topic="elsewhere", sow=True),
    ],
    "BrowseDurable": [
        orders(durable="d"),
        orders(durable="d", max_entries=2),
        lambda world: {"topic": "orders", "durable": "d", "after_bookmark": world.bookmark(9)},
        orders(durable="none"),
    ],
    "ReadHistory": [
        *[orders(key=key) for key in ("a00", "a03", "b00", "c1", "c2", "z1", "none", "")],
        orders(key="c1", max_entries=1),
        lambda world: {"topic": "orders", "key": "c1", "max_entries": 1, "upto_bookmark": world.know.get("older", "")},
        lambda world: {"topic": "orders", "key": "a03", "upto_bookmark": world.bookmark(9)},
        orders(key="c1", max_entries=99_999),
        plain(topic="elsewhere", key="a00"),
    ],
    "Acknowledge": [
        lambda world: {"topic": "orders", "durable": "d", "bookmark": world.bookmark(5), "session": "x"},
        orders(durable="d", session="x", detach=True),
        orders(durable="none", session="x", detach=True),
    ],
    "Rewind": [
        orders(durable="d", earliest=True, force=True),
        lambda world: {"topic": "orders", "durable": "d", "bookmark": world.bookmark(7)},
        lambda world: {"topic": "orders", "durable": "d", "time_micros": world.rig.time.wall_micros - SECOND},
    ],
    "Touch": [
        orders(keys=["b00", "none"], lifetime={"ttl_micros": 60 * SECOND}),
        orders(keys=["b00"], condition={"only_if_version": 3}, lifetime={"never": True}, durability=1),
        orders(keys=["b00", "a00"], lifetime={"ttl_micros": 60 * SECOND}, only=1, atomic=True),
        orders(keys=["a00", "b00"], lifetime={"ttl_micros": 60 * SECOND}, only=4),
        orders(keys=["b00", "a00"], lifetime={"ttl_micros": 60 * SECOND}, versions=[3, 3]),
    ],
    "GetPublisher": [plain(publisher_id="p")],
    "OpenPublisher": [plain(publisher_id="p", unit=1)],
    "DescribeTopic": [plain(name="orders"), plain(name="elsewhere"), plain(name="absent")],
    "ListTopics": [plain(), plain(with_statistics=True)],
    "ListDurables": [plain(with_figures=True), orders(with_figures=True), orders(), plain(topic="elsewhere")],
    "DescribeDurable": [orders(name="d"), orders(name="d", exact=True), orders(name="e"), orders(name="none")],
    "OpenExport": [
        *[orders(parts=parts) for parts in (0, 1, 2, 3, 7)],
        orders(parts=3, filter="/price >= 0", lease_micros=60 * SECOND, idle_lease_micros=SECOND),
        orders(successor_of="none", reader="action"),
        *[orders(filter=text, parts=3) for text in FILTERS],
        orders(filter="/price IN :some OR /secret = :text", parameters=PARAMETERS),
        orders(others=[{"topic": "absent", "filter": "/a = :some", "parts": 3, "parameters": PARAMETERS}]),
    ],
    "ReadExport": [
        lambda world: {"export_id": world.know["export"], "part": 0, "columns": COLUMNS, "batch_size": 1},
        lambda world: {"export_id": world.know["export"], "part": 1, "lines": True, "batch_size": 2},
        lambda world: {"export_id": world.know["export"], "part": 2, "resume_token": world.know.get("resume", b"")},
        lambda world: {"export_id": world.know["export"], "part": 0, "fields": ["price"]},
        lambda world: {"export_id": world.know["export"], "part": 0, "fields": ["client", "none"]},
        lambda world: {"export_id": world.know["export"], "part": 99},
        lambda world: {"export_id": world.know["export"], "part": 0, "reader": "action"},
    ],
    "RenewExport": [lambda world: {"export_id": world.know["export"]}, plain(export_id="none")],
    "CloseExport": [lambda world: {"export_id": world.know["export"]}, plain(export_id="none")],
    "PlanChanges": [
        *[orders(earliest=True, max_entries=entries) for entries in (0, 1, 2, 3, 5, 9)],
        *[orders(earliest=True, parts=parts) for parts in (1, 2, 4, 50)],
        orders(earliest=True, max_bytes=1),
        orders(earliest=True, max_bytes=700, parts=3),
        orders(latest=True),
        lambda world: {"topic": "orders", "bookmark": world.bookmark(4), "end_bookmark": world.bookmark(9)},
        lambda world: {
            "topic": "orders",
            "bookmark": f"{'0' * 12}.1;t=1;{world.bookmark(4)}",
            "end_bookmark": f"{'0' * 12}.2;t=1;{world.bookmark(9)}",
        },
        lambda world: {"topic": "orders", "start_time_micros": world.rig.time.wall_micros - 3 * SECOND},
    ],
    "ReadChanges": [
        lambda world: {
            "topic": "orders",
            "start_bookmark": world.bookmark(0),
            "end_bookmark": world.head,
            "columns": COLUMNS,
            "batch_size": 2,
        },
        lambda world: {
            "topic": "orders",
            "start_bookmark": world.bookmark(4),
            "end_bookmark": world.head,
            "history_bookmark": world.bookmark(1),
            "filter": "/price > 3 OR /secret > ''",
            "lines": True,
        },
        lambda world: {
            "topic": "orders",
            "start_bookmark": world.bookmark(4),
            "end_bookmark": world.head,
            "history_bookmark": world.bookmark(4),
            "filter": "/price IN :some OR /secret = :text",
            "parameters": PARAMETERS,
        },
        lambda world: {
            "topic": "orders",
            "start_bookmark": world.bookmark(4),
            "end_bookmark": world.bookmark(12),
            "shares": 2,
            "share": 1,
        },
        *[
            lambda world, keys=keys: {
                "topic": "orders",
                "start_bookmark": world.bookmark(0),
                "end_bookmark": world.head,
                "columns": COLUMNS,
                "keys": keys,
            }
            for keys in (["a00", "c1"], ["a03"], ["none"])
        ],
        lambda world: {
            "topic": "orders",
            "start_bookmark": world.bookmark(0),
            "end_bookmark": world.head,
            "filter": "/price > 3",
            "columns": COLUMNS,
            "elsewhere": True,
        },
    ],
    "PinJournal": [
        lambda world: {"topic": "orders", "name": "pin", "bookmark": world.bookmark(3), "idle_ttl_micros": SECOND},
        lambda world: {"topic": "orders", "name": "pin", "bookmark": world.bookmark(3), "reader": "a query"},
    ],
    "SowDelete": [
        orders(all=True, dry_run=True),
        orders(by_keys={"keys": ["a00", "a02", "none"]}),
        orders(by_keys={"keys": ["a00", "b00"]}, dry_run=True),
        orders(by_keys={"keys": ["a00", "b00"], "versions": [3, 3]}),
        orders(by_payload=document("a05")),
        orders(by_filter="/price >= 0", dry_run=True),
        orders(by_filter="/secret IS NOT NULL", dry_run=True),
        orders(by_filter="/secret IS NOT NULL"),
        orders(by_filter="/region = 'us' AND /price = 5", durability=2),
        orders(by_keys={"keys": ["s1"]}, publisher={"publisher_id": "p", "publisher_epoch": 1}),
        orders(by_filter="/price IN :some OR /secret = :text", parameters=PARAMETERS, dry_run=True),
        orders(by_filter="@key = 's2'"),
        orders(all=True),
    ],
    "ClearBacklog": [orders(name="d"), orders()],
    "DeleteDurable": [orders(name="d"), orders(name="none")],
    "CreateTopic": [plain(name="new"), plain(name="orders"), plain(name="elsewhere")],
    "AlterTopic": [plain(name="orders", update_paths=["max_age"]), plain(name="elsewhere")],
    "DeleteTopic": [plain(name="orders", force=True)],
    "CheckTopic": [plain(name="orders", repair=True, rows_max=5)],
    "Restamp": [orders(filter="/secret > ''", mode=3), orders(mode=1, lifetime={"ttl_micros": 1}, dry_run=True)],
    **{key: [plain()] for key in ("GetStatus", "DescribeInstance", "ReloadPlacement")},
    "GetPlacement": [plain(), orders()],
    "GetExpiryHorizon": [
        plain(),
        orders(),
        orders(exact=True, edge_micros=[SECOND, 90 * SECOND]),
        plain(edge_micros=[SECOND, 9 * 10**13]),
        plain(edge_micros=[2, 1]),
        plain(topic="elsewhere"),
        plain(topic="absent"),
    ],
    "ListSubscriptions": [plain(), orders()],
    "EndSubscription": [plain(id="u1")],
    "WatchFigures": [plain(interval_micros=SECOND, topics_max=1), plain(history_micros=60 * SECOND)],
    "GetConfig": [plain()],
    "WatchLog": [plain(), plain(level="warning", lines_max=5, follow=True)],
    **{key: [plain()] for key in ("AcceptClock", "Compact")},
    "SetPolicy": [plain(policy={"name": "p", "pattern": ".*"})],
    "GetPolicy": [plain(name="p")],
    "ListPolicies": [plain()],
    "DeletePolicy": [plain(name="p")],
    "GetReplicationStatus": [plain()],
    "VerifyReplication": [plain(peer="ldn")],
    "RepairReplication": [plain(peer="ldn")],
    "AddPeer": [
        plain(name="ldn-2", address="127.0.0.1:1"),
        plain(
            name="ldn-2",
            accept=True,
            topics_pattern="o.*",
            sync=True,
            filter="/region = 'us'",
            ca="/ca",
            certificate="/certificate",
            key="/key",
            token_file="/token",
            replace=True,
        ),
    ],
    "PausePeer": [plain(name="ldn-2")],
    "ResumePeer": [plain(name="ldn-2")],
    "RemovePeer": [plain(name="ldn-2")],
    "Backup": [plain(name="b")],
    "OpenLoad": [orders()],
    "StageLoad": [plain(load_id="none", payload=[b"{}"], first_row=1)],
    "CommitLoad": [plain(load_id="none")],
    "GetLoad": [plain(load_id="none")],
    "RenewLoad": [plain(load_id="none")],
    "AbortLoad": [plain(load_id="none")],
    "ListLoads": [plain(), orders()],
}
"""By method, in the order in which they are called."""


@contextmanager
def two_worlds(folder: Path, restriction: str) -> Iterator[tuple[World, World]]:
    """What is hidden is elsewhere in the first, and here in the second."""
    with ExitStack() as stack:
        for module, constants in SMALL.items():
            for name, value in constants.items():
                stack.enter_context(mock.patch.object(module, name, value))
        made = []
        for hidden_here in (False, True):
            numbers = itertools.count(1)
            hexed = lambda size, numbers=numbers: f"{next(numbers):0{2 * size}x}"  # noqa: E731  # a source of ids
            with random_is(hexed):
                made.append(World(folder / f"{hidden_here}", restriction, hidden_here=hidden_here))
            stack.callback(made[-1].close)
        yield made[0], made[1]


@contextmanager
def random_is(hexed: Callable[[int], str]) -> Iterator[None]:
    """Ids and epochs are numbers, the same ones in both worlds."""

    def numbered() -> SimpleNamespace:
        return SimpleNamespace(hex=hexed(16)[::-1])

    with mock.patch.object(secrets, "token_hex", hexed), mock.patch.object(uuid, "uuid4", numbered):
        yield


def told(world: World, method: str, request: Request, number: int, *, identity: str = "desk") -> list[Message]:
    """Everything that a caller is told by a call."""
    with random_is(lambda size: f"{number:0{2 * size}x}"):
        responses = world.parts.ask(identity, method, request_of(method, **request(world)))
    for response in responses:
        match response:
            case snapshot_pb2.OpenExportResponse():
                if world.know.get("parts", 0) < 3:
                    world.know |= {"export": response.export_id, "parts": len(response.parts)}
            case snapshot_pb2.ReadExportResponse() if response.resume_token:
                world.know["resume"] = response.resume_token
            case sow_pb2.SubscribeResponse() if response.HasField("snapshot_begin") and response.snapshot_begin.view:
                world.know["view"] = response.snapshot_begin.view
            case sow_pb2.ReadHistoryResponse() if response.end.next_bookmark:
                world.know["older"] = response.end.next_bookmark
            case sow_pb2.QueryResponse() if response.footer.next_page_token:
                world.know["page"] = response.footer.next_page_token
    return responses


@pytest.mark.slow
@pytest.mark.parametrize("restriction", GRANTS)
def test_nothing_that_a_caller_is_told_depends_on_what_is_hidden_from_it(tmp_path: Path, restriction: str) -> None:
    with two_worlds(tmp_path, GRANTS[restriction]) as (without, with_hidden):
        for world in (without, with_hidden):
            world.follow()
            world.happen()
        assert without.frames == with_hidden.frames
        assert len(without.frames) > 30, "they were sent something"
        different = []
        numbers = itertools.count(1)
        for method, requests in REQUESTS.items():
            for index, request in enumerate(requests):
                number = next(numbers)
                answers = [told(world, method, request, number) for world in (without, with_hidden)]
                if answers[0] != answers[1]:
                    different.append(f"{method}[{index}]: {answers[0]}\nbut {answers[1]}")
        assert not different, "\n\n".join(different)
        assert without.parts.audit.lines == with_hidden.parts.audit.lines


def test_every_method_has_requests_here() -> None:
    """A new RPC needs some that could tell something hidden."""
    assert REQUESTS.keys() == METHODS.keys()


def test_every_field_of_a_request_for_records_is_given_here(tmp_path: Path) -> None:
    given: set[str] = set()
    there: set[str] = set()
    with two_worlds(tmp_path, ROWS) as (_, world):
        world.know |= {"page": "p", "older": "o", "export": "e", "resume": b"r"}
        for method, requests in REQUESTS.items():
            if METHODS[method].containing_service.name in ("SowService", "SnapshotService"):
                there |= set(fields_of(METHODS[method].input_type))
                given |= {name for request in requests for name in given_in(request_of(method, **request(world)))}
    assert there - given == set()


def fields_of(message: Descriptor) -> Iterator[str]:
    """The fields of a message, and of those in it."""
    for field in message.fields:
        yield field.full_name
        if field.message_type is not None and field.message_type.file.package == "sow.v1":
            yield from fields_of(field.message_type)


def given_in(message: Message) -> Iterator[str]:
    """The fields that are set in a message, and in those in it."""
    for field, value in message.ListFields():
        yield field.full_name
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            yield from (entry.full_name for entry in field.message_type.fields)
            value = list(value.values())
        if field.message_type is not None:
            for inner in [value] if isinstance(value, Message) else value:
                yield from given_in(inner)


@pytest.mark.slow
def test_the_end_of_pages_tells_nothing_of_hidden_records(tmp_path: Path) -> None:
    """Story: a page had a token for the next one wherever stored records followed. With a range of keys in the filter,
    that told whether there were any."""
    small = (
        (scan, "SCAN_CHUNK", 2),
        (scan, "SCAN_CHUNK_FIRST", 2),
        (sources, "SCAN_CHUNK", 2),
        (sources, "FIND_CHUNK", 1),
    )
    with two_worlds(tmp_path, ROWS) as (without, with_hidden), ExitStack() as stack:
        for module, name, value in small:
            stack.enter_context(mock.patch.object(module, name, value))
        for world in (without, with_hidden):
            world.happen()
        for size, text in itertools.product((1, 2, 3, 4, 5), ("", "@key BEGINS WITH 'b'", "@key >= 'c'", "/price > 3")):
            for order in ("", *ORDERS):
                request = sow_pb2.QueryRequest(topic="orders", page_size=size, filter=text, order_by=order)
                footers = [world.parts.ask("desk", "Query", request)[-1] for world in (without, with_hidden)]
                assert footers[0] == footers[1], request
