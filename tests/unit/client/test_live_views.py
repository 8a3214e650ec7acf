"""Live views against the real parts of a server: exact after every outage, and no more is sent than differs (rules F4,
F5). It shows _live_view [1] to [4] and live/held [1] to [3]."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sow.checksums import RANGE_RECORDS_MAX, RANGES_MAX, checksum
from sow.v1 import sow_pb2, types_pb2
from sow_client import LiveView, NotFound, Record, RecordBatch, View
from sow_client._live_view import RANGE_RECORDS
from sow_client._records import NEVER_MICROS
from sow_client._subscription_core import SubscriptionCore
from sow_client.errors import error_of_reason
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Expiration, Publish, TopicSettings
from sow_server.filters import parse
from sow_server.filters.restriction import Restriction
from sow_server.subscriptions.journal.replay import READ_CHANGES
from sow_server.subscriptions.live import held
from tests.support.fakes.subscriptions import Journal, put
from tests.support.oracles.examples import examples
from tests.support.stores.live_views import CUT, LiveServer, Viewer, state_of
from tests.support.stores.replicas import greet, instance
from tests.support.stores.stores import SECOND, FakeTime, Rig

JSON = TopicSettings(expiration=Expiration.ENABLED)
KEYS = [f"k{number:03}" for number in range(120)]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, syncs=False)
    rig.create_topic("orders", JSON)
    yield rig
    rig.close()


def other(rig: Rig, name: str = "other") -> Rig:
    """Another instance, with another journal."""
    made = Rig(rig.path.parent / name, time=rig.time, syncs=False)
    made.create_topic("orders", JSON)
    return made


def fill(rig: Rig, keys: list[str], number: int = 0) -> None:
    rig.run(Publish("orders", [b'{"n":%d}' % number] * len(keys), keys))


def viewed(server: LiveServer, *, batch_size: int = 7, progress: int = 0) -> Viewer:
    viewer = Viewer(FakeTime(), batch_size=batch_size, progress=progress)
    viewer.call(server)
    assert viewer.is_current()
    return viewer


def refused_position(viewer: Viewer, reason: str = "BOOKMARK_OTHER_EPOCH") -> None:
    """The server does not go on at the view's position, for one reason or another."""
    viewer.end(error_of_reason(reason, reason))


# ---- exactness ----

EDIT = st.tuples(st.integers(0, len(KEYS) - 1), st.sampled_from(["put", "delete", "hold", "forget", "alter"]))


@given(edits=st.lists(EDIT, max_size=40), batch_size=st.sampled_from([1, 7, 50, 1000]), cut_at=st.integers(0, 12))
@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_map_is_that_of_a_query_whatever_either_side_has_become(
    rig: Rig, edits: list[tuple[int, str]], batch_size: int, cut_at: int
) -> None:
    """Also where the snapshot breaks off after some frames, and more changes until the next one."""
    server = LiveServer(rig)
    viewer = viewed(server, batch_size=batch_size)
    viewer.cut()
    for number, (at, edit) in enumerate(edits):
        key, records = KEYS[at], viewer.core.records
        if edit == "put":
            fill(rig, KEYS[at : at + 5], number)
        elif edit == "delete":
            rig.delete("orders", *KEYS[at : at + 3])
        elif edit == "hold":
            records[key] = record_of(key, number)
        elif edit == "forget":
            records.pop(key, None)
        elif key in records:
            records[key] = record_of(key, records[key].version)
            records[key]._batch.columns.origins[0] = "another"
    before = dict(viewer.core.records)
    refused_position(viewer)
    viewer.call(server, frames_max=1 + cut_at)
    if not viewer.is_current():
        assert viewer.core.records == before  # _live_view [2]
        viewer.cut()
        fill(rig, KEYS[cut_at : 2 * cut_at + 1], cut_at)
        viewer.call(server)
    assert viewer.is_current()
    assert viewer.map() == state_of(rig)
    assert viewer.map().keys() == viewer.core.records.keys()


def record_of(key: str, version: int) -> Record:
    (record,) = RecordBatch(
        "orders",
        types_pb2.RecordColumns(
            key=[key],
            payload=[b"another"],
            version=[version],
            publish_time_micros=[1],
            expire_time_micros=[NEVER_MICROS],
            sequence=[1],
            origins=["nyc"],
        ),
    )
    return record


def test_nothing_is_sent_of_ranges_that_are_equal(rig: Rig) -> None:
    fill(rig, [f"{number:05}" for number in range(10_000)])
    server = LiveServer(rig)
    viewer = viewed(server, batch_size=1000)
    viewer.cut()
    rows = viewer.rows_sent
    assert rows == 10_000
    refused_position(viewer)
    viewer.call(server)
    assert viewer.is_current()
    assert viewer.rows_sent == rows
    viewer.cut()
    rig.put("orders", "00500", b"{}")
    rig.delete("orders", "07000")
    rig.put("orders", "99999", b"{}")  # behind all that is held
    refused_position(viewer)
    viewer.call(server)
    assert viewer.map() == state_of(rig)
    assert rows < viewer.rows_sent <= rows + 3 * RANGE_RECORDS + 1


@pytest.mark.parametrize("reason", ["RESYNC_REQUIRED", "BOOKMARK_TOO_OLD", "BOOKMARK_IN_FUTURE", "ACCESS_CHANGED"])
def test_every_position_that_is_lost_leads_to_a_comparison(rig: Rig, reason: str) -> None:
    fill(rig, KEYS)
    server = LiveServer(rig)
    viewer = viewed(server)
    viewer.cut()
    fill(rig, KEYS[3:5], 1)
    refused_position(viewer, reason)
    viewer.call(server)
    assert viewer.frames[0].snapshot_begin.view == viewer.requests[-1].view
    assert viewer.requests[-1].held.records
    assert viewer.map() == viewer.told_map() == state_of(rig)


def test_another_instance_with_other_records_is_followed(rig: Rig) -> None:
    """Rule F5."""
    fill(rig, KEYS)
    viewer = viewed(LiveServer(rig))
    viewer.cut()
    there = other(rig)
    fill(there, KEYS[50:], 2)
    there.put("orders", "only there", b"{}")
    server = LiveServer(there)
    viewer.call(server)
    assert [request.bookmark != "" for request in viewer.requests] == [False, True, False], "refused, then compared"
    assert viewer.map() == viewer.told_map() == state_of(there)
    there.put("orders", "k000", b"{}")
    viewer.hear()
    assert viewer.map() == viewer.told_map() == state_of(there)
    there.close()


def test_a_journal_that_was_pruned_costs_only_what_differs(rig: Rig) -> None:
    rig.alter_topic("orders", max_entries=10)
    fill(rig, KEYS)
    server = LiveServer(rig)
    viewer = viewed(server)
    viewer.cut()
    fill(rig, KEYS[:32], 1)
    rig.prune()
    rows = viewer.rows_sent
    viewer.call(server)
    assert viewer.requests[-2].bookmark
    assert not viewer.requests[-1].bookmark
    assert viewer.rows_sent == rows + 32
    assert viewer.map() == viewer.told_map() == state_of(rig)


def test_after_a_cut_it_goes_on_at_its_position_where_the_journal_allows(rig: Rig) -> None:
    fill(rig, KEYS)
    server = LiveServer(rig)
    viewer = viewed(server)
    rows = viewer.rows_sent
    viewer.cut()
    assert not viewer.is_current()
    fill(rig, KEYS[:5], 1)
    rig.delete("orders", KEYS[7])
    viewer.call(server)
    assert viewer.rows_sent == rows
    assert viewer.map() == viewer.told_map() == state_of(rig)
    assert viewer.core.reached == rig.store.instance.bookmark(rig.store.commits.last_sequence)


def test_a_change_that_another_instance_tells_again_is_no_change_of_the_map(rig: Rig) -> None:
    """After a move some changes come again (rule F9). They were passed to `on_change` a second time."""
    server = LiveServer(rig)
    viewer = viewed(server)
    fill(rig, KEYS[:3])
    viewer.hear()
    again = sow_pb2.SubscribeResponse()
    again.CopyFrom(next(frame for frame in reversed(viewer.frames) if frame.HasField("changes")))
    again.changes.records.sequence[:] = [sequence + 100 for sequence in again.changes.records.sequence]
    told = len(viewer.told)
    viewer.feed(again)
    assert len(viewer.told) == told
    again.changes.records.version[-1] += 1
    again.changes.records.sequence[:] = [sequence + 100 for sequence in again.changes.records.sequence]
    viewer.feed(again)
    assert [change.key for change in viewer.told[told:]] == [KEYS[2]]


def test_a_topic_without_a_journal_is_compared(rig: Rig) -> None:
    rig.alter_topic("orders", journal=False)
    fill(rig, KEYS)
    server = LiveServer(rig)
    viewer = viewed(server)
    viewer.cut()
    fill(rig, KEYS[:1], 1)
    viewer.call(server)
    assert viewer.map() == viewer.told_map() == state_of(rig)
    assert viewer.rows_sent == len(KEYS) + 32


# ---- what a program sees meanwhile ----


def test_until_the_differences_are_complete_it_shows_the_state_from_before(rig: Rig) -> None:
    """_live_view [1] and [2]."""
    fill(rig, KEYS)
    server = LiveServer(rig)
    viewer = viewed(server)
    before = viewer.map()
    viewer.cut()
    fill(rig, KEYS, 1)
    refused_position(viewer)
    viewer.call(server, frames_max=8)
    assert viewer.rows_sent > len(KEYS)
    assert not viewer.is_current()
    assert viewer.map() == before
    viewer.hear()
    assert viewer.is_current()
    assert viewer.map() == state_of(rig)


@pytest.mark.slow
def test_a_snapshot_that_breaks_off_is_continued(rig: Rig) -> None:
    """_live_view [2]: records that have come do not come again."""
    fill(rig, [f"{number:04}" for number in range(3_000)])
    server = LiveServer(rig)
    viewer = Viewer(batch_size=1000)
    viewer.call(server, frames_max=3)
    assert viewer.rows_sent == 2_000
    viewer.cut()
    assert viewer.map() == {}
    viewer.call(server)
    assert viewer.map() == viewer.told_map() == state_of(rig)
    assert viewer.rows_sent <= 3_000 + RANGE_RECORDS


def test_the_changes_of_an_atomic_request_appear_together(rig: Rig) -> None:
    """_live_view [1], also where the connection breaks between them."""
    server = LiveServer(rig)
    viewer = viewed(server, batch_size=2)
    rig.run(Publish("orders", [b"{}"] * 5, KEYS[:5], atomic=True))
    viewer.hear(frames_max=1)
    assert viewer.map() == {}
    viewer.cut()
    viewer.call(server)
    assert viewer.map() == viewer.told_map() == state_of(rig)
    assert len(viewer.map()) == 5


def test_it_is_current_again_once_everything_from_before_the_call_is_there(rig: Rig) -> None:
    server = LiveServer(rig)
    viewer = viewed(server, progress=SECOND, batch_size=1)
    viewer.time.tick(SECOND)
    assert viewer.core.age == 0.0
    viewer.cut()
    viewer.time.tick(3 * SECOND)
    assert viewer.core.age == 4.0, "since the server was last heard"
    rig.put("orders", "a", b"{}")
    rig.put("orders", "b", b"{}")
    rig.time.tick(SECOND)
    viewer.call(server, frames_max=3)
    assert viewer.map().keys() == {"a", "b"}
    assert not viewer.is_current()  # there could be more
    viewer.hear()
    assert viewer.is_current()  # there was not, and the server says so at once
    viewer.cut()
    viewer.call(server)
    rig.time.tick(SECOND)
    viewer.hear()
    assert viewer.frames[-1].HasField("progress")
    assert viewer.is_current()


def test_it_is_not_current_while_the_server_reads_on_from_before_the_call(rig: Rig) -> None:
    """Progress comes also while the server reads changes that do not match (rule S5), or to tell marks (F6). The view
    took it for a sign that nothing else was to come."""
    server = LiveServer(rig)
    viewer = Viewer(FakeTime(), "/n == 1", progress=SECOND)
    viewer.call(server)
    viewer.cut()
    for _ in range(READ_CHANGES // len(KEYS) + 1):
        fill(rig, KEYS)
    fill(rig, ["last"], 1)
    viewer.call(server, frames_max=1)
    rig.time.tick(SECOND)
    viewer.hear(frames_max=1)
    assert [frame.WhichOneof("frame") for frame in viewer.frames[-2:]] == ["progress", "progress"]
    assert not viewer.is_current()
    viewer.hear()
    rig.time.tick(SECOND)
    viewer.hear()
    assert viewer.is_current()
    assert viewer.map().keys() == {"last"}


def test_a_record_of_a_clock_that_is_ahead_does_not_make_it_current(rig: Rig) -> None:
    """A replicated record may seem to be from after the call, and is from before it; more may follow."""
    server = LiveServer(rig)
    viewer = viewed(server, progress=SECOND, batch_size=1)
    viewer.cut()
    fill(rig, KEYS[:2])
    request = viewer.core.request(now=0.0)
    progress, first, *_ = server.frames(server.subscribe(request))
    progress.progress.sources = True
    first.changes.records.publish_time_micros[0] += 5 * SECOND
    for frame in (progress, first):
        viewer.core.feed(frame)
        assert viewer.core.take() is None or frame is first
    assert viewer.map().keys() == {KEYS[0]}
    assert not viewer.is_current()


def test_a_caller_with_rows_is_told_that_there_are_sources(rig: Rig) -> None:
    """Such a caller gets no marks (F6), so a record of a clock that was ahead passed for one from after the call: the
    view was called current while more was to come."""
    server = LiveServer(rig, Restriction(parse("/n = 0")))
    viewer = viewed(server, progress=SECOND, batch_size=1)
    viewer.cut()
    there = instance(rig.path.parent, "there", time=rig.time)
    greet(there, rig)
    fill(rig, KEYS[:2])
    progress, first, *_ = server.frames(server.subscribe(viewer.core.request(now=0.0)))
    assert ";" not in progress.progress.bookmark
    first.changes.records.publish_time_micros[0] += 5 * SECOND
    for frame in (progress, first):
        viewer.core.feed(frame)
        assert viewer.core.take() is None or frame is first
    assert viewer.map().keys() == {KEYS[0]}
    assert not viewer.is_current()
    there.close()


# ---- expiry ----


def test_out_of_touch_an_overdue_record_is_out_of_sight_by_the_servers_clock(rig: Rig) -> None:
    """Rule F5, _live_view [4]. The clocks differ by whatever they like."""
    rig.put("orders", "short", b"{}", ttl=10 * SECOND)
    rig.put("orders", "long", b"{}", ttl=60 * SECOND)
    rig.put("orders", "ever", b"{}")
    server = LiveServer(rig)
    viewer = Viewer(FakeTime(wall_micros=1))
    viewer.call(server)
    for time in (viewer.time, rig.time):
        time.tick(6 * SECOND)
    viewer.hear()
    viewer.time.tick(4 * SECOND)
    assert viewer.map().keys() == {"short", "long", "ever"}, "while it is current the server tells"
    viewer.time.tick(-1)
    viewer.cut()
    assert viewer.map().keys() == {"short", "long", "ever"}
    viewer.time.tick(1)
    assert viewer.map().keys() == {"long", "ever"}
    rig.touch("orders", "short", ttl=600 * SECOND)
    viewer.call(server)
    viewer.cut()
    viewer.time.tick(55 * SECOND)
    assert viewer.map().keys() == {"short", "ever"}, "a touch that came with the changes counts"


class Interrupted:
    """A lock that lets something happen when it is first released."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self._lock = threading.Lock()
        self._happens: Callable[[], object] | None = happens

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        happens, self._happens = self._happens, None
        if happens is not None:
            happens()


def test_a_copy_is_of_one_instant_also_while_a_snapshot_takes_the_maps_place(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records out of sight were found in the old map and left out of the new one, which had them renewed."""
    server = LiveServer(rig)
    rig.put("orders", "a", b"{}", ttl=SECOND)
    viewer = viewed(server)
    viewer.cut()
    rig.put("orders", "a", b"{}", ttl=100 * SECOND)
    rig.put("orders", "b", b"{}")
    viewer.time.tick(2 * SECOND)
    refused_position(viewer)
    view = LiveView(viewer.core, lambda request: pytest.fail("it is not opened"), None)
    assert view.copy().keys() == set()
    monkeypatch.setattr(viewer.core, "lock", Interrupted(lambda: viewer.call(server)))
    assert view.copy().keys() == set(), "the map from before, whole"
    assert view.copy().keys() == {"a", "b"}


def test_where_lifetimes_are_not_acted_on_nothing_is_out_of_sight(rig: Rig) -> None:
    """Rule L3."""
    rig.alter_topic("orders", expiration=Expiration.DISABLED)
    rig.put("orders", "a", b"{}", ttl=SECOND)
    viewer = viewed(LiveServer(rig))
    viewer.cut()
    viewer.time.tick(2 * SECOND)
    assert viewer.map().keys() == {"a"}


def test_a_changed_treatment_of_lifetimes_is_heard_of(rig: Rig) -> None:
    """Rule F4: the name of what the server shows."""
    rig.alter_topic("orders", expiration=Expiration.DISABLED)
    rig.put("orders", "a", b"{}", ttl=10 * SECOND)
    server = LiveServer(rig)
    viewer = viewed(server)
    viewer.cut()
    rig.alter_topic("orders", expiration=Expiration.ENABLED)
    viewer.call(server)
    viewer.cut()
    viewer.time.tick(11 * SECOND)
    assert viewer.map() == {}


# ---- topics that go ----


def test_a_deleted_topic_has_no_records_until_it_is_made_again(rig: Rig) -> None:
    """Rule F5."""
    fill(rig, KEYS)
    server = LiveServer(rig)
    viewer = viewed(server)
    rig.delete_topic("orders")
    with pytest.raises(StoreError) as ended:
        viewer.hear()
    viewer.end(error_of_reason(ended.value.reason.name, ""))
    assert ended.value.reason is Reason.TOPIC_DELETED
    assert viewer.map() == viewer.told_map() == {}
    assert not viewer.is_current()
    assert viewer.core.reached is None
    refused_position(viewer, "TOPIC_NOT_FOUND")
    rig.create_topic("orders", JSON)
    rig.put("orders", "new", b"{}")
    viewer.call(server)
    assert viewer.is_current()
    assert viewer.map() == viewer.told_map() == state_of(rig)


def test_a_topic_that_is_not_there_at_first_is_an_error(rig: Rig) -> None:
    viewer = Viewer()
    with pytest.raises(NotFound):
        viewer.end(error_of_reason("TOPIC_NOT_FOUND", ""))


# ---- permissions ----


def test_a_change_of_what_the_caller_may_see_is_made_up_for(rig: Rig) -> None:
    """Rules F4, A4, A5: rows and fields that changed while nobody was connected."""
    for number in range(100):
        rig.put("orders", f"{number:02}", b'{"region":"%s","secret":1}' % (b"eu" if number % 3 else b"us"))
    eu = Restriction(parse("/region = 'eu'"))
    veiled = Restriction(parse("/region = 'eu'"), (("secret",),))
    server = LiveServer(rig)
    viewer = viewed(server)
    assert len(viewer.map()) == 100
    for restriction, records, payload in (
        (eu, 66, b'{"region":"eu","secret":1}'),
        (veiled, 66, b'{"region":"eu"}'),
        (Restriction(), 100, b'{"region":"eu","secret":1}'),
    ):
        viewer.cut()
        server.restriction = restriction
        viewer.call(server)
        assert viewer.requests[-2].bookmark
        assert viewer.is_current()
        assert len(viewer.map()) == records
        assert viewer.map()["01"][1] == payload
        assert viewer.map() == viewer.told_map()


@pytest.mark.parametrize("of", ["topic", "pattern"])
def test_a_change_of_what_the_caller_may_see_is_noticed_by_a_subscription_that_began_with_a_snapshot(
    rig: Rig, of: str
) -> None:
    """S1, F4: ACCESS_CHANGED reaches only those that are connected. The program kept records that it may not see."""
    for number in range(6):
        rig.put("orders", f"{number}", b'{"region":"%s"}' % (b"eu" if number % 3 else b"us"))
    server = LiveServer(rig, rights="all")
    wanted = sow_pb2.SubscribeRequest(sow=True, oof=True)
    if of == "topic":
        wanted.topic = "orders"
    else:
        wanted.topic_pattern = "ord.*"
    core = SubscriptionCore(wanted, retry_for=60, connect_timeout=5)
    view = View()

    def call() -> list[str]:
        """A call; the kinds of messages that the program got."""
        while True:
            request = core.request(now=0.0)
            told: list[str] = []
            try:
                follower = server.subscribe(request)
            except StoreError as error:
                core.ended(error_of_reason(error.reason.name, error.message), now=0.0, jitter=0.5)
                continue
            for frame in server.frames(follower):
                core.feed(frame)
                for change in iter(core.take, None):
                    view.apply(change)
                    told.append(change.op)
            follower.close()
            core.ended(CUT, now=0.0, jitter=0.5)
            return told

    assert call() == ["sow"] * 6 + ["snapshot_end"]
    rig.put("orders", "9", b'{"region":"eu"}')
    assert call() == ["put"], "nothing has changed, so it goes on at its position"
    server.restriction, server.rights = Restriction(parse("/region = 'eu'")), "eu"
    assert call() == ["resync", *["sow"] * 5, "snapshot_end"]
    assert {record.key for record in view.values()} == {"1", "2", "4", "5", "9"}
    server.restriction, server.rights = Restriction(), "all"
    assert call() == ["resync", *["sow"] * 7, "snapshot_end"]


def test_rows_that_are_hidden_make_no_difference(rig: Rig) -> None:
    """live/held [3]."""
    server = LiveServer(rig, Restriction(parse("/n = 0")))
    fill(rig, KEYS)
    viewer = viewed(server)
    viewer.cut()
    fill(rig, ["a", "k0005", "z"], 1)
    rows = viewer.rows_sent
    refused_position(viewer)
    viewer.call(server)
    assert viewer.rows_sent == rows
    assert len(viewer.map()) == len(KEYS)


# ---- bounds ----


def held_by(upto: list[str], records: list[int] | None = None, **fields: object) -> sow_pb2.SubscribeRequest:
    counts = [1] * len(upto) if records is None else records
    ranges = sow_pb2.HeldRanges(upto_key=upto, checksum=[1] * len(upto), records=counts)
    options = {"topic": "orders", "sow": True, "view": b"x", "held": ranges, **fields}
    return sow_pb2.SubscribeRequest(**options)  # type: ignore[arg-type]  # fields of several kinds


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (held_by([]), "held"),
        (held_by(["a"]), "held.upto_key[0]"),
        (held_by(["b", "a", ""]), "held.upto_key[1]"),
        (held_by(["a", "a", ""]), "held.upto_key[1]"),
        (held_by(["a", "", ""]), "held.upto_key[1]"),
        (held_by(["a", "b", ""], [1, RANGE_RECORDS_MAX + 1, 1]), "held.records[1]"),
        (held_by(["a", ""], [1]), "held"),
        (held_by([""] * (RANGES_MAX + 1)), "held"),
        (held_by([""], sow=False), "held"),
        (held_by([""], view=b""), "held"),
        (held_by([""], topic="", topic_pattern=".*", view=b""), "held"),
    ],
)
def test_ranges_that_are_none_are_refused_with_their_number(
    rig: Rig, request_: sow_pb2.SubscribeRequest, field: str
) -> None:
    with pytest.raises(StoreError) as refused:
        LiveServer(rig).subscribe(request_)
    assert (refused.value.reason, refused.value.field) == (Reason.INVALID_ARGUMENT, field)


def test_as_many_ranges_as_are_allowed_are_taken(rig: Rig) -> None:
    LiveServer(rig).subscribe(held_by([f"{number:06}" for number in range(1, RANGES_MAX)] + [""]))


@pytest.mark.parametrize("records", [0, 3, RANGE_RECORDS_MAX])
def test_no_more_waits_for_the_end_of_a_range_than_is_held_in_it(
    rig: Rig, records: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """live/held [2], also where it says that it holds many records, and they are large."""
    monkeypatch.setattr(held, "WAITING_BYTES", 100)
    fill(rig, KEYS)
    server = LiveServer(rig)
    view = viewed(server).frames[0].snapshot_begin.view
    follower = server.subscribe(held_by([""], [records], view=view, batch_size=10))
    frames = server.frames(follower, frames_max=3)
    assert frames[0].snapshot_begin.held
    assert list(frames[1].snapshot.after_key) == list(frames[1].snapshot.upto_key) == [""]
    assert [len(frame.snapshot.records.key) for frame in frames[1:]] == [10, 10]
    frames += server.frames(follower)
    assert [key for frame in frames for key in frame.snapshot.records.key] == KEYS
    assert sum(len(frame.snapshot.upto_key) for frame in frames) == 1


def test_large_records_are_ranges_of_their_own(rig: Rig) -> None:
    rig.run(Publish("orders", [b'{"x":"%s"}' % (b"x" * 300_000)] * 5, KEYS[:5]))
    server = LiveServer(rig)
    viewer = viewed(server)
    viewer.cut()
    refused_position(viewer)
    viewer.call(server)
    assert list(viewer.requests[-1].held.records) == [1] * 5
    assert viewer.rows_sent == 5


def test_a_large_map_is_told_in_larger_ranges(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a request may have, and no more than fit into a message."""
    fill(rig, KEYS)
    server = LiveServer(rig)
    viewer = viewed(server)
    viewer.cut()
    for limits, counts in (({}, [32, 32, 32, 24]), ({"ranges": 3}, [40, 40, 40]), ({"bytes": 80}, [64, 56])):
        with monkeypatch.context() as patched:
            patched.setattr("sow_client._live_view.RANGES_MAX", limits.get("ranges", RANGES_MAX))
            patched.setattr("sow_client._statuses.MESSAGE_BYTES_MAX", limits.get("bytes", 10**6))
            refused_position(viewer)
            viewer.call(server)
        assert list(viewer.requests[-1].held.records) == counts
        assert viewer.rows_sent == len(KEYS)
        viewer.cut()


def test_a_server_that_compares_nothing_sends_everything(rig: Rig) -> None:
    """An older one: its snapshot has no name, so nothing is held back."""
    fill(rig, KEYS)
    viewer = viewed(LiveServer(rig))
    viewer.cut()
    refused_position(viewer)
    request = viewer.core.request(now=0.0)
    viewer.core.hold(request)
    assert request.held.records
    journal = Journal()
    journal.commit(put("a", {}))
    for frame in journal.frames(request):
        viewer.core.feed(frame)
        viewer.told += iter(viewer.core.take, None)
    assert viewer.map().keys() == viewer.told_map().keys() == {"a"}
    viewer.end(CUT)
    refused_position(viewer)
    request = viewer.core.request(now=0.0)
    viewer.core.hold(request)
    assert not request.HasField("held")


def test_equal_checksums_mean_equal_records() -> None:
    """checksums [1]: one record must not look like two, nor a name like a key."""
    seen: dict[int, object] = {}
    for keys in ([], [b"a"], [b"a", b"b"], [b"ab"], [b"b", b"a"], [b"", b"ab"]):
        for version in (1, 2):
            for origin in ("nyc", "ldn"):
                case = (tuple(keys), version if keys else 0, origin if keys else "")
                found = checksum(
                    map(len, keys), b"".join(keys), array("q", [version] * len(keys)), [origin] * len(keys)
                )
                assert seen.setdefault(found, case) == case
    assert checksum([1], b"a", array("q", [1]), ["nyc"]) == 13819548980554865517
