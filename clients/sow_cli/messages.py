"""The messages of a subscription on stdout, one by one, in one of four formats.

[1]  Each message is written, and flushed, before the wait for the next one.
[2]  The machine formats carry exact values under names that never change: the names of a record as `output` writes
     it, and those of the message. CSV cannot nest: its columns show the removed record of a message that has no
     other.
[3]  A table has one line per message, of the terminal's width. Its columns grow and never shrink, so earlier lines
     stay aligned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

import msgspec

from sow_cli import display
from sow_cli.colours import styled
from sow_cli.columns import Columns, GrowingColumns, is_number
from sow_cli.output import Format, Output, note
from sow_cli.rows import RecordForm, RecordLine, json_payload, shown_payload, shown_text
from sow_cli.tables import FIELD_WIDTH_MAX, KEY_WIDTH_MAX, fit, terminal_width, text_width
from sow_client import Change, Client, Gap, NotFound, Record, TopicSettings

MARKS: Final = frozenset({"snapshot_end", "resync"})
"""Messages without a record."""

_STYLES: Final = {"put": "added", "oof": "removed", "delete": "removed", "expire": "expired"}
_KEY_WIDTH_MIN: Final = 8
_PAYLOAD_WIDTH_MIN: Final = 20


def tell_left_out(names: Sequence[str]) -> None:
    """Remarks on fields of a stream that have no column, if there are any."""
    if names:
        note(f"fields that have no column: {', '.join(names)}; see --select")


class TopicForms:
    """The form of the records of each topic. Messages do not carry it, so the server is asked at a topic's first
    message."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._settings: dict[str, TopicSettings | None] = {}
        self._forms: dict[str, RecordForm] = {}

    def of(self, topic: str) -> RecordForm:
        """The form of its records. Raises NotFound when there is no such topic."""
        form = self._forms.get(topic)
        if form is None:
            settings = self._settings[topic] = self._client.describe_topic(topic).settings
            form = self._forms[topic] = RecordForm.of(topic, settings)
        return form

    def of_message(self, topic: str) -> RecordForm:
        """The same for the topic of a message: a topic that no longer exists is written as binary."""
        try:
            return self.of(topic)
        except NotFound:
            form = self._forms[topic] = RecordForm(topic, "binary")
            return form

    def fix_separator(self, topic: str) -> str:
        """The separator between the fields of its payloads, if they are fix or nvfix."""
        self.of_message(topic)
        settings = self._settings.get(topic)
        return "\x01" if settings is None else settings.fix_separator


class _MessageLine(msgspec.Struct, gc=False):
    """A message in JSON (docs/reference/output.md). Field order is the order on the line."""

    op: str
    reason: str | msgspec.UnsetType
    topic: str | msgspec.UnsetType
    cell: str | msgspec.UnsetType = msgspec.UNSET
    key: str | msgspec.UnsetType = msgspec.UNSET
    version: int | msgspec.UnsetType = msgspec.UNSET
    publish_time_micros: int | msgspec.UnsetType = msgspec.UNSET
    expire_time_micros: int | msgspec.UnsetType = msgspec.UNSET
    origin: str | msgspec.UnsetType = msgspec.UNSET
    sequence: int | msgspec.UnsetType = msgspec.UNSET
    payload: msgspec.Raw | bytes | msgspec.UnsetType = msgspec.UNSET
    payload_base64: bytes | msgspec.UnsetType = msgspec.UNSET
    is_delta: bool | msgspec.UnsetType = msgspec.UNSET
    unset_paths: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    previous: RecordLine | msgspec.UnsetType = msgspec.UNSET
    after: str | msgspec.UnsetType = msgspec.UNSET
    entries: int | msgspec.UnsetType = msgspec.UNSET
    delivery_count: int | msgspec.UnsetType = msgspec.UNSET
    bookmark: str | msgspec.UnsetType = msgspec.UNSET


_OF_DURABLES: Final = ("after", "entries", "delivery_count")  # CSV has none of these, except the last on request
_NO_COLUMNS: Final = ("previous", "cell", *_OF_DURABLES)
_COLUMNS: Final = tuple(name for name in _MessageLine.__struct_fields__ if name not in _NO_COLUMNS)


class MessageWriter(Protocol):
    """Writes messages as they come."""

    def write(self, change: Change) -> None:
        """Writes one."""

    def write_gap(self, topic: str, gap: Gap) -> None:
        """Writes a gap in its place."""

    def finish(self) -> None:
        """Ends the output."""


def message_writer(
    output: Output,
    forms: TopicForms,
    *,
    several_topics: bool,
    past: bool = False,
    browsed: bool = False,
    select: Sequence[str] = (),
) -> MessageWriter:
    """The writer of the chosen format. `several_topics`, `select` (paths of the fields that are columns): for
    a table. `past`: the messages are old, so a table shows the time of their records. `browsed`: they are of a durable,
    so each shows also how often it was handed over."""
    if output.format is Format.TABLE:
        lines = partial(_Lines, output, forms, several_topics=several_topics, select=select)
        return lines(past=past or browsed, browsed=browsed)
    if output.format is Format.RAW:
        return _Raw(output)
    if output.format is Format.CSV:
        return _Csv(output, forms, browsed=browsed)
    return _Json(output, forms, as_list=output.format is Format.JSON, browsed=browsed)


class _Json:
    """NDJSON, or one array, which is complete however the command ends."""

    def __init__(self, output: Output, forms: TopicForms, *, as_list: bool, browsed: bool) -> None:
        self._output = output
        self._forms = forms
        self._as_list = as_list
        self._browsed = browsed
        self._written = False
        self._encoder = msgspec.json.Encoder()

    def write(self, change: Change) -> None:
        self._write(_message_line(change, self._forms, browsed=self._browsed))

    def write_gap(self, topic: str, gap: Gap) -> None:
        self._write(_gap_line(topic, gap))

    def _write(self, message: _MessageLine) -> None:
        line = self._encoder.encode(message)
        if self._as_list:
            self._output.write((b",\n" if self._written else b"[\n") + line)
        else:
            self._output.write(line + b"\n")
        self._written = True

    def finish(self) -> None:
        if self._as_list:
            self._output.write(b"\n]\n" if self._written else b"[]\n")


class _Raw:
    """The payload of each record that there is now, and a line feed; marks and removed records have none."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def write(self, change: Change) -> None:
        if change.record is not None:
            self._output.write(self._output.raw(change.record.payload) + b"\n")

    def write_gap(self, topic: str, gap: Gap) -> None:
        note(f"gap in {topic}: {gap.reason}, up to {gap.upto}")

    def finish(self) -> None:
        pass


class _Csv:
    def __init__(self, output: Output, forms: TopicForms, *, browsed: bool) -> None:
        self._output = output
        self._forms = forms
        self._browsed = browsed
        self._columns = (*_COLUMNS, "delivery_count") if browsed else _COLUMNS
        output.csv_rows([self._columns])

    def write(self, change: Change) -> None:
        self._write(_message_line(change, self._forms, browsed=self._browsed))

    def write_gap(self, topic: str, gap: Gap) -> None:
        self._write(_gap_line(topic, gap))

    def _write(self, line: _MessageLine) -> None:
        shown = {name: getattr(line, name) for name in self._columns}
        if isinstance(line.previous, RecordLine):
            shown |= {name: getattr(line.previous, name) for name in RecordLine.__struct_fields__ if name in shown}
        self._output.csv_rows([[_csv_value(value) for value in shown.values()]])

    def finish(self) -> None:
        pass


class _Lines:
    """A line for people ([3]): time, event and record."""

    def __init__(
        self,
        output: Output,
        forms: TopicForms,
        *,
        several_topics: bool,
        past: bool = False,
        browsed: bool = False,
        select: Sequence[str] = (),
        now_micros: Callable[[], int] = lambda: time.time_ns() // 1_000,
    ) -> None:
        self._growing = GrowingColumns(select)
        self._field_widths: list[int] = []
        self._headed: tuple[str, ...] = ()  # the headings that were written last
        self._output = output
        self._forms = forms
        self._several_topics = several_topics
        self._past = past
        self._browsed = browsed
        self._now_micros = now_micros
        self._topic_width = self._key_width = 3

    def write(self, change: Change) -> None:
        now = display.instant(self._now_micros())[11:]
        if change.op in MARKS:
            remark = "more records match" if change.reason == "truncated" else ""
            if change.op == "resync":
                remark = "forget the records above; a new snapshot follows"
            self._mark(now, change.op.replace("_", " "), remark)
            return
        about = change.record or change.previous
        if self._past and about is not None:
            now = display.instant(about.publish_time_micros)
        cells = [now, f"{change.op:6}", f"{_reason(change):7}"]
        if self._browsed or change.delivery_count > 1:
            cells.append(f"{change.delivery_count}x")
        if self._several_topics:
            topic = display.safe(change.topic)
            self._topic_width = max(self._topic_width, min(text_width(topic), KEY_WIDTH_MAX))
            cells.append(fit(topic, self._topic_width))
        key, width = display.safe(change.key), terminal_width()
        left = width - sum(text_width(cell) + 2 for cell in cells)
        key_width_max = min(KEY_WIDTH_MAX, max(_KEY_WIDTH_MIN, left - 2 - _PAYLOAD_WIDTH_MIN))
        self._key_width = min(key_width_max, max(self._key_width, text_width(key)))
        cells.append(fit(key, self._key_width))
        left -= self._key_width + 2
        columns = self._columns(change)
        if columns is None:
            last = self._payload(change)
        else:
            about = change.record or change.previous
            assert about is not None, "a message that is no mark is about a record"
            texts = ["" if one is None else shown_text(one) for one in columns.texts(about.payload)]
            headings = tuple(map(display.safe, columns.headings))
            self._widen(headings, texts)
            if headings != self._headed:
                self._headed = headings
                self._head(cells, headings)
            last = self._aligned(texts)
        cells.append(fit(last, max(_PAYLOAD_WIDTH_MIN, left)).rstrip())
        self._print(fit("  ".join(cells), width).rstrip(), _STYLES.get(change.op))

    def _columns(self, change: Change) -> Columns | None:
        """The columns of the fields; None: the payload is shown as it is."""
        about = change.record or change.previous
        if about is None or change.is_delta or (self._several_topics and not self._growing.is_chosen):
            return None
        return self._growing.of(self._forms.of_message(change.topic).payloads, [about.payload])

    def _widen(self, headings: Sequence[str], texts: Sequence[str]) -> None:
        before = [*self._field_widths, *([0] * (len(texts) - len(self._field_widths)))]
        cells = zip(headings, texts, before, strict=True)
        self._field_widths = [
            max(width, min(max(text_width(heading), text_width(text)), FIELD_WIDTH_MAX))
            for heading, text, width in cells
        ]

    def _aligned(self, texts: Sequence[str]) -> str:
        """The cells of the fields; numbers at the right."""
        cells = [fit(text, width) for text, width in zip(texts, self._field_widths, strict=True)]
        return "  ".join(
            [
                cell.rstrip().rjust(width) if is_number(text) else cell
                for cell, text, width in zip(cells, texts, self._field_widths, strict=True)
            ]
        )

    def _head(self, cells: Sequence[str], headings: Sequence[str]) -> None:
        """A line of headings: at the begin, and where a field comes for which there was no column."""
        names = ["time", "op", "reason", *([""] if len(cells) > 4 + self._several_topics else [])]
        names += ["topic", "key"] if self._several_topics else ["key"]
        front = [fit(name, max(len(name), text_width(cell))) for name, cell in zip(names, cells, strict=True)]
        fields = [fit(name, width) for name, width in zip(headings, self._field_widths, strict=True)]
        self._print(fit("  ".join([*front, *fields]).rstrip(), terminal_width()).rstrip(), "faint")

    def write_gap(self, topic: str, gap: Gap) -> None:
        count = "something" if gap.entries is None else f"{display.count(gap.entries)} entries before filtering"
        remark = "begins anew" if gap.reason == "reset" else f"{count} up to {gap.upto}"
        self._mark(display.instant(self._now_micros())[11:], "gap", f"{gap.reason.replace('_', ' ')}: {remark}")

    def _mark(self, now: str, what: str, remark: str) -> None:
        line = f"{now}  {what}  {remark}".rstrip()
        self._print(fit(display.safe(line), terminal_width()).rstrip(), "faint")

    def finish(self) -> None:
        tell_left_out(self._growing.left_out)

    def _payload(self, change: Change) -> str:
        about = change.record or change.previous
        assert about is not None, "a message that is no mark is about a record"
        payload = shown_payload(about.payload, self._forms.of_message(change.topic))
        unset = " ".join(change.unset_paths)
        return f"unset {display.safe(unset)}  {payload}" if unset else payload

    def _print(self, line: str, style: str | None) -> None:
        self._output.write(styled(line, style).encode() + b"\n")


def _reason(change: Change) -> str:
    return change.reason or ("delta" if change.is_delta else "")


def _message_line(change: Change, forms: TopicForms, *, browsed: bool) -> _MessageLine:
    line = _MessageLine(change.op, change.reason or msgspec.UNSET, change.topic or msgspec.UNSET)
    about = change.record or change.previous
    if about is not None:
        form = forms.of_message(change.topic)
        line.key = about.key
        line.sequence = about.sequence
        if change.record is not None:
            _fill(line, change.record, form)
        if change.previous is not None:
            line.previous = _record_line(change.previous, form)
    if change.is_delta:
        line.is_delta = True
    if change.unset_paths:
        line.unset_paths = change.unset_paths
    if browsed or change.delivery_count > 1:
        line.delivery_count = change.delivery_count
    if change.bookmark is not None:
        line.bookmark = change.bookmark
    if change.cell:
        line.cell = change.cell
    return line


def _gap_line(topic: str, gap: Gap) -> _MessageLine:
    return _MessageLine(
        "gap",
        gap.reason,
        topic,
        after=gap.after or msgspec.UNSET,
        entries=msgspec.UNSET if gap.entries is None else gap.entries,
        bookmark=gap.upto,
    )


def _fill(line: _MessageLine, record: Record, form: RecordForm) -> None:
    expire = record.expire_time_micros
    line.version = record.version
    line.publish_time_micros = record.publish_time_micros
    line.expire_time_micros = msgspec.UNSET if expire is None else expire
    line.origin = record.origin
    line.payload, line.payload_base64 = json_payload(record.payload, form)


def _record_line(record: Record, form: RecordForm) -> RecordLine:
    expire = record.expire_time_micros
    payload, exact = json_payload(record.payload, form)
    return RecordLine(
        topic=form.topic,
        key=record.key,
        version=record.version,
        publish_time_micros=record.publish_time_micros,
        expire_time_micros=msgspec.UNSET if expire is None else expire,
        origin=record.origin,
        sequence=record.sequence,
        payload=payload,
        payload_base64=exact,
    )


def _csv_value(value: object) -> str | int | None:
    match value:
        case msgspec.UnsetType():
            return None
        case bool():
            return "true" if value else "false"
        case str() | int():
            return value
        case msgspec.Raw():
            return bytes(value).decode("utf-8", "backslashreplace")
        case bytes():
            return msgspec.json.encode(value)[1:-1].decode()  # base64
        case tuple():
            return " ".join(value)
        case _:
            raise AssertionError(f"a message has no {type(value).__name__}")
