# Generated from aio/_leasing.py by clients/generate_blocking.py. Change that file, then run `make client`.
"""Leases: keys that live while their holder does (rule L21)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Literal, Self

from sow.v1 import sow_pb2
from sow_client import _process, _reads, _statuses, _writes
from sow_client._arguments import refused_by_name
from sow_client._documents import Document
from sow_client._flags import Flag
from sow_client._keys import Key, optional_key
from sow_client._lease_core import Joining, LeaseCore, Seen, lease_now
from sow_client._lifetimes import lifetime_message
from sow_client._records import DurabilityName, Published, Ttl
from sow_client._workers import Lock, Worker
from sow_client.blocking._administration import Administration
from sow_client.blocking._publishing_topics import TopicsPublishing
from sow_client.blocking._reading import Reading
from sow_client.blocking._transactions import Collected
from sow_client.errors import (
    DeadlineExceeded,
    LeaseLost,
    NotFound,
    PermissionDenied,
    PublishFailed,
    ResourceExhausted,
    SowError,
    Unavailable,
)

_OTHER_RECORD: Final = frozenset({"CONDITION_FAILED", "RECORD_NOT_FOUND"})
"""Refusals of a renewal because a record is not there, or not at the version that was named."""


class Leasing(TopicsPublishing, Reading, Administration):
    """The call that makes a lease."""

    def lease(self, ttl: Ttl, *, on_lost: Callable[[LeaseLost], object] | None = None) -> Lease:
        """Keys that live while this program does, and all end in one instant; see `Lease`.

        `ttl`, at least a second, is the time after which they end if they are not renewed. `on_lost` is called once,
        when the lease is lost.
        """
        return Lease(self, LeaseCore(ttl), on_lost=on_lost)


@refused_by_name
class Lease(_process.Owned):
    """Keys that are renewed while their holder runs, and are deleted when it leaves.

    Made by `Client.lease`, and used as a context manager. Records that are published through it live for its ttl.
    All of them are renewed together, each third of that time. If the holder ends without a word, all end in one
    instant.

    The lease is lost when it was not renewed in time, or when another has changed or deleted one of its records. Then
    `on_lost` is called, `lost` has the error, and `check`, `publish` and the end of the block raise it. `lost` and
    `check` also tell a program that was suspended, and goes on after the time of its lease. A lost lease renews nothing
    more.

    Rule: L21.
    """

    def __init__(
        self, client: Leasing, core: LeaseCore, *, on_lost: Callable[[LeaseLost], object] | None = None
    ) -> None:
        self._client = client
        self._core = core
        self._on_lost = on_lost
        self._lock = Lock()  # held by everything that changes or renews the records
        self._ticker = Ticker(self._turn)
        self._closed = False
        _process.tell(self)

    _what = "lease"

    def _forked(self) -> None:
        if self._closed:
            return
        super()._forked()
        _process.keep(self._ticker)
        self._lock, self._ticker = Lock(), Ticker(self._turn)
        self._core.lose(_process.forked(self._what).message)  # the parent holds it, and goes on to renew it

    def __repr__(self) -> str:
        held = sum(map(len, self._core.held.values()))
        return (
            f"{type(self).__name__}({held} records{', lost' if self.lost else ''}{', closed' if self._closed else ''})"
        )

    @property
    def lost(self) -> LeaseLost | None:
        """The loss of the lease; None while the holder may rely on it."""
        return self._core.lost(lease_now())

    def check(self) -> None:
        """Raises LeaseLost unless the holder may rely on the lease at this moment."""
        self._check_process()
        if (lost := self.lost) is not None:
            raise lost

    def publish(
        self,
        topic: str,
        data: Document,
        *,
        key: Key | None = None,
        only_if_absent: bool = False,
        only_if_present: bool = False,
        only_if_version: int | None = None,
        durability: DurabilityName | None = None,
    ) -> Published:
        """Publishes one record that lives as long as the lease; at most 1,000 in each topic.

        With `only_if_absent` it is a lock: ConditionFailed says that another has the key. The version in the answer is
        greater than that of every earlier holder. The topic must have expiration enabled, and no `max_ttl` below the
        lease's ttl. The other arguments are those of `Client.publish`.
        """
        self._check_process()
        core = self._core
        payload, encoded_as = self._client._encoded(topic, data)
        request = _writes.publish_request(
            topic,
            [sow_pb2.PublishRecord(key=optional_key(key), payload=payload)],
            ttl=None,
            expire_at=None,
            keep_ttl=False,
            extend_ttl=False,
            condition=_writes.condition(
                only_if_absent=only_if_absent, only_if_present=only_if_present, only_if_version=only_if_version
            ),
            durability=durability,
            encoded_as=encoded_as,
        )
        if topic not in core.held:
            self._check_topic(topic)
        with self._lock:
            if self._closed:
                raise _statuses.closed("lease")
            self.check()
            joining = core.joins(topic, payload, lease_now())
        try:
            request.lifetime.CopyFrom(joining.lifetime)
            # Without the lock: it may wait for a peer that is away, while the other records have to be renewed.
            try:
                response = self._client._publish(request, at_most=core.seconds)
                if self._client._goes(request):  # it may have been applied at two instances, and either version wins
                    core.doubt(topic, lease_now())
            except BaseException:  # also where the caller gives up: the request may have arrived
                core.doubtful(topic, payload, lease_now())
                raise
            published = _writes.only(response)
            try:
                return self._join(joining, published)
            except BaseException:  # the record is there, and perhaps not among those of the lease
                core.doubtful(topic, payload, lease_now())
                raise
        finally:
            core.left(joining)

    def _join(self, joining: Joining, published: Published) -> Published:
        """The record is one of the lease from now on."""
        core, topic = self._core, joining.topic
        with self._lock:
            if self._closed:
                with suppress(NotFound, Unavailable, DeadlineExceeded, ResourceExhausted):
                    self._client.sow_delete(topic, keys=[published.key], only_if_versions=[published.version])
                raise _statuses.closed("lease")
            alike = core.joined(joining, published, lease_now())
            self._ticker.start(core.wait(joining.sent))
            if not alike:
                self._renew()
            self.check()
        return published

    def close(self) -> None:
        """Deletes the records and ends the lease. It may be called again. Raises LeaseLost if the lease is lost.

        If the server cannot be reached, the records stay until their time is over.
        """
        self._check_process()
        self._ticker.stop()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            lost = self.lost
            for topic in list(self._core.held):
                try:
                    complete = self._delete(topic)
                except NotFound:
                    complete = False  # the topic is gone
                except (Unavailable, DeadlineExceeded, ResourceExhausted):
                    continue
                if not complete and lost is None:
                    lost = self._core.lose(f"another has changed or deleted a record of the lease in {topic!r}")
        if lost is not None:
            raise lost

    def _end_with(self, topic: str, puts: Sequence[tuple[str, Document, Ttl]], durability: DurabilityName) -> bool:
        """Removes the records of a topic in one commit with puts into it (key, document, ttl), if the lease is held
        until then. False: it was lost, and nothing has changed."""
        self._ticker.stop()  # it would renew the records, which gives them other versions
        with self._lock:
            held = {} if self.lost else self._core.held.pop(topic, {})
            changes = [
                Collected(None, key, None, _writes.condition(only_if_version=one.version), removes=True)
                for key, one in held.items()
            ]
            for key, data, ttl in puts:
                changes.append(Collected(data, key, lifetime_message(ttl, None), None, removes=False))
            try:
                if held:
                    self._client._commit(topic, durability, changes)
            except PublishFailed as failed:
                if failed.reason != "CONDITION_FAILED":
                    raise (failed.__cause__ or failed) from None
                return False
            return bool(held)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        try:
            self.close()
        except SowError as failed:
            if error is None:
                raise
            if failed is not error:
                error.add_note(f"the lease also failed: {failed}")
        return False

    def _check_topic(self, topic: str) -> None:
        try:
            self._core.check_topic(self._client.describe_topic(topic))
        except NotFound:
            pass  # the publish creates it, or tells

    def _turn(self) -> float | None:
        with self._lock:
            wait = self._renew()
        if wait is None and self._on_lost is not None and (lost := self.lost) is not None:
            try:
                self._on_lost(lost)
            except Exception as error:  # noqa: BLE001 - its fault is told where the loss is told
                lost.add_note(f"on_lost has failed: {error!r}")
        return wait

    def _renew(self) -> float | None:
        """Renews all records. Returns the seconds until the next time; None when the lease is lost."""
        core, sent = self._core, lease_now()
        expire_micros: int | None = None
        for topic in core.held:
            if self.lost is not None:
                return None
            try:
                expire_micros = self._renew_topic(topic, expire_micros)
            except NotFound as error:
                core.lose(str(error))
            except SowError as error:  # it may pass: the lease is held until its time is over
                core.failed(topic, error, lease_now())
                return core.wait(lease_now())
            except Exception as error:  # noqa: BLE001 - a fault of this client: nothing renews any more, so tell the holder
                core.lose(f"renewing has failed: {error!r}", error)
            except BaseException:  # the caller of a publish gives up during the renewal that it needs
                core.doubt(topic, lease_now())
                raise
        if self.lost is not None:
            return None
        core.all_renewed(expire_micros, sent)
        return core.wait(lease_now())

    def _renew_topic(self, topic: str, expire_micros: int | None) -> int | None:
        core = self._core
        while self.lost is None:
            request = core.renewal(topic, expire_micros)
            response = self._client._call(
                self._client._sow.Touch,
                request,
                once=True,
                at_most=core.patience(lease_now()),
            )
            renewed, refused = core.renewed(topic, response)
            if refused is None:
                return renewed
            if refused.reason not in _OTHER_RECORD or self._recognize(topic) is Seen.OTHER:
                core.lose(f"a record of the lease in {topic!r} is another's, or gone: {refused.message}")
            elif core.renewal(topic, expire_micros) == request:
                # The instance lags, or the records were read at another one than that which has refused: it may go on
                # next time.
                raise Unavailable(f"the lease in {topic!r}: {refused.message}", reason="BEHIND")
        return None

    def _recognize(self, topic: str) -> Seen:
        """Reads the records that the instance in use has in place of those of the lease: a request of unknown outcome
        may have been applied, or the instance lags."""
        core = self._core
        try:
            response = self._client._call(
                self._client._sow.Get,
                _reads.get_request(topic, list(core.held[topic])),
                once=True,
                at_most=core.patience(lease_now()),
            )
        except PermissionDenied:
            return Seen.OTHER
        return core.recognize(topic, _reads.records(topic, response), lease_now())

    def _delete(self, topic: str) -> bool:
        """Deletes the records of the lease; False if one of them was not there at a version of the lease. One that is
        known to an instance that lags stays until its time is over."""
        held = self._core.held[topic]
        deleted = self._delete_known(topic)
        seen = Seen.OWN
        for _ in range(2):  # an instance that lags may get the later versions between the read and the delete
            if deleted == len(held):
                break
            seen = self._recognize(topic)
            deleted += self._delete_known(topic)
        return deleted == len(held) or seen is Seen.BEHIND

    def _delete_known(self, topic: str) -> int:
        held = self._core.held[topic]
        done = self._client.sow_delete(topic, keys=list(held), only_if_versions=[one.version for one in held.values()])
        return done.deleted


class Ticker:
    """Calls a function in a thread of its own, again and again, until it is stopped or the function returns None.
    Otherwise it returns the seconds until the next call."""

    def __init__(self, turn: Callable[[], float | None]) -> None:
        self._turn = turn
        self._stop = Flag()
        self._worker = Worker("sow-lease")

    def start(self, seconds: float) -> None:
        """Begins, with the first call after so many seconds. Later calls do nothing."""
        self._worker.start(self._run, seconds)

    def stop(self) -> None:
        """Returns once no call is under way and none will come."""
        self._stop.set()
        self._worker.join()

    def _run(self, seconds: float | None) -> None:
        while seconds is not None and not self._stop.wait(seconds):
            seconds = self._turn()
