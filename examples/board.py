"""A step of the demo: a board of delayed flights of one day, a live view that keeps itself up to date.

The day's flights are published hour by hour as scheduled. A delta reports a delay, and another one the departure. The
board shows the flights that wait.

    [1]  The board is the map of the live view; the step publishes, and looks at it.
    [2]  The step compares the board with a query whenever it makes a claim.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import msgspec

from examples.asking import delay_of, route_of
from examples.flights import DEPARTURE_FIELDS, Flights, departure_key
from examples.narration import Narration, Show
from sow_client import Change, Client, LiveView, Record

BOARD: Final = "board"
MONTH_AND_DAY: Final = (1, 2)
"""The second of January: within the first 2,000 flights, and with many delays in its evening."""
FLIGHTS_MAX: Final = 2_000
WAITING_MINUTES: Final = 30
WAITING: Final = f"/dep_delay >= {WAITING_MINUTES} AND /status = 'waiting'"
OPENS: Final = 12
"""The board is opened at noon. Flights published before then are its snapshot."""
LEAVES_AFTER: Final = 2
"""Hours after which a late flight has departed."""
CANCELS: Final = 20
CARRIER: Final = "EV"
"""At this hour this carrier cancels its waiting flights."""
CLOSES: Final = 23
HOUR_SECONDS: Final = 0.3
"""Duration of an hour of that day in the demo."""
LAST_CALL_SECONDS: Final = 1.5
"""A touched record must not be due before the touch is handed over: then the touch would not be told (rule J12)."""
LAST_CALL_STEP_SECONDS: Final = 0.04
SETTLE_SECONDS_MAX: Final = 20.0
LOOK_SECONDS: Final = 0.1
ROWS_SHOWN: Final = 12
OUTCOME_FIELDS: Final = ("dep_time", "dep_delay", "arr_time", "arr_delay", "air_time")
"""Fields that are not known before the departure."""
MICROS: Final = 1_000_000


class Told:
    """The counts of the changes that a live view tells, from its thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told = Counter[str]()
        self._late_micros: list[int] = []

    def take(self, change: Change) -> None:
        """Counts a change."""
        with self._lock:
            self._told[change.reason or change.op] += 1
            if change.reason == "expired" and change.previous is not None:
                self._late_micros.append(time.time_ns() // 1_000 - (change.previous.expire_time_micros or 0))

    def look(self) -> Counter[str]:
        """The number of changes by reason, else by op."""
        with self._lock:
            return self._told.copy()

    @property
    def expiries_late_micros(self) -> list[int]:
        """The delay of each message about an expiry after the expire time."""
        with self._lock:
            return list(self._late_micros)


@dataclass(frozen=True, slots=True)
class Departure:
    """A flight of the day."""

    key: str
    document: dict[str, Any]

    @property
    def hour(self) -> int:
        """The scheduled time of departure."""
        hour: int = self.document["hour"]
        return hour

    @property
    def delay(self) -> float:
        """Minutes of delay; 0 if it does not depart at all."""
        return self.document["dep_delay"] or 0.0

    @property
    def late(self) -> bool:
        """True if it comes onto the board."""
        return self.delay >= WAITING_MINUTES

    @property
    def scheduled(self) -> dict[str, Any]:
        """The fields that are known before the departure."""
        known = {field: value for field, value in self.document.items() if field not in OUTCOME_FIELDS}
        return known | {"status": "scheduled"}

    def news(self, **fields: object) -> dict[str, object]:
        """A delta: the key fields, and the new fields."""
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
    """Publishes the day, and computes from that alone the expected board and the expected changes."""

    def __init__(self, tell: Narration, client: Client, flights: Flights) -> None:
        self._tell = tell
        self._client = client
        self._day = departures(flights)
        self._waiting: dict[str, float] = {}
        """Minutes of delay of the waiting flights."""
        self._told = Counter[str]()
        self._heard = Told()
        self._title = ""

    def run(self) -> None:
        """Runs the step. Raises ClaimFailed."""
        tell, client = self._tell, self._client
        tell.step(
            "A live board: snapshot, then live",
            f"Topic {BOARD} gets the flights of a day as they are scheduled, and deltas with the news. A live view",
            f"of {WAITING} is the board: it has the present flights, then",
            "each change, and tells each removal with its cause. The board is compared with the result of a query.",
        )
        client.create_topic(BOARD, key=[f"/{field}" for field in DEPARTURE_FIELDS], expiration="1h")
        for hour in range(OPENS):
            self._hour(hour)
        self._told.clear()  # there is no board yet
        self._told.update(put=len(self._waiting))
        heard = self._heard
        with (
            client.live_view(BOARD, WAITING, on_change=heard.take) as board,
            tell.board(("key", "flight", "minutes late"), right=("minutes late",)) as show,
        ):
            self._claim(board, show, f"{OPENS}:00, the snapshot")
            for hour in range(OPENS, CLOSES + 1):
                self._title = f"{hour}:00"
                before = self._told.copy()
                self._hour(hour)
                if hour == CANCELS:
                    self._claim(board, show, f"{hour}:00, after {self._told.total():,} changes")
                    self._cancel(board, show)
                self._watch(board, show, HOUR_SECONDS)
                told = self._told - before
                tell.say(
                    f"{hour}:00  {told['put']:2} came or changed, {told['match']:2} departed, "
                    f"{len(self._waiting):2} are waiting"
                )
            self._claim(board, show, f"{CLOSES}:00, after {self._told.total():,} changes")
            self._last_call(board, show)

    def _hour(self, hour: int) -> None:
        """Publishes an hour of the day."""
        client = self._client
        scheduled = [departure.scheduled for departure in self._day if departure.hour == hour]
        client.publish_many(BOARD, scheduled)
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
            elif hour < CANCELS:  # no flight departs after that
                client.delta_publish(BOARD, departure.news(status="departed"))
                del self._waiting[key]
                self._told["match"] += 1

    def _cancel(self, board: LiveView, show: Show) -> None:
        """Deletes the waiting flights of one carrier by filter."""
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

    def _last_call(self, board: LiveView, show: Show) -> None:
        """Gives each waiting flight a few moments to live, and waits for the expiries."""
        last = sorted(self._waiting)
        for number, key in enumerate(last):
            self._client.touch(BOARD, key, ttl=LAST_CALL_SECONDS + number * LAST_CALL_STEP_SECONDS)
        self._told["touched"] += len(last)
        self._told["expired"] += len(last)
        self._waiting.clear()
        self._claim(board, show, f"last call, {len(last):,} flights got moments to live and expired")
        late = max(self._heard.expiries_late_micros) / 1_000
        self._tell.say(f"the board heard of each expiry at the latest {late:,.0f} ms after the expire time")

    def _claim(self, board: LiveView, show: Show, when: str) -> None:
        """Waits until the board has received all changes, and claims that it equals the result of a query."""
        give_up = time.monotonic() + SETTLE_SECONDS_MAX
        while self._heard.look() != self._told and time.monotonic() < give_up:
            self._watch(board, show, 0.02)
        shown, told = board.copy(), self._heard.look()
        found = {record.key: record for record in self._client.query(BOARD, WAITING)}
        self._tell.claim(
            f"{when}: the board shows {len(self._waiting):,} flights, exactly as a query finds them",
            _identities(shown) == _identities(found)
            and {key: delay_of(record) for key, record in shown.items()} == self._waiting,
            found=f"{len(shown):,} on the board, {len(found):,} by query, {len(self._waiting):,} are expected",
        )
        self._tell.claim(
            f"each change came once: {', '.join(f'{count} × {what}' for what, count in told.items())}",
            told == self._told,
            found=f"{dict(told)}, not {dict(self._told)}",
        )

    def _watch(self, board: LiveView, show: Show, seconds: float) -> None:
        """Shows the board for a while."""
        until = time.monotonic() + seconds
        while True:
            records = board.copy()
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
