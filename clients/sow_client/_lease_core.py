"""Leases: what the holder's keys are, and whether it still holds them (rule L21). And the tickers that renew them.

    [1]  A lease is held by the holder's clock for no longer than by the server's. The time counts from before the
         request that renewed the keys, and allows for a server's clock that runs 5 % fast (rule L15).
    [2]  A key is renewed and deleted only at a version that the lease itself gave it. So it never prolongs or removes a
         record of another. An instance that lags has an earlier one of these versions.
    [3]  All keys of a lease have one expire time, that of the server's last answer: a key that joins gets it, too.
    [4]  Renewals wait for no publish. One that takes long, for a peer that is away, gets its key into the lease only if
         the key still lives then; the next renewal, which follows at once, gives it the expire time of the others.
    [5]  A publish under way may have replaced a record that is renewed meanwhile. Its payload, at whatever version, is
         the lease's from the moment it is sent. No publish begins during a renewal, so each disturbs one at most once.

`LeaseCore` decides and does nothing. `Ticker` and `AioTicker` are written by hand, as threads and tasks differ. The
rest is in `aio/_leasing.py`, from which the blocking lease is generated.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sow.v1 import sow_pb2, types_pb2
from sow_client import _writes
from sow_client._reads import TOUCHED_TOGETHER_MAX
from sow_client._records import Published, Record, Ttl, invalid, ttl_micros
from sow_client._reports import Topic
from sow_client.errors import DeadlineExceeded, LeaseLost, Refusal, SowError

MICROS: Final = 1_000_000

TTL_SECONDS_MIN: Final = 1.0
"""A shorter lease would be lost at each short pause of its holder."""
RENEWALS: Final = 3
"""Attempts in the time of a lease, if each of them waits for its full time."""
RETRY_SECONDS_MAX: Final = 1.0
RETRY_PART: Final = 10
"""After a failed attempt the next one follows after this part of the lease's time, or `RETRY_SECONDS_MAX`."""
CLOCK_FACTOR: Final = 1.05
"""See [1]."""
PAYLOADS_MAX: Final = 8
"""Payloads besides the present ones that are remembered of a topic, the last ones."""


def lease_now() -> float:
    """Seconds of the clock by which a holder knows its time. It counts the time in which the machine was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class LeaseCore:
    """Owns the keys of a lease, with their versions and payloads, and the time until which they are held."""

    def __init__(self, ttl: Ttl) -> None:
        self.ttl_micros = ttl_micros(ttl, "ttl")
        if self.ttl_micros < TTL_SECONDS_MIN * MICROS:
            raise invalid("ttl", f"{ttl!r} is shorter than a second")
        self.seconds = self.ttl_micros / MICROS
        self.held: dict[str, dict[str, Held]] = {}
        """Keyed by topic and key."""
        self._unknown_until: dict[str, float] = {}
        """The time, for each topic, until which its records may have versions that the lease has given and does not
        know. A version that comes later, from another instance, has ended before."""
        self._other_payloads: dict[str, deque[bytes]] = {}
        """The payloads that the records of each topic had before, or have if a publish of unknown outcome has
        arrived."""
        self._lost: LeaseLost | None = None
        self._until = float("inf")
        self._expire_micros: int | None = None
        self._joining: set[Joining] = set()
        """The keys that are being published."""
        self._failure: SowError | None = None

    # ---- time ----

    def lost(self, now: float) -> LeaseLost | None:
        """The loss of the lease; None while it is held, or has no keys yet."""
        if self._lost is None and self.held and now >= self._until:
            error = LeaseLost(f"the lease was not renewed within {self.seconds:g} s", reason="LEASE_LOST")
            error.__cause__ = self._failure
            self._lost = error
        return self._lost

    def lose(self, message: str, cause: BaseException | None = None) -> LeaseLost:
        """The keys, or some of them, are no longer the holder's."""
        if self._lost is None:
            self._lost = LeaseLost(message, reason="LEASE_LOST")
            self._lost.__cause__ = cause
        return self._lost

    def patience(self, now: float) -> float:
        """The longest wait of one call, and before it for a connection: both together end in the time of the lease."""
        return max(0.01, min(self._until - now, self.seconds) / 2)

    def wait(self, now: float) -> float:
        """Seconds until the next renewal."""
        if self._failure is None:
            return self.seconds / RENEWALS
        return max(0.0, min(RETRY_SECONDS_MAX, self.seconds / RETRY_PART, self._until - now))

    # ---- joining ----

    def joins(self, topic: str, payload: bytes, now: float) -> Joining:
        """A record of a topic is about to be published, until `left`. Raises InvalidArgument if the lease may hold no
        more keys of the topic."""
        others = sum([one.topic == topic for one in tuple(self._joining)])
        if len(self.held.get(topic, ())) + others >= TOUCHED_TOGETHER_MAX:
            raise invalid("topic", f"the lease holds {TOUCHED_TOGETHER_MAX} keys of {topic!r} already")
        until = now + self.seconds / CLOCK_FACTOR if self._expire_micros is None else self._until
        joining = Joining(topic, payload, now, until, self._lifetime)
        self._joining.add(joining)
        return joining

    def left(self, joining: Joining) -> None:
        """The publish has ended, well or not. Without the lease's lock: the caller may be given up while it waits for
        that."""
        self._joining.discard(joining)

    def check_topic(self, topic: Topic) -> None:
        """Raises InvalidArgument for a topic whose records would not live as long as the lease, or longer."""
        settings = topic.settings
        if settings.expiration in ("disabled", "reject"):
            raise invalid("topic", f"{topic.name!r} takes no lifetimes (expiration is {settings.expiration})")
        if settings.max_ttl is not None and ttl_micros(settings.max_ttl, "max_ttl") < self.ttl_micros:
            raise invalid("ttl", f"is longer than max_ttl of {topic.name!r}, {settings.max_ttl}")

    @property
    def _lifetime(self) -> types_pb2.Lifetime:
        """The lifetime of a key that joins ([3])."""
        if self._expire_micros is None:
            return types_pb2.Lifetime(ttl_micros=self.ttl_micros)
        return types_pb2.Lifetime(expire_time_micros=self._expire_micros)

    def joined(self, joining: Joining, published: Published, now: float) -> bool:
        """A record was published under the lease. False: the others have another expire time by now, so all are to be
        renewed. Raises DeadlineExceeded if the record has ended, or may have."""
        if now >= joining.until:
            raise DeadlineExceeded(
                f"the publish took longer than the time of the lease, so {published.key!r} is not in the lease",
                reason="DEADLINE_EXCEEDED",
            )
        if self._expire_micros is None:
            self._stamped(published.expire_time_micros, joining.sent)
        self._until = min(self._until, joining.until)
        held = self.held.setdefault(joining.topic, {})
        one = held.get(published.key)
        if one is None:
            held[published.key] = Held(published.version, joining.payload)
        elif 0 < published.version < one.version:
            self._remember(joining.topic, joining.payload)  # a renewal, or a later publish, was told of first ([5])
        else:
            self._replace(joining.topic, one, joining.payload)
            one.take(published.version)
        if not published.version:  # it had arrived, its answer was lost, and it was known elsewhere (rule F12)
            self.doubt(joining.topic, now)
        return published.expire_time_micros == self._expire_micros

    def doubtful(self, topic: str, payload: bytes, now: float) -> None:
        """A publish has failed, or was given up, and it is unknown whether the record is there, perhaps in place of one
        that is held."""
        self._remember(topic, payload)
        self.doubt(topic, now)

    def _replace(self, topic: str, one: Held, payload: bytes) -> None:
        self._remember(topic, one.payload)
        one.payload = payload

    def _remember(self, topic: str, payload: bytes) -> None:
        self._other_payloads.setdefault(topic, deque(maxlen=PAYLOADS_MAX)).append(payload)

    # ---- renewing ----

    def renewal(self, topic: str, expire_micros: int | None) -> sow_pb2.TouchRequest:
        """Renews all keys of a topic together, to the time that another topic has got already, if one has ([3])."""
        held = self.held[topic]
        return sow_pb2.TouchRequest(
            topic=topic,
            keys=list(held),
            versions=[one.version for one in held.values()],
            lifetime=types_pb2.Lifetime(ttl_micros=self.ttl_micros)
            if expire_micros is None
            else types_pb2.Lifetime(expire_time_micros=expire_micros),
            atomic=True,
        )

    def renewed(self, topic: str, response: sow_pb2.TouchResponse) -> tuple[int | None, Refusal | None]:
        """Takes the answer to a renewal: the expire time, and the refusal of a key that is no longer at its version."""
        held = self.held[topic]
        results = _writes.outcomes(response, expected=len(held))
        refused = next((one for one in results if isinstance(one, Refusal) and one.reason != "ATOMIC_ABORTED"), None)
        if refused is not None:
            return None, refused
        expire_micros = None
        for one in results:
            assert isinstance(one, Published), "an atomic request has no other refusals"
            held[one.key].take(one.version)
            expire_micros = one.expire_time_micros
        return expire_micros, None

    def all_renewed(self, expire_micros: int | None, sent: float) -> None:
        """Every topic has been renewed; the first request was made at `sent`."""
        self._failure = None
        self._stamped(expire_micros, sent)

    def failed(self, topic: str, error: SowError, now: float) -> None:
        """An attempt to renew has failed. It may have been applied all the same."""
        self.doubt(topic, now)
        self._failure = error

    def recognize(self, topic: str, found: Sequence[Record], now: float) -> Seen:
        """Takes the versions of records that were read because they are not at the versions that the lease knows.
        Another payload is of another."""
        records = {record.key: record for record in found}
        under_way = [joining.payload for joining in tuple(self._joining) if joining.topic == topic]
        unknown = now < self._unknown_until.get(topic, now) or under_way
        others = {*self._other_payloads.get(topic, ()), *under_way}
        seen = Seen.OWN
        for key, one in self.held[topic].items():
            record = records.get(key)
            if (
                record is None
                or (record.version > one.last and not unknown)
                or (record.payload != one.payload and record.payload not in others)
            ):
                seen = Seen.OTHER
            elif record.version < one.first:
                seen = seen if seen is Seen.OTHER else Seen.BEHIND
            else:
                one.take(record.version)
                if record.payload != one.payload:
                    self._replace(topic, one, record.payload)
        return seen

    def doubt(self, topic: str, now: float) -> None:
        """A request of unknown outcome may have given records of a topic other versions."""
        self._unknown_until[topic] = now + self.seconds * CLOCK_FACTOR

    def _stamped(self, expire_micros: int | None, sent: float) -> None:
        self._expire_micros = expire_micros
        self._until = sent + self.seconds / CLOCK_FACTOR


class Seen(enum.Enum):
    """The kinds of records that an instance may have in place of those that a lease knows."""

    OWN = enum.auto()
    """The lease's, all of them."""
    BEHIND = enum.auto()
    """The instance lags: one is from before those that the lease knows. It may be the lease's, from a publish that was
    made again elsewhere because its answer was lost, or be of a former holder with the same payload."""
    OTHER = enum.auto()
    """One is another's, or gone."""


@dataclass(frozen=True, slots=True, eq=False)
class Joining:
    """A key that is being published under a lease."""

    topic: str
    payload: bytes
    sent: float
    until: float
    """The key lives until then at least, by the holder's clock, if it is published at all."""
    lifetime: types_pb2.Lifetime


class Held:
    """A record of a lease: its payload as published, and its versions."""

    __slots__ = ("first", "last", "payload", "version")

    def __init__(self, version: int, payload: bytes) -> None:
        self.version = self.first = self.last = version
        self.payload = payload

    def take(self, version: int) -> None:
        """Where it was written or read last, the record has this version. The first one and the greatest are kept: all
        versions in between are the lease's."""
        self.version = version
        self.first = self.first or version
        self.last = max(self.last, version)
