"""The head cache: an entry equals the record on disk (heads [1]), and the cache is bounded (heads [2])."""

from __future__ import annotations

from sow_server.engine.disk.heads import HeadCache


def look_up(cache: HeadCache, *keys: bytes) -> tuple[dict[bytes, bytes], list[bytes]]:
    heads: dict[bytes, bytes | None] = {}
    missing = cache.find(keys, heads)
    assert heads.keys() == set(keys), "each key has its head, or None"
    found = {key: head for key, head in heads.items() if head is not None}
    assert missing == [key for key in keys if key not in found]
    return found, missing


def test_committed_heads_are_found_and_the_rest_is_missing() -> None:
    cache = HeadCache(10)
    cache.update({b"a": b"1", b"b": b"2"}, [])
    assert look_up(cache, b"a", b"x", b"b") == ({b"a": b"1", b"b": b"2"}, [b"x"])


def test_a_head_that_the_commit_knows_already_is_not_looked_up() -> None:
    cache = HeadCache(10)
    cache.update({b"a": b"1"}, [])
    known: dict[bytes, bytes | None] = {b"a": b"newer", b"b": None}
    assert cache.find([b"a", b"b"], known) == []
    assert known == {b"a": b"newer", b"b": None}


def test_a_removed_record_is_forgotten_in_both_generations() -> None:
    """heads [1]."""
    cache = HeadCache(2)
    cache.update({b"a": b"1", b"b": b"1"}, [])  # more than half: these become the old generation
    cache.update({b"c": b"1"}, [])
    cache.update({b"a": None, b"c": None}, [b"a", b"c"])
    assert look_up(cache, b"a", b"b", b"c") == ({b"b": b"1"}, [b"a", b"c"])


def test_a_record_that_was_removed_and_put_again_in_one_commit_is_known() -> None:
    """heads [1]."""
    cache = HeadCache(10)
    cache.update({b"a": b"1"}, [])
    cache.update({b"a": b"2"}, [b"a", b"a"])
    assert look_up(cache, b"a") == ({b"a": b"2"}, [])


def test_a_key_that_was_only_looked_for_is_not_known_to_be_absent() -> None:
    """heads [1]: a commit whose condition failed leaves None under a key; another instance of it may come later."""
    cache = HeadCache(10)
    cache.update({b"a": None}, [])
    assert look_up(cache, b"a") == ({}, [b"a"])


def test_the_newer_generation_wins() -> None:
    cache = HeadCache(4)
    cache.update({b"a": b"1", b"b": b"1", b"c": b"1"}, [])
    cache.update({b"a": b"2"}, [])
    assert look_up(cache, b"a", b"b") == ({b"a": b"2", b"b": b"1"}, [])


def test_the_older_generation_goes_when_the_younger_is_full() -> None:
    """heads [2]."""
    cache = HeadCache(4)
    cache.update({b"a": b"1", b"b": b"1", b"c": b"1"}, [])
    cache.update({b"d": b"1", b"e": b"1", b"f": b"1"}, [])
    assert look_up(cache, b"a", b"d") == ({b"d": b"1"}, [b"a"])


def test_the_cache_stays_bounded() -> None:
    """heads [2]: by its capacity, and the entries that the last commits added at once."""
    cache = HeadCache(100)
    for start in range(0, 2000, 7):
        cache.update({b"%d" % index: b"1" for index in range(start, start + 7)}, [])
        assert len(cache) <= 100 + 2 * 7
    assert len(cache) > 50


def test_clearing_forgets_everything() -> None:
    cache = HeadCache(2)
    cache.update({b"a": b"1", b"b": b"1"}, [])
    cache.update({b"c": b"1"}, [])
    cache.clear()
    assert look_up(cache, b"a", b"c") == ({}, [b"a", b"c"])
    assert len(cache) == 0
