"""Checks that clients of replicating instances saw only what the rules promise. Pure: a history in, problems out.

    [1]  A record that somebody sees was written: by a write that was not refused, under the version, with the stamp and
         the payload that its acknowledgement told; and one version of a key is one record, wherever it is seen (R2).
    [2]  A follower is told a key in rising (version, origin) (R3, R4), each sequence once, and skips nothing (S5); all
         followers of a journal are told the same under a sequence.
    [3]  A read is not behind the writes and reads that ended at that instance before it began; it shows nothing that
         has expired (L8); the clock does not run backwards (L15).
    [4]  In the end a key is no older than any write that was acknowledged and may not be lost, nor than a record that
         an instance has shown and may not lose. It is absent only if a delete or an expiry that is as new may have
         happened (R3, R4).
    [5]  In the end all instances are equal (R3), and a restart changes nothing.
    [6]  Nothing is dropped as dead unless somebody was away for longer than tombstones are kept, or lost its data (R4).
    [7]  Of a key that is only published to, a publish is applied once, however often it was sent (P6).
    [8]  The consumer of a replicated durable that goes from instance to instance is handed every record that there is
         in the end, unless journals were cut off, or an instance has lost its data (F14).

An acknowledged write may be lost only with the data of the instance that took it, unless it was REPLICATED (P5). One
that was not answered may have happened, at any time from then on until the process ends. Where an answer does not tell
the version, it lies between the versions that its instance gave before it began and after it was answered.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate, chain
from typing import Final, NamedTuple

from tests.robustness.history import NEVER, History, Op, Rank, Read, Row, Seen

CLOCK_SLACK_MICROS: Final = 1_100_000
"""A server that is killed may start so far before its last `now` (L15)."""
SHORT_MICROS: Final = 120_000_000
"""A lifetime below this may have ended within a round."""


class Problem(NamedTuple):
    """Something that is not as it has to be."""

    rule: str
    what: str
    topic: str
    key: str
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule} {self.what}: {self.topic}/{self.key} at {self.where}: {self.text}"


def check(history: History) -> list[Problem]:
    """All that is wrong."""
    known = Known(history)
    checks = (written, followed, reads, finals, equal, drops, once, handed)
    return list(chain.from_iterable(find(known) for find in checks))


class Known:
    """A history, looked up in different ways."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.ops: dict[tuple[str, str], list[Op]] = defaultdict(list)
        for op in history.ops:
            self.ops[op.topic, op.key].append(op)
        self.final_reads = [*history.finals, *history.restarted]
        self.exact: dict[tuple[str, str, Rank], Op] = {
            (op.topic, op.key, Rank(op.version, op.instance)): op
            for op in history.ops
            if op.version and op.kind != "delete"
        }
        """The writes of which the version was told."""
        self._before: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
        self._after: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
        lives: dict[tuple[str, int], list[Op]] = defaultdict(list)
        for op in history.ops:
            if op.outcome == "ok" and op.version and op.once:
                lives[op.instance, op.life].append(op)
        for life, ops in lives.items():
            ended = sorted(ops, key=lambda op: op.end)
            self._before[life] = [op.end for op in ended], list(accumulate([op.version for op in ended], max))
            begun = sorted(ops, key=lambda op: op.begin)
            lowest = list(accumulate([op.version for op in reversed(begun)], min))[::-1]
            self._after[life] = [op.begin for op in begun], lowest

    def lowest(self, op: Op) -> int:
        """The lowest version that a write may have."""
        if op.version:
            return op.version
        ends, highest = self._before.get((op.instance, op.life), ([], []))
        place = bisect_right(ends, op.begin)
        return highest[place - 1] + 1 if place and op.once else 1

    def highest(self, op: Op) -> int:
        """The highest version that a write may have."""
        if op.version:
            return op.version
        over: int | None = op.end
        if op.outcome == "unknown":
            over = min(
                (time for name, time in self.history.deaths if name == op.instance and time >= op.end), default=None
            )
        begins, lowest = self._after.get((op.instance, op.life), ([], []))
        if over is None or not op.once:
            return NEVER
        place = bisect_left(begins, over)
        return lowest[place] - 1 if place < len(begins) else NEVER

    def losable(self, op: Op) -> bool:
        """Whether an acknowledged write may be gone."""
        return op.life < self.history.wipes.get(op.instance, 0) and not op.replicated

    def all_rows(self) -> Iterator[tuple[str, Row]]:
        """Every record that was seen, and where."""
        for seen in self.history.seen:
            yield f"{seen.instance} by {seen.stream}, sequence {seen.sequence}", seen.row
        for read in chain(self.history.reads, self.final_reads):
            for row in read.rows:
                yield f"{read.instance} by a query", row
        for row in self.history.handed:
            yield "the consumer that goes around", row


# -- [1] --------------------------------------------------------------------------------------------------------------


def written(known: Known) -> Iterator[Problem]:
    """Records that nobody wrote, or not so."""
    told: dict[tuple[str, str, Rank], Row] = {}
    for where, row in known.all_rows():
        at = (row.topic, row.key, row.rank)
        if at in told:
            before = told[at]
            if before != row:
                yield _problem("[1]", "two records of one version", row, where, f"{row} and {before}")
            continue
        told[at] = row
        op = known.exact.get(at)
        if op is not None:
            if not _fits(op, row) or (op.expire_known and op.expire != row.expire):
                yield _problem("[1]", "not as acknowledged", row, where, f"{row}, of {op}")
        elif not any(_may_be(known, op, row) for op in known.ops[row.topic, row.key]):
            yield _problem("[1]", "nobody wrote it", row, where, str(row))
        for tag, kinds in ((row.value, ("put", "delta")), (row.delta, ("delta",))):
            wrote = [op for op in known.ops[row.topic, row.key] if tag and op.tag == tag and op.kind in kinds]
            if tag and not any(op.outcome != "refused" for op in wrote):
                yield _problem("[1]", "a payload that nobody wrote" if not wrote else "a write that was refused",
                               row, where, f"{row}, of {wrote}")  # fmt: skip


def _fits(op: Op, row: Row) -> bool:
    if op.kind == "put":
        return (row.value, row.delta) == (op.tag, "")
    return op.kind == "touch" or row.delta == op.tag


def _may_be(known: Known, op: Op, row: Row) -> bool:
    """Whether a write whose version is not known may have made a record."""
    if op.kind == "delete" or op.outcome == "refused" or op.instance != row.origin or not _fits(op, row):
        return False
    if op.version:
        # It was sent once more, to an instance that had lost its memory; or such an instance put it anew, above what
        # it had written before (K7).
        again = op.life > 0 and row.version > op.version and row.expire == op.expire
        return again or not op.once or known.losable(op)
    return known.lowest(op) <= row.version <= known.highest(op)


# -- [2] --------------------------------------------------------------------------------------------------------------


def followed(known: Known) -> Iterator[Problem]:
    """Changes that were told wrongly."""
    history = known.history
    journals: dict[tuple[str, str], dict[int, Seen]] = defaultdict(dict)
    streams: dict[tuple[str, str], list[Seen]] = defaultdict(list)
    for seen in history.seen:
        first = journals[seen.instance, seen.epoch].setdefault(seen.sequence, seen)
        if (first.op, first.row) != (seen.op, seen.row):
            yield _problem("[2]", "one sequence, two changes", seen.row, seen.stream, f"{seen} and {first}")
        streams[seen.stream, seen.epoch].append(seen)
    for changes in streams.values():
        yield from _one_stream(changes)
    for covered in history.covered:
        mine = streams[covered.stream, covered.epoch]
        begins = dict.fromkeys(covered.topics, covered.after)
        if history.pruned:  # of several topics each begins where its own journal does
            opening = {seen.row.topic: seen.sequence - 1 for seen in reversed(mine)}
            begins = {topic: opening.get(topic, covered.upto) for topic in covered.topics}
        handed = {seen.sequence for seen in mine}
        for sequence, seen in journals[covered.instance, covered.epoch].items():
            inside = begins.get(seen.row.topic, covered.upto) < sequence <= covered.upto
            if inside and sequence not in handed:
                yield _problem("[2]", "left out", seen.row, covered.stream, f"{seen}, told to {seen.stream}")


def _one_stream(changes: Iterable[Seen]) -> Iterator[Problem]:
    last = 0
    ranks: dict[tuple[str, str], Seen] = {}
    for seen in changes:
        if seen.sequence <= last:
            if not seen.repeats:
                yield _problem("[2]", "out of order", seen.row, seen.stream, f"{seen} after {last}")
            continue
        last = seen.sequence
        at = (seen.row.topic, seen.row.key)
        before = ranks.get(at)
        ranks[at] = seen
        if before is None:
            continue
        older = seen.row.rank <= before.row.rank if seen.op == "put" else seen.row.rank != before.row.rank
        if older or (seen.op != "put" and before.op != "put"):
            yield _problem("[2]", "older than told before", seen.row, seen.stream, f"{seen} after {before}")


# -- [3] --------------------------------------------------------------------------------------------------------------


def reads(known: Known) -> Iterator[Problem]:
    """Reads that show an expired record."""
    history = known.history
    floors: dict[tuple[str, int, str, str], list[tuple[int, Rank]]] = defaultdict(list)
    for op in history.ops:
        if op.outcome == "ok" and op.version and op.kind != "delete" and op.once:
            at = (op.instance, op.life, op.topic, op.key)
            floors[at].append((op.end, Rank(op.version, op.instance)))
    for read in history.reads:
        for row in read.rows:
            floors[read.instance, read.life, row.topic, row.key].append((read.end, row.rank))
    highest: dict[tuple[str, int, str, str], tuple[list[int], list[Rank]]] = {}
    for at, times in floors.items():
        times.sort()
        highest[at] = [time for time, _ in times], list(accumulate([rank for _, rank in times], max))
    clocks: dict[tuple[str, int], Read] = {}
    for read in sorted(chain(history.reads, known.final_reads), key=lambda read: read.end):
        before = clocks.get((read.instance, read.life))
        if before is not None and read.begin >= before.end and read.as_of < before.as_of - CLOCK_SLACK_MICROS:
            yield Problem("[3]", "the clock ran backwards", "", "", read.instance, f"{read.as_of} after {before.as_of}")
        if before is None or read.as_of > before.as_of:
            clocks[read.instance, read.life] = read
        for row in read.rows:
            if row.topic in history.acting and row.expire <= read.as_of:
                yield _problem("[3]", "shown though expired", row, read.instance, f"{row} at {read.as_of}")
            ends, ranks = highest.get((read.instance, read.life, row.topic, row.key), ([], []))
            place = bisect_right(ends, read.begin)
            if place and row.rank < ranks[place - 1]:
                yield _problem(
                    "[3]", "older than known there before", row, read.instance, f"{row} < {ranks[place - 1]}"
                )


# -- [4] --------------------------------------------------------------------------------------------------------------


class Bound(NamedTuple):
    """The oldest state that a key may have: at least this version, or exactly this rank."""

    version: int
    rank: Rank | None
    removes: bool
    op: Op | None
    why: object

    def exceeds(self, rank: Rank) -> bool:
        """Whether it is newer than a record."""
        return self.rank > rank if self.rank is not None else self.version > rank.version


def finals(known: Known) -> Iterator[Problem]:
    """Keys that are older in the end than they may be."""
    history = known.history
    bounds: dict[tuple[str, str], list[Bound]] = defaultdict(list)
    rows: dict[tuple[str, str], set[Row]] = defaultdict(set)
    for op in history.ops:
        if op.outcome == "ok" and op.effective and not known.losable(op):
            rank = Rank(op.version, op.instance) if op.version else None
            bounds[op.topic, op.key].append(Bound(known.lowest(op), rank, op.kind == "delete", op, op))
    for instance, row in _shown(known):
        rows[row.topic, row.key].add(row)
        if instance not in history.wipes:
            bounds[row.topic, row.key].append(
                Bound(row.version, row.rank, False, None, f"{row} was seen at {instance}")
            )
    for op in history.ops:
        if op.version and op.kind != "delete" and op.outcome == "ok":
            rows[op.topic, op.key].add(Row(op.topic, op.key, op.version, op.instance, op.expire, op.tag, ""))
    drops: dict[tuple[str, str], list[Rank]] = defaultdict(list)
    for drop in history.dropped:
        drops[drop.topic, drop.key].append(Rank(drop.version, drop.origin))
    for read in known.final_reads:
        present = {row.key: row for row in read.rows}
        for (topic, key), required in bounds.items():
            if topic != read.topic:
                continue
            if key in present:
                row = present[key]
                for bound in required:
                    if bound.exceeds(row.rank) or _is_earlier(known, row, bound.op):
                        what = "a delete that did not last" if bound.removes else "an acknowledged write is lost"
                        yield _problem("[4]", what, row, read.instance, f"{row}, though {bound.why}")
                        break
                continue
            puts = [bound for bound in required if not bound.removes]
            if not puts:
                continue
            newest = max(puts, key=lambda bound: bound.version)
            if not (
                any(_removes(known, op, newest) for op in known.ops[topic, key])
                or (topic in history.acting and _expired(known, newest, rows[topic, key], topic, key))
                or any(not newest.exceeds(rank) for rank in drops[topic, key])
            ):
                yield Problem("[4]", "gone", topic, key, read.instance, f"though {newest.why}")


def _is_earlier(known: Known, row: Row, op: Op | None) -> bool:
    """Whether a record is of an earlier life of the instance that took a write: so it is older, by K7."""
    wrote = known.exact.get((row.topic, row.key, row.rank))
    return wrote is not None and op is not None and wrote.instance == op.instance and wrote.life < op.life


def _shown(known: Known) -> Iterator[tuple[str, Row]]:
    for seen in known.history.seen:
        yield seen.instance, seen.row
    for read in chain(known.history.reads, known.final_reads):
        for row in read.rows:
            yield read.instance, row


def _removes(known: Known, op: Op, newest: Bound) -> bool:
    if op.kind != "delete" or op.outcome == "refused" or not op.effective:
        return False
    return known.highest(op) >= newest.version


def _expired(known: Known, newest: Bound, rows: Iterable[Row], topic: str, key: str) -> bool:
    # By the clock of any instance: who gets it after another one has expired it gets its end.
    now = max(other.as_of for other in known.final_reads)
    if any(row.expire <= now and not newest.exceeds(row.rank) for row in rows):
        return True
    return any(
        op.ttl is not None
        and op.ttl < SHORT_MICROS
        and not (op.version and op.expire_known)
        and op.outcome != "refused"
        and known.highest(op) >= newest.version
        for op in known.ops[topic, key]
    )


# -- [5] --------------------------------------------------------------------------------------------------------------


def equal(known: Known) -> Iterator[Problem]:
    """Instances that differ in the end."""
    for several in (known.history.finals, known.history.restarted):
        yield from _equal(known, several, "differ")
    for topic in {read.topic for read in known.history.finals}:
        for instance in {read.instance for read in known.history.finals}:
            pair = [read for read in known.final_reads if (read.topic, read.instance) == (topic, instance)]
            yield from _equal(known, [replace(read, instance=f"{instance} {n}") for n, read in enumerate(pair)],
                              "changed by a restart")  # fmt: skip


def _equal(known: Known, several: list[Read], what: str) -> Iterator[Problem]:
    for topic in sorted({read.topic for read in several}):
        of_topic = [read for read in several if read.topic == topic]
        due = max(read.as_of for read in of_topic) if topic in known.history.acting else 0
        states = {read.instance: {row.key: row for row in read.rows if row.expire > due} for read in of_topic}
        for key in sorted(set(chain.from_iterable(states.values()))):
            held = {name: state.get(key) for name, state in states.items()}
            if len(set(held.values())) > 1:
                yield Problem("[5]", what, topic, key, ", ".join(held), f"{held}")


# -- [6], [7], [8] ----------------------------------------------------------------------------------------------------


def drops(known: Known) -> Iterator[Problem]:
    """Records that were dropped without a reason."""
    if not known.history.drops_allowed:
        for drop in known.history.dropped:
            yield Problem("[6]", "dropped", drop.topic, drop.key, drop.instance, str(drop))


def once(known: Known) -> Iterator[Problem]:
    """Publishes that were applied twice."""
    ranks: dict[tuple[str, str, str], set[Rank]] = defaultdict(set)
    for _, row in known.all_rows():
        ranks[row.topic, row.key, row.value].add(row.rank)
    for (topic, key, tag), found in ranks.items():
        ops = known.ops[topic, key]
        if len(found) > 1 and all(
            op.kind in ("put", "delete") and op.instance not in known.history.wipes for op in ops
        ):
            yield Problem("[7]", "applied twice", topic, key, ops[0].instance, f"{tag} as {sorted(found)}")


def handed(known: Known) -> Iterator[Problem]:
    """Records that the consumer of the replicated durable was not handed."""
    history = known.history
    if not history.roams or history.pruned or history.wipes:
        return
    ranks = {(row.topic, row.key, row.rank) for row in history.handed}
    for read in history.finals:
        for row in read.rows:
            if row.topic in history.acting and (row.topic, row.key, row.rank) not in ranks:
                yield _problem("[8]", "never handed over", row, read.instance, str(row))


def _problem(rule: str, what: str, row: Row, where: str, text: str) -> Problem:
    return Problem(rule, what, row.topic, row.key, where, text)
