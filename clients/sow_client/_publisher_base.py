"""The common half of the blocking and the asynchronous publisher: their figures, callbacks, and warnings."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Awaitable, Callable
from typing import Final, Literal, NoReturn

from sow_client import _ignored, _process, _statuses
from sow_client._documents import Document, encode
from sow_client._failover import LOSSES
from sow_client._keys import Key, optional_key
from sow_client._payloads import Encoded, PayloadForm
from sow_client._publish_columns import (
    KEY_CHARACTERS_MAX,
    PAYLOAD_BYTES_MAX,
    Removal,
    key_too_large,
    payload_too_large,
)
from sow_client._publish_core import RETRIED_REASONS, Ack, PublishCore
from sow_client._records import invalid
from sow_client.errors import Refusal, SowError

ANSWERS: Final = "the stream of acknowledgements"


def leave(error: BaseException | None, close: Callable[[], object], abort: Callable[[], object]) -> Literal[False]:
    """The end of a publisher's block, with the exception in it. Raises as `close`."""
    if error is None:
        close()
    elif isinstance(error, Exception):
        # Records from before the user's mistake are still sent. The user's exception is the one that is raised.
        try:
            close()
        except SowError as failed:
            _note(error, failed)
    else:
        abort()  # Ctrl-C does not wait for a server
    return False


async def leave_async(
    error: BaseException | None, close: Callable[[], Awaitable[object]], abort: Callable[[], Awaitable[object]]
) -> Literal[False]:
    """As `leave`."""
    if error is None:
        await close()
    elif isinstance(error, Exception):
        try:
            await close()
        except SowError as failed:
            _note(error, failed)
    else:
        await abort()
    return False


def _note(error: Exception, failed: SowError) -> None:
    if failed is not error:
        error.add_note(f"the publisher also failed: {failed}")


class Figures:
    """The figures that each publisher shows, of its core."""

    _core: PublishCore
    _closing: bool

    def __repr__(self) -> str:
        core, state = self._core, ", closed" if self._closing else ""
        settled = f"{core.acknowledged} records acknowledged, {core.unacknowledged} not yet, {core.refused} refused"
        return f"{type(self).__name__}({core.topic!r}, {settled}{state})"

    @property
    def applied(self) -> int:
        """Records that the server applied."""
        return self._core.applied

    @property
    def duplicates(self) -> int:
        """Records that were applied before a reconnect and sent again after it."""
        return self._core.duplicates

    @property
    def refused(self) -> int:
        """Records that the server refused."""
        return self._core.refused

    @property
    def removed(self) -> int:
        """Removals among the applied records that have deleted a record. Rule: P11."""
        return self._core.removed

    @property
    def ttls_ignored(self) -> int:
        """Applied records whose ttl or expire time has no effect: the topic has expiration disabled. Rule: L3."""
        return self._core.ttls_ignored

    @property
    def acknowledged(self) -> int:
        """Records settled: applied, duplicate or refused."""
        return self._core.acknowledged

    @property
    def unacknowledged(self) -> int:
        """Records handed over and not yet settled."""
        return self._core.unacknowledged


class PublisherBase(Figures, _process.Owned):
    """The common part of both publishers: the core, the callbacks, and the end. Owns no thread and no task."""

    _what = "publisher"
    _closing = False  # here, as a finalizer reads it, also if an exception has ended `__init__`

    def __init__(
        self,
        core: PublishCore,
        on_ack: Callable[[Ack], object] | None,
        on_refusal: Callable[[Refusal], object] | None,
    ) -> None:
        _process.tell(self)
        self._core = core
        self._on_ack = on_ack
        self._on_refusal = on_refusal
        self._made_at = _ignored.place()
        self._has_warned = False
        self._failure: BaseException | None = None
        self._form_is_guessed = False  # there was no topic when the server was asked
        self._form_is_old = False  # the client's own memory of the form does not count
        self._stopped = False  # closing, or failed
        # Every record touches these, so they are kept here and not looked up in the core.
        self._pending = core.pending
        self._append = core.pending.append
        self._batch_records = core.options.batch_records
        self._filled = 0  # bytes since `publish` last sealed all there was
        self._stream = 0  # number of the current stream; requests of an older one must not be sent

    def _forked(self) -> None:
        # The parent sends what is buffered. Here each use finds the failure, which costs a record nothing.
        super()._forked()
        if not self._closing:
            self._failure, self._stopped = _process.forked(self._what), True
        self._core.pending.clear()
        self._stream += 1

    def _refuse(self, size: int) -> NoReturn:
        raise self._stop_error() if self._stopped else payload_too_large(size)

    def _removal(self, key: Key | None, data: Document | None, payload: bytes | None) -> Removal:
        """The removal to append. Raises what `publish` raises."""
        if (key is None) is (data is None):
            raise invalid("key", "give a key, or data that has the key fields: exactly one of both")
        size = 0 if payload is None else len(payload)
        if self._stopped or size > PAYLOAD_BYTES_MAX:
            self._refuse(size)
        text = optional_key(key)
        if text is not None and len(text) > KEY_CHARACTERS_MAX:
            raise key_too_large(text)
        return Removal(payload or b"", text)

    def _stop_error(self) -> BaseException:
        return self._failure or _statuses.closed("publisher")

    def _heed(self, ack: Ack) -> None:
        """Warns once, at the line that made the publisher, of lifetimes without effect."""
        if ack.ttls_ignored and not self._has_warned:
            self._has_warned = True
            _ignored.warn(self._core.topic, self._made_at)
        malformed = any(refusal.reason == "PAYLOAD_MALFORMED" for refusal in ack.refusals)
        if malformed or self._form_is_guessed:  # the topic may have been made, or made anew, with another type
            self._form_is_old = self._form_is_old or malformed
            self._form_is_guessed = False
            self._ask_again()

    def _ask_again(self) -> None:
        """The next document makes the publisher ask for the form of the topic's payloads."""
        raise NotImplementedError

    def _as_it_is(self, data: Document) -> bytes | None:
        """The payload of data in a form that the program has chosen; None: the topic's form is needed."""
        if not isinstance(data, bytes | bytearray | memoryview | str):
            return None
        if isinstance(data, Encoded):
            self._core.encoded_as = data.encoded_as
        return encode(data)

    def _asked(self, form: PayloadForm) -> Callable[[Document], bytes]:
        self._form_is_guessed = not form.message_type
        self._core.encoded_as = form.encoded_as
        return form.encoder

    def _asking_delay(self, error: SowError, backoff: _statuses.Backoff) -> float:
        """Seconds to wait before the server is asked again for the form. Raises when the time to retry is over: no
        record is taken in a form that is a guess."""
        core, delay = self._core, None
        if error.reason in _ASKED_AGAIN or "denied_by" in error.details:  # two cells contradict each other (C13)
            delay = backoff.delay(error, now=time.monotonic(), jitter=random.random(), limit=core.time_to_retry(error))
        if delay is None:
            raise _statuses.error_like(
                error,
                f"the record was not taken, as the message type of {core.topic} is not known, and no server tells it: "
                f"{error.message}",
            ) from error
        return delay

    def _warn_of_end(self, why: str) -> None:
        """Tells that nobody has closed it, which may have lost records."""
        warnings.warn_explicit(
            f"the publisher to {self._core.topic!r} was not closed: {why}; use it in a `with` block, or call close()",
            ResourceWarning,
            self._made_at.file,
            self._made_at.line,
            self._made_at.module,
            self._made_at.registry,
            source=self,
        )

    def _deliver(self, ack: Ack) -> None:
        if self._on_ack is not None and ack.records:  # none were settled where the topic lives in another cell
            self._on_ack(ack)
        if self._on_refusal is not None:
            for refusal in ack.refusals:
                self._on_refusal(refusal)


_ASKED_AGAIN: Final = RETRIED_REASONS | _statuses.CUT_REASONS | LOSSES | {"DEADLINE_EXCEEDED"}
