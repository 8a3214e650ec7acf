"""Where replicated durables have their consumers (holders [1], [2]; rule F15)."""

from __future__ import annotations

from sow_server.subscriptions.durable.holders import Holder, Holders

KEY = 1, "d"


def tell(one: Holders, other: Holders) -> Holder | None:
    """One instance tells another one of its consumer."""
    return other.heard(KEY, one.here(KEY), one.instance)


def test_the_consumer_that_came_first_stays_whoever_hears_first() -> None:
    a, b = Holders("a"), Holders("b")
    a.attach(KEY, 20, force=False)
    b.attach(KEY, 10, force=False)
    assert tell(a, b) is None
    assert tell(b, a) == Holder(10, "b")
    assert (a.elsewhere(KEY), b.elsewhere(KEY)) == (Holder(10, "b"), Holder(20, "a"))


def test_of_two_that_came_at_once_that_of_the_first_name_stays() -> None:
    a, b = Holders("a"), Holders("b")
    a.attach(KEY, 10, force=False)
    b.attach(KEY, 10, force=False)
    assert tell(a, b) == Holder(10, "a")
    assert tell(b, a) is None


def test_one_that_takes_over_comes_before_all_others_whatever_its_clock_says() -> None:
    a, b, c = Holders("a"), Holders("b"), Holders("c")
    a.attach(KEY, 10, force=False)
    c.attach(KEY, 7, force=False)
    tell(a, b)
    tell(c, b)
    assert b.elsewhere(KEY) == Holder(7, "c")
    b.attach(KEY, 1_000, force=True)
    assert b.here(KEY) == Holder(6, "b", forced=True)
    assert tell(b, a) == tell(b, c) == Holder(6, "b", forced=True)
    assert tell(a, b) is tell(c, b) is None


def test_force_without_another_consumer_is_none() -> None:
    a = Holders("a")
    a.attach(KEY, 10, force=True)
    assert a.here(KEY) == Holder(10, "a")


def test_a_consumer_counts_until_it_has_gone_or_its_link_is_gone() -> None:
    a = Holders("a")
    a.heard(KEY, Holder(10, "b"), "b")
    a.heard(KEY, Holder(20, "c"), "c")
    assert a.left("b") == [KEY]
    assert a.left("b") == []
    assert a.elsewhere(KEY) == Holder(20, "c")
    a.heard(KEY, None, "c")
    assert a.elsewhere(KEY) is None


def test_peers_are_told_at_once_of_a_consumer_that_comes_or_goes() -> None:
    a, woken = Holders("a"), list[int]()
    a.wake = lambda: woken.append(a.version)
    a.attach(KEY, 10, force=False)
    a.detach(KEY)
    a.detach(KEY)
    assert woken == [1, 2]
