"""The story of the demo: each step states its claims and checks them.

publish → look up, touch → watch them expire → restart while records fall due → delete → kill -9 → a view → ask → follow
"""

from __future__ import annotations

import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from examples.asking import ask
from examples.board import BoardStep
from examples.delays import delays, make_view
from examples.flights import DEPARTURE_FIELDS, KEY_FIELDS, RECORDS_ALL, Flight, Flights, departure_key
from examples.narration import ClaimFailed, Narration
from examples.server_process import HOST, ServerProcess
from sow_client import Ack, Client, QueryResult, Record, SowError

FLIGHTS: Final = "flights"
DEPARTURES: Final = "departures"

MICROS: Final = 1_000_000
SOON_MICROS: Final = 600 * MICROS
"""Records that expire within this time fall due during the story."""
FALLING_DUE: Final = 50
FALLING_DUE_SECONDS: Final = 3
KILLED_RECORDS_MAX: Final = 40_000
"""Records in flight to the server when it is killed."""
LOOK_SECONDS: Final = 1.0
"""Between two looks at the number of live records."""
LAG_SECONDS_MAX: Final = 5.0
"""Nearly all expired records must have been removed within this time. It is far above the goal, as the machine may be
busy."""


@dataclass(frozen=True, slots=True)
class Haul:
    """A class of flights by distance, with the lifetime of its records."""

    name: str
    miles_below: float
    ttl: str | None
    """The lifetime published with each record, or "never". None: no lifetime, so the topic's default applies."""


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Seconds to live. More records get longer lifetimes, so that most are alive when publishing ends."""

    short: int
    default: int
    """The topic's default."""
    hauls: tuple[Haul, ...]
    """The classes by distance. A flight belongs to the first class whose distance it does not exceed."""


def lifetimes(records: int) -> Lifetimes:
    """The lifetimes for this number of flights."""
    short = 5 + 7 * records // RECORDS_ALL
    hauls = (
        Haul("under 500 miles", 500, f"{short}s"),
        Haul("500 to 999 miles", 1_000, None),
        Haul("1,000 to 1,999 miles", 2_000, "1h"),
        Haul("2,000 miles and more", float("inf"), "never"),
    )
    default = short + 3 + 3 * records // RECORDS_ALL  # so that the last of these fall due after the short ones
    return Lifetimes(short, default, hauls)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All live records of a topic at one instant of the server's clock."""

    as_of_micros: int
    records: Mapping[str, Record]

    def live_at(self, micros: int) -> set[str]:
        """The keys whose records are not expired at that time, without further changes."""
        return {
            key
            for key, record in self.records.items()
            if record.expire_time_micros is None or record.expire_time_micros > micros
        }


def snapshot(client: Client, topic: str) -> Snapshot:
    """Reads a topic whole."""
    result = client.query(topic)
    records = {record.key: record for record in result}
    return Snapshot(_as_of(result), records)


def live_keys(client: Client, topic: str) -> tuple[int, set[str]]:
    """The instant and the keys that were live then."""
    result = client.query(topic, keys_only=True)
    keys = {record.key for record in result}
    return _as_of(result), keys


def _as_of(result: QueryResult) -> int:
    assert result.header is not None, "known once the answer was read"
    return result.header.as_of_micros


class Story:
    """The story, step by step. Owns the client, and the state that one step leaves to the next."""

    def __init__(self, narration: Narration, server: ServerProcess, *, port: int, metrics_port: int) -> None:
        self._narration = narration
        self._server = server
        self._address = f"{HOST}:{port}"
        self._metrics_address = f"{HOST}:{metrics_port}"
        self._client = Client(self._address)

    def run(self, flights: Flights, lives: Lifetimes) -> str:
        """Runs every step; returns the key of a record that stays. Raises ClaimFailed."""
        published = self.publish(flights, lives)
        doomed = self.look_up_and_touch(published, lives)
        self.watch_expiry(published, doomed)
        self.restart_with_records_falling_due()
        kept = self.delete()
        unacknowledged = self.kill_while_publishing(flights)
        delays(self._narration, self._client, DEPARTURES, unacknowledged)
        ask(self._narration, self._client, DEPARTURES, snapshot(self._client, DEPARTURES).records)
        BoardStep(self._narration, self._client, flights).run()
        return kept

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()

    # ---- the steps ----

    def publish(self, flights: Flights, lives: Lifetimes) -> Snapshot:
        """Publishes all flights in time order; each key then holds its latest flight."""
        tell = self._narration
        tell.step(
            f"Publish {len(flights):,} flights in time order",
            f"Topic {FLIGHTS}, keyed by {', '.join('/' + name for name in KEY_FIELDS)}: a key holds its latest flight.",
            "An acknowledged record is on disk (fsync). Each carries a lifetime by distance, or the topic's default.",
        )
        # The expected content, computed without the store: the last flight of each key, and the time it was handed
        # over.
        latest: dict[str, tuple[Flight, int]] = {}
        by_haul: Counter[str] = Counter()
        size = acknowledged = 0
        with tell.progress("published", len(flights), unit="records") as advance:

            def on_ack(ack: Ack) -> None:
                nonlocal acknowledged
                acknowledged += ack.records
                advance(acknowledged)

            started = time.monotonic()
            with self._client.publisher(FLIGHTS, on_ack=on_ack) as publisher:
                for flight in flights:
                    haul = haul_of(flight, lives)
                    by_haul[haul.name] += 1
                    size += len(flight.document)
                    latest[flight.key] = flight, _now()
                    publisher.publish(flight.document, ttl=haul.ttl)
                publisher.flush()
                seconds = time.monotonic() - started
        tell.say(
            f"{len(flights):,} records in {seconds:.1f} s: {len(flights) / seconds:,.0f} records/s, "
            f"{size / seconds / 1e6:,.1f} MB/s, reading the CSV included"
        )
        tell.claim(
            f"all {len(flights):,} are acknowledged: none refused, none dropped",
            (publisher.applied, publisher.refused, publisher.duplicates) == (len(flights), 0, 0),
            found=f"{publisher.applied:,} applied, {publisher.refused:,} refused, {publisher.duplicates:,} duplicates",
        )
        before = self._check_latest(latest, lives)
        live_by_haul = Counter(haul_of(latest[key][0], lives).name for key in before.records)
        tell.table(
            ("distance", "lifetime", "flights published", "keys live"),
            [
                (
                    haul.name,
                    haul.ttl or f"{lives.default}s (the topic's default)",
                    f"{by_haul[haul.name]:,}",
                    f"{live_by_haul[haul.name]:,}",
                )
                for haul in lives.hauls
            ],
            right=("flights published", "keys live"),
        )
        return before

    def _check_latest(self, latest: Mapping[str, tuple[Flight, int]], lives: Lifetimes) -> Snapshot:
        """Compares the live records with the latest flights, and the times at which these were handed over."""
        tell = self._narration
        before = snapshot(self._client, FLIGHTS)
        stale = [
            key
            for key, record in before.records.items()
            if key not in latest or record.payload != latest[key][0].document
        ]
        tell.claim(
            f"{len(before.records):,} keys are live; each holds its latest flight, byte for byte",
            bool(before.records) and not stale,
            found=f"{len(stale):,} of {len(before.records):,} keys hold something else",
        )
        gone = latest.keys() - before.records.keys()
        early = [key for key in gone if not _may_have_expired(*latest[key], lives, before.as_of_micros)]
        tell.claim(
            f"the file has {len(latest):,} keys; {len(gone):,} of them have expired by now, all of them in their time",
            not early,
            found=f"{len(early):,} are missing before their time",
        )
        return before

    def look_up_and_touch(self, published: Snapshot, lives: Lifetimes) -> list[str]:
        """Looks up keys that are about to expire, and gives two of them a longer life. Returns the keys that expire."""
        tell = self._narration
        tell.step(
            "Look keys up while they are alive, and keep two of them",
            "touch gives a record a new lifetime, persist takes it away; the flight itself stays as it was.",
        )
        # Those with the most time left, because the next steps must happen while they live.
        by_time_left = sorted(
            (
                (record.expire_time_micros, key)
                for key, record in published.records.items()
                if record.expire_time_micros is not None
                and record.expire_time_micros - record.publish_time_micros == lives.short * MICROS
            ),
            reverse=True,
        )
        short = [key for _, key in by_time_left[:5]]
        long = [key for key, record in published.records.items() if record.expire_time_micros is None][:1]
        tell.claim("five of the short-lived keys are at hand", len(short) == 5, found=len(short))
        found = self._client.get_many(FLIGHTS, short + long)
        self._show(short + long, found)
        tell.claim("all of them are found", [record.key for record in found] == short + long, found=len(found))

        touched, persisted, *doomed = short
        renewed = self._client.touch(FLIGHTS, touched, ttl="1h")
        self._client.persist(FLIGHTS, persisted)
        old = {record.key: record for record in found}
        first, second = self._client.get(FLIGHTS, touched), self._client.get(FLIGHTS, persisted)
        tell.claim(
            f"touch: {touched} now lives 1h longer; same flight, newer version",
            first is not None
            and first.expire_time_micros == renewed.expire_time_micros
            and (first.expire_time_micros or 0) > (old[touched].expire_time_micros or 0) + 3_000 * MICROS
            and first.payload == old[touched].payload
            and first.version > old[touched].version,
            found=first,
        )
        tell.claim(
            f"persist: {persisted} now never expires",
            second is not None and second.expire_time is None and second.payload == old[persisted].payload,
            found=second,
        )
        return [*doomed, touched, persisted]

    def watch_expiry(self, published: Snapshot, sample: Sequence[str]) -> None:
        """Watches the number of live records go down, and checks it at every look."""
        tell = self._narration
        *doomed, touched, persisted = sample
        tell.step(
            "Watch records expire",
            "A record is gone at its expire time, to the microsecond: each look is compared with the times that the",
            "server stamped when it took the records.",
        )
        base = snapshot(self._client, FLIGHTS)
        until = max((published.records[key].expire_time_micros or 0 for key in doomed), default=0)
        looks = wrong = overdue_most = 0
        now = base.as_of_micros
        total = len(base.records) - len(base.live_at(until))
        with tell.progress("expired", total, unit="records", rate=False) as advance:
            while now < until:
                time.sleep(min(LOOK_SECONDS, (until - now) / MICROS + 0.001))
                now, keys = live_keys(self._client, FLIGHTS)
                wrong += keys != base.live_at(now)
                looks += 1
                overdue_most = max(overdue_most, self._client.status().overdue_records)
                advance(min(len(base.records) - len(keys), total))
        count = self._client.count(FLIGHTS)
        tell.claim(
            f"{len(base.records):,} records before, {count:,} now; at each of {looks} looks the right keys lived",
            not wrong and count < len(base.records),
            found=f"{wrong} looks that differ, {count:,} records",
        )
        found = self._client.get_many(FLIGHTS, sample)
        self._show(sample, found)
        tell.claim(
            "of the same keys as before only the touched and the persisted one are found",
            [record.key for record in found] == [touched, persisted],
            found=[record.key for record in found],
        )
        self._tell_lag(overdue_most)

    def _tell_lag(self, overdue_most: int) -> None:
        """Reads do not depend on the removal of expired records. The metrics show how soon the removal follows."""
        tell = self._narration
        buckets, removed = expiry_lag(self._metrics_address)
        half, most = _quantile(buckets, removed, 0.5), _quantile(buckets, removed, 0.99)
        tell.say(
            f"{removed:,} records removed from disk; half within {half * 1e3:g} ms of their expire time, 99 % within "
            f"{most * 1e3:g} ms; never more than {overdue_most:,} were seen waiting"
        )
        tell.claim(
            "expired records are not only hidden but removed, promptly",
            removed > 0 and most <= LAG_SECONDS_MAX,
            found=f"{removed:,} removed, 99 % within {most} s",
        )

    def restart_with_records_falling_due(self) -> None:
        """Stops the server, waits until records have fallen due, and starts it again."""
        tell = self._narration
        tell.step(
            "Stop the server, let records fall due, start it again",
            "Records that expire while the server is down are gone at the first request; all others are unchanged.",
        )
        # Even on a slow machine some records fall due after the look that all are compared with.
        now = snapshot(self._client, FLIGHTS)
        later = now.as_of_micros + SOON_MICROS
        far = [key for key, record in now.records.items() if (record.expire_time_micros or 0) > later][:FALLING_DUE]
        self._client.touch(FLIGHTS, far, ttl=f"{FALLING_DUE_SECONDS}s")
        tell.say(f"{len(far):,} flights get {FALLING_DUE_SECONDS} s to live: too short to see the server again")
        before = snapshot(self._client, FLIGHTS)
        self._client.close()
        exit_ = self._server.stop()
        stopped_micros = time.time_ns() // 1_000
        tell.claim(f"SIGTERM: an orderly stop in {exit_.seconds:.2f} s", exit_.code == 0, found=f"code {exit_.code}")
        soon = before.live_at(before.as_of_micros) - before.live_at(before.as_of_micros + SOON_MICROS)
        fall_due = max((before.records[key].expire_time_micros or 0 for key in soon), default=0)
        wait = max(0.0, (fall_due - stopped_micros) / MICROS) + 0.05
        with tell.progress("waited, server down:", round(wait), unit="s", rate=False) as advance:
            started = time.monotonic()
            while (waited := time.monotonic() - started) < wait:
                time.sleep(min(0.25, wait - waited))
                advance(round(time.monotonic() - started))

        seconds = self._server.start()
        self._client = Client(self._address)
        started = time.monotonic()
        found = self._client.get_many(FLIGHTS, list(before.records))
        answered = time.monotonic() - started
        found_due = soon & {record.key for record in found}
        tell.say(
            f"ready {seconds:.2f} s after the start of the process; first answer after another {answered * 1e3:.0f} ms"
        )
        tell.claim(
            f"the first request asks for all {len(before.records):,} keys: the {len(soon):,} that fell due are gone",
            bool(soon) and not found_due,
            found=f"{len(found_due):,} of {len(soon):,} are there",
        )
        self._claim_unchanged(before, "the others are there")

    def delete(self) -> str:
        """Deletes by key, by document and by a list of keys. Returns the key of the longest remaining flight."""
        tell = self._narration
        tell.step(
            "Delete",
            "By key, by document (whose key is derived as for a publish), by a list of keys; a dry run only counts.",
        )
        before = snapshot(self._client, FLIGHTS)
        count = len(before.records)
        carriers = Counter(_carrier(key) for key in before.records)
        carrier = carriers.most_common(1)[0][0]
        of_carrier = sorted(key for key in before.records if _carrier(key) == carrier)
        others = sorted(
            (key for key in before.records if _carrier(key) != carrier),
            key=lambda key: (before.records[key].expire_time_micros is None, _miles(before.records[key]), key),
        )
        tell.claim("there are records to delete, and one to keep", len(others) >= 3, found=len(others))
        first, second, *_, kept = others

        dry = self._client.sow_delete(FLIGHTS, keys=[first], dry_run=True)
        tell.claim(
            f"dry run: {first} matches and stays",
            (dry.matched, dry.deleted) == (1, 0) and self._client.get(FLIGHTS, first) is not None,
            found=dry,
        )
        by_key = self._client.sow_delete(FLIGHTS, keys=[first])
        tell.claim(
            f"by key: {first} is gone",
            by_key.deleted == 1 and self._client.get(FLIGHTS, first) is None,
            found=by_key,
        )
        by_document = self._client.sow_delete(FLIGHTS, data=before.records[second].payload)
        tell.claim(
            f"by document: {second} is gone",
            by_document.deleted == 1 and self._client.get(FLIGHTS, second) is None,
            found=by_document,
        )
        by_list = self._client.sow_delete(FLIGHTS, keys=of_carrier)
        _, left = live_keys(self._client, FLIGHTS)
        tell.claim(
            f"by list: all {len(of_carrier):,} keys of carrier {carrier} are gone, and only they: "
            f"{count:,} records before the deletes, {len(left):,} after",
            by_list.deleted == len(of_carrier) and left == before.live_at(_now()) - {first, second, *of_carrier},
            found=f"{by_list.deleted:,} deleted, {len(left):,} left",
        )
        return kept

    def kill_while_publishing(self, flights: Flights) -> list[Flight]:
        """kill -9 in the middle of a stream of publishes; returns those that were not acknowledged."""
        tell = self._narration
        sent = list(islice(flights, KILLED_RECORDS_MAX))
        tell.step(
            "kill -9 in the middle of publishing",
            f"Topic {DEPARTURES}, created now, takes every flight by itself. No acknowledged record may be lost; one",
            "that was sent but not acknowledged may be there or not. Deletes stay done.",
        )
        self._client.create_topic(DEPARTURES, key=[f"/{field}" for field in DEPARTURE_FIELDS], expiration="enabled")
        make_view(self._client, DEPARTURES)
        before = snapshot(self._client, FLIGHTS)
        acknowledged = 0
        enough = len(sent) // 4

        def on_ack(ack: Ack) -> None:
            nonlocal acknowledged
            if acknowledged < enough <= acknowledged + ack.records:
                self._server.kill()
            acknowledged += ack.records

        refused_with = "nothing: all was acknowledged before"
        try:
            with self._client.publisher(
                DEPARTURES, ttl="1h", batch_records=200, max_in_flight=64, retry_for=0, on_ack=on_ack
            ) as publisher:
                for flight in sent:
                    publisher.publish(flight.document)
        except SowError as error:
            refused_with = error.reason
        self._client.close()
        code = self._server.wait()
        tell.say(f"of {len(sent):,} records {acknowledged:,} were acknowledged; the publisher was told {refused_with}")
        tell.claim("the server died by SIGKILL", code == -signal.SIGKILL, found=f"code {code}")

        seconds = self._server.start()
        tell.say(f"ready again {seconds:.2f} s after the start of the process")
        self._client = Client(self._address)
        expected = {departure_key(flight) for flight in sent[:acknowledged]}
        allowed = expected | {departure_key(flight) for flight in sent[acknowledged:]}
        _, keys = live_keys(self._client, DEPARTURES)
        tell.claim(
            f"all {len(expected):,} acknowledged records are there, and {len(keys - expected):,} of the others",
            expected <= keys <= allowed,
            found=f"{len(expected - keys):,} are lost, {len(keys - allowed):,} were never sent",
        )
        self._claim_unchanged(before, f"topic {FLIGHTS} is as it was before the kill")
        return sent[acknowledged:]

    # ---- helpers of several steps ----

    def _claim_unchanged(self, before: Snapshot, what: str) -> None:
        """Claims that the live records are those of `before` that have not expired, unchanged."""
        after = snapshot(self._client, FLIGHTS)
        expected = before.live_at(after.as_of_micros)
        changed = [
            key
            for key in expected & set(after.records)
            if _identity(before.records[key]) != _identity(after.records[key])
        ]
        self._narration.claim(
            f"{what}: {len(expected):,} records, with the same flights, versions and expire times",
            set(after.records) == expected and not changed,
            found=f"{len(expected - set(after.records)):,} missing, {len(set(after.records) - expected):,} too many, "
            f"{len(changed):,} changed",
        )

    def _show(self, keys: Sequence[str], found: Iterable[Record]) -> None:
        records = {record.key: record for record in found}
        self._narration.table(
            ("key", "flight", "time left"), [(key, *_look(records.get(key))) for key in keys], right=("time left",)
        )


def haul_of(flight: Flight, lives: Lifetimes) -> Haul:
    """The class of a flight."""
    for haul in lives.hauls:
        if flight.miles < haul.miles_below:
            return haul
    raise AssertionError("the last class is for every distance")


def _may_have_expired(flight: Flight, handed_micros: int, lives: Lifetimes, now_micros: int) -> bool:
    """Its lifetime began when the server applied it, so not before it was handed over."""
    ttl = haul_of(flight, lives).ttl
    seconds = {None: lives.default, f"{lives.short}s": lives.short}.get(ttl)
    return seconds is not None and handed_micros + seconds * MICROS <= now_micros


def _miles(record: Record) -> float:
    document = record.data
    assert isinstance(document, dict), "flights are JSON objects"
    miles: float = document["distance"]
    return miles


def _look(record: Record | None) -> tuple[str, str]:
    if record is None:
        return "–", "gone"
    document = record.data
    assert isinstance(document, dict), "flights are JSON objects"
    day = f"{document['year']}-{document['month']:02}-{document['day']:02}"
    flight = f"{document['origin']} → {document['dest']}, {day}, {document['distance']:,.0f} miles"
    if record.expire_time_micros is None:
        return flight, "never expires"
    return flight, f"{max(0, record.expire_time_micros - _now()) / MICROS:,.1f} s"


def _identity(record: Record) -> tuple[object, ...]:
    return record.payload, record.version, record.expire_time_micros, record.publish_time_micros, record.sequence


def _carrier(key: str) -> str:
    return key.partition("|")[0]


def _now() -> int:
    return time.time_ns() // 1_000


def expiry_lag(metrics_address: str) -> tuple[list[tuple[float, int]], int]:
    """The server's histogram of expiry lags: (upper bound in seconds, records up to it), and all records."""
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=10) as response:
        text: str = response.read().decode()
    for family in text_string_to_metric_families(text):
        if family.name == "sow_expiry_lag_seconds":
            buckets = [
                (float(sample.labels["le"]), int(sample.value))
                for sample in family.samples
                if sample.name.endswith("_bucket")
            ]
            return buckets, buckets[-1][1]
    raise ClaimFailed("the server tells its expiry lag")


def _quantile(buckets: Iterable[tuple[float, int]], count: int, quantile: float) -> float:
    """The bound below which this share of the records lies."""
    return next((bound for bound, cumulative in buckets if cumulative >= quantile * count), float("inf"))
