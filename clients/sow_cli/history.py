"""`sow history`: the story of one key, as the journal keeps it (rule S9).

[1]  The command ends at the last change that was on disk when it began.
[2]  A publish and an expiry happen at the time that the record carries, also where another instance made them. The time
     of a deletion and of a touch is that of the commit here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, cast

import click
import msgspec

from sow_cli import arguments, display
from sow_cli.columns import is_text, one_line, text
from sow_cli.output import Fact, Format, Output, note, output_option
from sow_cli.rows import RecordForm, payload_text, shown_payload
from sow_cli.session import Session
from sow_client import EARLIEST, Client, PastChange, PayloadForm, SowError, Topic

_KEPT_MAX: Final = 10_000
"""Changes that are told without --last."""
_PAGE_MAX: Final = 10_000
"""Changes of one call, which the server bounds."""
_NAMES: Final = (
    "time_micros",
    "op",
    "reason",
    "version",
    "sequence",
    "expire_time_micros",
    "origin",
    "instance",
    "changed",
    "payload",
)


@click.command(short_help="Tell the story of one key.")
@click.argument("topic")
@click.argument("keys", nargs=-1, required=True, type=arguments.key, metavar="KEY")
@arguments.parts_option
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the last N changes.")
@output_option
@click.pass_obj
def history(session: Session, topic: str, keys: tuple[str, ...], parts: bool, last: int | None, output: Output) -> None:
    """Tell the story of the record KEY of TOPIC, from the journal: each publish with the fields that it changed, each
    new lifetime, and why the record ended.

    The story reaches back as far as the journal of the topic (its retain_time and retain_bytes). A remark says where it
    begins, or that it is complete. Without --last it has the last 10,000 changes. A touch and a deletion have the time
    of their commit at the server that answers. The command ends at once; `sow subscribe TOPIC "@key = 'KEY'"` follows
    later changes.

    \b
    Examples:
      sow history orders 1
      sow history sessions alice --last 10 --format json
    """
    keys = arguments.whole_keys(keys, parts=parts)
    if len(keys) > 1:
        raise click.UsageError("one KEY, or with --parts the parts of one")
    (key,) = keys
    most = last or _KEPT_MAX
    with session.client() as client:
        described = client.describe_topic(topic)
        form = RecordForm.of(topic, described.settings)
        # One more than is shown: the oldest one that is shown is compared with it.
        changes, complete = _read(client, topic, key, most + 1)
        begin = _begin(client, described, complete=complete) if output.is_table else ""
        current = client.get(topic, key) if output.is_table else None
    told = _tell(changes, form, as_text=output.format is Format.CSV)[-most:]
    output.many(told, names=_NAMES, nothing="the journal has no change of this key")
    if len(changes) > most:
        note(f"the last {display.counted(most, 'change')}, and there are more: --last N shows N")
    if not output.is_table:
        return
    note(begin)
    if current is None:
        note(f"now: there is no record {key!r}")
    else:
        now_micros = round(datetime.now(UTC).timestamp() * 1e6)
        expires = display.expire_time(current.expire_time_micros, now_micros, acts=form.acts)
        note(f"now: version {current.version}, expires {expires}")


def _read(client: Client, topic: str, key: str, most: int) -> tuple[list[PastChange], bool]:
    """The last changes, the oldest first; and whether there have never been others."""
    found: list[PastChange] = []
    upto = None
    while True:
        page = client.history(topic, key, entries_max=min(_PAGE_MAX, most - len(found)), upto=upto)
        found += page.entries
        upto = page.bookmark
        if not upto or len(found) >= most:
            return found[::-1], not upto and not page.discarded


def _begin(client: Client, topic: Topic, *, complete: bool) -> str:
    """Where the story begins."""
    made = display.instant(round(topic.create_time.timestamp() * 1e6))
    if complete:
        return f"the journal has all changes since the topic was made {made}"
    plan = client.plan_changes(topic.name, start=EARLIEST)
    if not plan.entries:
        return f"the journal is empty; the topic was made {made}"
    begin = display.instant(_committed(client, topic, _sequence(plan.start) + 1))
    return f"the journal begins {begin}, the topic was made {made}: changes in between, if any, are not kept"


def _committed(client: Client, topic: Topic, sequence: int) -> int:
    """The greatest millisecond at whose begin the journal had not reached `sequence`: some 30 searches by time."""
    low = round(topic.create_time.timestamp() * 1e3)
    high = max(low, round(datetime.now(UTC).timestamp() * 1e3)) + 86_400_000  # the server's clock may be ahead of ours
    while high - low > 1:
        middle = (low + high) // 2
        start = datetime.fromtimestamp(middle / 1000, UTC)
        try:
            reached = _sequence(client.plan_changes(topic.name, start=start).start)
        except SowError as error:
            if error.reason != "TIME_IN_FUTURE":
                raise
            reached = sequence  # nothing comes before that time that is not there now
        if reached < sequence:
            low = middle
        else:
            high = middle
    return low * 1000


def _sequence(bookmark: str) -> int:
    return int(bookmark.partition(";")[0].rpartition(".")[2])


def _tell(changes: Sequence[PastChange], form: RecordForm, *, as_text: bool) -> list[list[Fact]]:
    """The changes, each with the fields that it changed, compared with the one before."""
    told: list[list[Fact]] = []
    before: bytes | None = None
    for entry in changes:
        payload = entry.record.payload
        changed: list[str] | None = None
        if entry.reason == "not_permitted":
            what = "you may not see it"
        elif entry.op != "put":
            what = "deleted" if entry.op == "delete" else "expired"
        elif entry.reason:
            what = "new lifetime"
        else:
            differences = None if before is None else _differences(form.payloads, before, payload)
            if differences is None:
                what = shown_payload(payload, form)
            else:
                changed = list(differences)
                what = ", ".join(differences.values()) or "published again, unchanged"
        before = payload if entry.op == "put" else None
        facts = _facts(entry, form, changed, what)
        told.append([*facts, Fact("payload", _payload(payload, form, as_text=as_text), "", in_lists=False)])
    return told


def _time_micros(entry: PastChange) -> int:
    """When a change happened ([2])."""
    if entry.op == "expire" and entry.record.expire_time_micros is not None:
        return entry.record.expire_time_micros
    if entry.op == "put" and not entry.reason:
        return entry.record.publish_time_micros
    return round(entry.time.timestamp() * 1e6)


def _differences(form: PayloadForm, before: bytes, after: bytes) -> dict[str, str] | None:
    """The fields that differ, with their texts before and after; None: the payloads have no fields, and differ."""
    old, new = form.fields(before), form.fields(after)
    if old is None or new is None:
        return {} if before == after else None
    found = {}
    for name in {**old, **new}:
        one, other = text(old.get(name)), text(new.get(name))
        if one != other:
            found[name] = f"{display.safe(name)} {_shown(one)} → {_shown(other)}"
        elif (was_text := is_text(old.get(name))) != is_text(new.get(name)):
            quoted = f'"{_shown(one)}"'
            pair = (quoted, _shown(one)) if was_text else (_shown(one), quoted)
            found[name] = f"{display.safe(name)} {pair[0]} → {pair[1]}"
    return found


def _shown(value: str | None) -> str:
    if value is None:
        return display.NOT_SET
    if not value:
        return '""'
    return display.safe(value) if len(value) <= 40 else display.safe(value[:39]) + "…"


def _facts(entry: PastChange, form: RecordForm, changed: list[str] | None, what: str) -> list[Fact]:
    record, time_micros = entry.record, _time_micros(entry)
    return [
        Fact("time_micros", time_micros, display.instant(time_micros), label="time"),
        Fact("op", entry.op, entry.op),
        Fact("reason", entry.reason, entry.reason or "", in_lists=False),
        Fact("version", record.version, str(record.version)),
        Fact("sequence", record.sequence, str(record.sequence), in_lists=False),
        Fact("expire_time_micros", record.expire_time_micros, _lifetime(entry, form, time_micros), label="lifetime"),
        Fact("origin", record.origin, display.safe(record.origin), in_lists=False),
        Fact("instance", entry.instance or None, display.safe(entry.instance), in_lists=False),
        Fact("changed", changed, what, label="what changed"),
    ]


def _lifetime(entry: PastChange, form: RecordForm, time_micros: int) -> str:
    if entry.op != "put":
        return ""
    expire = entry.record.expire_time_micros
    if expire is None:
        return "never"
    return display.duration(max(0, expire - time_micros)) if form.acts else "never (off)"


def _payload(payload: bytes, form: RecordForm, *, as_text: bool) -> str:
    document = form.payloads.json(payload)
    if document is None:
        return payload_text(payload, form)
    if as_text:
        return document.decode("utf-8", "backslashreplace")
    # JSON gets the document itself, as `sow query` writes it; `Fact` has no type for that.
    return cast(str, msgspec.Raw(one_line(document)))
