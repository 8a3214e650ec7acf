"""Parses the options of the data source: the texts from Spark, once, into the values of `options`.

Guarantees:

    [1]  An unknown option is refused, and the error names the nearest known one. An option of the other direction
         (`ttl` when reading) is refused, too. With `read.` or `write.` in front an option is one of that direction
         only, so that a view of SQL can have options for both.
    [2]  Every error names the option as documented, although Spark passes the names in lower case.
    [3]  An option that would have no effect is refused: one of another use of the same direction (`startingFrom` of a
         snapshot), and one that another option makes void (`jsonSchema` beside `payload=binary`). A view of SQL takes
         appends and overwrites, so with `write.` in front an option of one of the two is left out in the other one.

docs/spark.md explains the options, under the names in `READ_OPTIONS` and `WRITE_OPTIONS`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Final, TypeVar, get_args

from sow.durations import DurationError, format_micros, parse_micros
from sow.sizes import SizeError, parse_bytes
from sow_client import InvalidArgument
from sow_client._parameters import Parameters, parameters_of
from sow_spark.errors import option_error
from sow_spark.options import (
    DEFAULT_SERVER,
    BadRows,
    Connecting,
    Durability,
    MetadataColumns,
    NewFields,
    Nulls,
    OnDelete,
    ParseMode,
    PayloadForm,
    Reading,
    ReadUse,
    SnapshotOf,
    WriteMode,
    WriteUse,
    Writing,
)

PARTITIONS_MAX: Final = 10_000
BATCH_RECORDS_MAX: Final = 100_000


INFER_RECORDS_MAX: Final = 1_000_000
STREAM_PARTITIONS_MAX: Final = 1_000
LEASE_MICROS_MIN: Final = 1_000_000
LEASE_MICROS_MAX: Final = 24 * 3_600 * 1_000_000
WRITER_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,150}")
PIN_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,190}")
"""The server allows 200 characters. The rest is for the name of a note (stream_reading [4])."""
_COMMON: Final = (
    "server",
    "topic",
    "path",
    "tlsCa",
    "tlsCertificate",
    "tlsKey",
    "tlsServerName",
    "tokenFile",
    "timeout",
    "connectTimeout",
    "retryFor",
)
READ_OPTIONS: Final = (
    *_COMMON,
    "topics",
    "topicPattern",
    "filter",
    "parameters",
    "pushFilters",
    "snapshot",
    "export",
    "partitions",
    "inferRecords",
    "jsonSchema",
    "columns",
    "metadata",
    "newFields",
    "payload",
    "mode",
    "lease",
    "batchSize",
    "startingFrom",
    "maxRecordsPerTrigger",
    "maxBytesPerTrigger",
    "failOnDataLoss",
    "pinName",
    "pinLease",
)
"""The options of reading. `path`, the argument of `load()`, is another name of `topic`. The limits of a batch are other
names, of before, of those of a trigger."""
WRITE_OPTIONS: Final = (
    *_COMMON,
    "topicColumn",
    "mode",
    "ttl",
    "ttlColumn",
    "expireTimeColumn",
    "keyColumn",
    "payload",
    "onDelete",
    "onBadRow",
    "nulls",
    "durability",
    "batchSize",
    "lease",
    "writerId",
    "queryName",
    "checkpointLocation",
)
"""The options of writing. `queryName` and `checkpointLocation` are Spark's own, and come with the options of a
stream."""


_READ_USES: Final[Mapping[str, tuple[ReadUse, ...]]] = {
    **dict.fromkeys(("pushFilters", "snapshot", "export", "lease"), ("snapshot",)),
    **dict.fromkeys(("startingFrom", "failOnDataLoss", "pinName", "pinLease"), ("stream",)),
    **dict.fromkeys(("maxRecordsPerTrigger", "maxBytesPerTrigger"), ("stream",)),
}
"""The uses of the options of reading that do not count in both."""
_WRITE_USES: Final[Mapping[str, tuple[WriteUse, ...]]] = {
    **dict.fromkeys(("batchSize", "durability", "onDelete", "topicColumn"), ("append", "stream")),
    "lease": ("overwrite",),
    **dict.fromkeys(("writerId", "queryName", "checkpointLocation"), ("stream",)),
}
"""The uses of the options of writing that do not count in all. The server decides about the batches and the durability
of an overwrite."""
_CALLS: Final[Mapping[str, Mapping[str, str]]] = {
    "reading": {"snapshot": "a snapshot (read)", "stream": "a stream (readStream)"},
    "writing": {"append": "an append", "overwrite": "an overwrite", "stream": "a stream (writeStream)"},
}


def parse_reading(options: Mapping[str, str], use: ReadUse | None = None) -> Reading:
    """The options of reading. `use`: None if it is not known yet. Raises SowSourceError (OPTION_INVALID)."""
    given = _Given(options, READ_OPTIONS, WRITE_OPTIONS, "reading", _READ_USES, use)
    given.exclude(
        "export", ("filter", "parameters", "partitions", "lease", "snapshot"), "it is set when the export is opened"
    )
    given.exclude("export", ("pushFilters",), "its records are chosen when it is opened")
    given.exclude("export", ("topicPattern",), "its topics were named when it was opened")
    given.exclude("jsonSchema", ("inferRecords",), "no sample is taken")
    columns = given.names("columns")
    new_fields: NewFields = given.word("newFields", get_args(NewFields)) or "ignore"
    if columns and new_fields != "ignore":
        raise option_error("newFields", f"and columns exclude each other: {new_fields} needs all fields of a document")
    metadata: MetadataColumns = given.word("metadata", get_args(MetadataColumns)) or "true"
    if columns and metadata == "changes":
        raise option_error("metadata", "changes and columns exclude each other: name these columns in columns")
    payload = given.word("payload", get_args(PayloadForm))
    if payload is not None:
        check_form_options(given.present, payload, f"payload={payload}")
    return Reading(
        connecting=_connecting(given),
        topic="" if given.has("topics") or given.has("topicPattern") else given.topic(),
        topics=given.topics(),
        topic_pattern=given.pattern("topicPattern"),
        columns=columns,
        json_schema=given.text("jsonSchema"),
        new_fields=new_fields,
        filter=given.text("filter") or "",
        parameters=given.parameters(),
        push_filters={"true": True, "false": False}.get(given.word("pushFilters", _PUSHING) or "auto"),
        snapshot=given.word("snapshot", get_args(SnapshotOf)) or "first-read",
        export=given.text("export"),
        partitions=given.count("partitions", 0, 1, STREAM_PARTITIONS_MAX if use == "stream" else PARTITIONS_MAX),
        infer_records=given.count("inferRecords", 1_000, 1, INFER_RECORDS_MAX),
        metadata=metadata,
        payload=payload,
        mode=given.word("mode", get_args(ParseMode), upper=True) or "FAILFAST",
        lease_micros=given.micros("lease", 0, LEASE_MICROS_MAX, least=LEASE_MICROS_MIN),
        batch_size=given.count("batchSize", 0, 1, BATCH_RECORDS_MAX),
        starting_from=given.start("startingFrom"),
        max_records_per_trigger=given.count("maxRecordsPerTrigger", 0, 1, 2**62),
        max_bytes_per_trigger=given.size("maxBytesPerTrigger"),
        fail_on_data_loss=given.flag("failOnDataLoss", True),
        pin_name=given.matching("pinName", PIN_NAME, "1 to 190 characters of A-Z a-z 0-9 _ . : -"),
        pin_lease_micros=given.micros("pinLease", 3_600_000_000, 2**62, least=LEASE_MICROS_MIN),
        given=given.present,
    )


def check_form_options(given: Iterable[str], form: PayloadForm, why: str) -> None:
    """Refuses options of reading about the fields of documents if `why` makes one column of each payload. Raises
    SowSourceError (OPTION_INVALID)."""
    if form == "columns":
        return
    # A text may be no UTF-8, so `mode` has a meaning for it.
    for name in ("inferRecords", "jsonSchema", "newFields", *(("mode",) if form == "binary" else ())):
        if name in given:
            raise option_error(name, f"has no effect with {why}, which makes one column of each payload")


def parse_writing(options: Mapping[str, str], use: WriteUse | None = None) -> Writing:
    """The options of writing. `use`: None if it is not known. Raises SowSourceError (OPTION_INVALID)."""
    given = _Given(options, WRITE_OPTIONS, READ_OPTIONS, "writing", _WRITE_USES, use)
    payload = given.word("payload", get_args(PayloadForm))
    if payload not in (None, "columns") and given.has("nulls"):
        raise option_error("nulls", f"has no effect with payload={payload}: the payload is written unchanged")
    ttl = given.text("ttl")
    if ttl is not None and ttl != "never":
        given.micros("ttl", 0, 2**63 - 1, least=0)
    for way in ("topic", "path"):
        given.exclude("topicColumn", (way,), "each row names its topic")
    return Writing(
        connecting=_connecting(given),
        topic="" if given.has("topicColumn") else given.topic(),
        topic_column=given.text("topicColumn"),
        mode=given.word("mode", get_args(WriteMode)) or "publish",
        ttl=ttl,
        ttl_column=given.text("ttlColumn"),
        expire_time_column=given.text("expireTimeColumn"),
        key_column=given.text("keyColumn"),
        payload=payload,
        on_delete=given.word("onDelete", get_args(OnDelete)) or "delete",
        on_bad_row=given.word("onBadRow", get_args(BadRows)) or "fail",
        nulls=given.word("nulls", get_args(Nulls)) or "omit",
        durability=given.word("durability", get_args(Durability)),
        batch_size=given.count("batchSize", 0, 1, 10_000),
        lease_micros=given.micros("lease", 0, LEASE_MICROS_MAX),
        writer_id=given.matching("writerId", WRITER_ID, "1 to 150 characters of A-Z a-z 0-9 _ . : -"),
        given=given.present,
    )


def _connecting(given: _Given) -> Connecting:
    defaults = Connecting()
    return Connecting(
        server=given.text("server") or DEFAULT_SERVER,
        tls_ca=given.text("tlsCa"),
        tls_certificate=given.text("tlsCertificate"),
        tls_key=given.text("tlsKey"),
        tls_server_name=given.text("tlsServerName"),
        token_file=given.text("tokenFile"),
        timeout_micros=given.micros("timeout", defaults.timeout_micros, 2**62),
        connect_timeout_micros=given.micros("connectTimeout", defaults.connect_timeout_micros, 2**62),
        retry_for_micros=given.micros("retryFor", defaults.retry_for_micros, 2**62, least=0),
    )


_PUSHING: Final = ("auto", "true", "false")
_DIRECTIONS: Final = {"read": "reading", "write": "writing"}
_OF_A_VIEW: Final = frozenset({"append", "overwrite"})
"""The uses of one view of SQL: INSERT INTO and INSERT OVERWRITE."""
_Word = TypeVar("_Word", bound=str)


class _Given:
    """The given options. Each method reads one of them, or its default."""

    def __init__(
        self,
        options: Mapping[str, str],
        known: Iterable[str],
        others: Iterable[str],
        what: str,
        uses: Mapping[str, tuple[str, ...]],
        use: str | None,
    ) -> None:
        """`known`: the options of this direction, which is `what`, and `others` those of the other one. `uses`: the
        uses in which an option counts, if not in all."""
        self._values: dict[str, str] = {}
        names = {name.lower(): name for name in known}
        elsewhere = {name.lower(): name for name in others}
        (other,) = set(_DIRECTIONS.values()) - {what}
        for full, value in options.items():
            key = full.lower()
            direction, dot, rest = key.partition(".")
            if dot and direction in _DIRECTIONS:
                if rest not in (names if _DIRECTIONS[direction] == what else elsewhere):
                    raise option_error(full, f"is no option of {_DIRECTIONS[direction]}")
                if _DIRECTIONS[direction] != what:
                    continue
                if any(other.lower() == rest for other in options):
                    raise option_error(full, f"is there without {direction}, too: give one of the two")
                if (
                    use in _OF_A_VIEW
                    and use not in (counts := uses.get(names[rest], (use,)))
                    and _OF_A_VIEW & {*counts}
                ):
                    continue
                key = rest
            self._values[key] = value
            if key in names:
                continue
            if key in elsewhere:
                raise option_error(elsewhere[key], f"is one of {other}, not of {what}")
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {names[near[0]]}?" if near else f"known: {', '.join(names.values())}"
            raise option_error(key, f"is unknown; {hint}")
        self.present: Final = frozenset(names[key] for key in self._values)
        """The names of the options that are given."""
        _check_uses([names[key] for key in self._values], uses, _CALLS[what], use)

    def exclude(self, name: str, others: Iterable[str], why: str) -> None:
        """Refuses `others` beside an option. Raises SowSourceError."""
        for one in others:
            if name in self.present and one in self.present:
                raise option_error(one, f"and {name} exclude each other: {why}")

    def text(self, name: str) -> str | None:
        """A text. None if it is missing. An empty text is refused."""
        value = self._values.get(name.lower())
        if value is not None and not value.strip():
            raise option_error(name, "is empty")
        return value

    def parameters(self) -> Parameters | None:
        """The values of the names in the filter."""
        text = self.text("parameters")
        if text is None:
            return None
        try:
            return parameters_of(text)
        except InvalidArgument as error:
            raise option_error("parameters", error.message.removeprefix("parameters: ")) from None

    def topic(self) -> str:
        """The topic, by either name."""
        topic, path = self.text("topic"), self.text("path")
        if topic is not None and path is not None:
            raise option_error("topic", f"is {topic!r}, and the path is {path!r}: give one of the two")
        if topic is None and path is None:
            raise option_error("topic", "is missing")
        return topic or path or ""

    def has(self, name: str) -> bool:
        """True if an option is given."""
        return name.lower() in self._values

    def topics(self) -> tuple[str, ...]:
        """The listed topics. Raises SowSourceError for more than one way to name topics."""
        ways = [name for name in ("topics", "topicPattern", "topic", "path") if self.has(name)]
        if len(ways) > 1 and ways[0] in ("topics", "topicPattern"):
            raise option_error(ways[0], f"and {ways[1]} exclude each other")
        names = [name.strip() for name in (self.text("topics") or "").split(",") if name.strip()]
        if self.has("topics") and not names:
            raise option_error("topics", "names no topic")
        return tuple(dict.fromkeys(names))

    def pattern(self, name: str) -> str | None:
        """A regular expression."""
        value = self.text(name)
        if value is not None:
            try:
                re.compile(value)
            except re.error as error:
                raise option_error(name, f"{value!r} is no regular expression: {error}") from None
        return value

    def word(self, name: str, words: tuple[_Word, ...], *, upper: bool = False) -> _Word | None:
        """One of some words, in any case."""
        value = self.text(name)
        if value is None:
            return None
        wanted = value.strip().upper() if upper else value.strip().lower()
        for word in words:
            if word == wanted:
                return word
        raise option_error(name, f"{value!r} is none of {', '.join(words)}{_hint(name, value)}")

    def names(self, name: str) -> tuple[str, ...]:
        """Names with commas between them."""
        value = self.text(name)
        found = () if value is None else tuple(part.strip() for part in value.split(","))
        if "" in found or len(set(found)) != len(found):
            raise option_error(name, f"{value!r} is not a list of different names with commas between them")
        return found

    def matching(self, name: str, form: re.Pattern[str], described: str) -> str | None:
        """A text of some form."""
        value = self.text(name)
        if value is not None and not form.fullmatch(value):
            raise option_error(name, f"{value!r} is not {described}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Yes or no."""
        value = self.text(name)
        if value is None:
            return default
        if value.strip().lower() not in ("true", "false"):
            raise option_error(name, f"{value!r} is neither true nor false")
        return value.strip().lower() == "true"

    def count(self, name: str, default: int, least: int, most: int) -> int:
        """A whole number."""
        value = self.text(name)
        if value is None:
            return default
        text = value.strip().replace("_", "")
        if not (text.isascii() and text.isdecimal()) or len(text) > 20 or not least <= int(text) <= most:
            raise option_error(name, f"{value!r} is not a whole number from {least:,} to {most:,}")
        return int(text)

    def micros(self, name: str, default: int, most: int, *, least: int = 1) -> int:
        """A duration in microseconds."""
        value = self.text(name)
        if value is None:
            return default
        try:
            micros = parse_micros(value.strip())
        except DurationError as error:
            raise option_error(name, str(error)) from None
        if not least <= micros <= most:
            bound = f"at least {format_micros(least)}" if micros < least else f"at most {format_micros(most)}"
            raise option_error(name, f"{value!r} is out of range: {bound}")
        return micros

    def size(self, name: str) -> int:
        """A size in bytes. 0 if it is missing."""
        value = self.text(name)
        if value is None:
            return 0
        try:
            size = parse_bytes(value.strip())
        except SizeError as error:
            raise option_error(name, str(error)) from None
        if size == 0:
            raise option_error(name, "is zero")
        return size

    def start(self, name: str) -> str | datetime | Mapping[str, str]:
        """The start of a stream. A time without a zone is UTC. An object of JSON has a bookmark for each cell. A value
        that is neither a word nor a time is a bookmark."""
        value = (self.text(name) or "latest").strip()
        if value.startswith("{"):
            return self._bookmarks(name, value)
        if value.lower() in ("earliest", "latest"):
            return value.lower()
        # A time has a hyphen or a colon in it, which no bookmark has.
        if "-" not in value and ":" not in value:
            return value
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise option_error(
                name, f"{value!r} is neither earliest, latest, a time in ISO 8601, nor a bookmark"
            ) from None
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment

    def _bookmarks(self, name: str, value: str) -> Mapping[str, str]:
        try:
            found = json.loads(value)
        except ValueError as error:
            raise option_error(name, f"{value!r} is no JSON: {error}") from None
        if not (found and isinstance(found, dict) and all(isinstance(one, str) for one in found.values())):
            raise option_error(name, f'{value!r} is not the bookmark of each cell, such as {{"cell-1": "…"}}')
        if not (self.has("topics") or self.has("topicPattern")):
            raise option_error(name, "one topic has one bookmark")
        return found


def _check_uses(
    present: Iterable[str], uses: Mapping[str, tuple[str, ...]], calls: Mapping[str, str], use: str | None
) -> None:
    """Refuses an option that has no effect in a use. If the use is not known, refuses options that have an effect in no
    use together. `calls`: how messages call the uses."""
    possible = {*calls} if use is None else {use}
    because = "" if use is None else f"this is {calls[use]}"
    for name in present:
        counts = uses.get(name, tuple(calls))
        where = " and ".join(calls[one] for one in counts)
        if possible.isdisjoint(counts):
            raise option_error(name, f"counts only in {where}, and {because}")
        if len(counts) < len(calls):
            possible &= {*counts}
            because = because or f"{name} only in {where}"


def _hint(name: str, value: str) -> str:
    """`mode` has two meanings; this hint is for users who mix them up."""
    if name != "mode":
        return ""
    if value.strip().lower() in get_args(WriteMode):
        return "; publish and delta are modes of writing"
    if value.strip().upper() in get_args(ParseMode):
        return "; that is a mode of reading"
    return "; overwrite and append are given by .mode(), not as an option" if value in ("overwrite", "append") else ""
