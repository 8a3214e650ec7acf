"""Random programs for the state of the world on Spark, and what three sides make of them: the rules in Python, a store
under a fake clock, and (in Java, `tests/spark/java`) the engine `jvm`.

A program is JSON: `settings`, `key` (paths), and `batches`, each with `now` (microseconds) and `rows`. A row has the
fields of `Given` and `key`; `only_if_version` of -1 stands for the version that the record of the row has.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any, Final, NamedTuple

from pyspark.sql import Row as SparkRow

from sow.durations import DurationError, parse_micros
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import (
    ABSENT,
    NEVER,
    PERMANENT,
    Condition,
    ConditionKind,
    Delete,
    Expiration,
    Lifetime,
    LifetimeKind,
    Publish,
    Refusal,
    TopicSettings,
    Touch,
    TtlMode,
)
from sow_spark.state_fold import Change, Given, Held, Key, Settings, in_order
from sow_spark.state_python import HELD, KEYLESS, Processor, key_or_none, refused_keyless
from tests.support.stores.stores import SECOND, START, Rig

Told = tuple[str, str | None, int | None, int | None, str]
"""Of a change: operation, payload, publish time, expire time, reason."""


class Row(NamedTuple):
    """As the engine sees it."""

    payload: bytes | None
    key: str | None


def in_python(program: dict[str, Any]) -> list[dict[str, list[tuple[Any, ...]]]]:
    """The changes of each batch, by key, with versions; "" has those of rows without a key."""
    settings = Settings(**program["settings"])
    states: dict[str, Held | None] = {}
    told: list[dict[str, list[tuple[Any, ...]]]] = []
    for batch in program["batches"]:
        changes: dict[str, list[Change]] = defaultdict(list)
        groups: dict[str, list[Given]] = defaultdict(list)
        for row in sorted(batch["rows"], key=_place):
            payload = None if row["payload"] is None else row["payload"].encode()
            key = key_or_none(payload, row["key"], program["key"])
            if key == KEYLESS:
                changes[""].append(refused_keyless(Row(payload, row["key"]), program["key"]))  # type: ignore[arg-type]  # has what is read
                continue
            groups[key].append(_given(row))
        for key in {**groups, **states}:
            one = Key(settings, states.get(key), batch["now"])
            for given in groups.get(key, ()):
                if given.only_if_version == -1:
                    changes[key] += one.expire()
                    live = one.held is not None and one.held.payload is not None
                    given = given._replace(only_if_version=one.held.version if live and one.held is not None else 0)
                changes[key] += one.apply([given])
            changes[key] += one.expire()
            states[key] = one.held
        told.append({key: [_told(change) for change in some] for key, some in changes.items() if some})
    return told


_PLAIN: Final = ("op", "ttl", "expire_time_micros", "ttl_mode", "only_if", "only_if_version")


def _given(row: dict[str, Any]) -> Given:
    payload = None if row["payload"] is None else row["payload"].encode()
    return Given(payload=payload, order=tuple(row["ord"]), **{name: row[name] for name in _PLAIN})


def _place(row: dict[str, Any]) -> tuple[object, ...]:
    return in_order(_given(row))


def _told(change: Change) -> tuple[Any, ...]:
    payload = None if change.payload is None else change.payload.decode()
    return (
        change.op,
        payload,
        change.version,
        change.publish_time_micros,
        change.expire_time_micros,
        change.reason,
    )


class Timers:
    """Spark's side of the engine `python`: the state and the timers of each key, as a query would keep them."""

    def __init__(self) -> None:
        self.key = ""
        self.states: dict[str, tuple[Any, ...]] = {}
        self.timers: dict[str, set[int]] = defaultdict(set)

    def getValueState(self, name: str, schema: str) -> Timers:  # noqa: N802  # Spark's name
        assert (name, schema) == ("record", HELD)
        return self

    def get(self) -> tuple[Any, ...] | None:
        return self.states.get(self.key)

    def update(self, value: tuple[Any, ...]) -> None:
        assert len(value) == len(HELD.split(", "))
        self.states[self.key] = value

    def clear(self) -> None:
        self.states.pop(self.key, None)

    def registerTimer(self, millis: int) -> None:  # noqa: N802  # as above
        self.timers[self.key].add(millis)

    def deleteTimer(self, millis: int) -> None:  # noqa: N802  # as above
        self.timers[self.key].remove(millis)

    def getCurrentProcessingTimeInMs(self) -> int:  # noqa: N802  # as above
        return self.now_millis

    now_millis = 0


def by_timers(program: dict[str, Any]) -> list[dict[str, list[tuple[Any, ...]]]]:
    """As `in_python`, by the whole engine `python`: rows, and then the timers that have come. Asserts that a record has
    one timer at most. Rows without a key are left out."""
    spark = Timers()
    processor = Processor(Settings(**program["settings"]), program["key"])
    processor.init(spark)  # type: ignore[arg-type]  # has what is called
    told: list[dict[str, list[tuple[Any, ...]]]] = []
    for batch in program["batches"]:
        spark.now_millis = batch["now"] // 1_000
        changes: dict[str, list[Any]] = defaultdict(list)
        groups: dict[str, list[Any]] = defaultdict(list)
        for row in batch["rows"]:
            given = _given(row)
            key = key_or_none(given.payload, row["key"], program["key"])
            if key == KEYLESS:
                continue
            told_as = {**given._asdict(), "expire_time": given.expire_time_micros, "ord": list(given.order)}
            groups[key].append(SparkRow(**told_as, key=row["key"]))
        for key, rows in groups.items():
            spark.key = key
            changes[key] += processor.handleInputRows((key,), iter(rows), spark)  # type: ignore[arg-type]  # as above
        for key, timers in spark.timers.items():
            spark.key = key
            for millis in sorted(one for one in timers if one <= spark.now_millis):
                changes[key] += processor.handleExpiredTimer((key,), spark, None)  # type: ignore[arg-type]  # as above
                timers.discard(millis)  # Spark's turn, after the call
            assert len(timers) <= 1, key
        told.append(
            {
                key: [(one._op, _text(one.payload), *one[3:6], one._reason or "") for one in some]
                for key, some in changes.items()
                if some
            }
        )
    return told


def _text(payload: bytes | None) -> str | None:
    return None if payload is None else bytes(payload).decode()


def comparable(told: list[dict[str, list[tuple[Any, ...]]]]) -> list[dict[str, list[Told]]]:
    """What a store can be compared with: its versions are those of a whole store, and a row that is refused for itself
    has not expired the record before."""
    made: list[dict[str, list[Told]]] = []
    for batch in told:
        made.append({})
        for key, some in batch.items():
            changes = [(one[0], one[1], one[-3], one[-2], "") for one in some if one[0] != "refused"]
            made[-1][key] = [*changes, *(("refused", None, None, None, one[-1]) for one in some if one[0] == "refused")]
    return made


def in_a_store(program: dict[str, Any], folder: Path) -> list[dict[str, list[Told]]]:
    """What a server's engine does with a program, whose rows come one by one in their order."""
    settings = dict(program["settings"])
    assert settings.pop("tombstones_micros") is None, "a server knows no order of rows"
    settings["expiration"] = Expiration[settings["expiration"].upper()]
    keys = ["/" + "/".join(path) for path in program["key"]]
    rig = Rig(folder, syncs=False)
    rig.create_topic("t", TopicSettings(key=tuple(keys), **settings))
    told: list[dict[str, list[Told]]] = []
    seen = 0
    try:
        for batch in program["batches"]:
            rig.time.tick(batch["now"] - rig.clock.now_micros())
            assert rig.clock.now_micros() == batch["now"]
            changes: dict[str, list[Told]] = defaultdict(list)

            def follow(changes: dict[str, list[Told]] = changes) -> None:
                nonlocal seen
                entries = rig.journal("t")
                for entry in entries[seen:]:
                    stamp = None if entry.expire_time_micros == NEVER else entry.expire_time_micros
                    op = "put" if entry.kind == "touch" else entry.kind
                    changes[entry.key.decode()].append(
                        (op, entry.payload.decode(), entry.publish_time_micros, stamp, "")
                    )
                seen = len(entries)

            for row in sorted(batch["rows"], key=_place):
                payload = None if row["payload"] is None else row["payload"].encode()
                key = key_or_none(payload, row["key"], program["key"])
                reason = _sent(rig, row, key)
                follow()
                if reason is not None:
                    changes[key].append(("refused", None, None, None, reason))
            rig.store.sweep()
            follow()
            told.append(dict(changes))
    finally:
        rig.close()
    return comparable(told)


def _sent(rig: Rig, row: dict[str, Any], key: str) -> str | None:
    """Does what a row asks for; the reason if it is refused."""
    payload = None if row["payload"] is None else row["payload"].encode()
    lifetime = ABSENT
    if row["ttl"] == "never":
        lifetime = PERMANENT
    elif row["ttl"] is not None:
        try:
            lifetime = Lifetime(LifetimeKind.TTL, parse_micros(row["ttl"]))
        except DurationError:
            return "LIFETIME_NEGATIVE" if row["ttl"].startswith("-") else "INVALID_ARGUMENT"
    elif row["expire_time_micros"] is not None:
        lifetime = Lifetime(LifetimeKind.EXPIRE_TIME, row["expire_time_micros"])
    condition = None
    if row["only_if"] is not None:
        condition = Condition(ConditionKind[f"IF_{row['only_if'].upper()}"])
    elif row["only_if_version"] is not None:
        version = row["only_if_version"]
        if version == -1:
            record = rig.get("t", key)
            version = 0 if record is None else record.version
        condition = Condition(ConditionKind.IF_VERSION, version)
    try:
        if row["op"] == "delete":
            outcome = rig.run(Delete("t", payload=payload) if payload is not None else Delete("t", [row["key"]]))
        elif row["op"] == "touch":
            outcome = rig.run(Touch("t", [row["key"]], lifetime, condition))
        else:
            mode = TtlMode[row["ttl_mode"] or "RESET"]
            outcome = rig.run(
                Publish(
                    "t",
                    [payload or b""],
                    lifetimes=[lifetime],
                    ttl_mode=mode,
                    delta=row["op"] == "delta",
                    conditions=None if condition is None else [condition],
                    want_results=True,
                )
            )
    except StoreError as error:
        return error.reason.name
    for refusal in outcome.refusals:
        assert isinstance(refusal, Refusal)
        return refusal.reason.name
    return None


def program(seed: int, *, late: bool = False, batches: int = 8) -> dict[str, Any]:
    """A random program; with `late`, one of rows that come late."""
    draw = random.Random(seed)
    expiration = draw.choice(["enabled"] * 4 + ["disabled", "reject"])
    bounds = sorted(draw.choice([1, 3, 60, 3600]) * SECOND for _ in range(2))
    enabled = expiration == "enabled"
    low, high = (draw.choice([None, bound]) if enabled else None for bound in bounds)
    default = None
    if enabled and draw.random() < 0.5:
        default = max(low or 0, min(30 * SECOND, high or 30 * SECOND))
    settings = {
        "expiration": expiration,
        "default_ttl_micros": default,
        "min_ttl_micros": low,
        "max_ttl_micros": high,
        "tombstones_micros": draw.choice([2, 20]) * SECOND if late else None,
    }
    now, order = START, 0
    paths = draw.choice(PATHS)
    made: list[dict[str, Any]] = []
    for _ in range(batches):
        now += draw.choice([1_000, SECOND, SECOND, 3 * SECOND, 30 * SECOND])
        rows = []
        for _ in range(draw.randrange(5)):
            order += draw.choice([1, 1, 1, 0])
            rows.append(_row(draw, paths, now, order - draw.choice([0, 0, 3, 9]) if late else order))
        draw.shuffle(rows)  # as Spark's shuffle does
        made.append({"now": now, "rows": rows})
    return {"settings": settings, "key": paths, "batches": made}


def _row(draw: random.Random, paths: list[list[str]], now: int, order: int) -> dict[str, Any]:
    op = draw.choice(["put"] * 4 + ["delta"] * 4 + ["touch"] * 2 + ["delete"])
    key = draw.choice(["a", "b", "c|d"])
    document: dict[str, Any] = {"id": key, "k": {"n": 7}, "v": draw.choice([1, 1.5, None, "ü", [1, {"n": None}]])}
    if draw.random() < 0.7:
        document["o"] = draw.choice([{"x": 1}, {"x": None, "y": {"z": None, "w": 2}}, 7, {}])
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    by_key = op == "touch" or (op == "delete" and draw.random() < 0.5)
    if not by_key and draw.random() < 0.1:
        text = draw.choice(['{"id":', "[1]", '{"v":1}', '{"id":null}', '{"id":{}}', '{"id":""}', '{"id":"a"} x', ""])
    elif not by_key and draw.random() < 0.3:
        text = odd_document(draw)
    row: dict[str, Any] = {
        "op": op,
        "payload": None if by_key else text,
        "key": key.replace("|", "\\|") + "|7" * (len(paths) - 1) if by_key else None,
        "ttl": None,
        "expire_time_micros": None,
        "ttl_mode": None,
        "only_if": None,
        "only_if_version": None,
        "ord": [order],
    }
    if op == "delete" or not text.startswith(('{"id":"a","k":{"n":7},"v"', '{"id":"b",', '{"id":"c')):
        return row  # of two faults a server may name the other one first
    match draw.randrange(6):
        case 0 | 1:
            row["ttl"] = draw.choice(DURATIONS)
        case 2:
            row["expire_time_micros"] = now + draw.choice([-SECOND, 0, SECOND, 3_600 * SECOND])
    if op != "touch":
        row["ttl_mode"] = draw.choice([None, None, "RESET", "KEEP", "EXTEND"])
    if draw.random() < 0.2:
        row["only_if"] = draw.choice(["absent", "present"])
    elif draw.random() < 0.2 and text.startswith('{"id":"a"'):
        row["only_if_version"] = draw.choice([0, 1, -1])
    return row


PATHS: Final = [[["id"]], [["id"]], [["id"], ["k", "n"]]]
DURATIONS: Final = [
    *(
        "0s",
        "1s",
        "3s",
        "1h",
        "never",
        "-1s",
        "5",
        "4000d",
        "1.5s",
        "1s500ms",
        "1000000\u00b5s",
        "3000000000ns",
        "999ns",
    ),
    *("1\u03bcs", ".5s", "1.s", "522w", "3653d", "3653d1us", "99999999999999999999w", "", "1 s", "1S", "s", "1s-1s"),
]
NAMES: Final = ["id", "k", "n", "v", "", "\u00fc", '"', "\\", "\n", "a/b", "\u2028", "\x7f", "\U0001f600", "\0", "null"]
SCALARS: Final = [
    *("null", "null", "true", "0", "-0", "-0.0", "1.50", "1e0", "1E5", "1e400", "-1e400", "1e-400", "9007199254740993"),
    *("123456789012345678901234567890", "18446744073709551616", "1.7976931348623157e308", '""', '"a|b"', '"\\\\|"'),
    *('"\\u00fc"', '"\\ud83d\\ude00"', '"\\u0000"', '"\x7f"', '"null"', '"}"', "[]", "{}", '[null, {"n":null}]'),
]
MALFORMED: Final = [
    *(
        '"\\ud800"',
        '"\\udc00\\ud800"',
        '"\t"',
        '"\\x"',
        "01",
        "1.",
        ".5",
        "+1",
        "NaN",
        "-Infinity",
        "0x1",
        "nul",
        "[1,]",
    ),
    *("{1:2}", '{"a"}', "1 2", "'x'", "/**/1", "\u00a01", '"\0"'),
]
AROUND: Final = ["\ufeff%s", "%s\0", " %s\n", "[%s]", "%s,", "%s%s", '{"a":' * 256 + "%s" + "}" * 256]


def odd_document(draw: random.Random) -> str:
    """A document whose key fields, if it has them, come first: of two faults a server may name the other one."""
    levels = draw.choice([1, 2, 3, 31, 32, 33, 255, 256])
    inner = draw.choice([_object(draw, 2), draw.choice(SCALARS), draw.choice(MALFORMED)])
    deep = '{"v":' * levels + inner + "}" * levels
    keys = '"id":"a",' * draw.choice([1, 1, 2]) + '"\\u006b":{"n":7,"n":7}'
    text = draw.choice([deep, f"{{{keys}, {deep[1:]}", f"{{{keys}}}", _object(draw, 3)])
    return draw.choice(AROUND).replace("%s", text) if draw.random() < 0.1 else text


def _object(draw: random.Random, depth: int) -> str:
    space = draw.choice(["", "", " ", "\r\n\t"])
    fields = []
    for _ in range(draw.randrange(5)):
        name = draw.choice(NAMES)
        value = _object(draw, depth - 1) if depth and draw.random() < 0.4 else draw.choice(SCALARS)
        fields.append(f"{json.dumps(name, ensure_ascii=draw.random() < 0.5)}{space}:{space}{value}")
    return "{" + space + f"{space},{space}".join(fields) + space + "}"
