"""Plans how a query finds its records: by keys, ranges of keys, or indexes, from the conditions in its filter (rule
Q3). Pure: nothing is read here. The scan, which reads, chooses among the ways that a plan leaves open.

    [1]  A plan never loses a record that matches the filter. It only narrows the search: the whole filter is evaluated
         for each record that is found. So a plan never changes a result.
    [2]  Points (`=` and IN on all key fields, or on @key) come first: each is one look-up, and there are at most
         PROBES_MAX.
    [3]  Otherwise ranges of record keys: from leading key fields with fixed values, a prefix of the next one, and
         comparisons of @key. Without any of these the one range is the whole topic: a scan.
    [4]  The index bounds are listed besides: first those that consist of points and of few intervals.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from sow_server.engine.catalog import indexes
from sow_server.engine.values.fields import Kind, Steps
from sow_server.engine.values.keys import escape, join
from sow_server.filters import Filter
from sow_server.filters.bounds import Bound, bounds_of, key_prefixes, key_texts
from sow_server.filters.tree import Field, Metadata, MetadataName, Path

PROBES_MAX: Final = 10_000
"""Look-ups, or ranges, of one plan; a filter that needs more gets the next best plan."""
CANDIDATES_MAX: Final = 4
"""Index bounds that are compared with each other."""


class Access(enum.IntEnum):
    """The way in which records are found; numbered as in `sow.v1.QueryPlan.Access`."""

    POINTS = 1
    KEY_RANGES = 2
    INDEX = 3
    SCAN = 4
    NOTHING = 5


class Range(NamedTuple):
    """Record keys from `start` to `stop` (excluded)."""

    start: bytes
    stop: bytes


ABOVE_ALL: Final = b"\xff"
"""Above every record key: no UTF-8 text begins with it."""
EVERYTHING: Final = (Range(b"", ABOVE_ALL),)


class IndexBound(NamedTuple):
    """A way through an index: records with an entry in one of its intervals (start, stop)."""

    steps: Steps
    intervals: tuple[tuple[bytes, bytes], ...]
    points: bool
    """True if each interval is one value, so that its entries are in key order."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The records to read: those of `points`, or of `ranges` (a scan: all), or, if that is less, those of one of
    `bounds`."""

    access: Access
    points: tuple[bytes, ...] = ()
    """Record keys, in order."""
    ranges: tuple[Range, ...] = ()
    """In order, not overlapping."""
    bounds: tuple[IndexBound, ...] = ()


NOTHING: Final = Plan(Access.NOTHING)
SCAN: Final = Plan(Access.SCAN, ranges=EVERYTHING)
_KEY: Final = Metadata(MetadataName.KEY)


def plan(
    tree: Filter | None,
    *,
    key_paths: Sequence[Sequence[str]] = (),
    indexed: Collection[Steps] = (),
    keys: Collection[bytes] | None = None,
) -> Plan:
    """The plan of a filter (None: every record) for a topic with key fields at `key_paths` (none: publishers supply the
    key) and indexes on the fields `indexed`. `keys`: only these record keys."""
    points = None if keys is None else frozenset(keys)
    if tree is None:
        return SCAN if points is None else _points(points)
    texts = key_texts(tree, key_paths)
    bounds = bounds_of(tree, key_paths)
    if not all(texts.values()) or any(not bound for found in bounds.values() for bound in found):
        return NOTHING
    for found in (_keys_of_metadata(texts), _keys_of_fields(texts, key_paths)):
        if found is not None:
            points = found if points is None else points & found
    if points is not None:
        return _points(points)
    ranges = _common(
        [
            *_ranges_of_fields(texts, key_prefixes(tree, key_paths), key_paths),
            *[_ranges_of_metadata(bound) for bound in bounds.get(_KEY, ())],
        ]
    )
    if not ranges:
        return NOTHING
    candidates = _candidates(bounds, indexed)
    if any(not bound.intervals for bound in candidates):
        return NOTHING
    access = Access.SCAN if ranges == EVERYTHING else Access.KEY_RANGES
    return Plan(access, ranges=ranges, bounds=candidates)


# --- points ----------------------------------------------------------------------------------------------------------


def _points(keys: frozenset[bytes]) -> Plan:
    return Plan(Access.POINTS, points=tuple(sorted(keys))) if keys else NOTHING


def _keys_of_metadata(texts: Mapping[Field, frozenset[str]]) -> frozenset[bytes] | None:
    found = texts.get(_KEY)
    return None if found is None or len(found) > PROBES_MAX else frozenset([_encoded(text) for text in found])


def _keys_of_fields(
    texts: Mapping[Field, frozenset[str]], key_paths: Sequence[Sequence[str]]
) -> frozenset[bytes] | None:
    """Every combination of the values that the key fields must have."""
    if not key_paths:
        return None
    combinations: list[list[str]] = [[]]
    for path in key_paths:
        found = texts.get(Path(tuple(path)))
        if found is None or len(combinations) * len(found) > PROBES_MAX:
            return None
        combinations = [[*combination, text] for combination in combinations for text in found]
    return frozenset([_encoded(join(combination)) for combination in combinations])


def _encoded(text: str) -> bytes:
    # No record key has a surrogate. A filter from a program may have one, and finds nothing.
    return text.encode("utf-8", "surrogatepass")


# --- ranges of record keys -------------------------------------------------------------------------------------------


def _ranges_of_fields(
    texts: Mapping[Field, frozenset[str]],
    prefixes: Mapping[Field, frozenset[str]],
    key_paths: Sequence[Sequence[str]],
) -> Iterable[tuple[Range, ...]]:
    """The ranges for leading key fields with fixed values, and a prefix of the next one."""
    heads = [""]
    for path in key_paths:
        field = Path(tuple(path))
        found = texts.get(field)
        if found is not None and len(heads) * len(found) <= PROBES_MAX:
            heads = [f"{head}{escape(text)}|" for head in heads for text in found]
            continue
        beginnings = prefixes.get(field)
        if beginnings is not None and len(heads) * len(beginnings) <= PROBES_MAX:
            heads = [f"{head}{escape(beginning)}" for head in heads for beginning in beginnings]
        break
    if "" not in heads:
        yield _merged([Range(start := _encoded(head), _after(start)) for head in heads])


def _after(prefix: bytes) -> bytes:
    """The lowest bytes above all that begin with `prefix`: the last byte of UTF-8 is never 255."""
    return prefix[:-1] + bytes((prefix[-1] + 1,))


def _ranges_of_metadata(bound: Bound) -> tuple[Range, ...]:
    """The ranges of comparisons with @key, which is a text."""
    ranges: list[Range] = []
    for interval in bound:
        assert interval.kind is Kind.TEXT, "@key compares by its order with texts only"
        low, high = interval.low, interval.high
        start = b"" if low is None else _encoded(str(low)) + (b"" if interval.low_included else b"\0")
        stop = ABOVE_ALL if high is None else _encoded(str(high)) + (b"\0" if interval.high_included else b"")
        ranges.append(Range(start, stop))
    return _merged(ranges)


def _merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same keys in ordered ranges that do not overlap."""
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if merged and start <= merged[-1].stop:
            merged[-1] = Range(merged[-1].start, max(stop, merged[-1].stop))
        else:
            merged.append(Range(start, stop))
    return tuple(merged)


def _common(unions: Iterable[tuple[Range, ...]]) -> tuple[Range, ...]:
    """The keys in all of the unions. A record has one key, so unions of keys may be intersected."""
    common: tuple[Range, ...] = EVERYTHING
    for ranges in unions:
        both: list[Range] = []
        ours, theirs = iter(common), iter(ranges)
        one, other = next(ours, None), next(theirs, None)
        while one is not None and other is not None:
            shared = Range(max(one.start, other.start), min(one.stop, other.stop))
            if shared.start < shared.stop:
                both.append(shared)
            if one.stop <= other.stop:
                one = next(ours, None)
            else:
                other = next(theirs, None)
        common = tuple(both)
    return common


# --- indexes ---------------------------------------------------------------------------------------------------------


def _candidates(bounds: Mapping[Field, tuple[Bound, ...]], indexed: Collection[Steps]) -> tuple[IndexBound, ...]:
    found: list[IndexBound] = []
    for field, alternatives in bounds.items():
        if not isinstance(field, Path) or field.steps not in indexed:
            continue
        for bound in alternatives:
            intervals = [indexes.interval(interval.kind, interval.low, interval.high) for interval in bound]
            kept = tuple(dict.fromkeys([(start, stop) for start, stop in intervals if start < stop]))
            found.append(IndexBound(field.steps, kept, all(interval.is_point for interval in bound)))
    found.sort(key=lambda bound: (not bound.points, len(bound.intervals)))
    return tuple(found[:CANDIDATES_MAX])
