"""The blocking publisher: `PublishCore` with threads."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Literal, Protocol, Self

import grpc

from sow.v1 import sow_pb2
from sow_client import _ends, _lifetimes, _process, _statuses
from sow_client._documents import Document, encode
from sow_client._keys import Key, key_text
from sow_client._payloads import PayloadForm
from sow_client._publish_columns import (
    BATCH_BYTES,
    KEY_CHARACTERS_MAX,
    PAYLOAD_BYTES_MAX,
    checked_columns,
    key_too_large,
)
from sow_client._publish_core import END_SECONDS, Ack, OpenedPublisher, PublishCore
from sow_client._publisher_base import ANSWERS, Figures, PublisherBase, leave
from sow_client._records import ExpireAt, Ttl
from sow_client.errors import Refusal, SowError


class Sender(PublisherBase):
    """The machine of a blocking publisher: what its threads share. They refer to it, and not to the `Publisher`, so
    that dropping the last reference to that can end them."""

    # Three threads share one lock: the user's fills the buffer and seals; gRPC's sender takes sealed requests through
    # `_requests` and seals lingering records; `_run` opens streams and reads acknowledgements.

    def __init__(
        self,
        core: PublishCore,
        open_stream: OpenStream,
        *,
        form: Callable[[bool], PayloadForm] | None = None,
        next_epoch: Callable[[], OpenedPublisher] | None = None,
        on_ack: Callable[[Ack], object] | None = None,
        on_refusal: Callable[[Refusal], object] | None = None,
    ) -> None:
        """`form` asks for that of the topic's payloads, with True also if the client remembers one; None: JSON.
        `next_epoch` begins an epoch of the publisher's id, at once; None: the core has its epoch already."""
        super().__init__(core, on_ack, on_refusal)
        self._form = form
        self._encode: Callable[[Document], bytes] = encode if form is None else self._first
        self._open_stream = open_stream
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # there is something to send, or to stop
        self._progress = threading.Condition(self._lock)  # something was acknowledged, or all is over
        self._idle = True  # no thread looks at pending records until it is woken
        self._delivering = False  # a callback runs for settled records; `flush` waits for its end, too
        self._call: StreamCall | None = None
        self._thread: threading.Thread | None = None
        self._give_up: float | None = None  # nobody closes it: when to stop
        self._late = 0  # records that were not settled when the program ended
        if next_epoch is not None:
            core.opened(next_epoch())  # last, as another thread may fork meanwhile

    def _forked(self) -> None:
        super()._forked()
        _process.keep(self._call, self._thread)
        self._lock = threading.Lock()
        self._work, self._progress = threading.Condition(self._lock), threading.Condition(self._lock)
        self._call = self._thread = None

    def publish(
        self, data: Document, *, key: Key | None = None, ttl: Ttl | None = None, expire_at: ExpireAt | None = None
    ) -> None:
        """As `Publisher.publish`."""
        # Every record pays for this half microsecond: locals, one append, no lock, and only the calls that data needs.
        payload = data if type(data) is bytes else self._encode(data)
        lifetime = None if ttl is None and expire_at is None else _lifetimes.lifetime(ttl, expire_at)
        size = len(payload)
        if self._stopped or size > PAYLOAD_BYTES_MAX:
            self._refuse(size)
        if key is None and lifetime is None:
            self._append(payload)
        else:
            # `optional_key`, whose calls would take three times as long.
            text = key if key is None or (type(key) is str and key.isascii()) else key_text(key)
            if text is not None and len(text) > KEY_CHARACTERS_MAX:
                raise key_too_large(text)
            self._core.plain = False
            self._append((payload, text, lifetime))
        self._filled = filled = self._filled + size
        if filled >= BATCH_BYTES or len(self._pending) >= self._batch_records:
            with self._lock:
                self._seal_all()
        elif self._idle:
            with self._lock:
                self._wake()

    def remove(self, key: Key | None = None, *, data: Document | None = None) -> None:
        """As `Publisher.remove`."""
        removal = self._removal(key, data, None if data is None else self._encode(data))
        self._core.plain = False
        self._append(removal)
        self._filled += len(removal.payload)
        if len(self._pending) >= self._batch_records:
            with self._lock:
                self._seal_all()
        elif self._idle:
            with self._lock:
                self._wake()

    def _first(self, data: Document) -> bytes:
        """The payload of a document, while the form of the topic's payloads is not known. May wait for the server;
        bytes and text do not need it."""
        if (payload := self._as_it_is(data)) is not None:
            return payload
        form = self._await_form()
        if self._core.encoded_as not in ("", form.encoded_as):
            with self._lock:
                self._seal_all()  # what has the old form says so
        self._encode = self._asked(form)
        return self._encode(data)

    def _ask_again(self) -> None:
        if self._form is not None:
            self._encode = self._first

    def _await_form(self) -> PayloadForm:
        assert self._form is not None, "without it `_encode` is there from the begin"
        anew, self._form_is_old = self._form_is_old, False
        backoff = _statuses.Backoff()
        while True:
            backoff.begin(time.monotonic())
            try:
                return self._form(anew)
            except SowError as error:
                delay = self._asking_delay(error, backoff)
            with self._lock:
                if self._progress.wait_for(lambda: self._stopped, delay):
                    raise self._stop_error()

    def publish_columns(
        self,
        payloads: Sequence[bytes],
        *,
        keys: Sequence[str] | None = None,
        lifetime_kinds: Iterable[int] | None = None,
        lifetime_micros: Iterable[int] | None = None,
        removals: Sequence[bool] | None = None,
    ) -> None:
        """As `Publisher.publish_columns`."""
        bulk = checked_columns(payloads, keys, lifetime_kinds, lifetime_micros, removals)
        with self._lock:
            if self._stopped:
                raise self._stop_error()
            if self._pending:
                self._seal_all()
            at = 0
            while at < len(payloads):
                if self._core.room:
                    at = self._core.seal_columns(bulk, at)
                    self._wake()
                else:
                    self._await_progress()

    def finish_unit(self, *, without_refused: bool = False) -> None:
        """As `Publisher.finish_unit`."""
        core = self._core
        core.check_unit()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if core.unit_finished:
                return
            if without_refused:
                core.release()
                self._drain()
            elif self._pending:
                self._seal_all()
            while not core.held_alone or self._delivering:
                self._await_progress()
            core.end_unit(without_refused=without_refused)
            self._wake()
            while core.has_requests or self._delivering:
                self._await_progress()
            failed = core.unit_ended()
        if failed is not None:
            raise failed

    def flush(self) -> None:
        """As `Publisher.flush`."""
        with self._lock:
            self._core.release()
            self._drain()
            self._core.hold()
            failed = self._core.take_refusals()
        if failed is not None and self._on_refusal is None:
            raise failed

    def _end(self) -> StreamCall | None:
        with self._lock:
            self._closing = self._stopped = True
            self._work.notify_all()
            self._progress.notify_all()
            return self._call

    def abort(self) -> None:
        """As `Publisher.abort`."""
        call = self._end()
        _ends.finished(self)
        if self._thread is None or self._thread is threading.current_thread():
            return
        if not self._core.unacknowledged:
            self._thread.join(END_SECONDS)  # the requests have ended, the server ends the answers
        if call is not None:
            call.cancel()
        self._thread.join()

    # ---- an end without the user ----

    def dropped(self) -> None:
        """The program has dropped its publisher. In the thread of the ends, which does not wait."""
        if not self._closing:
            give_up = time.monotonic() + _ends.FLUSH_SECONDS_MAX
            threading.Thread(target=self.finish, args=(give_up,), name="sow-publisher-end", daemon=True).start()

    def settle(self, give_up: float) -> None:
        """See `_ends.Unfinished`."""
        with self._lock:
            self._late = self._core.unacknowledged
            upto = self._core.acknowledged + self._late
            if self._pending and self._core.room:
                self._core.seal()
            self._core.release()
            self._wake()
            while self._core.acknowledged < upto and not self._stopped and (left := give_up - time.monotonic()) > 0:
                self._progress.wait(left)

    def finish(self, give_up: float) -> None:
        """See `_ends.Unfinished`."""
        with self._lock:
            if self._closing:
                return
            late, self._give_up = max(self._late, self._core.unacknowledged), give_up
        why = ""
        try:
            self.flush()
            if late:
                why = f"{late} records were sent at its end"
        except SowError as error:
            left = self._core.unacknowledged
            why = f"{left} records may not have been sent ({error})" if left else str(error)
        except BaseException as error:  # noqa: BLE001 - of a callback
            why = f"{self._core.unacknowledged} records may not have been sent ({error!r})"
        self.abort()
        if why:
            self._warn_of_end(why)

    # ---- the user's thread, with the lock ----

    def _seal_all(self) -> None:
        # While this waits, the sender may seal records that have lingered long enough.
        while self._pending:
            if self._core.room:
                self._core.seal()
            else:
                self._wake()
                self._await_progress()
        self._filled = 0
        self._wake()

    def _drain(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._pending:
            self._seal_all()
        elif self._core.has_requests:
            self._wake()  # the held-back request is free now
        while self._core.unacknowledged or self._delivering:
            self._await_progress()

    def _await_progress(self) -> None:
        if not self._stopped:
            self._progress.wait(None if self._give_up is None else max(0.0, self._give_up - time.monotonic()))
            if self._give_up is not None and time.monotonic() >= self._give_up:
                raise _statuses.out_of_time(ANSWERS)
        if self._stopped:
            raise self._stop_error()

    def _wake(self) -> None:
        self._idle = False
        if self._thread is None:
            _ends.unfinished(self)
            thread = _ends.StreamThread(self._run, "sow-publisher", self._end)
            thread.start()
            self._thread = thread
        self._work.notify_all()

    # ---- gRPC's sender thread ----

    def _requests(self, stream: int) -> Iterator[sow_pb2.PublishStreamRequest]:
        """The requests of one stream, as they become ready; ends when the publisher closes or reconnects."""
        core, linger = self._core, self._core.options.linger
        seen, due = -1, 0.0
        while True:
            with self._lock:
                while True:
                    if stream != self._stream:
                        return
                    request = core.next_request()
                    if request is not None:
                        break
                    if self._closing or core.must_reopen:
                        return
                    if not self._pending:
                        self._await_pending()
                    elif core.sealed_requests != seen:
                        seen, due = core.sealed_requests, time.monotonic() + linger
                    elif (wait := due - time.monotonic()) > 0:
                        self._work.wait(wait)
                    elif core.room:
                        core.seal()
                    else:
                        self._work.wait()  # for the next acknowledgement
            yield request

    # ---- the publisher's thread ----

    def _run(self) -> None:
        with self._lock:
            if self._thread is not threading.current_thread():
                return  # see StreamThread
        try:
            while self._await_work():
                error = self._stream_once()
                with self._lock:
                    self._core.rewind()
                    # Also for lingering records: without a pause they would be tried at once, again and again.
                    if (self._pending or self._core.has_requests) and not self._closing:
                        delay = self._core.retry_delay(error, now=time.monotonic(), jitter=random.random())
                        self._work.wait_for(lambda: self._closing, delay)
        except BaseException as error:  # noqa: BLE001 - also a callback's; the user's thread raises it
            with self._lock:
                self._failure = error
                self._stopped = True
                self._progress.notify_all()

    def _await_work(self) -> bool:
        with self._lock:
            while not (self._pending or self._core.has_requests):
                if self._closing:
                    return False
                self._await_pending()
            return not self._closing

    def _await_pending(self) -> None:
        # Set `_idle` first, look second: a record appended in between is seen here, or its producer sees `_idle`.
        self._idle = True
        if not self._pending:
            self._work.wait()

    def _stream_once(self) -> SowError:
        """Opens a stream and settles its answers until it ends. Returns why it ended."""
        with self._lock:
            self._stream += 1
            requests = self._requests(self._stream)
        call = None
        try:
            try:
                call = self._open_stream(requests)
            except SowError as unavailable:
                return unavailable
            with self._lock:
                self._call = call
                stopped = self._stopped
            if stopped:
                call.cancel()  # `abort` came before the call was known, and could not cancel it
            for response in call:
                error = self._settle(response)
                if error is not None:
                    return error
            return _statuses.cut(ANSWERS)
        except grpc.RpcError as error:
            return _statuses.stream_error(error, ANSWERS)
        finally:
            with self._lock:
                self._stream += 1
                self._call = None
                self._work.notify_all()
            if call is not None:
                call.cancel()

    def _settle(self, response: sow_pb2.PublishStreamResponse) -> SowError | None:
        with self._lock:
            ack, error = self._core.acknowledge(response)
            self._delivering = self._on_ack is not None or self._on_refusal is not None
            self._progress.notify_all()
            if self._pending:
                self._work.notify_all()  # lingering records may have waited for room
        self._heed(ack)
        if self._delivering:
            self._deliver(ack)
            with self._lock:
                self._delivering = False
                self._progress.notify_all()
        return error


class Publisher(Figures):
    """Publishes a stream of documents to one topic: buffered, pipelined, in order, each applied once.

    Made by `Client.publisher`; use it in a `with` block, on one thread. Records are sent in batches of `batch_records`,
    or `linger` seconds after the first record of a batch. Later batches do not wait for the acknowledgement of earlier
    ones; `publish` waits while too many are unacknowledged. After a break the publisher connects again and sends the
    unacknowledged records again, for `retry_for` seconds without progress. The server drops the records that it has
    already.

    Refused records are collected and raised as PublishFailed by `flush` and at the end of the block. With `on_refusal`
    they go to that callback instead. Both callbacks run on the publisher's own thread and must not call the publisher.

    Rule: P6.
    """

    def __init__(
        self,
        core: PublishCore,
        open_stream: OpenStream,
        *,
        form: Callable[[bool], PayloadForm] | None = None,
        next_epoch: Callable[[], OpenedPublisher] | None = None,
        on_ack: Callable[[Ack], object] | None = None,
        on_refusal: Callable[[Refusal], object] | None = None,
    ) -> None:
        """As `Sender`."""
        self._core = core
        self._sender = sender = Sender(
            core, open_stream, form=form, next_epoch=next_epoch, on_ack=on_ack, on_refusal=on_refusal
        )
        # Without the method below, which would add a tenth to the cost of a record.
        self.publish = sender.publish  # type: ignore[method-assign]  # on purpose

    @property
    def _closing(self) -> bool:  # type: ignore[override]  # read only
        return self._sender._closing

    def publish(
        self, data: Document, *, key: Key | None = None, ttl: Ttl | None = None, expire_at: ExpireAt | None = None
    ) -> None:
        """Takes one record; `ttl` or `expire_at` overrides the publisher's own. May wait for room. Rule: L2."""
        self._sender.publish(data, key=key, ttl=ttl, expire_at=expire_at)

    def remove(self, key: Key | None = None, *, data: Document | None = None) -> None:
        """Takes a removal: the live record of the key is deleted, in its place among the records.

        Give the `key`, as `sow_delete` takes it; or `data`, a document that has the key fields of the topic. Without a
        live record it is applied, too, and changes nothing. As a record of the publisher it is applied once: sent again
        after a break, it never removes a later record. It needs the permissions "publish" and "delete". May wait for
        room.

        Rule: P11.
        """
        self._sender.remove(key, data=data)

    def publish_columns(
        self,
        payloads: Sequence[bytes],
        *,
        keys: Sequence[str] | None = None,
        lifetime_kinds: Iterable[int] | None = None,
        lifetime_micros: Iterable[int] | None = None,
        removals: Sequence[bool] | None = None,
    ) -> None:
        """Takes many records at once, for a fraction of the cost of as many `publish` calls, and in order with those.

        Each column has one entry per record. `keys` is for topics without key fields. `lifetime_kinds` (numbers of
        `sow.v1.LifetimeKind`: 0 the publisher's own, 1 ttl, 2 expire time, 3 never) and `lifetime_micros`
        (microseconds; 0 with kinds 0 and 3) are given together. `removals` says which records are removals, as by
        `remove`: these have an empty payload and a key, or a document; an empty key stands for none. May wait for room.
        Raises InvalidArgument with column and row, and then takes none of the records.

        Rules: K3, L2, P11.
        """
        self._sender.publish_columns(
            payloads, keys=keys, lifetime_kinds=lifetime_kinds, lifetime_micros=lifetime_micros, removals=removals
        )

    def finish_unit(self, *, without_refused: bool = False) -> None:
        """Finishes the publisher's `unit` in the same request and commit as the last records.

        Until this call the last records are held back. It returns once the server has confirmed the end of the unit.

        Raises PublishFailed when a record was refused since the publisher was made, also with `on_refusal`. All other
        records are applied then, and the unit is not finished. It may be called again: `without_refused` finishes the
        unit without the refused records, in a commit of its own.

        Rule: P6.
        """
        self._sender.finish_unit(without_refused=without_refused)

    def flush(self) -> None:
        """Returns once all records so far are settled. Raises PublishFailed for refusals since the last flush."""
        self._sender.flush()

    def close(self) -> None:
        """Flushes and ends the stream. It may be called again. Raises as `flush` does."""
        try:
            if not self._closing:
                self.flush()
        finally:
            self.abort()

    def abort(self) -> None:
        """Ends the stream at once. Unacknowledged records may or may not have been applied."""
        self._sender.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        return leave(error, self.close, self.abort)

    def __del__(self) -> None:
        sender = getattr(self, "_sender", None)  # None: it could not be made
        if sender is not None and not sender._closing and not sender._is_parents:
            _ends.hand_over(sender.dropped)


class StreamCall(Protocol):
    """An open stream."""

    def __iter__(self) -> Iterator[sow_pb2.PublishStreamResponse]: ...

    def cancel(self) -> object: ...


class OpenStream(Protocol):
    """A client's PublishStream for a blocking publisher: it waits for a connection, then makes the call."""

    def __call__(self, requests: Iterator[sow_pb2.PublishStreamRequest], /) -> StreamCall: ...
