"""What a change of a setting is said to cause: each number is one that the server has counted, or there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast

import pytest

from sow_client import (
    AsyncClient,
    Durable,
    DurableFigures,
    DurableSettings,
    IndexStatus,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Topic,
    TopicSettings,
    TopicStatistics,
    Unavailable,
)
from sow_console import consequences
from sow_console.pages.overview import filled

NOW: Final = datetime(2026, 11, 28, 12, tzinfo=UTC)
FIGURES: Final = TopicStatistics(
    live_records=1_200,
    stored_bytes=9_000,
    overdue_records=3,
    journal_bytes=4_096,
    journal_entries=5_000,
    floor_sequence=1,
)


class Counting:
    """A client that knows the numbers of some filters. It may not count where it has no numbers at all."""

    def __init__(self, counts: Mapping[str, int] | None, durables: Sequence[Durable] | None, names: Sequence[Topic]):
        self._counts, self._durables, self._names = counts, durables, names

    async def count(self, topic: str, filter_text: str) -> int:
        assert topic == "orders"
        if self._counts is None:
            raise PermissionDenied("no reads", reason="PERMISSION_DENIED", details={})
        return self._counts[filter_text]

    async def durables(self, topic: str, *, with_figures: bool) -> Sequence[Durable]:
        assert topic == "orders"
        assert with_figures
        if self._durables is None:
            raise Unavailable("gone", reason="UNREACHABLE", details={})
        return self._durables

    async def describe_topic(self, name: str) -> Topic:
        if name == "elsewhere":
            raise Unavailable("the cell b, where elsewhere lives: refused", reason="UNREACHABLE", details={})
        for one in self._names:
            if one.name == name:
                return one
        raise NotFound(f"no topic {name}", reason="TOPIC_NOT_FOUND", details={})


def topic(name: str = "orders", figures: TopicStatistics | None = FIGURES, **settings: Any) -> Topic:
    indexes = tuple(IndexStatus(path, complete=True) for path in settings.get("index", ()))
    return Topic(name, TopicSettings(**settings), False, NOW, figures, indexes)


def durable(
    name: str, *, entries: int = 0, size: int = 0, age: int = 0, idle: int = 0, attached: bool = False
) -> Durable:
    figures = DurableFigures(9_000, 90_000, entries, size, timedelta(seconds=age) if age else None, True)
    return Durable("orders", name, "", "", "", attached, NOW, NOW - timedelta(seconds=idle), DurableSettings(), figures)


def said(
    about: Topic,
    setting: str,
    value: object,
    *,
    counts: Mapping[str, int] | None = None,
    durables: Sequence[Durable] | None = (),
    names: Sequence[Topic] = (),
) -> list[str]:
    client = cast(AsyncClient, Counting(counts, durables, names))
    return asyncio.run(consequences.follows(client, about, setting, value, NOW))


# ---- lifetimes ----

WITH_LIFETIME: Final = {"@expire_time IS NOT NULL": 1_050}
OVERDUE: Final = {"@expire_time <= NOW_MICROS()": 7, "@expire_time IS NULL": 30}


@pytest.mark.parametrize(
    ("was", "value", "sentences"),
    [
        (
            "enabled",
            "disabled",
            ["overdue now expire first", "1,050 records that have a lifetime do not expire"],
        ),
        ("disabled", "reject", ["1,050 records", "with a lifetime are refused from now on"]),
    ],
)
def test_without_expiration_the_records_with_a_lifetime_are_counted(was: str, value: str, sentences: list[str]) -> None:
    told = said(topic(expiration=was), "expiration", value, counts=WITH_LIFETIME)
    assert len(told) == len(sentences)
    assert all(part in sentence for part, sentence in zip(sentences, told, strict=True))


def test_with_expiration_again_the_overdue_ones_are_counted() -> None:
    assert said(topic(expiration="disabled"), "expiration", "20m", counts=OVERDUE) == [
        "7 records whose lifetime is over expire at once.",
        "The 1,200 records that are there keep their expire times (rule L12).",
        "30 of them never expire; new records without a lifetime live for 20m.",
    ]


def test_records_beyond_a_new_bound_of_the_lifetime_are_counted() -> None:
    most = {"@expire_time > NOW_MICROS() + 3600000000": 12, "@expire_time IS NULL": 3}
    assert said(topic(), "max_ttl", "1h", counts=most)[1:] == [
        "12 of them have more left than new ones will get, and 3 never expire.",
        "To lower those, too: sow topic restamp orders --cap 1h",
    ]
    least = {"@expire_time < NOW_MICROS() + 60000000": 4}
    assert len(said(topic(), "max_ttl", None, counts={})) == 1
    assert said(topic(), "min_ttl", "1m", counts=least)[1:] == ["4 of them have less left than new ones will get."]


@pytest.mark.parametrize(
    ("setting", "value", "left"),
    [
        ("expiration", "disabled", ["Records that are overdue now expire first."]),
        ("default_ttl", "1h", ["The 1,200 records that are there keep their expire times (rule L12)."]),
        ("min_ttl", "1h", ["The 1,200 records that are there keep their expire times (rule L12)."]),
    ],
)
def test_no_number_is_said_where_the_caller_may_not_count(setting: str, value: str, left: list[str]) -> None:
    assert said(topic(expiration="enabled"), setting, value) == left


def test_a_large_topic_is_not_counted_for_a_preview() -> None:
    large = TopicStatistics(consequences.COUNTED_MAX + 1, 0, 0, 0, 0, 1)
    told = said(topic(figures=large, expiration="disabled"), "expiration", "20m", counts=OVERDUE)
    assert told == ["The 1,000,001 records that are there keep their expire times (rule L12)."]


@pytest.mark.parametrize(
    ("setting", "value", "effect"),
    [
        ("max_records", 1_203, "Publishes that add beyond it are refused (TOPIC_FULL)."),
        ("max_records", 1_202, "That is more than this: publishes that add are refused at once (TOPIC_FULL)."),
        ("max_records", None, "Publishes may add any number of them."),
    ],
)
def test_what_a_cap_does_to_a_topic_is_said(setting: str, value: object, effect: str) -> None:
    """T7."""
    assert said(topic(), setting, value) == ["The topic has 1,203 records now; none is removed.", effect]
    assert said(topic(figures=None), setting, value) == []


def test_how_full_a_topic_is_in_the_list() -> None:
    """T7: by the cap that is nearer; overdue records are stored ones."""
    figures = TopicStatistics(80, 500, 10, 0, 0, 1)
    assert filled(topic(figures=figures, max_records=100)) == 0.9
    assert filled(topic(figures=figures, max_records=100, max_stored_bytes=500)) == 1
    assert filled(topic(figures=figures)) == filled(topic(figures=None, max_records=100)) == 0
    assert filled(topic(figures=figures, max_records=-1)) == 0


# ---- the journal ----


@pytest.mark.parametrize(
    ("setting", "value", "sentence"),
    [
        ("journal", False, "Subscriptions cannot resume, and there is no history of a key any more."),
        ("max_entries", 2_000, "3,000 of them are discarded with the next pruning, acknowledged or not."),
        ("max_entries", 9_000, "0 of them are discarded with the next pruning, acknowledged or not."),
        ("max_bytes", 1_024, "3.0 KiB of them are discarded with the next pruning, acknowledged or not."),
        ("max_age", "7d", "Changes older than 7d are discarded, acknowledged or not."),
        ("retain_time", "7d", "Changes beyond the retention are discarded once every durable has acknowledged them."),
        ("max_age", None, "Changes beyond the retention are discarded once every durable has acknowledged them."),
    ],
)
def test_what_the_journal_loses_is_said(setting: str, value: object, sentence: str) -> None:
    assert said(topic(), setting, value) == ["The journal has 5,000 changes, 4.0 KiB.", sentence]


def test_durables_that_a_bound_of_the_journal_may_cut_are_named() -> None:
    durables = [durable("billing", entries=40), durable("done")]
    assert said(topic(), "max_entries", 10, durables=durables)[2:] == [
        "Durables with a backlog may get a gap: billing."
    ]
    assert not said(topic(), "max_entries", 10, durables=durables[1:])[2:]
    assert not said(topic(), "retain_bytes", 10, durables=durables)[2:], "the retention keeps what they need"


def test_of_a_journal_without_figures_nothing_is_said() -> None:
    assert said(topic(figures=None), "max_entries", 10) == []
    assert said(topic(), "journal", True) == ["The journal has 5,000 changes, 4.0 KiB."]


# ---- durables ----


@pytest.mark.parametrize(
    ("setting", "value", "names"),
    [
        ("backlog_quota_bytes", 500, "billing, audit"),
        ("backlog_quota_entries", 30, "billing"),
        ("backlog_quota_age", "1m", "billing"),
    ],
)
@pytest.mark.parametrize(
    ("action", "effect"),
    [
        (None, "publishes wait at once (hold)"),
        ("reject", "publishes are refused at once (reject)"),
        ("evict", "the oldest entries are evicted at once (evict)"),
        ("conflate", "the backlog is replaced by a snapshot at once (conflate)"),
    ],
)
def test_durables_beyond_a_new_quota_are_named(
    setting: str, value: object, names: str, action: str | None, effect: str
) -> None:
    durables = [durable("billing", entries=40, size=900, age=90), durable("audit", entries=20, size=600, age=30)]
    told = said(topic(backlog_action=action), setting, value, durables=durables)
    assert told == [f"Beyond it now: {names}. So {effect}."]


def test_entries_beyond_a_new_age_count_as_acknowledged() -> None:
    durables = [durable("billing", entries=40, age=90), durable("done")]
    assert said(topic(), "backlog_ttl", "1m", durables=durables) == [
        "Entries older than 1m count as acknowledged at once in: billing."
    ]
    assert said(topic(), "backlog_ttl", "2m", durables=durables) == ["None of the 2 durables is beyond it now."]


def test_idle_durables_that_are_removed_are_named() -> None:
    durables = [durable("left", idle=90), durable("used", idle=5), durable("attached", idle=90, attached=True)]
    assert said(topic(), "durable_idle_ttl", "1m", durables=durables) == [
        "Removed with the next look at idle ones: left."
    ]
    assert said(topic(), "durable_idle_ttl", "1h", durables=durables) == ["None is idle for so long."]


def test_of_durables_without_figures_nothing_is_counted() -> None:
    assert said(topic(), "delivery_limit", 3) == ["The topic has no durables now."]
    assert said(topic(), "delivery_limit", 3, durables=None) == [], "the server did not tell them"
    assert said(topic(), "delivery_limit", 3, durables=[durable("one")]) == ["It counts for 1 durables from now on."]


# ---- the rest ----


def test_indexes_that_are_built_and_dropped_are_named() -> None:
    about = topic(index=("/a", "/b"))
    assert said(about, "index", ("/b", "/c")) == [
        "/c: built in the background from 1,200 records.",
        "/a: dropped. Queries by it read every record.",
    ]
    assert said(about, "index", ("/b", "/a")) == ["The indexes stay as they are."]


def test_where_letters_go_is_said() -> None:
    names = [topic("dead"), topic("keyed", key=("/id",))]
    copied = "Records that expire from now on are copied there."
    assert said(topic(), "dead_letter", "dead", names=names) == [copied]
    absent = said(topic(), "dead_letter", "absent", names=names)
    assert absent[0] == copied
    assert "absent does not exist, or you may not see it: letters wait in _undelivered" in absent[1]
    assert "keyed has key fields, so it can take no letters" in said(topic(), "dead_letter", "keyed", names=names)[1]
    assert said(topic(), "dead_letter", "elsewhere", names=names) == [
        copied,
        "It is not known whether elsewhere can take them: the cell b, where elsewhere lives: refused",
    ], "and cells that have nothing to do with it may be down"
    assert said(topic(), "dead_letter", "") == [
        "Records that expire from now on are gone. Letters that are there stay."
    ]
    assert said(topic(), "on_missing", "drop") == ["It counts for records that expire from now on."]


def test_a_topic_that_deletes_itself_is_said_and_other_settings_cause_nothing() -> None:
    assert "deleted with its records" in said(topic(), "auto_delete", True)[0]
    assert said(topic(), "auto_delete", False) == []
    assert said(topic(), "publish_is_use", True) == []


def test_a_setting_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="there is no setting 'colour'"):
        consequences.parsed("colour", "red")
