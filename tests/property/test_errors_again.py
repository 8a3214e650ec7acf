"""The file of --errors: mended and read again, its records are those of the mended input; without a change each is
refused again."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc, parquet

from sow_cli import inputs
from sow_cli.inputs import opened
from sow_cli.lines import NEVER_MICROS, BadLine, Item, base64_payload, document, record_form
from sow_cli.refused import RowReader, kept
from sow_cli.row_records import Reading, Target
from sow_cli.sources import buffered
from sow_client import MessageTypeName, PayloadForm
from tests.support.oracles.examples import examples

LOOKED_AT = 2
"""The rows whose cells tell the types of the columns; only later ones are spoiled."""
Mend = Callable[[dict[str, Any]], None]


@dataclass
class Table:
    """A file, the same with bad rows, and how the line of each bad row is mended."""

    name: str
    good: bytes
    spoiled: bytes
    mends: dict[int, Mend] = field(default_factory=dict)
    """By the number of the row, from 0."""


def reading_of(target: Target, *, stamps: bool = True) -> Reading:
    form = PayloadForm(target.message_type, target.separator)
    reading = Reading(stamps=stamps)
    record = record_form(
        form, with_key=True, stamps=stamps, absent=NEVER_MICROS, is_told=False, row=RowReader(reading, target)
    )
    return Reading(stamps=stamps, record=record)


def outcomes(name: str, data: bytes, target: Target) -> list[Item | BadLine]:
    parse = document if target.message_type == "json" else base64_payload
    source = opened(buffered(io.BytesIO(data)), name, parse, reading_of(target), target, size=None)
    return [one for chunk, _ in source for one in chunk if one is not None]


def line_of(number: int, outcome: Item | BadLine, target: Target) -> dict[str, Any]:
    """The line of --errors, as a program reads it."""
    reason, message = (outcome.reason, outcome.message) if isinstance(outcome, BadLine) else ("SAID_NO", "")
    told = {"record": number + 1, "reason": reason, "message": message}
    found: dict[str, Any] = json.loads(msgspec.json.encode({**told, **kept(outcome, target.message_type == "json")}))
    return found


def of_lines(lines: Sequence[dict[str, Any]], target: Target) -> list[Item | BadLine]:
    return outcomes(
        "bad.ndjson",
        b"".join(json.dumps(one, separators=(",", ":"), ensure_ascii=False).encode() + b"\n" for one in lines),
        target,
    )


def check(table: Table, target: Target, refused: set[int]) -> None:
    """`refused`: further records that the server refuses."""
    expected = outcomes(table.name, table.good, target)
    assert all(isinstance(one, Item) for one in expected), expected
    found = outcomes(table.name, table.spoiled, target)
    assert len(found) == len(expected)
    bad = [number for number, one in enumerate(found) if isinstance(one, BadLine)]
    assert bad == sorted(table.mends), found
    sent_back = sorted({*bad, *refused})
    lines = [line_of(number, found[number], target) for number in sent_back]

    again = of_lines(lines, target)

    assert [type(one) for one in again] == [type(found[number]) for number in sent_back], "a fault is gone by itself"
    twice = [line_of(number, one, target) for number, one in zip(sent_back, again, strict=True)]
    for some in (lines, twice):
        for number, line in zip(sent_back, some, strict=True):
            if number in table.mends:
                table.mends[number](line)
        mended = of_lines(some, target)
        assert mended == [expected[number] for number in sent_back]
    for number, one in enumerate(found):
        assert number in table.mends or one == expected[number]


# ---- CSV ----

TEXTS = ["", "x", "a;b,c\td", 'say "x"', "two\nlines", "\r", "12", "true", "null", "{}", "é", "[1"]
COLUMNS = {
    "_key": st.sampled_from(["a", "b,c", "7"]),
    "n": st.sampled_from(["1", "-2.5", "", '""']),
    "ok": st.sampled_from(["true", "false", ""]),
    "t": st.sampled_from(TEXTS) | st.just(None),
    "/in/side": st.sampled_from(["x", "y"]),
    "_expire_time_micros": st.sampled_from(["", "1893456000000000"]),
    "_version": st.just("17"),
}
FAULTS: dict[str, list[str | bytes]] = {
    "_key": ["", b"\xff"],
    "n": ["x", "TRUE", "NaN"],
    "ok": ["TRUE", "yes"],
    "t": [b"M\xfcller"],
    "_expire_time_micros": ["soon", "1.79585E+15", "2030-01-01T00:00:00"],
}
FIRST = {"_key": "k", "n": "1", "ok": "true", "t": "text", "/in/side": "x", "_expire_time_micros": "1893456000000000"}


def cell(text: str | None) -> str:
    if text is None or text == '""':
        return text or ""
    is_plain = text and not set(text) & set(',;\t"\r\n')
    return text if is_plain else '"' + text.replace('"', '""') + '"'


def csv_row(row: dict[str, str | None], delimiter: str, names: Sequence[str]) -> str:
    # Numbers that are empty, and stamps, are empty cells; an empty text stands in quotation marks.
    return delimiter.join(["" if row[name] == "" and name != "t" else cell(row[name]) for name in names])


def put(name: str, text: str | None) -> Mend:
    def mend(line: dict[str, Any]) -> None:
        line["row"][name] = "" if text == '""' else None if text == "" and name != "t" else text
        if line.get("types", {}).get(name) == "base64":
            del line["types"][name]

    return mend


def put_text(text: str) -> Mend:
    def mend(line: dict[str, Any]) -> None:
        line.pop("base64", None)
        line["row"] = text

    return mend


@st.composite
def csv_tables(draw: st.DrawFn, message_type: MessageTypeName) -> Table:
    delimiter = draw(st.sampled_from([",", ";", "\t"]))
    end = draw(st.sampled_from(["\n", "\r\n"]))
    is_own = draw(st.booleans())  # with numbers of metadata, as `sow export` writes it
    names = [name for name in COLUMNS if is_own or name not in ("_version", "_expire_time_micros")]
    first = [FIRST | {"_version": "17"}] * LOOKED_AT
    texts = {"t": st.sampled_from(["", "x", "a;b,c\td", 'say "x"']) | st.none()} if message_type == "nvfix" else {}
    rows: list[Any] = [*first, *draw(st.lists(st.fixed_dictionaries(COLUMNS | texts), min_size=1, max_size=4))]
    head = delimiter.join(names)
    good = [csv_row(one, delimiter, names).encode() for one in rows]
    spoiled, mends = list(good), {}
    for number in draw(st.sets(st.integers(LOOKED_AT, len(rows) - 1))):
        row = rows[number]
        name = draw(st.sampled_from([*sorted(FAULTS.keys() & names), "more", "fewer", "return", "quote"]))
        text = csv_row(row, delimiter, names)
        if name in FAULTS:
            fault = draw(st.sampled_from(FAULTS[name]))
            mark = "\x02"
            data = csv_row(row | {name: mark}, delimiter, names).encode()
            wrong = fault if isinstance(fault, bytes) else cell(fault).encode() if fault else b""
            spoiled[number], mends[number] = data.replace(mark.encode(), wrong), put(name, row[name])
            continue
        tail = draw(st.sampled_from([b"", b"\xff"]))
        wrong = {"more": b"%s more%s", "return": b"%s a\rb%s", "quote": b'%s"a"b%s'}.get(name, b"")
        spoiled[number] = wrong % (good[number] + delimiter.encode(), tail) if wrong else b"just one" + tail
        mends[number] = put_text(text)
    files = [end.encode().join([head.encode(), *lines]) + end.encode() for lines in (good, spoiled)]
    return Table("a.csv", files[0], files[1], mends)


@pytest.mark.parametrize("message_type", ["json", "msgpack", "nvfix"])
@settings(max_examples=examples(150))
@given(data=st.data())
def test_rows_of_csv(message_type: MessageTypeName, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "_ROWS_LOOKED_AT", LOOKED_AT)
        table = data.draw(csv_tables(message_type))
        check(table, Target(message_type), data.draw(st.sets(st.integers(0, LOOKED_AT))) - table.mends.keys())


# ---- Parquet and Arrow ----

KINDS = {
    "_key": pa.string(),
    "n": pa.int64(),
    "x": pa.float64(),
    "t": pa.string(),
    "l": pa.list_(pa.float64()),
    "at": pa.timestamp("us"),
    "m": pa.map_(pa.string(), pa.int64()),
    "b": pa.binary(),
    "s": pa.struct([("b", pa.list_(pa.binary())), ("at", pa.timestamp("us", tz="Asia/Tokyo"))]),
    "fine": pa.timestamp("ns", tz="UTC"),
    "_expire_time": pa.timestamp("us", tz="UTC"),
}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "_key": st.sampled_from(["a", "b"]),
    "n": st.integers(-(2**63), 2**63 - 1) | st.none(),
    "x": st.sampled_from([1.0, -0.5, 123.75, None]),
    "t": st.sampled_from(TEXTS),
    "l": st.sampled_from([[], [1.5], None]),
    "at": st.sampled_from([0, 1_700_000_000_123_456, None]),
    "m": st.sampled_from([[("a", 1)], [], None]),
    "b": st.sampled_from([b"", b"\xff\x00", None]),
    "s": st.sampled_from([{"b": [b"", b"\xff"]}, {"b": None, "at": -1}, {"b": []}, None]),
    "fine": st.sampled_from([-1, 1_700_000_000_123_456_789, 1_000, None]),
    "_expire_time": st.sampled_from([1_893_456_000_000_000, None]),
}
OF_MSGPACK = {
    "x": st.sampled_from([1.0, float("nan"), float("inf"), None]),
    "l": st.sampled_from([[], [1.5], [float("-inf"), float("nan")], None]),
}
"""Columns whose values may be wrong in JSON alone."""
BEYOND = 2**62  # microseconds: a year that Python has not
WRONG: dict[str, list[Any]] = {
    "_key": [None],
    "x": [float("nan"), float("-inf")],
    "l": [[1.0, float("nan")]],
    "at": [BEYOND, -BEYOND],
    "m": [[("a", 1), ("a", 2)]],
    "_expire_time": [BEYOND],
}


def table_of(rows: Sequence[dict[str, Any]], name: str) -> bytes:
    arrays = [pa.array([row[one] for row in rows], kind) for one, kind in KINDS.items()]
    table = pa.table(arrays, names=list(KINDS))
    sink = io.BytesIO()
    if name.endswith("parquet"):
        parquet.write_table(table, sink)
    else:
        with ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return sink.getvalue()


def in_json(name: str, value: Any) -> Any:
    """A value as a program writes it in JSON."""
    if name in ("at", "_expire_time") and value is not None:
        value = datetime.fromtimestamp(value / 1e6, UTC)
        value = value if name == "_expire_time" else value.replace(tzinfo=None)
    return json.loads(msgspec.json.encode(dict(value) if name == "m" and value is not None else value))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@settings(max_examples=examples(100))
@given(data=st.data())
def test_rows_of_parquet_and_arrow(name: str, data: st.DataObject) -> None:
    message_type: MessageTypeName = data.draw(st.sampled_from(["json", "msgpack"]))
    is_packed = message_type == "msgpack"
    values = VALUES | OF_MSGPACK if is_packed else VALUES
    wrong = [name for name in WRONG if not (is_packed and name in OF_MSGPACK)]
    rows = data.draw(st.lists(st.fixed_dictionaries(values), min_size=1, max_size=5))
    spoiled, mends = list(rows), {}
    for number in data.draw(st.sets(st.integers(0, len(rows) - 1))):
        column = data.draw(st.sampled_from(wrong))
        spoiled[number] = rows[number] | {column: data.draw(st.sampled_from(WRONG[column]))}
        mends[number] = put_value(column, in_json(column, rows[number][column]))
    table = Table(name, table_of(rows, name), table_of(spoiled, name), mends)
    check(table, Target(message_type), data.draw(st.sets(st.integers(0, len(rows) - 1))) - mends.keys())


def put_value(name: str, value: Any) -> Mend:
    def mend(line: dict[str, Any]) -> None:
        line["row"][name] = value

    return mend
