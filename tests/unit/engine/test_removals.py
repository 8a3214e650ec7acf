"""A publish may delete (rule P11): removals in their place among puts, known to retries."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sow_server.engine.commit.observers import Committed
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.commit.puts import PLAIN_RECORDS_MIN
from sow_server.engine.disk.layout import publisher_key
from sow_server.engine.disk.rocks import EXPIRY, INDEXES, META, RECORDS, TOMBSTONES
from sow_server.engine.journal.builder import ChunkBuilder
from sow_server.engine.store import StoreOptions
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    ABSENT,
    NEVER,
    Applied,
    Condition,
    ConditionKind,
    Expiration,
    Lifetime,
    LifetimeKind,
    MessageType,
    Outcome,
    PermittedRows,
    Publish,
    PublisherPosition,
    Refusal,
    TopicSettings,
)
from tests.support.oracles.examples import examples
from tests.support.stores.stores import SECOND, Rig

BOOKS = TopicSettings(message_type=MessageType.BINARY, expiration=Expiration.ENABLED)
ORDERS = TopicSettings(key=("/desk", "/id"), index=("/px",))
MANY = 3 * PLAIN_RECORDS_MIN


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("books", BOOKS)
    rig.create_topic("orders", ORDERS)
    yield rig
    rig.close()


def changes(
    *given: str,
    sequence: int = 0,
    atomic: bool = False,
    want_results: bool = True,
    conditions: Sequence[Condition | None] | None = None,
    lifetime: Lifetime = ABSENT,
    permits: PermittedRows | None = None,
    removal_permits: PermittedRows | None = None,
) -> Publish:
    """A request for "books": "+a" puts the key a, "-a" removes it."""
    return Publish(
        "books",
        [b"x" if one[0] == "+" else b"" for one in given],
        [one[1:] for one in given],
        atomic=atomic,
        want_results=want_results,
        conditions=conditions,
        lifetime=lifetime,
        publisher=PublisherPosition("p", 1, sequence) if sequence else None,
        permits=permits,
        removals=[one[0] == "-" for one in given],
        removal_permits=removal_permits,
    )


def applied(outcome: Outcome) -> list[tuple[bool, bool]]:
    """Of each result whether it has removed a record, and whether it has a version and a sequence."""
    assert outcome.results is not None
    found = []
    for one in outcome.results:
        assert isinstance(one, Applied)
        assert (one.version > 0) is (one.sequence > 0)
        found.append((one.removed, one.version > 0))
    return found


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["+a", "-a"], set()),
        (["-a", "+a"], {b"a"}),
        (["+a", "-a", "+a"], {b"a"}),
        (["-a", "+a", "-a"], set()),
        (["-a", "-a"], set()),
    ],
)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("copies", [1, MANY])
def test_removals_are_decided_in_the_order_of_the_request(
    rig: Rig, given: list[str], left: set[bytes], before: bool, copies: int
) -> None:
    """P11, also where runs of puts and of removals are decided in columns."""
    keys = [f"a{number}" for number in range(copies)]
    if before:
        rig.run(Publish("books", [b"old"] * copies, keys))
    told = len(rig.journal("books"))
    outcome = rig.run(changes(*[one[0] + key for one in given for key in keys], want_results=copies == 1))
    assert outcome.applied == len(given) * copies
    there, kinds = before, []
    for one in given:
        kinds += ["put"] if one[0] == "+" else ["delete"] if there else []
        there = one[0] == "+"
    assert outcome.removed == kinds.count("delete") * copies
    assert [entry.kind for entry in rig.journal("books")[told:]] == [kind for kind in kinds for _ in keys]
    assert set(rig.live("books")) == ({key.encode() for key in keys} if left else set())


def test_a_removal_has_version_and_sequence_as_a_delete_and_none_if_it_finds_nothing(rig: Rig) -> None:
    """P11, D3"""
    outcome = rig.run(changes("+a", "-a", "-a"))
    assert applied(outcome) == [(False, True), (True, True), (False, False)]
    entry = rig.journal("books")[-1]
    assert (entry.kind, entry.version, entry.sequence) == ("delete", outcome.last_version, outcome.last_sequence)
    assert entry.payload == b"x", "the record as it was"


@pytest.mark.parametrize("restart", [None, "crash"])
@pytest.mark.parametrize("copies", [1, MANY])
@pytest.mark.parametrize("there", [True, False])
def test_a_retried_removal_never_removes_a_later_put(rig: Rig, restart: str | None, copies: int, there: bool) -> None:
    """P11: it is a duplicate, also where it has found nothing."""
    keys = [f"a{number}" for number in range(copies)]
    if there:
        rig.run(Publish("books", [b"old"] * copies, keys))
    request = changes(*[f"-{key}" for key in keys], sequence=1, want_results=copies == 1)
    first = rig.run(request)
    assert (first.applied, first.removed) == (copies, copies * there)
    rig.run(Publish("books", [b"new"] * copies, keys))
    if restart:
        getattr(rig, restart)()
    again = rig.run(request)
    assert (again.applied, again.duplicates, again.removed) == (0, copies, 0)
    assert len(rig.live("books")) == copies
    assert (again.last_duplicate_version, again.last_duplicate_sequence) == (first.last_version, first.last_sequence)
    if copies == 1:
        assert applied(again) == applied(first), "the answer of the first attempt"
    assert rig.store.cuts.publisher_position("p") == (1, copies)
    assert rig.run(changes("+b", sequence=copies + 1)).applied == 1


def test_a_batch_of_puts_and_removals_is_remembered_as_one_run(rig: Rig) -> None:
    """P6: what is under way is remembered, however puts and removals alternate."""
    rig.run(Publish("books", [b"old"] * 100, [f"a{number}" for number in range(100)]))
    request = changes(
        *[f"{'-+'[number % 2]}a{number}" for number in range(100)], sequence=1, want_results=False, lifetime=ABSENT
    )
    first = rig.run(request)
    for later in range(30):
        rig.run(changes("+z", sequence=101 + later, want_results=False))
    again = rig.run(request)
    assert (again.last_duplicate_version, again.last_duplicate_sequence) == (first.last_version, first.last_sequence)
    request.want_results = True  # by a single publish, after a stream
    assert applied(rig.run(request)) == [(number % 2 == 0, True) for number in range(100)], "what each has done"


def test_a_record_moves_from_one_key_to_another_or_stays(rig: Rig) -> None:
    """P11, P4: all of an atomic request, or nothing."""
    rig.run(changes("+a"))
    refused = rig.run(
        changes("-a", "+b", atomic=True, conditions=[None, Condition(ConditionKind.IF_PRESENT)], sequence=1)
    )
    assert [one.reason for one in refused.refusals] == [Reason.ATOMIC_ABORTED, Reason.CONDITION_FAILED]
    assert set(rig.live("books")) == {b"a"}
    move = changes("-a", "+b", atomic=True, sequence=3)
    assert applied(rig.run(move)) == [(True, True), (False, True)]
    assert set(rig.live("books")) == {b"b"}
    rig.run(changes("+a"))
    assert rig.run(move).duplicates == 2
    assert set(rig.live("books")) == {b"a", b"b"}


def test_conditions_hold_for_removals(rig: Rig) -> None:
    """P3, P11"""
    version = rig.run(changes("+a")).last_version
    wrong, right = Condition(ConditionKind.IF_VERSION, version - 1), Condition(ConditionKind.IF_VERSION, version)
    outcome = rig.run(changes("-a", "-b", conditions=[wrong, Condition(ConditionKind.IF_PRESENT)]))
    assert [(one.reason, one.current_version) for one in outcome.refusals] == [
        (Reason.CONDITION_FAILED, version),
        (Reason.CONDITION_FAILED, 0),
    ]
    assert rig.run(changes("-a", conditions=[right])).removed == 1


@pytest.mark.parametrize("copies", [1, MANY])
def test_an_overdue_record_expires_and_is_not_there_for_a_removal(rig: Rig, copies: int) -> None:
    """L10, P11"""
    keys = [f"a{number}" for number in range(copies)]
    rig.run(Publish("books", [b"x"] * copies, keys, lifetime=Lifetime(LifetimeKind.TTL, SECOND)))
    rig.time.tick(SECOND)
    outcome = rig.run(changes(*[f"-{key}" for key in keys], want_results=False))
    assert (outcome.applied, outcome.removed) == (copies, 0)
    assert [kind for kind, _ in rig.kinds("books")] == ["put"] * copies + ["expire"] * copies


def test_a_removed_record_takes_its_expiry_and_its_index_entries_along(rig: Rig) -> None:
    """L10: the lifetime of before does not end the record of after."""
    rig.run(changes("+a", lifetime=Lifetime(LifetimeKind.TTL, SECOND)))
    rig.run(changes("-a", "+a", want_results=False))
    rig.time.tick(2 * SECOND)
    rig.store.sweep()
    assert set(rig.live("books")) == {b"a"}
    rig.run(changes("-a"))
    assert rig.live("books") == {}


def orders(*records: tuple[bytes, str, bool], **more: object) -> Publish:
    payloads, keys, removals = zip(*records, strict=True)
    return Publish("orders", payloads, keys, removals=removals, want_results=True, **more)  # type: ignore[arg-type]  # any


def test_a_removal_has_a_key_or_a_document_on_a_topic_with_key_fields(rig: Rig) -> None:
    """P11, K3"""
    outcome = rig.run(
        orders(
            (b'{"desk":"x","id":1,"px":1}', "", False),
            (b'{"desk":"x","id":2,"px":1}', "", False),
            (b'{"desk":"x","id":1}', "", True),
            (b"", "x|2", True),
            (b"", "x", True),
            (b'{"desk":"x","id":1}', "x|1", True),
            (b'{"desk":"x"}', "", True),
            (b'{"desk":"x","id":1}', "x|1", False),
        )
    )
    assert (outcome.applied, outcome.removed) == (4, 2)
    assert [(one.index, one.reason) for one in outcome.refusals] == [
        (4, Reason.INVALID_ARGUMENT),
        (5, Reason.INVALID_ARGUMENT),
        (6, Reason.KEY_FIELD_MISSING),
        (7, Reason.KEY_NOT_ALLOWED),
    ]
    assert "x has 1 part" in outcome.refusals[0].message.replace("'", "")
    assert rig.live("orders") == {}


def test_without_key_fields_a_removal_needs_a_key_and_no_document(rig: Rig) -> None:
    """P11, K3"""
    outcome = rig.run(Publish("books", [b"", b"x"], ["", "a"], removals=[True, True], want_results=True))
    assert [(one.index, one.reason) for one in outcome.refusals] == [
        (0, Reason.KEY_REQUIRED),
        (1, Reason.INVALID_ARGUMENT),
    ]


def test_a_delta_request_removes_too(rig: Rig) -> None:
    """P11, P2: `delta` and `unset_paths` are for its puts."""
    rig.run(Publish("orders", [b'{"desk":"x","id":1,"px":1}', b'{"desk":"x","id":2,"px":1}']))
    records = ((b'{"desk":"x","id":1,"qty":5}', "", False), (b"", "x|2", True))
    assert rig.run(orders(*records, delta=True, unset_paths=["/px"])).removed == 1
    assert [one.payload for one in rig.live("orders").values()] == [b'{"desk":"x","id":1,"qty":5}']


def only(*allowed: bytes) -> PermittedRows:
    return PermittedRows(lambda keys, payloads: [key in allowed for key in keys], reads_payloads=False)


@pytest.mark.parametrize("by_publish", [True, False])
def test_a_hidden_record_counts_as_absent_and_stays(rig: Rig, by_publish: bool) -> None:
    """A4, P11: its removal has the answer of one that finds nothing. Both permissions have rows."""
    may, other = only(b"a"), None
    publishes, removes = (may, other) if by_publish else (other, may)
    rig.run(changes("+a", "+b"))
    outcome = rig.run(changes("-a", "-b", "-c", permits=publishes, removal_permits=removes))
    assert applied(outcome) == [(True, True), (False, False), (False, False)]
    assert set(rig.live("books")) == {b"b"}
    present = Condition(ConditionKind.IF_PRESENT)
    conditions = [present, present]
    request = changes("-b", "-c", conditions=conditions, permits=publishes, removal_permits=removes)
    refused = rig.run(request).refusals
    assert refused[0] == refused[1]._replace(index=0)


def test_an_atomic_request_may_not_remove_more_bytes_than_a_commit_takes(tmp_path: Path) -> None:
    """P2: the removed records are journaled whole, in one commit."""
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(commit_merged_bytes_max=100)))
    rig.create_topic("books", BOOKS)
    rig.run(Publish("books", [b"x" * 60] * 2, ["a", "b"]))
    with pytest.raises(StoreError) as refused:
        rig.run(changes("-a", "-b", atomic=True))
    assert refused.value.reason is Reason.ATOMIC_TOO_LARGE
    assert rig.run(changes("-a", "-b")).removed == 2
    rig.close()


def test_the_answer_of_a_refused_removal_names_its_record(rig: Rig) -> None:
    """P4: each stands alone."""
    outcome = rig.run(changes("+a", "-", "-a"))
    assert outcome.results is not None
    assert [type(one) for one in outcome.results] == [Applied, Refusal, Applied]
    assert (outcome.applied, outcome.removed) == (2, 1)
    result = outcome.results[2]
    assert isinstance(result, Applied)
    assert result.expire_time_micros == NEVER


@pytest.mark.parametrize("turns", range(5))
def test_a_kill_at_any_point_and_a_retry_leave_the_same_records(tmp_path: Path, turns: int) -> None:
    """P6, P11: the commits before the kill are known, and the others are not lost. A record that others have put
    meanwhile under a key that was removed before the kill stays."""
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(commit_records_max=2)))
    rig.create_topic("books", BOOKS)
    rig.run(changes("+a", "+b", "+c"))
    request = changes("-a", "-none", "+d", "-d", "-b", "+c", "-c", "+e", sequence=1)
    rig.store.commits.submit(request)
    for _ in range(turns):
        rig.turn()
    rig.crash()
    removed_before = b"a" not in rig.live("books")
    if removed_before:
        rig.run(changes("+a"))
    outcome = rig.run(request)
    assert outcome.applied + outcome.duplicates == 8
    assert outcome.duplicates == 2 * turns
    assert set(rig.live("books")) == ({b"a", b"e"} if removed_before else {b"e"})
    assert rig.store.cuts.publisher_position("p") == (1, 8)
    rig.close()


def test_a_request_that_only_removes_creates_no_topic(tmp_path: Path) -> None:
    """K1, P11: it is applied and changes nothing; its publisher is remembered. With a put it creates the topic."""
    rig = Rig(tmp_path, options=StoreOptions(dynamic_topics=True))
    request = Publish("new", [b""], ["a"], removals=[True], publisher=PublisherPosition("p", 1, 1))
    assert rig.run(request).applied == 1
    assert "new" not in rig.store.topics.by_name
    assert rig.run(request).duplicates == 1
    assert rig.run(Publish("new", [b"", b"{}"], ["a", "a"], removals=[True, False])).applied == 2
    assert set(rig.live("new")) == {b"a"}
    assert rig.run(request).duplicates == 1
    rig.close()


FAMILIES = (RECORDS, EXPIRY, INDEXES, TOMBSTONES)


def alternately(rig: Rig, chance: random.Random, settings: TopicSettings) -> list[object]:
    """All that requests with removals in between change, with and without peers and followers. Keys come several times,
    and some are missing."""
    topic = rig.create_topic("mixed", settings)
    told: list[bytes | None] = []

    def hear(commits: Sequence[Committed], _: int) -> None:
        for commit in commits:
            for chunk in commit.chunks:
                told.extend(chunk.previous_values or [])

    rig.store.commits.follow(hear)
    topic.followers = topic.previous_wanted = chance.randint(0, 1)
    topic.replicated = chance.random() < 0.5
    outcomes, sequence = [], 1
    for _ in range(4):
        count = chance.randint(PLAIN_RECORDS_MIN, 40)
        removals = [chance.random() < 0.5 for _ in range(count)]
        some = [ABSENT, *[Lifetime(LifetimeKind.TTL, chance.randint(1, 9) * SECOND) for _ in range(3)]]
        request = Publish(
            "mixed",
            [b"" if removes else b'{"n":%d}' % chance.randint(0, 9) for removes in removals],
            [str(chance.randint(0, 20)) for _ in removals],
            lifetimes=[ABSENT if removes else chance.choice(some) for removes in removals],
            publisher=PublisherPosition("p", 1, sequence),
            removals=removals,
        )
        outcomes.append(rig.run(request))
        sequence += count
        rig.time.tick(chance.randint(0, 2) * SECOND)
    rig.store.writer.sync_now()
    figures = topic.statistics._replace(appended_bytes=0)  # the columns of a chunk may be encoded differently
    rows = [row for family in FAMILIES for row in rig.rows(family)]
    rows += [row for row in rig.rows(META) if row[0] == publisher_key("p")]
    return [outcomes, rows, rig.journal("mixed"), figures, told]


@pytest.mark.parametrize("expiration", [Expiration.ENABLED, Expiration.DISABLED])
@pytest.mark.parametrize("index", [(), ("/n",)])
def test_puts_and_removals_in_one_pass_have_the_effect_of_single_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expiration: Expiration, index: tuple[str, ...]
) -> None:
    """P11, P6: also what the publisher is remembered by. Planted mistake: the second change of a key does not meet the
    first."""
    settings = TopicSettings(expiration=expiration, index=index)
    for seed in range(examples(12)):
        effects = []
        for name, smallest in (("together", PLAIN_RECORDS_MIN), ("singles", 10_000)):
            with monkeypatch.context() as patch:
                patch.setattr("sow_server.engine.commit.puts.PLAIN_RECORDS_MIN", smallest)
                (tmp_path / f"{name}-{seed}").mkdir()
                rig = Rig(tmp_path / f"{name}-{seed}")
                effects.append(alternately(rig, random.Random(seed), settings))
                rig.close()
        assert effects[0] == effects[1], seed


class _Meanwhile(list[bytes]):
    """Payloads of a request. While a slice of them is staged, or the second one, something happens on another
    thread."""

    def __init__(self, payloads: Sequence[bytes], happens: Callable[[], None], *, staged: bool = False) -> None:
        super().__init__(payloads)
        self._happens = happens
        self._staged = staged

    def __getitem__(self, at: Any) -> Any:
        found: Any = super().__getitem__(at)
        if at == 1:
            self._happens()
        return _Meanwhile(found, self._happens, staged=True) if isinstance(at, slice) else found

    def __iter__(self) -> Iterator[bytes]:
        if self._staged:
            self._happens()
        return super().__iter__()


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("earlier", [False, True])
def test_old_values_are_those_of_all_changes_or_of_none_whoever_comes_meanwhile(
    rig: Rig, before: int, *, earlier: bool
) -> None:
    """S2: the chunk decides, not what the topic says in the middle of it. `earlier`: they come and go during an earlier
    request in the same commit. Planted mistake: a subscriber that comes or goes ends all those of the topic."""
    topic = rig.topic("books")
    topic.followers = 1
    topic.previous_wanted = before
    chunks: list[ChunkBuilder] = []
    rig.store.commits.follow(lambda commits, _: chunks.extend(chunk for one in commits for chunk in one.chunks))
    request = changes(*[f"{'+-'[number % 2]}a{number // 3}" for number in range(MANY)], want_results=False)
    first = Publish("books", [b"x", b"x"], ["b", "c"])
    one = first if earlier else request
    one.payloads = _Meanwhile(one.payloads, lambda: setattr(topic, "previous_wanted", 1 - before))
    rig.run_together([first, request] if earlier else [request])
    assert topic.previous_wanted == 1 - before
    assert chunks
    for chunk in chunks:
        assert chunk.previous_values is None or len(chunk.previous_values) == len(chunk.keys)
