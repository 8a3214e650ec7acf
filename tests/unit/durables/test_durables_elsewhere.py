"""Replicated durables between instances, on real stores and links under one clock (rules F14 to F17)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from sow_peering import DurableMark, Stamp
from sow_replication.options import NodeOptions, PeerOptions
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.durables import Durable, RewindTo
from sow_server.engine.replicas import marks
from sow_server.engine.values.bookmarks import Position
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.subscriptions.durable.consumer import Attachment, Consumer
from sow_server.subscriptions.frames import ChangeFrame, Frame, GapNotice
from sow_server.subscriptions.request import FROM_NOW, Start, StartKind
from sow_server.subscriptions.subscription import Read, Send
from tests.property.test_replication_simulation import edges
from tests.support.simulation.moving_consumers import ConsumedStore, consumed, make_store
from tests.support.simulation.replica_rocks import RocksStore
from tests.support.simulation.replica_rows import SECOND
from tests.support.simulation.replica_world import Instance, World
from tests.support.stores.subscribers import request

EARLIEST = Start(StartKind.EARLIEST)
SOON = 300_000
"""Enough for a message that is not delayed until the next second."""
LATE = 31
"""Seconds until both ends of a broken connection have noticed it: in the simulation some notice by the silence."""


class Linked:
    """Instances whose links are up."""

    def __init__(
        self, folder: Path, names: str, links: Sequence[tuple[str, str]], offsets: Sequence[int] = (0, 0, 0)
    ) -> None:
        self.stores: list[RocksStore] = []
        self.world = World(1, make_store(ConsumedStore, folder, self.stores))
        for name, offset in zip(names, offsets, strict=False):
            options = NodeOptions(
                peers=tuple(PeerOptions(b, b) for a, b in links if a == name),
                accept=tuple(a for a, b in links if b == name),
                tombstone_grace_micros=10_000 * SECOND,
            )
            self.world.add(name, options, offset=offset)
        for instance in self.world.instances.values():
            instance.store.create("T")
            self.world.soon(instance)
        self.run(5)

    def __getitem__(self, name: str) -> Instance:
        return self.world.instances[name]

    def run(self, seconds: float) -> None:
        self.world.run(int(seconds * SECOND))

    def put(self, name: str, *keys: str, ttl_micros: int | None = None) -> None:
        for key in keys:
            self[name].store.publish("T", key, "p1", ttl_micros)
            self.world.soon(self[name])
            self.run(0.1)

    def attach(self, name: str, **options: object) -> Following:
        """A consumer at an instance. Raises StoreError."""
        store, answers = consumed(self[name]), list[Consumer | StoreError]()
        oof, start = bool(options.pop("oof", False)), options.pop("start", FROM_NOW)
        assert isinstance(start, Start)
        text = str(options.pop("filter", ""))
        asked = request(store._rig.store, topic="T", filter=text, oof=oof, start=start)
        declared = {"replicated": True}
        store.consumers.attach(asked, Attachment("d", declared=declared, **options)).then(answers.append)  # type: ignore[arg-type]  # the tests name fields
        self.world.soon(self[name])
        self.run(0.1)
        (answer,) = answers
        if isinstance(answer, StoreError):
            raise answer
        return Following(self, name, answer)

    def row(self, name: str) -> Durable:
        found = consumed(self[name]).row
        assert found is not None, f"none at {name}"
        return found

    def rewind(self, name: str, position: int | None = None) -> None:
        """Moves the durable back, at an instance."""
        store, answers = consumed(self[name]), list[object]()
        topic = store._rig.store.topics.by_name["T"]
        store.consumers.rewind(topic, "d", RewindTo(position=position), force=True).then(answers.append)
        self.world.soon(self[name])
        self.run(0.1)
        assert not isinstance(answers[0], StoreError)

    def lag(self, name: str) -> int:
        """Entries of the topic after the position of the durable."""
        topic = consumed(self[name])._rig.store.topics.by_name["T"]
        return topic.statistics.appended_entries - self.row(name).entries


class Following:
    """A consumer, and what it was handed."""

    def __init__(self, linked: Linked, name: str, consumer: Consumer) -> None:
        self.linked = linked
        self.name = name
        self.consumer = consumer
        self.frames: list[Frame] = []
        self.error: StoreError | None = None

    def pump(self) -> list[str]:
        """Takes what there is; returns the keys of all changes so far, removals with a minus."""
        while self.error is None:
            try:
                step = self.consumer.step()
            except StoreError as error:
                self.error = error
                self.consumer.close()
                break
            if isinstance(step, Send):
                self.frames.append(step.frame)
            elif isinstance(step, Read):
                self.consumer.took(step.run())
            else:
                break
        rows = [row for frame in self.frames if isinstance(frame, ChangeFrame) for row in frame.rows]
        return [("" if row.op == 1 else "-") + row.key.decode() for row in rows]

    def acknowledge(self, position: int | None = None) -> None:
        self.pump()
        consumer, store = self.consumer, consumed(self.linked[self.name])
        upto = consumer.sent if position is None else position
        store.consumers.acknowledge(consumer.topic, "d", consumer.session, upto)
        self.linked.world.soon(self.linked[self.name])
        self.linked.run(0.1)

    def close(self) -> None:
        self.consumer.close()
        self.linked.world.soon(self.linked[self.name])
        self.linked.run(0.1)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Linked]:
    linked = Linked(tmp_path, "ab", edges("mesh", ["a", "b"]))
    yield linked
    for store in linked.stores:
        store.close()


def test_an_acknowledged_position_is_known_at_the_peer_and_the_consumer_goes_on_there(pair: Linked) -> None:
    """Elsewhere 1. F14, F17: what was acknowledged does not come again, and nothing else is missing."""
    pair.put("a", "1", "2")
    pair.put("b", "3")
    consumer = pair.attach("a", start=EARLIEST)
    pair.run(2)
    assert consumer.pump() == ["1", "2", "3"]
    consumer.acknowledge()
    pair.run(2)
    assert pair.lag("b") == 0
    assert pair.row("b").consumed == pair.row("b").position
    pair.put("a", "4")
    pair.put("b", "5")
    pair["a"].crash()
    pair.run(LATE)
    assert pair.attach("b", expected=True).pump() == ["4", "5"]


def test_entries_that_were_not_acknowledged_come_again(pair: Linked) -> None:
    """Elsewhere 1. F14."""
    pair.put("a", "1", "2")
    consumer = pair.attach("a", start=EARLIEST)
    first = next(frame for frame in iter_changes(consumer) if frame.rows)
    consumer.acknowledge(first.rows[0].sequence)
    pair.run(2)
    consumer.close()
    pair.run(1)
    assert pair.attach("b").pump()[-1] == "2"


def iter_changes(consumer: Following) -> list[ChangeFrame]:
    consumer.pump()
    return [frame for frame in consumer.frames if isinstance(frame, ChangeFrame)]


def test_an_expiry_is_not_skipped_where_the_clock_is_ahead(tmp_path: Path) -> None:
    """F14: b expires a record before a does, and a has acknowledged everything of b's up to there."""
    linked = Linked(tmp_path, "ab", edges("mesh", ["a", "b"]), offsets=(0, 4 * SECOND))
    linked.put("a", "held", ttl_micros=6 * SECOND)
    consumer = linked.attach("a", start=EARLIEST, oof=True)
    linked.run(3)
    linked.put("b", "later")  # after the expiry at b
    linked.run(1.5)
    assert consumer.pump() == ["held", "later"], "it is not over at a"
    consumer.acknowledge()
    linked.run(1.2)
    linked["a"].crash()
    linked.run(LATE)
    assert "-held" in linked.attach("b", oof=True, expected=True).pump()
    for store in linked.stores:
        store.close()


def test_a_consumer_is_refused_while_a_peer_has_one_and_accepted_as_soon_as_it_has_gone(pair: Linked) -> None:
    """Elsewhere 3. F15."""
    consumer = pair.attach("a")
    pair.world.run(SOON)
    with pytest.raises(StoreError, match="has a consumer at a") as refused:
        pair.attach("b")
    assert (refused.value.reason, refused.value.details) == (Reason.DURABLE_IN_USE, {"instance": "a"})
    consumer.close()
    pair.world.run(SOON)
    pair.attach("b")
    pair.world.run(SOON)
    with pytest.raises(StoreError, match="has a consumer at b"):
        pair.attach("a")


def test_a_consumer_of_a_killed_instance_is_forgotten_with_its_link(pair: Linked) -> None:
    """F15."""
    pair.attach("a")
    pair.world.run(SOON)
    pair["a"].crash()
    pair.run(LATE)
    pair.attach("b")


def test_cut_off_both_may_consume_and_then_the_first_one_stays(pair: Linked) -> None:
    """Elsewhere 3. F15: the other one may wait, and go on once the first has gone."""
    first = pair.attach("a", start=EARLIEST)
    pair.run(1)
    pair.world.cut("a", "b")
    pair.world.cut("b", "a")
    pair.run(LATE)
    second = pair.attach("b", expected=True)
    pair.put("b", "1")
    assert second.pump() == ["1"]
    pair.world.heal()
    pair.run(10)
    second.pump()
    assert second.error is not None
    assert second.error.reason is Reason.DURABLE_IN_USE
    first.pump()
    assert first.error is None


def test_a_consumer_takes_over_by_force_from_another_instance(pair: Linked) -> None:
    """F15."""
    first = pair.attach("a", start=EARLIEST)
    pair.world.run(SOON)
    second = pair.attach("b", force=True)
    pair.world.run(SOON)
    first.pump()
    assert first.error is not None
    assert first.error.reason is Reason.DURABLE_TAKEN_OVER
    second.pump()
    assert second.error is None


def test_a_rewind_counts_at_all_instances(pair: Linked) -> None:
    """Elsewhere 5. F14: it is refused while the consumer is elsewhere, unless by force, which ends that consumer."""
    pair.put("a", "1", "2")
    consumer = pair.attach("a", start=EARLIEST)
    pair.run(1)
    consumer.acknowledge()
    pair.run(4)
    assert pair.lag("b") == 0
    b, answers = consumed(pair["b"]), list[object]()
    topic = b._rig.store.topics.by_name["T"]
    with pytest.raises(StoreError, match="has a consumer at a"):
        b.consumers.rewind(topic, "d", RewindTo(), force=False).then(answers.append)
    b.consumers.rewind(topic, "d", RewindTo(), force=True).then(answers.append)
    pair.world.soon(pair["b"])
    pair.run(1)
    assert not isinstance(answers[0], StoreError)
    consumer.pump()
    assert consumer.error is not None
    assert consumer.error.reason is Reason.DURABLE_DETACHED
    assert pair.row("a").rewinds == pair.row("b").rewinds
    assert pair.attach("a").pump() == ["1", "2"]


@pytest.mark.parametrize("first", ["a", "b"])
def test_rewinds_at_instances_that_are_apart_both_count(pair: Linked, first: str) -> None:
    """Elsewhere 5. F14: each consumer is handed again what it was rewound for, wherever it is. Only one of the two
    counted."""
    other = "b" if first == "a" else "a"
    pair.put("a", "1", "2")
    pair.put("b", "3")
    consumer = pair.attach("a", start=EARLIEST)
    pair.run(1)
    consumer.acknowledge()
    pair.run(4)
    consumer.close()
    pair.run(1)
    pair.world.cut("a", "b")
    pair.world.cut("b", "a")
    pair.run(LATE)
    position = pair.row(other).position
    pair.rewind(first)
    pair.run(1)
    pair.rewind(other, position - 1)
    pair.world.heal()
    pair.run(10)
    assert pair.row("a").rewinds == pair.row("b").rewinds
    assert len(pair.row("a").rewinds) == 2
    assert sorted(pair.attach(other).pump()) == ["1", "2", "3"]


def test_a_deletion_counts_at_all_instances(pair: Linked) -> None:
    """Elsewhere 5. F16."""
    consumer = pair.attach("a", start=EARLIEST)
    pair.run(1)
    b, answers = consumed(pair["b"]), list[object]()
    b.consumers.delete(b._rig.store.topics.by_name["T"], "d", force=True).then(answers.append)
    pair.world.soon(pair["b"])
    pair.run(2)
    consumer.pump()
    assert consumer.error is not None
    assert consumer.error.reason is Reason.DURABLE_DETACHED
    assert consumed(pair["a"]).row is consumed(pair["b"]).row is None
    pair.run(5)
    assert consumed(pair["a"]).row is consumed(pair["b"]).row is None


@pytest.mark.parametrize(
    "mark",
    [
        DurableMark("T", "x", "/p = ", born=Stamp(1, "x")),
        DurableMark("T", "x", "/p='a'", born=Stamp(1, "x")),
        DurableMark("T", "x", declared={"retain_bytes": -5}, born=Stamp(1, "x")),
        DurableMark("none", "x", born=Stamp(1, "x")),
        DurableMark("T", "x", born=Stamp(2**62 + 1, "x")),
        DurableMark("T", "x", born=Stamp(1, "x"), rewinds=(Stamp(2**63 - 1, "x"),)),
    ],
)
def test_a_durable_that_nobody_could_have_made_is_left_out_and_the_others_are_taken(
    pair: Linked, mark: DurableMark
) -> None:
    b, answers = consumed(pair["b"]), list[object]()
    good = DurableMark("T", "good", born=Stamp(1, "x"))
    b.replicated.take("a", [mark, good]).then(answers.append)
    pair.world.soon(pair["b"])
    pair.run(0.1)
    assert not isinstance(answers[0], StoreError)
    found = b._rig.store.durables.of(b._rig.store.topics.by_name["T"])
    assert [durable.name for durable in found] == ["good"]


def test_a_deletion_that_would_outlive_all_times_is_left_out(pair: Linked) -> None:
    """F16: a durable of this name that was made again was born at 2**63, which no message has room for: the link ended,
    again and again."""
    b, answers = consumed(pair["b"]), list[object]()
    b.replicated.take("a", [DurableMark("T", "d", buried=Stamp(2**63 - 1, "x"), removed=True)]).then(answers.append)
    pair.world.soon(pair["b"])
    pair.attach("b")
    pair.run(3)
    assert pair.row("a").born == pair.row("b").born


def test_positions_are_handed_on_along_a_line(tmp_path: Path) -> None:
    """F14: each instance tells its neighbours."""
    linked = Linked(tmp_path, "abc", edges("line both ways", ["a", "b", "c"]))
    linked.put("a", "1")
    linked.put("c", "2")
    consumer = linked.attach("a", start=EARLIEST)
    linked.run(2)
    assert sorted(consumer.pump()) == ["1", "2"]
    consumer.acknowledge()
    linked.run(6)
    assert linked.lag("c") == 0
    for store in linked.stores:
        store.close()


def test_an_instance_that_does_not_send_here_hears_nothing(tmp_path: Path) -> None:
    """F14: it would keep its journal for a durable that never moves on."""
    linked = Linked(tmp_path, "ab", edges("line", ["a", "b"]))
    linked.put("a", "1")
    linked.attach("a", start=EARLIEST).acknowledge()
    linked.run(4)
    assert consumed(linked["b"]).row is None
    for store in linked.stores:
        store.close()


def test_a_position_that_is_older_than_all_samples_starts_the_peer_earlier(
    pair: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere 2. F14: the marks live in memory. After a restart there are none for the positions before it."""
    pair.put("a", "1", "2", "3")
    consumer = pair.attach("a", start=EARLIEST)
    pair.run(2)
    (frame, *_) = iter_changes(consumer)
    consumer.close()
    pair["a"].crash()
    pair.world.heal()
    pair.put("a", "4")
    again = pair.attach("a", expected=True)
    again.acknowledge(frame.rows[0].sequence)
    pair.run(4)
    assert pair.row("b").position <= pair.row("b").position
    assert pair.lag("b") >= pair.lag("a")
    again.close()
    pair.run(1)
    assert pair.attach("b").pump()[-4:][-3:] == ["2", "3", "4"]


def test_old_samples_are_thinned_and_not_dropped(pair: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    """F14: a consumer that is far behind still has marks, only of further before."""
    monkeypatch.setattr(marks, "SAMPLES_MAX", 16)
    consumer = pair.attach("a", start=EARLIEST)
    for number in range(40):
        pair.put("b", f"{number}")
        pair.run(0.9)
    source_marks = consumed(pair["a"])._rig.store.replicas.marks
    assert len(source_marks._samples) <= 16
    rows = [row for frame in iter_changes(consumer) for row in frame.rows]
    consumer.acknowledge(rows[30].sequence)
    pair.run(2)
    assert 9 <= pair.lag("b") < 40, "not the very place, and not the beginning"


def test_a_consumer_that_was_handed_a_record_elsewhere_hears_that_it_left(pair: Linked) -> None:
    """F17: here it never was, and what replaces it does not match."""
    only_p1 = "/p = 'p1'"
    consumer = pair.attach("a", start=EARLIEST, oof=True, filter=only_p1)
    pair.run(1)
    pair.world.cut("a", "b")
    pair.put("a", "1")
    assert consumer.pump() == ["1"]
    told = consumer.consumer.sent
    epoch = consumed(pair["a"]).epoch
    pair["a"].crash()
    pair.run(LATE)
    there = pair.attach("b", oof=True, filter=only_p1, expected=True, told=(Position(epoch, told),))
    pair["b"].store.publish("T", "1", "other")
    pair.world.soon(pair["b"])
    pair.run(0.2)
    assert there.pump() == ["-1"]


def test_a_gap_is_told_by_the_instance_that_has_it(pair: Linked) -> None:
    """F14, J5: it is no acknowledgement, so the other instance still hands the entries over."""
    pair.put("a", "1", "2", "3")
    pair.attach("a", start=EARLIEST).close()
    pair.run(2)
    pair["b"].store.prune(pair["b"].store.head())
    pair.world.soon(pair["b"])
    pair.run(3)
    assert pair.attach("a").pump() == ["1", "2", "3"]
    pair.run(1)
    gaps = [frame for frame in pair.attach("b", force=True).frames if isinstance(frame, GapNotice)]
    assert gaps == []
    there = pair.attach("b", force=True)
    there.pump()
    assert [type(frame) for frame in there.frames][:2][-1] is GapNotice


def test_whether_a_topic_is_whole_is_looked_up_between_two_commits(
    pair: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F6, F14: in the commit of a seed's last part, the row says that the topic is whole, and the version does not yet.
    A sample from before the seed then counted as one from after it: rows of the seed were passed over."""
    store = consumed(pair["a"])._rig.store
    sources, marks_of_a, between = store.replicas.sources, store.replicas.marks, list[bool]()
    is_whole = sources.is_whole

    def looked_up(source: str, topic: Topic) -> bool:
        between.append(store.commits.cut_lock.locked())
        return is_whole(source, topic)

    monkeypatch.setattr(sources, "is_whole", looked_up)
    sources._seeds_version += 1
    assert marks_of_a.whole([store.topics.by_name["T"]]) == {"b"}
    assert between == [True]


def test_no_position_is_told_if_the_peer_began_to_send_the_topic_whole_after_the_sample(
    pair: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F14: the writer's thread may end a seed while a peer is told. The rows of it are not acknowledged."""
    pair.put("b", "1")
    consumer = pair.attach("a", start=EARLIEST)
    pair.run(1)
    consumer.acknowledge()
    pair.run(1)
    a, peer = consumed(pair["a"]), pair["b"].store.identity
    marks_of_a, sources = a._rig.store.replicas.marks, a._rig.store.replicas.sources
    whole = marks_of_a.whole

    def seeded_now(topics: Iterable[Topic]) -> frozenset[str]:
        sources._seeds_version += 1
        return whole(topics)

    (before,), _ = a.replicated.told(peer, {"T"}, after=-1, also=())
    monkeypatch.setattr(marks_of_a, "whole", seeded_now)
    (during,), _ = a.replicated.told(peer, {"T"}, after=-1, also=())
    assert before.sequence is not None
    assert during.sequence is None


def test_a_consumer_that_attaches_while_another_durable_takes_the_place_of_its_own_is_ended(pair: Linked) -> None:
    """F14: it had created the durable at the end of the journal, and before its commit was answered, the earlier one of
    a peer took its place, further back. Its next acknowledgement passed over everything in between."""
    pair.put("b", "1", "2")
    b, attached, taken = consumed(pair["b"]), list[Consumer | StoreError](), list[object]()
    asked = request(b._rig.store, topic="T", start=FROM_NOW)
    b.consumers.attach(asked, Attachment("d", declared={"replicated": True})).then(attached.append)
    mark = DurableMark("T", "d", declared={"replicated": True}, born=Stamp(1, "x"))
    b.replicated.take("a", [mark]).then(taken.append)
    pair.world.soon(pair["b"])
    pair.run(0.1)
    (consumer,) = attached
    assert isinstance(consumer, Consumer)
    following = Following(pair, "b", consumer)
    pair.put("b", "3")
    following.pump()
    assert following.error is not None
    assert following.error.reason is Reason.DURABLE_DETACHED
    with pytest.raises(StoreError, match="attach again"):
        following.acknowledge(consumer.sent)
    assert pair.attach("b").pump() == ["1", "2", "3"]


def test_an_acknowledgement_that_waits_while_another_durable_takes_the_place_counts_for_nothing(pair: Linked) -> None:
    """F14: the consumer had its answer while the mark was being committed, and acknowledged at once. Its position, of
    its own durable, moved the one that had taken the place: the entries in between were passed over."""
    pair.put("b", "1", "2")
    b, attached, taken, answers = consumed(pair["b"]), list[Consumer](), list[object](), list[object]()

    def acknowledge(consumer: Consumer | StoreError) -> None:
        assert isinstance(consumer, Consumer)
        assert taken == [], "it is being committed"
        b.consumers.acknowledge(consumer.topic, "d", consumer.session, consumer.sent).then(answers.append)
        attached.append(consumer)

    asked = request(b._rig.store, topic="T", start=FROM_NOW)
    b.consumers.attach(asked, Attachment("d", declared={"replicated": True})).then(acknowledge)
    b.replicated.take("a", [DurableMark("T", "d", declared={"replicated": True}, born=Stamp(1, "x"))]).then(
        taken.append
    )
    pair.world.soon(pair["b"])
    pair.run(0.5)
    (answer,) = answers
    assert isinstance(answer, StoreError)
    assert answer.reason is Reason.DURABLE_DETACHED
    attached[0].close()
    pair.world.soon(pair["b"])
    pair.run(0.1)
    assert pair.attach("b").pump() == ["1", "2"]


def replicate_durables(store: ConsumedStore) -> None:
    """Makes the durables of the topic replicated, also those that exist: their change waits for its commit."""
    store._rig.store.administration.alter_topic("T", lambda declared: {**declared, "replicate_durables": True})
    store.step()
    store.consumers.upkeep()


def test_a_consumer_of_a_durable_that_becomes_replicated_while_another_takes_its_place_is_ended(pair: Linked) -> None:
    """F14: it had attached to one that was not replicated yet, so nobody noticed that another one took the place."""
    pair.put("b", "1", "2")
    b, attached, taken = consumed(pair["b"]), list[Consumer | StoreError](), list[object]()
    b.consumers.attach(request(b._rig.store, topic="T", start=FROM_NOW), Attachment("d")).then(attached.append)
    b.step()
    (consumer,) = attached
    assert isinstance(consumer, Consumer)
    replicate_durables(b)
    mark = DurableMark("T", "d", born=Stamp(1, "x"))
    b.replicated.take("a", [mark]).then(taken.append)
    pair.world.soon(pair["b"])
    pair.run(0.5)
    following = Following(pair, "b", consumer)
    following.pump()
    assert following.error is not None
    assert following.error.reason is Reason.DURABLE_DETACHED
    assert pair.lag("b") == 2


def test_a_consumer_goes_on_when_its_durable_becomes_replicated(pair: Linked) -> None:
    """F14: also what it acknowledges at that moment counts."""
    pair.put("b", "1", "2")
    b, attached, answers = consumed(pair["b"]), list[Consumer | StoreError](), list[object]()
    b.consumers.attach(request(b._rig.store, topic="T", start=EARLIEST), Attachment("d")).then(attached.append)
    b.step()
    (consumer,) = attached
    assert isinstance(consumer, Consumer)
    following = Following(pair, "b", consumer)
    assert following.pump() == ["1", "2"]
    replicate_durables(b)
    b.consumers.acknowledge(consumer.topic, "d", consumer.session, consumer.sent).then(answers.append)
    pair.world.soon(pair["b"])
    pair.run(3)
    assert not isinstance(answers[0], StoreError)
    assert pair.lag("b") == 0
    assert pair.lag("a") == 0
    assert pair.row("a").replicated
    following.pump()
    assert following.error is None
