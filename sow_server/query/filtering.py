"""A filter for stored records of one topic: from its text, checked against the topic, to `key, value -> bool`.

Queries, deletes, restamps and subscriptions take their filters from here, so a filter means the same in each of them.

    [1]  Only the parts of a record that the filter reads are decoded: the payload, the header, the key.
    [2]  NOW_MICROS() is the one `now` of the request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.formats.payloads import Format
from sow_server.engine.formats.topic_formats import zeros_before
from sow_server.engine.stored import HEADER_BYTES, read_header
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.keys import parse_path
from sow_server.engine.values.model import NEVER, MessageType, PermittedRows, RecordMatcher
from sow_server.filters import Filter, FilterError, Meta, Predicate, compile_filter, parse, print_filter
from sow_server.filters.parameters import NO_VALUES, Parameters, Values, parameters
from sow_server.filters.restriction import UNRESTRICTED, Restriction, joined
from sow_server.filters.tree import Expression, Function, FunctionCall, Metadata, MetadataName, walk

CACHED_FILTERS: Final = 256
CACHED_CHARACTERS_MAX: Final = 4096
"""Longer texts are compiled each time. A program that makes such filters rarely makes the same one twice, and the cache
stays within a few megabytes."""


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """The filter of one request for the records of one topic. From any thread."""

    tree: Filter
    text: str
    """The canonical text."""
    predicate: Predicate
    uses_metadata: bool
    """False: `fixed_meta` fits every record."""
    fixed_meta: Meta
    """Metadata that is known without a record: the topic and the request's `now`."""
    matches: RecordMatcher
    """A function that is True if a live record matches, by its record key and its stored value (header and payload)."""
    topic: Topic
    """Decodes payloads, and knows the names of origins."""
    asked: str = ""
    """The canonical text of the part that the caller gave; "": none."""
    granted: RecordFilter | None = None
    """The part that every row must pass before the caller may see it; None: all rows (rule A4)."""

    def on(self, topic: Topic) -> RecordFilter:
        """The same filter for another topic with the same key fields, without compiling again. Raises StoreError."""
        found = _on(topic, _Compiled(self.tree, self.text, self.predicate, self.uses_metadata, self.asked), 0)
        return replace(found, granted=None if self.granted is None else self.granted.on(topic))

    def at(self, now_micros: int) -> RecordFilter:
        """The same filter at another `now`: a filter may be needed before the cut, which has the `now`."""
        meta = self.fixed_meta._replace(now_micros=now_micros)
        matcher = _matcher(self.predicate, self.topic, meta, uses_metadata=self.uses_metadata)
        return replace(self, fixed_meta=meta, matches=matcher)


def callers_filter(
    topic: Topic,
    text: str,
    restriction: Restriction,
    now_micros: int = 0,
    *,
    allow_now: bool = True,
    given: Values = NO_VALUES,
) -> RecordFilter | None:
    """The filter of a request, within the part of the topic that its caller may see (rules A4, A5); None: all records.
    `given`: the values of its parameters. Raises StoreError as `record_filter`."""
    if not text and restriction.rows is None and not given:
        return None
    return record_filter(topic, text, now_micros, allow_now=allow_now, restriction=restriction, given=given)


def record_filter(
    topic: Topic,
    text: str,
    now_micros: int,
    *,
    allow_now: bool = True,
    restriction: Restriction = UNRESTRICTED,
    given: Values = NO_VALUES,
) -> RecordFilter:
    """The filter `text` for the records of `topic`, at one `now`. "" only with `restriction.rows`. `given`: the values
    of its parameters (rule Q9).

    Raises StoreError: FILTER_INVALID with the position and a caret, in its details also as `position`;
    UNSUPPORTED_FOR_MESSAGE_TYPE if it reads fields of a binary topic.
    """
    try:
        bound = parameters(given)
        length = len(text) + sum([each.length_bytes for each in bound])
        compiled = _compiled if length <= CACHED_CHARACTERS_MAX else _compiled.__wrapped__
        found = compiled(text, topic.settings.key, allow_now, restriction, bound)
    except FilterError as error:
        details = {"position": str(error.position)} if error.position >= 0 else None
        raise StoreError(Reason.FILTER_INVALID, f"filter: {error.message}", field="filter", details=details) from None
    made = _on(topic, found, now_micros)
    if restriction.rows is None:
        return made
    return replace(made, granted=rows_filter(topic, restriction))


def rows_filter(topic: Topic, restriction: Restriction) -> RecordFilter | None:
    """The filter of the rows that a restriction allows; None: all."""
    if restriction.rows is None:
        return None
    return _on(topic, _compiled_rows(restriction.rows, topic.settings.key), 0)


def permitted(topic: Topic, restriction: Restriction) -> PermittedRows | None:
    """The rows that a restriction allows, for records that need not be stored; None: all."""
    rows = restriction.rows
    if rows is None:
        return None
    payloads = topic.format
    return _permitted(rows, topic.settings.key, payloads, topic.name)  # type: ignore[arg-type]  # hashed by its identity


@lru_cache(maxsize=CACHED_FILTERS)
def _permitted(rows: Filter, key: tuple[str, ...], payloads: Format, topic: str) -> PermittedRows:
    # A decoder for certain fields takes as long to make as a hundred records to decode.
    found = _compiled_rows(rows, key)
    predicate, fixed = found.predicate, Meta("", 0, 0, None, topic, 0)
    matches, constant = predicate.matches, predicate.constant

    def metas(keys: Sequence[bytes]) -> Iterator[Meta]:
        return (fixed._replace(key=key.decode(errors="backslashreplace")) for key in keys)

    if constant is not None:
        return PermittedRows(lambda keys, payloads: [constant] * len(keys), reads_payloads=False)
    if not predicate.uses_payload:
        return PermittedRows(lambda keys, payloads: [matches(None, meta) for meta in metas(keys)], reads_payloads=False)
    decode = payloads.decoder(predicate.fields)
    if not found.uses_metadata:
        return PermittedRows(
            lambda keys, payloads: [matches(decode(payload), fixed) for payload in payloads], reads_payloads=True
        )
    return PermittedRows(
        lambda keys, payloads: [
            matches(decode(payload), meta) for payload, meta in zip(payloads, metas(keys), strict=True)
        ],
        reads_payloads=True,
    )


def _on(topic: Topic, found: _Compiled, now_micros: int) -> RecordFilter:
    if found.predicate.uses_payload and topic.settings.message_type is MessageType.BINARY:
        raise StoreError(
            Reason.UNSUPPORTED_FOR_MESSAGE_TYPE,
            f"filter: topic {topic.name} is binary, its payloads have no fields; ask for metadata such as @key",
            field="filter",
        )
    if topic.settings.message_type is MessageType.FIX and (zeros := zeros_before(found.predicate.fields)):
        raise StoreError(Reason.FILTER_INVALID, f"filter: {zeros}", field="filter")
    meta = Meta("", 0, 0, None, topic.name, now_micros)
    matcher = _matcher(found.predicate, topic, meta, uses_metadata=found.uses_metadata)
    return RecordFilter(found.tree, found.text, found.predicate, found.uses_metadata, meta, matcher, topic, found.asked)


class _Compiled(NamedTuple):
    """The part of a filter that does not depend on the request."""

    tree: Filter
    text: str
    predicate: Predicate
    uses_metadata: bool
    asked: str


@lru_cache(maxsize=CACHED_FILTERS)
def _compiled(
    text: str, key: tuple[str, ...], allow_now: bool, restriction: Restriction, bound: Parameters
) -> _Compiled:
    # Parsing and compiling take milliseconds, and services use the same few filters again and again.
    if not text and bound:
        raise FilterError(f"there is none, and a value of the parameter :{bound[0].name} is given")
    # The rows of a grant were parsed without parameters: a caller's values say nothing about what it may see.
    own = parse(text, bound) if text or restriction.rows is None else None
    tree = joined(own, restriction)
    assert tree is not None, "without rows the text was parsed"
    if restriction.rows is not None and own is not None:
        # By itself, so that an error about it has its own positions and says nothing about the rows.
        compile_filter(own, key_paths=[parse_path(path) for path in key], allow_now=allow_now)
    return _compiled_tree(tree, key, allow_now=allow_now, asked="" if own is None else print_filter(own))


@lru_cache(maxsize=CACHED_FILTERS)
def _compiled_rows(rows: Filter, key: tuple[str, ...]) -> _Compiled:
    return _compiled_tree(rows, key, allow_now=False, asked="")


def _compiled_tree(tree: Filter, key: tuple[str, ...], *, allow_now: bool, asked: str) -> _Compiled:
    predicate = compile_filter(tree, key_paths=[parse_path(path) for path in key], allow_now=allow_now)
    uses_metadata = any(map(is_of_record, walk(tree)))
    return _Compiled(tree, print_filter(tree), predicate, uses_metadata, asked)


def is_of_record(node: Expression) -> bool:
    """True if this part of a filter needs the metadata of each record."""
    if isinstance(node, FunctionCall):
        return node.function is Function.MESSAGE_SIZE
    return isinstance(node, Metadata) and node.name is not MetadataName.TOPIC


def _matcher(predicate: Predicate, topic: Topic, fixed: Meta, *, uses_metadata: bool) -> RecordMatcher:
    """The cheapest sufficient function: a scan calls it for every record."""
    matches, decode = predicate.matches, topic.format.decode
    if predicate.constant is not None:
        constant = predicate.constant
        return lambda key, value: constant
    if not uses_metadata:
        return lambda key, value: matches(decode(value[HEADER_BYTES:]), fixed)

    def meta_of(key: bytes, value: bytes) -> Meta:
        header = read_header(value)
        expire_time = None if header.expire_time_micros == NEVER else header.expire_time_micros
        return Meta(
            key.decode(errors="backslashreplace"),
            header.version,
            header.publish_time_micros,
            expire_time,
            fixed.topic,
            fixed.now_micros,
            header.sequence,
            topic.origins.names[header.origin],
            len(value) - HEADER_BYTES,
        )

    if predicate.uses_payload:
        return lambda key, value: matches(decode(value[HEADER_BYTES:]), meta_of(key, value))
    return lambda key, value: matches(None, meta_of(key, value))
