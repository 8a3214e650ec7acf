"""Subscribers against an oracle: random changes, filters, options, positions, slow readers, crashes, administration.

At every quiet moment the state that a subscriber has built from snapshot and messages alone must equal a query.
"""

from __future__ import annotations

import itertools
import json
import shutil
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import ABSENT, Delete, Durability, Lifetime, LifetimeKind, Publish, Touch
from sow_server.subscriptions.live import dispatch, groups, slices
from sow_server.subscriptions.request import FROM_NOW, Request, Start, StartKind
from sow_server.subscriptions.subscription import Read, Send
from tests.support.oracles.examples import examples
from tests.support.oracles.subscription_checks import Client, SubscriptionChecks
from tests.support.simulation.subscription_traffic import (
    GIVEN,
    PATTERNS,
    TOPICS,
    Deleting,
    Flashing,
    Operation,
    Other,
    Publishing,
    Reading,
    Rescuing,
    Ticking,
    Touching,
    asks,
    deletes,
    flashes,
    others,
    publishes,
    rescues,
    touches,
)
from tests.support.stores.stores import MINUTE, SECOND
from tests.support.stores.subscribers import EARLIEST, Subscribers, request

REFUSALS = (
    Reason.TOPIC_NOT_FOUND,
    Reason.PATTERN_MATCHES_NOTHING,
    Reason.NO_JOURNAL,
    Reason.BOOKMARK_TOO_OLD,
)

COMPARING = "sow_server.subscriptions.live.conflation.COMPARING_NANOS_MAX"

rare = precondition(lambda self: self.steps % 3 == 0)
"""For rules that must not crowd out traffic: hypothesis chooses among rules evenly."""


class SubscriptionMachine(SubscriptionChecks):
    """Drives a store, its subscribers and the oracle."""

    def teardown(self) -> None:
        try:
            self.quiet()
            self.rig.close()
        finally:
            self.patches.close()
            shutil.rmtree(self.directory)

    @initialize(
        queue=st.sampled_from([600, 1500, 10**6]),
        effort=st.sampled_from([None, None, 0, 4_000, 10**7]),
        first=st.lists(asks, min_size=1, max_size=4),
    )
    def begin(self, queue: int, effort: int | None, first: list[dict[str, object]]) -> None:
        """`effort`: the work that a filter may take for a change on the event loop; then every change is looked at
        closely, and slices end in its midst. None: as in service, where all of this is little work."""
        self.queue_bytes_max = queue
        if effort is not None:
            self.patches.enter_context(mock.patch.object(groups, "EFFORT_MAX", -(10**9)))
            self.patches.enter_context(mock.patch.object(slices, "EFFORT_MAX", effort))
            self.patches.enter_context(mock.patch.object(slices, "LOOK_NANOS", 1))
            self.patches.enter_context(mock.patch(COMPARING, effort))
        for name, settings_ in TOPICS.items():
            self.rig.create_topic(name, settings_)
        # The oracle has to hear of the topic without a journal from its first change on.
        self.rig.topic("quiet").followers += 1
        self._open_hub()
        for ask in first:
            self._subscribe(**ask)  # type: ignore[arg-type]  # by their names

    def _open_hub(self) -> None:
        looks = itertools.count()
        ticks = lambda: next(looks) * slices.SLICE_SECONDS / 3  # noqa: E731  # a slice ends at the third look
        self.subscribers = Subscribers(self.rig, ticks=ticks, queue_bytes_max=self.queue_bytes_max)
        self._watch_quiet()

    def _watch_quiet(self) -> None:
        """Somebody follows every topic without a journal at any time, so that the oracle hears of its changes."""
        self.watcher = self.subscribers.hub.subscribe(
            request(self.rig.store, pattern=".*", changes=True, progress=SECOND)
        )

    # -- changes ----------------------------------------------------------------------------------------------------

    @rule(
        traffic=st.lists(
            st.one_of(publishes, publishes, publishes, touches, deletes, rescues, flashes, others),
            min_size=3,
            max_size=12,
        )
    )
    def traffic_passes(self, traffic: list[Operation]) -> None:
        """Changes, and other work in between."""
        self._pass(traffic)

    def _pass(self, traffic: list[Operation]) -> None:
        for operation in traffic:
            match operation:
                case Publishing():
                    self._publish(operation)
                case Touching(topic, keys, lifetime):
                    self._run(Touch(self._existing(topic), keys, lifetime))
                case Deleting(topic, keys):
                    self._run(Delete(self._existing(topic), keys))
                case Rescuing(topic, key, document):
                    self._publish(
                        Publishing(topic, [(key, document)], Lifetime(LifetimeKind.TTL, SECOND), False, False)
                    )
                    self._run(Touch(self._existing(topic), [key], Lifetime(LifetimeKind.TTL, MINUTE)))
                    self.time.tick(SECOND)
                case Flashing(topic, key, document):
                    self._run(Delete(self._existing(topic), [key]))
                    self._publish(Publishing(topic, [(key, document)], ABSENT, False, False))
                    self._run(Delete(self._existing(topic), [key]))
                case Ticking(micros):
                    self.time.tick(micros)
                case Reading(frames, slow_too):
                    for client in list(self.clients):
                        if slow_too or not client.slow:
                            self._pump(client, frames)
                case Other.LOOP_TURNS:
                    self.subscribers.loop.turn()
                case Other.EVERYTHING_IS_DISPATCHED:
                    self.subscribers.settle()
                case Other.SWEEP:
                    self.rig.store.sweep()

    def _publish(self, publishing: Publishing) -> None:
        topic = self._existing(publishing.topic)
        keyed = bool(self.rig.topic(topic).settings.key)
        records = publishing.records
        self._run(
            Publish(
                topic,
                [json.dumps({"k": key, **document} if keyed else document).encode() for key, document in records],
                None if keyed else [key for key, _ in records],
                lifetime=publishing.lifetime,
                atomic=publishing.atomic,
                durability=Durability.BUFFERED if publishing.buffered else Durability.FSYNC,
            )
        )

    def _run(self, change: Publish | Touch | Delete) -> None:
        self.rig.run(change)
        self.steps += 1

    def _existing(self, topic: str) -> str:
        return topic if topic in self.rig.store.topics.by_name else "given"

    @rare
    @rule(minutes=st.sampled_from([1, 11]))
    def the_journal_is_pruned(self, minutes: int) -> None:
        self.time.tick(minutes * MINUTE)
        self.rig.prune()

    @rare
    @rule(traffic=st.lists(st.one_of(publishes, touches, deletes), min_size=1, max_size=4))
    def the_journal_is_pruned_while_everybody_is_away(self, traffic: list[Operation]) -> None:
        """For the changes that follow, the journal does not know the previous values (J1)."""
        self.quiet()
        clients, self.clients = self.clients, []
        for client in clients:
            client.subscription.close()
        self.time.tick(11 * MINUTE)
        self.rig.prune()
        self._pass(traffic)
        for client in clients:
            self._resume(client, len(client.history) - 1)

    # -- topics -----------------------------------------------------------------------------------------------------

    @rare
    @rule(name=st.sampled_from(["new1", "new2"]), journal=st.booleans(), publishing=publishes)
    def create_or_delete_topic(self, name: str, journal: bool, publishing: Publishing) -> None:
        topic = self.rig.store.topics.by_name.get(name)
        if topic is None:
            self.rig.create_topic(name, GIVEN._replace(journal=journal))
            self._publish(publishing._replace(topic=name))
        else:
            self.deleted.add(topic.id)
            self.rig.delete_topic(name)
            self.deleted_at[name] = self.rig.store.writer.last_sequence
            for client in (*self.clients, *self.gone):
                for state in (client.state, *[state for _, state in client.history]):
                    for key in [key for key in state if key[0] == name]:
                        del state[key]

    @rare
    @rule()
    def journal_is_switched(self) -> None:
        settings_ = self.rig.topic("given").settings
        self.rig.alter_topic("given", journal=not settings_.journal)

    # -- the loop and the disk --------------------------------------------------------------------------------------

    @rare
    @rule()
    def dispatching_is_far_behind(self) -> None:
        self.subscribers.sync()
        with mock.patch.object(dispatch, "BACKLOG_BYTES_MAX", -1):
            self.subscribers.loop.turn()

    @rare
    @rule(orderly=st.booleans())
    def restart(self, orderly: bool) -> None:
        """The server goes down and comes back; subscribers resume at their last bookmarks."""
        self.subscribers.sync()
        self.watcher.close()
        if orderly:
            self.subscribers.hub.stop()
            for client in self.clients:
                self._pump(client, 10_000)
            for client in self.clients:
                client.subscription.close()
            self.rig.reopen()
        else:
            self.rig.crash()
        self._open_hub()
        clients, self.clients = self.clients, []
        for client in clients:
            client.history.append((client.bookmark, dict(client.state)))
            self._resume(client, len(client.history) - 1)

    # -- subscribers ------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.clients) < 6)
    @rule(ask=asks)
    def somebody_subscribes(self, ask: dict[str, object]) -> None:
        self._subscribe(**ask)  # type: ignore[arg-type]  # by their names

    def _subscribe(
        self,
        *,
        where: str,
        text: str,
        kind: str,
        empty_deltas: bool,
        begin: str,
        batch_size: int,
        conflation: int,
        slow: bool,
    ) -> None:
        options: dict[str, int] = {"batch_size": batch_size}
        options |= {"oof": "oof" in kind, "delta": "delta" in kind, "changes": kind == "changes"}
        options["empty_deltas"] = empty_deltas and "delta" in kind
        options["conflation"] = 0 if kind == "changes" else conflation
        self.names += 1
        client = Client(str(self.names), text, options, slow=slow)
        if where in PATTERNS:
            client.pattern = where
        else:
            client.topic = where
        starts = {
            "earliest": EARLIEST,
            "time": Start(StartKind.TIME, time_micros=self.rig.clock.now_micros() - 3 * SECOND),
        }
        self._connect(client, sow=begin == "sow", start=starts.get(begin, FROM_NOW))

    def _connect(self, client: Client, *, sow: bool, start: Start) -> Reason | None:
        """Subscribes; returns why that was refused."""
        try:
            client.connection = self.subscribers.hub.subscribe(self._asked(client, sow=sow, start=start))
        except StoreError as error:
            if error.reason not in REFUSALS:
                raise
            return error.reason
        client.accepted = {}
        if start.kind in (StartKind.EARLIEST, StartKind.TIME):
            known = self.rig.store.topics.by_id.values()
            client.accepted = {topic.id: topic.statistics.floor_sequence for topic in known}
        client.whole = sow or (client.whole and start.kind is StartKind.BOOKMARK)
        if start.kind is not StartKind.BOOKMARK:
            client.state, client.history = {}, []
        client.received, client.together, client.greeted = [], [], False
        client.resumed_upto = self.rig.store.writer.last_sequence if start.kind is StartKind.BOOKMARK else 0
        client.since = self.rig.clock.now_micros()
        self.clients.append(client)
        return None

    def _asked(self, client: Client, *, sow: bool, start: Start) -> Request:
        return request(
            self.rig.store,
            topic=client.topic,
            pattern=client.pattern,
            filter=client.filter,
            sow=sow,
            start=start,
            progress=SECOND,
            **client.options,  # type: ignore[arg-type]  # by their names
        )

    @precondition(lambda self: self.clients)
    @rule(which=st.integers(0, 9), back=st.integers(0, 3), stays_away=st.booleans())
    def disconnect(self, which: int, back: int, stays_away: bool) -> None:
        """A subscriber goes, and comes back where it was or at an earlier bookmark, now or later."""
        client = self.clients.pop(which % len(self.clients))
        client.subscription.close()
        client.history.append((client.bookmark, dict(client.state)))
        if stays_away:
            self.gone.append(client)
        else:
            self._resume(client, max(0, len(client.history) - 1 - back))

    @precondition(lambda self: self.gone)
    @rule()
    def come_back(self) -> None:
        client = self.gone.pop()
        self._resume(client, len(client.history) - 1)

    def _resume(self, client: Client, at: int) -> None:
        bookmark, state = client.history[at]
        if bookmark == 0:
            return  # it never got as far as a bookmark
        client.bookmark, client.state = bookmark, dict(state)
        del client.history[at:]
        start = Start(StartKind.BOOKMARK, bookmark=self.rig.store.instance.bookmark(bookmark))
        refused = self._connect(client, sow=False, start=start)
        if refused is Reason.BOOKMARK_TOO_OLD:
            topics = [topic for topic in self.rig.store.topics.by_name.values() if self._follows(client, topic.name)]
            assert any(
                self.rig.store.durable_commits.topic_statistics(topic).floor_sequence > bookmark for topic in topics
            )
        if refused is not None:
            self._connect(client, sow=True, start=FROM_NOW)

    def _pump(self, client: Client, frames: int) -> None:
        subscription = client.subscription
        while frames > 0:
            try:
                step = subscription.step()
            except StoreError as error:
                self._ended(client, error)
                return
            if isinstance(step, Send):
                self._hear(client, step.frame)
                frames -= 1
            elif isinstance(step, Read):
                subscription.took(step.run())
            else:
                return

    def _ended(self, client: Client, error: StoreError) -> None:
        client.subscription.close()
        if error.reason is Reason.STOPPING:
            return
        self.clients.remove(client)
        if error.reason is Reason.TOPIC_DELETED:
            assert client.topic
            assert client.topic.startswith("new")
            return
        assert error.reason is Reason.RESYNC_REQUIRED, error
        self._connect(client, sow=True, start=FROM_NOW)

    # -- quiet moments ----------------------------------------------------------------------------------------------

    @rule()
    def quiet(self) -> None:
        """Everything is swept, durable, dispatched and read: each state equals a query."""
        if not hasattr(self, "subscribers"):
            return
        position = -1
        for _ in range(100):
            # A second lets conflated rows go, and progress come.
            self.time.tick(SECOND)
            while self.rig.store.sweep():
                pass
            self.subscribers.settle()
            for client in list(self.clients):
                self._pump(client, 10_000)
            position = self.rig.store.writer.last_sequence
            if all(client.bookmark == position for client in self.clients):
                break
        self.each_has_what_it_asked_for()
        assert self.subscribers.hub.dispatcher.position == position
        for client in self.clients:
            assert client.bookmark == position, client
            assert not client.subscription.behind
            if client.whole and (client.options["oof"] or client.options["changes"]):
                assert client.state == self._queried(client), client


@pytest.mark.slow
def test_every_subscriber_gets_exactly_its_changes() -> None:
    run_state_machine_as_test(
        SubscriptionMachine,
        settings=settings(
            max_examples=examples(60), stateful_step_count=30, suppress_health_check=list(HealthCheck), deadline=None
        ),
    )


@pytest.mark.long
def test_every_subscriber_gets_exactly_its_changes_at_length() -> None:
    run_state_machine_as_test(
        SubscriptionMachine,
        settings=settings(
            max_examples=1500, stateful_step_count=60, suppress_health_check=list(HealthCheck), deadline=None
        ),
    )
