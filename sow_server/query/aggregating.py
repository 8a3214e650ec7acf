"""Aggregates in queries: records are divided into groups, and each group has a result (rules Q11, Q12).

[1]  The result is a function of the set of the records, whatever the order and the pieces in which they come.
[2]  Values are kept as columns until there are enough of them, and then go into the states of their groups, many at
     once: a state that takes twenty values costs little more than one that takes one.
[3]  A piece of work is bounded by time. Reading values, adding them, leaving out results and sorting them each stop
     after WORKING_SECONDS, and go on with the next piece.
[4]  There are at most GROUPS_MAX groups. Their memory is counted when they begin, with that of their results.
"""

from __future__ import annotations

import heapq
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Final, TypeAlias

from sow_server.engine.formats.payloads import Columns, Decode
from sow_server.engine.formats.topic_formats import zeros_before
from sow_server.engine.stored import header, payloads
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.keys import parse_path
from sow_server.engine.values.model import NEVER, MessageType
from sow_server.filters import FilterError, Meta
from sow_server.filters.aggregate_values import Types, characters, clean, clean_names
from sow_server.filters.aggregates import (
    ALL,
    Aggregation,
    ExpressionError,
    Group,
    Named,
    aggregation,
    as_json,
    group_key,
)
from sow_server.filters.restriction import Restriction
from sow_server.filters.tree import Path, walk
from sow_server.query.filtering import CACHED_CHARACTERS_MAX, CACHED_FILTERS, is_of_record
from sow_server.query.gathering import Gathering, Row
from sow_server.query.ordering import RUN_RECORDS, Ranking, Term, parse_order, print_order, sort_key
from sow_server.query.sieve import Metas, metas_of
from sow_server.query.sort_memory import SortMemory, SortRoom

if TYPE_CHECKING:
    from sow_server.engine.catalog.topics import Topic

GROUPS_MAX: Final = 100_000
WORKING_SECONDS: Final = 0.01
READ_FIRST: Final = 16
"""Records whose values are read without a look at the clock, at first."""
READ_MAX: Final = 256
"""So few that the garbage collector of Python does not look at their documents."""
CELLS_MAX: Final = 200_000
"""Values that wait for their states, at most."""
WAITING_PER_GROUP: Final = 64
WAITING_MIN: Final = 16_384
WAITING_MAX: Final = 50_000
WAITING_BYTES_MAX: Final = 4 * 2**20
_CELL_BYTES: Final = 40
_GROUP_BYTES: Final = 500
"""Memory of a group and of its place in the answer, besides its key and its states."""


@dataclass(frozen=True, slots=True)
class Aggregating:
    """The aggregates of one request, for the records of one topic. From any thread."""

    plan: Aggregation
    order: tuple[Term, ...]
    """The order of the results; empty: that of their keys."""
    columns: Columns | None
    """From payloads to the values of the plan, where all of these are fields at the top and there is such a way."""
    decode: Decode | None
    """The fields of a payload that it reads; None: it reads none, or has `columns`."""
    topic: Topic

    @property
    def text(self) -> str:
        """The canonical text of the order."""
        return print_order(self.order) if self.order else ""

    def metas(self, now_micros: int) -> Metas | None:
        """The metadata of records; None: it reads none."""
        columns = self.plan.columns
        reads = any(is_of_record(node) for tree in columns for node in walk(tree))
        return metas_of(self.topic, columns, now_micros) if reads else None


def aggregating(
    topic: Topic, groups: Sequence[Named], items: Sequence[Named], having: str, order_by: str, restriction: Restriction
) -> Aggregating:
    """The aggregates of a request, within the part of the topic that its caller may see.

    Raises StoreError: EXPRESSION_INVALID or ORDER_INVALID with the position and a caret, in its details also as
    `position`; UNSUPPORTED_FOR_MESSAGE_TYPE if it reads fields of a binary topic.
    """
    settings = topic.settings
    length = sum([len(text) for _, text in (*groups, *items)]) + len(having)
    compiled = _compiled if length <= CACHED_CHARACTERS_MAX else _compiled.__wrapped__
    try:
        plan = compiled(tuple(groups), tuple(items), having, settings.key, restriction.hidden, _is_flat(topic))
    except ExpressionError as error:
        details = {"position": str(error.position)} if error.position >= 0 else None
        raise StoreError(Reason.EXPRESSION_INVALID, error.message, field=error.field, details=details) from None
    field = "aggregate" if items else "group_by"
    names = dict.fromkeys(
        [str(node.steps[0]) for tree in plan.columns for node in walk(tree) if isinstance(node, Path)]
    )
    if names and settings.message_type is MessageType.BINARY:
        raise StoreError(
            Reason.UNSUPPORTED_FOR_MESSAGE_TYPE,
            f"{field}: topic {topic.name} is binary, its payloads have no fields; ask for metadata such as @key",
            field=field,
        )
    if settings.message_type is MessageType.FIX and (zeros := zeros_before(names)):
        raise StoreError(Reason.EXPRESSION_INVALID, f"{field}: {zeros}", field=field)
    columns = _columns(topic, plan)
    decode = topic.format.decoder(tuple(names)) if names and columns is None else None
    return Aggregating(plan, _order(order_by, (*plan.names, *plan.items)), columns, decode, topic)


def _columns(topic: Topic, plan: Aggregation) -> Columns | None:
    """See `Aggregating.columns`."""
    found = [tree.steps[0] for tree in plan.columns if isinstance(tree, Path) and len(tree.steps) == 1]
    names = list(dict.fromkeys(map(str, found)))
    columns = topic.format.columns(names) if len(found) == len(plan.columns) else None
    if columns is None or len(names) == len(found):
        return columns
    places, several = list(map(names.index, map(str, found))), columns

    def in_places(payloads: Sequence[bytes]) -> list[Sequence[object]]:
        of_names = several(payloads)
        return [of_names[place] for place in places]

    return in_places


def _is_flat(topic: Topic) -> bool:
    return topic.settings.message_type in (MessageType.FIX, MessageType.NVFIX)


@lru_cache(maxsize=CACHED_FILTERS)
def _compiled(
    groups: tuple[Named, ...],
    items: tuple[Named, ...],
    having: str,
    key: tuple[str, ...],
    hidden: tuple[tuple[str, ...], ...],
    numeric: bool,
) -> Aggregation:
    return aggregation(
        groups, items, having, key_paths=[parse_path(path) for path in key], hidden=hidden, numeric=numeric
    )


def _order(text: str, names: Sequence[str]) -> tuple[Term, ...]:
    """The order of results: their fields have these names."""
    if not text:
        return ()
    try:
        return parse_order(text, names)
    except FilterError as error:
        details = {"position": str(error.position)} if error.position >= 0 else None
        message = f"order_by: {error.message}"
        raise StoreError(Reason.ORDER_INVALID, message, field="order_by", details=details) from None


_Places: TypeAlias = defaultdict[object, list[int]]
_Bucket: TypeAlias = tuple[tuple[object, ...], Sequence[int]]
"""The values that name a group, and the places of its records."""
_Sorted: TypeAlias = tuple[tuple[object, ...], Group]
"""The sort keys of a result, with the key of its group as the last one."""
_sort_keys_of: Final = itemgetter(0)


class Aggregator(Gathering):
    """Owns the groups of one query. `add` takes its records, `rows` gives the results."""

    def __init__(
        self,
        asked: Aggregating,
        now_micros: int,
        memory: SortMemory,
        caller: str = "",
        *,
        clock: Callable[[], float],
    ) -> None:
        """`clock`: in seconds."""
        field = "aggregate" if asked.plan.items else "group_by"
        super().__init__(memory, caller, field, "group by fewer values, or leave out records with a filter")
        self._asked: Final = asked
        self._plan: Final = asked.plan
        self._metas = asked.metas(now_micros)
        self._meta = Meta("", 0, 0, None, asked.topic.name, now_micros)
        self._clock = clock
        self._at_once = READ_FIRST
        self._keys: Sequence[bytes] = ()
        """Records whose values have not been read; likewise below."""
        self._values: Sequence[bytes] = ()
        self._next = 0
        """The place of the next one among them."""
        self._columns: list[list[object]] = [[] for _ in asked.plan.columns]
        self._types: list[Types] = [set() for _ in asked.plan.columns]
        self._states_of: defaultdict[int, list[int]] = defaultdict(list)
        """The numbers of the states that take a column."""
        for number, (column, _) in enumerate(asked.plan.states):
            self._states_of[column].append(number)
        self._waiting = 0
        """Records whose values are in the columns, and not divided."""
        self._waiting_bytes = 0
        """The memory of all values in the columns."""
        self._places: defaultdict[type, _Places] = defaultdict(lambda: defaultdict(list))
        """The places of the waiting records in the columns, by the value that names their group and its type."""
        self._several: defaultdict[tuple[tuple[type, object], ...], list[int]] = defaultdict(list)
        """The same by several values, or by values of several types."""
        self._buckets: list[_Bucket] = []
        self._groups: dict[str, Group] = {}
        self.ungrouped = 0
        """Records in no group."""
        self._left: Iterator[tuple[str, Group]] | None = None
        """Groups that are not in their order yet."""
        self._run: list[_Sorted] = []
        self._runs: list[list[_Sorted]] = []
        self.forget()

    # -- the pieces ---------------------------------------------------------------------------------------------------

    def _add(self, keys: Sequence[bytes], values: Sequence[bytes]) -> SortRoom:
        self._keys, self._values, self._next = keys, values, 0
        return self._work()

    @property
    def busy(self) -> bool:
        return bool(self._keys) or bool(self._buckets)

    def work(self) -> SortRoom:
        with self.working():
            return self._work()

    def settle(self) -> SortRoom | None:
        with self.working():
            if self._waiting or self.busy:
                return self._work(ends=True)
            if self._left is None:
                self._left = iter(self._groups.items())
            return self._sort_some(self._left)

    def _work(self, *, ends: bool = False) -> SortRoom:
        stops = self._clock() + WORKING_SECONDS
        while self._clock() < stops:
            if self._buckets:
                self._fold(stops)
            elif self._keys:
                self._read()
            elif self._waiting and ends:
                self._begin_folding()
            else:
                break
        return self._held()

    def _held(self) -> SortRoom:
        return SortRoom.GRANTED if self.share.try_hold(self._bytes) else self.again()

    # -- from records to columns --------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Reads the values of the next records, and has them divided once there are enough [2]."""
        began, size = self._clock(), self._at_once
        keys, values = self._keys[self._next : self._next + size], self._values[self._next : self._next + size]
        self._next += size
        if self._next >= len(self._keys):
            self._keys, self._values = (), ()
        found = self._values_of(keys, values)
        count = len(self._plan.names)
        naming = list(map(clean_names, found[:count]))
        self._divide(naming)
        for place, (values_of_it, types) in enumerate((*naming, *map(clean, found[count:]))):
            if place >= count:
                self._columns[place] += values_of_it
                self._types[place] |= types
            self._count_waiting(characters(values_of_it, types))
        self._waiting += len(values)
        self._count_waiting(_CELL_BYTES * (len(self._columns) + 1) * len(values))
        took = self._clock() - began
        if took < WORKING_SECONDS / 4:
            self._at_once = min(2 * size, max(1, READ_MAX // max(1, len(self._columns) // 4)))
        elif took > WORKING_SECONDS / 2:
            self._at_once = max(1, size // 4)
        most = min(WAITING_MAX, CELLS_MAX // max(1, len(self._columns)))
        enough = min(most, max(WAITING_MIN, WAITING_PER_GROUP * len(self._groups)))
        if self._waiting >= enough or self._waiting_bytes >= WAITING_BYTES_MAX:
            self._begin_folding()

    def _values_of(self, keys: Sequence[bytes], values: Sequence[bytes]) -> Sequence[Sequence[object]]:
        """The values of records, a column for each of the plan."""
        asked, rows = self._asked, list[tuple[object, ...]]()
        if asked.columns is not None:
            return asked.columns(payloads(values))
        if not self._plan.columns:
            return ()
        documents = repeat(None, len(values)) if asked.decode is None else map(asked.decode, payloads(values))
        metas = repeat(self._meta, len(values)) if self._metas is None else self._metas(keys, values)
        self._plan.rows(documents, metas, rows.append)
        return list(zip(*rows, strict=True))

    def _count_waiting(self, size: int) -> None:
        self._waiting_bytes += size
        self._bytes += size

    def _divide(self, naming: Sequence[tuple[Sequence[object], Types]]) -> None:
        """Divides the next records among their groups. `naming`: the values that name these, and their types."""
        if not naming:
            return
        column, types = naming[0]
        if len(naming) == 1 and len(types) == 1 and bool not in types:
            places = self._places[next(iter(types))]
            for place, value in enumerate(column, self._waiting):
                places[value].append(place)
            return
        # 1 == 1.0 == True in Python: only values of one type are looked up as they are.
        several = self._several
        names = [zip(map(type, column), column, strict=True) for column, _ in naming]
        for place, name in enumerate(zip(*names, strict=True), self._waiting):
            several[name].append(place)

    def _begin_folding(self) -> None:
        count, self._waiting = self._waiting, 0
        if not self._plan.names:
            self._buckets.append(((), range(count)))
            return
        for places in self._places.values():
            self._buckets += [((value,), found) for value, found in places.items()]
            places.clear()
        for name, found in self._several.items():
            self._buckets.append((tuple([value for _, value in name]), found))
        self._several.clear()

    # -- from columns to groups ---------------------------------------------------------------------------------------

    def _fold(self, stops: float) -> None:
        """Adds waiting values to the states of their groups."""
        of_states = [(self._columns[at], self._types[at], numbers) for at, numbers in self._states_of.items()]
        while self._buckets and self._clock() < stops:
            named, places = self._buckets.pop()
            group = self._group(named)
            if group is None:
                self.ungrouped += len(places)
                continue
            group.records += len(places)
            # Half the time of asking the column for each: it runs for every value.
            of_group: Callable[[list[object]], Sequence[object]] = _whole
            if named:
                of_group = itemgetter(*places) if len(places) > 1 else itemgetter(slice(places[0], places[0] + 1))
            states = group.states
            for column, types, numbers in of_states:
                some = of_group(column)
                for number in numbers:
                    self._bytes += states[number].add(some, types)
        if not self._buckets:
            self._clear_columns()

    def _group(self, named: tuple[object, ...]) -> Group | None:
        """The group of these values; None: they name none."""
        key = group_key(named) if named else ALL
        if key is None:
            return None
        group = self._groups.get(key)
        if group is None:
            if len(self._groups) >= GROUPS_MAX:
                self.close()
                raise StoreError(
                    Reason.RESULT_TOO_LARGE,
                    f"{self.share.field}: more groups than the limit of {GROUPS_MAX}; {self._advice}",
                    field=self.share.field,
                )
            group = self._groups[key] = self._plan.group()
            self._bytes += _GROUP_BYTES + 4 * len(key) + sum([state.BYTES for state in group.states])
        for place, value in enumerate(named):
            if type(value) is str:
                group.is_text[place] = True
        return group

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return len(self._groups)

    # -- from groups to results ---------------------------------------------------------------------------------------

    def _sort_some(self, groups: Iterator[tuple[str, Group]]) -> SortRoom | None:
        """Puts some groups into their order; None: all of them are."""
        stops = self._clock() + WORKING_SECONDS
        order, looks = self._asked.order, bool(self._asked.order) or self._plan.having is not None
        for at, (key, group) in enumerate(groups, 1):
            sort_keys: tuple[object, ...] = ()
            if looks:
                results = self._plan.results(key, group, self._meta)
                if results is None:
                    continue
                for term in order:
                    assert isinstance(term.field, Path), "a name of a result"
                    ranking = Ranking.TURNED_DESCENDING if term.descending else Ranking.ASCENDING
                    sort_keys += sort_key(results[str(term.field.steps[0])], ranking)
                self._bytes += sum(map(sys.getsizeof, sort_keys[1::2]))
            self._run.append(((*sort_keys, key.encode()), group))
            if len(self._run) >= RUN_RECORDS:
                self._end_run()
            if (looks or at % 64 == 0) and self._clock() >= stops:
                return self._held()
        self._end_run()
        room = self._held()
        return None if room is SortRoom.GRANTED else room

    def _end_run(self) -> None:
        self._run.sort(key=_sort_keys_of)
        self._runs.append(self._run)
        self._run = []

    def rows(self, skip: int = 0, stop: int | None = None) -> Iterator[Row]:
        """The results as stored records, in order. Only those that are returned are computed, each when it is read."""
        self.share.shrink(self._bytes)
        return self._results(islice(heapq.merge(*self._runs, key=_sort_keys_of), skip, stop))

    def _results(self, groups: Iterator[_Sorted]) -> Iterator[Row]:
        for sort_keys, group in groups:
            key = sort_keys[-1]
            assert isinstance(key, bytes), "the last one is the key"
            results = self._plan.results(key.decode(), group, self._meta)
            assert results is not None, "it is in the answer"
            payload = as_json(results)
            yield sort_keys, key, _header(len(payload)) + payload

    def forget(self) -> None:
        self._keys, self._values = (), ()
        for column in self._columns:
            column.clear()
        for types in self._types:
            types.clear()
        self._waiting = self._waiting_bytes = self._bytes = self.ungrouped = 0
        self._places.clear()
        self._several.clear()
        self._buckets.clear()
        self._left = None
        self._groups.clear()
        self._run = []
        for run in self._runs:
            run.clear()  # whoever reads the rows holds the lists, too
        self._runs = []
        if not self._plan.names:
            self._groups[ALL] = self._plan.group()  # of no record as well

    def _clear_columns(self) -> None:
        self._bytes -= self._waiting_bytes
        self._waiting_bytes = 0
        for column in self._columns:
            column.clear()
        for types in self._types:
            types.clear()


def _whole(column: list[object]) -> Sequence[object]:
    return column


def _header(payload_bytes: int) -> bytes:
    """A result is no record: it has neither version nor times."""
    return header(origin=0, payload_bytes=payload_bytes, version=0, publish_time=0, expire_time=NEVER, sequence=0)
