"""`sow history`: the story of one key, as the journal keeps it.

[1]  The command ends at the last change that was on disk when it began.
[2]  A deletion and a change of a lifetime carry no time of their own. Theirs is the time of their commit, to the
     millisecond, which the server's search by time finds; it is looked up for the newest ones only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, cast

import click
import msgspec

from sow_cli import arguments, display
from sow_cli.columns import Fields, one_line, text
from sow_cli.output import Fact, Format, Output, note, output_option
from sow_cli.rows import NEVER_MICROS, BatchColumns, RecordForm, payload_text, shown_payload
from sow_cli.session import Session
from sow_client import EARLIEST, ChangesPlan, Client, PackedRecords, Topic

_COLUMNS: Final = ("payload", "version", "publish_time", "expire_time", "origin", "sequence", "op")
_KEPT_MAX: Final = 10_000
"""Changes that are told without --last."""
_LOOKED_UP_MAX: Final = 100
"""Commit times that are looked up, each by some 25 calls ([2])."""
_NAMES: Final = (
    "time_micros",
    "op",
    "reason",
    "version",
    "sequence",
    "expire_time_micros",
    "origin",
    "changed",
    "payload",
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One change of the key. Of a delete and an expiry the values are those of the record that has gone."""

    op: str
    """put, delete or expire."""
    reason: str
    """touched, for a put that changed the lifetime alone; else empty."""
    payload: bytes
    version: int
    publish_time_micros: int
    expire_time_micros: int | None
    origin: str
    sequence: int


@click.command(short_help="Tell the story of one key.")
@click.argument("topic")
@click.argument("key", type=arguments.key)
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the last N changes.")
@output_option
@click.pass_obj
def history(session: Session, topic: str, key: str, last: int | None, output: Output) -> None:
    """Tell the story of the record KEY of TOPIC, from the journal: each publish with the fields that it changed, each
    new lifetime, and why the record ended.

    The story reaches back as far as the journal of the topic (its retain_time and retain_bytes); a remark says where
    it begins. The command ends at once; `sow subscribe TOPIC "@key = 'KEY'"` follows what comes.

    \b
    Examples:
      sow history orders 1
      sow history sessions alice --last 10 --format json
    """
    with session.client() as client:
        described = client.describe_topic(topic)
        form = RecordForm.of(topic, described.settings)
        plan = client.plan_changes(topic, start=EARLIEST)
        entries: deque[Entry] = deque(maxlen=last or _KEPT_MAX)
        seen = 0
        for entry in _entries(client, topic, key, plan):
            entries.append(entry)
            seen += 1
        times = _Times(client, described, plan)
        told = _tell(list(entries), form, times.of, as_text=output.format is Format.CSV)
        begin = times.first()
        current = client.get(topic, key)
    output.many(told, names=_NAMES, nothing="the journal has no change of this key")
    if seen > len(told):
        note(f"the last {display.count(len(told))} of {display.count(seen)} changes; --last N shows more")
    if not output.is_table:
        return
    note(begin)
    if current is None:
        note(f"now: there is no record {key!r}")
    else:
        expires = display.expire_time(current.expire_time_micros, times.now_micros, acts=form.acts)
        note(f"now: version {current.version}, expires {expires}")


def _entries(client: Client, topic: str, key: str, plan: ChangesPlan) -> Iterator[Entry]:
    """The changes of the key, in order."""
    if plan.start == plan.end:
        return
    wanted = f"@key = '{key.translate(_ESCAPES)}'"
    for batch in client.read_changes(topic, plan.start, plan.end, filter=wanted, columns=_COLUMNS):
        yield from _unpacked(batch)


def _unpacked(batch: PackedRecords) -> Iterator[Entry]:
    columns = BatchColumns.of_packed(batch)
    for index in range(batch.count):
        expire = columns.expire_times_micros[index]
        yield Entry(
            op=_OPS.get(batch.ops[index], "change"),
            reason="touched" if batch.reasons[index] == _TOUCHED else "",
            payload=columns.payloads[index],
            version=columns.versions[index],
            publish_time_micros=columns.publish_times_micros[index],
            expire_time_micros=None if expire == NEVER_MICROS else expire,
            origin=columns.origins[index],
            sequence=columns.sequences[index],
        )


_ESCAPES: Final = str.maketrans({"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"})
"""Of a text in a filter."""
_OPS: Final[Mapping[int, str]] = {1: "put", 3: "delete", 4: "expire"}  # sow.v1.ChangeOp
_TOUCHED: Final = 1  # sow.v1.ChangeReason


class _Times:
    """The times of changes ([2])."""

    def __init__(self, client: Client, topic: Topic, plan: ChangesPlan) -> None:
        self._client = client
        self._topic = topic
        self._plan = plan
        self.now_micros = round(datetime.now(UTC).timestamp() * 1e6)
        self._left = _LOOKED_UP_MAX

    def first(self) -> str:
        """Where the story begins."""
        made = _instant(round(self._topic.create_time.timestamp() * 1e6))
        if not self._plan.entries:
            return f"the journal is empty; the topic was made {made}"
        begin = _instant(self._committed(_sequence(self._plan.start) + 1, 0))
        return f"the journal begins {begin}, the topic was made {made}: changes in between, if any, are not kept"

    def of(self, entry: Entry) -> int | None:
        """When a change happened; None: it was not looked up."""
        if entry.op == "expire":
            return entry.expire_time_micros
        if entry.op == "put" and not entry.reason:
            return entry.publish_time_micros
        if not self._left:
            return None
        self._left -= 1
        return self._committed(entry.sequence, entry.publish_time_micros)

    def _committed(self, sequence: int, after_micros: int) -> int:
        """The greatest millisecond at whose begin the journal had not reached `sequence`."""
        low, high = after_micros // 1000, self.now_micros // 1000 + 1
        while high - low > 1:
            middle = (low + high) // 2
            start = datetime.fromtimestamp(middle / 1000, UTC)
            if _sequence(self._client.plan_changes(self._topic.name, start=start).start) < sequence:
                low = middle
            else:
                high = middle
        return low * 1000


def _sequence(bookmark: str) -> int:
    return int(bookmark.partition(";")[0].rpartition(".")[2])


def _tell(
    entries: Sequence[Entry], form: RecordForm, time_of: Callable[[Entry], int | None], *, as_text: bool
) -> list[list[Fact]]:
    """The changes, each with what it changed, compared with the one before."""
    told: list[list[Fact]] = []
    before: bytes | None = None
    # The newest first, as only so many are looked up.
    times = [time_of(entry) for entry in reversed(entries)][::-1]
    for entry, time_micros in zip(entries, times, strict=True):
        changed: list[str] | None = None
        if entry.op != "put":
            what = "deleted" if entry.op == "delete" else "expired"
        elif entry.reason:
            what = "new lifetime"
        else:
            differences = None if before is None else _differences(form.fields, before, entry.payload)
            if differences is None:
                what = shown_payload(entry.payload, form)
            else:
                changed = list(differences)
                what = ", ".join(differences.values()) or "published again, unchanged"
        before = entry.payload if entry.op == "put" else None
        facts = _facts(entry, form, time_micros, changed, what)
        payload = _payload(entry.payload, form, as_text=as_text)
        told.append([*facts, Fact("payload", payload, "", in_lists=False)])
    return told


def _differences(fields: Fields, before: bytes, after: bytes) -> dict[str, str] | None:
    """The fields that differ, with their texts before and after; None: the payloads have no fields, and differ."""
    old, new = fields.of(before), fields.of(after)
    if old is None or new is None:
        return {} if before == after else None
    found = {}
    for name in {**old, **new}:
        one, other = text(old.get(name)), text(new.get(name))
        if one != other:
            found[name] = f"{display.safe(name)} {_shown(one)} → {_shown(other)}"
    return found


def _shown(value: str | None) -> str:
    if value is None:
        return display.NOT_SET
    return display.safe(value) if len(value) <= 40 else display.safe(value[:39]) + "…"


def _instant(micros: int | None) -> str:
    return display.UNKNOWN if micros is None else display.instant(micros)


def _facts(entry: Entry, form: RecordForm, time_micros: int | None, changed: list[str] | None, what: str) -> list[Fact]:
    return [
        Fact("time_micros", time_micros, _instant(time_micros), label="time"),
        Fact("op", entry.op, entry.op),
        Fact("reason", entry.reason or None, entry.reason, in_lists=False),
        Fact("version", entry.version, str(entry.version)),
        Fact("sequence", entry.sequence, str(entry.sequence), in_lists=False),
        Fact("expire_time_micros", entry.expire_time_micros, _lifetime(entry, form, time_micros), label="lifetime"),
        Fact("origin", entry.origin, display.safe(entry.origin), in_lists=False),
        Fact("changed", changed, what, label="what changed"),
    ]


def _lifetime(entry: Entry, form: RecordForm, time_micros: int | None) -> str:
    if entry.op != "put":
        return ""
    expire, begin = entry.expire_time_micros, time_micros or entry.publish_time_micros
    if expire is None:
        return "never expires"
    return display.duration(max(0, expire - begin)) if form.acts else "never (off)"


def _payload(payload: bytes, form: RecordForm, *, as_text: bool) -> str:
    if as_text or not form.payload_is_json:
        return payload_text(payload, form)
    # JSON gets the document itself, as `sow query` writes it; `Fact` has no type for that.
    return cast(str, msgspec.Raw(one_line(payload)))
