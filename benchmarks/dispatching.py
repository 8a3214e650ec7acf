"""Many followers, each with a different filter on one field: found by the field's value, or evaluated one by one.

It is measured twice: in this process, for the server's dispatcher alone, with and without its index of values; and as
CPU time of a whole server, with filters that name their value, and with filters that mean the same without naming it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

from benchmarks.documents import document, documents, keys
from benchmarks.followers import AT_ONCE_RECORDS, MANY, MICROS, NOTHING, Followers
from benchmarks.processes import TOPIC, SowServer
from benchmarks.rows import MICROSECONDS, TIMES, Figure, Row, Target, ratio, ratio_range, take_turns
from benchmarks.setting import Setting
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.stored import PUT, Changes, Column, StoredStatistics
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.fields import Entry
from sow_server.engine.values.model import NEVER, Expiration, TopicSettings
from sow_server.filters.tree import Field
from sow_server.query.filtering import record_filter
from sow_server.subscriptions.changes import changes_of
from sow_server.subscriptions.frames import ChangeFrame
from sow_server.subscriptions.live.groups import FollowedTopic, Group
from sow_server.subscriptions.live.judging import Unjudged
from sow_server.subscriptions.live.matching import VersionMatcher
from sow_server.subscriptions.request import Wants

TARGET: Final = Target(5.0, f"{TIMES} cheaper")


def by_value(setting: Setting) -> Iterator[Row]:
    """The cost per change of finding the followers that it concerns."""
    # Accounts of documents. There are 99,991, so about one change in 200 concerns a follower.
    accounts = sorted({str(json.loads(document(number))["account"]) for number in range(2 * MANY)})[:MANY]
    yield _in_process(setting, accounts)
    yield _server(setting, accounts)


def _in_process(setting: Setting, accounts: Sequence[str]) -> Row:
    changes = setting.size(20_000, quick=4_000)
    rounds = setting.size(5, quick=3)
    topic = Topic(
        1,
        TOPIC,
        TopicSettings(key=("/id",), expiration=Expiration.ENABLED),
        create_time_micros=0,
        statistics=StoredStatistics(),
    )
    filters = [f"/account = '{account}'" for account in accounts]
    chunk = _chunk(changes)

    def micros_per_change(followed: FollowedTopic) -> float:
        groups: list[Group] = []
        begin = time.perf_counter()
        for change in changes_of(topic, chunk, start=0, stop=changes, find=lambda sequence: None):
            followed.dispatch(change, 0, groups)
        spent = time.perf_counter() - begin
        found.append([(group.filter_text, row.sequence) for group in groups for row in group.rows])
        for group in groups:
            group.rows.clear()
        return spent / changes * MICROS

    found: list[list[tuple[str, int]]] = []
    contestants = {
        "by value": _followed(topic, [VersionMatcher(record_filter(topic, text, 0)) for text in filters]),
        "one by one": _followed(topic, [_Asked(record_filter(topic, text, 0)) for text in filters]),
        "nobody": _followed(topic, [VersionMatcher(record_filter(topic, "FALSE", 0))]),
    }
    setting.say(f"{rounds} rounds of {changes:,} changes")
    costs = take_turns(
        rounds,
        {name: partial(micros_per_change, followed) for name, followed in contestants.items()},
    )
    by_value, one_by_one, _ = found[:3]
    assert by_value, "some changes concern somebody"
    assert sorted(by_value) == sorted(one_by_one), "both ways find the same followers"
    spread = ratio_range(costs["one by one"], costs["by value"])
    nobody = Figure(statistics.median(costs["nobody"]), MICROSECONDS)
    return Row(
        f"the dispatcher alone, {MANY} followers with `/account = '…'`: {rounds} rounds of {changes:,} changes",
        Figure(statistics.median(costs["by value"]), MICROSECONDS),
        peer=Figure(statistics.median(costs["one by one"]), MICROSECONDS),
        judged=ratio(costs["one by one"], costs["by value"]),
        target=TARGET,
        note=f"a change; peer: the same filters, asked one by one; {spread}; without followers {nobody}",
    )


def _chunk(count: int) -> Changes:
    """New records in one commit."""

    def constant(number: int) -> Column:
        column = Column()
        column.constant(number, count)
        return column

    versions = Column()
    versions.counting(1_700_000_000 * MICROS, count)
    numbers = range(count)
    return Changes(
        1,
        1,
        bytes([PUT]) * count,
        versions,
        constant(1_700_000_000 * MICROS),
        constant(NEVER),
        constant(0),
        constant(0),
        constant(0),
        constant(0),
        [key.encode() for key in keys(numbers)],
        documents(numbers),
    )


class _Asked(VersionMatcher):
    """A filter that does not name its values."""

    def points(self, key_paths: object) -> tuple[Field, tuple[Entry, ...]] | None:
        return None


class _Member:
    """A subscriber that takes all messages, and keeps nothing."""

    several = False
    wants_previous = False
    conflates = False

    def __init__(self, matcher: VersionMatcher) -> None:
        self._matcher = matcher

    def follows(self, topic: Topic) -> bool:
        return True

    def view(self, topic: Topic) -> tuple[VersionMatcher, Wants]:
        return self._matcher, Wants()

    def joined(self, position: int) -> None: ...
    def detached(self, position: int) -> None: ...
    def end(self, error: StoreError) -> None: ...

    def push(self, frames: Sequence[ChangeFrame | Unjudged]) -> bool:
        return True


def _followed(topic: Topic, matchers: Sequence[VersionMatcher]) -> FollowedTopic:
    followed = FollowedTopic(topic)
    for matcher in matchers:
        followed.join(_Member(matcher))
    return followed


def _server(setting: Setting, accounts: Sequence[str]) -> Row:
    records = setting.size(30_000, quick=10_000)
    rounds = setting.size(3, quick=2)
    ways = {
        "by value": [f"/account = '{account}'" for account in accounts],
        "one by one": [f"CONCAT(/account) = '{account}'" for account in accounts],
        "nobody": [],
    }
    number = 0
    with ExitStack() as stack:
        server = stack.enter_context(SowServer(setting.directory / "sow"))
        side = stack.enter_context(Followers(server.address))
        # It gets no changes but frequent progress, because an acknowledged change need not have been dispatched yet.
        watch = side.subscribe([NOTHING])

        def cpu_micros(way: str) -> float:
            nonlocal number
            payloads = documents(range(number, number + records))
            number += records
            changes = Counter(str(json.loads(payload)["account"]) for payload in payloads)
            followers = side.subscribe(ways[way], progress_micros=0)
            before = server.cpu_seconds()
            side.publish(payloads, per_tick=AT_ONCE_RECORDS, tick_seconds=0.0, until=watch)
            spent = server.cpu_seconds() - before
            for follower, account in zip(followers, accounts, strict=False):  # "nobody" has no followers
                side.run(follower.receive(changes[account]))
            side.unsubscribe(followers)
            assert all(
                len(follower.keys) == changes[account] for follower, account in zip(followers, accounts, strict=False)
            ), "each follower gets the changes of its account"
            return spent / records * MICROS

        setting.say(f"{rounds} rounds of {records:,} records, {MANY} followers on a server")
        cpu_micros("nobody")  # caches are warm
        costs = take_turns(rounds, {way: partial(cpu_micros, way) for way in ways})
    by_value, one_by_one, nobody = (statistics.median(costs[way]) for way in ways)
    return Row(
        f"CPU of the server a record, {MANY} followers with `/account = '…'`: {rounds} rounds of {records:,} records",
        Figure(by_value, MICROSECONDS),
        peer=Figure(one_by_one, MICROSECONDS),
        note=f"for information; peer: `CONCAT(/account) = '…'`, which names no value; without followers"
        f" {Figure(nobody, MICROSECONDS)}: publishing, storing and journaling are in all three",
    )
