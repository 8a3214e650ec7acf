"""A step of the demo: the board of delayed flights of one day, which a subscription keeps as the store has it.

The day's flights are published hour by hour as they were scheduled; news of a delay follows as a delta, and again one
when the flight has left. The board follows those that wait.

    [1]  The board shows only messages of the subscription: a snapshot, then changes.
    [2]  The step compares the board with a query whenever it makes a claim.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from examples.asking import delay_of, route_of
from examples.flights import DEPARTURE_FIELDS, Flights, departure_key
from examples.narration import Narration, Show
from sow_client import Change, Client, Record, Refusal, SowError, Subscription, View

BOARD: Final = "board"
MONTH_AND_DAY: Final = (1, 2)
"""The second of January: within the first 2,000 flights, and with many delays in its evening."""
FLIGHTS_MAX: Final = 2_000
WAITING_MINUTES: Final = 30
WAITING: Final = f"/dep_delay >= {WAITING_MINUTES} AND /status = 'waiting'"
OPENS: Final = 12
"""The board is opened at noon: what was published before is its snapshot."""
LEAVES_AFTER: Final = 2
"""Hours after which a late flight has left."""
CANCELS: Final = 20
CARRIER: Final = "EV"
"""At this hour this carrier gives up its flights that wait."""
CLOSES: Final = 23
HOUR_SECONDS: Final = 0.3
"""What an hour of that day takes here."""
LAST_CALL_SECONDS: Final = 1.5
"""Of a record that is due before it is handed over nobody hears that it was touched (rule J12)."""
LAST_CALL_STEP_SECONDS: Final = 0.04
SETTLE_SECONDS_MAX: Final = 20.0
LOOK_SECONDS: Final = 0.1
ROWS_SHOWN: Final = 12
OUTCOME_FIELDS: Final = ("dep_time", "dep_delay", "arr_time", "arr_delay", "air_time")
"""What nobody knows of a flight before it has left."""
MICROS: Final = 1_000_000


class Board:
    """Owns a subscription and the thread that reads it: the records in focus, and what was told of them."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._view = View()
        self._lock = threading.Lock()
        self._told = Counter[str]()
        self._late_micros: list[int] = []
        self._trouble: SowError | None = None
        self._thread = threading.Thread(target=self._read, name="board", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._subscription.close()
        if kind is None:
            # What a signal raises may have cut a call of this thread in two; then gRPC wakes nobody any more.
            self._thread.join(SETTLE_SECONDS_MAX)

    def _read(self) -> None:
        try:
            for change in self._subscription:
                with self._lock:
                    self._take(change)
        except SowError as error:
            self._trouble = error

    def _take(self, change: Change) -> None:
        self._view.apply(change)
        self._told[change.reason or change.op] += 1
        if change.reason == "expired" and change.previous is not None:
            self._late_micros.append(time.time_ns() // 1_000 - (change.previous.expire_time_micros or 0))

    def look(self) -> tuple[dict[str, Record], Counter[str]]:
        """The records, and how often what was told: by reason, else by op. Raises what ended the subscription."""
        if self._trouble is not None:
            raise self._trouble
        with self._lock:
            return dict(self._view), self._told.copy()

    @property
    def expiries_late_micros(self) -> list[int]:
        """How long after its expire time each expiry was told."""
        with self._lock:
            return list(self._late_micros)


@dataclass(frozen=True, slots=True)
class Departure:
    """A flight of the day."""

    key: str
    document: dict[str, Any]

    @property
    def hour(self) -> int:
        """When it is to leave."""
        hour: int = self.document["hour"]
        return hour

    @property
    def delay(self) -> float:
        """Minutes that it leaves late; 0 where it does not leave at all."""
        return self.document["dep_delay"] or 0.0

    @property
    def late(self) -> bool:
        """Whether it comes onto the board."""
        return self.delay >= WAITING_MINUTES

    @property
    def scheduled(self) -> dict[str, Any]:
        """What is known before it leaves."""
        known = {field: value for field, value in self.document.items() if field not in OUTCOME_FIELDS}
        return known | {"status": "scheduled"}

    def news(self, **fields: object) -> dict[str, object]:
        """A delta: the key fields, and what is new."""
        return {field: self.document[field] for field in DEPARTURE_FIELDS} | fields


def departures(flights: Flights) -> list[Departure]:
    """The flights of the day, in the order of their schedule."""
    found: list[Departure] = []
    for flight in islice(flights, FLIGHTS_MAX):
        document: dict[str, Any] = msgspec.json.decode(flight.document)
        if (document["month"], document["day"]) == MONTH_AND_DAY:
            found.append(Departure(departure_key(flight), document))
    return found


class BoardStep:
    """Publishes the day, and knows from that alone what the board must show and what it must have been told."""

    def __init__(self, tell: Narration, client: Client, flights: Flights) -> None:
        self._tell = tell
        self._client = client
        self._day = departures(flights)
        self._waiting: dict[str, float] = {}
        """Minutes that the flights are late which wait."""
        self._told = Counter[str]()
        self._title = ""

    def run(self) -> None:
        """Runs the step. Raises ClaimFailed."""
        tell, client = self._tell, self._client
        tell.step(
            "A live board: snapshot, then live",
            f"Topic {BOARD} gets the flights of a day as they are scheduled, and deltas with the news. A subscription",
            f"to {WAITING} keeps the board: it is sent what is there, then",
            "each change, and what leaves and why. What it shows is compared with what a query finds.",
        )
        client.create_topic(BOARD, key=[f"/{field}" for field in DEPARTURE_FIELDS], expiration="1h")
        for hour in range(OPENS):
            self._hour(hour)
        self._told.clear()  # nobody follows yet
        self._told.update(sow=len(self._waiting), snapshot_end=1)
        changes = client.sow_and_subscribe(BOARD, WAITING, oof=True)
        with Board(changes) as board, tell.board(("key", "flight", "minutes late"), right=("minutes late",)) as show:
            self._claim(board, show, f"{OPENS}:00, the snapshot")
            for hour in range(OPENS, CLOSES + 1):
                self._title = f"{hour}:00"
                before = self._told.copy()
                self._hour(hour)
                if hour == CANCELS:
                    self._claim(board, show, f"{hour}:00, after {self._told.total():,} messages")
                    self._cancel(board, show)
                self._watch(board, show, HOUR_SECONDS)
                told = self._told - before
                tell.say(
                    f"{hour}:00  {told['put']:2} came or are later still, {told['match']:2} have left, "
                    f"{len(self._waiting):2} wait"
                )
            self._claim(board, show, f"{CLOSES}:00, after {self._told.total():,} messages")
            self._last_call(board, show)

    def _hour(self, hour: int) -> None:
        """What is published in an hour of the day."""
        client = self._client
        scheduled = [departure.scheduled for departure in self._day if departure.hour == hour]
        for outcome in client.publish_many(BOARD, scheduled):
            assert not isinstance(outcome, Refusal), f"nothing is wrong with it: {outcome}"
        for departure in self._day:
            key, delay = departure.key, departure.delay
            if not departure.late or departure.hour > hour or (departure.hour < hour and key not in self._waiting):
                continue
            if departure.hour == hour:
                client.delta_publish(BOARD, departure.news(dep_delay=WAITING_MINUTES, status="waiting"))
                self._waiting[key] = WAITING_MINUTES
                self._told["put"] += 1
            elif departure.hour == hour - 1:
                client.delta_publish(BOARD, departure.news(dep_delay=delay))
                self._waiting[key] = delay
                self._told["put"] += 1
            elif hour < CANCELS:  # nothing leaves after that
                client.delta_publish(BOARD, departure.news(status="departed"))
                del self._waiting[key]
                self._told["match"] += 1

    def _cancel(self, board: Board, show: Show) -> None:
        """Deletes by filter what waits of one carrier."""
        of_carrier = {key for key in self._waiting if key.split("|")[3] == CARRIER}
        deleted = self._client.sow_delete(BOARD, filter=f"/carrier = '{CARRIER}' AND /status = 'waiting'")
        for key in of_carrier:
            del self._waiting[key]
        self._told["deleted"] += len(of_carrier)
        self._tell.claim(
            f"deleted by filter: the {len(of_carrier):,} flights of {CARRIER} that wait",
            bool(of_carrier) and deleted.deleted == len(of_carrier),
            found=deleted,
        )
        self._claim(board, show, f"{self._title}, after the delete")

    def _last_call(self, board: Board, show: Show) -> None:
        """Gives the flights that wait a few moments each, and sees them off."""
        last = sorted(self._waiting)
        for number, key in enumerate(last):
            self._client.touch(BOARD, key, ttl=LAST_CALL_SECONDS + number * LAST_CALL_STEP_SECONDS)
        self._told["touched"] += len(last)
        self._told["expired"] += len(last)
        self._waiting.clear()
        self._claim(board, show, f"last call, {len(last):,} flights were given moments to live, and expired")
        late = max(board.expiries_late_micros) / 1_000
        self._tell.say(f"each was told to the board at the latest {late:,.0f} ms after its expire time")

    def _claim(self, board: Board, show: Show, when: str) -> None:
        """Waits until the board has been told everything, and claims that it shows what a query finds."""
        give_up = time.monotonic() + SETTLE_SECONDS_MAX
        while board.look()[1] != self._told and time.monotonic() < give_up:
            self._watch(board, show, 0.02)
        shown, told = board.look()
        found = {record.key: record for record in self._client.query(BOARD, WAITING)}
        self._tell.claim(
            f"{when}: the board shows {len(self._waiting):,} flights, the same as a query finds, in every respect",
            _identities(shown) == _identities(found)
            and {key: delay_of(record) for key, record in shown.items()} == self._waiting,
            found=f"{len(shown):,} on the board, {len(found):,} by query, {len(self._waiting):,} are expected",
        )
        self._tell.claim(
            f"it was told everything once: {', '.join(f'{count} × {what}' for what, count in told.items())}",
            told == self._told,
            found=f"{dict(told)}, not {dict(self._told)}",
        )

    def _watch(self, board: Board, show: Show, seconds: float) -> None:
        """Shows the board for a while."""
        until = time.monotonic() + seconds
        while True:
            records, _ = board.look()
            rows = sorted(records.values(), key=lambda record: (-(delay_of(record) or 0), record.key))[:ROWS_SHOWN]
            show(
                f"{self._title}  {len(records)} flights wait",
                [(record.key, route_of(record), f"{delay_of(record):.0f}") for record in rows],
            )
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(LOOK_SECONDS, left))


def _identities(records: dict[str, Record]) -> dict[str, tuple[int, bytes, int | None]]:
    return {key: (record.version, record.payload, record.expire_time_micros) for key, record in records.items()}
