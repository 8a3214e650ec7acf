"""Dead letters in a commit: the copies of expired records, and of entries that a durable has set aside (rules T3, J15).

[1]  A dead letter comes with its expiry, in one commit, and has effects in turn: it may replace an overdue record, or
     be due at once. So any expiry may change other topics, and even this one.
[2]  The letters of an atomic request come after it: for the followers of its topic they are not part of it.
[3]  A letter is this instance's own change, whoever sent the record that expired.
"""

from __future__ import annotations

from collections.abc import Sequence

from sow_server.engine.catalog.topics import UNDELIVERED_ID, Topic, undelivered_topic
from sow_server.engine.commit import letter_copies
from sow_server.engine.commit.draft import Draft, Removed
from sow_server.engine.commit.letter_copies import HOPS_MAX, Fate
from sow_server.engine.stored import BURY, EXPIRE, HEADER, PAYLOAD, PUBLISH_TIME, PUT, RECORD_KEY, Entry, header
from sow_server.engine.values import lifetimes
from sow_server.engine.values.model import ABSENT


class Letters:
    """The dead letters of one draft."""

    __slots__ = ("hops", "posted")

    def __init__(self) -> None:
        self.hops = 0
        """The number of deliveries under way, each caused by an expiry of the previous one."""
        self.posted = 0
        """The number of letters, whatever their outcome."""


def on_removed(draft: Draft, topic: Topic, removed: Removed) -> None:
    """Posts the dead letters of records that expire."""
    if removed.change == EXPIRE and removed.letters and topic.settings.dead_letter:
        draft.after_request(lambda: _post(draft, topic, removed.keys, removed.values))


def set_aside(draft: Draft, topic: Topic, durable: str, entries: Sequence[Entry]) -> None:
    """Posts the dead letters of journal entries that a durable has set aside (rule J15)."""
    kept = [entry for entry in entries if entry.change != BURY]
    values = [
        header(
            origin=entry.origin,
            payload_bytes=len(entry.payload),
            version=entry.version,
            publish_time=entry.publish_time_micros,
            expire_time=entry.expire_time_micros,
            sequence=0,
        )
        + entry.payload
        for entry in kept
    ]
    keys = [entry.key for entry in kept]
    draft.after_request(lambda: _post(draft, topic, keys, values, durable))


def undelivered(draft: Draft) -> Topic:
    """The store's own topic of dead letters without a target. It is made when it is first asked for."""
    found = existing_undelivered(draft)
    if found is None:
        found = undelivered_topic(draft.now, draft.next_sequence - 1)
        draft.new_topics.append(found)
    return found


def existing_undelivered(draft: Draft) -> Topic | None:
    """The store's own topic of dead letters without a target, if it exists, or is created in this draft."""
    made = (topic for topic in draft.new_topics if topic.id == UNDELIVERED_ID)
    return draft.topics.by_id.get(UNDELIVERED_ID) or next(made, None)


def deliver_waiting(draft: Draft, box: Topic, target: Topic, store_keys: list[bytes], values: list[bytes]) -> None:
    """Moves records of `box`, the store's own topic, to `target`, as far as it can take them."""
    keys: list[bytes] = []
    payloads: list[bytes] = []
    rivals = {
        key: [box.prefix + other for other in letter_copies.rivals(key[RECORD_KEY], target)] for key in store_keys
    }
    waiting = draft.read([other for others in rivals.values() for other in others])
    draft.fetch_bodies(store_keys)
    for store_key, value in zip(store_keys, values, strict=True):
        key = letter_copies.waiting_for(store_key[RECORD_KEY], target)
        if key is None:
            continue
        draft.delete(box, store_key[RECORD_KEY], store_key, value[HEADER])
        there = target.prefix + key
        draft.fetch_heads([there])
        head = draft.live_head(target, key, there)
        # A record that was put under that key since is newer: it would have replaced the copy, if that had not had to
        # wait. The same holds for a newer copy that waits, too, wherever it is in the order of keys.
        others = rivals[store_key]
        outlived = any(waiting[other][PUBLISH_TIME] > value[PUBLISH_TIME] for other in others if other in waiting)
        if not outlived and (head is None or head[PUBLISH_TIME] < value[PUBLISH_TIME]):
            keys.append(key)
            payloads.append(value[PAYLOAD])
    _count(draft, Fate.DELIVERED, len(keys))
    _deliver(draft, target, keys, payloads)


def _post(draft: Draft, topic: Topic, keys: Sequence[bytes], values: Sequence[bytes], durable: str = "") -> None:
    """Puts the dead letters of records that have just expired, or that a durable has set aside, into their targets."""
    if draft.part(Letters).hops == HOPS_MAX:
        _count(draft, Fate.DROPPED, len(keys))
        return
    post = letter_copies.post(draft.topics, topic, keys, values, durable)
    _count(draft, Fate.DROPPED, post.dropped)
    _count(draft, Fate.ENDED, post.ended)
    if post.keys:
        _count(draft, post.fate, len(post.keys))
        _deliver(draft, post.target or undelivered(draft), post.keys, post.payloads)


def _deliver(draft: Draft, target: Topic, keys: list[bytes], payloads: list[bytes]) -> None:
    """Puts copies into their topic, which gives them their lifetime. An existing record is replaced."""
    letters = draft.part(Letters)
    expire_time = lifetimes.expire_time(target.settings, ABSENT, draft.now)
    store_keys = [target.prefix + key for key in keys]
    draft.fetch_heads(store_keys)
    letters.hops += 1
    source, draft.journal.source = draft.journal.source, 0  # [3]
    for key, store_key, payload in zip(keys, store_keys, payloads, strict=True):
        head = draft.live_head(target, key, store_key)
        draft.put(
            target,
            key,
            store_key,
            head,
            payload,
            change=PUT,
            publish_time=draft.now,
            expire_time=expire_time,
            hand_over=True,
        )
    letters.hops -= 1
    draft.journal.source = source


def _count(draft: Draft, fate: Fate, count: int) -> None:
    if count:
        draft.counts[fate] = draft.counts.get(fate, 0) + count
        draft.part(Letters).posted += count
