"""What a peer that may send one topic says of publishers hides nothing of another topic, at any instance (rule F11).

a, b and c send each other all topics. A liar sends a the topics that it may send.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from sow_peering import InstanceIdentity, MergeCounts, PublisherMark, PublisherPart
from sow_server.engine.commit.passed_on import decode_passed_on, read_passed_on
from sow_server.engine.commit.steps import Staged
from sow_server.engine.commit.told import TOLD_OF_PEER_MAX
from sow_server.engine.disk.layout import PASSED_ON_KEY, PUBLISHER_KEY
from sow_server.engine.disk.rocks import META, Batch
from sow_server.engine.pending import Pending
from sow_server.engine.replicas import receiving, serving
from sow_server.engine.replicas.receiving import ApplyChanges
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import Publish, PublisherPosition
from tests.support.stores.replicas import instance, ship
from tests.support.stores.stores import DAY, FakeTime, Rig

TOKEN = 7
LIAR = InstanceIdentity("liar", "0123456789ab", "0123456789ab")
SENT = ("t", *[f"l{number}" for number in range(TOLD_OF_PEER_MAX + 2)])
"""The topics that the liar may send: more than a peer has places in a list."""


@pytest.fixture
def mesh(tmp_path: Path) -> tuple[Rig, Rig, Rig]:
    time = FakeTime()
    rigs = [instance(tmp_path, name, peers=["a", "b", "c"], time=time) for name in "abc"]
    for rig in rigs:
        for topic in ("u", *SENT):
            rig.create_topic(topic)
    for sender, receiver in itertools.permutations(rigs, 2):
        ship(sender, receiver)
    a, b, c = rigs
    return a, b, c


def batch(first: int, *keys: str) -> Publish:
    publisher = PublisherPosition("p", 1, first, token=TOKEN)
    return Publish("u", [b"x"] * len(keys), list(keys), publisher=publisher)


def lie_to(rig: Rig, marks: list[PublisherMark]) -> None:
    """The liar tells an instance of publishers, in a message without changes."""
    replicas = rig.store.replicas
    answers: list[MergeCounts | StoreError] = []
    if LIAR.name not in replicas.sources.by_name:
        replicas.sources.begin(LIAR, topics="t|l.*", filter_text="", cursor=0, missing_is_deleted=False).then(
            answers.append
        )
        rig.answer(answers)
        answers.clear()
    replicas.sources.answers(LIAR.name, replicas.shared.kinds(SENT))
    tell(rig, marks).then(answers.append)
    rig.answer(answers)


def tell(rig: Rig, marks: list[PublisherMark]) -> Pending[MergeCounts]:
    return rig.store.replicas.changes.apply(LIAR.name, after=0, upto=0, chunks=[], origins=[], publishers=marks)


def lies() -> list[PublisherMark]:
    """Of many epochs and tokens, and of many sets of topics."""
    draw = Random(1)
    sets = [("t",), *[(topic,) for topic in SENT], *[tuple(draw.sample(SENT, 3)) for _ in range(100)]]
    return [
        PublisherMark("p", 1 + draw.randint(0, 2), draw.randint(1, 2**60), 1, 99, topics)
        for topics in sets
        for _ in range(3)
    ] + [PublisherMark("p", 1, TOKEN, 1, 99, topics) for topics in sets]


def duplicates(rig: Rig, request: Publish) -> int:
    """How many records of a retry are known. None of it is applied."""
    outcome = rig.run(request)
    assert not outcome.refusals
    assert outcome.applied + outcome.duplicates == len(request.payloads)
    return outcome.duplicates


def test_lies_about_some_topics_push_out_nothing_that_is_known_of_another_one(mesh: tuple[Rig, Rig, Rig]) -> None:
    """F11. Story of the mistake: c first heard from a of what b had applied, so what b said itself was known already.
    Then a passed on lies about t, and these took the places of what it had passed on about u. So the retry at c was
    applied again, over what others had written since."""
    a, b, c = mesh
    b.run(batch(1, "1", "2"))
    ship(b, a)
    ship(a, c)
    ship(b, c)
    c.put("u", "1", b"since")
    lie_to(a, lies())
    for rig in (b, c):
        ship(a, rig)
    ship(b, c)
    for rig in mesh:
        assert duplicates(rig, batch(1, "1", "2")) == 2
    since = c.get("u", "1")
    assert since is not None
    assert since.payload == b"since"
    c.crash()
    assert duplicates(c, batch(1, "1", "2")) == 2
    assert duplicates(c, batch(3, "3")) == 0, "the lies are not about u"


def test_a_peer_that_tells_of_many_publishers_does_not_hold_the_writer(
    mesh: tuple[Rig, Rig, Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R15. A message of 65,536 marks with 32 topics each would take some 20 s in one commit."""
    a, _, _ = mesh
    lie_to(a, lies()[:1])
    monkeypatch.setattr(receiving, "PLACES_MAX", 9)
    answered: list[str] = []
    sizes = [1, 20, 1, 1, 20, *[1] * 15]
    marks = [PublisherMark(f"p{number}", 1, TOKEN, 1, 9, SENT[:topics]) for number, topics in enumerate(sizes)]
    tell(a, marks).then(lambda _: answered.append("the peer"))
    a.store.commits.submit(batch(1, "own")).then(lambda _: answered.append("a publisher"))
    a.store.writer.step()
    assert answered == ["a publisher", "the peer"]
    for mark in marks:
        assert duplicates(
            a, Publish("t", [b"x"], ["1"], publisher=PublisherPosition(mark.publisher_id, 1, 1, token=TOKEN))
        )


def test_a_message_whose_commit_was_refused_is_applied_by_the_next_one(mesh: tuple[Rig, Rig, Rig]) -> None:
    """steps [3]: a step that was staged, and not committed, begins anew."""
    a, _, _ = mesh
    lie_to(a, lies()[:1])
    mark = PublisherMark("p1", 1, TOKEN, 1, 9, ("t",))
    step = ApplyChanges(a.store.replicas.changes, LIAR.name, 0, 0, [], [], [mark])
    assert step.stage(a.store.writer.committer.new_draft()) is Staged.DONE
    answers: list[MergeCounts | StoreError] = []
    a.store.commits.run_in_rounds(step).then(answers.append)
    a.answer(answers)
    position = PublisherPosition("p1", 1, 1, token=TOKEN)
    assert duplicates(a, Publish("t", [b"x"], ["1"], publisher=position)) == 1


def test_it_is_told_again_after_a_seed_in_small_parts(
    mesh: tuple[Rig, Rig, Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F11. A link that begins anew gets all that is known, row by row: lies make no part of it too large to be sent."""
    a, b, c = mesh
    b.run(batch(1, "1", "2"))
    ship(b, a)
    lie_to(a, lies())
    ship(a, c)
    forgotten = Batch()
    forgotten.ranges += [(META, prefix, prefix + b"\xff") for prefix in (PUBLISHER_KEY, PASSED_ON_KEY)]
    a.store._rocks.write(forgotten)
    a.crash()
    ship(c, a)
    monkeypatch.setattr(serving, "PUBLISHERS_BYTES_MAX", 1000)
    after, parts = "", list[PublisherPart]()
    while not parts or after:
        part = c.store.replicas.reader.publishers(["u", *SENT], after)
        parts.append(part)
        after = part.last_id
    assert len(parts) > 3
    assert max(len(part.marks) for part in parts) <= 4 * TOLD_OF_PEER_MAX
    tell_all(c, a, [mark for part in parts for mark in part.marks])
    assert duplicates(a, batch(1, "1", "2", "3")) == 2


def test_what_is_passed_on_of_all_topics_is_read_once_and_without_refusals(mesh: tuple[Rig, Rig, Rig]) -> None:
    """F11. Story of the mistake: each of 1,000 topics had eight lies with 1,000 refusals. So GetPublisher took 1.7 s of
    the event loop, OpenPublisher as long of the writer, and each of them half a gigabyte."""
    a, _, c = mesh
    refused = tuple(range(1, 100))
    lie_to(a, [mark._replace(refused=refused) for mark in lies()])
    ship(a, c)
    rocks = c.store._rocks
    cursor = rocks.cursor(META)
    stored = [decode_passed_on(row) for _, row in cursor.rows(PASSED_ON_KEY, PASSED_ON_KEY + b"\xff")]
    cursor.close()
    parts = [part for row in stored for part in row]
    assert {part.refused for part in parts} == {refused}
    found = read_passed_on(rocks, "p")
    assert sorted(found) == sorted({part._replace(refused=()) for part in parts})
    assert len(found) < len(parts), "some are of several topics"
    assert c.store.cuts.publisher_position("p")[0] == max(part.epoch for part in parts)


def tell_all(sender: Rig, receiver: Rig, marks: list[PublisherMark]) -> None:
    name = sender.options.instance
    cursor = receiver.store.replicas.sources.by_name[name].cursor
    receiver.store.replicas.sources.answers(name, sender.store.replicas.shared.matching(".*"))
    answers: list[MergeCounts | StoreError] = []
    receiver.store.replicas.changes.apply(
        name, after=cursor, upto=cursor, chunks=[], origins=[], publishers=marks
    ).then(answers.append)
    receiver.answer(answers)


def passed_on(rig: Rig) -> int:
    """Rows of what was passed on."""
    return len(rig.rows(META, PASSED_ON_KEY, PASSED_ON_KEY + b"\xff"))


def test_the_rows_go_with_the_publisher_and_with_the_topic(mesh: tuple[Rig, Rig, Rig]) -> None:
    """P6."""
    a, b, c = mesh
    b.run(batch(1, "1"))
    lie_to(a, lies())
    ship(b, a)
    ship(a, c)
    rows = passed_on(c)
    assert rows == len(SENT) + 1
    c.delete_topic("l0")
    c.store.upkeep.forget_publishers()
    c.store.writer.step()
    assert passed_on(c) == rows - 1
    assert duplicates(c, batch(1, "1")) == 1
    a.time.tick(7 * DAY)
    c.run(replace(batch(1, "x"), publisher=PublisherPosition("other", 1, 1, token=TOKEN)))
    c.store.upkeep.forget_publishers()
    c.store.writer.step()
    assert passed_on(c) == 0
    assert duplicates(c, batch(1, "1")) == 0
