"""The plan of a view: its definition, compiled for its source (rules V2 to V4). Pure.

[1]  One function reads a column of records: it tests `where`, and makes a row of the values that name the group, of
     the arguments of aggregates, and of the record's key.
[2]  Rows are divided among groups. A group takes what came and what went in one go, so that its cost is that of a
     group, not of each record.
[3]  What cannot be in the view is `ungrouped`: a record in no group (rule Q12), one whose group would have an empty
     key, which no record has, and one whose payload would be beyond PAYLOAD_BYTES_MAX.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from json.encoder import encode_basestring
from typing import Any, Final, TypeAlias

import msgspec

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.derived.plans import Computed, Entries, Grouped, Row
from sow_server.engine.derived.plans import Group as PlannedGroup
from sow_server.engine.derived.plans import Share as PlannedShare
from sow_server.engine.formats.topic_formats import zeros_before
from sow_server.engine.stored import ordered, payloads, read_ordered
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.fields import INTEGER_LIMIT, number_of
from sow_server.engine.values.keys import parse_path
from sow_server.engine.values.model import MessageType
from sow_server.engine.values.views import VIEWS_MAX, ViewDefinition
from sow_server.filters import FilterError, Meta, parse
from sow_server.filters.aggregate_calls import LONG
from sow_server.filters.aggregate_values import Count, Distinct, Extreme, Sum, Types, clean, clean_names
from sow_server.filters.aggregates import (
    ALL,
    Aggregation,
    ExpressionError,
    Group,
    Scalar,
    aggregation,
    group_key,
    reads_now,
    record_values,
    scalar_json,
)
from sow_server.filters.compiler import Compilation
from sow_server.filters.tree import Expression, Path, walk
from sow_server.query.filtering import is_of_record
from sow_server.query.sieve import metas_of

PAYLOAD_BYTES_MAX: Final = 2**20
"""A longer payload is not put into a view."""
NAMES_KEPT: Final = 10_000
"""Names of groups whose keys a plan remembers."""
_FIELD_BYTES: Final = 200
"""Memory of a field of a document, and of an extreme."""
_GROUP_BYTES: Final = 600
"""Memory of a group besides its states and texts."""
_SAME: Final = object()
_encode: Final = msgspec.msgpack.Encoder().encode
Name: TypeAlias = object
"""A name of a group: a text, or several values with their types. 1 == 1.0 == True in Python."""


def view_plan(definition: ViewDefinition, source: Topic) -> Plan:
    """Compiles a definition. Raises StoreError: EXPRESSION_INVALID or FILTER_INVALID with the position and a caret, in
    its details also as `position`; UNSUPPORTED_FOR_MESSAGE_TYPE if it reads fields of a binary topic."""
    if not definition.select and not definition.group_by:
        raise _refused(Reason.EXPRESSION_INVALID, "view.select", "needs at least one expression, as in COUNT(*) AS n")
    where = _where(definition.where)
    settings = source.settings
    flat = settings.message_type in (MessageType.FIX, MessageType.NVFIX)
    key_paths = [parse_path(path) for path in settings.key]
    groups: Aggregation | None = None
    try:
        computed = None if definition.group_by else record_values(definition.select)
        if computed is None:
            groups = aggregation(definition.group_by, definition.select, key_paths=key_paths, numeric=flat)
    except ExpressionError as error:
        raise _as_store_error(error) from None
    _check_now(definition)
    columns = tuple(computed.trees) if computed is not None else groups.columns if groups is not None else ()
    if groups is not None and any(isinstance(make(), Distinct) for _, make in groups.states):
        message = "COUNT(DISTINCT …) is for queries: a view would have to keep all values"
        raise _refused(Reason.EXPRESSION_INVALID, "view.select", message)
    trees = [*columns, *([] if where is None else [where])]
    names = dict.fromkeys([str(node.steps[0]) for tree in trees for node in walk(tree) if isinstance(node, Path)])
    if names and settings.message_type is MessageType.BINARY:
        message = f"topic {source.name} is binary, its payloads have no fields; ask for metadata such as @key"
        raise _refused(Reason.UNSUPPORTED_FOR_MESSAGE_TYPE, "view.select", message)
    if settings.message_type is MessageType.FIX and (zeros := zeros_before(names)):
        raise _refused(Reason.EXPRESSION_INVALID, "view.select", zeros)
    return Plan(source, columns, where, tuple(names), groups, () if computed is None else computed.names)


def check_definition(
    definition: ViewDefinition,
    topics: Mapping[str, Topic],
    declared: Collection[str],
    views: Mapping[str, ViewDefinition],
) -> None:
    """Raises StoreError for the new definition of a view that could not be made: TOPIC_NOT_FOUND, INVALID_ARGUMENT, and
    as `view_plan`. `declared`: topics that the same file makes, `views`: all views of the file."""
    name = definition.source
    source = topics.get(name)
    if name in views or (source is not None and source.view is not None):
        raise _refused(
            Reason.INVALID_ARGUMENT, "view.source", f"{name} is a view, and a view is no source of another one"
        )
    if source is None or source.reserved:
        if name not in declared:
            raise _refused(Reason.TOPIC_NOT_FOUND, "view.source", f"there is no topic {name}")
        return
    view_plan(definition, source)
    others = sum([view.name not in views for view in source.views])
    count = others + sum([view.source == name for view in views.values()])
    if count > VIEWS_MAX:
        message = f"{name} would have {count} views, more than {VIEWS_MAX}"
        raise _refused(Reason.INVALID_ARGUMENT, "view.source", message)


class Plan:
    """A compiled definition. Used by the writer's thread."""

    def __init__(
        self,
        source: Topic,
        columns: Sequence[Expression],
        where: Expression | None,
        names: Sequence[str],
        groups: Aggregation | None,
        items: Sequence[str],
    ) -> None:
        """`groups`: None for a view with a record for each record, whose fields are `items`."""
        self._source: Final = source
        self.per_record: Final = groups is None
        trees = [*columns, *([] if where is None else [where])]
        reads_metadata = any(is_of_record(node) for tree in trees for node in walk(tree))
        self._decode: Final = source.format.decoder(names) if names else None
        key_paths = [parse_path(path) for path in source.settings.key]
        self._fold: Final = Compilation(trees, frozenset(key_paths)).keyed_rows(columns, where)
        self._metas: Final = metas_of(source, trees, 0) if reads_metadata else None
        self.meta: Final = Meta("", 0, 0, None, source.name, 0)
        self._groups = groups
        items = items if groups is None else groups.items
        self.members: Final = [_member(name) for name in items]
        """The names of the fields of a document, but for those that name its group."""
        self.drawn: Final = None if groups is None or groups.plain is None else _drawn(groups, self.members)
        """Where all fields are plain aggregates: their names, with the state of each and what it amounts to."""
        self._keys: dict[Name, bytes] = {}
        """The keys of groups by name; empty for a name that names none."""
        self.types: Final[list[Types]] = [set() for _ in columns[0 if groups is None else len(groups.names) :]]
        """The types that have been among the arguments of aggregates, by column."""
        self._no_columns: Final[Sequence[Sequence[object]]] = [()] * (len(columns) + 2)
        states = () if groups is None else groups.states
        made = [make() for _, make in states]
        first = 0 if groups is None else len(groups.names)
        self.moving: Final = [
            (at, column - first) for at, (column, _) in enumerate(states) if isinstance(made[at], Count | Sum)
        ]
        """The states that values are added to and taken from, and their columns in a row."""
        self.kept: Final = [
            (at, states[at][0] - first, state) for at, state in enumerate(made) if isinstance(state, Extreme)
        ]
        """The states whose values are kept in order, and their columns."""
        self.greatest: Final = [state.greatest for _, _, state in self.kept]
        self.group_bytes: Final = _GROUP_BYTES + sum([state.BYTES + _FIELD_BYTES for state in made])
        """Memory of a group, besides its key: about, as texts may be longer or shorter."""
        self._numeric: Final = source.settings.message_type in (MessageType.FIX, MessageType.NVFIX)

    @property
    def groups(self) -> Aggregation:
        """The groups of the view."""
        assert self._groups is not None, "a view with a record for each record has none"
        return self._groups

    # -- from records to rows ([1]) -----------------------------------------------------------------------------------

    def rows(self, keys: Sequence[bytes], values: Sequence[bytes]) -> list[Row]:
        """A row has the values of a record, and its key; for a view of groups the name of its group in front of the
        arguments of aggregates, which are clean."""
        rows: list[Row] = []
        if not keys:
            return rows
        documents: Iterable[object] = repeat(None, len(keys))
        if self._decode is not None:
            documents = map(self._decode, payloads(values))
        metas = repeat(self.meta, len(keys)) if self._metas is None else self._metas(keys, values)
        self._fold(documents, metas, keys, rows.append)
        if self._groups is None or not rows:
            return rows
        count = len(self._groups.names)
        columns = list(zip(*rows, strict=True))
        arguments: list[Sequence[object]] = []
        for column, known in zip(columns[count:-1], self.types, strict=True):
            cleaned, types = clean(column)
            arguments.append(cleaned)
            known.update(types)
        names: Iterable[Name] = _names(columns[:count]) if count else repeat(ALL, len(rows))
        return list(zip(names, *arguments, columns[-1], strict=True))

    def compute(self, gone: Sequence[Row], come: Sequence[Row]) -> Computed:
        before, left_out = self._documents(gone)
        after, more_left_out = self._documents(come)
        return Computed(before, after, more_left_out - left_out)

    def _documents(self, rows: Sequence[Row]) -> tuple[dict[bytes, bytes], int]:
        """Payloads by record key, and how many records have none [3]."""
        found: dict[bytes, bytes] = {}
        for *values, key in rows:
            payload = self._payload(values)
            if payload is not None:
                assert isinstance(key, bytes), "a row ends with its record's key"
                found[key] = payload
        return found, len(rows) - len(found)

    def _payload(self, values: Sequence[object]) -> bytes | None:
        members = "".join([name + _json(value) for name, value in zip(self.members, values, strict=True)])
        payload = f"{{{members[1:]}}}".encode(errors="replace")
        return payload if len(payload) <= PAYLOAD_BYTES_MAX else None

    # -- from rows to groups ([2]) ------------------------------------------------------------------------------------

    def divide(self, gone: Sequence[Row], come: Sequence[Row]) -> Grouped:
        went: defaultdict[Name, list[Row]] = defaultdict(list)
        for row in gone:
            went[row[0]].append(row)
        came: defaultdict[Name, list[Row]] = defaultdict(list)
        for row in come:
            came[row[0]].append(row)
        shares: dict[bytes, Share] = {}
        ungrouped, known = 0, self._keys
        for name in [*came, *[name for name in went if name not in came]]:
            key = known.get(name)
            if key is None:
                key = self._key_of(name)
            here, there = came.get(name, ()), went.get(name, ())
            if not key:
                ungrouped += len(here) - len(there)
            elif here != there or _types_of(here) != _types_of(there):
                share = shares.get(key)
                if share is None:
                    shares[key] = Share(name, here, there)
                else:  # another name of the same group, such as 1 and "1"
                    share.add(name, here, there)
        return Grouped(shares, ungrouped)

    def _key_of(self, name: Name) -> bytes:
        """The key of the group of a name; empty: it names none."""
        if not self.groups.names:
            found: str | None = ALL
        elif type(name) is str:
            found = group_key((name,))
        else:
            assert isinstance(name, tuple), "several values, or one that is no text"
            found = group_key([value for _, value in name])
        if len(self._keys) >= NAMES_KEPT:
            self._keys.clear()
        key = self._keys[name] = found.encode() if found else b""
        return key

    # -- groups -----------------------------------------------------------------------------------------------------

    def new(self, key: bytes) -> ViewGroup:
        groups = self.groups
        states = [make() for _, make in groups.states]
        count = len(groups.names)
        texts, extremes = [0] * count, [b""] * len(self.kept)
        shown: list[bytes | None] = [None] * len(self.kept)
        memory = self.group_bytes + 4 * len(key)
        return ViewGroup(
            states,
            [False] * count,
            plan=self,
            key=key,
            texts=texts,
            extremes=extremes,
            shown=shown,
            memory=memory,
        )

    def load(self, key: bytes, row: bytes) -> ViewGroup:
        group = self.new(key)
        group.records, group.texts, moving, group.extremes = msgspec.msgpack.decode(row)
        group.is_text = [count > 0 for count in group.texts]
        for (at, _), dumped in zip(self.moving, moving, strict=True):
            state = group.states[at]
            assert isinstance(state, Count | Sum), "it was made so"
            state.load(dumped)
        group.document = group.draw() if group.records else b""
        return group

    def give(self, group: PlannedGroup, share: PlannedShare) -> Sequence[Entries]:
        own: ViewGroup = group  # type: ignore[assignment]  # this plan has made both
        brought: Share = share  # type: ignore[assignment]  # as above
        come, gone = brought.come, brought.gone
        more = len(come) - len(gone)
        own.records += more
        states, types = own.states, self.types
        if self.moving:
            added: Sequence[Sequence[object]] = tuple(zip(*come, strict=True)) if come else self._no_columns
            taken: Sequence[Sequence[object]] = tuple(zip(*gone, strict=True)) if gone else self._no_columns
            for at, column in self.moving:
                states[at].move(added[column + 1], taken[column + 1], types[column])  # type: ignore[attr-defined]  # a Count or a Sum
        if (more and own.texts) or brought.others:
            self._name(own, brought)
        if not self.kept:
            return ()
        return [self._entries(column + 1, state.greatest, come, gone) for _, column, state in self.kept]

    def _name(self, group: ViewGroup, share: Share) -> None:
        """Counts the records of a group whose values are texts: what is shown of it may be another value now."""
        for name, more in ((share.name, share.more), *share.others):
            for at, is_text in enumerate(_are_texts(name)):
                group.texts[at] += is_text * more
        is_text_now = [count > 0 for count in group.texts]
        if is_text_now != group.is_text:
            group.is_text, group.named = is_text_now, None

    def _entries(self, column: int, greatest: bool, come: Sequence[Row], gone: Sequence[Row]) -> Entries:
        """The changes of the values of a column. A value that stays is none."""
        before = {row[-1]: row[column] for row in gone}
        entries = Entries([], [])
        for row in come:
            value, key = row[column], row[-1]
            old = before.get(key, _SAME)
            if type(old) is type(value) and old == value:
                del before[key]
            elif (place := self._ordered(value, greatest)) is not None:
                entries.come.append((place, key))  # type: ignore[arg-type]  # a row ends with its record's key
        for key, value in before.items():
            if (place := self._ordered(value, greatest)) is not None:
                entries.gone.append((place, key))  # type: ignore[arg-type]  # as above
        return entries

    def _ordered(self, value: object, greatest: bool) -> bytes | None:
        """A value in order; None: nothing is compared with it. Of equal numbers an integer is preferred."""
        if self._numeric and type(value) is str:
            value = value if (number := number_of(value)) is None else number
        if value is None or type(value) is dict:
            return None
        return ordered(value, integers_last=greatest)  # type: ignore[arg-type]  # a clean value: a scalar, null or LONG


class Share:
    """The share of some records in a group: rows that come and rows that go, and the names that the records have for
    the group."""

    __slots__ = ("come", "gone", "more", "name", "others")

    def __init__(self, name: Name, come: Sequence[Row], gone: Sequence[Row]) -> None:
        self.name = name
        self.come = come
        self.gone = gone
        self.more = len(come) - len(gone)
        """So many more records have this name."""
        self.others: list[tuple[Name, int]] = []
        """Other names, with the same."""

    def add(self, name: Name, come: Sequence[Row], gone: Sequence[Row]) -> None:
        """Adds rows with another name."""
        self.come = [*self.come, *come]
        self.gone = [*self.gone, *gone]
        self.others.append((name, len(come) - len(gone)))


@dataclass(slots=True, kw_only=True)
class ViewGroup(Group):
    """A group of a view."""

    plan: Plan
    key: bytes
    texts: list[int]
    """For each value that names it: how many records have a text there."""
    extremes: list[bytes]
    shown: list[bytes | None]
    """The extremes whose values the states have."""
    memory: int
    document: bytes = b""
    named: Mapping[str, bool | int | float | str | None] | None = None
    """The values that name it; None: they may be others now."""
    head: str = ""
    """The same in its document."""

    def draw(self) -> bytes:
        plan = self.plan
        groups = plan.groups
        if self.named is None:
            self.named = groups.named(self.key.decode(), self.is_text)
            self.head = "".join([_member(name) + scalar_json(value) for name, value in self.named.items()])
        if plan.kept:
            shown = self.shown
            for slot, place in enumerate(self.extremes):
                if place is not shown[slot]:
                    shown[slot] = place
                    at, _, state = plan.kept[slot]
                    value = read_ordered(place, 0, integers_last=state.greatest)[0] if place else None
                    self.states[at].value = value  # type: ignore[attr-defined]  # an Extreme
        members = self.head
        if plan.drawn is None:
            values = groups.values(self.named, groups.slot_values(self), plan.meta)
            for name, value in zip(plan.members, values, strict=True):
                members += name + _finite_json(value)
        else:
            states = self.states
            for name, at, value_of in plan.drawn:
                members += name + _finite_json(value_of(states[at]) if at >= 0 else self.records)
        return f"{{{members[1:]}}}".encode(errors="replace")

    def dump(self) -> bytes:
        states = self.states
        moved = [states[at].dump() for at, _ in self.plan.moving]  # type: ignore[attr-defined]  # a Count or a Sum
        return _encode((self.records, self.texts, moved, self.extremes))


def _types_of(rows: Sequence[Row]) -> list[list[type]]:
    """Rows may be equal and have different types: 1 == 1.0 == True in Python."""
    return [list(map(type, row)) for row in rows]


def _names(columns: Sequence[Sequence[object]]) -> Iterable[Name]:
    """The names of the groups of many records."""
    cleaned = list(map(clean_names, columns))
    if len(cleaned) == 1:
        column, types = cleaned[0]
        if types == {str}:
            return column
        return [value if type(value) is str else ((type(value), value),) for value in column]
    pairs = [zip(map(type, column), column, strict=True) for column, _ in cleaned]
    return zip(*pairs, strict=True)


def _are_texts(name: Name) -> Sequence[bool]:
    """For each value of a name: true if it is a text."""
    if type(name) is str:
        return (True,)
    assert isinstance(name, tuple), "several values, or one that is no text"
    return [kind is str for kind, _ in name]


def _member(name: str) -> str:
    """The beginning of a field, behind another one."""
    return f",{encode_basestring(name)}:"


def _drawn(groups: Aggregation, members: Sequence[str]) -> list[tuple[str, int, Callable[[Any], Scalar]]]:
    """The fields of a document, where each is an aggregate: name, state, and its value; -1: the group itself."""
    slots = [groups.slots[number] for number in groups.plain or ()]
    return [(name, slot.state, slot.value) for name, slot in zip(members, slots, strict=True)]


def _finite_json(value: Scalar) -> str:
    """The value of an aggregate, which may be infinite."""
    kind = type(value)
    if kind is int:
        return repr(value)
    if kind is float:
        return repr(value) if value - value == 0 else "null"  # type: ignore[operator]  # narrowed by `type() is`
    return scalar_json(value)


def _json(value: object) -> str:
    """A field of a document. Documents are nested at most 256 deep, so that none is too deep for this."""
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return scalar_json(value)  # type: ignore[arg-type]  # narrowed by `type() is`
    if kind is float:
        number: float = value  # type: ignore[assignment]  # as above
        return scalar_json(number) if number - number == 0 else "null"
    if value is LONG:
        return "null"
    try:
        return _dumps(value)
    except ValueError:  # an infinite number somewhere inside
        return _dumps(_finite_inside(value))


def _dumps(value: object) -> str:
    """A value that JSON does not have is null, such as the bytes of a msgpack document; names that it does not have
    are left out with their values."""
    return json.dumps(
        value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, skipkeys=True, default=lambda _: None
    )


def _finite_inside(value: object) -> object:
    """A value with null in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite_inside(one) for name, one in value.items() if _finite_inside(name) is name}
    if isinstance(value, list):
        return list(map(_finite_inside, value))
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return None if isinstance(value, int) and not -INTEGER_LIMIT < value < INTEGER_LIMIT else value


# --- checks ----------------------------------------------------------------------------------------------------------


def _where(text: str) -> Expression | None:
    if not text:
        return None
    try:
        return parse(text)
    except FilterError as error:
        raise _refused(Reason.FILTER_INVALID, "view.where", error.message, error.position) from None


def _check_now(definition: ViewDefinition) -> None:
    """Raises StoreError for an expression whose value changes with time."""
    for name, texts in (("group_by", definition.group_by), ("select", definition.select)):
        for at, (_, text) in enumerate(texts):
            if reads_now(text):
                raise _reads_now(f"view.{name}[{at}]")
    if definition.where and reads_now(definition.where, condition=True):
        raise _reads_now("view.where")


def _reads_now(field_: str) -> StoreError:
    message = "NOW_MICROS() changes without any change of a record, so a view cannot use it"
    return _refused(Reason.EXPRESSION_INVALID, field_, message)


def _as_store_error(error: ExpressionError) -> StoreError:
    """An error about an aggregate is about what the view selects."""
    field_ = f"view.{error.field.replace('aggregate', 'select')}"
    message = error.message.removeprefix(f"{error.field}: ")
    return _refused(Reason.EXPRESSION_INVALID, field_, message, error.position)


def _refused(reason: Reason, field_: str, message: str, position: int = -1) -> StoreError:
    details = {"position": str(position)} if position >= 0 else None
    return StoreError(reason, f"{field_}: {message}", field=field_, details=details)
