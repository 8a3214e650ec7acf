"""With any plan, a query gives the records that the naive interpreter picks from all, in the order asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from random import Random
from types import ModuleType
from typing import Final, NamedTuple
from unittest import mock

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from sow_server.engine.catalog.topics import KnownOrigins, Topic
from sow_server.engine.stored import StoredStatistics, header
from sow_server.engine.values.keys import parse_path
from sow_server.engine.values.model import (
    ABSENT,
    NEVER,
    Expiration,
    Lifetime,
    LifetimeKind,
    MessageType,
    Publish,
    Record,
    TopicSettings,
)
from sow_server.filters import Filter, Meta, print_filter
from sow_server.filters.tree import (
    And,
    Between,
    Compare,
    Comparison,
    Field,
    In,
    IsNull,
    Matches,
    Metadata,
    MetadataName,
    Or,
    Path,
    Text,
    TextTest,
    literal,
)
from sow_server.query import ordering, race, scan, sources
from sow_server.query.filtering import record_filter
from sow_server.query.ordering import Sorter, Term, order, parse_order, print_order
from sow_server.query.planner import Access
from sow_server.query.scan import Explanation, Footer, Query, Scan
from sow_server.query.sort_memory import SortMemory
from tests.property.test_filters import WORDS, filters, fix_documents, json_documents, path, plannable_filters
from tests.support.oracles.examples import examples
from tests.support.oracles.naive_filter import NaiveFilter, exact, number
from tests.support.stores.stores import SECOND, Rig

SMALL: Final[Mapping[ModuleType, Mapping[str, object]]] = {
    scan: {"SCAN_CHUNK": 6, "SCAN_CHUNK_FIRST": 3},
    sources: {"SCAN_CHUNK": 6, "FIND_CHUNK": 2, "RANGE_FIRST": 1},
    race: {"FIND_CHUNK": 2, "HITS_MAX": 4, "HITS_SHARE": 2, "RACE_STEPS": (1,), "STREAMED_FROM": 2},
    ordering: {"SPARE_RECORDS": 2, "RUN_RECORDS": 3},
}
"""Bounds so low that small topics come upon them."""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("queries"))
    yield rig
    rig.close()


# --- topics, their records, and questions ----------------------------------------------------------------------------


class Draft(NamedTuple):
    """A record to publish."""

    key: str
    document: dict[str, object]
    ttl: int | None


@dataclass(frozen=True)
class World:
    """A topic and the records that are published to it."""

    settings: TopicSettings
    drafts: list[Draft]

    @property
    def key_paths(self) -> list[tuple[str, ...]]:
        return [parse_path(path) for path in self.settings.key]


KEYS: Final[list[tuple[str, ...]]] = [(), ("/id",), ("/id", "/b"), ("/id", "/b"), ("/b", "/id"), ("/o/k", "/id")]
INDEXES: Final = ["/a", "/b", "/id", "/o/k", "/l/x", "/o/x", "/o", "/l", "/a/x"]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    message_type = draw(st.sampled_from([*[MessageType.JSON] * 3, MessageType.MSGPACK, MessageType.NVFIX]))
    flat = message_type is MessageType.NVFIX
    key = draw(st.sampled_from([key for key in KEYS if not flat or "/o/k" not in key]))
    indexed = st.sampled_from([path for path in INDEXES if not flat or path.count("/") == 1])
    documents = fix_documents if flat else json_documents
    drafts = st.builds(Draft, st.sampled_from(WORDS[1:]), documents, st.none() | st.sampled_from([1, 5, 20]))
    return World(
        TopicSettings(
            key=key,
            message_type=message_type,
            expiration=draw(st.sampled_from([Expiration.ENABLED, Expiration.ENABLED, Expiration.DISABLED])),
            index=tuple(draw(st.lists(indexed, min_size=draw(st.integers(0, 4)), max_size=4, unique=True))),
        ),
        draw(st.lists(drafts, min_size=15, max_size=25)),
    )


def encoded(message_type: MessageType, document: dict[str, object]) -> bytes:
    match message_type:
        case MessageType.MSGPACK:
            return msgspec.msgpack.encode(fitting(document))
        case MessageType.NVFIX:
            return b"".join([f"{name}={value}\x01".encode() for name, value in document.items()])
        case _:
            return msgspec.json.encode(document)


def fitting(value: object) -> object:
    """MessagePack has no integers of more than 64 bits."""
    match value:
        case dict():
            return {name: fitting(inner) for name, inner in value.items()}
        case list():
            return [fitting(inner) for inner in value]
        case int() if not -(2**63) <= value < 2**64:
            return float(value)
    return value


def decoded(message_type: MessageType, payload: bytes) -> dict[str, object]:
    match message_type:
        case MessageType.MSGPACK:
            found: dict[str, object] = msgspec.msgpack.decode(payload)
        case MessageType.NVFIX:
            fields = [field.partition("=") for field in payload.decode().split("\x01") if field]
            found = {name: value for name, _, value in fields}
        case _:
            found = msgspec.json.decode(payload)
    return found


sort_fields: st.SearchStrategy[Field] = st.one_of(
    st.sampled_from(["/a", "/b", "/id", "/o/x", "/l", "/l/x", "/o", "/a[0]", "/missing"]).map(path),
    st.sampled_from(MetadataName).map(Metadata),
)


class Question(NamedTuple):
    tree: Filter | None
    terms: tuple[Term, ...]
    skip_n: int
    top_n: int
    page_size: int
    keys: tuple[str, ...]


questions: st.SearchStrategy[Question] = st.builds(
    Question,
    st.one_of(filters, plannable_filters(), st.none()),
    st.lists(st.builds(Term, sort_fields, st.booleans()), min_size=1, max_size=4).map(tuple),
    st.integers(0, 4),
    st.integers(1, 9),
    st.integers(1, 5),
    st.lists(st.sampled_from(WORDS[1:]), min_size=1, max_size=6).map(tuple),
)


@contextmanager
def published(rig: Rig, world: World) -> Iterator[Topic]:
    """A topic with the records of a world, some of which have expired by now and are not swept."""
    topic = rig.create_topic("t", world.settings)
    try:
        for draft in world.drafts:
            lifetime = ABSENT if draft.ttl is None else Lifetime(LifetimeKind.TTL, draft.ttl * SECOND)
            payload = encoded(world.settings.message_type, draft.document)
            rig.run(Publish("t", [payload], None if world.settings.key else [draft.key], lifetime=lifetime))
            rig.time.tick(SECOND // 2)
        yield topic
    finally:
        rig.delete_topic("t")


# --- the naive answer ------------------------------------------------------------------------------------------------


def evaluator(world: World, record: Record, now: int) -> NaiveFilter:
    expire_time = None if record.expire_time_micros == NEVER else record.expire_time_micros
    meta = Meta(
        record.key.decode(), record.version, record.publish_time_micros, expire_time, "t", now, record.sequence, "sow"
    )
    return NaiveFilter(decoded(world.settings.message_type, record.payload), meta, world.key_paths)


def naive_answer(world: World, records: Sequence[Record], tree: Filter | None, now: int) -> list[Record]:
    """The records that match, in key order."""
    found = [record for record in records if tree is None or evaluator(world, record, now).matches(tree)]
    return sorted(found, key=lambda record: record.key)


def naive_order(world: World, records: Sequence[Record], terms: Sequence[Term]) -> list[Record]:
    """Records that are in key order, sorted by the rules of docs/filters.md, one comparison at a time."""
    return sorted(records, key=functools.cmp_to_key(naive_comparison(world, terms)))


def naive_comparison(world: World, terms: Sequence[Term]) -> Callable[[Record, Record], int]:
    def compare(one: Record, other: Record) -> int:
        for term in terms:
            sign = compare_values(value_of(one, term.field), value_of(other, term.field), descending=term.descending)
            if sign:
                return sign
        return (one.key > other.key) - (one.key < other.key)

    def value_of(record: Record, field: Field) -> object:
        value = evaluator(world, record, 0).one(field)
        if world.settings.message_type is MessageType.NVFIX and isinstance(field, Path) and number(value) is not None:
            return number(value)
        return value

    return compare


def compare_values(one: object, other: object, *, descending: bool) -> int:
    kinds = kind_of(one), kind_of(other)
    if None in kinds:  # nulls last, whatever the direction
        return (kinds[0] is None) - (kinds[1] is None)
    sign = (kinds[0] > kinds[1]) - (kinds[0] < kinds[1])  # type: ignore[operator]  # neither is None
    if not sign:
        if isinstance(one, str):
            assert isinstance(other, str)
            left, right = list(map(ord, one)), list(map(ord, other))
            sign = (left > right) - (left < right)
        else:
            assert isinstance(one, (int, float))
            assert isinstance(other, (int, float))
            sign = (exact(one) > exact(other)) - (exact(one) < exact(other))
    return -sign if descending else sign


def kind_of(value: object) -> int | None:
    match value:
        case bool():
            return 1
        case int() | float():
            return 2
        case str():
            return 3
        case _:
            return None


# --- the server's answer ---------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    records: list[tuple[bytes, bytes, int]]
    """(key, payload, version)"""
    footer: Footer
    taken: Explanation


def ask(rig: Rig, query: Query) -> Answer:
    found = Scan(rig.store.cuts, query)
    records: list[tuple[bytes, bytes, int]] = []
    try:
        while (batch := found.next_batch()) is not None:
            assert len(batch.keys) <= query.batch_size
            assert batch.payloads is not None
            records += zip(batch.keys, batch.payloads, batch.headers.version, strict=True)
        return Answer(records, found.footer(), found.explanation())
    finally:
        found.close()


def rows(records: Sequence[Record]) -> list[tuple[bytes, bytes, int]]:
    return [(record.key, record.payload, record.version) for record in records]


@contextmanager
def bounds(small: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for module, constants in SMALL.items() if small else ():
            for name, value in constants.items():
                stack.enter_context(mock.patch.object(module, name, value))
        yield


def check(rig: Rig, world: World, topic: Topic, question: Question, records: Sequence[Record], batch_size: int) -> None:
    now = rig.clock.now_micros()
    expected = naive_answer(world, records, question.tree, now)
    given = None if question.tree is None else record_filter(topic, print_filter(question.tree), 0)
    query = Query(topic, filter=given, batch_size=batch_size)
    tops = slice(question.skip_n, question.skip_n + question.top_n)

    whole = ask(rig, query)
    assert whole.records == rows(expected)
    assert (whole.footer.matched, whole.footer.returned) == (len(expected), len(expected))
    event(whole.taken.access.name + (", found" if expected else ""))
    if whole.taken.access is Access.POINTS:
        assert whole.footer.scanned == whole.taken.probes
    if whole.taken.access is Access.NOTHING:
        assert whole.footer.scanned == 0

    some = ask(rig, replace(query, skip_n=question.skip_n, top_n=question.top_n))
    assert some.records == rows(expected[tops])

    counted = ask(rig, replace(query, count_only=True, skip_n=question.skip_n, top_n=question.top_n))
    assert (counted.records, counted.footer.matched) == ([], len(expected))
    assert counted.footer.returned == len(expected[tops])

    explained = ask(rig, replace(query, explain=True))
    assert (explained.records, explained.footer, explained.taken) == ([], whole.footer, whole.taken)

    paged: list[tuple[bytes, bytes, int]] = []
    token = ""
    for _ in range(len(records) + 2):
        page = ask(rig, replace(query, page_size=question.page_size, page_token=token))
        assert len(page.records) <= question.page_size
        paged += page.records
        token = page.footer.next_page_token
        if not token:
            break
    assert not token, "pages end"
    assert paged == rows(expected)

    keys = {key.encode() for key in question.keys}
    by_keys = ask(rig, replace(query, keys=tuple(keys)))
    assert by_keys.records == rows([record for record in expected if record.key in keys])

    by = order(topic, print_order(question.terms))
    ordered = rows(naive_order(world, expected, question.terms))
    assert ask(rig, replace(query, order=by)).records == ordered
    best = ask(rig, replace(query, order=by, skip_n=question.skip_n, top_n=question.top_n))
    assert best.records == ordered[tops]
    assert best.footer.matched == len(expected)
    paged, token = [], ""
    for _ in range(len(records) + 2):
        page = ask(rig, replace(query, order=by, page_size=question.page_size, page_token=token))
        assert len(page.records) <= question.page_size
        assert page.footer.matched == len(expected)
        paged += page.records
        token = page.footer.next_page_token
        if not token:
            break
    assert paged == ordered


@pytest.mark.slow
@given(worlds(), st.lists(questions, min_size=1, max_size=4), st.booleans(), st.sampled_from([1, 3, 1000]))
@settings(max_examples=examples(80))
def test_a_query_equals_the_naive_interpreter(
    rig: Rig, world: World, asked: list[Question], small: bool, batch_size: int
) -> None:
    with published(rig, world) as topic, bounds(small):
        records = list(rig.live("t").values())
        for question in asked:
            check(rig, world, topic, question, records, batch_size)


# --- a narrow world, where plans find something ----------------------------------------------------------------------

# Drawn evenly, which Hypothesis does not: few values in few fields, among them those that a key has to escape, and
# filters with the values that some records have.
NARROW: Final[list[object]] = ["a", "b", "ab", "a|b", "|", "\\", "1", 1, 2, True]
NARROW_KEYS: Final = ["a", "b", "ab", "a|b", "a|1", "1|a", "a|b|a", "a\\|b|1", "b|", "a\\", "|", "1"]
NARROW_FIELDS: Final = ["/id", "/b", "/a", "/o/k", "/l/x"]
PROBES: Final = ["=", "=", "=", "IN", "IN", "IN", "BEGINS WITH", "BETWEEN", *[each.value for each in Comparison]]


def narrow_world(draw: Random) -> World:
    message_type = draw.choice([MessageType.JSON, MessageType.JSON, MessageType.MSGPACK, MessageType.NVFIX])
    flat = message_type is MessageType.NVFIX
    indexed = [field for field in NARROW_FIELDS if not flat or field.count("/") == 1]

    def value() -> object:
        return str(draw.choice(NARROW)) if flat else draw.choice(NARROW)

    def document() -> dict[str, object]:
        found: dict[str, object] = {"id": value(), "b": value()}
        if draw.random() < 0.8:
            several = not flat and draw.random() < 0.5
            found["a"] = [value() for _ in range(draw.randrange(4))] if several else value()
        if not flat and draw.random() < 0.8:
            found["l"] = [{"x": value()} for _ in range(draw.randrange(3))]
            found["o"] = {"k": value()}
        return found

    return World(
        TopicSettings(
            key=draw.choice([key for key in KEYS if not flat or "/o/k" not in key]),
            message_type=message_type,
            expiration=draw.choice([Expiration.ENABLED, Expiration.DISABLED]),
            index=tuple(draw.sample(indexed, draw.randrange(len(indexed) + 1))),
        ),
        [Draft(draw.choice(NARROW_KEYS), document(), draw.choice([None, None, 1, 20])) for _ in range(30)],
    )


def narrow_question(draw: Random, world: World, records: Sequence[Record]) -> Question:
    fields: list[Field] = [path(written) for written in [*world.settings.key * 2, *world.settings.index, "/id", "/b"]]
    fields += [path("/a"), Metadata(MetadataName.KEY)]
    some = draw.sample(records, min(3, len(records)))  # few, so that conditions meet in one of them
    conditions = tuple([condition(draw, world, some, draw.choice(fields)) for _ in range(draw.randint(1, 3))])
    chain = And if draw.random() < 0.7 else Or
    sort_by: list[Field] = [path(written) for written in NARROW_FIELDS] + [Metadata(name) for name in MetadataName]
    return Question(
        chain(conditions) if len(conditions) > 1 else conditions[0],
        tuple([Term(draw.choice(sort_by), draw.random() < 0.5) for _ in range(draw.randint(1, 3))]),
        draw.randrange(4),
        draw.randint(1, 9),
        draw.randint(1, 5),
        tuple([record.key.decode() for record in draw.sample(records, len(records) // 2)]) or ("a",),
    )


def condition(draw: Random, world: World, some: Sequence[Record], field: Field) -> Filter:
    """A condition on a field, with values that some records have there."""
    found = [value for record in some for value in evaluator(world, record, 0).all(field)]
    literals = [literal(value) for value in found if isinstance(value, (str, int, float))]
    if not literals:
        return IsNull(field)
    draw.shuffle(literals)
    match draw.choice(PROBES):
        case "IN":
            return In(field, tuple(literals))
        case "BEGINS WITH":
            texts = [Text(one.value[: draw.randint(1, 3)]) if isinstance(one, Text) else one for one in literals[:2]]
            return Matches(TextTest.BEGINS_WITH, field, tuple(texts))
        case "BETWEEN":
            return Between(field, literals[0], literals[-1])
        case comparison:
            return Compare(Comparison(comparison), field, literals[0])


@pytest.mark.slow
@given(st.randoms(use_true_random=True))
@settings(max_examples=examples(100))
def test_a_plan_never_changes_a_result(rig: Rig, draw: Random) -> None:
    world = narrow_world(draw)
    with published(rig, world) as topic, bounds(draw.random() < 0.7):
        records = list(rig.live("t").values())
        for _ in range(6):
            check(rig, world, topic, narrow_question(draw, world, records), records, draw.choice([1, 3, 1000]))


@given(st.randoms(use_true_random=True))
@settings(max_examples=examples(40))
def test_ordered_pages_go_on_behind_the_last_record_as_it_was(rig: Rig, draw: Random) -> None:
    """Each page is exact for its own instant, whatever has changed since the page before (rule Q4)."""
    world = narrow_world(draw)
    with published(rig, world) as topic, bounds(draw.random() < 0.7):
        present = dict(rig.live("t"))
        terms = narrow_question(draw, world, list(present.values())).terms
        compare = naive_comparison(world, terms)
        asked = Query(topic, order=order(topic, print_order(terms)), page_size=draw.randint(1, 5))
        changed: set[bytes] = set()
        told: list[bytes] = []
        token, last = "", None
        for turn in range(100):
            records = sorted(rig.live("t").values(), key=lambda record: record.key)
            behind = [record for record in records if last is None or compare(record, last) > 0]
            expected = naive_order(world, behind, terms)[: asked.page_size]
            page = ask(rig, replace(asked, page_token=token))
            assert page.records == rows(expected)
            token = page.footer.next_page_token
            assert bool(token) == (len(behind) > asked.page_size), "the last page is told"
            told += [record.key for record in expected]
            if not token:
                break
            last = expected[-1]
            for draft in draw.sample(world.drafts, 2) if turn < 8 else ():
                payload = encoded(world.settings.message_type, draft.document | {"a": draw.choice(["a", "b", "1"])})
                rig.run(Publish("t", [payload], None if world.settings.key else [draft.key]))
            changed |= {key for key, record in rig.live("t").items() if present.get(key) != record}
        assert not token
        stayed = present.keys() - changed
        assert sorted(key for key in told if key in stayed) == sorted(stayed), "each once"


# --- sorting, by itself ----------------------------------------------------------------------------------------------


@given(st.randoms(use_true_random=True))
@settings(max_examples=examples(200))
def test_records_are_sorted_as_one_comparison_at_a_time_would(draw: Random) -> None:
    """Mixed kinds, ties, both directions (ordering [1] to [3])."""
    world = narrow_world(draw)
    world = World(world.settings._replace(index=()), world.drafts[: draw.choice([1, 10, 30])])
    topic = Topic(1, "t", world.settings, create_time_micros=0, statistics=StoredStatistics())
    topic.origins = KnownOrigins(("sow",))
    records = [
        Record(
            b"%02d" % number,
            encoded(world.settings.message_type, draft.document),
            version=draw.randrange(3),
            publish_time_micros=draw.randrange(2),
            expire_time_micros=draw.choice([NEVER, 1, 2]),
            origin=0,
            sequence=number,
        )
        for number, draft in enumerate(world.drafts)
    ]
    terms = narrow_question(draw, world, records).terms
    limit = draw.choice([None, 1, 3, 12])
    with bounds(draw.random() < 0.7):
        sorter = Sorter(order(topic, print_order(terms)), limit, payloads=True, memory=SortMemory())
        left = list(records)
        while left:
            portion = draw.randint(1, 10)
            sorter.add([record.key for record in left[:portion]], [stored(record) for record in left[:portion]])
            del left[:portion]
        found = [key for _, key, _ in sorter.rows()]
    assert found == [record.key for record in naive_order(world, records, terms)][:limit]


def stored(record: Record) -> bytes:
    head = header(
        origin=record.origin,
        payload_bytes=len(record.payload),
        version=record.version,
        publish_time=record.publish_time_micros,
        expire_time=record.expire_time_micros,
        sequence=record.sequence,
    )
    return head + record.payload


written = st.lists(st.builds(Term, sort_fields, st.booleans()), min_size=1, max_size=ordering.TERMS_MAX).map(tuple)


@given(written)
def test_a_printed_order_parses_to_the_same_terms(terms: tuple[Term, ...]) -> None:
    assert parse_order(print_order(terms)) == terms
