"""`order_by`: parsing, sort keys, and a sort that holds only the records it needs (rule Q2). Pure, except the records
that a `Sorter` holds.

    [1]  Null is last in both directions: a missing field, null, NaN, an object, an array without a first element.
    [2]  Booleans come before numbers, and numbers before texts. False comes before true; numbers are in order of value,
         texts of code points. An array counts as its first element. In fix and nvfix, where all values are texts, a
         numeric text is a number.
    [3]  Equal records are in key order, in both directions: records arrive in key order, and every sort is stable.
    [4]  With a limit of k records, at most 2 k records, or k and a fixed number more, are held, whatever the size of
         the result. All sorts together hold no more bytes than allowed. A sort that is too large on its own is
         RESULT_TOO_LARGE; one that finds no room waits, see `sort_memory`.
    [5]  Sorting holds the GIL, so at most about RUN_RECORDS are sorted at once. Runs are merged while the result is
         read, and records that have been read are released.
"""

from __future__ import annotations

import enum
import heapq
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Final, TypeAlias

from sow_server.engine.formats.payloads import Decode
from sow_server.engine.formats.topic_formats import zeros_before
from sow_server.engine.stored import HEADER_BYTES, header_columns
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.fields import Kind, Steps, number_of, value_at
from sow_server.engine.values.model import NEVER, MessageType
from sow_server.filters import FilterError, parse, print_path
from sow_server.filters.restriction import hides
from sow_server.filters.tree import Field, Metadata, MetadataName, Path
from sow_server.filters.values import first
from sow_server.query.gathering import Gathering, Row
from sow_server.query.sort_memory import SortMemory, SortRoom

if TYPE_CHECKING:  # topics are given; to sort their records, nothing of the catalog is needed
    from sow_server.engine.catalog.topics import Topic

TERMS_MAX: Final = 16
LENGTH_MAX: Final = 64 << 10
"""Characters of an `order_by`."""
SPARE_RECORDS: Final = 4096
"""How many records beyond its limit a sort gathers before it drops the worst of them."""
RUN_RECORDS: Final = 10_000
GIVE_BACK_RECORDS: Final = 1000
"""After how many read records of a sorted result their memory is given back."""
_RECORD_BYTES: Final = 350
"""Memory of a held record, besides its key, its value and its sort key."""


@dataclass(frozen=True, slots=True)
class Term:
    """One field to sort by."""

    field: Field
    descending: bool


# --- the text --------------------------------------------------------------------------------------------------------

# A field ends at a blank or a comma, unless in brackets: /[odd name, and more].
_FIELD: Final = re.compile(r"(?:\[(?:[^\]\\]|\\.)*\]|[^\s,\[])+", re.DOTALL)
_SPACE: Final = re.compile(r"\s*")
_WORD: Final = re.compile(r"[^\s,]*")
_DIRECTIONS: Final = {"ASC": False, "DESC": True}


def parse_order(text: str, names: Sequence[str] | None = None) -> tuple[Term, ...]:
    """The terms of `/price DESC, @key`. `names`: of the only fields that there are. Raises FilterError with the
    position and a caret."""
    if len(text) > LENGTH_MAX:
        raise FilterError(f"an order of {len(text)} characters, more than the limit of {LENGTH_MAX}")
    terms: list[Term] = []
    at = 0
    while True:
        at = _behind(_SPACE, text, at)
        if len(terms) == TERMS_MAX:
            raise FilterError(f"more fields than the limit of {TERMS_MAX}", at, text)
        end = _behind(_FIELD, text, at)
        field = _field(text, at, end)
        if names is not None and not (isinstance(field, Path) and len(field.steps) == 1 and field.steps[0] in names):
            there = ", ".join([print_path((name,)) for name in names[:10]])
            raise FilterError(f"expected a result, such as {there}", at, text)
        at = _behind(_SPACE, text, end)
        word = text[at : _behind(_WORD, text, at)]
        descending = _DIRECTIONS.get(word.upper())
        if descending is not None:
            at = _behind(_SPACE, text, at + len(word))
        terms.append(Term(field, bool(descending)))
        if at == len(text):
            return tuple(terms)
        if text[at] != ",":
            directions = "ASC, DESC, " if descending is None else ""
            raise FilterError(f"expected {directions}',' or the end", at, text)
        at += 1


def print_order(terms: Sequence[Term]) -> str:
    """The canonical text: ASC is left out."""
    return ", ".join([_field_text(term.field) + (" DESC" if term.descending else "") for term in terms])


def _behind(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _field(text: str, begin: int, end: int) -> Field:
    written = text[begin:end]
    if written.startswith("@"):
        try:
            return Metadata(MetadataName(written[1:].lower()))
        except ValueError:
            names = ", ".join(f"@{name.value}" for name in MetadataName)
            raise FilterError(f"expected one of {names}", begin, text) from None
    if written.startswith(("/", "[")):
        try:
            tree = parse(written)
        except FilterError as error:
            raise FilterError("expected a field such as /price", begin + max(0, error.position), text) from None
        if isinstance(tree, Path):
            return tree
    raise FilterError("expected a field, such as /price or @key", begin, text)


def _field_text(field: Field) -> str:
    return print_path(field.steps) if isinstance(field, Path) else f"@{field.name.value}"


# --- sort keys -------------------------------------------------------------------------------------------------------

SortKey: TypeAlias = tuple[int, object]
"""The rank of a kind, and a value of that kind. All values of one term are ranked in the same way."""


class Ranking(enum.Enum):
    """The ranks of values under a term. A whole sort runs in the direction of its first term; a term of the other
    direction inverts its values instead."""

    ASCENDING = enum.auto()
    """For an ascending sort: null is the highest."""
    DESCENDING = enum.auto()
    """For a descending sort: null is the lowest."""
    TURNED_DESCENDING = enum.auto()
    """A descending term in an ascending sort."""
    TURNED_ASCENDING = enum.auto()
    """An ascending term in a descending sort."""

    @property
    def turned(self) -> bool:
        return self in (Ranking.TURNED_DESCENDING, Ranking.TURNED_ASCENDING)

    @property
    def null(self) -> SortKey:
        """The rank of null, which is last [1]: the highest in an ascending sort, the lowest in a descending one."""
        return (9, 0) if self in (Ranking.ASCENDING, Ranking.TURNED_DESCENDING) else (-9, 0)


Place: TypeAlias = "tuple[object, ...] | Backwards"
"""The place of one record in an order, to be compared with those of others. It ends with the key, so no two
records have the same."""


class Turned:
    """A text with inverted order."""

    __slots__ = ("text",)

    def __init__(self, text: str | bytes) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Turned) and self.text == other.text

    def __lt__(self, other: Turned) -> bool:
        return other.text < self.text  # type: ignore[operator]  # of one kind both are str, or both are bytes

    __hash__ = None  # type: ignore[assignment]  # nobody looks one up

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + sys.getsizeof(self.text)


class Backwards:
    """A place in a descending order: greater values come first, and equal records in the order of their keys [3]."""

    __slots__ = ("_key", "_sort_keys")

    def __init__(self, sort_keys: tuple[object, ...], key: bytes) -> None:
        self._sort_keys = sort_keys
        self._key = key

    def __lt__(self, other: object) -> bool:
        assert isinstance(other, Backwards), "places of one order are compared"
        mine, theirs = self._sort_keys, other._sort_keys
        return mine > theirs or (mine == theirs and self._key < other._key)


def sort_key(value: object, ranking: Ranking, *, numeric: bool = False) -> SortKey:
    """The sort key of a field's value [1] [2]; `numeric`: a numeric text is a number."""
    kind = type(value)
    if kind is list:
        value = first(value)  # it is not a list
        kind = type(value)
    ranked: SortKey
    if kind is str:
        number = number_of(value) if numeric else None
        ranked = (Kind.TEXT, value) if number is None else (Kind.NUMBER, number)
    elif kind is int or (kind is float and value == value):
        ranked = (Kind.NUMBER, value)
    elif kind is bool:
        ranked = (Kind.BOOLEAN, value)
    else:
        return ranking.null
    return _turned(ranked) if ranking.turned else ranked


def _turned(ranked: SortKey) -> SortKey:
    rank, value = ranked
    if isinstance(value, (str, bytes)):
        return -rank, Turned(value)
    assert isinstance(value, (int, float)), "booleans and numbers"
    return -rank, -value


Column = Callable[[Sequence[bytes], Sequence[bytes], Sequence[object]], list[SortKey]]
"""Computes one term's sort keys from the record keys, stored values and documents of some records."""


@dataclass(frozen=True, slots=True)
class Order:
    """An `order_by` for the records of one topic. From any thread."""

    terms: tuple[Term, ...]
    text: str
    """The canonical text."""
    decode: Decode | None
    """The fields of a payload that it reads; None if it reads none."""
    columns: tuple[Column, ...]
    """One per term."""

    @property
    def descending(self) -> bool:
        """The direction of the whole sort."""
        return self.terms[0].descending

    @property
    def reads_headers(self) -> bool:
        """True if it needs the header of a record."""
        plain = (MetadataName.KEY, MetadataName.TOPIC)
        return any(isinstance(term.field, Metadata) and term.field.name not in plain for term in self.terms)

    def place(self, key: bytes, header: bytes, payload: bytes) -> Place:
        """The place of one record. `header`: as it is stored; of no use where it needs none."""
        documents = (None if self.decode is None else self.decode(payload),)
        sort_keys: tuple[object, ...] = ()
        for column in self.columns:
            sort_keys += column((key,), (header,), documents)[0]
        return Backwards(sort_keys, key) if self.descending else (*sort_keys, key)


def callers_order(topic: Topic, text: str, hidden: tuple[tuple[str, ...], ...]) -> Order | None:
    """The order `text` for a caller from which fields are hidden: they are null in all records, so they decide nothing
    (rule A5). If they are all of its fields, records come in the order of their keys. Raises StoreError as `order`."""
    if not text:
        return None
    given = order(topic, text)
    terms = [term for term in given.terms if not (isinstance(term.field, Path) and hides(hidden, term.field.steps))]
    if len(terms) == len(given.terms):
        return given
    return order(topic, print_order(terms) if terms else "@key")


def order(topic: Topic, text: str) -> Order:
    """The order `text` for the records of `topic`.

    Raises StoreError: ORDER_INVALID with the position and a caret, in its details also as `position`;
    UNSUPPORTED_FOR_MESSAGE_TYPE if it reads fields of a binary topic.
    """
    try:
        terms = parse_order(text)
    except FilterError as error:
        details = {"position": str(error.position)} if error.position >= 0 else None
        message = f"order_by: {error.message}"
        raise StoreError(Reason.ORDER_INVALID, message, field="order_by", details=details) from None
    names = dict.fromkeys([str(term.field.steps[0]) for term in terms if isinstance(term.field, Path)])
    message_type = topic.settings.message_type
    if names and message_type is MessageType.BINARY:
        raise StoreError(
            Reason.UNSUPPORTED_FOR_MESSAGE_TYPE,
            f"order_by: topic {topic.name} is binary, its payloads have no fields; only metadata such as @version has"
            " an order",
            field="order_by",
        )
    if message_type is MessageType.FIX and (zeros := zeros_before(names)):
        raise StoreError(Reason.ORDER_INVALID, f"order_by: {zeros}", field="order_by")
    decode = topic.format.decoder(tuple(names)) if names else None
    numeric = message_type in (MessageType.FIX, MessageType.NVFIX)
    down = terms[0].descending
    return Order(
        terms, print_order(terms), decode, tuple([_column(topic, term, down=down, numeric=numeric) for term in terms])
    )


def _column(topic: Topic, term: Term, *, down: bool, numeric: bool) -> Column:
    if term.descending == down:
        ranking = Ranking.DESCENDING if down else Ranking.ASCENDING
    else:
        ranking = Ranking.TURNED_ASCENDING if down else Ranking.TURNED_DESCENDING
    if isinstance(term.field, Metadata):
        return _metadata_column(topic, term.field.name, ranking)
    steps: Steps = term.field.steps
    plain = not ranking.turned

    def column(keys: Sequence[bytes], values: Sequence[bytes], documents: Sequence[object]) -> list[SortKey]:
        return [
            # The most frequent kind inline: a call would double the cost.
            (Kind.NUMBER, value) if plain and type(value) is int else sort_key(value, ranking, numeric=numeric)
            for value in [value_at(document, steps) for document in documents]
        ]

    return column


def _metadata_column(topic: Topic, name: MetadataName, ranking: Ranking) -> Column:
    def ranked(values: Sequence[bytes], keys: Sequence[bytes]) -> list[SortKey]:
        match name:
            case MetadataName.KEY:
                return [(Kind.TEXT, key) for key in keys]  # UTF-8 has the order of code points
            case MetadataName.VERSION:
                return [(Kind.NUMBER, version) for version in header_columns(values).version]
            case MetadataName.PUBLISH_TIME:
                return [(Kind.NUMBER, time) for time in header_columns(values).publish_time]
            case MetadataName.EXPIRE_TIME:
                times = header_columns(values).expire_time
                return [(Kind.NUMBER, time) if time != NEVER else ranking.null for time in times]
            case MetadataName.SEQUENCE:
                return [(Kind.NUMBER, sequence) for sequence in header_columns(values).sequence]
            case MetadataName.ORIGIN:
                names = topic.origins.names
                return [(Kind.TEXT, names[origin]) for origin in header_columns(values).origin]
            case MetadataName.TOPIC:
                return [ranking.null] * len(keys)  # one object for all

    def column(keys: Sequence[bytes], values: Sequence[bytes], documents: Sequence[object]) -> list[SortKey]:
        found = ranked(values, keys)
        if not ranking.turned:
            return found
        null = ranking.null
        return [entry if entry == null else _turned(entry) for entry in found]

    return column


# --- the sort --------------------------------------------------------------------------------------------------------

_sort_keys_of: Final = itemgetter(0)


class Sorter(Gathering):
    """Owns the records that are sorted. `add` takes them in key order, `rows` gives them sorted, `close` releases
    them."""

    def __init__(
        self,
        order: Order,
        limit: int | None,
        *,
        payloads: bool,
        memory: SortMemory,
        after: tuple[tuple[object, ...], bytes] | None = None,
        caller: str = "",
    ) -> None:
        """`limit`: how many records to return; None: all. `payloads`: False keeps only the headers. `after`: the sort
        keys and the record key of a place in the order; records up to there are left out. `caller`: who waits for the
        result."""
        super().__init__(memory, caller, "order_by", "ask for fewer records with top_n, or leave out order_by")
        self._order = order
        self._limit = limit
        self._after = after
        self._payloads = payloads
        self._run: list[Row] = []  # not sorted yet
        self._runs: list[list[Row]] = []  # each sorted; earlier runs have earlier keys
        self._records = 0
        self._worst: SortKey | None = None  # of the first term: a record beyond it is not among the first `limit`
        self._records_max = None if limit is None else limit + max(limit, SPARE_RECORDS)

    def _add(self, keys: Sequence[bytes], values: Sequence[bytes]) -> SortRoom:
        decode = self._order.decode
        documents: Sequence[object] = (
            [None] * len(values) if decode is None else [decode(value[HEADER_BYTES:]) for value in values]
        )
        leading = self._order.columns[0](keys, values, documents)
        if self._worst is not None:
            wanted = self._within(leading, self._worst)
            leading = list(compress(leading, wanted))
            keys, values = list(compress(keys, wanted)), list(compress(values, wanted))
            documents = list(compress(documents, wanted))
        sort_keys: list[tuple[object, ...]] = list(leading)
        for column in self._order.columns[1:]:
            further = column(keys, values, documents)
            sort_keys = [found + more for found, more in zip(sort_keys, further, strict=True)]
        kept = values if self._payloads else [value[:HEADER_BYTES] for value in values]
        rows = list(zip(sort_keys, keys, kept, strict=True))
        if self._after is not None:
            rows = self._behind(rows, *self._after)
        self._records += len(rows)
        self._run += rows
        self._bytes += self._size(rows)
        if len(self._run) >= RUN_RECORDS:
            self._end_run()
        fits = self.share.try_hold(self._bytes)
        if self._records_max is not None and (self._records >= self._records_max or not fits):
            most = self.share.memory.bytes_max
            alone_too_large = self._bytes > most
            self._cut()
            if alone_too_large and self._bytes > most // 2:
                # With little room left, trimming would run again for every few records.
                raise self.too_large()
            fits = self.share.try_hold(self._bytes)
        return SortRoom.GRANTED if fits else self.again()

    def forget(self) -> None:
        for run in self._runs:
            run.clear()  # whoever reads the rows holds the lists, too
        self._run, self._runs = [], []
        self._records = self._bytes = 0
        self._worst = None

    def rows(self, skip: int = 0, stop: int | None = None) -> Iterator[Row]:
        """The first `limit` records, in order."""
        self._end_run()
        self.share.shrink(self._bytes)
        return islice(self._let_go(islice(self._merged(), self._limit)), skip, stop)

    def _let_go(self, rows: Iterator[Row]) -> Iterator[Row]:
        each = self._bytes / max(1, self._records)
        for left in range(self._records, 0, -GIVE_BACK_RECORDS):
            self.share.shrink(int(left * each))
            yield from islice(rows, GIVE_BACK_RECORDS)

    def _within(self, leading: Sequence[SortKey], worst: SortKey) -> list[bool]:
        """The new records that may be among the first. With several terms, records with an equal first term may; with a
        single term they may not, as they come later in key order [3]."""
        several = len(self._order.terms) > 1
        if self._order.descending:
            return [found > worst or (several and found == worst) for found in leading]
        return [found < worst or (several and found == worst) for found in leading]

    def _behind(self, rows: list[Row], sort_keys: tuple[object, ...], key: bytes) -> list[Row]:
        """The rows behind a place: equal ones are in key order, also in a descending sort [3]."""
        if self._order.descending:
            return [row for row in rows if row[0] < sort_keys or (row[1] > key and row[0] == sort_keys)]
        return [row for row in rows if row[0] > sort_keys or (row[1] > key and row[0] == sort_keys)]

    def _end_run(self) -> None:
        if self._run:
            self._run.sort(key=_sort_keys_of, reverse=self._order.descending)
            self._runs.append(self._run)
            self._run = []

    def _merged(self) -> Iterator[Row]:
        """All records in order. Empties the runs while it is read."""
        runs = [_emptying(run) for run in self._runs]
        if len(runs) == 1:
            return runs[0]
        return heapq.merge(*runs, key=_sort_keys_of, reverse=self._order.descending)

    def _cut(self) -> None:
        """Drops the records beyond the limit."""
        assert self._limit is not None, "called where there is a limit"
        self._end_run()
        kept = list(islice(self._merged(), self._limit))
        self._runs = [kept]
        self._records = len(kept)
        self._bytes = self._size(kept)
        if len(kept) == self._limit:
            rank, value, *_ = kept[-1][0]
            assert isinstance(rank, int), "a sort key begins with a rank"
            self._worst = rank, value

    def _size(self, rows: Sequence[Row]) -> int:
        """Memory of rows, approximately. Without a loop in Python, as it runs for every record."""
        size = _RECORD_BYTES * len(rows)
        for place in (1, 2):
            size += sum(map(len, map(itemgetter(place), rows)))
        for place in range(1, 2 * len(self._order.terms), 2):
            size += sum(map(sys.getsizeof, map(itemgetter(place), map(_sort_keys_of, rows))))
        return size


def _emptying(run: list[Row]) -> Iterator[Row]:
    run.reverse()
    while run:
        yield run.pop()
