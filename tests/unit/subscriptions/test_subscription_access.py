"""A subscriber that may see a part of a topic: no message has a hidden value or another record (rules A4, A5)."""

from __future__ import annotations

import json

import pytest

from sow_server.filters import parse
from sow_server.filters.restriction import UNRESTRICTED, Restriction
from tests.support.stores.stores import SECOND, Rig
from tests.support.stores.subscribers import EARLIEST, Follower, Subscribers, rig, subscribers

__all__ = ["rig", "subscribers"]  # fixtures

HIDE = Restriction(None, (("iban",), ("client", "iban")))
EU = Restriction(parse("/region = 'eu'"), HIDE.hidden)
US = Restriction(parse("/region = 'us'"), HIDE.hidden)


def record(price: int, region: str = "eu", iban: str = "CANARY") -> bytes:
    document = {"region": region, "px": price, "iban": iban, "client": [{"iban": iban}, {"iban": iban, "n": 1}]}
    return json.dumps(document, separators=(",", ":")).encode()


def seen(price: int, region: str = "eu") -> bytes:
    document = {"region": region, "px": price, "client": [{}, {"n": 1}]}
    return json.dumps(document, separators=(",", ":")).encode()


def everything(follower: Follower) -> str:
    return repr((follower.changes(), follower.snapshot()))


def live(rig: Rig) -> None:
    """The life of a record: it enters, stops to match, matches again, changes where nobody sees it, and goes."""
    rig.put("orders", "a", record(6))
    rig.put("orders", "b", record(7, "us"))
    rig.put("orders", "a", record(1))
    rig.put("orders", "a", record(8))
    rig.put("orders", "a", record(8, iban="CANARY-2"))
    rig.touch("orders", "a", ttl=60 * SECOND)
    rig.delete("orders", "a")
    rig.put("orders", "c", record(9), ttl=SECOND)
    rig.put("orders", "d", record(9))
    rig.time.tick(2 * SECOND)
    rig.store.writer.step()


@pytest.mark.parametrize("restriction", [HIDE, EU], ids=["hide", "rows"])
@pytest.mark.parametrize(
    "wants",
    [
        {},
        {"oof": True},
        {"oof": True, "sow": True},
        {"delta": True, "oof": True},
        {"delta": True, "empty_deltas": True},
        {"changes": True},
        {"oof": True, "conflation": SECOND // 10},
        {"oof": True, "delta": True, "conflation": SECOND // 10},
        {"delta": True, "empty_deltas": True, "conflation": SECOND // 10},
        {"oof": True, "start": EARLIEST},
        {"changes": True, "start": EARLIEST},
    ],
    ids=str,
)
def test_no_message_has_a_hidden_value(
    rig: Rig, subscribers: Subscribers, wants: dict[str, object], restriction: Restriction
) -> None:
    rig.put("orders", "early", record(6))
    follower = subscribers.subscribe("orders", filter="/px > 5", restriction=restriction, **wants)  # type: ignore[arg-type]  # as above
    live(rig)
    follower.news()
    rig.time.tick(SECOND)
    follower.news()
    assert "px" in everything(follower)
    assert "CANARY" not in everything(follower)
    assert "iban" not in everything(follower)
    if restriction is EU:
        assert '"us"' not in everything(follower)
        assert b"b" not in [row.key for row in follower.changes()]


def test_messages_to_a_subscriber_with_rows(rig: Rig, subscribers: Subscribers) -> None:
    follower = subscribers.subscribe("orders", filter="/px > 5", oof=True, restriction=EU)
    rig.put("orders", "a", record(6))
    rig.put("orders", "a", record(1))
    rig.put("orders", "a", record(7))
    rig.put("orders", "a", record(8, "us"))
    rig.put("orders", "a", record(9, "us"))
    rig.delete("orders", "a")
    rig.put("orders", "a", record(9, "us"))
    rig.put("orders", "a", record(9))
    rig.delete("orders", "a")
    assert follower.news() == [
        ("put", "a", seen(6)),
        ("oof match", "a", seen(1)),
        ("put", "a", seen(7)),
        ("oof not permitted", "a", b""),
        ("put", "a", seen(9)),
        ("oof deleted", "a", seen(9)),
    ]


def test_a_reader_of_changes_hears_a_delete_without_payload(rig: Rig, subscribers: Subscribers) -> None:
    follower = subscribers.subscribe("orders", changes=True, restriction=EU)
    rig.put("orders", "a", record(6))
    rig.put("orders", "a", record(8, "us"))
    rig.delete("orders", "a")
    assert follower.news() == [("put", "a", seen(6)), ("delete not permitted", "a", b"")]


def test_equal_subscribers_with_other_grants_share_no_message(rig: Rig, subscribers: Subscribers) -> None:
    """Frames are made once for equal subscribers. Equal means: also within the same restriction."""
    given = [UNRESTRICTED, HIDE, EU, US, Restriction(EU.rows)]
    followers = [subscribers.subscribe("orders", filter="/px > 5", restriction=one) for one in (*given, *given)]
    rig.put("orders", "a", record(6))
    rig.put("orders", "b", record(7, "us"))
    expected: list[list[tuple[str, str, bytes]]] = [
        [("put", "a", record(6)), ("put", "b", record(7, "us"))],
        [("put", "a", seen(6)), ("put", "b", seen(7, "us"))],
        [("put", "a", seen(6))],
        [("put", "b", seen(7, "us"))],
        [("put", "a", record(6))],
    ]
    assert [follower.news() for follower in followers] == expected * 2


def test_a_hidden_field_does_not_decide_what_is_sent(rig: Rig, subscribers: Subscribers) -> None:
    guesses = [
        subscribers.subscribe("orders", filter=text, restriction=HIDE)
        for text in ("/iban = 'CANARY'", "/client/iban LIKE '^C'", "/iban IS NOT NULL", "LENGTH(/iban) > 0")
    ]
    all_of_them = subscribers.subscribe("orders", filter="/iban IS NULL AND /client/iban IS NULL", restriction=HIDE)
    rig.put("orders", "a", record(6))
    assert [guess.news() for guess in guesses] == [[]] * 4
    assert all_of_them.news() == [("put", "a", seen(6))]


def test_a_record_whose_earlier_version_is_gone_is_not_told_of(rig: Rig, subscribers: Subscribers) -> None:
    """Nobody knows whether the subscriber ever saw it (rule A4)."""
    rig.put("orders", "a", record(6, "us"))
    start = EARLIEST
    follower = subscribers.subscribe("orders", oof=True, start=start, restriction=EU)
    rig.put("orders", "a", record(7, "us"))
    assert follower.news() == []
