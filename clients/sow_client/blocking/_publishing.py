# Generated from aio/_publishing.py by clients/generate_blocking.py. Change that file, then run `make client`.
"""Changing records: publish, touch, delete."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar, overload

from sow.v1 import sow_pb2, types_pb2
from sow_client import (
    _ignored,
    _keys,
    _lifetimes,
    _lines,
    _publish_columns,
    _publish_core,
    _reads,
    _statuses,
    _transport,
    _writes,
)
from sow_client._cells import Way
from sow_client._contract import KNOWN_ELSEWHERE
from sow_client._documents import Document
from sow_client._keys import Key, optional_key
from sow_client._lines import Home
from sow_client._parameters import Parameters
from sow_client._payloads import Encoding
from sow_client._publish_core import Ack, OpenedPublisher, PublishCore, PublisherOptions, StreamDefaults
from sow_client._publisher import Publisher, StreamCall
from sow_client._records import NEVER, Deleted, DurabilityName, ExpireAt, Published, TouchOnlyName, Ttl
from sow_client._writes import RefusalsMode
from sow_client.blocking._calls import Calls
from sow_client.blocking._moving import Transport
from sow_client.blocking._transactions import Collected, Transaction, request_of
from sow_client.errors import Refusal, SowError

if TYPE_CHECKING:
    from sow_client._frame_rows import NanMode
    from sow_client._topics_core import CellCore

_Key = TypeVar("_Key", bound=Key)


class Publishing(Calls):
    """The calls that change records."""

    def publish(
        self,
        topic: str,
        data: Document,
        *,
        key: Key | None = None,
        ttl: Ttl | None = None,
        expire_at: ExpireAt | None = None,
        keep_ttl: bool = False,
        extend_ttl: bool = False,
        only_if_absent: bool = False,
        only_if_present: bool = False,
        only_if_version: int | None = None,
        durability: DurabilityName | None = None,
    ) -> Published:
        """Publishes one record.

        `data` is a mapping, a dataclass, a msgspec.Struct or a model of pydantic, which becomes JSON; text or bytes go
        as they are. `key` is for topics without key fields; otherwise the server derives the key from the document. It
        may be a text, a number or a bool.

        `ttl` ("30s", a timedelta, seconds, or NEVER) or `expire_at` (a time with its zone) is the lifetime; without one
        the record gets the default of its topic. With `keep_ttl` a live record keeps its own, and with `extend_ttl` it
        gets the later of both expire times. At most one condition may be given: no live record has the key
        (`only_if_absent`), one has it (`only_if_present`), or one at this version (`only_if_version`).

        `durability` decides when the server acknowledges: "fsync" once the record is on disk, "buffered" before that,
        "replicated" once it is on disk here and at the sync peers; None: the server's default. If the connection
        breaks, the publish is sent again, and applied once. Raises the error of a refusal, such as InvalidArgument or
        ConditionFailed.

        Rules: P1, K3, L2, L6, P3, P5.
        """
        payload, encoded_as = self._encoded(topic, data)
        request = _writes.publish_request(
            topic,
            [sow_pb2.PublishRecord(key=optional_key(key), payload=payload)],
            encoded_as=encoded_as,
            ttl=ttl,
            expire_at=expire_at,
            keep_ttl=keep_ttl,
            extend_ttl=extend_ttl,
            condition=_writes.condition(
                only_if_absent=only_if_absent, only_if_present=only_if_present, only_if_version=only_if_version
            ),
            durability=durability,
        )
        done = _writes.only(self._publish(request))
        _ignored.heed(topic, [done])
        return done

    def delta_publish(
        self,
        topic: str,
        data: Document,
        *,
        unset: Iterable[str] | None = None,
        key: Key | None = None,
        ttl: Ttl | None = None,
        expire_at: ExpireAt | None = None,
        keep_ttl: bool = False,
        extend_ttl: bool = False,
        only_if_absent: bool = False,
        only_if_present: bool = False,
        only_if_version: int | None = None,
        durability: DurabilityName | None = None,
    ) -> Published:
        """Merges fields into the live record of a key; without one it is a publish.

        Scalars and arrays replace, objects merge, and a missing or null field is unchanged. `unset` names fields to
        remove, as paths such as "/a/b". The other arguments are those of `publish`.

        Rule: P2.
        """
        payload, encoded_as = self._encoded(topic, data)
        request = _writes.publish_request(
            topic,
            [sow_pb2.PublishRecord(key=optional_key(key), payload=payload)],
            encoded_as=encoded_as,
            ttl=ttl,
            expire_at=expire_at,
            keep_ttl=keep_ttl,
            extend_ttl=extend_ttl,
            condition=_writes.condition(
                only_if_absent=only_if_absent, only_if_present=only_if_present, only_if_version=only_if_version
            ),
            durability=durability,
            delta=True,
            unset=unset,
        )
        done = _writes.only(self._publish(request))
        _ignored.heed(topic, [done])
        return done

    @overload
    def publish_many(
        self,
        topic: str,
        documents: Iterable[Document],
        *,
        keys: Iterable[Key] | None = None,
        ttl: Ttl | None = None,
        expire_at: ExpireAt | None = None,
        keep_ttl: bool = False,
        extend_ttl: bool = False,
        only_if_absent: bool = False,
        only_if_present: bool = False,
        atomic: bool = False,
        durability: DurabilityName | None = None,
        delta: bool = False,
        unset: Iterable[str] | None = None,
        refusals: Literal["raise"] = "raise",
    ) -> list[Published]: ...

    @overload
    def publish_many(
        self,
        topic: str,
        documents: Iterable[Document],
        *,
        keys: Iterable[Key] | None = None,
        ttl: Ttl | None = None,
        expire_at: ExpireAt | None = None,
        keep_ttl: bool = False,
        extend_ttl: bool = False,
        only_if_absent: bool = False,
        only_if_present: bool = False,
        atomic: bool = False,
        durability: DurabilityName | None = None,
        delta: bool = False,
        unset: Iterable[str] | None = None,
        refusals: Literal["return"],
    ) -> list[Published | Refusal]: ...

    def publish_many(
        self,
        topic: str,
        documents: Iterable[Document],
        *,
        keys: Iterable[Key] | None = None,
        ttl: Ttl | None = None,
        expire_at: ExpireAt | None = None,
        keep_ttl: bool = False,
        extend_ttl: bool = False,
        only_if_absent: bool = False,
        only_if_present: bool = False,
        atomic: bool = False,
        durability: DurabilityName | None = None,
        delta: bool = False,
        unset: Iterable[str] | None = None,
        refusals: RefusalsMode = "raise",
    ) -> list[Published] | list[Published | Refusal]:
        """Publishes documents in order and returns the outcome of each. `keys` has one key per document.

        Raises PublishFailed if the server has refused records; all others were applied. With `refusals="return"` the
        Refusal stands in the result instead, in the place of its record.

        With `atomic` all or none are applied (at most 1,000). Without it, many documents take several requests. When a
        record is refused for a reason that may pass, the records after it are not applied either; their refusals say
        STREAM_BROKEN. With `delta` each document is merged, and the fields `unset` removed, as by `delta_publish`. For
        a long stream a `publisher` is several times faster.

        Rules: P4, P2.
        """
        unset, refusals = _reads.texts(unset, "unset"), _writes.checked_refusals(refusals)
        results: list[Published | Refusal] = []
        condition = _writes.condition(only_if_absent=only_if_absent, only_if_present=only_if_present)
        encoding = Encoding(self._form(topic))
        for batch in _writes.publish_batches(documents, keys, atomic=atomic, encode=encoding.encode):
            if _writes.ended_by_passing(results):
                results.extend(_writes.not_sent(len(results)) for _ in batch.records)
                continue
            request = _writes.publish_request(
                topic,
                batch.records,
                ttl=ttl,
                expire_at=expire_at,
                keep_ttl=keep_ttl,
                extend_ttl=extend_ttl,
                condition=condition,
                durability=durability,
                atomic=atomic,
                delta=delta,
                unset=unset,
                encoded_as=encoding.encoded_as,
            )
            response = self._publish(request)
            results += _writes.outcomes(
                response, expected=len(batch.records), first_index=batch.first_index, atomic=atomic
            )
        _ignored.heed(topic, results)
        return _writes.answered(results, refusals)

    def transaction(self, topic: str, *, durability: DurabilityName | None = None) -> Transaction:
        """Puts and removals that are applied together, or not at all: at most 1,000, of one topic.

        Use it in a `with` block, whose end sends them, and raises PublishFailed if one was refused. So a record
        moves from one key to another, and nobody sees both or none of them:

            with client.transaction("orders") as change:
                change.remove("new-7")
                change.publish({"id": "filled-7", "price": 9.5})

        Rules: P4, P11.
        """
        return Transaction(partial(self._commit, topic, durability))

    def _commit(self, topic: str, durability: DurabilityName | None, changes: Sequence[Collected]) -> list[Published]:
        request = request_of(topic, changes, Encoding(self._form(topic)), durability)
        results = _writes.outcomes(self._publish(request), expected=len(changes), atomic=True)
        _ignored.heed(topic, results)
        _writes.answered(results, "raise")
        return [one for one in results if isinstance(one, Published)]

    def publish_frame(
        self,
        topic: str,
        frame: object,
        *,
        key: str | Sequence[str] | None = None,
        ttl: Ttl | None = None,
        expire_at: ExpireAt | None = None,
        ttl_column: str | None = None,
        expire_time_column: str | None = None,
        keep_ttl: bool = False,
        extend_ttl: bool = False,
        durability: DurabilityName | None = None,
        delta: bool = False,
        nan: NanMode = "refuse",
    ) -> int:
        """Publishes each row of a frame of pandas or polars, or of a table of Arrow, as a document of its columns.
        Returns the number of records.

        `key` names the column, or the columns, of the keys, for topics without key fields. `ttl_column` has lifetimes
        (texts such as "30s", seconds or durations), `expire_time_column` times with a time zone; a null stands for the
        lifetime of all, `ttl` or `expire_at`. Columns of lifetimes and of metadata, such as "_key", are no fields of
        the documents; the index of pandas is left out. A missing value is published as null.

        NaN and infinities are refused with InvalidArgument, with the path and the row, before anything is sent. With
        `nan="null"` a NaN is published as null: pandas has it for missing values. All rows are checked before the first
        one is sent; InvalidArgument names a row that cannot be. Maps become objects, periods of pandas text. Raises
        PublishFailed if the server has refused records; all others are applied. The other arguments are those of
        `publisher`. Needs `sow[arrow]`.
        """
        from sow_client import _frame_rows  # lazily: few programs need it

        form = self._form(topic)
        rows = _frame_rows.rows(
            frame,
            key=key,
            ttl_column=ttl_column,
            expire_time_column=expire_time_column,
            nan=nan,
            form=form,
            check=lambda row: _publish_columns.check_row(row.payload, row.key, row.ttl, row.expire_at),
        )
        publisher = self.publisher(
            topic,
            ttl=ttl,
            expire_at=expire_at,
            keep_ttl=keep_ttl,
            extend_ttl=extend_ttl,
            durability=durability,
            delta=delta,
        )
        publisher._core.encoded_as = form.encoded_as
        try:
            with publisher:
                for row in rows:
                    publisher.publish(row.payload, key=row.key, ttl=row.ttl, expire_at=row.expire_at)
        finally:
            if publisher.refused:
                self._forms.pop(topic, None)  # the topic may have been made anew, with another type
        return publisher.acknowledged

    def publisher(
        self,
        topic: str,
        *,
        ttl: Ttl | None = None,
        expire_at: ExpireAt | None = None,
        keep_ttl: bool = False,
        extend_ttl: bool = False,
        durability: DurabilityName | None = None,
        batch_records: int = 1_000,
        max_in_flight: int = 16,
        linger: float = 0.02,
        retry_for: float = 30.0,
        publisher_id: str | None = None,
        on_ack: Callable[[Ack], object] | None = None,
        on_refusal: Callable[[Refusal], object] | None = None,
        delta: bool = False,
        unset: Iterable[str] | None = None,
        epoch: int | None = None,
        unit: int = 0,
        token: int = 0,
    ) -> Publisher:
        """A buffered, pipelined, ordered stream of publishes; see `Publisher`.

        Records are sent in batches of `batch_records`, at most `max_in_flight` batches unacknowledged, and no later
        than `linger` seconds after they were handed over. After a break it reconnects, for `retry_for` seconds. A
        `publisher_id` fences every older publisher of that id: it begins a new epoch, unless `epoch` is one from
        `open_publisher`; with its `token` the publisher may go on at another instance. With a `unit`, all records
        belong to the unit of work with that number, which `finish_unit` ends; it needs a `publisher_id`. With `delta`
        each record is merged, and the fields `unset` removed, as by `delta_publish`.

        Rules: P6, F12, P2.
        """
        defaults = StreamDefaults(
            topic,
            _lifetimes.lifetime_message(ttl, expire_at),
            _writes.ttl_mode(keep_ttl, extend_ttl),
            _writes.durability_value(durability),
            delta,
            _writes.unset_paths(delta, unset) or (),
            _publish_core.checked_unit(publisher_id, epoch, unit),
        )
        way = self._cells.way(topic)
        pace = batch_records, max_in_flight, linger, retry_for, self._connect_timeout
        options = PublisherOptions(*pace, failover=self._failover_in(way.place), keeps=publisher_id is not None)
        core = PublishCore(
            defaults,
            options,
            publisher_id=publisher_id or _writes.random_publisher_id(),
            publisher_epoch=1 if epoch is None else epoch,
            publisher_token=_writes.random_token() if publisher_id is None else token,
            way=way,
            opens=publisher_id is not None and epoch is None,
        )
        name = f"publisher {core.publisher_id}"
        home = (None if epoch is None else self._homes.of(name)) or Home(f"the {name}")
        next_epoch = None
        if publisher_id is not None and epoch is None:
            next_epoch = partial(self._new_epoch, way, publisher_id, unit)
        return Publisher(
            core,
            partial(self._open_stream, core, way, home, next_epoch),
            form=partial(self._form, topic, at_most=self._connect_timeout),
            next_epoch=next_epoch,
            on_ack=on_ack,
            on_refusal=on_refusal,
        )

    def open_publisher(self, publisher_id: str, *, unit: int = 0, topic: str | None = None) -> OpenedPublisher:
        """Begins a new epoch of a publisher, above all earlier ones, and on disk.

        The server refuses publishes under an older epoch with PUBLISHER_FENCED. Two calls never get the same epoch. If
        the `unit` of work with this number is finished, no epoch begins, and `unit_done` is True. The server forgets a
        publisher and its units when it is idle for `publisher_ttl` (7 days). Where there are several cells, name the
        `topic` that it publishes to: the epoch begins in the cell of that topic.

        Rules: P6, C13.
        """
        if topic is not None:
            self._form(topic)  # which finds its cell
        return self._begin_epoch(self._cells.way(topic or ""), publisher_id, unit)

    @overload
    def touch(
        self,
        topic: str,
        key: Key,
        *,
        ttl: Ttl | None = None,
        expire_at: ExpireAt | None = None,
        only: TouchOnlyName | None = None,
        only_if_version: int | None = None,
        durability: DurabilityName | None = None,
    ) -> Published: ...

    @overload
    def touch(
        self,
        topic: str,
        key: list[_Key],
        *,
        ttl: Ttl | None = None,
        expire_at: ExpireAt | None = None,
        only: TouchOnlyName | None = None,
        only_if_version: int | None = None,
        only_if_versions: Iterable[int] | None = None,
        atomic: bool = False,
        durability: DurabilityName | None = None,
    ) -> list[Published | Refusal]: ...

    def touch(
        self,
        topic: str,
        key: Key | list[_Key],
        *,
        ttl: Ttl | None = None,
        expire_at: ExpireAt | None = None,
        only: TouchOnlyName | None = None,
        only_if_version: int | None = None,
        only_if_versions: Iterable[int] | None = None,
        atomic: bool = False,
        durability: DurabilityName | None = None,
    ) -> Published | list[Published | Refusal]:
        """Gives live records a new lifetime, and leaves their payloads as they are. Without `ttl` and `expire_at` it is
        the default lifetime of the topic, as for a publish without one.

        `only` names the records to touch by their expire time: those that get a "later" or an "earlier" one, those
        "without" one, those "with" one. `only_if_versions` has a version for each key. With `atomic` all keys are
        touched in one commit, or none (at most 1,000). `key` is one key, as `get` takes it, or a list of keys; a tuple
        is one key with several fields. For one key it returns the new version, or raises an error such as NotFound; for
        a list, the outcome of each.

        Rules: P8, L19.
        """
        keys = _keys.key_texts(key if isinstance(key, list) else [key], "key")
        versions = None if only_if_versions is None else list(only_if_versions)
        results: list[Published | Refusal] = []
        for chunk in [keys] if atomic else _reads.chunks(keys):
            first = len(results)
            request = _writes.touch_request(
                topic,
                chunk,
                ttl=ttl,
                expire_at=expire_at,
                only_if_version=only_if_version,
                durability=durability,
                only=only,
                atomic=atomic,
                only_if_versions=None if versions is None else versions[first : first + len(chunk)],
            )
            response = self._call(self._sow.Touch, request, once=True)
            if not isinstance(key, list):
                done = _writes.only(response)
                _ignored.heed(topic, [done])
                return done
            results += _writes.outcomes(response, expected=len(chunk), first_index=first, atomic=atomic)
        _ignored.heed(topic, results)
        return results

    def persist(self, topic: str, key: Key, *, durability: DurabilityName | None = None) -> Published:
        """Removes the lifetime of a live record. Rule: P8."""
        return self.touch(topic, key, ttl=NEVER, durability=durability)

    def sow_delete(
        self,
        topic: str,
        *,
        keys: Iterable[Key] | None = None,
        only_if_versions: Iterable[int] | None = None,
        filter: str | None = None,  # noqa: A002 - the name that users know from the contract
        parameters: Parameters | None = None,
        data: Document | None = None,
        all: bool = False,  # noqa: A002 - the name that users know from the contract
        dry_run: bool = False,
        durability: DurabilityName | None = None,
        publisher_id: str | None = None,
        epoch: int | None = None,
        unit: int = 0,
        token: int = 0,
        on_progress: Callable[[Deleted], object] | None = None,
    ) -> Deleted:
        """Deletes records by exactly one of `keys`, `filter`, `data` (its key is derived as for a publish), `all`.

        `parameters`: the values of the names in the filter. `only_if_versions` has a version for each of the `keys`; a
        record with another version stays. `dry_run` only counts. Many records are deleted in steps, each record only if
        it still matches at its step; `on_progress` gets the figures after each step. When the connection breaks,
        completed steps stay done. With `publisher_id`, by keys or data only, the delete belongs to that publisher's
        work: it is refused with PUBLISHER_FENCED when an epoch later than `epoch` has begun, with UNIT_DONE when `unit`
        is finished.

        Rules: D1, P6.
        """
        payload = None if data is None else (self._encoded(topic, data))[0]
        request = _writes.delete_request(
            topic,
            keys=keys,
            filter_text=filter,
            payload=payload,
            parameters=parameters,
            everything=all,
            dry_run=dry_run,
            durability=durability,
            only_if_versions=only_if_versions,
        )
        _writes.act_for(request, publisher_id, epoch, unit, token)
        try:
            with closing(self._answers(self._sow.SowDelete, request)) as responses:
                for response in responses:
                    deleted = _writes.deleted(response)
                    if on_progress is not None:
                        on_progress(deleted)
                    if response.done:
                        return deleted
        except SowError:
            if payload is not None:
                self._forms.pop(topic, None)  # the topic may have been made anew, with another type
            raise
        raise _statuses.cut("the answer to the delete")

    def _publish(self, request: sow_pb2.PublishRequest, *, at_most: float | None = None) -> sow_pb2.PublishResponse:
        way = self._cells.way(request.topic)
        response: sow_pb2.PublishResponse | None = None
        while response is None:
            place = way.place
            position = place.sequencer.take()
            try:
                request.publisher.CopyFrom(position)
                response = self._call_at(place, self._sow.Publish, request, goes=self._goes(request), at_most=at_most)
            except SowError as error:
                time.sleep(way.follow(error))
            finally:
                place.sequencer.give_back(position, response)
        if any(result.refusal.reason == types_pb2.ERROR_REASON_PAYLOAD_MALFORMED for result in response.results):
            self._forms.pop(request.topic, None)  # the topic may have been made anew, with another type
        return response

    def _goes(self, request: sow_pb2.PublishRequest) -> bool:
        """True if a publish is made again elsewhere in its cell when its instance is lost."""
        has_condition = any(record.HasField("condition") for record in request.records)
        return self._failover_in(self._cells.way(request.topic).place) == "again" and not has_condition

    def _open_stream(
        self,
        core: PublishCore | CellCore,
        way: Way[Transport],
        home: Home,
        next_epoch: Callable[[], OpenedPublisher] | None,
        requests: Iterator[sow_pb2.PublishStreamRequest],
    ) -> StreamCall:
        needs, place = core.needs, way.place
        if next_epoch is not None and isinstance(core, PublishCore) and core.wants_epoch:
            core.opened(next_epoch())
        core.failover = self._failover_in(place)
        if not core.is_bound:
            home.line = None  # any instance may take what is not settled
            if core.is_unsettled and place.transport.moves_max:
                needs = needs or KNOWN_ELSEWHERE
        line = self._ready(way, _transport.RECONNECT_SECONDS, home, needs)
        core.is_told = line.contract >= KNOWN_ELSEWHERE.contract
        core.checked = needs
        return _lines.at(line, self._sow.PublishStream)(requests)

    def _new_epoch(self, way: Way[Transport], publisher_id: str, unit: int) -> OpenedPublisher:
        return _publish_core.new_epoch(self._begin_epoch(way, publisher_id, unit), publisher_id, unit)
