"""Random requests to a store and to the model on plain dicts."""

from __future__ import annotations

import shutil
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import (
    ABSENT,
    MICROS,
    NEVER,
    PERMANENT,
    TTL_MAX_MICROS,
    Condition,
    ConditionKind,
    Delete,
    Durability,
    Lifetime,
    LifetimeKind,
    OpenedPublisher,
    Outcome,
    Publish,
    PublisherPosition,
    Request,
    Restamp,
    RestampMode,
    Touch,
    TouchOnly,
    TtlMode,
)
from sow_server.services.wire.convert import EVERY_MICROS
from tests.support.oracles.model import Expected, ModelTopic, Wanted
from tests.support.oracles.store_checks import KEYS, TOPICS, StoreChecks

INDEXED = [b'"x"', b"7", b'["x",7.0,"7",true]', b"null", b'{"x":1}']
"""The values of the indexed field of a payload, in turns."""

topics = st.sampled_from(list(TOPICS))
spans = st.sampled_from([1, 7, 1000, MICROS, 5 * MICROS, 20 * MICROS])
lifetimes = st.one_of(
    st.just(ABSENT),
    spans.map(lambda micros: Lifetime(LifetimeKind.TTL, micros)),
    # An expire time is drawn as its distance from now; `_fix` turns it into one.
    st.sampled_from([-5 * MICROS, -1, 0, 1, 5 * MICROS]).map(lambda ahead: Lifetime(LifetimeKind.EXPIRE_TIME, ahead)),
    st.sampled_from(
        [
            PERMANENT,
            Lifetime(LifetimeKind.TTL, 0),
            Lifetime(LifetimeKind.TTL, -1),
            Lifetime(LifetimeKind.TTL, TTL_MAX_MICROS),
            Lifetime(LifetimeKind.TTL, TTL_MAX_MICROS + 1),
        ]
    ),
)
plain_lifetimes = st.one_of(st.just(ABSENT), spans.map(lambda micros: Lifetime(LifetimeKind.TTL, micros)))
conditions = st.one_of(
    st.none(),
    st.sampled_from([Condition(ConditionKind.IF_ABSENT), Condition(ConditionKind.IF_PRESENT)]),
    # The version is drawn as whether it is the right one; `_fix` looks it up.
    st.sampled_from([0, 1]).map(lambda right: Condition(ConditionKind.IF_VERSION, right)),
)
# Stamps are drawn as their distance from now.
wanted = st.one_of(
    st.none(),
    st.builds(Wanted, st.integers(0, 2), st.sampled_from([0, 2 * MICROS, 20 * MICROS, NEVER])),
)
removals = st.one_of(
    st.none(),
    st.none(),
    # Of each record whether it is a removal; and whether it has a key where a document would do.
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=7, max_size=7),
)
unset_paths = st.sampled_from([(), (), ("/n",), ("/o/x",), ("/o", "/p"), ("/o/z", "/o/y", "/gone"), ("/k",)])


def with_removals(request: Publish, keys: list[str], removed: list[tuple[bool, bool]] | None) -> None:
    """Makes some records of a request removals (rule P11): by their documents, or by keys without one."""
    if removed is None:
        return
    chosen = removed[: len(keys)]
    request.removals = [removes for removes, _ in chosen]
    derives = bool(TOPICS[request.topic].key)
    by_key = [removes and (keyed or not derives) for removes, keyed in chosen]
    request.payloads = [b"" if keyed else payload for keyed, payload in zip(by_key, request.payloads, strict=True)]
    if derives:
        request.keys = [key if keyed else "" for key, keyed in zip(keys, by_key, strict=True)]


class StoreRequests(StoreChecks):
    """Sends requests to a store and the model."""

    def teardown(self) -> None:
        try:
            self._flush()
            self.rig.close()
        finally:
            for patch in self.patches:
                patch.stop()
            shutil.rmtree(self.directory)

    @initialize()
    def create_topics(self) -> None:
        for name in TOPICS:
            self._create(name)

    def _create(self, name: str) -> None:
        self.rig.create_topic(name, TOPICS[name])
        self.model.topics[name] = ModelTopic(TOPICS[name])
        self.pruned[name] = {}

    @rule(
        topic=topics,
        records=st.lists(st.tuples(st.sampled_from(KEYS), plain_lifetimes), min_size=1, max_size=6),
        lifetime=plain_lifetimes,
        own_lifetimes=st.booleans(),
        ttl_mode=st.sampled_from([TtlMode.RESET, TtlMode.EXTEND]),
        removed=removals,
        hold=st.booleans(),
    )
    def publish_plainly(
        self,
        topic: str,
        records: list[tuple[str, Lifetime]],
        lifetime: Lifetime,
        own_lifetimes: bool,
        ttl_mode: TtlMode,
        removed: list[tuple[bool, bool]] | None,
        hold: bool,
    ) -> None:
        """As most requests are; the hot path."""
        request = Publish(
            topic,
            [self._payload(topic, key, good=True) for key, _ in records],
            None if TOPICS[topic].key else [key for key, _ in records],
            lifetime=lifetime,
            lifetimes=[own for _, own in records] if own_lifetimes else None,
            ttl_mode=ttl_mode,
        )
        with_removals(request, [key for key, _ in records], removed)
        self._request(request, hold=hold)

    @rule(
        topic=topics,
        records=st.lists(
            st.tuples(st.sampled_from(KEYS), st.sampled_from([True] * 9 + [False]), lifetimes, conditions),
            min_size=1,
            max_size=7,
        ),
        lifetime=lifetimes,
        own_lifetimes=st.booleans(),
        conditional=st.booleans(),
        ttl_mode=st.sampled_from([TtlMode.RESET, TtlMode.RESET, TtlMode.KEEP, TtlMode.EXTEND]),
        atomic=st.sampled_from([False, False, True]),
        want_results=st.booleans(),
        durability=st.sampled_from(list(Durability)),
        publisher=st.sampled_from([None, None, "p", "q"]),
        epoch_step=st.sampled_from([0, 0, 0, 0, -1, 1]),
        overlap=st.sampled_from([0, 0, 0, 1, 2, 9]),
        unit_step=st.sampled_from([None, 1, 1, 1, 0, -1]),
        unit_done=st.booleans(),
        nothing=st.sampled_from([False, False, True]),
        delta=st.booleans(),
        unset=unset_paths,
        removed=removals,
        hold=st.booleans(),
    )
    def publish(
        self,
        *,
        topic: str,
        records: list[tuple[str, bool, Lifetime, Condition | None]],
        lifetime: Lifetime,
        own_lifetimes: bool,
        conditional: bool,
        ttl_mode: TtlMode,
        atomic: bool,
        want_results: bool,
        durability: Durability,
        publisher: str | None,
        epoch_step: int,
        overlap: int,
        unit_step: int | None,
        unit_done: bool,
        nothing: bool,
        delta: bool,
        unset: tuple[str, ...],
        removed: list[tuple[bool, bool]] | None,
        hold: bool,
    ) -> None:
        payload = self._delta if delta else self._payload
        request = Publish(
            topic,
            [payload(topic, key, good=good) for key, good, _, _ in records],
            None if TOPICS[topic].key else [key for key, _, _, _ in records],
            lifetime=self._fix(lifetime),
            lifetimes=[self._fix(own) for _, _, own, _ in records] if own_lifetimes else None,
            ttl_mode=ttl_mode,
            conditions=[self._fix_condition(topic, key, own) for key, _, _, own in records] if conditional else None,
            durability=durability,
            atomic=atomic,
            want_results=want_results,
            delta=delta,
            # Without a delta they are refused, so they are rare there.
            unset_paths=unset if delta or self.payloads % 20 == 0 else (),
        )
        with_removals(request, [key for key, _, _, _ in records], removed)
        if publisher is not None:
            known = self.model.publishers.get(publisher)
            epoch = max(1, (known.epoch if known else 1) + epoch_step)
            following = self.next_sequence.get((publisher, epoch), 1)
            # An atomic request is sent anew or again, never in part.
            first = following if atomic else max(1, following - overlap)
            self.next_sequence[publisher, epoch] = max(following, first + len(records))
            if unit_step is None:
                request.publisher = PublisherPosition(publisher, epoch, first)
            else:
                unit = max(1, (known.unit if known else 0) + unit_step)
                request.publisher = PublisherPosition(publisher, epoch, first, unit, unit_done)
                if unit_done and nothing:
                    request = replace(request, payloads=[], keys=None, lifetimes=None, conditions=None, removals=None)
            self.sent.append(request)
        self._request(request, hold=hold)

    @rule(publisher=st.sampled_from(["p", "q"]), unit_step=st.sampled_from([None, 1, 0, -1]))
    def open_publisher(self, publisher: str, unit_step: int | None) -> None:
        """Somebody takes a publisher over, perhaps for a unit that is finished (rule P6)."""
        self._flush()
        known = self.model.publishers.get(publisher)
        unit = 0 if unit_step is None else max(0, (known.unit if known else 0) + unit_step)
        answers: list[OpenedPublisher | StoreError] = []
        self.rig.store.commits.open_publisher(publisher, unit).then(answers.append)
        self.rig.store.writer.step()
        assert [answer[:3] for answer in answers if isinstance(answer, OpenedPublisher)] == [
            self.model.open_publisher(publisher, unit)
        ]

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 9), hold=st.booleans(), want_results=st.booleans())
    def publish_again(self, which: int, hold: bool, want_results: bool) -> None:
        """A client that has not heard the answer sends the same request again (rule P6)."""
        self._request(replace(self.sent[-1 - which % len(self.sent)], want_results=want_results), hold=hold)

    @rule(
        topic=topics,
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4),
        lifetime=lifetimes,
        condition=conditions,
        only=st.sampled_from([None, None, *TouchOnly]),
        atomic=st.booleans(),
        # Whether each version is the right one; None: no versions.
        versions=st.sampled_from([None, None, [1, 1, 1, 1], [1, 1, 0, 1]]),
        hold=st.booleans(),
    )
    def touch(
        self,
        *,
        topic: str,
        keys: list[str],
        lifetime: Lifetime,
        condition: Condition | None,
        only: TouchOnly | None,
        atomic: bool,
        versions: list[int] | None,
        hold: bool,
    ) -> None:
        request = Touch(topic, keys, self._fix(lifetime), only=only, atomic=atomic)
        if versions is None:
            request.condition = self._fix_condition(topic, keys[0], condition)
        else:
            fixed = [
                self._fix_condition(topic, key, Condition(ConditionKind.IF_VERSION, right))
                for key, right in zip(keys, versions, strict=False)
            ]
            request.versions = [1 if one is None else one.version for one in fixed]
        self._request(request, hold=hold)

    @rule(
        topic=topics,
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6),
        lifetime=lifetimes,
        below=st.sampled_from([0, 1, 5 * MICROS, 3_600 * MICROS, NEVER, EVERY_MICROS]),
        hold=st.booleans(),
    )
    def read_and_renew(self, topic: str, keys: list[str], lifetime: Lifetime, below: int, hold: bool) -> None:
        """The touch of a get (rule L20)."""
        self._request(Touch(topic, keys, self._fix(lifetime), below_micros=below), hold=hold)

    @rule(
        topic=topics,
        records=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6),
        unset=unset_paths.filter(lambda paths: "/k" not in paths),
        ttl_mode=st.sampled_from(list(TtlMode)),
        hold=st.booleans(),
    )
    def publish_deltas(
        self, topic: str, records: list[str], unset: tuple[str, ...], ttl_mode: TtlMode, hold: bool
    ) -> None:
        """As most of them are: nothing but deltas, some to one record."""
        payloads = [self._delta(topic, key, good=True) for key in records]
        keys = None if TOPICS[topic].key else records
        self._request(Publish(topic, payloads, keys, ttl_mode=ttl_mode, delta=True, unset_paths=unset), hold=hold)

    @rule(topic=topics, keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4), wanted=wanted, hold=st.booleans())
    def delete(self, topic: str, keys: list[str], wanted: Wanted | None, hold: bool) -> None:
        self._request(Delete(topic, keys, matches=self._fix_wanted(wanted)), hold=hold)

    @rule(
        topic=topics,
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6),
        mode=st.sampled_from(list(RestampMode)),
        lifetime=lifetimes,
        wanted=wanted,
        hold=st.booleans(),
    )
    def restamp(
        self, topic: str, keys: list[str], mode: RestampMode, lifetime: Lifetime, wanted: Wanted | None, hold: bool
    ) -> None:
        given = ABSENT if mode is RestampMode.CLEAR else self._fix(lifetime)
        self._request(Restamp(topic, keys, mode, given, matches=self._fix_wanted(wanted)), hold=hold)

    @rule(key=st.sampled_from(KEYS), good=st.sampled_from([True, True, True, False]), hold=st.booleans())
    def delete_by_payload(self, key: str, good: bool, hold: bool) -> None:
        self._request(Delete("keyed", payload=self._payload("keyed", key, good=good)), hold=hold)

    def _request(self, request: Request, *, hold: bool) -> None:
        """Queues a request; unless it is held back for a later one, all that is queued goes to the writer together."""
        self.queued.append(request)
        if not hold:
            self._flush()

    def _flush(self) -> None:
        queued, self.queued = self.queued, []
        if not queued:
            return
        now = self.rig.clock.now_micros()
        expected = [self.model.apply(request, now) for request in queued]
        answers = self.rig.run_together(queued)
        for wanted, answer in zip(expected, answers, strict=True):
            self._check_answer(wanted, answer)

    @staticmethod
    def _check_answer(wanted: Expected, answer: Outcome | StoreError) -> None:
        if isinstance(answer, StoreError):
            assert answer.reason is wanted.refused, answer
        else:
            wanted.check(answer)

    def _payload(self, topic: str, key: str, *, good: bool) -> bytes:
        self.payloads += 1
        if topic == "keyed":
            return b'{"k":"%s","n":%d,"s":%s}' % (key.encode(), self.payloads, self._indexed()) if good else b'{"n":1}'
        if topic == "quiet":
            return b'{"n":%d,"s":%s}' % (self.payloads, self._indexed()) if good else b"{"
        return b"x" * (self.payloads % 5) + b"%d" % self.payloads

    def _delta(self, topic: str, key: str, *, good: bool) -> bytes:
        if topic in ("given", "dead") or not good:
            return self._payload(topic, key, good=good)
        self.payloads += 1
        number = self.payloads
        fields = [
            b'"n":%d' % number,
            b'"o":{"x":%d}' % number,
            b'"o":{"y":%d},"n":null' % number,
            b'"o":null,"p":[%d]' % number,
            b'"o":{"x":null,"z":{"w":null}}',
            b'"s":' + self._indexed(),
        ][number % 6]
        return b'{"k":"%s",%s}' % (key.encode(), fields) if topic == "keyed" else b"{%s}" % fields

    def _indexed(self) -> bytes:
        # Now and then twice the same in a row: an update that leaves its entries.
        return INDEXED[self.payloads * 2 // 3 % len(INDEXED)]

    def _fix(self, lifetime: Lifetime) -> Lifetime:
        if lifetime.kind is LifetimeKind.EXPIRE_TIME:
            return Lifetime(LifetimeKind.EXPIRE_TIME, self.rig.clock.now_micros() + lifetime.micros)
        return lifetime

    def _fix_wanted(self, wanted: Wanted | None) -> Wanted | None:
        if wanted is None or wanted.expires_before == NEVER:
            return wanted
        return replace(wanted, expires_before=self.rig.clock.now_micros() + wanted.expires_before)

    def _fix_condition(self, topic: str, key: str, condition: Condition | None) -> Condition | None:
        if condition is None or condition.kind is not ConditionKind.IF_VERSION:
            return condition
        known = self.model.topics[topic].records.get(key.encode())
        right = condition.version == 1 and known is not None and known.version is not None
        return Condition(ConditionKind.IF_VERSION, known.version if right and known and known.version else 1)
